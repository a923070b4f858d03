"""Settings of generation: frozen values that check themselves. Standard library only.

Fields have the names of transformers' ``GenerationConfig`` where they mean the same; ``ALIASES``
has the shorter names of the command line and of :class:`jax_transformer.Translator`. One thing is
counted otherwise: lengths here never include the start token.
"""

import dataclasses
import enum
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jax_transformer.errors import ConfigError, check_numbers, nearest

if TYPE_CHECKING:
    from jax_transformer.config import TransformerConfig


class BeamScorer(enum.StrEnum):
    """The score of a finished hypothesis, and the rules by which a beam search ends."""

    GNMT = "gnmt"
    """log-probability / ((5 + length) / 6) ** length_penalty (Wu et al. 2016, section 7).

    A search ends if no hypothesis in the beam can become better than the finished ones.
    """
    AVERAGE = "average"
    """log-probability / length ** length_penalty, with the rules of transformers' ``generate``."""


class EarlyStopping(enum.StrEnum):
    """The condition on which a beam search with :attr:`BeamScorer.AVERAGE` ends for a row."""

    HEURISTIC = "heuristic"
    """``False`` in transformers: the best unfinished hypothesis is no better than the worst
    finished one, if scored at its current length.
    """
    FULL = "full"
    """``True`` in transformers: ``num_beams`` hypotheses are finished."""
    NEVER = "never"
    """``"never"`` in transformers: the same, scored at the greatest length if that is better."""

    @classmethod
    def _missing_(cls, value: object) -> "EarlyStopping | None":
        return (cls.FULL if value else cls.HEURISTIC) if isinstance(value, bool) else None


@runtime_checkable
class LogitsProcessor(Protocol):
    """A constraint from outside: a frozen value, for which a program is compiled once."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids that it names, which must be in the vocabulary."""

    def __call__(self, scores: Any, tokens: Any, step: Any, eos_id: int) -> Any:
        """Return the scores (b, k, v) of the tokens at position ``step``, -inf for forbidden ones.

        ``tokens`` (b, k, n) are the generated ones before the position; whatever follows them must
        be ignored.
        """


@dataclass(frozen=True)
class Constraints:
    """Logits processors: tokens that are forbidden, forced or penalised; by default none."""

    repetition_penalty: float = 1.0
    """Penalise tokens that were already generated, and the start token (> 1).

    Scores above 0 are divided by this, others are multiplied.
    """
    no_repeat_ngram_size: int = 0
    """Forbid repeated n-grams of this size (0: off)."""
    encoder_no_repeat_ngram_size: int = 0
    """Forbid n-grams of this size that occur in the source (0: off)."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Forbid these sequences of tokens. The end token as a sequence of its own is ignored."""
    min_new_tokens: int = 0
    """Forbid the end token before this many tokens."""
    forced_eos_token_ids: tuple[int, ...] = ()
    """Force one of these tokens at the last position."""
    suppress_tokens: tuple[int, ...] = ()
    """Forbid these tokens."""
    begin_suppress_tokens: tuple[int, ...] = ()
    """Forbid these tokens at the first position, or at the second if the first is forced."""
    processors: tuple[LogitsProcessor, ...] = ()
    """Apply these after all other constraints."""
    renormalize_logits: bool = False
    """Normalise the scores again after all other constraints, before a beam search adds them up."""

    def __post_init__(self) -> None:
        check = partial(check_numbers, self, "")
        check("repetition_penalty", "be above 0 and finite", lambda x: 0 < x < math.inf)
        counts = "no_repeat_ngram_size encoder_no_repeat_ngram_size min_new_tokens"
        check(counts, "not be negative", lambda x: x >= 0)
        if not all(self.bad_words_ids):
            raise ConfigError("bad_words_ids has an empty sequence of tokens")

    @property
    def tokens(self) -> list[tuple[str, tuple[int, ...]]]:
        """All token ids that the constraints name, each with the name of its constraint."""
        return [
            ("bad_words_ids", tuple(itertools.chain(*self.bad_words_ids))),
            ("forced_eos_token_id", self.forced_eos_token_ids),
            ("suppress_tokens", self.suppress_tokens),
            ("begin_suppress_tokens", self.begin_suppress_tokens),
            *((type(each).__name__, each.tokens) for each in self.processors),
        ]


