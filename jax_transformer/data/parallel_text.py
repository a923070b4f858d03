"""Parallel text: two files, one sentence a line, where line n of one file translates line n of the other."""

import gzip
import hashlib
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jax_transformer import errors

GZIP_MAGIC = b"\x1f\x8b"
UTF8_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Pairs:
    """Sentences with their translations, in the files' order."""

    pairs: list[tuple[str, str]]
    """Source and target, both with more than whitespace in them."""
    dropped_empty: int
    """How many pairs had an empty side and were left out."""


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, plain or gzipped; which of the two is told by the content, not by the suffix."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise errors.InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if content.startswith(GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise errors.InputError(f"{path}: the gzip data are truncated or damaged: {error}") from error
    return split_lines(content, str(path))


def split_lines(content: bytes, name: str) -> list[str]:
    r"""The lines of UTF-8 bytes; ``name`` stands for them in messages.

    A line ends at ``\n`` only: ``str.splitlines`` also splits at U+2028, U+0085 and form feeds, and the two sides would no longer match.
    """
    content = content.removeprefix(UTF8_BOM)
    if not content:
        raise errors.InputError(f"{name}: the file is empty")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise errors.InputError(f"{name}: line {line} is not valid UTF-8 (byte 0x{byte:02x}); convert the file to UTF-8") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_pairs(source_path: str | Path, target_path: str | Path) -> Pairs:
    """Two files as pairs; a pair with an empty side teaches nothing, so it is dropped and counted."""
    sources, targets = read_lines(source_path), read_lines(target_path)
    if len(sources) != len(targets):
        raise errors.InputError(
            f"{source_path} has {len(sources)} lines and {target_path} has {len(targets)}; line n of one must translate line n of the other"
        )
    if sources == targets:
        raise errors.InputError(f"{source_path} and {target_path} have the same content; one should be the translation of the other")
    pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source.strip() and target.strip()]
    if not pairs:
        raise errors.InputError(f"{source_path} and {target_path}: each of the {len(sources)} pairs has an empty side; nothing is left")
    return Pairs(pairs, dropped_empty=len(sources) - len(pairs))


def content_hash(pairs: Iterable[tuple[str, str]]) -> str:
    """SHA-256 of the pairs in their order, so that a run is not continued on other data.

    Each side is preceded by its size, so no two different lists of pairs are written as the same bytes.
    """
    digest = hashlib.sha256()
    for pair in pairs:
        for side in pair:
            # Text from an escaped source such as JSON may hold lone surrogates, which strict UTF-8 cannot write.
            encoded = side.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
