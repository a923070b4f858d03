"""``python -m jax_transformer``."""

from jax_transformer.cli import process

process()
