"""Helpers of the tests of ``convert``: a small model's weights as a file, and the command."""

from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import jax_transformer as jt
from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.convert import conversion, planning
from jax_transformer.convert.planning import Request
from jax_transformer.weights import rules
from parity_tests.unit import helpers

SIZES = {name: size for name, size in helpers.ODD.items() if name != "d_ff"}


def config_of(preset: str, **changes) -> TransformerConfig:
    tied = dict(source_vocab_size=13) if jt.preset(preset).tying is Tying.ALL else {}
    return jt.preset(preset, **(SIZES | tied | changes))


def state_of(config: TransformerConfig, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Return random weights under PyTorch's names, tied ones equal."""
    return rules.to_torch(
        registry.model_weights(config).table, helpers.random_arrays(config, dtype=dtype)
    )


def write(path: Path, state: dict[str, np.ndarray]) -> Path:
    safetensors.numpy.save_file(state, path, metadata={"format": "pt"})
    return path


def prepare(source: Path | str, destination: Path | str, **more: Any) -> planning.Prepared:
    return planning.prepare(Request(str(source), str(destination), **{"check": False, **more}))


def convert(source: Path | str, destination: Path | str, **more: Any) -> conversion.Outcome:
    """Convert without a check, unless it is asked for."""
    return conversion.convert(prepare(source, destination, **more))


def small(folder: Path) -> tuple[TransformerConfig, Path, Path]:
    """Return the configuration of a lesson10 of odd sizes, its weights file and its config.json."""
    config, described = config_of("lesson10", encoder_layers=1, d_ff=20), folder / "config.json"
    described.write_text(config.to_json())
    return config, write(folder / "model.safetensors", state_of(config)), described
