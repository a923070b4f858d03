"""The method of ``jax-transformer prepare``: text to a prepared corpus, in several processes.

Each block of lines becomes a shard and, when that is complete, a small .json file that tells its
content and the SHA-256 of its lines. After a kill the same command reads the text again and makes
only the shards that are missing.
"""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from jax_transformer.config import codec
from jax_transformer.data import denoising, encoding, parallel_text, prepared
from jax_transformer.data.encoding import Vocabulary
from jax_transformer.data.options import OF_TRAINING, DataOptions, DataSource, Task, TooLong
from jax_transformer.data.parallel_text import Pairs
from jax_transformer.data.prepared import Manifest, Shard
from jax_transformer.errors import ConfigError, InputError, counted
from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic, run_files, run_folder
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus
from jax_transformer.training.options import TrainOptions

BLOCK = 2**18
"""Lines of a shard."""
SAMPLE = 2**20
"""Pairs that a tokenizer is trained on, at most: the first of each file, in equal shares."""
_OPTIONS = "options.json"


@dataclass(frozen=True)
class Block:
    """Some lines of one file, or of one of sources and one of targets; or the texts of Parquet."""

    name: str
    part: int
    first: int
    """The number of the first line in its file."""
    lines: tuple[list[str], ...]

    @property
    def sha256(self) -> str:
        return parallel_text.content_hash([map("\n".join, self.lines)])


@dataclass(frozen=True)
class Encoder:
    """Makes shards of blocks."""

    data: DataOptions
    limits: tuple[int, int]
    tokenizer: Vocabulary
    folder: Path
    wide: bool

    def __call__(self, block: Block) -> Shard:
        """Write the shard of a block, and its .json file."""
        lines, texts = _texts(self.data, block)
        one, other = self.tokenizer.source, self.tokenizer.target
        if self.data.task is not Task.TRANSLATION:
            lines_of = [text for text, _ in texts]
            encoded, drawn = corpus.drawn_texts(self.data, self.tokenizer, lines_of, self.limits)
            lengths = drawn.lengths(encoded, 0)
        else:
            cut = self.data.too_long is TooLong.CUT
            encoded = encoding.encode_some(texts, one, other, *self.limits, cut=cut)
            lengths = encoded.lengths
        path = self.folder / block.name
        with atomic.file(path) as temporary:
            dtype = prepared.token_dtype(self.wide)
            table = prepared.write_shard(temporary, encoded, lengths, dtype)
        of_pairs = prepared.lengths_file(path)
        with atomic.file(of_pairs) as temporary:
            prepared.write_lengths(temporary, lengths, dtype)
        shard = Shard(
            block.name,
            block.part,
            block.sha256,
            lines - len(texts),
            encoded.dropped_long,
            encoded.cut_long,
            any(source != target for source, target in texts),
            table,
            path.stat().st_size,
            run_files.sha256(path),
            run_files.sha256(of_pairs),
        )
        atomic.write_text(path.with_suffix(".json"), codec.to_json(shard))
        return shard


def prepare(options: TrainOptions, folder: Path, processes: int = 0) -> Manifest:
    """Make the corpus of the options' text in ``folder``, or complete it.

    ``options`` name text, tokenizer (or the model whose special ids one is trained with) and
    maximum lengths. 0 processes: one for each core.

    Raises ConfigError if the options cannot be used or the folder holds another corpus, LockedError
    if another process writes there, InputError that names the file and line of bad text.
    """
    data = options.data
    _check(options)
    parallel_text.check_readable(data.files)
    with run_folder.lock(folder):
        atomic.remove_unfinished(folder)
        return _made_corpus(options, folder, processes or distributed.cores())


def complete(options: TrainOptions, folder: Path) -> None:
    """Make the corpus that a run is to train on, unless it is complete; then no text is read.

    Raises as :func:`prepare`, and ConfigError if one of several processes is to do it.
    """
    if (folder / prepared.MANIFEST).exists():
        _check_begun(folder, _trained_by(options))
        distributed.say(f"{folder} is complete: the text is not read again")
        return
    if distributed.count() > 1:
        raise ConfigError(f"{folder} is not complete: prepare it first, in one process")
    for line in summary(prepare(options, folder)):
        distributed.say(f"{folder}: {line}")


