"""From the data options to encoded pairs and a batch plan."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.data import batches, encoding, parallel_text, tokenizer
from jax_transformer.data.batches import BatchPlan
from jax_transformer.data.encoding import EncodedPairs
from jax_transformer.data.options import TooLong
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import atomic
from jax_transformer.storage.huggingface import IN_RUN, write_files
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import init_source, text, vocabulary
from jax_transformer.training.init_source import InitSource
from jax_transformer.training.options import TrainOptions


@dataclass(frozen=True)
class Corpus:
    """What training reads."""

    tokenizer: Tokenizer | TokenizerPair
    config: TransformerConfig
    train: EncodedPairs
    valid: EncodedPairs
    valid_pairs: list[tuple[str, str]]
    """The text of ``valid``."""
    plan: BatchPlan
    about: dict[str, Any]
    """What data.json records: hashes, counts, and the shapes of the batches."""
    initial: InitSource | None = None
    """What the run begins from, where that is not random weights."""


def prepare(
    options: TrainOptions, folder: RunFolder, devices: Callable[[], int] = lambda: 1
) -> Corpus:
    """Read the text, take the tokenizer that is there or train it, encode, and plan batches of a multiple of ``devices()`` rows.

    Nothing is compiled or written yet. What costs little is checked first: options, then files, then validation, then the training text;
    how many devices there are is asked last, because to find them is to load JAX.
    """
    data = options.data
    parallel_text.check_readable(data.files)
    begins = init_source.find(options, folder)
    found = begins.tokenizer if begins else vocabulary.ready(options, folder.path)
    config = begins.config if begins else vocabulary.config(options, found)
    limits = vocabulary.limits(data, config)
    train, valid = text.read(data)
    if found is None:
        found = vocabulary.train(data, train.pairs, config)
        config = vocabulary.config(options, found)
    encoded_valid = encoding.encode_pairs(valid.pairs, found.source, found.target, *limits)
    encoded = encoding.encode_pairs(
        train.pairs, found.source, found.target, *limits, cut=data.too_long is TooLong.CUT
    )
    widths = batches.choose_widths(encoded.lengths.max(axis=1), data.buckets, config.longest)
    rows_multiple = devices()
    rows = _rows_of_run(folder, widths, rows_multiple) or batches.rows_per_batch(
        widths, data.tokens_per_batch, rows_multiple
    )
    plan = BatchPlan(encoded.lengths, widths, rows, options.seed)
    _check_one_batch(plan, rows_multiple)
    about = {
        "train_pairs": len(encoded.sources),
        "valid_pairs": len(encoded_valid.sources),
        "dropped_empty": train.dropped_empty + valid.dropped_empty,
        "dropped_long": encoded.dropped_long + encoded_valid.dropped_long,
        "cut_long": encoded.cut_long,
        "train_sha256": parallel_text.content_hash(train.pairs),
        "valid_sha256": parallel_text.content_hash(valid.pairs),
        "tokenizer_sha256": found.hash,
        "widths": list(plan.widths),
        "rows": list(plan.rows),
        "batches_per_epoch": plan.batches_per_epoch,
        "fill": round(plan.fill(), 4),
        **({"init_sha256": begins.sha256} if begins else {}),
    }
    return Corpus(
        found,
        config,
        encoded,
        encoded_valid,
        [valid.pairs[i] for i in encoded_valid.kept],
        plan,
        about,
        begins,
    )


def _rows_of_run(
    folder: RunFolder, widths: tuple[int, ...], rows_multiple: int
) -> tuple[int, ...] | None:
    """The rows that a run which goes on had so far, where its devices of now can share them: its batches then stay the same."""
    rows = _recorded(folder).get("rows") if folder.data.exists() else None
    if not isinstance(rows, list) or len(rows) != len(widths):
        return None
    return (
        tuple(rows)
        if all(
            isinstance(count, int) and count > 0 and count % rows_multiple == 0 for count in rows
        )
        else None
    )


def _check_one_batch(plan: BatchPlan, rows_multiple: int) -> None:
    """Raises InputError where there is not one full batch: the widest has the fewest rows, and gets what other buckets have left over."""
    pairs, rows, width = len(plan.lengths), plan.rows[-1], plan.widths[-1]
    if pairs < rows:
        remedy = (
            f"data.tokens_per_batch to {pairs * width}"
            if pairs >= rows_multiple
            else f"devices, {rows_multiple} now,"
        )
        raise InputError(
            f"{pairs} training pairs are less than one batch of {rows} rows of {width} tokens; lower {remedy} or give more text"
        )


def changes(corpus: Corpus, folder: RunFolder) -> list[str]:
    """What data.json of a run that goes on records otherwise, as ``train_pairs (60 -> 59)``. Raises InputError for a file that is damaged."""
    before = _recorded(folder)
    return [
        f"{name} ({_short(before.get(name))} -> {_short(now)})"
        for name, now in corpus.about.items()
        if before.get(name) != now
    ]


def _recorded(folder: RunFolder) -> dict[str, Any]:
    """What data.json holds."""
    try:
        return dict(json.loads(folder.data.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InputError(f"{folder.data}: damaged: {error}") from None


def _short(value: Any) -> str:
    return f"{value[:8]}…" if isinstance(value, str) else str(value)


def check(corpus: Corpus, folder: RunFolder) -> None:
    """Raises ConfigError where a run that goes on no longer has the same data."""
    changed = changes(corpus, folder) if folder.data.exists() else []
    if changed:
        raise ConfigError(
            f"{folder.path}: the data changed since this run began ({', '.join(changed)}); give another --run"
        )


def record(corpus: Corpus, folder: RunFolder) -> None:
    """Write what the run keeps of its beginning, the tokenizer, config.json and, last, data.json, where the folder does not hold them yet."""
    if folder.data.exists():
        return
    tokenizer.save_folder(corpus.tokenizer, folder.path)
    if (
        corpus.initial is not None and corpus.initial.files
    ):  # behind the tokenizer, whose files have how to decode as it was
        write_files(folder.path / IN_RUN, corpus.initial.files)
    atomic.write_text(folder.config, corpus.config.to_json())
    atomic.write_text(folder.data, json.dumps(corpus.about, indent=2) + "\n")
