"""Names of a file's tensors: changes that a user asks for, a prefix, and the presets they fit."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from jax_transformer.architectures import registry
from jax_transformer.errors import ConfigError, InputError, nearest
from jax_transformer.storage import tensors
from jax_transformer.weights.rules import Table


@dataclass(frozen=True)
class NameChanges:
    """Changes of names, and tensors to leave out.

    Both are said by a tensor's name, with or without the stripped prefix.
    """

    strip_prefix: str = ""
    """Removed from the beginning of names."""
    prefix_required: bool = True
    """Refuse other names that do not begin with it."""
    ignore: tuple[str, ...] = ()
    """Patterns of whole names as in a shell, of ``*``, ``?`` and ``[...]``; ``*`` matches dots."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """New names by old ones. An old name is a whole name, or the words before one of its dots. The
    first that fits is replaced, once.
    """

    def __str__(self) -> str:
        """Return the changes as flags of the command line, for messages."""
        flags = [f"--strip-prefix {self.strip_prefix}"] if self.strip_prefix else []
        flags += [f"--ignore {pattern}" for pattern in self.ignore]
        return " ".join([*flags, *(f"--rename {old}={new}" for old, new in self.rename.items())])

    def apply(self, names: Collection[str]) -> dict[str, str]:
        """Return the new name of every name, without the ignored ones.

        Raises ConfigError for a pattern or an old name that no name fits, InputError for names that
        do not begin with the prefix, or that become equal.
        """
        changed: dict[str, str] = {}
        fitting: set[str] = set()
        unchanged = []
        for name in names:
            forms = (name.removeprefix(self.strip_prefix), name)
            ignoring = [p for p in self.ignore if any(fnmatchcase(form, p) for form in forms)]
            fitting.update(f"--ignore {pattern}" for pattern in ignoring)
            if ignoring:
                continue
            starts = ((old, form) for old in self.rename for form in forms)
            uses = (use for use in starts if f"{use[1]}.".startswith(f"{use[0]}."))
            use = next(uses, None)
            if use is None:
                changed[name] = forms[0]
                unchanged.append(name)
            else:
                old, form = use
                changed[name] = self.rename[old] + form[len(old) :]
                fitting.add(f"--rename {old}={self.rename[old]}")
        flags = [f"--ignore {pattern}" for pattern in self.ignore]
        flags += [f"--rename {old}={new}" for old, new in self.rename.items()]
        if unused := [flag for flag in flags if flag not in fitting]:
            close = nearest(unused[0].split(" ", 1)[1].partition("=")[0], list(names))
            raise ConfigError(f"{', '.join(unused)}: no name of the file fits{close}")
        others = [name for name in unchanged if not name.startswith(self.strip_prefix)]
        if others and self.prefix_required:
            raise InputError(
                f"--strip-prefix {self.strip_prefix}: {len(others)} of {len(names)} names do not"
                f" begin with it, first {others[0]}"
            )
        _check_distinct(changed)
        return changed

    def why_ignored(self, name: str) -> str:
        """Return the reason why a name is left out."""
        forms = (name.removeprefix(self.strip_prefix), name)
        fitting = (p for p in self.ignore if any(fnmatchcase(form, p) for form in forms))
        return f"fits --ignore {next(fitting)}"


def common_prefix(names: Iterable[str], expected: Collection[str]) -> str:
    """Return the prefix, up to a dot, that stands before the expected names in most ``names``.

    Empty if there is none, or if as many names fit without one.
    """
    names, known = list(names), set(expected)
    votes: Counter[str] = Counter()
    for name in names:
        cuts = [0, *(dot.end() for dot in re.finditer(r"\.", name))]
        votes.update(name[:cut] for cut in cuts if name[cut:] in known)
    most = max(votes, key=lambda prefix: (votes[prefix], -len(prefix)), default="")
    shared = sum(name.startswith(most) for name in names)
    return most if 2 * votes[most] > min(len(known), len(names)) and 2 * shared > len(names) else ""


@dataclass(frozen=True)
class Match:
    """The preset whose names fit a file's best."""

    preset: str
    prefix: str
    """The prefix that stands before its names in the file."""
    count: int
    """Number of the file's names that are names of the preset's."""


def closest(names: Iterable[str]) -> Match | None:
    """Return the preset that knows most of ``names``, whatever their layers' numbers.

    None if none knows more than half of them. Of equals, the one with the fewest names that are not
    there.
    """
    numbered = Counter(map(_unnumbered, names))
    best, highest = Match("", "", 0), (0, 0)
    for preset, entry in registry.presets().items():
        try:
            config = entry.with_sizes(num_layers=1)
            table = registry.unchecked_table(config.architecture, config)
            known = set(map(_unnumbered, torch_names(table)))
        except ConfigError:  # an architecture of the user that cannot be of one layer
            continue
        prefix = common_prefix(numbered, known)
        fits = [name for name in numbered if name.removeprefix(prefix) in known]
        count = sum(numbered[name] for name in fits)
        rank = (count, len(fits) - len(known))
        if rank > highest:
            best, highest = Match(preset, prefix, count), rank
    return best if 2 * best.count > numbered.total() else None


def torch_names(table: Table) -> set[str]:
    """Return PyTorch's names in a weight table."""
    return {rule.torch for rule in table}


def explained(error: InputError, names: Collection[str], expected: Collection[str]) -> InputError:
    """Return the error of weights that do not fit, with a prefix or a preset that the file's names
    fit better than the ``expected`` ones in PyTorch. One without ``details`` is returned as it is.
    """
    if not error.details:
        return error
    hint, match = "", closest(names)
    if all(detail.startswith("unexpected ") for detail in error.details):
        hint = "--ignore NAME leaves out a tensor that the model has no use for"
    elif prefix := common_prefix(names, expected):
        hint = f"most names begin with {prefix!r}: give --strip-prefix {prefix}"
    elif match is not None and match.count > len(set(names) & set(expected)):
        before = f", after the prefix {match.prefix!r}" if match.prefix else ""
        hint = (
            f"{match.count} of {len(names)} names are names of preset {match.preset!r}{before}:"
            f" give --preset {match.preset}"
        )
    return tensors.refusal(error.details, hint)


def _unnumbered(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def _check_distinct(changed: Mapping[str, str]) -> None:
    """Raise InputError naming every name that two tensors would have."""
    counts = Counter(changed.values())
    twice = [
        f"{' and '.join(old for old in changed if changed[old] == new)} would both be {new}"
        for new, count in counts.items()
        if count > 1
    ]
    if twice:
        raise InputError("; ".join(twice))
