"""The tables in the pages of docs/architectures agree with the code."""

import re
from pathlib import Path

import pytest

import jax_transformer as jt
from jax_transformer.config import Branch, StackConfig, TransformerConfig

PAGES = Path(__file__).parents[3] / "docs" / "architectures"
DOCUMENTS = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")


def page(document: str) -> str:
    return (PAGES / f"{document}.md").read_text(encoding="utf-8")


def forms(document: str) -> list[str]:
    """The presets that a page is about."""
    return [document, f"{document}_repaired"]


def test_every_page_is_of_a_document():
    names = jt.preset_names()
    assert len(DOCUMENTS) >= 5 and {each for name in DOCUMENTS for each in forms(name)} <= {*names}


# Tables of fields


def rows(document: str) -> list[list[str]]:
    """Return the cells of the table under "Configuration", without its head."""
    section = page(document).split("\n## Configuration\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def value_at(config: TransformerConfig, field: str) -> object:
    """Return a field's value by a path such as ``decoder.branches[1].residual``."""
    value: object = config
    for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", field):
        value = getattr(value, name)
        value = value[int(index)] if index else value
    return value


def cell_text(value: object) -> str | None:
    """Return a value as the tables write it, or None if only prose can describe it."""
    if isinstance(value, tuple) and not any(isinstance(item, Branch) for item in value):
        return ", ".join(f"`{item.value}`" for item in value) or "none"
    if isinstance(value, (tuple, StackConfig, type(None))):
        return None
    if isinstance(value, (bool, int, float)) and not hasattr(value, "value"):
        return str(value).lower()
    return f"`{value}`"


def table(document: str) -> list[tuple[str, str, str]]:
    """List (preset, field, cell text) of every cell with a value."""
    cells_of = []
    for fields, faithful, repaired, *_ in rows(document):
        names = re.findall("`([^`]*)`", fields)
        cells = (faithful, faithful if repaired == "the same" else repaired)
        for preset, cell in zip(forms(document), cells, strict=True):
            one_each = len(names) > 1 and len(cell.split(", ")) == len(names)
            parts = cell.split(", ") if one_each else [cell] * len(names)
            cells_of += [(preset, name, part) for name, part in zip(names, parts, strict=True)]
    return cells_of


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_fields_in_a_table_have_the_documented_values(document):
    compared = 0
    for preset, field, cell in table(document):
        expected = cell_text(value_at(jt.preset(preset), field))
        if expected is not None and re.fullmatch(r"none|true|false|[\d.]+|`\w+`(, `\w+`)*", cell):
            assert expected in (cell, f"{cell}.0"), (
                f"{preset}: {field} is {expected}, the page says {cell}"
            )
            compared += 1
    assert compared > 10
