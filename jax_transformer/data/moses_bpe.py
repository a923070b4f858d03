"""Byte-pair encoding of Moses' tokens, as transformers' FSMT does it.

Text is normalised and tokenised by sacremoses, a port of Moses' scripts (Koehn et al. 2007); a
word's last symbol ends with ``</w>``, in pieces too. Facts from ``tokenization_fsmt.py`` of
transformers 5.23 and Moses' ``replace-unicode-punctuation.perl``.
"""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_transformer.data import word_bpe
from jax_transformer.errors import ConfigError

_PUNCTUATION = str.maketrans(
    dict(zip("，、”“∶：？《》）！（；」「～’━〈〉【】％", ',,""::?"")!(;""~\'-<>[]%', strict=True))
    | dict(zip("０１２３４５６７８９", "0123456789", strict=True))
    | {"…": "..."}
)
_FULL_STOPS = re.compile(r"[。．]\s*")


class MosesBpe:
    """Text of a language to pieces and back by the merges of a ``merges.txt``; a
    :class:`.PieceModel`.
    """

    def __init__(
        self, moses: Any, merges: Sequence[tuple[str, str]], lang: str, *, lowers: bool
    ) -> None:
        """``moses`` is the module sacremoses; ``lowers`` writes text in lower case first."""
        self._normalizer = moses.MosesPunctNormalizer(lang=lang)
        self._tokenizer = moses.MosesTokenizer(lang=lang)
        self._detokenizer = moses.MosesDetokenizer(lang=lang)
        self._lowers = lowers
        self._bpe = word_bpe.Merges(merges)

    def cut(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        text = text.lower() if self._lowers else text
        text = _FULL_STOPS.sub(". ", text).translate(_PUNCTUATION)
        text = self._normalizer.normalize(text)
        text = "".join(char for char in text if not unicodedata.category(char).startswith("C"))
        words = self._tokenizer.tokenize(text, aggressive_dash_splits=True, escape=True)
        return [piece for word in words if word for piece in self._bpe(word)]

    def join(self, pieces: Sequence[str]) -> str:
        """Return the text of pieces."""
        text = "".join(piece.replace(" ", "").replace(word_bpe.END, " ") for piece in pieces)
        return self._detokenizer.detokenize(text.split())


def load_sacremoses(path: Path) -> Any:
    """Return the module sacremoses.

    Raises ConfigError, which names the file that needs it, if it is not installed.
    """
    try:
        import sacremoses
    except ImportError:
        raise ConfigError(
            f"{path}: needs sacremoses: pip install 'jax-seq2seq[sacremoses]'"
        ) from None
    return sacremoses
