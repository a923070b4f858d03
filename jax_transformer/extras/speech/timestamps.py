"""Whisper's tokens of time: the rules of a search, and the phrases that they separate.

Facts from ``WhisperTimeStampLogitsProcessor`` (``generation/logits_process.py``) and
``_retrieve_segment`` (``generation_whisper.py``) of transformers 5.23.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.extras.speech import sound

_FRAMES_PER_SECOND = sound.SAMPLE_RATE // sound.HOP
_FRAMES_PER_TIME = 2  # a token of time counts positions of the encoder


@dataclass(frozen=True)
class TimestampRules:
    """Rules for the tokens of time that Whisper writes around its phrases: a logits processor.

    Times come in pairs, the end of a phrase and the start of the next, and never go back; a text
    begins with one; and if all times together are likelier than any other token, it is a time.
    """

    first: int
    """Id of ``<|0.00|>``; all after it are times. ``<|notimestamps|>``, before it, is forbidden."""
    max_initial: int | None = None
    """The latest time that a text may begin with, counted from the first one; None is any."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first time."""
        return (self.first,)

    def __call__(
        self,
        scores: Float[Array, "b k v"],
        tokens: Int[Array, "b k n"],
        step: Int[Array, ""],
        eos_id: int,
    ) -> Float[Array, "b k v"]:
        """Return the scores of the tokens at position ``step``, -inf for those that break a rule.

        ``tokens`` are the generated ones before the position; whatever follows them is ignored.
        """
        ids = jnp.arange(scores.shape[2], dtype=jnp.int32)[None, None]
        is_time = ids >= self.first
        forbidden = (ids == self.first - 1) | _unpaired(ids, tokens, step, self.first, eos_id)
        initial = ~is_time
        if self.max_initial is not None:
            initial |= ids > self.first + self.max_initial
        forbidden |= initial & (step == 0)
        scores = jnp.where(forbidden, -jnp.inf, scores)
        log_probs = jax.nn.log_softmax(scores)
        all_times = jax.nn.logsumexp(log_probs, axis=2, keepdims=True, where=is_time)
        best_other = jnp.where(is_time, -jnp.inf, log_probs).max(axis=2, keepdims=True)
        return jnp.where(~is_time & (all_times > best_other), -jnp.inf, scores)


def _unpaired(
    ids: Int[Array, "1 1 v"],
    tokens: Int[Array, "b k n"],
    step: Int[Array, ""],
    first: int,
    eos_id: int,
) -> Bool[Array, "b k v"]:
    """Return True for tokens that would break a pair of times, or go back in time."""
    positions = jnp.arange(tokens.shape[2], dtype=jnp.int32)[None, None]
    was_time = (tokens >= first) & (positions < step)
    one_ago, two_ago = (_at(was_time, step - back) for back in (1, 2))
    two_ago |= step < 2
    is_time = ids >= first
    after_pair = is_time & one_ago & two_ago
    within_pair = (ids < eos_id) & one_ago & ~two_ago
    last = _at(tokens, jnp.where(was_time, positions, -1).max(axis=2, keepdims=True))
    # A pair may be twice the same time, but no phrase ends when it starts
    earliest = jnp.where(one_ago & ~two_ago, last, last + 1)
    back = is_time & was_time.any(axis=2, keepdims=True) & (ids < earliest)
    return after_pair | within_pair | back


def _at(values: Array, position: Int[Array, "..."]) -> Array:
    """Return the values at one position of each hypothesis; arbitrary (zero) before the first."""
    index = jnp.broadcast_to(jnp.maximum(position, 0), (*values.shape[:2], 1))
    there = jnp.take_along_axis(values, index, axis=2)
    return jnp.where(position >= 0, there, jnp.zeros((), values.dtype))


class Phrase(NamedTuple):
    """The tokens of a phrase, and its start and end in seconds."""

    times: tuple[float, float]
    tokens: list[int]


def split(tokens: list[int], first: int | None, seek: int, frames: int) -> tuple[list[Phrase], int]:
    """Return the phrases of a window's tokens, and the frames from this window to the next.

    ``first`` is the first token of time (None: there are none), ``seek`` the window's first frame
    and ``frames`` the number of them that are sound. Facts from ``_retrieve_segment``: two times
    next to each other separate phrases, and the next window begins at the last of them, unless the
    text ends with a single time, after which nothing is said.
    """

    def seconds(times: int) -> float:
        return (seek + times * _FRAMES_PER_TIME) / _FRAMES_PER_SECOND

    is_time = [first is not None and token >= first for token in tokens]
    cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    if not cuts or first is None:
        last = frames // _FRAMES_PER_TIME
        times = [token for token, time in zip(tokens, is_time, strict=True) if time]
        if first is not None and times and times[-1] != first:
            last = times[-1] - first
        return [Phrase((seconds(0), seconds(last)), tokens)], frames
    ends_alone = is_time[-2:] == [False, True]
    parts = list(zip([0, *cuts], [*cuts, len(tokens)], strict=False))
    if not ends_alone:  # what follows the last pair is said again in the next window
        parts = parts[:-1]
    phrases = [
        Phrase((seconds(tokens[a] - first), seconds(tokens[b - 1] - first)), tokens[a:b])
        for a, b in parts
    ]
    if ends_alone:
        return phrases, frames
    phrases[-1].tokens.append(tokens[cuts[-1]])
    moved = (tokens[cuts[-1] - 1] - first) * _FRAMES_PER_TIME
    return phrases, moved or frames  # transformers reads the same window for ever
