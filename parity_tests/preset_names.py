"""Names of presets that tests run on."""

import jax_transformer as jt

TEXT = [name for name in jt.preset_names() if jt.preset(name).mel_bins is None]
"""Presets of models that read text."""
ALL = [*TEXT, "whisper_tiny"]
"""All presets; one size of Whisper stands for the others, which share every line of code."""
