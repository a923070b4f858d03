"""Stored tensors: their dtypes and shapes, tensors that are read when they are needed, so that a
conversion of any size holds one at a time, the views that PyTorch's files have of their storages,
the check that tensors fit a model, and casts with what they lose.
"""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage.untrusted import plain

Shape = tuple[int, ...]
_PIECE = 1 << 21  # bytes that are compared at a time
_TILE = 128
_SHOWN = 12  # problems of weights that do not fit, in a message
_MOST_AHEAD = 64 << 20
"""Bytes of tensors that may be read before they are asked for. A larger one is never."""
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
        return self.size * self.numpy_dtype().itemsize

    def numpy_dtype(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True)
class Note:
    """An entry of a file that has no counterpart of its own, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor that :meth:`read` reads at each call; nothing keeps it. Tied names have one."""

    info: TensorInfo
    read: Callable[[], np.ndarray] = field(repr=False)
    """Return the array. It may be read-only, and its memory may be the file's."""

    @property
    def shape(self) -> Shape:
        return self.info.shape

    @property
    def dtype(self) -> str:
        """NumPy's name of the dtype, as in :class:`.TensorInfo`."""
        return self.info.dtype

    @property
    def nbytes(self) -> int:
        return self.info.nbytes

    @classmethod
    def of(cls, array: np.ndarray) -> "LazyTensor":
        """Return a tensor of an array that is in memory already."""
        return cls(TensorInfo(array.shape, array.dtype.name), partial(np.asarray, array))


LazyState = Mapping[str, LazyTensor]


def in_memory(state: Mapping[str, np.ndarray]) -> dict[str, LazyTensor]:
    """Return tensors of arrays that are in memory already; equal objects are tied."""
    lazily: dict[int, LazyTensor] = {}
    return {
        name: lazily.setdefault(id(array), LazyTensor.of(np.asarray(array)))
        for name, array in state.items()
    }


def arrays(state: LazyState) -> dict[str, np.ndarray]:
    """Read all tensors into memory of their own; names that are tied have one array."""
    tensors = dict.fromkeys(state.values())
    read = {tensor: np.array(tensor.read(), order="C", subok=False) for tensor in tensors}
    return {name: read[tensor] for name, tensor in state.items()}


def read_ahead(state: Iterable[LazyTensor]) -> Generator[np.ndarray, None, None]:
    """Yield the array of each tensor, in C order. A thread reads those that follow while an array
    is in use; an error of it is raised when the tensor's turn comes. The arrays are not kept.
    """
    left, begun = deque(state), deque[tuple[int, Future[np.ndarray]]]()
    ahead = 0  # bytes of those that were begun, without the first
    thread = ThreadPoolExecutor(1)
    try:
        while left or begun:
            while left and (not begun or ahead + left[0].nbytes <= _MOST_AHEAD):
                tensor = left.popleft()
                ahead += tensor.nbytes if begun else 0
                future = thread.submit(lambda read: contiguous(read()), tensor.read)
                begun.append((tensor.nbytes, future))
            ahead -= begun[1][0] if len(begun) > 1 else 0
            yield begun.popleft()[1].result()
    finally:
        thread.shutdown(cancel_futures=True)


def map_file(path: Path, start: int, *, dtype: np.dtype, shape: Shape) -> np.ndarray:
    """Map a part of a file into memory, read-only. Raises InputError if it is not there."""
    info = TensorInfo(shape, dtype.name)
    try:
        if start + info.nbytes > os.stat(path).st_size:
            raise InputError(f"{path}: became shorter while it was read")
        if not info.nbytes:
            return np.empty(shape, dtype)
        raw = np.memmap(path, np.uint8, "r", start, (info.nbytes,))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return np.asarray(raw).view(dtype).reshape(shape)


# Arrays