@dataclass(frozen=True)
class GenerationConfig:
    """Settings of generation: greedy, beam search, or sampling."""

    num_beams: int = 1
    """Number of beams; 1 is greedy decoding."""
    length_penalty: float = 0.6
    """Exponent of the length in a beam search's score."""
    num_return_sequences: int = 1
    """Number of hypotheses to return for each line, at most ``num_beams``."""
    max_new_tokens: int | None = None
    """Maximum number of generated tokens (None: twice the padded source, or the model's maximum if
    that is less or the source is sound).
    """
    do_sample: bool = False
    """Sample each token instead of searching for the most likely ones."""
    temperature: float = 1.0
    """Divide the logits by this before sampling; below 1 prefers likely tokens."""
    top_k: int = 0
    """Sample from this many most likely tokens (0: all)."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens that together have this probability."""
    seed: int = 0
    """Seed of sampling; a line's draws depend on this and on its number."""
    beam_scorer: BeamScorer = BeamScorer.GNMT
    """Score and stopping rules of beam search: our own, or transformers' own."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    """Condition on which a search with the scorer ``average`` ends; transformers' False, True and
    "never" are taken too.
    """
    constraints: Constraints = Constraints()
    """Tokens that are forbidden, forced or penalised."""
    forced_bos_token_id: int | None = None
    """Force this token at the first position, such as the target language in NLLB."""
    decoder_start_token_id: int | None = None
    """The decoder's first input; None is the model's ``bos_id``."""
    eos_token_id: int | None = None
    """The token that ends a translation; None is the model's ``eos_id``."""

    def __post_init__(self) -> None:
        for name, kind in (("beam_scorer", BeamScorer), ("early_stopping", EarlyStopping)):
            try:
                object.__setattr__(self, name, kind(getattr(self, name)))
            except ValueError as error:
                raise ConfigError(f"{name}: {error}; known: {', '.join(kind)}") from None
        check_numbers(self, "", "num_beams", "be at least 1", lambda x: x >= 1)
        if self.do_sample and self.num_beams != 1:
            both = f"do_sample and num_beams={self.num_beams} exclude each other"
            raise ConfigError(f"{both}: choose sampling or beam search")
        check_numbers(self, "", "num_return_sequences", "be at least 1", lambda x: x >= 1)
        if (count := self.num_return_sequences) > self.num_beams:
            needs = f"needs num_beams of at least {count}, not {self.num_beams}"
            raise ConfigError(f"num_return_sequences={count} {needs}")
        for name, neutral in _SAMPLING.items():
            if not self.do_sample and getattr(self, name) != neutral:
                raise ConfigError(f"{name}={getattr(self, name)} has no effect without do_sample")
        stops = self.early_stopping is not EarlyStopping.HEURISTIC
        if stops and self.beam_scorer is not BeamScorer.AVERAGE:
            needs = f"needs beam_scorer=average, not {self.beam_scorer}"
            raise ConfigError(f"early_stopping={self.early_stopping} {needs}")

    def start_and_end(self, model: "TransformerConfig") -> tuple[int, int]:
        """Return the decoder's first input and the token that ends a translation."""
        start, end = self.decoder_start_token_id, self.eos_token_id
        return model.bos_id if start is None else start, model.eos_id if end is None else end

    def overridden(self, options: Mapping[str, Any]) -> "GenerationConfig":
        """Return the config with the ``options`` that are not None; ``OPTIONS`` has their names.

        Searching and sampling exclude each other: an option for one of them switches the other off.
        Raises ConfigError for an unknown name and for values that exclude each other.
        """
        changes = canonical(options)
        constraints = {name: changes.pop(name) for name in _CONSTRAINTS & changes.keys()}
        constraints_before = changes.get("constraints", self.constraints)
        base = self
        if changes.get("do_sample"):
            base = dataclasses.replace(base, num_beams=1, num_return_sequences=1)
        elif "num_beams" in changes:
            base = dataclasses.replace(base, do_sample=False, **_SAMPLING)
        if changes.get("beam_scorer") == BeamScorer.GNMT and "early_stopping" not in changes:
            changes["early_stopping"] = EarlyStopping.HEURISTIC
        if changes.get("num_beams") == 1 and "num_return_sequences" not in changes:
            changes["num_return_sequences"] = 1
        changes["constraints"] = dataclasses.replace(constraints_before, **constraints)
        return dataclasses.replace(base, **changes)


ALIASES = {
    "beam": "num_beams",
    "beam_size": "num_beams",
    "n_best": "num_return_sequences",
    "num_hypotheses": "num_return_sequences",
    "max_length": "max_new_tokens",
    "sample": "do_sample",
    "penalty": "beam_scorer",
    "scorer": "beam_scorer",
    "bos_id": "decoder_start_token_id",
    "eos_id": "eos_token_id",
}
"""Other names of the fields: the command line's flags, and older names of Python's keywords."""

_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0}
_CONSTRAINTS = {field.name for field in dataclasses.fields(Constraints)} - {"processors"}
_FIELDS = {field.name for field in dataclasses.fields(GenerationConfig)}
OPTIONS = _FIELDS | _CONSTRAINTS | ALIASES.keys()
"""Every name that :meth:`GenerationConfig.overridden` takes."""


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None, by the names of the fields.

    ``n_best=0``, "only the best", is one hypothesis. Raises ConfigError for unknown names and for a
    field that is named twice.
    """
    changes: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise ConfigError(f"unknown generation option {name!r}{nearest(name, sorted(OPTIONS))}")
        if value is None:
            continue
        field = ALIASES.get(name, name)
        if field in changes:
            raise ConfigError(f"{name}={value}: {field} is given twice, under two names")
        changes[field] = 1 if name == "n_best" and value == 0 else value
    return changes
