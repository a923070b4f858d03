"""Numbered cases that try to break a promise of the documentation; see README.md."""