def _made_corpus(options: TrainOptions, folder: Path, processes: int) -> Manifest:
    data = options.data
    valid = corpus.read_split(data, "valid")
    words, limits = _tokenizer(options, folder)
    decided = prepared.Decided(
        data.task,
        denoising.density(data, data.task),
        data.mean_noise_span_length,
        data.vocabularies,
        data.too_long,
        *limits,
    )
    _begin(folder, words, dataclasses.asdict(decided) | _trained_by(options))
    # A text without translation is as long as its source and its target at most
    wide = max(words.source.vocab_size, words.target.vocab_size, sum(limits)) >= 2**16
    encoder = Encoder(data, limits, words, folder, wide)
    shards = tuple(_shards(encoder, processes, valid))
    _check_text(shards, limits)
    parts = len(data.train or data.train_source)
    manifest = Manifest(
        decided,
        words.hash,
        wide,
        parts,
        prepared.write_valid(folder, valid),
        valid.dropped_empty,
        shards,
        prepared.write_index(folder, shards, wide),
    )
    prepared.write_manifest(folder, manifest)
    return manifest


def summary(manifest: Manifest) -> Iterator[str]:
    """Yield the lines that tell what a corpus holds, and what was dropped."""
    tokens = sum(row[2] + row[3] for shard in manifest.shards for row in shard.table)
    noun = "pair" if manifest.options.task is Task.TRANSLATION else "text"
    yield (
        f"{counted(manifest.total('pairs'), noun)}, {tokens:,} tokens in "
        f"{counted(len(manifest.shards), 'shard')}, {manifest.total('size'):,} bytes"
    )
    yield (
        f"dropped: {manifest.total('dropped_empty'):,} with an empty side, "
        f"{manifest.total('dropped_long'):,} too long; cut: {manifest.total('cut_long'):,} too long"
    )


def _check(options: TrainOptions) -> None:
    data = options.data
    if data.kind not in (DataSource.LINES, DataSource.PAIRS):
        raise ConfigError("prepare reads files: give data.train or data.train_source, and so on")
    for name in (*OF_TRAINING, "bpe_dropout", "train_tasks"):
        if getattr(data, name) != getattr(DataOptions, name):
            raise ConfigError(f"data.{name}={getattr(data, name)} is an option of train")


def _begin(folder: Path, words: Vocabulary, chosen: dict[str, object]) -> None:
    """Record tokenizer and options of a folder. Raises ConfigError if it has others."""
    path, chosen = folder / _OPTIONS, {"tokenizer": words.hash, **chosen}
    tokenizers = {name.partition("/")[0] for name in run_files.TOKENIZER}
    if path.exists():
        _check_begun(folder, chosen)
        return
    names = (file.name for file in folder.iterdir() if not file.name.startswith("."))
    if others := [name for name in names if name not in tokenizers]:
        raise ConfigError(f"{folder} is not empty: it holds {others[0]}; give another folder")
    encoding.save_tokenizer(words, folder)
    atomic.write_text(path, json.dumps(chosen, indent=2) + "\n")


def _trained_by(options: TrainOptions) -> dict[str, object]:
    return {"vocab_size": options.data.vocab_size, "preset": options.model.preset}


def _check_begun(folder: Path, chosen: dict[str, object]) -> None:
    begun = run_folder.parsed(folder / _OPTIONS, lambda text: dict(json.loads(text)))
    if others := [name for name, value in chosen.items() if begun.get(name) != value]:
        raise ConfigError(
            f"{folder} was begun with another {' and '.join(others)} ({_OPTIONS}); "
            "give another folder"
        )


def _tokenizer(options: TrainOptions, folder: Path) -> tuple[Vocabulary, tuple[int, int]]:
    """Return the tokenizer that is named, or trained before, or train it; and the maxima."""
    data, source = options.data, None
    if options.init is not None:
        from jax_transformer.training import init_source

        source = init_source.find(options, RunFolder(folder / ".none"))
    words = source.tokenizer if source else encoding.named_tokenizer(data)
    if words is None and (folder / _OPTIONS).exists():
        words = encoding.load_tokenizer(folder)
    config = source.config if source else corpus.model_config(options, words)
    if words is None:
        share = SAMPLE // len(data.train or data.train_source)
        blocks = _blocks(data, share, first_only=True)
        pairs = [pair for block in blocks for pair in _texts(data, block)[1]]
        words = corpus.train_tokenizer(data, pairs, config)
        config = corpus.model_config(options, words)
    return words, encoding.limits(data, config)


# Text


def _blocks(data: DataOptions, size: int, *, first_only: bool = False) -> Iterator[Block]:
    """Yield the lines of all training files, ``size`` at a time, or only the first of each."""
    sources = data.train or data.train_source
    targets = data.train_target or [None] * len(sources)
    number = itertools.count()
    for part, paths in enumerate(zip(sources, targets, strict=True)):
        first = 1
        for lines in _read(data, [path for path in paths if path], size):
            yield Block(f"train-{next(number):05}.array_record", part, first, lines)
            first += size
            if first_only:
                break


