"""Tests of both frameworks together.

``cases.py`` is the table: an architecture is one line of it. ``unit`` has the tests that need only
JAX.
"""
