"""The engines that translate: JAX, and those of entry points, such as CTranslate2.

The value of an entry point of the group ``jax_transformer.engines`` is a function with the
arguments of :func:`load` but ``engine``, which refuses what its engine does not have.
"""

import enum
from typing import TYPE_CHECKING, Any

from jax_transformer.errors import ConfigError
from jax_transformer.runtime import process

if TYPE_CHECKING:
    from jax_transformer.formats.base import Pretrained
    from jax_transformer.inference.translation import Translator

    class Engine(enum.StrEnum):
        JAX = "jax"


ENTRY_POINTS = "jax_transformer.engines"

if not TYPE_CHECKING:
    Engine = enum.StrEnum(
        "Engine", {name.upper(): name for name in ("jax", *process.entry_points(ENTRY_POINTS))}
    )


def load(
    opened: "Pretrained",
    *others: "Pretrained",
    engine: Engine = Engine.JAX,
    quantization: str | None = None,
    precision: str | None = None,
    **settings: Any,
) -> "Translator":
    """Return the translator of what :func:`jax_transformer.formats.registry.open` has opened.

    Arguments are those of :meth:`Translator.from_opened`, and the engine. Raises ConfigError for
    options that it does not have.
    """
    if engine is not Engine.JAX:
        load_engine = process.load_entry_point(process.entry_points(ENTRY_POINTS)[engine])
        options = {"quantization": quantization, "precision": precision, **settings}
        translator: Translator = load_engine(opened, *others, **options)
        return translator
    if quantization is not None:
        engines = " or ".join([*Engine][1:]) or "another engine"
        raise ConfigError(f"--quantization {quantization} is for --engine {engines}")
    from jax_transformer.inference import translation

    return translation.Translator.from_opened(opened, *others, precision=precision, **settings)
