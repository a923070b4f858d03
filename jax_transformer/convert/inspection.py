"""The content of a file or folder of weights. No weights are loaded, and for files no jax."""

from pathlib import Path

from jax_transformer.formats import hub, registry
from jax_transformer.formats.contents import Contents


def inspect(path: str | Path) -> Contents:
    """Describe the file or folder at ``path``.

    Raises InputError if its format is not known or a checksum does not hold, CheckpointError if a
    checkpoint is damaged, UnsafeFileError if a file tries to run code or declares more data than it
    has.
    """
    path = hub.local(path)
    return registry.of(path).inspect(path)
