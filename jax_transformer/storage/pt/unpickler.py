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
    """The value that a pickle describes.

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
        self.content, self.where, self.allowed, self.persistent = (
            content,
            where,
            allowed,
            persistent,
        )
        self.at = 0
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        if self.take(1) != b"\x80" or not 2 <= self.integer(1) <= 5:
            raise self.damaged("it does not begin as a pickle of protocol 2 to 5")
        for _ in range(MOST_STEPS):
            code = self.take(1)
            if code == b".":
                return self.result()
            step = _STEPS.get(code)
            if step is None:
                raise self.refused(
                    f"instruction {_REFUSED.get(code, code.hex())} at byte {self.at - 1}"
                )
            step(self)
        raise self.refused(f"more than {MOST_STEPS:,} instructions")

    def result(self) -> Any:
        if self.at != len(self.content):
            raise self.refused("something follows the end of its pickle")
        if self.marked or len(self.stack) != 1:
            raise self.damaged("its pickle ends with something unfinished")
        return self.stack[0]

    def damaged(self, what: str) -> InputError:
        return InputError(f"{self.where}: damaged: {what}")

    def refused(self, what: str) -> UnsafeFileError:
        return UnsafeFileError(f"{self.where}: refused: {what}")

    # Reading the pickle, and the stack

    def take(self, length: int) -> bytes:
        if length > len(self.content) - self.at:
            raise self.damaged("its pickle ends too early")
        self.at += length
        return self.content[self.at - length : self.at]

    def integer(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

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

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack:
            raise self.damaged("its pickle uses a value that it has not built")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.marked:
            raise self.damaged("its pickle uses a value that it has not built")
        items, self.stack = self.stack, self.marked.pop()
        return items

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise self.refused(f"something is put into a value that is not a {kind.__name__}")
        return self.stack[-1]

    # Instructions of more than a line

    def mark(self) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def tuple_of(self, number: int) -> None:
        if len(self.stack) < number:
            raise self.damaged("its pickle uses a value that it has not built")
        self.stack[len(self.stack) - number :] = [tuple(self.stack[len(self.stack) - number :])]

    def signed(self, width: int) -> None:
        length = self.integer(width)
        if length > LONGEST_INTEGER:
            raise self.refused(f"an integer of {length:,} bytes")
        self.stack.append(int.from_bytes(self.take(length), "little", signed=True))

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
            raise self.damaged("its pickle uses a value that it has not built")
        if index in self.memo:
            raise self.refused("its pickle gives one number to two values")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise self.damaged("its pickle recalls a value that it has not stored")
        self.stack.append(self.memo[index])

    def look_up(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise self.refused("a name that is no text")
        full = f"{_RENAMED.get(module, module)}.{name}"
        if full not in self.allowed:
            raise self.refused(
                f"it asks for {shown(full, 200)}, which is neither an array nor a plain container "
                "(save a state_dict() instead)"
            )
        self.stack.append(self.allowed[full])

    def reduce(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Constructor):
            raise self.refused("a call of something that is not a function")
        if type(arguments) is not tuple:
            raise self.refused(f"a call of {function.name} without a tuple of arguments")
        self.stack.append(function.build(arguments))

    def new_object(self) -> None:
        arguments, kind = self.pop(), self.pop()
        if kind is not NAMESPACE or arguments != ():
            raise self.refused(f"instruction NEWOBJ at byte {self.at - 1}")
        self.stack.append(Attributes())

    def build(self) -> None:
        """Set the attributes of a namespace. Those of a state_dict, the versions of its modules,
        are ignored; all others are refused.
        """
        state = self.pop()
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

    def frame(self) -> None:
        if self.integer(8) > len(self.content) - self.at:
            raise self.damaged("its pickle ends too early")


_STEPS: dict[bytes, Callable[[_Machine], Any]] = {
    b"(": _Machine.mark,
    b"\x95": _Machine.frame,
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    b"K": lambda m: m.push(m.integer(1)),
    b"M": lambda m: m.push(m.integer(2)),
    b"\x8a": lambda m: m.signed(1),
    b"\x8b": lambda m: m.signed(4),
    b"G": lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    b"X": lambda m: m.push(m.text(m.take(m.integer(4)))),
    b"\x8c": lambda m: m.push(m.text(m.take(m.integer(1)))),
    b"\x8d": lambda m: m.push(m.text(m.take(m.integer(8)))),
    b"U": lambda m: m.push(m.text(m.take(m.integer(1)))),  # Python 2's str
    b"T": lambda m: m.push(m.text(m.take(m.integer(4)))),
    b"C": lambda m: m.push(m.take(m.integer(1))),
    b"B": lambda m: m.push(m.take(m.integer(4))),
    b"\x8e": lambda m: m.push(m.take(m.integer(8))),
    b"\x96": lambda m: m.push(m.take(m.integer(8))),  # a bytearray, here as bytes
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"a": lambda m: m.append([m.pop()]),
    b"e": lambda m: m.append(m.pop_to_mark()),
    b"s": lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"h": lambda m: m.recall(m.integer(1)),
    b"j": lambda m: m.recall(m.integer(4)),
    b"q": lambda m: m.remember(m.integer(1)),
    b"r": lambda m: m.remember(m.integer(4)),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"c": lambda m: m.look_up(m.line(), m.line()),
    b"\x93": lambda m: m.look_up(*[m.pop(), m.pop()][::-1]),
    b"R": _Machine.reduce,
    b"\x81": _Machine.new_object,
    b"b": _Machine.build,
    b"Q": lambda m: m.push(m.persistent(m.pop())),
}
# Instructions that are refused by name
_REFUSED = {
    **{
        b"\x92": "NEWOBJ_EX",
        b"i": "INST",
        b"o": "OBJ",
        b"\x82": "EXT1",
        b"\x83": "EXT2",
        b"\x84": "EXT4",
    },
    **{
        b"P": "PERSID",
        b"\x97": "NEXT_BUFFER",
        b"\x98": "READONLY_BUFFER",
        b"\x8f": "EMPTY_SET",
        b"\x91": "FROZENSET",
        b"\x80": "PROTO",
    },
    **{
        b"0": "POP",
        b"1": "POP_MARK",
        b"2": "DUP",
        b"I": "INT",
        b"L": "LONG",
        b"F": "FLOAT",
        b"S": "STRING",
        b"V": "UNICODE",
    },
}
