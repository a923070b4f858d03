"""A prepared corpus: a folder of tokens, from which a run reads the pairs of each batch.

It holds manifest.json, the tokenizer, the validation text and shards of training pairs. A shard is
an ArrayRecord file, which Grain reads at random, with a record for each pair: the number of source
tokens, those, and the target's. Its pairs are in the order of a
:class:`~jax_transformer.data.batches.LengthTable`, so that the number of a pair among all tells
shard and record, in memory that does not grow with the text.

Packed rows number the pairs by their exact lengths. Next to each shard is a file with those, from
which :func:`write_index` makes one file: the record of each pair in the order of its
:class:`~jax_transformer.data.packing.Kinds`. A run maps it into memory.

Axes: p parts (files of text), s steps of length, c cells: the pairs of a part, step and shard; or
of a kind and a part.
"""

import dataclasses
import functools
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jax_transformer.config import codec
from jax_transformer.data import denoising, encoding, packing
from jax_transformer.data.batches import Drawn, LengthTable
from jax_transformer.data.encoding import EncodedPairs, SpecialIds, Vocabulary
from jax_transformer.data.options import DataOptions, Task, TooLong, Vocabularies
from jax_transformer.data.packing import Kinds
from jax_transformer.data.parallel_text import Pairs
from jax_transformer.data.tokenizer import SpecialTokens
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import atomic, run_files

MANIFEST = "manifest.json"
VALID = "valid.jsonl"
INDEX = "train.index"


@dataclass(frozen=True)
class Decided:
    """The options of the text that ``prepare`` decides for the runs."""

    task: Task
    noise_density: float
    mean_noise_span_length: float
    vocabularies: Vocabularies
    too_long: TooLong
    max_source_length: int
    max_target_length: int


@dataclass(frozen=True)
class Shard:
    """The content of a shard."""

    name: str
    part: int
    """The file that its lines are from, from 0 on."""
    text_sha256: str
    """SHA-256 of the lines, also those that were dropped."""
    dropped_empty: int
    dropped_long: int
    cut_long: int
    differ: bool
    """False if source and target are the same in every pair."""
    table: tuple[tuple[int, ...], ...]
    """For each step with pairs: step, pairs, tokens of the two sides, longest of the two sides."""
    size: int
    """Bytes of the file."""
    sha256: str
    lengths_sha256: str = ""
    """SHA-256 of the file of lengths."""

    @property
    def pairs(self) -> int:
        return sum(row[1] for row in self.table)


@dataclass(frozen=True)
class Index:
    """The file of :func:`write_index`."""

    cells: int
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a prepared corpus."""

    options: Decided
    tokenizer_sha256: str
    wide: bool
    """True if tokens are uint32, False if they are uint16; both little-endian."""
    parts: int
    valid_sha256: str
    valid_dropped_empty: int
    shards: tuple[Shard, ...]
    index: Index | None = None
    """None in a corpus of an earlier version."""

    def total(self, name: str) -> int:
        """Return the sum of a count of all shards."""
        return sum(getattr(shard, name) for shard in self.shards)


def token_dtype(wide: bool) -> np.dtype:
    """Return the dtype of the numbers of a record."""
    return np.dtype("<u4" if wide else "<u2")


def write_shard(
    path: Path, encoded: EncodedPairs, lengths: Int[np.ndarray, "n 2"], dtype: np.dtype
) -> tuple[tuple[int, ...], ...]:
    """Write pairs in the order of their lengths, and return the table of the shard.

    Raises OSError.
    """
    from array_record.python import array_record_module

    table, order = LengthTable.of(lengths)
    records, ends = [np.zeros(0, np.int32)], []
    for i in order.tolist():
        source, target = encoded.sources[i], encoded.targets[i]
        records += np.array([len(source)], np.int32), source, target
        ends.append(len(source) + len(target) + 1)
    content, begin = np.concatenate(records).astype(dtype).tobytes(), 0
    try:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for end in (np.cumsum(ends, dtype=np.int64) * dtype.itemsize).tolist():
            writer.write(content[begin:end])
            begin = end
        writer.close()
    except Exception as error:  # the library has no class of its own
        full = next((n for n in atomic.FULL if os.strerror(n) in str(error)), None)
        if full is not None:
            raise OSError(full, os.strerror(full)) from error
        raise OSError(f"{path}: {error}") from error
    (counts,), (tokens,), (longest,) = table.counts, table.tokens, table.longest
    steps = np.flatnonzero(counts)
    columns = (steps[:, None], counts[steps, None], tokens[steps], longest[steps])
    return tuple(map(tuple, np.concatenate(columns, axis=1).tolist()))


def lengths_file(shard: Path) -> Path:
    """Return the file with the lengths of a shard's pairs, in the order of its records."""
    return shard.with_suffix(".lengths")


