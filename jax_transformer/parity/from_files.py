"""Comparisons of models in files with their PyTorch twins and with goldens."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_transformer.architectures.registry import load_object
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import conversion
from jax_transformer.convert.models import ModelDescription
from jax_transformer.errors import ConfigError, Refusal
from jax_transformer.formats import registry
from jax_transformer.formats.base import Pretrained
from jax_transformer.parity import comparison, golden, recording
from jax_transformer.parity.golden import Golden, GoldenCheck, OtherProcess
from jax_transformer.parity.proposal import Proposal
from jax_transformer.parity.search import propose
from jax_transformer.parity.steps import compare_training
from jax_transformer.storage import safetensors

TWIN = "twin"

TitledReport = tuple[str, Any]
"""A Report or a TrainingReport, after its title."""


def compare_files(
    model: str,
    other: str,
    description: ModelDescription,
    *,
    weights: str = "auto",
    dtype: str | None = None,
    gradients: bool = True,
    lengths: Sequence[int] = (),
    seed: int | None = None,
    steps: int | None = None,
) -> list[TitledReport]:
    """Run the weights at ``model`` in JAX, compare them with ``other``, and return (title, report)
    for each of ``lengths``, those of source and target; one report if there are none.

    ``other`` is the path of weights, which run in their PyTorch twin, ``twin`` for the same, or
    the path of a golden. ``description`` is the configuration if neither path has one; ``weights``
    selects those of a run folder at ``model``; ``seed`` is the one of the batch and of the
    gradients' weights; 0, or the golden's, if None. With ``steps`` these updates are compared, by
    :func:`.steps.compare_training`.
    """
    if steps is not None and other != TWIN:
        raise ConfigError(f"--steps: both models begin with the same weights: {TWIN}, not {other}")
    jax.config.update("jax_enable_x64", True)  # float64 weights are read as they are
    source = registry.open(model, weights)
    if golden.is_golden(other):
        if lengths:
            raise ConfigError(f"--lengths: {other} is a golden, and has a batch of its own")
        loaded = golden.load(other)
        _check_golden_fits(loaded, seed)
        flax_model = source.model(_config(description, source, None))
        report = comparison.compare_recorded(
            flax_model, loaded, loaded.batch, dtype=dtype, gradients=gradients, seed=loaded.seed
        )
        return [(f"{model} and {other}", report)]
    title = f"{model} and {'its PyTorch twin' if other == TWIN else other}"
    other_source = source if other == TWIN else registry.open(other)
    _check_torch()
    config = _config(description, source, None if other == TWIN else other_source)
    flax_model, twin_config = source.model(config), other_source.config or config
    twin, seed = _twin(twin_config, other_source.state(twin_config, "torch")), seed or 0
    reports = []
    for length in lengths or (None,):
        if length is not None and not 1 <= length <= config.longest:
            raise ConfigError(f"--lengths {length}: this model takes 1 to {config.longest}")
        batch = conversion.random_batch(config, seed, length)
        if steps is None:
            options: dict[str, Any] = {"dtype": dtype, "gradients": gradients, "seed": seed}
            compared: Any = comparison.compare(flax_model, twin, batch, **options)
        else:
            compared = compare_training(flax_model, twin, batch, steps=steps, seed=seed)
        reports.append((title if length is None else f"{title}, length {length}", compared))
    return reports


def _check_golden_fits(loaded: Golden, seed: int | None) -> None:
    """Raise ConfigError if a model of this project cannot be compared with the golden."""
    if seed not in (None, loaded.seed):
        belong = f"is a golden, whose batch and gradients belong to seed {loaded.seed}"
        raise ConfigError(f"--seed {seed}: {loaded.path} {belong}")
    if [(array.ndim, array.dtype.kind) for array in loaded.batch] != [(2, "i"), (2, "i")]:
        shapes = ", ".join(f"{array.dtype} {array.shape}" for array in loaded.batch)
        takes = "the model takes two arrays of ids, source and target"
        raise ConfigError(f"{loaded.path}: its batch is {shapes}, but {takes}")


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the PyTorch twin needs torch: pip install 'jax-seq2seq[torch]', or compare with a"
            " golden made where torch is installed"
        )


def _config(
    description: ModelDescription, source: Pretrained, other: Pretrained | None
) -> TransformerConfig:
    """Return the configuration of the source's files, of the other's, or of the command line.
    Raises ConfigError if the command line describes a source with a config.json of its own.
    """
    described = description.config is not None or description.preset is not None
    if source.config is not None:
        if described:
            bare = "--config and --preset are for bare files of weights"
            raise ConfigError(f"{source.path} has its own config.json: {bare}")
        return source.config
    if other is not None and other.config is not None and not described:
        return other.config
    return description.settle(source).config


def propose_table(theirs: str, ours: str, batch_file: str | None) -> Proposal:
    """Propose a table between the models that two functions return, ``my_file.py:NAME`` or
    ``package.module:NAME``.

    The batch is in a file, or a function ``batch`` beside one of them returns it. Functions
    ``call_torch`` and ``call_flax`` beside them are those of :func:`.search.propose`.
    """
    _check_torch()
    models = []
    for spec in (theirs, ours):
        make = load_object(spec)
        if not callable(make):
            raise ConfigError(f"{spec} is a {type(make).__name__}, not a function")
        models.append(_called(spec, make))

    def beside(spec: str, name: str) -> Any:
        return getattr(sys.modules[load_object(spec).__module__], name, None)

    batch = beside(theirs, "batch") or beside(ours, "batch")
    if batch_file is None and batch is None:
        raise ConfigError(
            f"no batch: define batch() beside {theirs}, which returns the arguments of a call, or"
            " give --batch FILE.safetensors, whose arrays are named 0, 1, ..."
        )
    arguments = _called("batch", batch) if batch_file is None else _batch_from_file(batch_file)
    calls = {"call_torch": beside(theirs, "call_torch"), "call_flax": beside(ours, "call_flax")}
    if not hasattr(models[0], "state_dict"):
        raise ConfigError(f"{theirs} returns a {type(models[0]).__name__}, not a PyTorch module")
    return _called("the models", partial(propose, models[0], models[1], arguments, **calls))


def _called(name: str, function: Callable[..., Any]) -> Any:
    """Return the result of a user's function. Raises ConfigError, with its name, if it fails."""
    try:
        return function()
    except Refusal:
        raise
    except Exception as error:
        raise ConfigError(f"{name}: {recording.line_of(error)}") from error


