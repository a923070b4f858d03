"""A proposed weight table: its entries, why each was chosen, and what is proven of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax_transformer.errors import counted
from jax_transformer.weights import listing
from jax_transformer.weights.any_model import Stacked, Unused
from jax_transformer.weights.rules import Alias, Rule

SAME = 3e-3
"""Relative difference below which two outputs are of the same function: a wrong rule is above it,
and a port whose constants differ a little is below."""
Entry = Rule | Alias | Stacked | Unused
_NAMES = ["Alias", "Rule", "Stacked", "Unused", "repeat"]


@dataclass(frozen=True)
class Line:
    """An entry of a proposed table."""

    entry: Entry
    reason: str
    proven: bool
    candidates: tuple[str, ...] = ()
    """Other layouts of the same shapes, none of which was shown to be wrong; for a rule that is not
    proven."""


@dataclass(frozen=True)
class Proposal:
    """A proposed weight table."""

    entries: Sequence[Line]
    missing: Sequence[str]
    """Arrays for which there is no tensor."""
    off_by: float
    """Largest difference of the models' outputs, divided by the largest output."""
    round_trip: bool
    """True if the tensors come back bit for bit."""
    tried: int
    """Number of tables that were compared."""
    first_difference: str = ""
    """The first module whose output differs although those before it are right; empty if none is
    known, or the models' outputs agree."""
    note: str = ""
    """A possible reason if they differ."""

    @property
    def table(self) -> list[Entry]:
        """The table, for :func:`jax_transformer.weights.from_torch`."""
        return [line.entry for line in self.entries]

    @property
    def proven(self) -> bool:
        """True if every rule is proven, no array is missing, and the tensors come back."""
        return self.round_trip and not self.missing and all(line.proven for line in self.entries)

    @property
    def converts(self) -> bool:
        """True if the table converts every weight and the models' outputs agree, whether or not
        each rule acts on them."""
        unused = any(isinstance(line.entry, Unused) and not line.proven for line in self.entries)
        return self.round_trip and not (self.missing or unused) and self.off_by < SAME

    def code(self) -> str:
        """Return the table as a Python file. A rule that is not proven has a comment."""
        notes = {}
        for line in self.entries:
            if not line.proven:
                name = _torch_name(line.entry)
                notes[name] = f"unproven: {line.reason}{_or(line.candidates)}"
        text = listing.code(self.table, notes)
        used = sorted(name for name in _NAMES if f"{name}(" in text)
        missing = "".join(f"# no tensor for {name}\n" for name in self.missing)
        return f"from jax_transformer.weights import {', '.join(used)}\n\n{missing}{text}"

    def lines(self) -> Iterator[str]:
        """Return the table as a list, with the reason for each entry."""
        width = max(len(_torch_name(line.entry)) for line in self.entries)
        for line in self.entries:
            mark = " " if line.proven else "?"
            entry = line.entry
            about = f"{_torch_name(entry):{width}} {_flax_names(entry)}"
            yield f"{mark} {about}  [{line.reason}]" + _or(line.candidates)
        yield from (f"! no tensor for {name}" for name in self.missing)
        yield self.summary()

    def summary(self) -> str:
        """Return the result in a sentence."""
        rules = [line for line in self.entries if isinstance(line.entry, Rule)]
        proven = sum(line.proven for line in rules)
        count = sum(isinstance(each.entry, Unused) and not each.proven for each in self.entries)
        unused = f", {counted(count, 'tensor')} without an array" if count else ""
        first = f", first that of {self.first_difference}" if self.first_difference else ""
        back = "come back bit for bit" if self.round_trip else "do not come back bit for bit"
        return (
            f"{proven} of {counted(len(rules), 'rule')} proven, "
            f"{counted(len(self.missing), 'array')} without a tensor{unused}; outputs differ by"
            f" {self.off_by:.1e} of the largest{first}; the tensors {back}{self.note}"
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_data(self) -> dict[str, Any]:
        """Return the proposal for JSON."""
        entries = [
            {
                "torch": _torch_name(line.entry),
                "flax": _flax_names(line.entry),
                "reason": line.reason,
                "proven": line.proven,
                "candidates": list(line.candidates),
            }
            for line in self.entries
        ]
        return {
            "proven": self.proven,
            "off_by": self.off_by,
            "first_difference": self.first_difference,
            "round_trip": self.round_trip,
            "missing": list(self.missing),
            "entries": entries,
            "code": self.code(),
        }


def _or(candidates: Sequence[str]) -> str:
    return f"; or {', '.join(map(repr, candidates))}" if candidates else ""


def _torch_name(entry: Entry) -> str:
    return "" if isinstance(entry, Stacked) else entry.torch


def _flax_names(entry: Entry) -> str:
    if isinstance(entry, Rule):
        return f"-> {', '.join(entry.flax)}" + (f"  '{entry.axes}'" if entry.axes else "")
    if isinstance(entry, Alias):
        return f"= {entry.of}"
    if isinstance(entry, Unused):
        return "(no array)"
    kind = f"{entry.parts} parts" if entry.parts else "layers"
    return f"{entry.flax}: {kind}, axis {entry.axis}"
