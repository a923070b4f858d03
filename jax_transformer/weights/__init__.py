"""Rules that carry weights between the names of PyTorch and of Flax."""
