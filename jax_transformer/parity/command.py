"""``jax-transformer parity`` and ``jax-transformer golden``: models out of files, beside their PyTorch twins."""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.convert import conversion, planning, sources
from jax_transformer.convert.conversion import Description
from jax_transformer.convert.sources import Source
from jax_transformer.errors import ConfigError
from jax_transformer.parity import comparison, golden, page
from jax_transformer.parity.other_process import OtherProcess
from jax_transformer.parity.report import DifferentError, Report
from jax_transformer.storage import safetensors
from jax_transformer.weights import rules

TWIN = "twin"
_ROWS, _SOURCE, _TARGET = 3, 7, 5


@dataclass(frozen=True)
class Asked:
    """What to compare."""

    model: str
    other: str
    description: Description
    weights: str = "auto"
    dtype: str | None = None
    gradients: bool = True
    lengths: tuple[int, ...] = ()
    seed: int | None = None
    html: str | None = None


def compare(asked: Asked) -> list[tuple[str, Report]]:
    """A report for each length that is asked for, with what it is of; the page is of the first that differs, else of the last."""
    jax.config.update("jax_enable_x64", True)  # float64 weights are read as they are
    source = sources.find(asked.model, weights=asked.weights)
    reports = list(
        _golden(asked, source) if golden.is_golden(asked.other) else _twin(asked, source)
    )
    if asked.html is not None:
        title, report = chosen(reports)
        page.write(asked.html, report, title=title)
    return reports


def chosen(reports: list[tuple[str, Report]]) -> tuple[str, Report]:
    """The first that differs, else the last."""
    return next((pair for pair in reports if not pair[1].agrees), reports[-1])


def check(reports: list[tuple[str, Report]]) -> None:
    """Raises DifferentError, one line, unless all agree."""
    title, report = chosen(reports)
    if not report.agrees:
        raise DifferentError(
            f"{title}: {report.summary()}" if len(reports) > 1 else report.summary()
        )


def _golden(asked: Asked, source: Source) -> Iterator[tuple[str, Report]]:
    if asked.lengths:
        raise ConfigError(f"--lengths: {asked.other} is a golden, and has a batch of its own")
    found = golden.load(asked.other)
    if asked.seed not in (None, found.seed):
        raise ConfigError(
            f"--seed {asked.seed}: {asked.other} is a golden, whose batch and gradients are those of seed {found.seed}"
        )
    if [(array.ndim, array.dtype.kind) for array in found.batch] != [(2, "i"), (2, "i")]:
        held = ", ".join(f"{array.dtype} {array.shape}" for array in found.batch)
        raise ConfigError(
            f"{asked.other}: its batch is {held}, and {asked.model} takes two arrays of ids, source and target"
        )
    model = _flax(_settled(asked.description, source, None), source)
    report = comparison.compare_recorded(
        model, found, found.batch, dtype=asked.dtype, gradients=asked.gradients, seed=found.seed
    )
    yield f"{asked.model} and {asked.other}", report


def _twin(asked: Asked, source: Source) -> Iterator[tuple[str, Report]]:
    _check_torch()
    from jax_transformer import torch_bridge

    other = source if asked.other == TWIN else sources.find(asked.other)
    config = _settled(asked.description, source, other)
    model = _flax(config, source)
    their_config = other.config or config
    module = torch_bridge.fill(torch_bridge.twin(their_config), _state(their_config, other)).eval()
    seed = asked.seed or 0
    for length in asked.lengths or (None,):
        given = batch(config, seed, length)
        report = comparison.compare(
            model, module, given, dtype=asked.dtype, gradients=asked.gradients, seed=seed
        )
        name = f"{asked.model} and {'its PyTorch twin' if asked.other == TWIN else asked.other}"
        yield name if length is None else f"{name}, length {length}", report


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the PyTorch twin needs torch: pip install 'jax-transformer[torch]', or compare with a golden made where it is"
        )


def _settled(description: Description, source: Source, other: Source | None) -> TransformerConfig:
    """The model: what its own files say, else the other's, else the command line."""
    said = description.config is not None or description.preset is not None
    for found in (source, other):
        if found is not None and found.config is not None:
            if said and found is source:
                raise ConfigError(
                    f"{found.path} has a config.json of its own: --config and --preset are for bare files of weights"
                )
            if not said:
                return found.config
    return description.settle(source).config


