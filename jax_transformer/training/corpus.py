"""The training data: text, tokenizer, encoded pairs, batches, and the model's configuration."""

import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int

from jax_transformer.config import Mask, TransformerConfig, Tying
from jax_transformer.data import batches, denoising, encoding, packing, parallel_text
from jax_transformer.data.batches import BatchPlan, Drawn, LengthTable, PairSource
from jax_transformer.data.encoding import EncodedPairs, Vocabulary
from jax_transformer.data.options import DataOptions, DataSource, Task, TooLong, Vocabularies
from jax_transformer.data.parallel_text import Pairs
from jax_transformer.data.prepared import Prepared
from jax_transformer.data.tokenizer import BOS, SENTINELS, Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError, counted
from jax_transformer.runtime import distributed
from jax_transformer.storage import atomic, huggingface_folder, run_files
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training.options import TrainOptions

if TYPE_CHECKING:
    from jax_transformer.training.init_source import InitSource


SWAPPED = (
    "the validation sources are in the language of the training targets, and the targets "
    "in that of the sources; swap one of the two"
)
ORDER = "hashed"
"""The name in data.json of the order of training pairs, :mod:`jax_transformer.data.shuffle`."""


@dataclass(frozen=True)
class Corpus:
    """Everything that training reads."""

    tokenizer: Vocabulary
    config: TransformerConfig
    train: PairSource
    valid: EncodedPairs
    valid_pairs: list[tuple[str, str]]
    """The text of ``valid``; empty if it is not translated."""
    valid_tasks: dict[str, Int[np.ndarray, " _"]]
    """The numbers of the pairs of ``valid`` by task, if there are several."""
    plan: BatchPlan
    valid_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """The widths of the batches of ``valid``, whose rows are not packed, and their rows."""
    about: dict[str, Any]
    """The content of data.json: hashes, counts, and the shapes of the batches."""
    init_source: "InitSource | None" = None
    """The model that the run starts from. None: random weights."""
    drawn: Drawn | None = None
    """Other tokens for ``train`` at each step: of BPE dropout, or of a task of plain lines."""


