"""The folder of exported programs: a file for each, the weights, a manifest, and ``run.py``."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.extras.deploy.stablehlo import programs, run
from jax_transformer.extras.deploy.stablehlo.programs import Settings
from jax_transformer.generate import decoding
from jax_transformer.generate.prepare import SplitModel
from jax_transformer.parity import from_files
from jax_transformer.storage import safetensors, tensors

MANIFEST, WEIGHTS, LOADER = "programs.json", "weights.safetensors", "run.py"


def check_installed() -> None:
    """Raise ConfigError unless ``jax.export`` can write files."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError(
            "--to stablehlo needs flatbuffers, which jax.export writes with: "
            "pip install 'jax-seq2seq[stablehlo]'"
        )


def write(
    folder: Path, config: TransformerConfig, arrays: Mapping[str, np.ndarray], settings: Settings
) -> str:
    """Create ``folder``, and return the SHA-256 of its manifest, which hashes the other files.

    Raises ConfigError for float64, which JAX has only in its 64-bit mode.
    """
    wide = sorted(name for name, array in arrays.items() if array.dtype == np.float64)
    if wide:
        raise ConfigError(
            f"--to stablehlo: {wide[0]} and {len(wide) - 1} others are float64: "
            "give --dtype float32"
        )
    exported = programs.export(
        config, {name: array.dtype for name, array in arrays.items()}, settings
    )
    folder.mkdir()
    entries = {}
    for name, program in exported.items():
        content = bytes(program.serialize())
        (folder / f"{name}.stablehlo").write_bytes(content)
        entries[name] = {
            "file": f"{name}.stablehlo",
            "sha256": hashlib.sha256(content).hexdigest(),
            "arguments": _avals(program.in_tree, program.in_avals)[1:],
            "results": _shapes(program.out_avals),
        }
    sha256 = safetensors.save(folder / WEIGHTS, tensors.in_memory(dict(arrays)), target=folder)
    manifest = {
        "format": 1,
        "jax": jax.__version__,
        "calling_convention": next(iter(exported.values())).calling_convention_version,
        "platforms": list(programs.PLATFORMS),
        "programs": entries,
        "weights": {"file": WEIGHTS, "sha256": sha256},
        **_numbers(config, settings),
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    loader = Path(run.__file__).read_bytes()
    (folder / LOADER).write_bytes(loader)
    return hashlib.sha256(text.encode()).hexdigest()


def _numbers(config: TransformerConfig, settings: Settings) -> dict[str, Any]:
    """Return the sizes and special ids that a caller needs."""
    generation = settings.generation
    start, end = generation.decoder_start_token_id, generation.eos_token_id
    return {
        "max_source_length": config.longest,
        "max_new_tokens": settings.max_new_tokens,
        "num_beams": settings.num_beams,
        "beam_scorer": generation.beam_scorer.value,
        "length_penalty": generation.length_penalty,
        "source_vocab_size": config.source_vocab_size,
        "target_vocab_size": config.target_vocab_size,
        "special_ids": {
            "source_pad": config.source_pad_id,
            "target_pad": config.target_pad_id,
            "start": config.bos_id if start is None else start,
            "end": config.eos_id if end is None else end,
        },
    }


def _avals(tree: Any, avals: Any) -> list[list[str]]:
    """Return the arrays of each positional argument; weights are the first."""
    arguments, _ = jax.tree.unflatten(tree, avals)
    return [_shapes(jax.tree.leaves(argument)) for argument in arguments]


def _shapes(avals: Any) -> list[str]:
    """Return each array as ``float32[b,s,16]``: b is the batch, s the sources' length."""
    return [f"{aval.dtype}[{','.join(map(str, aval.shape))}]" for aval in avals]


def check(folder: Path, model: SplitModel, settings: Settings) -> None:
    """Raise DifferentError unless the program ``greedy`` gives the model's own tokens."""
    source, _ = from_files.random_batch(model.config, 0)
    ours = decoding.greedy(model, source, **settings.search)
    theirs = run.Model(folder).greedy(source)
    if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
        raise DifferentError(
            "self-check: the exported program gives other tokens; nothing was written"
        )
