"""The interface of a vocabulary of subwords, whatever its files are."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class SubwordVocabulary(Protocol):
    """A vocabulary with its way from text to ids and back; it puts nothing around a line."""

    size: int
    """One above the largest id."""

    def encode(self, line: str) -> list[int]:
        """Return the ids of a line."""
        ...

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """Return :meth:`encode` of each line."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        ...

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text, or None."""
        ...

    def tokens(self) -> dict[int, str]:
        """Return the text of every token by its id."""
        ...

    def names(self) -> list[str]:
        """List the tokens that may be languages, by their text."""
        ...


# The replacements of transformers' ``clean_up_tokenization``, in its order
_CLEANED = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")] + [
    (f" {end}", end) for end in "n't 'm 's 've 're".split()
]


def cleaned_up(text: str) -> str:
    """Return text without the spaces before punctuation, as transformers' ``clean_up_tokenization``
    does.
    """
    for pattern, replacement in _CLEANED:
        text = text.replace(pattern, replacement)
    return text
