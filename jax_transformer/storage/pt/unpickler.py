"""An interpreter for the pickles inside PyTorch's files. It builds plain containers and calls only
the functions that the caller allows.

A pickle is a program for a small stack machine. Those that PyTorch writes (protocols 2 to 5) need
44 of its 68 instructions; the others are refused, as is every name that the caller has not listed.
A name in a file is only looked up in that list: nothing is imported.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage.untrusted import shown

# Instructions in one pickle: 25 a tensor, so 80,000 tensors; at most 200 MB of containers
MOST_STEPS = 2_000_000
LONGEST_INTEGER = 255  # bytes
LONGEST_NAME = 512
# Python 2's names, which protocol 2 keeps
_RENAMED = {"__builtin__": "builtins"}
_KEYS = (str, int, bool, float, bytes, type(None))
_NOT_BUILT = "its pickle uses a value that it has not built"


@dataclass(frozen=True, eq=False)
class Constructor:
    """The function that is called for an allowed name, with the file's tuple of arguments."""

    name: str
    build: Callable[[tuple[Any, ...]], Any]


class Attributes(dict):
    """The attributes of an ``argparse.Namespace`` by name: options, which toolkits save."""


NAMESPACE = object()
"""The allowed name of a class of which only :class:`Attributes` are made."""


def interpret(
    content: bytes, where: str, allowed: Mapping[str, Any], persistent: Callable[[Any], Any]
) -> Any:
    """Return the value that a pickle describes.

    Args:
        content: the pickle.
        where: the file's name, for errors.
        allowed: the meaning of each name: a ``Constructor``, or a value that can only be passed
            on.
        persistent: returns the object for an identifier of an object outside the pickle (in
            PyTorch's files: a storage).

    Raises:
        InputError: the pickle is damaged.
        UnsafeFileError: it uses a name that is not allowed, or builds more than plain containers.
    """
    return _Machine(content, where, allowed, persistent).run()


