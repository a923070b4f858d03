"""How translations are made: frozen values, checked, that the loops of ``generate`` are compiled for. Standard library only.

The names in :class:`Rules` are those of transformers' ``GenerationConfig``, which is where they come from; what each does is in
``generation/logits_process.py`` of transformers 5.23, and ``generate/constraints.py`` is that here.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_transformer.errors import ConfigError


class LengthPenalty(enum.StrEnum):
    """What a hypothesis's log-probability is divided by, and with it the rest of the beam search that it belongs to."""

    GNMT = "gnmt"
    """((5 + length) / 6) ** length_penalty (Wu et al. 2016, section 7); nothing better within the beam is missed."""
    AVERAGE = "average"
    """length ** length_penalty; what ends, and when the search does, is as in transformers' ``generate``."""


class EarlyStopping(enum.StrEnum):
    """When transformers' beam search leaves a row."""

    HEURISTIC = "heuristic"
    """``False`` there: when the best unfinished hypothesis, at the length that it has, is no better than the worst finished one."""
    FULL = "full"
    """``True`` there: as soon as so many have ended as there are beams."""
    NEVER = "never"
    """As HEURISTIC, at the greatest length that there is room for."""


@dataclass(frozen=True)
class Constraints:
    """What may not be said, and what must be; the defaults are no rules. ``eos`` is the end token; lengths do not count the start token."""

    repetition_penalty: float = 1.0
    """A token that has been, the start token too, has its score times this, or divided by it where the score is above 0."""
    no_repeat_ngram_size: int = 0
    """No n tokens come twice, the start token among them; 0 is no such rule."""
    encoder_no_repeat_ngram_size: int = 0
    """No n tokens of the source, its padding among them, come again; 0 is no such rule."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences that are never said; the end token alone is not one."""
    min_new_tokens: int = 0
    """The end comes behind at least so many tokens."""
    forced_eos_token_ids: tuple[int, ...] = ()
    """Where the room ends, one of these is the last token."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that are never said."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Tokens that are not said first, or second where the first is given."""
    renormalize_logits: bool = False
    """Whether what is left is made to sum to probability 1 again, before a beam search adds it up."""

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} must be above 0 and finite"
            )
        for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_new_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        if not all(self.bad_words_ids):
            raise ConfigError("bad_words_ids has a sequence of no tokens")

    @property
    def tokens(self) -> dict[str, tuple[int, ...]]:
        """All tokens that the rules name, by the rules' names."""
        return {
            "bad_words_ids": tuple(token for word in self.bad_words_ids for token in word),
            "forced_eos_token_id": self.forced_eos_token_ids,
            "suppress_tokens": self.suppress_tokens,
            "begin_suppress_tokens": self.begin_suppress_tokens,
        }


@dataclass(frozen=True)
class GenerationConfig:
    """How translations are made: greedily, by beam search, or by drawing tokens."""

    beam: int = 1
    """Hypotheses kept by beam search; 1 is greedy."""
    length_penalty: float = 0.6
    """Exponent of beam search's length penalty."""
    n_best: int = 0
    """How many hypotheses of the beam to give, with their scores; 0 is the best alone."""
    max_length: int | None = None
    """The most tokens of a translation; None is twice what its source is padded to, within what the model can."""
    sample: bool = False
    """Whether to draw each token instead of searching."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    """As of :func:`jax_transformer.generate.sample`."""
    seed: int = 0
    """Decides the draws, together with the number of the line."""
    penalty: LengthPenalty = LengthPenalty.GNMT
    """Which beam search: ours, or transformers'."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    """Of transformers' beam search alone."""
    rules: Constraints = Constraints()
    """What may not be said, and what must be."""
    forced_bos_token_id: int | None = None
    """The first token of every translation, as the language of NLLB's; None leaves it to the model."""
    bos_id: int | None = None
    """What the decoder starts from; the model's own where None."""
    eos_id: int | None = None
    """The token that ends; the model's own where None."""

    def __post_init__(self) -> None:
        if self.sample and self.beam != 1:
            raise ConfigError(
                f"sample and beam={self.beam} exclude each other: one draws tokens, the other searches"
            )
        if self.n_best < 0:
            raise ConfigError(f"n_best={self.n_best} must not be negative")
        if self.n_best and (self.beam == 1 or self.n_best > self.beam):
            raise ConfigError(
                f"n_best={self.n_best} needs a beam of at least {max(2, self.n_best)}, not beam={self.beam}"
            )
        for name, unused in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("seed", 0)):
            if not self.sample and getattr(self, name) != unused:
                raise ConfigError(f"{name}={getattr(self, name)} means nothing without sample")
        if (
            self.penalty is LengthPenalty.GNMT
            and self.early_stopping is not EarlyStopping.HEURISTIC
        ):
            raise ConfigError(
                f"early_stopping={self.early_stopping} is of the search with penalty=average alone"
            )

    def overridden(self, options: Mapping[str, Any]) -> "GenerationConfig":
        """With what is given, which is what is not None, in the place of its own. Searching and drawing exclude each other, so that either
        given puts the other out."""
        given = {name: value for name, value in options.items() if value is not None}
        rules = {name: given.pop(name) for name in list(given) if name in _RULES}
        base = self
        if given.get("sample"):
            base = dataclasses.replace(base, beam=1, n_best=0)
        elif "beam" in given and base.sample:
            base = dataclasses.replace(
                base, sample=False, temperature=1.0, top_k=0, top_p=1.0, seed=0
            )
        if given.get("penalty") is LengthPenalty.GNMT and "early_stopping" not in given:
            base = dataclasses.replace(
                base, penalty=LengthPenalty.GNMT, early_stopping=EarlyStopping.HEURISTIC
            )
        if given.get("beam") == 1 and "n_best" not in given:
            given["n_best"] = 0
        return dataclasses.replace(base, **given, rules=dataclasses.replace(base.rules, **rules))


_RULES = {field.name for field in dataclasses.fields(Constraints)}
