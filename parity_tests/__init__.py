"""Where the frameworks meet.

``cases.py`` is the table: an architecture is one line of it. ``unit`` holds the tests that need JAX
alone.
"""
