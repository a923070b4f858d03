"""A report as one HTML page that needs nothing but a browser: a map of modules and places, coloured by how far each is apart."""

from importlib import resources
from pathlib import Path
from typing import Any

from jax_transformer import webpage
from jax_transformer.parity.report import Report


def write(path: str | Path, report: Report, *, title: str) -> None:
    """Write the page of a report, whole or not at all."""
    webpage.write(path, render(report.to_data() | {"title": title}))


def render(data: dict[str, Any]) -> str:
    """The page's text."""
    return webpage.render(
        resources.files("jax_transformer.parity").joinpath("page.html").read_text(encoding="utf-8"),
        data,
    )
