"""The tokenizer of a run folder: one file, a file for each side, or the files of a Hugging Face
folder, whose reader is imported only for them.
"""

from pathlib import Path

from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import InputError
from jax_transformer.storage.huggingface_folder import IN_RUN
from jax_transformer.storage.run_files import SHARED_FILE, SIDE_FILES

_VOCABULARIES = [
    f"{IN_RUN}/{name}"
    for name in "tokenizer.json source.spm spiece.model sentencepiece.bpe.model vocab.json "
    "vocab-src.json".split()
]
"""The files of a Hugging Face tokenizer in a run folder, of which it has at least one."""


def has_tokenizer(path: str | Path) -> bool:
    """Return True if a run folder holds a tokenizer, or at least one of two."""
    return any((Path(path) / name).exists() for name in (SHARED_FILE, *SIDE_FILES, *_VOCABULARIES))


def load_tokenizer(path: str | Path) -> Tokenizer | TokenizerPair:
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
    if has_tokenizer(folder):
        from jax_transformer.data import huggingface_tokenizer

        return huggingface_tokenizer.load_from_run(folder)
    raise InputError(
        f"{folder / SHARED_FILE}: missing (a run converted from bare weights has none until its"
        " tokenizer is copied there)"
    )


def save_tokenizer(tokenizer: Tokenizer | TokenizerPair, path: str | Path) -> None:
    """Write the files that :func:`load_tokenizer` reads."""
    folder = Path(path)
    if isinstance(tokenizer, Tokenizer):
        tokenizer.save(folder / SHARED_FILE)
    elif type(tokenizer) is TokenizerPair:
        for side, name in zip((tokenizer.source, tokenizer.target), SIDE_FILES, strict=True):
            side.save(folder / name)
    else:
        from jax_transformer.data import huggingface_tokenizer

        assert isinstance(tokenizer, huggingface_tokenizer.HuggingFaceTokenizer)
        huggingface_tokenizer.save_in_run(tokenizer, folder)
