"""PyTorch twins of the architectures of jax_transformer: the reference for its numbers."""
