"""The traffic of a compiled program, read from its HLO text: bytes to memory and collectives.

``Compiled.cost_analysis()`` counts the body of a loop once, and says nothing about collectives or,
for a GPU that is not there, about memory. Here a loop counts as often as it runs; one whose number
of iterations is not in the text counts once.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

COLLECTIVES = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast".split()
)
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all iota partition-id replica-id "
    "opt-barrier domain while call conditional async-start async-update async-done".split()
)
"""Instructions that move no bytes themselves."""
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
"""Instructions that read only as much of their first operand as they return."""
_CALLED = re.compile(r"\b(?:body|calls|to_apply|branch_computations)=\{?([^,}\s]+(?:, ?%[^,}]+)*)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_BITS = re.compile(r"(?:f|bf|s|u|c)(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|mesh\[([^\]]*)\] ?\{([^}]*)\})"
)
"""Lists of devices, [groups, devices in each], or axes of a mesh."""
_CHAIN = re.compile(r"channel_id=(\d+).*\bchain_id=")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind and dtype in a run of the program."""

    kind: str
    """Its name in HLO: all-gather, all-reduce, reduce-scatter, all-to-all, ..."""
    dtype: str
    count: int
    bytes: int
    """Bytes that each device sends, in a ring."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device moves in a run of the program."""

    bytes: int
    """Bytes read from memory and written to it."""
    collectives: tuple[Collective, ...]
    """The largest first."""


@dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    """Type with layout, such as bf16[8,128]{1,0}; a tuple in parentheses."""
    opcode: str
    arguments: str
    """The text between its parentheses."""
    attributes: str
    root: bool
    size: int
    """Bytes of the result in main memory."""

    @cached_property
    def operands(self) -> list[str]:
        """The names of the instructions whose results it takes."""
        return _NAME.findall(self.arguments)

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs."""
        lists = _CALLED.findall(self.attributes)
        return [name for names in lists for name in _NAME.findall(names)]

    @property
    def collective(self) -> str | None:
        """The kind of collective; None for another instruction, and for the end of one."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def chain(self) -> str | None:
        """The channel of a collective that a TPU's compiler spread over fusions; all repeat it."""
        match = _CHAIN.search(self.attributes)
        return match[1] if match else None


_Computation = dict[str, _Instruction]
_Module = dict[str, _Computation]


def traffic(text: str, *, on_chip: str | None = None) -> Traffic:
    """Return the bytes and collectives of one device in a run of a ``Compiled.as_text()``.

    ``on_chip`` marks the layout of arrays that are not in the device's main memory: ``S(1)`` on a
    TPU.
    """
    module, entry = parse(text, on_chip)
    moved, counts, sizes = 0, Counter[tuple[str, str]](), defaultdict[tuple[str, str], float](float)
    chains: set[str] = set()
    for computation, times, fused in _runs(module, entry):
        for instruction in computation.values():
            if (kind := instruction.collective) is not None and instruction.chain not in chains:
                if instruction.chain is not None:
                    chains.add(instruction.chain)
                dtype = _ARRAY.findall(computation[instruction.operands[0]].result)[0][0]
                key = (kind, dtype)
                counts[key] += times
                sizes[key] += times * _sent(kind, computation, instruction)
            if not fused:
                moved += times * _moved(module, computation, instruction)
    collectives = [Collective(*key, counts[key], round(sizes[key])) for key in counts]
    return Traffic(moved, tuple(sorted(collectives, key=lambda each: -each.bytes)))