def contiguous(array: np.ndarray) -> np.ndarray:
    """Return the array in C order; transposed matrices are copied in bands, 2-4 times as fast."""
    if array.flags.c_contiguous or array.ndim != 2 or not array.flags.f_contiguous:
        return np.asarray(array, order="C")
    result = np.empty(array.shape, array.dtype)
    for j in range(0, array.shape[1], _TILE):
        result[:, j : j + _TILE] = array[:, j : j + _TILE]
    return result


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two arrays are equal bit for bit, dtypes and shapes included. No copies."""
    if one is other:
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    wide = one.dtype.itemsize > 8
    for piece, its_piece in _pieces(one, other):
        if wide:
            equal = piece.tobytes() == its_piece.tobytes()
        else:  # as integers, so that NaN equals NaN and 0.0 does not equal -0.0
            flat = piece.ndim == 1 and piece.flags.c_contiguous and its_piece.flags.c_contiguous
            bits = "u8" if flat and not piece.nbytes % 8 else f"u{one.dtype.itemsize}"
            equal = np.array_equal(piece.view(bits), its_piece.view(bits))
        if not equal:
            return False
    return True


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


# PyTorch's files


@dataclass(frozen=True)
class TensorView:
    """A tensor of a PyTorch file: ``offset`` and ``stride`` count elements of the named storage."""

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
        steps = zip(self.shape, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * step for size, step in steps)

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


def check_dtype(dtype: str | None) -> None:
    """Raise ConfigError if weights cannot have this dtype. None is allowed."""
    if dtype is not None and dtype not in FLOATS:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(FLOATS)}")


def problems(
    tensors: Mapping[str, TensorInfo], expected: Mapping[str, Shape], *, floating: bool = True
) -> list[str]:
    """List tensors that are missing, unexpected, mis-shaped, or, if ``floating``, not of floats."""
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
        if floating and tensors[name].dtype not in FLOATS:
            wrong.append(f"{name} is {tensors[name].dtype}, and weights are floating-point numbers")
    return wrong


def differing_ties(
    ties: Mapping[str, str], state: Mapping[str, np.ndarray] | LazyState
) -> list[str]:
    """List the stored tensors that differ from those that the model ties them with, by ``ties``."""
    differing = []
    for name, other in ties.items():
        if name in state and other in state and state[name] is not state[other]:
            pair = state[name], state[other]
            one, two = (each.read() if isinstance(each, LazyTensor) else each for each in pair)
            if not same(one, two):
                differing.append(f"{name} differs from {other}, but the model ties them")
    return differing


def refuse(problems: Sequence[str]) -> None:
    """Raise one InputError with all problems, if there are any; see :func:`refusal`."""
    if problems:
        raise refusal(problems)


def refusal(problems: Sequence[str], hint: str = "") -> InputError:
    """Return the error of weights that do not fit: a dozen problems, ``hint``; all as details."""
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


@dataclass
class CastLoss:
    """Numbers that a cast has changed, in the tensors that have been read."""

    dtype: str
    cast: int = 0
    """Number of tensors that changed their dtype."""
    largest: float = 0.0
    """Largest difference of a number that stayed finite."""
    where: str = ""
    """Tensor of that number."""
    overflowed: dict[str, int] = field(default_factory=dict)
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


class Cast:
    """A cast of floating-point tensors to ``dtype``, and its loss."""

    def __init__(self, dtype: str):
        self.loss = CastLoss(dtype)
        self._measured: set[str] = set()

    def apply(self, state: LazyState) -> dict[str, LazyTensor]:
        """Return the tensors as they are after the cast; tied ones stay tied."""
        casts: dict[LazyTensor, LazyTensor] = {}
        result = {}
        for name, tensor in state.items():
            result[name] = tensor
            if tensor.dtype in FLOATS and tensor.dtype != self.loss.dtype:
                info = TensorInfo(tensor.shape, self.loss.dtype)
                cast = LazyTensor(info, partial(self._read, name, tensor, info.numpy_dtype()))
                result[name] = casts.setdefault(tensor, cast)
                self.loss.cast += 1
        return result

    def _read(self, name: str, tensor: LazyTensor, dtype: np.dtype) -> np.ndarray:
        before = tensor.read()
        with np.errstate(over="ignore", invalid="ignore"):
            after = before.astype(dtype)
        if name not in self._measured:
            self._measured.add(name)
            self._measure(name, before, after)
        return after

    def _measure(self, name: str, before: np.ndarray, after: np.ndarray) -> None:
        """Note the loss in a tensor. Takes little memory besides the two arrays."""
        loss, infinite = self.loss, 0
        for one, other in _pieces(before, after):
            one, other = one.astype(np.float64), other.astype(np.float64)
            finite = np.isfinite(one)
            both = finite & np.isfinite(other)
            error = float(np.abs(one[both] - other[both]).max(initial=0.0))
            if error > loss.largest:
                loss.largest, loss.where = error, name
            infinite += int((finite & ~both).sum())
        if infinite:
            loss.overflowed[name] = infinite
