"""The tokenizer of a run folder: one file, a file for each side, or the files of a Hugging Face
folder.
"""

import json
from pathlib import Path

from jax_transformer.data import huggingface_tokenizer
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, huggingface_folder, untrusted
from jax_transformer.storage.run_files import LANGUAGES_FILE, SHARED_FILE, SIDE_FILES
from jax_transformer.storage.untrusted import shown

_VOCABULARY_FILES = (
    "tokenizer.json",
    "source.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab-src.json",
)


def in_folder(path: str | Path) -> bool:
    """True if a run folder holds a tokenizer, or at least one of two."""
    own = any((Path(path) / name).exists() for name in (SHARED_FILE, *SIDE_FILES))
    return own or _has_huggingface(Path(path))


def load_folder(path: str | Path) -> Tokenizer | TokenizerPair:
    """Return the tokenizer that a run folder holds, or its two.

    Raises InputError that names a missing file.
    """
    folder = Path(path)
    sides = [name for name in SIDE_FILES if (folder / name).exists()]
    if (folder / SHARED_FILE).exists():
        if sides:
            raise InputError(
                f"{folder}: holds {SHARED_FILE} and {sides[0]}; both sides share a vocabulary or"
                " each has its own"
            )
        return Tokenizer.load(folder / SHARED_FILE)
    if sides:
        return TokenizerPair(*(Tokenizer.load(folder / name) for name in SIDE_FILES))
    if _has_huggingface(folder):
        return _load_huggingface(folder)
    raise InputError(
        f"{folder / SHARED_FILE}: missing (a run converted from bare weights has none until its"
        " tokenizer is copied there)"
    )


def save_folder(tokenizer: Tokenizer | TokenizerPair, path: str | Path) -> None:
    """Write the files that :func:`load_folder` reads."""
    folder = Path(path)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        _save_huggingface(tokenizer, folder)
    elif isinstance(tokenizer, Tokenizer):
        tokenizer.save(folder / SHARED_FILE)
    else:
        for side, name in zip((tokenizer.source, tokenizer.target), SIDE_FILES, strict=True):
            side.save(folder / name)


def _has_huggingface(folder: Path) -> bool:
    return any((folder / huggingface_folder.IN_RUN / name).exists() for name in _VOCABULARY_FILES)


def _load_huggingface(folder: Path) -> HuggingFaceTokenizer:
    path = folder / LANGUAGES_FILE
    languages = untrusted.read_json(path) if path.exists() else {}
    if (
        not isinstance(languages, dict)
        or set(languages) - {"source_lang", "target_lang"}
        or not all(isinstance(code, str | None) for code in languages.values())
    ):
        raise InputError(f"{path}: {shown(languages)} is no object of source_lang and target_lang")
    return huggingface_tokenizer.load_huggingface(folder / huggingface_folder.IN_RUN, **languages)


def _save_huggingface(tokenizer: HuggingFaceTokenizer, folder: Path) -> None:
    inner = folder / huggingface_folder.IN_RUN
    inner.mkdir(exist_ok=True)
    tokenizer.save(inner)
    languages = {"source_lang": tokenizer.source_lang, "target_lang": tokenizer.target_lang}
    if any(languages.values()):
        with atomic.file(folder / LANGUAGES_FILE) as temporary:
            temporary.write_text(json.dumps(languages) + "\n", encoding="utf-8")
