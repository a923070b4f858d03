"""Every target of fuzzing by its name."""

import importlib
from collections.abc import Iterator, Mapping

from campaigns.fuzzing.harness import Target

_GROUPS = ("weights", "arrays", "text", "toolkits", "tokenizers", "configs")
"""The modules ``campaigns.fuzzing.targets.GROUP``; the last ones take longest to import."""


class _Targets(Mapping[str, Target]):
    """The targets of all groups; one is looked up without the groups after its own."""

    def __getitem__(self, name: str) -> Target:
        for group in _groups():
            if name in group:
                return group[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for group in _groups() for name in group)

    def __len__(self) -> int:
        return sum(map(len, _groups()))


def _groups() -> Iterator[dict[str, Target]]:
    for group in _GROUPS:
        yield importlib.import_module(f"campaigns.fuzzing.targets.{group}").TARGETS


TARGETS = _Targets()
