"""Stored tensors: the dtypes that files may have, shape and dtype of a tensor, and its view of a
PyTorch storage.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    **{
        name: np.dtype(name)
        for name in (
            "float64 float32 float16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool"
        ).split()
    },
    **{name: np.dtype(name) for name in "complex64 complex128".split()},
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz".split()
    },
    "float8_e8m0fnu": np.dtype(ml_dtypes.float8_e8m0fnu),
}
# Newer dtypes have no storage of their own; they use an untyped one
STORAGES: dict[str, str] = {
    **{
        "DoubleStorage": "float64",
        "FloatStorage": "float32",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
    },
    **{
        "LongStorage": "int64",
        "IntStorage": "int32",
        "ShortStorage": "int16",
        "CharStorage": "int8",
        "ByteStorage": "uint8",
    },
    **{
        "BoolStorage": "bool",
        "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128",
    },
}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    """By NumPy's name, as ``float32``, or that of ml_dtypes, as ``bfloat16``."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)).itemsize

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True)
class Note:
    """An entry of a file that has no counterpart of its own, and the reason."""

    name: str
    reason: str


def is_float(dtype: str) -> bool:
    """True for the dtypes that weights of a model may have."""
    return dtype in ("float64", "float32", "float16", "bfloat16")


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """True if two arrays are equal bit for bit, dtypes and shapes included."""
    return one is other or (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


@dataclass(frozen=True)
class TensorView:
    """A tensor of a PyTorch file: ``offset`` and ``stride`` count elements in the storage of that
    name.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    storage: str
    offset: int
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array: more than the storage has if a stride is 0."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """One more than the last element that is used."""
        if not all(self.shape):
            return self.offset
        return (
            self.offset
            + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
            + 1
        )

    def region(self) -> tuple[object, ...]:
        """A key that is equal for tensors with the same elements, also transposed or flattened."""
        runs: list[tuple[int, int]] = []
        for step, size in sorted(
            (step, size) for size, step in zip(self.shape, self.stride, strict=True) if size != 1
        ):
            if runs and step == runs[-1][0] * runs[-1][1]:
                runs[-1] = (runs[-1][0], runs[-1][1] * size)
            else:
                runs.append((step, size))
        return self.storage, str(self.dtype), self.offset, tuple(runs)


@dataclass(frozen=True)
class Storage:
    """``size`` elements of the member ``key``."""

    key: str
    dtype: np.dtype
    size: int
    untyped: bool
