"""Parameters of tests that only ``pytest -m slow`` runs."""

from typing import Any

import pytest


def quick_if(quick: bool, *values: Any, **options: Any) -> Any:
    """Return a test's parameters, with the mark ``slow`` unless they are quick."""
    return pytest.param(*values, marks=() if quick else pytest.mark.slow, **options)