def write_lengths(path: Path, lengths: Int[np.ndarray, "n 2"], dtype: np.dtype) -> None:
    """Write the lengths of pairs in the order of their records. Raises OSError."""
    path.write_bytes(lengths[LengthTable.of(lengths)[1]].astype(dtype).tobytes())


def _record_dtype(pairs: int) -> np.dtype:
    """Return the dtype of the numbers of records."""
    return np.dtype("<u4" if pairs <= 2**32 else "<u8")


def write_index(folder: Path, shards: tuple[Shard, ...], wide: bool) -> Index:
    """Write the file that packed rows need, from the lengths of all shards.

    It begins with its cells: source length, target length, part and number of pairs of each kind
    in each file of text. The records follow, in the order of the cells; those of a cell ascend.
    Raises OSError.
    """
    full, counts = [shard for shard in shards if shard.pairs], Counter[tuple[int, ...]]()

    def kinds_of(shard: Shard) -> tuple[list[tuple[int, ...]], Kinds, Int[np.ndarray, " n"]]:
        lengths = np.fromfile(lengths_file(folder / shard.name), token_dtype(wide))
        kinds, order = Kinds.of(lengths.astype(np.int64).reshape(-1, 2))
        return [(*kind, shard.part) for kind in kinds.lengths.tolist()], kinds, order

    for shard in full:
        cells, kinds, _ = kinds_of(shard)
        counts.update(dict(zip(cells, kinds.counts.tolist(), strict=True)))
    table = np.array([(*cell, count) for cell, count in sorted(counts.items())], "<i8")
    dtype, first = _record_dtype(int(table[:, -1].sum())), 0
    begins = table.nbytes + dtype.itemsize * (np.cumsum(table[:, -1]) - table[:, -1])
    offsets = dict(zip(sorted(counts), begins.tolist(), strict=True))
    with atomic.file(folder / INDEX) as temporary, open(temporary, "wb") as file:
        file.write(table.tobytes())
        for shard in full:
            cells, kinds, order = kinds_of(shard)
            records = (order + first).astype(dtype)
            for cell, own in zip(cells, np.split(records, np.cumsum(kinds.counts)), strict=False):
                file.seek(offsets[cell])
                file.write(own.tobytes())
                offsets[cell] += own.nbytes
            first += shard.pairs
    path = folder / INDEX
    return Index(len(table), path.stat().st_size, run_files.sha256(path))


