"""Parallel text: sentences with their translations.

They are two files where line n of one translates line n of the other, files of pairs (``.tsv``:
source, tab, target; ``.jsonl``: an object per line; ``.parquet``), or a Hugging Face data set, of
the hub or in a local folder. The rules for all text are here too: line ends, pairs that are
dropped, and refusals.
"""

import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer import errors

PARQUET = ".parquet"
SUFFIXES = (".tsv", ".jsonl", PARQUET)
"""Endings of the names of files of pairs; of text, perhaps followed by ``.gz`` or ``.zst``."""
GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")
"""The start of a frame, and of the frame without content that pzstd writes before each."""
UTF8_BOM = b"\xef\xbb\xbf"
_CHUNK = 1 << 20  # bytes to read at a time, if there are as many
_ZSTD_CHUNK = 1 << 16  # compressed; text has some times as many
_ROWS = 1 << 12  # of Parquet, to read at a time: a Python object is made of each value


@dataclass(frozen=True)
class Pairs:
    """Sentences with their translations, in the files' order."""

    pairs: list[tuple[str, str]]
    """Source and target, both with more than whitespace in them."""
    dropped_empty: int
    """Number of pairs that were dropped because a side was empty."""
    counts: tuple[int, ...] = ()
    """Number of pairs of each file, if there are several."""


def read_lines(path: str | Path) -> list[str]:
    r"""Return the lines of a UTF-8 text file, plain, gzip or zstd (by content, not suffix).

    A line ends at ``\n`` only: ``str.splitlines`` also splits at U+2028, U+0085 and form feeds, so
    the two sides would no longer match.
    """
    return [line for lines in read_chunks(path) for line in lines]


def read_chunks(path: str | Path) -> Iterator[list[str]]:
    """Yield the lines that :func:`read_lines` returns as they come, some at a time."""
    count = 0
    try:
        with open(path, "rb") as file:
            for lines in split_chunks(file, str(path)):
                count += len(lines)
                yield lines
    except OSError as error:
        raise errors.InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not count:
        raise errors.InputError(f"{path}: the file is empty")


def split_chunks(file: io.BufferedReader, name: str) -> Iterator[list[str]]:
    """Yield the lines of an open file as they come, also of gzip or zstd; ``name`` is for messages.

    A line ends as in :func:`read_lines`; the last one may have no end.
    """
    begin, chunks = file.peek(4), iter(functools.partial(file.read1, _CHUNK), b"")
    if begin.startswith(GZIP_MAGIC):
        chunks = _gunzip(file, name)
    elif begin.startswith(ZSTD_MAGIC):
        chunks = _unzstd(file, name)
    count, rest = 0, b""
    for chunk in chunks:
        content, newline, rest = (rest + chunk).rpartition(b"\n")
        if newline:
            lines = _lines(content, name, count)
            count += len(lines)
            yield lines
    if rest and (count or rest != UTF8_BOM):
        yield _lines(rest, name, count)


