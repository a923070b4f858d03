"""Plain PyTorch twins of the architectures that jax_transformer knows: the reference that its numbers are held to."""
