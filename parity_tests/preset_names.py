"""Names of presets that tests run on."""

import jax_transformer as jt
from parity_tests.marks import quick_if

TEXT = [name for name in jt.preset_names() if jt.preset(name).mel_bins is None]
"""Presets of models that read text."""
ALL = [*TEXT, "whisper_tiny"]
"""All presets; one size of Whisper stands for the others, which share every line of code."""
_AS_BART = ("blenderbot", "blenderbot-small", "mbart", "pegasus", "plbart")


def repeated_slow(names: list[str]) -> list:
    """The names as parameters of a test to which a repaired document, or another family of BART's
    parts, adds nothing but time.
    """
    return [
        quick_if(not name.endswith("_repaired") and name not in _AS_BART, name) for name in names
    ]
