"""Stored tensors: their dtypes and shapes, the views that PyTorch's files have of their storages,
the check that tensors fit a model, and casts with what they lose.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage.untrusted import plain

Shape = tuple[int, ...]
_PIECE = 1 << 21  # bytes that are compared at a time
_TILE = 32
_SHOWN = 12  # problems of weights that do not fit, in a message
FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that weights of a model may have."""
_NUMPY = "float64 float32 float16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool"
_MORE = "bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in f"{_NUMPY} complex64 complex128 {_MORE}".split()
}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    """By NumPy's name, for example ``float32``, or ml_dtypes', for example ``bfloat16``."""

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
    """Return True for the dtypes that weights of a model may have."""
    return dtype in FLOATS


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two arrays are equal bit for bit, dtypes and shapes included. No copies."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return all(
        np.array_equal(_bits(piece), _bits(its_piece)) for piece, its_piece in _pieces(one, other)
    )


def _bits(array: np.ndarray) -> np.ndarray:
    """Return the array as integers, so that NaN equals NaN and 0.0 does not equal -0.0."""
    if array.dtype.itemsize > 8 or array.dtype.hasobject:
        return np.frombuffer(array.tobytes(), np.uint8)
    return array.view(f"u{array.dtype.itemsize}")


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
        steps = zip(self.shape, self.stride, strict=True)
        used = 1 + sum((size - 1) * step for size, step in steps) if all(self.shape) else 0
        return self.offset + used

    def region(self) -> tuple[object, ...]:
        """Return a key: equal for tensors with the same elements, also transposed or flattened."""
        runs: list[tuple[int, int]] = []
        for step, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 1:
                continue
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


# The check that tensors fit a model: one error names everything that does not


def problems(
    tensors: Mapping[str, TensorInfo], expected: Mapping[str, Shape], *, floating: bool = True
) -> list[str]:
    """List every tensor that is missing, unexpected or of another shape.

    With ``floating``, also every tensor whose numbers are not floating-point numbers.
    """
    free = sorted(expected.keys() - tensors.keys())
    wrong = [f"missing {name} {expected[name]}" for name in free]
    for name in sorted(tensors.keys() - expected.keys()):
        hint = nearest(name, free or sorted(expected))
        wrong.append(f"unexpected {plain(name)} {tensors[name].shape}{hint}")
    for name in sorted(expected.keys() & tensors.keys()):
        if tensors[name].shape != expected[name]:
            wrong.append(
                f"mis-shaped {name}: the checkpoint has {tensors[name].shape}, "
                f"the model {expected[name]}"
            )
        if floating and not is_float(tensors[name].dtype):
            wrong.append(f"{name} is {tensors[name].dtype}, and weights are floating-point numbers")
    return wrong


def differing_ties(ties: Mapping[str, str], state: Mapping[str, np.ndarray]) -> list[str]:
    """List the tensors that differ from the ones that the model ties them with, by ``ties``."""
    return [
        f"{name} differs from {other}, but the model ties them"
        for name, other in ties.items()
        if name in state and other in state and not same(state[name], state[other])
    ]


def refuse(problems: Sequence[str]) -> None:
    """Raise one InputError with all problems, if there are any; see :func:`refusal`."""
    if problems:
        raise refusal(problems)


def refusal(problems: Sequence[str], hint: str = "") -> InputError:
    """Return the error of weights that do not fit the model.

    The message names a dozen problems and ends with ``hint``; all are the error's ``details``.
    """
    shown = _some_of_each_kind(problems, _SHOWN)
    more = len(problems) - len(shown)
    rest = f"; and {more} more, which --debug and --json list" if more else ""
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    error = InputError(
        f"the weights do not fit the model ({count}): {'; '.join(shown)}{rest}"
        f"{'. ' + hint[0].upper() + hint[1:] if hint else ''}"
    )
    error.details = tuple(problems)
    return error


def _some_of_each_kind(problems: Sequence[str], count: int) -> list[str]:
    """Return ``count`` problems in their order, as many missing as unexpected ones if it can be."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(problem.partition(" ")[0], []).append(problem)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    chosen = {*itertools.islice((problem for problem in turns if problem is not None), count)}
    return [problem for problem in problems if problem in chosen]


# Casts


@dataclass(frozen=True)
class CastLoss:
    """Numbers that a cast has changed."""

    dtype: str
    cast: int
    """Number of tensors that changed their dtype."""
    largest: float
    """Largest difference of a number that stayed finite."""
    where: str
    """Tensor of that number."""
    overflowed: dict[str, int]
    """Count of finite numbers that became infinite, by tensor."""

    def lines(self) -> Iterator[str]:
        where = f" in {self.where}" if self.where else ""
        yield f"cast {self.cast} tensors to {self.dtype}: largest error {self.largest:.3g}{where}"
        if self.overflowed:
            names = ", ".join(f"{name} ({count})" for name, count in self.overflowed.items())
            count = sum(self.overflowed.values())
            yield (
                f"warning: {count} numbers are too large for {self.dtype} and became infinite:"
                f" {names}"
            )


def check_dtype(dtype: str | None) -> None:
    """Raise ConfigError if weights cannot have this dtype. None is allowed."""
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(FLOATS)}")


def cast_error(before: np.ndarray, after: np.ndarray) -> tuple[float, int]:
    """Return the largest difference of numbers that stayed finite, and the count of numbers that
    became infinite. Takes little memory besides the two arrays.
    """
    largest, infinite = 0.0, 0
    for one, other in _pieces(before, after):
        one, other = one.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(one)
        both = finite & np.isfinite(other)
        largest = max(largest, float(np.abs(one[both] - other[both]).max(initial=0.0)))
        infinite += int((finite & ~both).sum())
    return largest, infinite


def _pieces(one: np.ndarray, other: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the same pieces of two arrays of one shape, each of few bytes."""
    length = max(1, _PIECE // max(1, one.itemsize))
    if one.ndim == 0 or one.size <= length:
        yield one, other
    elif one.flags.c_contiguous and other.flags.c_contiguous:
        flat, its_flat = one.reshape(-1), other.reshape(-1)
        for i in range(0, one.size, length):
            yield flat[i : i + length], its_flat[i : i + length]
    elif one.ndim == 2:  # one of them is transposed: a tile of it lies close together in memory
        for i in range(0, one.shape[0], _TILE):
            for j in range(0, one.shape[1], length // _TILE):
                tile = slice(i, i + _TILE), slice(j, j + length // _TILE)
                yield one[tile], other[tile]
    else:
        for i in range(one.shape[0]):
            yield from _pieces(one[i], other[i])


def contiguous(array: np.ndarray) -> np.ndarray:
    """Return the array in C order: itself, or a copy. Transposed matrices are copied in bands,
    which is two to four times as fast as NumPy's copy.
    """
    if array.flags.c_contiguous or array.ndim != 2 or not array.flags.f_contiguous:
        return np.asarray(array, order="C")
    result = np.empty(array.shape, array.dtype)
    for j in range(0, array.shape[1], _TILE):
        result[:, j : j + _TILE] = array[:, j : j + _TILE]
    return result
