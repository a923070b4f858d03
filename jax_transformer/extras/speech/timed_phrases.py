"""The phrases in the tokens of a window of sound, separated by tokens of time.

Facts from ``_retrieve_segment`` of ``generation_whisper.py`` of transformers 5.23.
"""

from typing import NamedTuple

from jax_transformer.extras.speech import log_mel

_FRAMES_PER_SECOND = log_mel.SAMPLE_RATE // log_mel.HOP
_FRAMES_PER_TIME = 2  # a token of time counts positions of the encoder


class Phrase(NamedTuple):
    """The tokens of a phrase, and its start and end in seconds."""

    times: tuple[float, float]
    tokens: list[int]


def split(tokens: list[int], first: int | None, seek: int, frames: int) -> tuple[list[Phrase], int]:
    """The phrases of a window's tokens, and the frames from this window to the next.

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
