"""Damages to the files of a run, each of which the command that reads it must name."""
