"""A campaign: numbered cases, each of which must end as the documentation promises."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One outcome of a numbered case."""

    group: str
    """The row of the table, as ``save`` or ``pt``."""
    outcome: str
    """The column of the table, as ``equal`` or ``exit code 3``."""
    what: str = ""
    """The damage, interruption or input, to read and to repeat."""
    wrong: tuple[str, ...] = ()
    """The broken promises; none if the case ended as promised."""
    count: int = 1
    """The kills, damages or inputs that this stands for."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Other figures, as JSON."""


@dataclass(frozen=True)
class Campaign:
    """Numbered cases and what they share."""

    about: str
    prepare: Callable[[Path], None]
    """Writes what all cases share into an empty folder, once."""
    cases: Callable[[Path, Path, int, int], Iterable[Case]]
    """The outcomes of a case, by the shared folder, an empty folder of its own, the seed and the
    number."""
    small: int
    """The number of cases of a short campaign, which is the default."""
    nightly: int
