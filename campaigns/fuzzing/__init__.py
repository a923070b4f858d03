"""Inputs to every reader of files from somebody else, guided by coverage."""