def _gunzip(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    try:
        yield from iter(functools.partial(gzip.GzipFile(fileobj=file).read1, _CHUNK), b"")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise errors.InputError(
            f"{name}: the gzip data are truncated or damaged: {error}"
        ) from error


def _unzstd(file: io.BufferedReader, name: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise errors.ConfigError(
            f"{name}: zstd data need zstandard: pip install 'jax-seq2seq[zstd]'"
        ) from None
    # Not its stream_reader, which ends without a word if the data do
    frame, decompressor = None, zstandard.ZstdDecompressor()
    try:
        while chunk := file.read1(_ZSTD_CHUNK):
            while chunk:
                frame = frame or decompressor.decompressobj()
                yield frame.decompress(chunk)
                chunk, frame = frame.unused_data, None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise errors.InputError(f"{name}: the zstd data cannot be read: {error}") from error
    if frame is not None:
        raise errors.InputError(f"{name}: the zstd data are truncated")


def _lines(content: bytes, name: str, count: int = 0) -> list[str]:
    """Return the lines of UTF-8 bytes that follow ``count`` lines."""
    content = content if count else content.removeprefix(UTF8_BOM)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = count + content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise errors.InputError(
            f"{name}: line {line} is not valid UTF-8 (byte 0x{byte:02x}); convert the file to UTF-8"
        ) from error
    return text.replace("\r\n", "\n").removesuffix("\r").split("\n")


def read_pairs(source_path: str | Path, target_path: str | Path) -> Pairs:
    """Return two files of lines as pairs."""
    return paired(read_lines(source_path), read_lines(target_path), source_path, target_path)


def read_blocks(paths: Sequence[str], size: int) -> Iterator[tuple[list[str], ...]]:
    """Yield ``size`` lines of each of the files at a time. Raises InputError if one has more."""
    streams = [itertools.chain.from_iterable(read_chunks(path)) for path in paths]
    count = 0
    while any(blocks := tuple(list(itertools.islice(stream, size)) for stream in streams)):
        if len(set(map(len, blocks))) > 1:
            counts = [
                count + len(block) + sum(1 for _ in stream)
                for block, stream in zip(blocks, streams, strict=True)
            ]
            raise _uneven(paths, counts)
        yield blocks
        count += size


def _uneven(paths: Sequence[str | Path], counts: Sequence[int]) -> errors.InputError:
    return errors.InputError(
        f"{paths[0]} has {errors.counted(counts[0], 'line')} and {paths[1]} has {counts[1]:,}; "
        "line n of one must translate line n of the other"
    )


def read_texts(path: str | Path) -> Pairs:
    """Return the lines of a file that are not empty, as sources with empty targets."""
    lines = read_lines(path)
    texts = [(line, "") for line in lines if line.strip()]
    if not texts:
        raise errors.InputError(f"{path}: each of its {len(lines)} lines is empty")
    return Pairs(texts, dropped_empty=len(lines) - len(texts))


def paired(
    sources: Sequence[str], targets: Sequence[str], source_path: str | Path, target_path: str | Path
) -> Pairs:
    """Return the lines of two files as pairs; the paths are for messages."""
    if len(sources) != len(targets):
        raise _uneven((source_path, target_path), (len(sources), len(targets)))
    return checked(list(zip(sources, targets, strict=True)), f"{source_path} and {target_path}")


def matching(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the files that paths or patterns name. A pattern without files stays as it is."""
    files = list[str]()
    for path in paths:
        matches = [] if os.path.exists(path) else glob.glob(path, recursive=True)
        files += sorted(matches) or [path]
    return tuple(files)


def suffix(path: str) -> str | None:
    """Return a path's suffix among SUFFIXES, of text before ``.gz`` or ``.zst``; None if it has
    another.
    """
    name = path.lower()
    if name.endswith(PARQUET):
        return PARQUET
    name = re.sub(r"\.(gz|zst)$", "", name)
    return next((known for known in SUFFIXES[:-1] if name.endswith(known)), None)


def read_pair_file(path: str, source_field: str, target_field: str) -> Pairs:
    """Return the pairs of a file that have no empty side, see :func:`read_pair_lines`."""
    return checked(read_pair_lines(path, source_field, target_field), path)


def read_pair_lines(path: str, source_field: str, target_field: str) -> list[tuple[str, str]]:
    """Return a pair for each line or row of a file; the fields are a ``.jsonl`` object's or the
    columns of ``.parquet``.

    A blank line is a pair with two empty sides.

    Raises InputError that names file and line.
    """
    if suffix(path) == PARQUET:
        return list(read_rows(path, source_field, target_field))
    return pairs_of_lines(read_lines(path), path, source_field, target_field)


def read_rows(path: str, source_field: str, target_field: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a ``.parquet`` file, of which only some are in memory at a time.

    Raises ConfigError without the library, InputError that names file and row.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise errors.ConfigError(
            f"{path}: Parquet needs pyarrow: pip install 'jax-seq2seq[parquet]'"
        ) from None
    count = 0
    try:
        with open(path, "rb") as content, parquet.ParquetFile(content) as file:
            columns = columns_of(path, file.schema_arrow.names, source_field, target_field)
            for batch in file.iter_batches(_ROWS, columns=columns):
                for number, row in enumerate(batch.to_pylist(), count + 1):
                    where = f"{path}: row {number}"
                    yield field(row, source_field, where), field(row, target_field, where)
                count += len(batch)
    # Damaged pages are OSErrors too, without strerror
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.strerror:
            raise errors.InputError(f"{path}: cannot be read: {error.strerror}") from error
        reason = " ".join(str(error).split())[:300]
        raise errors.InputError(
            f"{path}: the Parquet data are truncated or damaged: {reason}"
        ) from error
    if not count:
        raise errors.InputError(f"{path}: the file has no rows")


def pairs_of_lines(
    lines: Sequence[str], path: str, source_field: str, target_field: str, first: int = 1
) -> list[tuple[str, str]]:
    """Return the pairs of some lines of a file, of which ``first`` is the first one's number."""
    is_table = suffix(path) == ".tsv"
    pairs = []
    for number, line in enumerate(lines, first):
        where = f"{path}: line {number}"
        if not line.strip(" "):
            pairs.append(("", ""))
        elif is_table:
            columns = line.split("\t")
            if len(columns) != 2:
                raise errors.InputError(
                    f"{where} has {len(columns) - 1} tabs; one must stand between source and target"
                )
            pairs.append((columns[0], columns[1]))
        else:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise errors.InputError(f"{where} is not JSON: {error}") from None
            pairs.append((field(value, source_field, where), field(value, target_field, where)))
    return pairs


def field(value: Any, name: str, where: str) -> str:
    """Return the text of a dotted field in nested objects.

    Raises InputError that begins with ``where`` if there is no text.
    """
    inside = value
    for depth, key in enumerate(name.split("."), 1):
        so_far = ".".join(name.split(".")[:depth])
        if not isinstance(inside, dict):
            raise errors.InputError(
                f"{where} has no {so_far!r}: expected an object, not {_kind(inside)}"
            )
        if key not in inside:
            known = list(map(str, inside))
            raise errors.InputError(
                f"{where} has no {so_far!r}{errors.nearest(key, known)}; known: {', '.join(known)}"
            )
        inside = inside[key]
    if not isinstance(inside, str):
        raise errors.InputError(f"{where}: {name!r} is {_kind(inside)}, not text")
    try:
        inside.encode()
    except UnicodeEncodeError:  # JSON can write it, as "\\ud83d"
        raise errors.InputError(
            f"{where}: {name!r} has half of a surrogate pair, which is not a character"
        ) from None
    return inside


_KINDS = {dict: "an object", list: "a list", bool: "true or false", str: "text", type(None): "null"}
_KINDS |= dict.fromkeys((int, float), "a number")


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def read_dataset(
    name: str, config: str | None, split: str, source_field: str, target_field: str
) -> Pairs:
    """Return the pairs of a split of a Hugging Face data set.

    Raises ConfigError without the library, InputError that names the data set and the row.
    """
    where = f"data set {name}, split {split}"
    try:
        import datasets
    except ImportError:
        raise errors.ConfigError(
            "data.dataset needs Hugging Face datasets: pip install 'jax-seq2seq[hub]'"
        ) from None
    try:
        rows: Any = datasets.load_dataset(name, config, split=split)
    # The library's own classes, network errors, and what its readers raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise errors.InputError(f"{where}: {reason}") from error
    columns = columns_of(where, rows.column_names, source_field, target_field)
    pairs = []
    for number, row in enumerate(rows.select_columns(columns), 1):
        at = f"{where}: row {number}"
        pairs.append((field(row, source_field, at), field(row, target_field, at)))
    if not pairs:
        raise errors.InputError(f"{where}: the split is empty")
    return checked(pairs, where)


def columns_of(where: str, known: Sequence[str], *fields: str) -> list[str]:
    """Return the columns of some fields. Raises InputError if one is not ``known``."""
    columns = list(dict.fromkeys(field.partition(".")[0] for field in fields))
    for column in columns:
        if column not in known:
            raise errors.InputError(
                f"{where}: no column {column!r}{errors.nearest(column, list(known))}; "
                f"known: {', '.join(known)}"
            )
    return columns


def checked(pairs: Sequence[tuple[str, str]], name: str) -> Pairs:
    """Return pairs without those that have an empty side; ``name`` is their source in messages."""
    complete, differ = [], False
    for source, target in pairs:
        if source.strip() and target.strip():
            complete.append((source, target))
            differ = differ or source != target
    if not complete:
        raise errors.InputError(
            f"{name}: each of the {len(pairs)} pairs has an empty side; nothing is left"
        )
    if not differ:
        raise errors.InputError(
            f"{name}: source and target have the same content; "
            "one should be the translation of the other"
        )
    return Pairs(complete, dropped_empty=len(pairs) - len(complete))


def joined(parts: Sequence[Pairs]) -> Pairs:
    """Return the pairs of several files, one after the other."""
    pairs = list(itertools.chain.from_iterable(part.pairs for part in parts))
    counts = tuple(len(part.pairs) for part in parts)
    return Pairs(pairs, sum(part.dropped_empty for part in parts), counts)


def check_readable(paths: Iterable[str | Path]) -> None:
    """Raise InputError that names every file that is missing, a folder, or not readable.

    No file is opened: one may be a pipe.
    """
    problems = []
    for path in map(Path, paths):
        if not path.exists():
            problems.append(f"{path}: cannot be read: No such file or directory")
        elif path.is_dir():
            problems.append(f"{path}: cannot be read: Is a directory")
        elif not os.access(path, os.R_OK):
            problems.append(f"{path}: cannot be read: Permission denied")
    if problems:
        raise errors.InputError("; ".join(dict.fromkeys(problems)))


def looks_swapped(pairs: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]]) -> bool:
    """Return True if ``others`` surely have source and target the other way round from ``pairs``.

    The words that only one side of ``pairs`` has decide; if the sides share their words, False.
    """
    source, target = _words(pairs, 0), _words(pairs, 1)
    for side, own, other in (
        (0, source - target, target - source),
        (1, target - source, source - target),
    ):
        words = _words(others, side)
        straight, crossed = len(words & own), len(words & other)
        if crossed < 20 or crossed < 10 * straight:
            return False
    return True


def _words(pairs: Sequence[tuple[str, str]], side: int) -> set[str]:
    """Return the words of one side of the first pairs, enough to know a language by."""
    words: set[str] = set()
    for pair in pairs[:20_000]:
        words.update(re.findall(r"[^\W\d_]+", pair[side][:1000].casefold()))
    return words


def content_hash(pairs: Iterable[Iterable[str]]) -> str:
    """SHA-256 of the pairs in their order, so that a run is not continued on other data.

    Each side is preceded by its size, so no two different lists of pairs are written as the same
    bytes.
    """
    digest = hashlib.sha256()
    for pair in pairs:
        for side in pair:
            # Text from an escaped source such as JSON may hold lone surrogates, which strict UTF-8
            # cannot write.
            encoded = side.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
