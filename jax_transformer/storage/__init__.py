"""Every byte on disk: formats of weights, checkpoints, run folders, Hugging Face folders. Loads no
jax.
"""
