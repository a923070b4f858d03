"""Models of Marian."""
