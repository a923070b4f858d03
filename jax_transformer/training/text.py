"""From the data options to pairs of text, with everything refused that can be told from the text alone."""

from jax_transformer.data import hub, pair_files, parallel_text, phrases
from jax_transformer.data.options import DataOptions, Kind
from jax_transformer.data.parallel_text import Pairs
from jax_transformer.errors import InputError


def read(options: DataOptions) -> tuple[Pairs, Pairs]:
    """Training and validation pairs. Raises InputError that names the file and line.

    Validation is read first: it is the shorter one, and a fault in it is told before the training text is read.
    """
    if options.kind is Kind.PHRASES:
        splits = phrases.load()
        return Pairs(splits["train"], 0), Pairs(splits["valid"], 0)
    valid, train = _split(options, "valid"), _split(options, "train")
    if parallel_text.looks_swapped(train.pairs, valid.pairs):
        raise InputError(
            "the validation sources are in the language of the training targets, and the other way round; swap one of the two"
        )
    return train, valid


def _split(options: DataOptions, split: str) -> Pairs:
    """The pairs of "train" or "valid"."""
    fields = (options.source_field, options.target_field)
    if options.kind is Kind.DATASET:
        assert options.dataset is not None
        return hub.read_pairs(
            options.dataset, options.dataset_config, getattr(options, f"{split}_split"), *fields
        )
    if options.kind is Kind.PAIRS:
        return parallel_text.joined(
            [pair_files.read_pairs(path, *fields) for path in getattr(options, split)]
        )
    files = zip(
        getattr(options, f"{split}_source"), getattr(options, f"{split}_target"), strict=True
    )
    return parallel_text.joined(
        [parallel_text.read_pairs(source, target) for source, target in files]
    )
