"""Trained models at work: translation, and the attention page.

``Engine`` names what translates: JAX, and the entry points of the group
``jax_transformer.engines``, such as CTranslate2. The value of one is a function with the arguments
of :func:`.translation.load` but ``engine``, which refuses what its engine does not have.
"""

import enum
from typing import TYPE_CHECKING

from jax_transformer.runtime import process

ENTRY_POINTS = "jax_transformer.engines"

if TYPE_CHECKING:

    class Engine(enum.StrEnum):
        JAX = "jax"
else:
    Engine = enum.StrEnum(
        "Engine", {name.upper(): name for name in ("jax", *process.entry_points(ENTRY_POINTS))}
    )
