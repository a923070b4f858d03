"""T5, T5 v1.1, mT5 and UMT5 as T5X names and shapes their weights.

Two networks of T5X write checkpoints: ``examples/t5`` has one table of distances for a stack and
kernels of two axes; ``examples/scalable_t5`` has a table in every layer, kernels whose heads are an
axis, and optionally all layers of a stack in one array (``scan_layers``). Flaxformer's checkpoints
have the same names. Facts from ``network.py`` and ``layers.py`` of both networks, and from
Flaxformer's ``t5_architecture.py``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jax_transformer.config import Part, Positions, TransformerConfig, Tying
from jax_transformer.config.model import MOST_LAYERS
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import Shape, TensorInfo
from jax_transformer.storage.untrusted import plain
from jax_transformer.weights.rules import PART, Rule, torch_shapes

FAMILIES = ("t5", "mt5", "umt5")
SCAN_AXIS = 1
"""T5X's default of ``param_scan_axis``."""
_SCAN_AXES = (1, 0, -1, -2)  # all that the stacked scales of the norms, with two axes, have
_BRANCHES = {
    "encoder": (
        ("pre_attention_layer_norm", "attention", Part.SELF),
        ("pre_mlp_layer_norm", "mlp", Part.FFN),
    ),
    "decoder": (
        ("pre_self_attention_layer_norm", "self_attention", Part.SELF),
        ("pre_cross_attention_layer_norm", "encoder_decoder_attention", Part.CROSS),
        ("pre_mlp_layer_norm", "mlp", Part.FFN),
    ),
}
_Row = tuple[str, str, Shape, str]
"""An array of one layer: stored name, Flax name and shape, and the axes on both sides."""
_EMBEDDING, _OUTPUT = "token_embedder.embedding", "decoder.logits_dense.kernel"


