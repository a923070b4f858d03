"""Folders that other programs run."""