def parse(text: str, on_chip: str | None = None) -> tuple[_Module, str]:
    """Return a program's computations by name, of instructions by name; and where it begins."""
    module: _Module = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(("HloModule", " ")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            current = module.setdefault(name, {})
            if line.startswith("ENTRY "):
                entry = name
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            left, _, rest = line.strip().partition(" = ")
            name = left.removeprefix("ROOT ").lstrip("%")
            end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
            result, rest = rest[:end], rest[end:].lstrip()
            opcode, _, _ = rest.partition("(")
            close = _closing(rest, len(opcode))
            arguments, attributes = rest[len(opcode) + 1 : close], rest[close + 1 :]
            is_root, size = left.startswith("ROOT "), _size(result, on_chip)
            current[name] = _Instruction(name, result, opcode, arguments, attributes, is_root, size)
    return module, entry


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return start + match.start()
    raise ValueError(f"no closing parenthesis in {text[:80]!r}")


def _runs(
    module: _Module, name: str, times: int = 1, fused: bool = False
) -> Iterator[tuple[_Computation, int, bool]]:
    """Yield each computation that one runs, itself included: how often, and if in a fusion."""
    computation = module[name]
    yield computation, times, fused
    for instruction in computation.values():
        opcode = instruction.opcode
        if opcode not in ("while", "call", "conditional", "fusion", "async-start"):
            continue  # the function of a reduction runs element by element
        each = times * _trips(module, instruction) if opcode == "while" else times
        for called in instruction.called:
            yield from _runs(module, called, each, fused or opcode == "fusion")


def _trips(module: _Module, loop: _Instruction) -> int:
    """Return the iterations of a loop: what XLA says or, for a TPU, the end of its counter."""
    if (known := _TRIPS.search(loop.attributes)) is not None:
        return int(known[1])
    condition = re.search(r"condition=%([\w.\-]+)", loop.attributes)
    ends = [
        int(each.arguments)
        for each in (module[condition[1]].values() if condition else ())
        if each.opcode == "constant" and each.arguments.isdecimal()
    ]
    return ends[0] if len(ends) == 1 else 1


def _size(result: str, besides: str | None = None) -> int:
    """Return the bytes of a type, without the arrays whose layout has the mark ``besides``."""
    size = 0
    for dtype, shape, layout in _ARRAY.findall(result):
        if not (besides and besides in layout):
            match = _BITS.match(dtype)
            bits = int(match[1]) if match else 8 if dtype == "pred" else 0
            size += math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
    return size


# Bytes


def _moved(module: _Module, computation: _Computation, instruction: _Instruction) -> int:
    """Return the bytes that an instruction reads and writes, as HloCostAnalysis counts them."""
    opcode, result = instruction.opcode, instruction.size
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return 0
    if opcode == "fusion":
        inside = module[instruction.called[0]]
        read = sum(_read(inside, each) for each in inside.values())
        return read + _written(inside, next(x for x in inside.values() if x.root))
    operands = [computation[name].size for name in instruction.operands]
    if opcode in _SLICES:
        return 2 * result + sum(operands[1:])
    if opcode == "dynamic-update-slice":
        return 2 * operands[1] + sum(operands[2:])
    if opcode == "scatter":
        return 3 * operands[2] + operands[1]
    if opcode.endswith("-start"):  # its result repeats its operands
        return 2 * sum(operands)
    return result + sum(operands)


def _read(inside: _Computation, parameter: _Instruction) -> int:
    """Return the bytes that a fusion reads of an operand: only a slice, if it takes a slice."""
    if parameter.opcode != "parameter":
        return 0
    names, read = [parameter.name], 0
    for name in names:
        for user in inside.values():
            if name not in user.operands:
                continue
            first = user.operands[0] == name
            if user.opcode == "bitcast":
                names.append(user.name)
            elif user.opcode in _SLICES and first:
                read += user.size
            elif user.opcode != "dynamic-update-slice" or not first:  # updated in place
                return parameter.size
    return min(read, parameter.size)


def _written(inside: _Computation, result: _Instruction) -> int:
    """Return the bytes of a fusion's result, or of the update of an operand in place."""
    if result.opcode in ("tuple", "bitcast"):
        return sum(_written(inside, inside[name]) for name in result.operands)
    if result.opcode == "dynamic-update-slice":
        return inside[result.operands[1]].size
    return result.size


# Collectives


def _sent(kind: str, computation: _Computation, instruction: _Instruction) -> float:
    """Return the bytes that each device of a ring sends."""
    size = sum(_size(computation[name].result) for name in instruction.operands)
    devices = _group_size(instruction.attributes)
    share = (devices - 1) / devices if devices else 1.0
    if kind == "all-gather":
        return float(size * (devices - 1 if devices else 1))
    if kind == "all-reduce":
        return 2 * size * share
    return size * (1.0 if kind.startswith("collective") else share)


def _group_size(attributes: str) -> int:
    """Return the number of devices of each group; 0 if the text does not say."""
    if (match := _GROUPS.search(attributes)) is None:
        return 0
    listed, size, mesh, axes = match.groups()
    if listed or size:
        return int(size) if size else listed.count(",") + 1
    sizes = dict(re.findall(r"('[^']*')=(\d+)", mesh))
    used = re.findall(r"('[^']*')(?::\(\d+\)(\d+))?", axes)  # 'x':(2)4 is a part of x
    return math.prod(int(part or sizes[name]) for name, part in used)
