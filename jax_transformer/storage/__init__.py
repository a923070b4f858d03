"""Everything that is read from or written to disk: formats of weights, checkpoints, run folders,
Hugging Face folders. Loads no jax.
"""
