"""Names of presets that tests run on."""

import jax_transformer as jt
from parity_tests.marks import quick_if

TEXT = [name for name in jt.preset_names() if jt.preset(name).mel_bins is None]
"""Presets of models that read text."""
ALL = [*TEXT, "whisper_tiny"]
"""All presets; one size of Whisper stands for the others, which share every line of code."""


_DIFFERENT = "blog2023 deep_dive longt5 m2m_100 part2_encoder t5".split()


def different_quick(names: list[str]) -> list:
    """The names as parameters of a test that all but the most different presets pass alike."""
    return [quick_if(name in _DIFFERENT, name) for name in names]
