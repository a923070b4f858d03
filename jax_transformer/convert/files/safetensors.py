"""``.safetensors`` files."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

from jax_transformer.errors import InputError


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Every tensor by name. Raises InputError where the file is missing or no safetensors file."""
    _check_readable(Path(path))
    try:
        return safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {' '.join(str(error).split())}") from None


def describe(path: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor, from the header alone."""
    _check_readable(Path(path))
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
            return {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
    except (safetensors.SafetensorError, ValueError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {' '.join(str(error).split())}") from None


def write(path: str | Path, state: Mapping[str, np.ndarray]) -> None:
    """Write whole or not at all: to a temporary name, read back and compared, synced, renamed."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # The writer takes a strided array's memory as it lies and so writes other bytes (safetensors#825)
    contiguous = {name: np.ascontiguousarray(array) for name, array in state.items()}
    try:
        safetensors.numpy.save_file(contiguous, temporary, metadata={"format": "pt"})
        again = safetensors.numpy.load_file(temporary)
        for name, array in contiguous.items():
            if again[name].dtype != array.dtype or again[name].tobytes() != array.tobytes():
                raise InputError(f"{path}: {name} was not written as it is")
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_readable(path: Path) -> None:
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be read: permission denied")
