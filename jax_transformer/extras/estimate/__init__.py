"""Memory and time of a training step on accelerators that are not there."""