class _FileInstruction(NamedTuple):
    """A file whose number of records is known, so that it is opened only when it is read."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


@dataclass(frozen=True, eq=False)
class PreparedPairs:
    """The training pairs of a prepared corpus, by number in the order of :attr:`table`."""

    folder: Path
    manifest: Manifest
    ids: SpecialIds
    added: tuple[SpecialTokens, SpecialTokens]
    by_part: bool
    """False if the files of the text are one part."""

    @functools.cached_property
    def _cells(self) -> Int[np.ndarray, "c 8"]:
        """Part, step, pairs, tokens and longest of both sides, and first record of each cell, in
        the order of the pairs' numbers.
        """
        cells, first = [], 0
        for shard in self.manifest.shards:
            for step, *row in shard.table:
                cells.append((shard.part * self.by_part, step, *row, first))
                first += row[0]
        array = np.array(cells, np.int64)
        return array[np.lexsort((array[:, -1], array[:, 1], array[:, 0]))]

    @functools.cached_property
    def table(self) -> LengthTable:
        """The lengths of all pairs."""
        part, step, pairs = self._cells[:, :3].T
        shape = (int(part.max()) + 1, int(step.max()) + 1)
        counts, both = np.zeros(shape, np.int64), np.zeros((*shape, 2), np.int64)
        tokens, longest = both, both.copy()
        np.add.at(counts, (part, step), pairs)
        np.add.at(tokens, (part, step), self._cells[:, 3:5])
        np.maximum.at(longest, (part, step), self._cells[:, 5:7])
        return LengthTable(counts, tokens, longest)

    @functools.cached_property
    def _ends(self) -> Int[np.ndarray, " c"]:
        return np.cumsum(self._cells[:, 2])

    @functools.cached_property
    def _records(self) -> Any:
        import grain

        files = [
            _FileInstruction(str(self.folder / shard.name), 0, shard.pairs, shard.pairs)
            for shard in self.manifest.shards
            if shard.pairs
        ]
        return grain.sources.ArrayRecordDataSource(files)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, numbers: Int[np.ndarray, " b"]) -> EncodedPairs:
        """Read the pairs of these numbers. Raises InputError if a shard is damaged."""
        cells = np.searchsorted(self._ends, numbers, side="right")
        begins = self._ends[cells] - self._cells[cells, 2]
        return self.read(self._cells[cells, -1] + numbers - begins, numbers)

    def read(self, records: Int[np.ndarray, " b"], numbers: Int[np.ndarray, " b"]) -> EncodedPairs:
        """Read the pairs of these records, which have these numbers.

        Raises InputError if a shard is damaged.
        """
        try:
            read = self._records.__getitems__(records.tolist()) if len(records) else ()
        except Exception as error:  # the library has no class of its own
            raise InputError(f"{self._damaged()}: cannot be read: {error}") from error
        dtype, sources, targets = token_dtype(self.manifest.wide), [], []
        for record in read:
            count, *_ = tokens = np.frombuffer(record, dtype).astype(np.int32)
            sources.append(tokens[1 : 1 + count])
            targets.append(tokens[1 + count :])
        return EncodedPairs(sources, targets, self.ids, numbers, 0, added=self.added)

    def _damaged(self) -> Path:
        """Return the path of the first shard that has changed, or the folder."""
        for shard in self.manifest.shards:
            path = self.folder / shard.name
            if not path.is_file() or run_files.sha256(path) != shard.sha256:
                return path
        return self.folder


@dataclass(frozen=True, eq=False)
class IndexedPairs:
    """The training pairs of a prepared corpus, by number in the order of :attr:`kinds`."""

    pairs: PreparedPairs
    index: Index
    drawn: Drawn | None
    """Gives the lengths of texts, whose sources and targets are other ones at every step."""

    @property
    def _path(self) -> Path:
        return self.pairs.folder / INDEX

    @functools.cached_property
    def _cells(self) -> Int[np.ndarray, "c 5"]:
        """Part, source length, target length, pairs and first place in the index of each cell, in
        the order of the pairs' numbers.
        """
        table = np.fromfile(self._path, "<i8", 4 * self.index.cells).reshape(-1, 4)
        source, target, part, count = table.T
        one = part * self.pairs.by_part
        cells = np.column_stack([one, source, target, count, np.cumsum(count) - count])
        return cells[np.lexsort((part, target, source, one))]

    @functools.cached_property
    def kinds(self) -> Kinds:
        """The kinds of all pairs."""
        return Kinds.merged(self._cells[:, :3], self._cells[:, 3])

    @functools.cached_property
    def _ends(self) -> Int[np.ndarray, " c"]:
        return np.cumsum(self._cells[:, 3])

    @functools.cached_property
    def _records(self) -> np.ndarray:
        dtype = _record_dtype(len(self.pairs))
        return np.memmap(self._path, dtype, "r", offset=self.index.cells * 4 * 8)

    def take(self, numbers: Int[np.ndarray, " b"]) -> EncodedPairs:
        """Read the pairs of these numbers. Raises InputError if a file is damaged."""
        cells = np.searchsorted(self._ends, numbers, side="right")
        begins = self._ends[cells] - self._cells[cells, 3]
        records = self._records[self._cells[cells, 4] + numbers - begins].astype(np.int64)
        if (records < len(self.pairs)).all():
            taken = self.pairs.read(records, numbers)
            lengths = taken.lengths if self.drawn is None else self.drawn.lengths(taken, 0)
            if np.array_equal(packing.rounded(lengths), self._cells[cells, 1:3]):
                return taken
        raise InputError(f"{self._path}: damaged; prepare the corpus again")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A folder that ``prepare`` has made."""

    folder: Path
    manifest: Manifest
    sha256: str
    """SHA-256 of the manifest, and so of all shards."""
    tokenizer: Vocabulary

    @classmethod
    def open(cls, path: str) -> "Prepared":
        """Raises InputError if the folder is not complete, or a shard has another size."""
        folder = Path(path)
        try:
            text = (folder / MANIFEST).read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(
                f"{folder}: not a corpus that `jax-transformer prepare` has completed: "
                f"{MANIFEST}: {error.strerror}"
            ) from None
        try:
            manifest = codec.from_json(Manifest, text)
        except ConfigError as error:
            raise InputError(f"{folder / MANIFEST}: {error}") from None
        for shard in manifest.shards:
            file = folder / shard.name
            size = file.stat().st_size if file.is_file() else None
            if size != shard.size:
                now = "missing" if size is None else f"{size:,} bytes long"
                raise InputError(f"{file}: {now}, and was {shard.size:,} bytes when prepared")
        if (index := manifest.index) is not None:
            file = folder / INDEX
            if not file.is_file() or file.stat().st_size != index.size:
                raise InputError(f"{file}: missing, or not {index.size:,} bytes as when prepared")
        tokenizer = encoding.load_tokenizer(folder)
        if tokenizer.hash != manifest.tokenizer_sha256:
            raise InputError(f"{folder}: its tokenizer has changed since it was prepared")
        return cls(folder, manifest, run_files.sha256(folder / MANIFEST), tokenizer)

    def check(self, options: DataOptions) -> None:
        """Raise ConfigError if a run's options differ from those of the preparation."""
        wrong = []
        for name, value in dataclasses.asdict(self.manifest.options).items():
            chosen = (
                denoising.density(options, options.task)
                if name == "noise_density"
                else getattr(options, name)
            )
            if chosen not in (value, None):  # None: a maximum that is left to the preparation
                flag = f"--data.{name.replace('_', '-')}"
                wrong.append(f"{flag} {value} (not {chosen})")
        if wrong:
            raise ConfigError(f"{self.folder} was prepared with {', '.join(wrong)}")

    @property
    def limits(self) -> tuple[int, int]:
        """The maximum lengths of source and target."""
        options = self.manifest.options
        return options.max_source_length, options.max_target_length

    def train(self, *, by_part: bool) -> PreparedPairs:
        """Return the training pairs, in one part or with a part for each file of the text."""
        one, other = self.tokenizer.source, self.tokenizer.target
        added = encoding.special_tokens(one), encoding.special_tokens(other)
        ids = encoding.special_ids(one, other)
        return PreparedPairs(self.folder, self.manifest, ids, added, by_part)

    def indexed(self, pairs: PreparedPairs, drawn: Drawn | None) -> IndexedPairs:
        """Return the training pairs for packed rows. Raises ConfigError if there is no index."""
        if self.manifest.index is None:
            raise ConfigError(
                f"{self.folder} was prepared without {INDEX}, which data.packing needs: prepare "
                "the text again, in another folder"
            )
        return IndexedPairs(pairs, self.manifest.index, drawn)

    def valid(self) -> Pairs:
        """Return the validation text. Raises InputError if it has changed."""
        path = self.folder / VALID
        if not path.is_file() or run_files.sha256(path) != self.manifest.valid_sha256:
            raise InputError(f"{path}: missing, or changed since it was prepared")
        lines = path.read_text(encoding="utf-8").splitlines()
        pairs = [(source, target) for source, target in map(json.loads, lines)]
        return Pairs(pairs, self.manifest.valid_dropped_empty)


def write_valid(folder: Path, valid: Pairs) -> str:
    """Write the validation text and return its SHA-256."""
    text = "".join(json.dumps(pair) + "\n" for pair in valid.pairs)
    atomic.write_text(folder / VALID, text)
    return run_files.sha256(folder / VALID)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which completes the corpus."""
    atomic.write_text(folder / MANIFEST, json.dumps(dataclasses.asdict(manifest)) + "\n")
