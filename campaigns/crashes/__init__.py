"""Recorded commands: a kill, or a loss of power, at every moment of each."""