@dataclass(frozen=True)
class Layout:
    """The sizes of a model of T5X, and the way in which it stores them."""

    vocabulary: int
    d_model: int
    heads: int
    head_dim: int
    d_ff: int
    encoder_layers: int
    decoder_layers: int
    buckets: int
    gated: bool
    """Two kernels before the activation, ``wi_0`` and ``wi_1``; otherwise ``wi``."""
    tied: bool
    """The output layer is the embedding (``logits_via_embedding``)."""
    distances_in_layers: bool
    """A table of distances in every layer; otherwise one for a stack."""
    split_heads: bool
    """Kernels of attention have an axis of heads."""
    scan_axis: int | None = None
    """The axis of the layers in arrays that hold all of a stack; None: each layer has its own."""

    def layers(self, stack: str) -> int:
        return self.encoder_layers if stack == "encoder" else self.decoder_layers

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every stored array, without ``target.``."""
        return torch_shapes(*table(self))

    def sizes(self) -> dict[str, Any]:
        """Return the fields of the configuration that the shapes show."""
        return {
            "vocab_size": self.vocabulary,
            "d_model": self.d_model,
            "num_heads": self.heads,
            "head_dim": self.head_dim,
            "d_ff": self.d_ff,
            "encoder.layers": self.encoder_layers,
            "decoder.layers": self.decoder_layers,
        }


def table(layout: Layout) -> tuple[list[Rule], dict[str, Shape]]:
    """Return the rules between T5X's arrays, named ``torch`` there, and this project's, and the
    shapes of the latter.
    """
    d = layout.d_model
    rules = [Rule(_EMBEDDING, "target_embedding.embedding")]
    shapes: dict[str, Shape] = {rules[0].flax[0]: (layout.vocabulary, d)}
    if not layout.tied:
        rules.append(Rule(_OUTPUT, "output.kernel"))
        shapes["output.kernel"] = (d, layout.vocabulary)
    for stack in ("encoder", "decoder"):
        for rule, shape in _stack(stack, layout):
            rules.append(rule)
            shapes |= dict.fromkeys(rule.flax, shape)
    return rules, shapes


def _stack(stack: str, layout: Layout) -> Iterator[tuple[Rule, Shape]]:
    """Return each rule of a stack with the shape of its Flax arrays."""
    d, distances = (layout.d_model,), (layout.buckets, layout.heads)
    yield Rule(f"{stack}.{stack}_norm.scale", f"{stack}.final_norm.scale"), d
    if not layout.distances_in_layers:
        stored, flax = f"{stack}.relpos_bias.rel_embedding", f"{stack}.relative.embedding"
        yield Rule(stored, flax, "h b -> b h"), distances
    rows: list[_Row] = []
    for branch, (norm, module, part) in enumerate(_BRANCHES[stack]):
        rows.append((f"{norm}.scale", f"residuals.{branch}.norm.scale", d, "d -> d"))
        rows += [
            (f"{module}.{stored}", f"{part.value}.{flax}", shape, axes)
            for stored, flax, shape, axes in _part(part, layout)
        ]
    if layout.distances_in_layers:
        rows.append(("relpos_bias.rel_embedding", "relative.embedding", distances, "h b -> b h"))
    for stored, flax, shape, axes in rows:
        sizes = {"h": layout.heads} if "(h e)" in axes else {}
        names = [f"{stack}.blocks.{i}.{flax}" for i in range(layout.layers(stack))]
        if layout.scan_axis is None:
            for i, name in enumerate(names):
                yield Rule(f"{stack}.layers_{i}.{stored}", name, axes, sizes), shape
            continue
        left, arrow, right = axes.partition(" -> ")
        scanned = left.split()
        scanned.insert(layout.scan_axis % (len(scanned) + 1), PART)
        axes = f"{' '.join(scanned)}{arrow}{right}"
        yield Rule(f"{stack}.{stack}.{stored}", names, axes, sizes), shape


def _part(part: Part, layout: Layout) -> list[_Row]:
    """Return the kernels of a module."""
    d, heads, f = layout.d_model, layout.heads * layout.head_dim, layout.d_ff
    if part is Part.FFN:
        # T5X applies the first activation to wi_0 and the second, which is the identity, to wi_1
        inputs = {"wi_0": "up", "wi_1": "gate"} if layout.gated else {"wi": "up"}
        rows: list[_Row] = [
            (f"{stored}.kernel", f"{flax}.kernel", (d, f), "d f -> d f")
            for stored, flax in inputs.items()
        ]
        return [*rows, ("wo.kernel", "down.kernel", (f, d), "f d -> f d")]
    into, out = "d e -> d e", "e d -> e d"
    if layout.split_heads:
        into, out = "d h e -> d (h e)", "h e d -> (h e) d"
    names = [f"{name}.kernel" for name in ("query", "key", "value")]
    rows = [(name, name, (d, heads), into) for name in names]
    return [*rows, ("out.kernel", "out.kernel", (heads, d), out)]


# From a checkpoint


def find(infos: Mapping[str, TensorInfo], scan_axis: int | None = None) -> Layout:
    """Return the layout of a checkpoint's weights; without ``scan_axis``, the axis of the layers in
    arrays that hold several is found from the shapes.

    Raises InputError unless these are the arrays of an encoder-decoder of T5X, naming all that are
    missing, unexpected and mis-shaped; and if they fit several axes.
    """
    empty = sorted(name for name, info in infos.items() if 0 in info.shape)
    if empty:
        raise InputError(f"{plain(empty[0])} has the shape {infos[empty[0]].shape}")
    scanned = any(name.startswith(("encoder.encoder.", "decoder.decoder.")) for name in infos)
    if scan_axis is not None and not scanned:
        raise InputError(f"param_scan_axis={scan_axis}: no array holds several layers")
    if scan_axis is not None and scan_axis not in _SCAN_AXES:
        known = ", ".join(map(str, _SCAN_AXES))
        raise InputError(f"param_scan_axis={scan_axis} is not one of {known}")
    axes: tuple[int | None, ...] = (None,)
    if scanned:
        axes = _SCAN_AXES if scan_axis is None else (scan_axis,)
    shapes = {name: info.shape for name, info in infos.items()}
    fitting: dict[int | None, Layout] = {}
    wrong: list[list[str]] = []
    for axis in axes:
        try:
            layout = _layout(shapes, axis)
            problems = tensors.problems(infos, layout.shapes())
        except InputError as error:
            problems = [str(error)]
        if problems:
            wrong.append(problems)
        else:
            fitting[axis] = layout
    if not fitting:
        tensors.refuse(min(wrong, key=len))
    if len(fitting) > 1:
        raise InputError(
            f"the layers may be axis {' or '.join(map(str, fitting))} of the arrays that hold all "
            "of a stack: --param-scan-axis, in Python scan_axis=, says which (T5X's default is "
            f"{SCAN_AXIS})"
        )
    return next(iter(fitting.values()))


def _layout(shapes: Mapping[str, Shape], axis: int | None) -> Layout:
    """Read the sizes from a few arrays. Raises InputError if one is missing or has other axes."""

    def layer(stack: str, name: str) -> Shape:
        """Return the stored shape of the first layer's array, without the axis of the layers."""
        if axis is None:
            return _shape(shapes, f"{stack}.layers_0.{name}")
        full = _shape(shapes, f"{stack}.{stack}.{name}")
        if not -len(full) <= axis < len(full):
            raise InputError(f"{stack}.{stack}.{name} has no axis {axis}: its shape is {full}")
        at = axis % len(full)
        return (*full[:at], *full[at + 1 :])

    distances_in_layers = "encoder.relpos_bias.rel_embedding" not in shapes
    name = "relpos_bias.rel_embedding"
    distances = layer("encoder", name) if distances_in_layers else _shape(shapes, f"encoder.{name}")
    query = layer("encoder", "attention.query.kernel")
    gated = not any(f"encoder.{at}.mlp.wi.kernel" in shapes for at in ("layers_0", "encoder"))
    inner = "mlp.wi_0.kernel" if gated else "mlp.wi.kernel"
    up = layer("encoder", inner)
    vocabulary, d = _rank(_shape(shapes, _EMBEDDING), 2, _EMBEDDING)
    heads, buckets = _rank(distances, 2, name)
    counts = {stack: _count(shapes, stack, axis) for stack in ("encoder", "decoder")}
    if max(counts.values()) > MOST_LAYERS:
        raise InputError(f"{max(counts.values()):,} layers, and no model has so many")
    if len(query) not in (2, 3):
        raise InputError(f"attention.query.kernel has the shape {query}")
    split = len(query) == 3
    return Layout(
        vocabulary,
        d,
        heads,
        query[2] if split else query[1] // heads,
        _rank(up, 2, inner)[1],
        counts["encoder"],
        counts["decoder"],
        buckets,
        gated=gated,
        tied=_OUTPUT not in shapes,
        distances_in_layers=distances_in_layers,
        split_heads=split,
        scan_axis=axis,
    )