class _Machine:
    def __init__(
        self,
        content: bytes,
        where: str,
        allowed: Mapping[str, Any],
        persistent: Callable[[Any], Any],
    ):
        self.content, self.where = content, where
        self.allowed, self.persistent = allowed, persistent
        self.at = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        if self.take(1) != b"\x80" or not 2 <= self.take(1)[0] <= 5:
            raise self.damaged("it does not begin as a pickle of protocol 2 to 5")
        for _ in range(MOST_STEPS):
            code = self.take(1)
            argument = b""
            if code in _LENGTHS:
                argument = self.take(_LENGTHS[code])
            elif code in _COUNTS:
                argument = self.counted(code)
            if code in _VALUES:
                self.stack.append(_VALUES[code](argument))
            elif code in _TEXTS:
                self.stack.append(self.text(argument))
            elif code in _STEPS:
                _STEPS[code](self, int.from_bytes(argument, "little"))
            elif code == b".":
                break
            else:
                raise self.refused(
                    f"instruction {_REFUSED.get(code, code.hex())} at byte {self.at - 1}"
                )
        else:
            raise self.refused(f"more than {MOST_STEPS:,} instructions")
        if self.at != len(self.content):
            raise self.refused("something follows the end of its pickle")
        if self.marked or len(self.stack) != 1:
            raise self.damaged("its pickle ends with something unfinished")
        return self.stack[0]

    def damaged(self, what: str) -> InputError:
        return InputError(f"{self.where}: damaged: {what}")

    def refused(self, what: str) -> UnsafeFileError:
        return UnsafeFileError(f"{self.where}: refused: {what}")

    # Reading the pickle

    def take(self, length: int) -> bytes:
        if length > len(self.content) - self.at:
            raise self.damaged("its pickle ends too early")
        self.at += length
        return self.content[self.at - length : self.at]

    def counted(self, code: bytes) -> bytes:
        """Return the bytes whose count stands before them."""
        length = int.from_bytes(self.take(_COUNTS[code]), "little")
        if code in b"\x8a\x8b" and length > LONGEST_INTEGER:
            raise self.refused(f"an integer of {length:,} bytes")
        return self.take(length)

    def line(self) -> str:
        end = self.content.find(b"\n", self.at, self.at + LONGEST_NAME)
        if end < 0:
            raise self.damaged("a name without an end")
        return self.text(self.take(end - self.at + 1)[:-1])

    def text(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"the text {shown(raw)} is not UTF-8") from None

    # The stack

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self, count: int = 1) -> list[Any]:
        """Take the last values off the stack."""
        if len(self.stack) < count:
            raise self.damaged(_NOT_BUILT)
        first = len(self.stack) - count
        items, self.stack[first:] = self.stack[first:], []
        return items

    def pop_to_mark(self) -> list[Any]:
        if not self.marked:
            raise self.damaged(_NOT_BUILT)
        items, self.stack = self.stack, self.marked.pop()
        return items

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise self.refused(f"something is put into a value that is not a {kind.__name__}")
        return self.stack[-1]

    # Instructions of more than a line; ``number`` is the argument that stands in the pickle

    def mark(self, number: int) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def append(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def set_items(self, items: list[Any]) -> None:
        mapping = self.top(dict)
        if len(items) % 2:
            raise self.damaged("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Keys of other types could all have the same hash, and a dictionary of them takes
            # quadratic time
            if type(key) not in _KEYS or (type(key) is int and not -(2**63) <= key < 2**64):
                raise self.refused(f"a {type(key).__name__} as a dictionary's key")
            if type(key) is str and not key.isprintable():
                raise self.refused(f"the name {shown(key)} has characters that cannot be printed")
            if key in mapping:
                raise self.refused(f"a dictionary that has {shown(key)} twice")
            mapping[key] = value

    def remember(self, index: int) -> None:
        if not self.stack:
            raise self.damaged(_NOT_BUILT)
        if index in self.memo:
            raise self.refused("its pickle gives one number to two values")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise self.damaged("its pickle recalls a value that it has not stored")
        self.stack.append(self.memo[index])

    def look_up(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self.refused("a name that is not text")
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full not in self.allowed:
            raise self.refused(
                f"it asks for {shown(full, 200)}, which is neither an array nor a plain container "
                "(save a state_dict() instead)"
            )
        self.stack.append(self.allowed[full])

    def reduce(self, number: int) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, Constructor):
            raise self.refused("a call of something that is not a function")
        if type(arguments) is not tuple:
            raise self.refused(f"a call of {function.name} without a tuple of arguments")
        self.stack.append(function.build(arguments))

    def new_object(self, number: int) -> None:
        kind, arguments = self.pop(2)
        if kind is not NAMESPACE or arguments != ():
            raise self.refused(f"instruction NEWOBJ at byte {self.at - 1}")
        self.stack.append(Attributes())

    def build(self, number: int) -> None:
        """Set the attributes of a namespace. The attributes of a state_dict, the versions of its
        modules, are ignored; all others are refused.
        """
        (state,) = self.pop()
        if self.stack and type(self.stack[-1]) is Attributes:
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise self.refused("attributes that have no names")
            if self.stack[-1]:  # a few bytes would copy them all again
                raise self.refused("attributes that are set twice")
            self.stack[-1].update(state)
            return
        self.top(dict)
        if type(state) is not dict or set(state) != {"_metadata"}:
            raise self.refused("attributes set on a value")

    def frame(self, length: int) -> None:
        if length > len(self.content) - self.at:
            raise self.damaged("its pickle ends too early")


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
_STEPS: dict[bytes, Callable[[_Machine, int], Any]] = {
    b"(": _Machine.mark,
    b"\x95": _Machine.frame,
    b"t": lambda m, _: m.push(tuple(m.pop_to_mark())),
    b"\x85": lambda m, _: m.push(tuple(m.pop(1))),
    b"\x86": lambda m, _: m.push(tuple(m.pop(2))),
    b"\x87": lambda m, _: m.push(tuple(m.pop(3))),
    b"a": lambda m, _: m.append(m.pop()),
    b"e": lambda m, _: m.append(m.pop_to_mark()),
    b"s": lambda m, _: m.set_items(m.pop(2)),
    b"u": lambda m, _: m.set_items(m.pop_to_mark()),
    **dict.fromkeys((b"h", b"j"), _Machine.recall),
    **dict.fromkeys((b"q", b"r"), _Machine.remember),
    b"\x94": lambda m, _: m.remember(len(m.memo)),
    b"c": lambda m, _: m.look_up(m.line(), m.line()),
    b"\x93": lambda m, _: m.look_up(*m.pop(2)),
    b"R": _Machine.reduce,
    b"\x81": _Machine.new_object,
    b"b": _Machine.build,
    b"Q": lambda m, _: m.push(m.persistent(*m.pop())),
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
