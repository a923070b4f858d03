"""Weights in and out of run folders: what ``convert`` and ``inspect`` do."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer import presets
from jax_transformer.config import TransformerConfig
from jax_transformer.convert.files import safetensors
from jax_transformer.errors import ConfigError, InputError


@dataclass(frozen=True)
class Description:
    """How the command line says what model a bare file of weights is of."""

    config: str | None = None
    preset: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)

    def read(self) -> TransformerConfig:
        """The configuration. Raises ConfigError where it is not said, or said twice."""
        if (self.config is None) == (self.preset is None):
            raise ConfigError("a file of weights does not say its architecture: give either --config config.json or --preset NAME")
        if self.preset is not None:
            return presets.preset(self.preset, **self.changes)
        try:
            text = Path(self.config or "").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self.config}: cannot be read: {error}") from None
        try:
            config = TransformerConfig.from_json(text)
        except ConfigError as error:
            raise InputError(f"{self.config}: {error}") from None
        return config.with_sizes(**self.changes)


def convert(source: str, destination: str, description: Description, dtype: str | None) -> Iterator[str]:
    """Move weights between a run folder and a .safetensors file of PyTorch's names, and say what was done, line by line."""
    target = Path(destination)
    if target.exists():
        raise InputError(f"{target}: exists already, and is not overwritten")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent}: no such folder")
    if Path(source).is_dir():
        if target.suffix != ".safetensors":
            raise ConfigError(f"{target}: a run folder is converted to a .safetensors file")
        if description != Description():
            raise ConfigError(f"{source} has a config.json of its own: --config, --preset and --set are for bare files of weights")
        yield from _export(source, target, dtype)
    else:
        if target.suffix == ".safetensors":
            raise ConfigError(f"{target}: a file of weights is converted to a folder")
        yield from _import(source, target, description.read(), dtype)


def _export(source: str, target: Path, dtype: str | None) -> Iterator[str]:
    from jax_transformer import convert
    from jax_transformer.training import trained

    model, weights = trained.load_model(source)
    state = _cast(convert.to_torch(model), dtype)
    safetensors.write(target, state)
    yield f"{source} ({weights.name}, step {weights.step}) -> {target}: {_summary(state)}"


def _import(source: str, target: Path, config: TransformerConfig, dtype: str | None) -> Iterator[str]:
    from jax_transformer import convert
    from jax_transformer.training import trained

    state = _cast(safetensors.read(source), dtype)
    model = convert.from_torch(state, config)
    again = convert.to_torch(model)
    if any(again[name].tobytes() != state[name].tobytes() for name in state):
        raise InputError(f"{source}: its weights do not come back as they are; nothing was written")
    trained.save_model(model, target)
    yield f"{source} -> {target}: {_summary(state)}, all of them back bit for bit"


def _cast(state: dict[str, np.ndarray], dtype: str | None) -> dict[str, np.ndarray]:
    if dtype is None:
        return state
    import jax.numpy as jnp

    known = ("float64", "float32", "float16", "bfloat16")
    if dtype not in known:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(known)}")
    return {name: array.astype(jnp.dtype(dtype)) for name, array in state.items()}


def _summary(state: dict[str, np.ndarray]) -> str:
    dtypes = sorted({str(array.dtype) for array in state.values()})
    return f"{len(state)} tensors, {sum(array.size for array in state.values()):,} numbers, {', '.join(dtypes)}"


def inspect(path: str) -> Iterator[str]:
    """Names, shapes and dtypes of a .safetensors file or of a run folder's newest checkpoint, and SHA-256."""
    if Path(path).is_dir():
        from jax_transformer.training import checkpoint, run_folder

        folder = run_folder.RunFolder(Path(path))
        step = folder.last_step()
        if step is None:
            raise InputError(f"{path}: holds no checkpoint")
        described, hashes = checkpoint.described(folder.checkpoints, step), checkpoint.manifest(folder.checkpoints, step)["sha256"]
        yield f"{path}: checkpoint of step {step}"
    else:
        described, hashes = safetensors.describe(path), {Path(path).name: _sha256(path)}
        yield f"{path}: safetensors"
    width = max(map(len, described), default=0)
    for name, (shape, kind) in sorted(described.items()):
        yield f"{name:{width}}  {'x'.join(map(str, shape)) or 'scalar':>14}  {kind}"
    yield f"{len(described)} arrays, {sum(int(np.prod(shape)) for shape, _ in described.values()):,} numbers"
    for name, digest in hashes.items():
        yield f"sha256 {digest}  {name}"


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