def _shape(shapes: Mapping[str, Shape], name: str) -> Shape:
    if name not in shapes:
        raise InputError(f"missing {name}, which every encoder-decoder of T5X has")
    return shapes[name]


def _rank(shape: Shape, rank: int, name: str) -> Shape:
    if len(shape) != rank:
        raise InputError(f"{name} has the shape {shape}, and should have {rank} axes")
    return shape


def _count(shapes: Mapping[str, Shape], stack: str, axis: int | None) -> int:
    """Return the number of a stack's layers: by names, or by the axis of arrays that hold all."""
    if axis is not None:
        name = f"{stack}.{stack}.pre_mlp_layer_norm.scale"
        return _rank(_shape(shapes, name), 2, name)[axis]
    layers = {name.split(".")[1] for name in shapes if name.startswith(f"{stack}.layers_")}
    return next(count for count in range(len(layers) + 1) if f"layers_{count}" not in layers)


# To a checkpoint


def layout_of(
    config: TransformerConfig, *, scan_layers: bool = False, scan_axis: int | None = None
) -> Layout:
    """Return the layout that T5X gives a model. ``scan_layers`` puts all layers of a stack into one
    array, with them along ``scan_axis`` if not T5X's default.

    Raises ConfigError if the model is none of T5X's families, or the axis none of T5X's.
    """
    if config.architecture not in FAMILIES:
        raise ConfigError(
            f"architecture {config.architecture!r} is not a network of T5X: only models of "
            f"{', '.join(FAMILIES)} can be written as its checkpoints"
        )
    if scan_axis is not None and not scan_layers:
        raise ConfigError("--param-scan-axis: goes with --scan-layers")
    if scan_axis is not None and scan_axis not in _SCAN_AXES:
        raise ConfigError(
            f"--param-scan-axis {scan_axis} is not one of {', '.join(map(str, _SCAN_AXES))}"
        )
    in_layers = config.encoder.positions is Positions.RELATIVE_PER_BLOCK
    if scan_layers and not in_layers:
        raise ConfigError(
            "--scan-layers: one table of distances serves a stack, and T5X scans only layers that "
            "have their own (UMT5)"
        )
    encoder = config.encoder
    return Layout(
        config.source_vocab_size,
        config.d_model,
        config.heads(encoder),
        config.head_width,
        encoder.d_ff or config.d_ff,
        encoder.layers,
        config.decoder.layers,
        encoder.relative_buckets,
        gated=encoder.gated,
        tied=config.tying is Tying.ALL,
        distances_in_layers=in_layers,
        split_heads=in_layers,
        scan_axis=(SCAN_AXIS if scan_axis is None else scan_axis) if scan_layers else None,
    )
