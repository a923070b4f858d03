"""Pairs in Parquet files, of which only some rows are in memory at a time."""

from collections.abc import Iterator

from jax_transformer import errors
from jax_transformer.data import parallel_text

_ROWS = 2**12  # to read at a time: a Python object is made of each value


def read_rows(path: str, source_field: str, target_field: str) -> Iterator[tuple[str, str]]:
    """Yield the pair of each row.

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
            columns = parallel_text.columns_of(
                path, file.schema_arrow.names, source_field, target_field
            )
            for batch in file.iter_batches(_ROWS, columns=columns):
                for number, row in enumerate(batch.to_pylist(), count + 1):
                    where = f"{path}: row {number}"
                    yield (
                        parallel_text.field(row, source_field, where),
                        parallel_text.field(row, target_field, where),
                    )
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
