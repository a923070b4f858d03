"""Faults seeded one at a time: a test must notice each, and the comparison must name its module."""
