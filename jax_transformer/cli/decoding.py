"""Options of decoding that ``translate`` and ``evaluate`` share. Standard library only."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jax_transformer.generate.generation_config import BeamScorer, EarlyStopping


@dataclass(frozen=True)
class SearchOptions:
    """Options of the search. A Hugging Face folder brings defaults of its own."""

    max_length: int | None = None
    """Longest translation, in tokens (default: twice the padded source)."""
    beam: int | None = None
    """Beam size; 1 is greedy (default: 1)."""
    length_penalty: float | None = None
    """Exponent of the length penalty (default: 0.6)."""
    penalty: BeamScorer | None = None
    """Divisor of a score: gnmt ((5 + length) / 6) ** exponent, or average, length ** exponent."""
    early_stopping: EarlyStopping | None = None
    """End of the average search, as False, True, "never" in transformers (default: heuristic)."""
    no_repeat_ngram_size: int | None = None
    """Forbid repeated n-grams of this size (0: off)."""
    repetition_penalty: float | None = None
    """Penalise tokens that were already generated (> 1)."""
    min_new_tokens: int | None = None
    """Fewest tokens before the end token."""


@dataclass(frozen=True)
class SamplingOptions:
    """Options of drawing tokens at random instead of searching."""

    sample: bool = False
    """Draw tokens at random instead of searching."""
    temperature: float | None = None
    """Divide logits by this before drawing (default: 1)."""
    top_k: int | None = None
    """Draw from the k most likely tokens; 0 draws from all (default: 0)."""
    top_p: float | None = None
    """Draw from the most likely tokens whose probabilities sum to this (default: 1)."""
    seed: int | None = None
    """Seed of the draws (default: 0)."""


def overrides(*groups: SearchOptions | SamplingOptions) -> dict[str, Any]:
    """Return the decoding options by their field names, None for each that the user left out."""
    options = {
        field.name: getattr(group, field.name)
        for group in groups
        for field in dataclasses.fields(group)
    }
    # --sample is a flag: its absence keeps the default of the model's folder
    return {name: None if value is False else value for name, value in options.items()}
