"""Rebuild the value of a ``.pt`` file from its pickle: plain containers, and tensors, checked
against the storages of the file.

A pickle is a program for a small stack machine. Those that PyTorch writes (protocols 2 to 5) need
44 of its 68 instructions; the others are refused, as is every name that is not listed here. A name
in a file is only looked up in that list: nothing is imported, and no function but those of this
file is called.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import Storage, TensorView
from jax_transformer.storage.untrusted import shown

# Instructions in one pickle: 25 a tensor, so 80,000 tensors; at most 200 MB of containers
MOST_STEPS = 2_000_000
LONGEST_INTEGER = 255  # bytes
LONGEST_NAME = 512
DEEPEST = 100  # containers within containers
# In the tree: a list that is used twice counts twice, so that no small file is a huge tree
MOST_VALUES = 1_000_000
# Python 2's names, which protocol 2 keeps
_RENAMED = {"__builtin__": "builtins"}
_KEYS = (str, int, bool, float, bytes, type(None))
_TOO_EARLY = "its pickle ends too early"
_NOT_BUILT = "its pickle uses a value that it has not built"
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


@dataclass(frozen=True)
class _Function:
    """A function that a file may call, by its name."""

    name: str


class _Attributes(dict):
    """The attributes of an ``argparse.Namespace`` by name: options, which toolkits save."""


_NAMESPACE = object()
"""The class ``argparse.Namespace``, of which only attributes are made."""


@dataclass(eq=False)
class Unpickler:
    """Describes the tensors of one file, and rebuilds what holds them."""

    where: str
    """The file's name, for errors."""
    sizes: Mapping[str, int]
    """Bytes of each storage by its key."""
    most_bytes: int
    """Limit of the bytes of all arrays together."""
    leaf: Callable[[TensorView], Any] | None = None
    """Returns what stands for a tensor in the value; by default its description."""
    _content: bytes = field(default=b"", init=False)
    _at: int = field(default=0, init=False)
    _stack: list[Any] = field(default_factory=list, init=False)
    _marked: list[list[Any]] = field(default_factory=list, init=False)
    _memo: dict[int, Any] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)
    _seen: set[TensorView] = field(default_factory=set, init=False)

    def value(self, pickle: bytes) -> Any:
        """Return what the file's pickle describes: plain containers, values, each tensor's leaf.
        Raises InputError if it is damaged, UnsafeFileError if it uses a name that is not allowed,
        or builds more than plain containers.
        """
        self._content = pickle
        value = self._run()
        self._measured(value, 1, {})
        return self._plain(value)

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{self.where}: damaged: {what}")

    def _refused(self, what: str) -> UnsafeFileError:
        return UnsafeFileError(f"{self.where}: refused: {what}")

    # The machine

    def _run(self) -> Any:
        if self._take(1) != b"\x80" or not 2 <= self._take(1)[0] <= 5:
            raise self._damaged("it does not begin as a pickle of protocol 2 to 5")
        for _ in range(MOST_STEPS):
            code = self._take(1)
            argument = b""
            if code in _LENGTHS:
                argument = self._take(_LENGTHS[code])
            elif code in _COUNTS:
                length = int.from_bytes(self._take(_COUNTS[code]), "little")
                if code in b"\x8a\x8b" and length > LONGEST_INTEGER:
                    raise self._refused(f"an integer of {length:,} bytes")
                argument = self._take(length)
            if code in _TEXTS:
                self._stack.append(self._text(argument))
            elif code in _VALUES:
                self._stack.append(_VALUES[code](argument))
            elif code == b".":
                break
            else:
                self._step(code, int.from_bytes(argument, "little"))
        else:
            raise self._refused(f"more than {MOST_STEPS:,} instructions")
        if self._at != len(self._content):
            raise self._refused("something follows the end of its pickle")
        if self._marked or len(self._stack) != 1:
            raise self._damaged("its pickle ends with something unfinished")
        return self._stack[0]

    def _step(self, code: bytes, number: int) -> None:
        """Execute an instruction on the stack; ``number`` is the one that stands after it."""
        match code:
            case b"q" | b"r" | b"\x94":
                index = len(self._memo) if code == b"\x94" else number
                if not self._stack:
                    raise self._damaged(_NOT_BUILT)
                if index in self._memo:
                    raise self._refused("its pickle gives one number to two values")
                self._memo[index] = self._stack[-1]
            case b"h" | b"j":
                if number not in self._memo:
                    raise self._damaged("its pickle recalls a value that it has not stored")
                self._stack.append(self._memo[number])
            case b"(":
                self._marked.append(self._stack)
                self._stack = []
            case b"t":
                values = tuple(self._pop())
                self._stack.append(values)
            case b"\x85" | b"\x86" | b"\x87":
                self._stack.append(tuple(self._pop(code[0] - 0x84)))
            case b"R":
                self._reduce()
            case b"c":
                self._look_up(self._line(), self._line())
            case b"\x93":
                self._look_up(*self._pop(2))
            case b"Q":
                self._stack.append(self._storage(*self._pop(1)))
            case b"s" | b"u":
                self._set_items(self._pop(2 if code == b"s" else None))
            case b"a" | b"e":
                items = self._pop(1 if code == b"a" else None)
                self._top(list).extend(items)
            case b"b":
                self._build()
            case b"\x81":
                self._new_object()
            case b"\x95":  # the length of a frame
                if number > len(self._content) - self._at:
                    raise self._damaged(_TOO_EARLY)
            case _:
                name = _REFUSED.get(code, code.hex())
                raise self._refused(f"instruction {name} at byte {self._at - 1}")

    def _take(self, length: int) -> bytes:
        if length > len(self._content) - self._at:
            raise self._damaged(_TOO_EARLY)
        self._at += length
        return self._content[self._at - length : self._at]

    def _line(self) -> str:
        end = self._content.find(b"\n", self._at, self._at + LONGEST_NAME)
        if end < 0:
            raise self._damaged("a name without an end")
        return self._text(self._take(end - self._at + 1)[:-1])

    def _text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged(f"the text {shown(raw)} is not UTF-8") from None

    def _pop(self, count: int | None = None) -> list[Any]:
        """Take the last values off the stack: ``count``, or those since the last mark."""
        if count is None and self._marked:
            items, self._stack = self._stack, self._marked.pop()
        elif count is not None and len(self._stack) >= count:
            first = len(self._stack) - count
            items, self._stack[first:] = self._stack[first:], []
        else:
            raise self._damaged(_NOT_BUILT)
        return items

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise self._refused(f"something is put into a value that is not a {kind.__name__}")
        return self._stack[-1]

    def _set_items(self, items: list[Any]) -> None:
        mapping = self._top(dict)
        if len(items) % 2:
            raise self._damaged("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Keys of other types could all have the same hash, and a dictionary of them takes
            # quadratic time
            if type(key) not in _KEYS or (type(key) is int and not -(2**63) <= key < 2**64):
                raise self._refused(f"a {type(key).__name__} as a dictionary's key")
            if type(key) is str and not key.isprintable():
                raise self._refused(f"the name {shown(key)} has characters that cannot be printed")
            if key in mapping:
                raise self._refused(f"a dictionary that has {shown(key)} twice")
            mapping[key] = value

    def _look_up(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self._refused("a name that is not text")
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full not in _NAMES:
            raise self._refused(
                f"it asks for {shown(full, 200)}, which is neither an array nor a plain container "
                "(save a state_dict() instead)"
            )
        self._stack.append(_NAMES[full])

    def _reduce(self) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, _Function):
            raise self._refused("a call of something that is not a function")
        if type(arguments) is not tuple:
            raise self._refused(f"a call of {function.name} without a tuple of arguments")
        build = self._tensor if function.name in _TENSORS else self._plain_value
        self._stack.append(build(function.name, arguments))

    def _new_object(self) -> None:
        kind, arguments = self._pop(2)
        if kind is not _NAMESPACE or arguments != ():
            raise self._refused(f"instruction NEWOBJ at byte {self._at - 1}")
        self._stack.append(_Attributes())

    def _build(self) -> None:
        """Set the attributes of a namespace. The attributes of a state_dict, the versions of its
        modules, are ignored; all others are refused.
        """
        (state,) = self._pop(1)
        if self._stack and type(self._stack[-1]) is _Attributes:
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise self._refused("attributes that have no names")
            if self._stack[-1]:  # a few bytes would copy them all again
                raise self._refused("attributes that are set twice")
            self._stack[-1].update(state)
            return
        self._top(dict)
        if type(state) is not dict or set(state) != {"_metadata"}:
            raise self._refused("attributes set on a value")

    # Storages and tensors

    def _storage(self, identifier: Any) -> Storage:
        """Return the storage of ("storage", kind, key, device, size)."""
        match identifier:
            case ("storage", _Named(storage=True) as kind, str() as key, str(), int() as size) if (
                type(size) is int and size >= 0
            ):
                if key not in self.sizes:
                    raise self._refused(f"there is no storage {shown(key)}")
                if self.sizes[key] != size * kind.dtype.itemsize:
                    declared = f"{size * kind.dtype.itemsize:,}"
                    raise self._refused(
                        f"storage {shown(key)} declares {declared} bytes, and has "
                        f"{self.sizes[key]:,}"
                    )
                return Storage(key, kind.dtype, size, kind.name == UNTYPED)
        raise self._refused("a reference to something that is not a storage")

    def _tensor(self, name: str, arguments: tuple[Any, ...]) -> TensorView:
        """Rebuild from (storage, offset, shape, stride, requires_grad, hooks, metadata), the last
        three of which may be left out. In version 3 a dtype follows the hooks.
        """
        has_dtype = name == _TENSORS[-1]
        match arguments:
            case (Storage(untyped=False) as storage, *place) if not has_dtype:
                return self._view(storage, storage.dtype, place)
            case (Storage(untyped=True), _, _, _, _, _, _Named(storage=False) as named, *_) if (
                has_dtype
            ):
                return self._view(arguments[0], named.dtype, [*arguments[1:6], *arguments[7:]])
        kind = "an untyped storage and a dtype" if has_dtype else "a storage of its own dtype"
        raise self._refused(f"a tensor without {kind}")

    def _view(self, storage: Storage, dtype: np.dtype, arguments: list[Any]) -> TensorView:
        if len(arguments) < 3:
            raise self._refused(f"a tensor of {len(arguments) + 1} arguments")
        offset, shape, stride, *rest = arguments
        requires_grad, hooks, metadata = (
            [*rest, *(False, {}, None)[len(rest) :]] if len(rest) <= 3 else (None, None, None)
        )
        if type(requires_grad) is not bool or hooks not in ({}, None):
            raise self._refused("a tensor with hooks or arguments that are not known")
        if metadata:
            raise self._refused("a tensor whose elements are to be negated or conjugated first")
        are_tuples = type(shape) is tuple and type(stride) is tuple
        for number in (*shape, *stride, offset) if are_tuples else (None,):
            if type(number) is not int or not 0 <= number < 2**63:
                raise self._refused(
                    "a tensor whose shape, stride or offset are not whole numbers from 0 to 2**63"
                )
        if len(shape) != len(stride) or len(shape) > 64:
            raise self._refused(f"a tensor of {len(shape)} sizes and {len(stride)} strides")
        size = storage.size * storage.dtype.itemsize // dtype.itemsize
        view = TensorView(shape, dtype, storage.key, offset, stride)
        if view.end > size:
            raise self._refused(
                f"a tensor that reaches to element {view.end:,} of storage {shown(storage.key)}, "
                f"which has {size:,}"
            )
        if dtype.itemsize * math.prod(max(1, length) for length in shape) >= 2**63:
            raise self._refused("a tensor of no elements and too large a shape")
        if view not in self._seen:
            self._seen.add(view)
            self._bytes += view.nbytes
            if self._bytes > self.most_bytes:
                raise self._refused(
                    "its tensors overlap so that they would take more memory than the file has "
                    "bytes"
                )
        return view

    def _plain_value(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return a value that PyTorch, or an older protocol, writes as a call of ``name``."""
        match name.rpartition(".")[2], arguments:
            case "_rebuild_parameter", (TensorView() as tensor, bool(), hooks) if hooks == {}:
                return tensor
            case "OrderedDict" | "Counter", ():
                return {}
            case "OrderedDict" | "Counter", (dict() as items,):
                return dict(items)
            case "set", (list() as items,):
                return items
            case "Size", (tuple() as lengths,) if all(type(length) is int for length in lengths):
                return lengths
            case "device", (str() as kind,):
                return kind
            case "device", (str() as kind, int() as index):
                return f"{kind}:{index}"
            case "bytes" | "bytearray", ():
                return b""
            case "bytes" | "bytearray", (bytes() as content,):
                return content
            # Protocol 2 has no bytes: they are text of the same code points
            case "bytes" | "bytearray" | "encode", (str() as text, "latin1" | "latin-1") if all(
                sign <= "\xff" for sign in text
            ):
                return text.encode("latin-1")
            case "complex", (float() as real, float() as imaginary):
                return complex(real, imaginary)
        raise self._refused(_PLAIN_CALLS[name])

    # The result

    def _measured(
        self, value: Any, depth: int, known: dict[int, tuple[int, int]]
    ) -> tuple[int, int]:
        """Return the count of values in a tree of containers, and its depth; visit each once."""
        if type(value) not in (dict, list, tuple, _Attributes):
            return 1, 0
        if id(value) not in known:
            if depth > DEEPEST:
                raise self._refused(f"containers within containers, more than {DEEPEST} deep")
            known[id(value)] = (0, DEEPEST)  # so that a container within itself is too deep
            count, deepest = 1, 0
            for item in value.values() if isinstance(value, dict) else value:
                values, deep = self._measured(item, depth + 1, known)
                count, deepest = count + values, max(deepest, deep)
            known[id(value)] = count, 1 + deepest
            if count > MOST_VALUES:
                raise self._refused(f"more than {MOST_VALUES:,} values")
            if 1 + deepest > DEEPEST:
                raise self._refused(f"containers within containers, more than {DEEPEST} deep")
        return known[id(value)]

    def _plain(self, value: Any) -> Any:
        """Copy ``value`` as a tree: no container is in it twice."""
        match value:
            case dict():
                return dict(zip(value, map(self._plain, value.values()), strict=True))
            case list():
                return list(map(self._plain, value))
            case tuple():
                return tuple(map(self._plain, value))
            case TensorView():
                return value if self.leaf is None else self.leaf(value)
            case Storage():
                view = self._view(value, value.dtype, [0, (value.size,), (1,)])
                return view if self.leaf is None else self.leaf(view)
            case _Named(storage=False):
                return value.name
            case None | bool() | int() | float() | complex() | str() | bytes():
                return value
        raise self._refused(f"{getattr(value, 'name', type(value).__name__)} as a value")


_PLAIN_CALLS = {
    "torch._utils._rebuild_parameter": "a parameter that is not a plain tensor",
    "collections.OrderedDict": "a mapping built from something else",
    "collections.Counter": "a mapping built from something else",
    "builtins.set": "a set that is not built from a list",
    "torch.Size": "a torch.Size that is not a tuple of integers",
    "torch.device": "a device without a name",
    "_codecs.encode": "bytes that are not latin1",
    "builtins.bytes": "bytes that are not latin1",
    "builtins.bytearray": "bytes that are not latin1",
    "builtins.complex": "a complex number of other parts",
}
"""The names that are called for plain values, and why a call is refused."""
_TENSORS = [f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3")]
_NAMES: dict[str, Any] = {
    "argparse.Namespace": _NAMESPACE,
    UNTYPED: _Named(UNTYPED, tensors.DTYPES["uint8"], storage=True),
    **{f"torch.{name}": _Named(f"torch.{name}", dtype) for name, dtype in tensors.DTYPES.items()},
    **{f"torch.{name}": _Named(f"torch.{name}", of, storage=True) for name, of in STORAGES.items()},
    **{name: _Function(name) for name in (*_TENSORS, *_PLAIN_CALLS)},
}
"""The names that a file may use: values, and functions."""

# The bytes of an argument, or of the count that stands before it
_LENGTHS = dict.fromkeys((b"K", b"h", b"q"), 1) | {b"M": 2}
_LENGTHS |= dict.fromkeys((b"J", b"j", b"r"), 4) | dict.fromkeys((b"G", b"\x95"), 8)
_COUNTS = dict.fromkeys((b"\x8a", b"\x8c", b"U", b"C"), 1)
_COUNTS |= dict.fromkeys((b"\x8b", b"X", b"T", b"B"), 4)
_COUNTS |= dict.fromkeys((b"\x8d", b"\x8e", b"\x96"), 8)
_TEXTS = frozenset((b"X", b"\x8c", b"\x8d", b"U", b"T"))  # the last two: Python 2's str
_VALUES: dict[bytes, Callable[[bytes], Any]] = {
    b"N": lambda _: None,
    b"\x88": lambda _: True,
    b"\x89": lambda _: False,
    b"}": lambda _: {},
    b"]": lambda _: [],
    b")": lambda _: (),
    b"G": lambda raw: struct.unpack(">d", raw)[0],
    **dict.fromkeys((b"K", b"M"), lambda raw: int.from_bytes(raw, "little")),
    **dict.fromkeys(
        (b"J", b"\x8a", b"\x8b"), lambda raw: int.from_bytes(raw, "little", signed=True)
    ),
    **dict.fromkeys((b"C", b"B", b"\x8e", b"\x96"), lambda raw: raw),  # a bytearray as bytes
}
_REFUSED = dict(
    zip(
        (bytes([code]) for code in b"\x92io\x82\x83\x84P\x97\x98\x8f\x91\x80012ILFSV"),
        (
            "NEWOBJ_EX INST OBJ EXT1 EXT2 EXT4 PERSID NEXT_BUFFER READONLY_BUFFER EMPTY_SET "
            "FROZENSET PROTO POP POP_MARK DUP INT LONG FLOAT STRING UNICODE"
        ).split(),
        strict=True,
    )
)
"""Instructions that are refused by name."""