def _read(data: DataOptions, paths: list[str], size: int) -> Iterator[tuple[list[str], ...]]:
    """Yield lines of the files, ``size`` at a time; of Parquet, the sources and the targets."""
    if not data.train or parallel_text.suffix(paths[0]) != parallel_text.PARQUET:
        yield from parallel_text.read_blocks(paths, size)
        return
    rows = parallel_text.read_rows(paths[0], data.source_field, data.target_field)
    while block := list(itertools.islice(rows, size)):
        sources, targets = zip(*block, strict=True)
        yield list(sources), list(targets)


def _texts(data: DataOptions, block: Block) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of lines of a block, and its pairs without an empty side."""
    lines = block.lines[0]
    if data.task is not Task.TRANSLATION:
        return len(lines), [(line, "") for line in lines if line.strip()]
    if len(block.lines) == 1:
        fields = (data.source_field, data.target_field)
        path = data.train[block.part]
        pairs = parallel_text.pairs_of_lines(lines, path, *fields, first=block.first)
    else:
        pairs = list(zip(*block.lines, strict=True))
    return len(lines), [pair for pair in pairs if pair[0].strip() and pair[1].strip()]


def _check_text(shards: Sequence[Shard], limits: tuple[int, int]) -> None:
    pairs = sum(shard.pairs + shard.dropped_long for shard in shards)
    if not pairs:
        raise InputError("each of the training pairs has an empty side; nothing is left")
    if not any(shard.differ for shard in shards):
        raise InputError("source and target of the training text have the same content")
    if not any(shard.pairs for shard in shards):
        raise InputError(encoding.none_fits(pairs, limits))


# Processes


def _shards(encoder: Encoder, processes: int, valid: Pairs) -> Iterator[Shard]:
    """Yield the shards of all blocks in order, of which some are made at a time."""
    from tqdm import tqdm

    blocks = _blocks(encoder.data, BLOCK)
    with (
        _pool(encoder, processes) as submit,
        tqdm(unit=" lines", unit_scale=True, disable=None) as bar,
    ):
        pending: list[tuple[int, futures.Future[Shard]]] = []
        for block in blocks:
            if block.part == block.first - 1 == 0:
                _check_direction(encoder.data, block, valid)
            pending.append((len(block.lines[0]), _made(encoder, block) or submit(block)))
            while len(pending) > processes or (pending and pending[0][1].done()):
                lines, future = pending.pop(0)
                yield future.result()
                bar.update(lines)
        for lines, future in pending:
            yield future.result()
            bar.update(lines)


def _check_direction(data: DataOptions, block: Block, valid: Pairs) -> None:
    _, pairs = _texts(data, block)
    if data.task is Task.TRANSLATION and parallel_text.looks_swapped(pairs, valid.pairs):
        raise InputError(corpus.SWAPPED)


def _made(encoder: Encoder, block: Block) -> futures.Future[Shard] | None:
    """Return the shard of a block, if it is on the disk already and intact."""
    path = encoder.folder / block.name
    try:
        shard = codec.from_json(Shard, path.with_suffix(".json").read_text(encoding="utf-8"))
        if (shard.part, shard.text_sha256) != (block.part, block.sha256):
            raise InputError(
                f"{path}: its lines have changed since it was made; give another folder"
            )
        hashes = map(run_files.sha256, (path, prepared.lengths_file(path)))
        if tuple(hashes) != (shard.sha256, shard.lengths_sha256):
            return None
    except (OSError, ConfigError):
        return None
    return _completed(shard)


def _completed(shard: Shard) -> futures.Future[Shard]:
    future: futures.Future[Shard] = futures.Future()
    future.set_result(shard)
    return future


@contextlib.contextmanager
def _pool(encoder: Encoder, processes: int) -> Iterator[Callable[[Block], futures.Future[Shard]]]:
    """Yield the function that has a block encoded, in one of several processes or in this one."""
    if processes == 1:
        yield lambda block: _completed(encoder(block))
        return
    arguments = (encoder.data, encoder.limits, encoder.folder, encoder.wide)
    with futures.ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _start, arguments
    ) as pool:
        try:
            yield lambda block: pool.submit(_encode, block)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_encoder: Encoder | None = None  # of a process of the pool


def _start(data: DataOptions, limits: tuple[int, int], folder: Path, wide: bool) -> None:
    """Begin a process of the pool, which ends with the one that started it."""
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    _encoder = Encoder(data, limits, encoding.load_tokenizer(folder), folder, wide)


def _encode(block: Block) -> Shard:
    assert _encoder is not None
    return _encoder(block)
