"""Configurations as published models of the families and of other toolkits have them."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("published_configs")


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
