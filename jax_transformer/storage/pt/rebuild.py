"""Rebuild the values of a ``.pt`` file: tensors, checked against the storages of the file, and
plain containers.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_transformer.errors import UnsafeFileError
from jax_transformer.storage import tensors
from jax_transformer.storage.pt import unpickler
from jax_transformer.storage.tensors import Storage, TensorView
from jax_transformer.storage.untrusted import shown

DEEPEST = 100  # containers within containers
# In the tree: a list that is used twice counts twice, so that no small file is a huge tree
MOST_VALUES = 1_000_000
_STORAGES = (
    "Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 "
    "Char:int8 Byte:uint8 Bool:bool ComplexFloat:complex64 ComplexDouble:complex128"
)
STORAGES = {
    f"{kind}Storage": tensors.DTYPES[dtype]
    for kind, dtype in (pair.split(":") for pair in _STORAGES.split())
}
"""PyTorch's storages and their dtypes. Newer dtypes use an untyped storage."""
UNTYPED = "torch.storage.UntypedStorage"


@dataclass(frozen=True)
class _Named:
    """A dtype or a kind of storage, by its name."""

    name: str
    dtype: np.dtype
    storage: bool = False


_NAMES: dict[str, Any] = {
    "argparse.Namespace": unpickler.NAMESPACE,
    UNTYPED: _Named(UNTYPED, tensors.DTYPES["uint8"], storage=True),
    **{f"torch.{name}": _Named(f"torch.{name}", dtype) for name, dtype in tensors.DTYPES.items()},
    **{f"torch.{name}": _Named(f"torch.{name}", of, storage=True) for name, of in STORAGES.items()},
}
"""The names that are values, not functions."""


