"""From the data options to encoded pairs and a batch plan."""

import json
from dataclasses import dataclass
from typing import Any

from jax_transformer.config import TransformerConfig
from jax_transformer.data import batches, parallel_text, phrases
from jax_transformer.data.batches import BatchPlan, EncodedPairs
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.run_folder import RunFolder

TextPairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Corpus:
    """What training reads."""

    tokenizer: Tokenizer
    config: TransformerConfig
    train: EncodedPairs
    valid: EncodedPairs
    valid_pairs: TextPairs
    plan: BatchPlan
    about: dict[str, Any]
    """What data.json records: hashes, counts, and the shapes of the batches."""


def _read(options: TrainOptions) -> tuple[TextPairs, TextPairs, int]:
    """Training and validation pairs, and how many pairs with an empty side were dropped."""
    files = [path for path in options.data.files.values() if path is not None]
    if not files:
        text = phrases.load()
        return text["train"], text["valid"], 0
    train_source, train_target, valid_source, valid_target = files  # the options take all four or none
    train, valid = parallel_text.read_pairs(train_source, train_target), parallel_text.read_pairs(valid_source, valid_target)
    return train.pairs, valid.pairs, train.dropped_empty + valid.dropped_empty


def prepare(options: TrainOptions, folder: RunFolder) -> Corpus:
    """Read the text, train the tokenizer (or take the run's own), encode, and plan the batches. Nothing is compiled or written yet."""
    ids = options.model.config(options.data.vocab_size)  # the preset's special ids, and an early check of every size
    if ids.source_pad_id != ids.target_pad_id:
        raise ConfigError(f"one vocabulary for both sides needs one pad id, not {ids.source_pad_id} and {ids.target_pad_id}")
    train, valid, dropped_empty = _read(options)
    if folder.tokenizer.exists():
        tokenizer = Tokenizer.load(folder.tokenizer)
    else:
        lines = (line for pair in train for line in pair)
        tokenizer = Tokenizer.train(lines, options.data.vocab_size, pad_id=ids.source_pad_id, bos_id=ids.bos_id, eos_id=ids.eos_id)
    config = options.model.config(tokenizer.vocab_size)
    encoded, encoded_valid = (batches.encode_pairs(pairs, tokenizer, tokenizer, config.max_length) for pairs in (train, valid))
    widths = batches.choose_widths(encoded.lengths.max(axis=1), options.data.buckets, config.max_length)
    rows = batches.rows_per_batch(widths, options.data.tokens_per_batch)
    plan = BatchPlan(encoded.lengths, widths, rows, options.seed)
    about = {
        "train_pairs": len(encoded.sources),
        "valid_pairs": len(encoded_valid.sources),
        "dropped_empty": dropped_empty,
        "dropped_long": encoded.dropped_long + encoded_valid.dropped_long,
        "train_sha256": parallel_text.content_hash(train),
        "valid_sha256": parallel_text.content_hash(valid),
        "tokenizer_sha256": tokenizer.hash,
        "widths": list(widths),
        "rows": list(rows),
        "batches_per_epoch": plan.batches_per_epoch,
        "fill": round(plan.fill(), 4),
    }
    return Corpus(tokenizer, config, encoded, encoded_valid, [valid[i] for i in encoded_valid.kept], plan, about)


def record(corpus: Corpus, folder: RunFolder) -> None:
    """Write tokenizer.json, config.json and data.json, or check that a run that goes on still has the same data."""
    if folder.data.exists():
        before = json.loads(folder.data.read_text())
        changed = [name for name in corpus.about if before.get(name) != corpus.about[name]]
        if changed:
            raise ConfigError(f"{folder.path}: the data changed since this run began ({', '.join(changed)}); give another --run")
        return
    corpus.tokenizer.save(folder.tokenizer)
    folder.write(folder.config, corpus.config.to_json())
    folder.write(folder.data, json.dumps(corpus.about, indent=2) + "\n")