def prepare(
    options: TrainOptions, folder: RunFolder, devices: Callable[[], int] = lambda: 1
) -> Corpus:
    """Read the text, load or train the tokenizer, encode, and plan batches.

    Nothing is compiled or written. Cheap checks come first: options, files, validation text, then
    the training text. ``devices()`` is asked last, because counting devices loads JAX; every batch
    has a multiple of that many rows.
    """
    data = options.data
    parallel_text.check_readable(data.files)
    source = None
    if options.init is not None:
        from jax_transformer.training import init_source

        source = init_source.find(options, folder)
    prepared = Prepared.open(data.prepared) if data.prepared else None
    if prepared is not None:
        prepared.check(data)
    words = source.tokenizer if source else _existing_tokenizer(options, folder.path)
    if prepared is not None:
        if words is not None and words.hash != prepared.tokenizer.hash:
            raise ConfigError(f"{prepared.folder} was prepared with another tokenizer")
        words = prepared.tokenizer
    config = options.model.executed(source.config) if source else model_config(options, words)
    limits = encoding.limits(data, config)
    if data.packing:
        packing.check(data.packing, config)
    if prepared is None:
        train, valid = read_text(data)
        if words is None:
            words = train_tokenizer(data, train.pairs, config)
            config = model_config(options, words)
        text = _encode(options, config, words, train, limits)
    else:
        valid, limits = prepared.valid(), prepared.limits
        text = _prepared(options, config, prepared)
    assert words is not None
    encoded_valid, valid_tasks = _joined(_encode_valid(options, words, valid, limits), data.tasks)
    rows_multiple = devices()
    plan, shapes = _plan(options, config, folder, text, rows_multiple)
    longest = int(encoded_valid.lengths.max())
    if longest > shapes[0][-1]:  # than all of training
        widest = min(-(-longest // batches.STEP) * batches.STEP, config.longest)
        rows = batches.rows_per_batch((widest,), data.tokens_per_batch, rows_multiple)
        shapes = (*shapes[0], widest), (*shapes[1], *rows)
    about = {
        "train_pairs": int(text.table.counts.sum()),
        "valid_pairs": len(encoded_valid.sources),
        "dropped_empty": text.dropped_empty + valid.dropped_empty,
        "dropped_long": text.dropped_long + encoded_valid.dropped_long,
        "cut_long": text.cut_long,
        "train_sha256": text.sha256,
        "valid_sha256": parallel_text.content_hash(valid.pairs),
        "tokenizer_sha256": words.hash,
        "widths": list(plan.widths),
        "rows": list(plan.rows),
        **({"target_widths": list(plan.target_widths)} if plan.target_widths else {}),
        "order": ORDER,
        "batches_per_epoch": plan.batches_per_epoch,
        "fill": round(plan.fill(), 4),
        **({"init_sha256": source.sha256} if source else {}),
    }
    translated = encoded_valid.indices if data.task is Task.TRANSLATION else ()
    valid_pairs = list(map(valid.pairs.__getitem__, translated))
    return Corpus(
        words,
        config,
        text.pairs,
        encoded_valid,
        valid_pairs,
        valid_tasks,
        plan,
        shapes,
        about,
        source,
        text.drawn,
    )


# Text


def read_text(options: DataOptions) -> tuple[Pairs, Pairs]:
    """Training and validation pairs. Raises InputError that names the file and line.

    Validation, the shorter one, is read first: its faults are reported before the training text is
    read.
    """
    valid, train = read_split(options, "valid"), read_split(options, "train")
    if parallel_text.looks_swapped(train.pairs, valid.pairs):
        raise InputError(SWAPPED)
    return train, valid


def read_split(options: DataOptions, split: str) -> Pairs:
    """Return the pairs of "train" or "valid". Raises InputError that names the file and line."""
    if options.kind is DataSource.PHRASES:
        from jax_transformer.data import phrases

        pairs = phrases.load()[split]
        if options.task is not Task.TRANSLATION:
            pairs = [(text, "") for pair in pairs for text in pair]
        return Pairs(pairs, 0)
    fields = (options.source_field, options.target_field)
    if options.kind is DataSource.DATASET:
        assert options.dataset is not None
        return parallel_text.read_dataset(
            options.dataset, options.dataset_config, getattr(options, f"{split}_split"), *fields
        )
    if options.kind is DataSource.PAIRS:
        return parallel_text.joined(
            [parallel_text.read_pair_file(path, *fields) for path in getattr(options, split)]
        )
    sources, targets = getattr(options, f"{split}_source"), getattr(options, f"{split}_target")
    if options.task is not Task.TRANSLATION:
        return parallel_text.joined(list(map(parallel_text.read_texts, sources)))
    return parallel_text.joined(list(map(parallel_text.read_pairs, sources, targets)))


# Tokenizer and model


def _existing_tokenizer(options: TrainOptions, folder: Path) -> Vocabulary | None:
    """Return the tokenizer that the options name or the run has; None if it must be trained.

    A named tokenizer is read again at every resume, so that a changed file is noticed. A folder
    without data.json, which is written last, is unfinished: its tokenizer is not used.
    """
    data = options.data
    if (named := encoding.named_tokenizer(data)) is not None:
        return named
    if not (folder / "data.json").exists():
        return None
    loaded = encoding.load_tokenizer(folder)
    if isinstance(loaded, TokenizerPair) != (data.vocabularies is Vocabularies.SEPARATE):
        raise InputError(
            f"{folder}: its tokenizer does not fit data.vocabularies={data.vocabularies.value}"
        )
    return loaded


def train_tokenizer(
    data: DataOptions, pairs: list[tuple[str, str]], model: TransformerConfig
) -> Vocabulary:
    """Train one tokenizer for both sides or one for each, with the model's special ids."""
    learn = partial(
        Tokenizer.train,
        vocab_size=data.vocab_size,
        bos_id=model.bos_id,
        eos_id=model.eos_id,
        sentinels=SENTINELS if Task.SPAN_CORRUPTION in data.tasks else 0,
        mask=Task.DENOISING in data.tasks,
    )
    if data.vocabularies is Vocabularies.SHARED:
        return learn(itertools.chain.from_iterable(pairs), pad_id=model.source_pad_id)
    return TokenizerPair(
        learn(map(operator.itemgetter(0), pairs), pad_id=model.source_pad_id),
        learn(map(operator.itemgetter(1), pairs), pad_id=model.target_pad_id),
    )


def model_config(options: TrainOptions, vocabulary: Vocabulary | None) -> TransformerConfig:
    """Return the model configuration with the tokenizer's sizes and special ids.

    Without a tokenizer, with the sizes that one will be trained to. Raises ConfigError if the two
    sides cannot have the vocabularies that the options ask for.
    """
    data = options.data
    if vocabulary is None:
        model = options.model.config(data.vocab_size, data.vocab_size)
    else:
        source, target = vocabulary.source, vocabulary.target
        ids = {
            "source_pad_id": source.pad_id,
            "target_pad_id": target.pad_id,
            "bos_id": target.bos_id,
            "eos_id": target.eos_id,
        }
        model = options.model.config(source.vocab_size, target.vocab_size, **ids)
        if target.bos_id == target.pad_id and Mask.TARGET_PADDING in model.decoder.self_mask:
            raise ConfigError(
                f"the tokenizer has no {BOS}: its targets begin with padding, which preset "
                f"{options.model.preset} masks"
            )
    if data.vocabularies is Vocabularies.SHARED:
        if model.source_pad_id != model.target_pad_id:
            raise ConfigError(
                "one vocabulary for both sides needs one pad id, "
                f"not {model.source_pad_id} and {model.target_pad_id}"
            )
    elif model.tying is Tying.ALL:
        raise ConfigError(
            "tying=all shares one embedding between two vocabularies; "
            "with data.vocabularies=separate give model.tying output or none"
        )
    return model


@dataclass(frozen=True)
class TrainingText:
    """The training text as ids, in memory or on disk."""

    pairs: PairSource
    """The pairs, in the order of the table, or of the kinds."""
    table: LengthTable
    drawn: Drawn | None
    dropped_empty: int
    dropped_long: int
    cut_long: int
    sha256: str
    kinds: packing.Kinds | None = None
    """The kinds of pairs if they are to be packed: then their order is that of the kinds."""


def _encode(
    options: TrainOptions,
    config: TransformerConfig,
    words: Vocabulary,
    train: Pairs,
    limits: tuple[int, int],
) -> TrainingText:
    """Return the training text as ids, in memory."""
    data = options.data
    drawn: Drawn | None = None
    if data.task is not Task.TRANSLATION:
        ends = tuple(itertools.accumulate(train.counts[:-1])) if data.train_tasks else ()
        tasks = data.train_tasks or (data.task,)
        encoded, drawn = _texts(options, words, train, limits, tasks, ends)
    else:
        encoded = encoding.encode_pairs(
            train.pairs, words.source, words.target, *limits, cut=data.too_long is TooLong.CUT
        )
        if data.bpe_dropout:
            from jax_transformer.data import bpe_dropout

            drawn = bpe_dropout.dropped_pairs(
                data.bpe_dropout, train.pairs, words.source, words.target, options.seed
            )
    lengths = encoded.lengths if drawn is None else drawn.lengths(encoded, config.longest)
    files = parts(data, train, encoded)
    (table, order), kinds = LengthTable.of(lengths, files), None
    if data.packing:
        kinds, order = packing.Kinds.of(lengths, files)
    return TrainingText(
        encoded.take(order),
        table,
        drawn,
        train.dropped_empty,
        encoded.dropped_long,
        encoded.cut_long,
        parallel_text.content_hash(train.pairs),
        kinds,
    )


def _prepared(options: TrainOptions, config: TransformerConfig, prepared: Prepared) -> TrainingText:
    """Return the training text of a prepared corpus. Raises ConfigError if it does not fit."""
    data, manifest = options.data, prepared.manifest
    pairs = prepared.train(by_part=data.by_file)
    table = pairs.table
    if table.widest.max() > config.longest:
        raise ConfigError(
            f"{prepared.folder} has pairs of {table.widest.max()} tokens, over the model's "
            f"max_length={config.longest}: raise it, or prepare with a lower maximum"
        )
    if data.train_weights and len(data.train_weights) != manifest.parts:
        raise ConfigError(
            f"data.train_weights has {len(data.train_weights)} weights, and "
            f"{prepared.folder} was prepared from {counted(manifest.parts, 'file')}"
        )
    if data.train_temperature and manifest.parts < 2:
        raise ConfigError(
            f"data.train_temperature={data.train_temperature} needs several training files, and "
            f"{prepared.folder} was prepared from 1 file"
        )
    drawn = None
    if data.task is not Task.TRANSLATION:
        task = denoising.objective(data, data.task, prepared.tokenizer.source)
        drawn = denoising.DrawnTexts((task,), options.seed)
    indexed = prepared.indexed(pairs, drawn) if data.packing else None
    return TrainingText(
        pairs if indexed is None else indexed,
        table,
        drawn,
        manifest.total("dropped_empty"),
        manifest.total("dropped_long"),
        manifest.total("cut_long"),
        prepared.sha256,
        None if indexed is None else indexed.kinds,
    )


def _encode_valid(
    options: TrainOptions, words: Vocabulary, valid: Pairs, limits: tuple[int, int]
) -> list[EncodedPairs]:
    """Return the validation text of each task."""
    if options.data.task is not Task.TRANSLATION:
        of_tasks = []
        for task in options.data.tasks:
            texts, drawn = _texts(options, words, valid, limits, (task,))
            of_tasks.append(drawn.at(-1, np.arange(len(texts.sources)), texts, 0))
        return of_tasks
    return [encoding.encode_pairs(valid.pairs, words.source, words.target, *limits)]


def _joined(
    texts: Sequence[EncodedPairs], tasks: Sequence[Task]
) -> tuple[EncodedPairs, dict[str, Int[np.ndarray, " _"]]]:
    """Return the texts of all tasks, and the numbers of each task's if there are several."""
    if len(texts) == 1:
        return texts[0], {}
    counts = [len(each.sources) for each in texts]
    numbers = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
    joined = dataclasses.replace(
        texts[0],
        sources=[source for each in texts for source in each.sources],
        targets=[target for each in texts for target in each.targets],
        indices=np.concatenate([each.indices for each in texts]),
    )
    return joined, dict(zip([task.value for task in tasks], numbers, strict=True))


def _texts(
    options: TrainOptions,
    words: Vocabulary,
    text: Pairs,
    limits: tuple[int, int],
    tasks: tuple[Task, ...],
    ends: tuple[int, ...] = (),
) -> tuple[EncodedPairs, denoising.DrawnTexts]:
    """Return lines as texts for tasks of plain lines. Raises InputError if none is left."""
    data, lines = options.data, [line for line, _ in text.pairs]
    most = [min(limit, data.packing or limit) for limit in limits]
    limits = (most[0], most[1])
    encoded, texts = drawn_texts(data, words, lines, limits, options.seed, tasks, ends)
    if not encoded.sources:
        raise InputError(f"none of the {len(lines)} lines has two tokens")
    return encoded, texts


def drawn_texts(
    data: DataOptions,
    words: Vocabulary,
    lines: Sequence[str],
    limits: tuple[int, int],
    seed: int = 0,
    tasks: tuple[Task, ...] = (),
    ends: tuple[int, ...] = (),
) -> tuple[EncodedPairs, denoising.DrawnTexts]:
    """Return lines as texts for tasks of plain lines, of which there may be none."""
    objectives = [denoising.objective(data, task, words.source) for task in tasks or (data.task,)]
    return denoising.drawn_texts(lines, words, tuple(objectives), *limits, seed, ends)


# Batches


def parts(options: DataOptions, text: Pairs, encoded: EncodedPairs) -> Int[np.ndarray, " n"] | None:
    """Return the file of each encoded pair, from 0 on; None if files have no weights."""
    if not options.by_file:
        return None
    return np.repeat(np.arange(len(text.counts)), text.counts)[encoded.indices]


def weights(options: DataOptions, table: LengthTable) -> tuple[float, ...]:
    """Return the epochs of each training file in an epoch; empty: one of each.

    With a temperature T, a pair is drawn from a file of n pairs with a probability in proportion to
    n^(1/T) (Arivazhagan et al. 2019, https://arxiv.org/abs/1907.05019).
    """
    if not options.train_temperature:
        return options.train_weights
    counts = np.maximum(table.counts.sum(axis=1), 1)
    return tuple(((counts / counts.max()) ** (1 / options.train_temperature - 1)).tolist())


def _plan(
    options: TrainOptions,
    config: TransformerConfig,
    folder: RunFolder,
    text: TrainingText,
    rows_multiple: int,
) -> tuple[BatchPlan, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the batches of training, and the widths and rows of those of validation."""
    data, table = options.data, text.table
    widths = batches.choose_widths(table, data.buckets, config.longest)
    plan = partial(BatchPlan, seed=options.seed, weights=weights(data, table))
    if data.packing:
        assert text.kinds is not None
        longest, tokens = table.longest.max(axis=(0, 1)), table.tokens.sum(axis=(0, 1))
        packed = packing.pack_all(text.kinds, data.packing, longest, tokens)
        full = np.broadcast_to(packed.widths, (len(packed.parts), 1, 2))
        of_rows = LengthTable(packed.parts[:, None], table.tokens.sum(axis=1, keepdims=True), full)
        width, other = packed.widths
        rows = _rows(options, folder, (data.packing,), rows_multiple, len(packed), "packed rows")
        valid_rows = batches.rows_per_batch(widths, data.tokens_per_batch, rows_multiple)
        batch_plan = plan(of_rows, (width,), rows, target_widths=(other,), packed=packed)
        return batch_plan, (widths, valid_rows)
    rows = _rows(options, folder, widths, rows_multiple, int(table.counts.sum()))
    apart = data.task is not Task.TRANSLATION  # targets may be short
    others = batches.target_widths(table, widths) if apart else None
    return plan(table, widths, rows, target_widths=others), (widths, rows)


def _rows(
    options: TrainOptions,
    folder: RunFolder,
    widths: tuple[int, ...],
    rows_multiple: int,
    count: int,
    items: str = "training pairs",
) -> tuple[int, ...]:
    """Return the rows per batch of each width: those in data.json, so that batches stay the same,
    or as the options say.

    Raises ConfigError if today's devices cannot share the recorded ones, InputError if ``count``
    pairs or packed rows fill no batch: the widest bucket has the fewest rows, and gets the pairs
    left over in the others.
    """
    mesh = options.mesh
    rows = _read_about(folder).get("rows") if folder.data.exists() else None
    if (
        not isinstance(rows, list)
        or len(rows) != len(widths)
        or not all(isinstance(n, int) and n > 0 for n in rows)
    ):
        rows = batches.rows_per_batch(widths, options.data.tokens_per_batch, rows_multiple)
    common = math.gcd(*rows)
    if common % rows_multiple:
        usable = [n for n in range(mesh.fsdp, rows_multiple, mesh.fsdp) if common % n == 0]
        remedy = f"--devices {max(usable) * mesh.tensor}" if usable else "another --mesh.fsdp"
        raise ConfigError(
            f"{folder.path}: {rows_multiple * mesh.tensor} devices cannot share this run's batches "
            f"of {', '.join(map(str, rows))} rows: continue with {remedy}, or give another --run"
        )
    if count < rows[-1]:
        remedy = f"devices, {rows_multiple} now,"
        if count >= rows_multiple:
            remedy = f"data.tokens_per_batch to {count * widths[-1]}"
        raise InputError(
            f"{count} {items} are less than one batch of {rows[-1]} rows of {widths[-1]} "
            f"tokens; lower {remedy} or give more text"
        )
    return tuple(rows)


# data.json


def changes(corpus: Corpus, folder: RunFolder) -> list[str]:
    """Return the entries in which a resumed run's data.json differs, as ``train_pairs (60 -> 59)``.

    Raises InputError if the file is damaged.
    """
    before = {"order": ORDER} | _read_about(folder)
    return [
        f"{name} ({_short(before.get(name))} -> {_short(now)})"
        for name, now in corpus.about.items()
        if before.get(name) != now
    ]


def _read_about(folder: RunFolder) -> dict[str, Any]:
    try:
        return dict(json.loads(folder.data.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(f"{folder.data}: damaged: {error}") from None


def _short(value: Any) -> str:
    return f"{value[:8]}…" if isinstance(value, str) else str(value)


def check(corpus: Corpus, folder: RunFolder) -> None:
    """Raise ConfigError if the data of a resumed run changed, InputError if this process has read
    other text than the first one.
    """
    changed = changes(corpus, folder) if folder.data.exists() else []
    if changed:
        raise ConfigError(
            f"{folder.path}: the data changed since this run began ({', '.join(changed)}); "
            "give another --run"
        )
    if folder.data.exists() and "order" not in _read_about(folder):
        distributed.say(
            f"warning: {folder.path} began with the order of pairs of version 0.1; "
            "the result will not be that of an uninterrupted run"
        )
    first = distributed.from_first("data", corpus.about)
    if first != corpus.about:
        other = [name for name, value in corpus.about.items() if value != first.get(name)]
        raise InputError(
            f"process {distributed.index()} reads other data than process 0: "
            f"{', '.join(other)} differ"
        )
    distributed.barrier("equal data")


def record(corpus: Corpus, folder: RunFolder) -> None:
    """Write tokenizer, config.json and, last, data.json, unless the folder has them already.

    It has the hash of the options that the run began with, in which most runs differ: see
    :mod:`jax_transformer.storage.run_files`.
    """
    if folder.data.exists():
        return
    encoding.save_tokenizer(corpus.tokenizer, folder.path)
    source = corpus.init_source
    # After the tokenizer, whose files include the generation config as it was
    if source is not None and source.files:
        huggingface_folder.write_files(folder.path / huggingface_folder.IN_RUN, source.files)
    atomic.write_text(folder.config, corpus.config.portable.to_json())
    about = dict(corpus.about)
    if folder.train_config.exists():
        about["options_sha256"] = run_files.sha256(folder.train_config)
    atomic.write_text(folder.data, json.dumps(about, indent=2) + "\n")