# Goldens


def create_golden(
    path: str, model: str, weights: str, python: str | None, batch_file: str | None, seed: int
) -> Golden:
    """Record a golden of a model's PyTorch twin, or of the module of ``package.module:callable``,
    called with the arrays 0, 1, and so on of ``batch_file``.
    """
    if ":" in model and not Path(model).exists() and not model.startswith("hf:"):
        recorder, batch = OtherProcess(model, python), _batch_from_file(batch_file)
        return golden.create(path, recorder, batch, source={"factory": model}, seed=seed)
    if batch_file is not None:
        use = "is for package.module:callable only"
        raise ConfigError(f"--batch {batch_file}: {use}; the batch of {model} is random")
    jax.config.update("jax_enable_x64", True)
    source = registry.open(model, weights)
    if (config := source.config) is None:
        raise ConfigError(f"{model}: has no configuration: convert it to a run folder first")
    state = source.state(names="torch")
    twin, random = _twin_recorder(config, state), conversion.random_batch(config, seed)
    origin = {"config": config.to_json()}
    return golden.create(path, twin, random, source=origin, seed=seed, state=state)


def _batch_from_file(path: str | None) -> list[np.ndarray]:
    if path is None:
        file = "a .safetensors file with the arguments of the model's call"
        raise ConfigError(f"--batch: give {file}, named 0, 1, ...")
    arrays = safetensors.read(path)
    names = [str(i) for i in range(len(arrays))]
    if set(names) != set(arrays):
        listed = ", ".join(sorted(arrays))
        raise ConfigError(f"--batch {path}: its arrays must be named 0, 1, ..., not {listed}")
    return [arrays[name] for name in names]


def check_golden(path: str, python: str | None) -> GoldenCheck:
    """Record the model of a golden again and compare."""
    loaded = golden.load(path)
    if "factory" in loaded.source:
        return golden.recheck(loaded, OtherProcess(loaded.source["factory"], python))
    config = TransformerConfig.from_json(loaded.source["config"])
    return golden.recheck(loaded, _twin_recorder(config, loaded.state))


def _twin_recorder(
    config: TransformerConfig, state: Mapping[str, np.ndarray]
) -> comparison.TorchRecorder:
    from jax_transformer.architectures import twins

    _check_torch()
    twin = _twin(config, dict(state))
    return lambda dtype, seed, batch: twins.recorded(twin, batch, dtype=dtype, seed=seed)


def _twin(config: TransformerConfig, state: Any) -> Any:
    from jax_transformer.architectures import twins
    from jax_transformer.weights import torch_bridge

    return torch_bridge.fill(twins.twin(config), state).eval()