def _read(config: TransformerConfig, source: Source, *, flax: bool) -> dict[str, np.ndarray]:
    """Its weights under this project's names or PyTorch's; one error with all that does not fit."""
    about = conversion.model_of(config)
    names = "torch" if source.kind.has_torch_names else "flax"
    wrong = planning.problems(source.tensors, about.shapes[names])
    state = {} if wrong else source.read()
    planning.refuse(
        wrong or (planning.differing_ties(about.table, state) if names == "torch" else [])
    )
    if source.kind.has_torch_names == flax:
        return (
            rules.to_flax(about.table, state, about.shapes["flax"])
            if flax
            else rules.to_torch(about.table, state)
        )
    return state


def _flax(config: TransformerConfig, source: Source) -> Any:
    from jax_transformer import state_dict, transformer

    state = _read(config, source, flax=True)
    return transformer.unflatten(
        config, {name: state_dict.as_jax(name, array, None) for name, array in state.items()}
    )


def _state(config: TransformerConfig, source: Source) -> dict[str, np.ndarray]:
    return _read(config, source, flax=False)


def batch(
    config: TransformerConfig, seed: int, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Random ids (b, s) and (b, t), padded behind rows of different lengths; both of ``length`` where it is given."""
    random = np.random.default_rng(seed)
    if length is not None and not 1 <= length <= config.longest:
        raise ConfigError(f"--lengths {length}: this model takes 1 to {config.longest}")
    lengths = (
        (length, length) if length else (_SOURCE, _SOURCE if config.equal_lengths else _TARGET)
    )
    made = []
    for n, size, pad in zip(
        lengths,
        (config.source_vocab_size, config.target_vocab_size),
        (config.source_pad_id, config.target_pad_id),
        strict=True,
    ):
        n = min(n, config.longest)
        ids = random.integers(0, size, (_ROWS, n))
        ids[ids == pad] = (pad + 1) % size
        for row in range(_ROWS):
            ids[row, max(1, n - 2 * row) :] = pad
        made.append(ids)
    return made[0], made[1]


# Goldens


def make_golden(
    path: str, model: str, weights: str, python: str | None, batch_file: str | None, seed: int
) -> golden.Golden:
    """Of the PyTorch twin of a model's weights, or of ``package.module:callable``, whose batch is a file of arrays named 0, 1, and so on."""
    if ":" in model and not Path(model).exists() and not model.startswith("hf:"):
        if batch_file is None:
            raise ConfigError(
                "--batch: give a .safetensors file with the arguments of the model's call, named 0, 1, ..."
            )
        arrays = safetensors.read(batch_file)
        if list(map(str, range(len(arrays)))) != sorted(arrays, key=lambda name: (len(name), name)):
            raise ConfigError(
                f"--batch {batch_file}: its arrays are {', '.join(sorted(arrays))}, and not 0, 1, ..."
            )
        given: list[np.ndarray] = [arrays[str(i)] for i in range(len(arrays))]
        return golden.create(
            path, OtherProcess(model, python), given, source={"factory": model}, seed=seed
        )
    if batch_file is not None:
        raise ConfigError(
            f"--batch {batch_file}: goes with package.module:callable; the batch of {model} is drawn"
        )
    jax.config.update("jax_enable_x64", True)
    source = sources.find(model, weights=weights)
    if source.config is None:
        raise ConfigError(
            f"{model}: does not say what model it is: convert it to a run folder first"
        )
    state = _state(source.config, source)
    how = {"config": source.config.to_json()}
    return golden.create(
        path,
        _twin_of(source.config, state),
        batch(source.config, seed),
        source=how,
        seed=seed,
        state=state,
    )


def check_golden(path: str, python: str | None) -> golden.GoldenCheck:
    """Make a golden's numbers again, of what it was made of, and compare."""
    found = golden.load(path)
    if "factory" in found.source:
        return golden.recheck(found, OtherProcess(found.source["factory"], python))
    return golden.recheck(
        found, _twin_of(TransformerConfig.from_json(found.source["config"]), found.state)
    )


def _twin_of(config: TransformerConfig, state: Mapping[str, np.ndarray]) -> comparison.TorchRecorder:
    _check_torch()
    from jax_transformer import torch_bridge

    module = torch_bridge.fill(torch_bridge.twin(config), dict(state)).eval()
    return lambda dtype, seed, given: torch_bridge.recorded(module, given, dtype=dtype, seed=seed)
