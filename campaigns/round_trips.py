"""Convert random weights of random configurations in both directions and compare every bit.

``python -m campaigns round-trips --count 500``; see docs/convert.md.
"""

import filecmp
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import jax_transformer as jt
from campaigns.case import Campaign, Case
from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.convert import conversion, models, planning
from jax_transformer.convert.models import ModelDescription
from jax_transformer.convert.planning import Request
from jax_transformer.errors import Refusal
from jax_transformer.storage import pt, safetensors, tensors
from jax_transformer.storage.pt import writer
from jax_transformer.storage.tensors import LazyState

STOCK = "torch.nn"
TEXT = [name for name, preset in registry.presets().items() if preset.config.mel_bins is None]
ARCHITECTURES = (*TEXT, STOCK)
DTYPES = ("float64", "float32", "float16", "bfloat16")
State = dict[str, np.ndarray]


def draw(
    choose: random.Random, architecture: str, most_layers: int = 3
) -> tuple[TransformerConfig, str]:
    """A random configuration and dtype.

    Every second time all sizes are equal, so that no shape reveals a transpose.
    """
    heads, square = choose.randint(1, 4), choose.randint(0, 1) == 1
    width = max(4, heads * 2 * choose.randint(1, 4))  # tensor2tensor's sinusoids need 4

    def length() -> int:
        return max(width, 4) if square else choose.randint(4, 23)

    def layers() -> int:
        # Mostly one: a second differs only in its names
        return max(1, choose.randint(-2, most_layers))

    sizes: dict[str, Any] = dict(d_model=width, num_heads=heads)
    names = ("max_length", "source_vocab_size", "target_vocab_size", "d_ff")
    sizes |= {name: length() for name in names}
    sizes |= {f"{stack}_layers": layers() for stack in ("encoder", "decoder")}
    if architecture == STOCK:
        sizes |= _settings(choose)
    preset = "lesson10" if architecture == STOCK else architecture
    if jt.preset(preset).tying is Tying.ALL:
        sizes["target_vocab_size"] = sizes["source_vocab_size"]
    # Sizes that the document derives from another size
    derived = registry.presets()[preset].multiples
    sizes = {name: size for name, size in sizes.items() if name not in derived}
    return jt.preset(preset, **sizes), choose.choice(DTYPES)


def _settings(choose: random.Random) -> dict[str, Any]:
    """A random setting of torch.nn.Transformer and its embeddings, of those that change its
    weights."""
    positions = choose.choice(("sinusoidal_stored", "sinusoidal", "learned", "none"))
    final = choose.randint(0, 1) == 1
    settings: dict[str, Any] = {"architecture": "torch_nn", "bias": choose.randint(0, 1) == 1}
    settings |= {f"{stack}.positions": positions for stack in ("encoder", "decoder")}
    settings |= {f"{stack}.final_norm": final for stack in ("encoder", "decoder")}
    settings["norm_placement"] = choose.choice(("pre", "post"))
    return settings | {"tying": choose.choice(("none", "output"))}


def odd_numbers(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Random bits, with NaN of every payload, infinities, -0.0 and denormals among them."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.random.default_rng(seed).integers(0, 256, count * kind.itemsize, np.uint8).view(kind)
    bits[: min(4, count)] = np.array([np.nan, -0.0, np.inf, 0], kind)[: min(4, count)]
    return bits


def weights(config: TransformerConfig, dtype: str) -> State:
    """Random bits under PyTorch's names; tied tensors are equal."""
    model = registry.model_weights(config)
    state = {
        name: odd_numbers(dtype, int(np.prod(shape)), seed).reshape(shape)
        for seed, (name, shape) in enumerate(model.shapes["torch"].items())
    }
    for first, *others in models.ties_of(model.table):
        state |= dict.fromkeys(others, state[first])
    return state


def by_files(config: TransformerConfig, dtype: str, folder: Path) -> list[str]:
    """Differences after file → file → the other kind of file, by the weight table only."""
    model, before = registry.model_weights(config), weights(config, dtype)
    safetensors.write(folder / "a.safetensors", before)
    flax = _renamed(safetensors.scan(folder / "a.safetensors"), model, to_torch=False)
    writer.write(folder / "b.pt", _renamed(tensors.in_memory(flax), model, to_torch=True))
    again = _renamed(pt.scan(folder / "b.pt"), model, to_torch=False)
    wrong = [f"Flax {name}" for name in _differing(flax, again)]
    safetensors.write(
        folder / "c.safetensors", _renamed(tensors.in_memory(again), model, to_torch=True)
    )
    wrong += _differing_files(folder)
    return wrong + _differing(before, safetensors.read(folder / "c.safetensors"))


def _differing_files(folder: Path) -> list[str]:
    """The first and the last file if they differ."""
    equal = filecmp.cmp(folder / "a.safetensors", folder / "c.safetensors", shallow=False)
    return [] if equal else ["a.safetensors and c.safetensors"]


def _renamed(state: LazyState, model: registry.ModelWeights, *, to_torch: bool) -> State:
    renamed = models.renamed(state, model, from_torch=not to_torch, to_torch=to_torch)
    return tensors.arrays(renamed)


def _differing(one: State, other: State) -> list[str]:
    names = sorted(one.keys() | other.keys())
    return [
        name
        for name in names
        if name not in one or name not in other or not tensors.same(one[name], other[name])
    ]


def by_command(config: TransformerConfig, dtype: str, folder: Path) -> list[str]:
    """Differences after file → run folder → the other kind of file → checkpoint → the first
    kind."""

    def convert(source: str, destination: str, description: ModelDescription | None = None) -> None:
        paths = str(folder / source), str(folder / destination)
        request = Request(*paths, description or ModelDescription(), check=False, force=True)
        conversion.convert(planning.prepare(request))

    safetensors.write(folder / "a.safetensors", weights(config, dtype))
    (folder / "config.json").write_text(config.to_json())
    description = ModelDescription(str(folder / "config.json"))
    convert("a.safetensors", "run", description)
    convert("run", "b.pt")
    first = (folder / "b.pt").read_bytes()
    convert("a.safetensors", "b.pt", description)
    wrong = [] if (folder / "b.pt").read_bytes() == first else ["b.pt, written twice"]
    convert("b.pt", "5", description)
    convert("5", "c.safetensors", description)
    return wrong + _differing_files(folder)


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """A configuration of each architecture in turn, through files and through the command."""
    del shared
    architecture = ARCHITECTURES[number % len(ARCHITECTURES)]
    config, dtype = draw(random.Random(f"{seed} {number}"), architecture)
    try:
        differing = by_files(config, dtype, scratch) + by_command(config, dtype, scratch)
    except Refusal as error:
        differing = [str(error)]
    yield Case(architecture, dtype, f"{architecture} in {dtype}", tuple(differing))


ROUND_TRIPS = Campaign(
    "random bits of random configurations, converted there and back, are the same bits",
    prepare=lambda shared: None,
    cases=cases,
    small=100,
    nightly=5000,
)
