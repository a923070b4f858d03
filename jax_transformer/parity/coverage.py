"""The parts of the PyTorch model that a comparison reaches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_transformer.parity.difference import Entry
from jax_transformer.parity.pairs import GradientGetters

_SHOWN = 8
"""Names of parts that are not compared, in a report as text."""


@dataclass(frozen=True)
class Coverage:
    """The parts of the PyTorch model that were compared."""

    modules: Mapping[str, bool]
    """The modules with parameters that were called; True if their outputs were compared."""
    parameters: Mapping[str, bool]
    """True if the parameter's gradient was compared; empty if no gradients were."""

    def __str__(self) -> str:
        gradients = f"gradients of {_share(self.parameters)} parameters"
        of_gradients = gradients if self.parameters else "no gradients"
        return f"compared: outputs of {_share(self.modules)} modules and {of_gradients}"

    @property
    def missing(self) -> list[str]:
        """The modules and parameters that were not compared."""
        return [name for each in (self.modules, self.parameters) for name in each if not each[name]]

    def names(self) -> Iterator[str]:
        """Return the first names that are missing, in words; nothing if none is."""
        if shown := self.missing[:_SHOWN]:
            more = len(self.missing) - len(shown)
            yield f"not compared: {', '.join(shown)}{f' and {more} more' if more else ''}"

    def to_data(self) -> dict[str, Any]:
        """Return the counts, compared and all, and the missing names for JSON."""
        counts = {
            name: {"compared": sum(each.values()), "all": len(each)}
            for name, each in (("modules", self.modules), ("parameters", self.parameters))
        }
        return counts | {"missing": self.missing, "text": str(self)}


def _share(compared: Mapping[str, bool]) -> str:
    count = sum(compared.values())
    return f"{'only ' if 2 * count < len(compared) else ''}{count} of {len(compared)}"


def of(
    entries: Sequence[Entry], getters: GradientGetters, theirs: Any, gradients: bool
) -> Coverage:
    """Return the parts of a PyTorch recording that these entries compare."""
    outputs = {entry.theirs for entry in entries if entry.output is not None}
    named = {getters[entry.ours][leaf][1] for entry in entries for leaf in entry.parameters}
    called = dict.fromkeys(call.rpartition("#")[0] for call in theirs.order)
    modules = [name for name in called if any(x.startswith(f"{name}.") for x in theirs.sizes)]
    parameters = {name: name in named for name in theirs.sizes if gradients}
    return Coverage({name: name in outputs for name in modules}, parameters)
