"""The built-in task: English date, time, number, unit, price and list phrases to be written in
German, French or Spanish.

The data ships with the package, in ``phrases.tsv.xz`` next to this file, so that training needs no
download. ``make_phrases`` made it from Unicode CLDR; its header names the versions, and its
licence, the Unicode License v3, is in ``PHRASES_LICENSE``.
"""

import importlib.resources
import lzma

Pair = tuple[str, str]


def load() -> dict[str, list[Pair]]:
    """Return (source, target) pairs: "train" (about 60,000 shuffled), "valid", "test" (1,000 each).

    A source starts with the tag of its target language, as in ``("<2de> March 5, 2024", "5. März
    2024")``. No source occurs twice.
    """
    splits: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    for line in _lines():
        split, source, target = line.split("\t")
        splits[split].append((source, target))
    return splits


def header() -> list[str]:
    """Return the data file's comments: how it was made, from which versions, and its licence."""
    return [line.removeprefix("# ") for line in _lines(comments=True)]


def _lines(*, comments: bool = False) -> list[str]:
    """Return the lines of the data file without their ends: only comments, or all others."""
    packed = importlib.resources.files("jax_transformer.data").joinpath("phrases.tsv.xz")
    with packed.open("rb") as file, lzma.open(file) as lines:
        return [line.decode().rstrip("\n") for line in lines if line.startswith(b"#") == comments]
