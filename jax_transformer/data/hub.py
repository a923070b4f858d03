"""Pairs of a Hugging Face data set, of the hub or in a local folder."""

from typing import Any

from jax_transformer import errors
from jax_transformer.data import pair_files, parallel_text


def read_pairs(
    name: str, config: str | None, split: str, source_field: str, target_field: str
) -> parallel_text.Pairs:
    """Return the pairs of a split.

    Raises ConfigError without the library, InputError that names the data set and the row.
    """
    where = f"data set {name}, split {split}"
    rows = _load(name, config, split, where)
    columns = list(dict.fromkeys(field.partition(".")[0] for field in (source_field, target_field)))
    for column in columns:
        if column not in rows.column_names:
            known = list(rows.column_names)
            raise errors.InputError(
                f"{where}: no column {column!r}{errors.nearest(column, known)}; "
                f"known: {', '.join(known)}"
            )
    pairs = []
    for number, row in enumerate(rows.select_columns(columns), 1):
        at = f"{where}: row {number}"
        pairs.append(
            (pair_files.field(row, source_field, at), pair_files.field(row, target_field, at))
        )
    if not pairs:
        raise errors.InputError(f"{where}: the split is empty")
    return parallel_text.checked(pairs, where)


def _load(name: str, config: str | None, split: str, where: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise errors.ConfigError(
            "data.dataset needs Hugging Face datasets: pip install 'jax-seq2seq[hub]'"
        ) from None
    try:
        return datasets.load_dataset(name, config, split=split)
    except (
        Exception
    ) as error:  # the library's own classes, network errors, and what its readers raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise errors.InputError(f"{where}: {reason}") from error
