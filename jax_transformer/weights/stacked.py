"""Rules between an array that may hold all layers of a stack, and an array for each layer. NumPy
only.

Nothing is guessed from shapes: a rule knows the axis of the layers, and what is done to one layer.
"""

import enum
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jax_transformer.errors import InputError
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import LazyState, LazyTensor, Shape, TensorInfo


class Layer(enum.Enum):
    """The operation on one layer. Each has an inverse."""

    SAME = "same"
    TRANSPOSE = "transpose"
    JOIN_OUTPUTS = "join heads"  # (d, h, e) as (d, h·e)
    JOIN_INPUTS = "join heads of the input"  # (h, e, d) as (h·e, d)


@dataclass(frozen=True)
class StackRule:
    """One stored array and the Flax arrays of its layers; without an axis it has one layer."""

    stored: str
    flax: tuple[str, ...]
    shape: Shape
    """The stored shape of one layer."""
    layer: Layer = Layer.SAME
    axis: int | None = None
    """The axis of the stored array that counts layers; negative from the end."""

    @property
    def stored_shape(self) -> Shape:
        if self.axis is None:
            return self.shape
        at = self.axis % (len(self.shape) + 1)
        return (*self.shape[:at], len(self.flax), *self.shape[at:])

    @property
    def flax_shape(self) -> Shape:
        match self.layer:
            case Layer.TRANSPOSE:
                return self.shape[::-1]
            case Layer.JOIN_OUTPUTS:
                d, h, e = self.shape
                return (d, h * e)
            case Layer.JOIN_INPUTS:
                h, e, d = self.shape
                return (h * e, d)
        return self.shape

    def place(self, number: int) -> str:
        """Return the stored name, with the layer's place in it."""
        if self.axis is None:
            return self.stored
        return f"{self.stored}[layer {number} of axis {self.axis}]"

    def to_flax(self, stored: np.ndarray, number: int) -> np.ndarray:
        """Return one layer's array, contiguous; it may share the stored array's memory."""
        part = stored if self.axis is None else np.moveaxis(stored, self.axis, 0)[number]
        if self.layer is Layer.TRANSPOSE:
            return tensors.contiguous(part.T)
        return np.asarray(part, order="C").reshape(self.flax_shape)

    def to_stored(self, layers: Sequence[LazyTensor]) -> np.ndarray:
        """Return the stored array, of layers that are read one at a time."""
        if self.axis is None:
            return self._one(layers[0].read())
        result = np.empty(self.stored_shape, layers[0].info.numpy_dtype())
        by_layer = np.moveaxis(result, self.axis, 0)
        for number, layer in enumerate(layers):
            by_layer[number] = self._one(layer.read())
        return result

    def _one(self, array: np.ndarray) -> np.ndarray:
        if self.layer is Layer.TRANSPOSE:
            return tensors.contiguous(array.T)
        return array.reshape(self.shape)


class _Spool:
    """Arrays that are decompressed once, each into a temporary file without a name.

    A scanned array is read layer by layer; without this each layer would decompress all of them.
    """

    def __init__(self) -> None:
        self._files: dict[int, tuple[LazyTensor, Any]] = {}  # with the tensors, to keep their ids

    def read(self, tensor: LazyTensor) -> np.ndarray:
        """Return the array, which the first call copies into a file unless it is mapped already.

        Each call maps the file anew, so that pages of arrays that are no longer used are freed.
        """
        if id(tensor) not in self._files:
            array = tensor.read()
            if isinstance(_base(array), np.memmap):
                return array
            file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the spool)
            weakref.finalize(self, file.close)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            self._files[id(tensor)] = tensor, file
        raw = np.memmap(self._files[id(tensor)][1], np.uint8, "r", 0, (tensor.nbytes,))
        return np.asarray(raw).view(tensor.info.numpy_dtype()).reshape(tensor.shape)


def _base(array: np.ndarray) -> Any:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def to_flax(rules: Sequence[StackRule], stored: LazyState) -> dict[str, LazyTensor]:
    """Return the Flax arrays, none of them read. Those of several layers are decompressed once."""
    spool, arrays = _Spool(), {}
    for rule in rules:
        tensor = stored[rule.stored]
        info = TensorInfo(rule.flax_shape, tensor.dtype)
        for number, name in enumerate(rule.flax):
            arrays[name] = LazyTensor(info, partial(_layer, rule, tensor, number, spool))
    return arrays


def _layer(rule: StackRule, tensor: LazyTensor, number: int, spool: _Spool) -> np.ndarray:
    return rule.to_flax(tensor.read() if rule.axis is None else spool.read(tensor), number)


def to_stored(rules: Sequence[StackRule], arrays: LazyState) -> dict[str, LazyTensor]:
    """Return the stored arrays, unread. Raises InputError if one array's layers differ in dtype."""
    stored = {}
    for rule in rules:
        layers = [arrays[name] for name in rule.flax]
        dtypes = sorted({layer.dtype for layer in layers})
        if len(dtypes) > 1:
            raise InputError(f"{rule.stored}: its layers are {' and '.join(dtypes)}")
        info = TensorInfo(rule.stored_shape, layers[0].dtype)
        stored[rule.stored] = LazyTensor(info, partial(rule.to_stored, layers))
    return stored
