"""Checkpoints of other toolkits."""
