"""A report as one self-contained HTML page: a map of modules, coloured by their difference."""

from importlib import resources
from pathlib import Path
from typing import Any

from jax_transformer import webpage
from jax_transformer.parity.report import Report
from jax_transformer.storage import atomic


def write(path: str | Path, report: Report, *, title: str) -> None:
    """Write the page of a report, atomically."""
    atomic.write_text(path, render(report.to_data() | {"title": title}))


def render(data: dict[str, Any]) -> str:
    """The text of the page."""
    template = resources.files("jax_transformer.parity").joinpath("page.html")
    return webpage.render(template.read_text(encoding="utf-8"), data)
