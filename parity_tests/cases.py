"""Table of the compared configurations: every test of this folder runs over every case."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax_transformer as jt
from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig
from parity_tests.unit import helpers
from parity_tests.unit.helpers import ODD

# Square sizes (d_model = d_ff = lengths) show missing transposes, as every shape fits there
SQUARE: dict[str, Any] = helpers.SQUARE | dict(max_length=20)
UNEVEN = {"encoder_layers": 1, "decoder_layers": 3, "decoder.activation": "gelu"}
STOCK: dict[str, Any] = dict(architecture="torch_nn")


DOCUMENTS = [
    f"{name}{form}"
    for name in jt.preset_names()
    if f"{name}_repaired" in jt.preset_names()
    for form in ("", "_repaired")
]


@dataclass(frozen=True)
class Case:
    """One configuration, compared with the PyTorch twin of its architecture."""

    name: str
    config: TransformerConfig

    def __str__(self) -> str:
        return self.name


def case(name: str, preset: str, **changes: Any) -> Case:
    return Case(name, jt.preset(preset, **changes))


def stock(name: str, **changes: Any) -> Case:
    """Configurations of the stock torch.nn.Transformer."""
    return case(f"torch.nn {name}", "lesson10_repaired", **(ODD | STOCK | changes))


def _without_d_ff(sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if name != "d_ff"}


def document(preset: str) -> list[Case]:
    """A document's preset at odd and square sizes; a d_ff that is a multiple stays one."""
    ruled = "d_ff" in registry.presets()[preset].multiples
    sizes = {"": ODD, " square": SQUARE}
    return [
        case(f"{preset}{name}", preset, **(_without_d_ff(size) if ruled else size))
        for name, size in sizes.items()
    ]


CASES = [
    case("lesson10", "lesson10", **ODD),
    case("lesson10 square", "lesson10", **SQUARE),
    case("lesson10 uneven stacks", "lesson10", **(ODD | UNEVEN)),
    case("lesson10_repaired", "lesson10_repaired", **ODD),
    *document("deep_dive"),
    *document("deep_dive_repaired"),
    *document("from_scratch"),
    case("from_scratch as wide inside", "from_scratch", **(ODD | dict(d_ff=12))),
    *document("from_scratch_repaired"),
    *document("part2_encoder"),
    case("part2_encoder uneven stacks", "part2_encoder", **ODD, encoder_layers=3, decoder_layers=2),
    *document("part2_encoder_repaired"),
    *document("blog2023"),
    case("blog2023 with biases", "blog2023", **_without_d_ff(ODD), attention_bias=True),
    *document("blog2023_repaired"),
    case("vaswani2017_base", "vaswani2017_base", **(ODD | dict(target_vocab_size=11))),
    case("small", "small", **(SQUARE | dict(d_ff=24))),
    stock("post-norm"),
    stock("post-norm square", **SQUARE),
    stock("norm_first", norm_placement="pre"),
    stock("bias=False", bias=False),
    stock("activation gelu", **{"decoder.activation": "gelu", "encoder.final_norm": False}),
    stock("layer_norm_eps 1e-3", norm_epsilon=1e-3),
    stock("learned positions", **{"encoder.positions": "learned", "decoder.positions": "learned"}),
    stock("tied output", tying="output"),
    stock(
        "unbiased deviation, fill -10000, masked queries",
        norm="layer_unbiased",
        mask_fill=-10_000,
        **{
            "encoder.self_mask": ("query_padding", "source_padding"),
            "decoder.self_mask": ("query_padding", "target_padding", "causal"),
            "decoder.cross_mask": ("query_padding", "source_padding"),
        },
    ),
    stock(
        "norm_first, no scale, positions or final norm",
        norm_placement="pre",
        embedding_scale="none",
        **{
            f"{stack}.{name}": value
            for stack in ("encoder", "decoder")
            for name, value in (("positions", "none"), ("final_norm", False))
        },
    ),
]


def shapes_of(*layers: tuple[str, int, int]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in PyTorch of linear layers: name, inputs and outputs; 0 inputs: a norm."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, inputs, outputs in layers:
        shapes[f"{name}.weight"] = (outputs, inputs) if inputs else (outputs,)
        shapes[f"{name}.bias"] = (outputs,)
    return shapes


def under(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def config_of(name: str) -> TransformerConfig:
    """Return the configuration of the case with this name."""
    return next(case.config for case in CASES if case.name == name)