class Rebuilder:
    """Describes the tensors of one file.

    Args:
        where: the file's name, for errors.
        sizes: bytes of each storage by its key.
        most_bytes: limit of the bytes of all arrays together.
        leaf: returns what stands for a tensor in the value; by default its description.
    """

    def __init__(
        self,
        where: str,
        sizes: Mapping[str, int],
        most_bytes: int,
        leaf: Callable[[TensorView], Any] = lambda view: view,
    ):
        self.where, self.sizes, self.most_bytes, self.leaf = where, sizes, most_bytes, leaf
        self.bytes = 0
        self.seen: set[TensorView] = set()

    def refused(self, what: str) -> UnsafeFileError:
        return UnsafeFileError(f"{self.where}: refused: {what}")

    def value(self, pickle: bytes) -> Any:
        """Return the value of the file's pickle: plain containers and values, and the leaf of each
        tensor.
        """
        value = unpickler.interpret(pickle, self.where, self._allowed(), self._storage)
        self._measured(value, 1, {})
        return self._plain(value)

    def _allowed(self) -> dict[str, Any]:
        functions: dict[str, Callable[[tuple[Any, ...]], Any]] = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._utils._rebuild_parameter": self._parameter,
            "collections.OrderedDict": self._mapping,
            "collections.Counter": self._mapping,
            "torch.Size": self._size,
            "torch.device": self._device,
            "_codecs.encode": self._encoded,
            "builtins.bytes": self._bytes,
            "builtins.bytearray": self._bytes,
            "builtins.complex": self._complex,
        }
        calls = ((name, unpickler.Constructor(name, build)) for name, build in functions.items())
        return _NAMES | dict(calls)

    # Storages and tensors

    def _storage(self, identifier: Any) -> Storage:
        """Return the storage of ("storage", kind, key, device, size)."""
        match identifier:
            case ("storage", _Named(storage=True) as kind, str() as key, str(), int() as size) if (
                type(size) is int and size >= 0
            ):
                if key not in self.sizes:
                    raise self.refused(f"there is no storage {shown(key)}")
                if self.sizes[key] != size * kind.dtype.itemsize:
                    declared = f"{size * kind.dtype.itemsize:,}"
                    raise self.refused(
                        f"storage {shown(key)} declares {declared} bytes, and has "
                        f"{self.sizes[key]:,}"
                    )
                return Storage(key, kind.dtype, size, kind.name == UNTYPED)
        raise self.refused("a reference to something that is not a storage")

    def _tensor(self, arguments: tuple[Any, ...]) -> TensorView:
        """Rebuild from (storage, offset, shape, stride, requires_grad, hooks, metadata), the last
        three of which may be left out.
        """
        storage, *place = arguments or (None,)
        if not isinstance(storage, Storage) or storage.untyped:
            raise self.refused("a tensor without a storage of its own dtype")
        return self._view(storage, storage.dtype, place)

    def _tensor_of_dtype(self, arguments: tuple[Any, ...]) -> TensorView:
        """Rebuild from (storage, offset, shape, stride, requires_grad, hooks, dtype, metadata), the
        last of which may be left out.
        """
        match arguments:
            case (Storage(untyped=True), _, _, _, _, _, _Named(storage=False) as named, *_):
                return self._view(arguments[0], named.dtype, [*arguments[1:6], *arguments[7:]])
        raise self.refused("a tensor without an untyped storage and a dtype")

    def _view(self, storage: Storage, dtype: np.dtype, arguments: list[Any]) -> TensorView:
        if len(arguments) < 3:
            raise self.refused(f"a tensor of {len(arguments) + 1} arguments")
        offset, shape, stride, *rest = arguments
        requires_grad, hooks, metadata = (
            [*rest, *(False, {}, None)[len(rest) :]] if len(rest) <= 3 else (None, None, None)
        )
        if type(requires_grad) is not bool or hooks not in ({}, None):
            raise self.refused("a tensor with hooks or arguments that are not known")
        if metadata:
            raise self.refused("a tensor whose elements are to be negated or conjugated first")
        for numbers in (shape, stride, (offset,)):
            if type(numbers) is not tuple or not all(
                type(number) is int and 0 <= number < 2**63 for number in numbers
            ):
                raise self.refused(
                    "a tensor whose shape, stride or offset are not whole numbers from 0 to 2**63"
                )
        if len(shape) != len(stride) or len(shape) > 64:
            raise self.refused(f"a tensor of {len(shape)} sizes and {len(stride)} strides")
        size = storage.size * storage.dtype.itemsize // dtype.itemsize
        view = TensorView(shape, dtype, storage.key, offset, stride)
        if view.end > size:
            raise self.refused(
                f"a tensor that reaches to element {view.end:,} of storage {shown(storage.key)}, "
                f"which has {size:,}"
            )
        if math.prod(max(1, length) for length in shape) * dtype.itemsize >= 2**63:
            raise self.refused("a tensor of no elements and too large a shape")
        if view not in self.seen:
            self.seen.add(view)
            self.bytes += view.nbytes
            if self.bytes > self.most_bytes:
                raise self.refused(
                    "its tensors overlap so that they would take more memory than the file has "
                    "bytes"
                )
        return view

    def _parameter(self, arguments: tuple[Any, ...]) -> TensorView:
        """Rebuild from (tensor, requires_grad, hooks)."""
        if (
            len(arguments) != 3
            or not isinstance(arguments[0], TensorView)
            or type(arguments[1]) is not bool
            or arguments[2] != {}
        ):
            raise self.refused("a parameter that is not a plain tensor")
        return arguments[0]

    # Plain values that PyTorch, or an older protocol, writes as calls

    def _mapping(self, arguments: tuple[Any, ...]) -> dict[Any, Any]:
        match arguments:
            case ():
                return {}
            case (dict() as items,):
                return dict(items)
        raise self.refused("a mapping built from something else")

    def _size(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        if (
            len(arguments) != 1
            or type(arguments[0]) is not tuple
            or not all(type(length) is int for length in arguments[0])
        ):
            raise self.refused("a torch.Size that is not a tuple of integers")
        return arguments[0]

    def _device(self, arguments: tuple[Any, ...]) -> str:
        match arguments:
            case (str() as kind,):
                return kind
            case (str() as kind, int() as index):
                return f"{kind}:{index}"
        raise self.refused("a device without a name")

    def _encoded(self, arguments: tuple[Any, ...]) -> bytes:
        """Return bytes from text of the same code points: protocol 2 has no bytes."""
        match arguments:
            case (str() as text, "latin1" | "latin-1") if all(sign <= "\xff" for sign in text):
                return text.encode("latin-1")
        raise self.refused("bytes that are not latin1")

    def _bytes(self, arguments: tuple[Any, ...]) -> bytes:
        match arguments:
            case ():
                return b""
            case (bytes() as content,):
                return content
        return self._encoded(arguments)

    def _complex(self, arguments: tuple[Any, ...]) -> complex:
        match arguments:
            case (float() as real, float() as imaginary):
                return complex(real, imaginary)
        raise self.refused("a complex number of other parts")

    # The result

    def _measured(
        self, value: Any, depth: int, known: dict[int, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the number of values in a container as a tree, and its depth; each is visited
        once, even if it is used several times.
        """
        if type(value) not in (dict, list, tuple, unpickler.Attributes):
            return 1, 0
        if id(value) not in known:
            if depth > DEEPEST:
                raise self.refused(f"containers within containers, more than {DEEPEST} deep")
            known[id(value)] = (0, DEEPEST)  # so that a container within itself is too deep
            items = value.values() if isinstance(value, dict) else value
            counts, depths = [1], [0]
            for item in items:
                count, deep = self._measured(item, depth + 1, known)
                counts.append(count)
                depths.append(deep)
            known[id(value)] = sum(counts), 1 + max(depths)
            if known[id(value)][0] > MOST_VALUES:
                raise self.refused(f"more than {MOST_VALUES:,} values")
            if known[id(value)][1] > DEEPEST:
                raise self.refused(f"containers within containers, more than {DEEPEST} deep")
        return known[id(value)]

    def _plain(self, value: Any) -> Any:
        """Copy ``value`` as a tree: no container is in it twice."""
        match value:
            case dict():
                return {key: self._plain(item) for key, item in value.items()}
            case list():
                return [self._plain(item) for item in value]
            case tuple():
                return tuple(self._plain(item) for item in value)
            case TensorView():
                return self.leaf(value)
            case Storage():
                return self.leaf(self._view(value, value.dtype, [0, (value.size,), (1,)]))
            case _Named(storage=False):
                return value.name
            case None | bool() | int() | float() | complex() | str() | bytes():
                return value
        raise self.refused(f"{getattr(value, 'name', type(value).__name__)} as a value")
