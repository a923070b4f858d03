"""The layout of a training state on a mesh of devices, from the dotted names of its arrays.

:data:`PARTITION_RULES` is all there is to know: an optimizer's moments, the moving average and
low-rank adapters follow the parameter whose name they have.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_transformer.config import StackConfig, TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.nn import sharding
from jax_transformer.nn.sharding import FSDP, TENSOR
from jax_transformer.training.mesh_options import MeshOptions
from jax_transformer.weights import lora

PARTITION_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("query.kernel", (FSDP, TENSOR)),
    ("key.kernel", (FSDP, TENSOR)),
    ("value.kernel", (FSDP, TENSOR)),
    ("out.kernel", (TENSOR, FSDP)),
    ("up.kernel", (FSDP, TENSOR)),
    ("gate.kernel", (FSDP, TENSOR)),
    ("down.kernel", (TENSOR, FSDP)),
    ("output.kernel", (FSDP, TENSOR)),
    ("_embedding.embedding", (TENSOR, FSDP)),
    ("relative.embedding", (None, TENSOR)),  # buckets, heads
    ("positions.table", (None, FSDP)),
    ("stem.first.kernel", (None, FSDP, TENSOR)),  # frames, channels, d
    ("stem.second.kernel", (None, FSDP, TENSOR)),
    *((f"{name}.bias", (TENSOR,)) for name in ("query", "key", "value", "up", "gate", "output")),
    ("output_bias", (TENSOR,)),
    ("logits_bias", (TENSOR,)),
)
"""Endings of parameters' names, and the axis of the mesh that divides each dimension. What has no
rule is replicated: norms, and the biases of ``out`` and ``down``."""


def partition_spec(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """The spec of the array ``name`` on a mesh of these ``sizes``.

    An axis that cannot divide its own dimension of a matrix divides the other one, if that is
    possible.
    """
    rule = _rule(name)
    if len(rule) != len(shape):  # a step, a scale, or a factored moment
        return PartitionSpec()
    dimensions: list[tuple[str, ...]] = [() for _ in shape]
    for axis in (TENSOR, FSDP):
        if axis not in rule:
            continue
        own = rule.index(axis)
        for i in (own, *(i for i in range(len(shape)) if i != own)):
            axes = (*dimensions[i], axis)
            if shape[i] % math.prod(sizes[each] for each in axes) == 0:
                dimensions[i] = axes
                break
    return sharding.spec_of(dimensions, sizes)


def _rule(name: str) -> tuple[str | None, ...]:
    """The axis of each dimension of an array; none if it has no rule."""
    kernel, dot, adapter = name.rpartition(".lora_")
    if dot:
        rows, columns = _rule(kernel)
        return {lora.A: (rows, None), lora.B: (None, columns)}.get(f".lora_{adapter}", ())
    return next((axes for ending, axes in PARTITION_RULES if name.endswith(ending)), ())


def shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The sharding of every array of a state on this mesh, by the last name in its path."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        name = names[-1] if names else ""
        return NamedSharding(mesh, partition_spec(name, leaf.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(of, tree)


def constrain(tree: Any) -> Any:
    """Keep every array of a state where it lies, inside a jitted function."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))


def check(config: TransformerConfig, options: MeshOptions) -> None:
    """Raise ConfigError for a mesh that cannot divide the model."""
    sizes = [("fsdp", options.fsdp, "d_model", config.d_model)]
    for name in ("encoder", "decoder"):
        stack: StackConfig = getattr(config, name)
        heads, d_ff = config.heads(stack), stack.d_ff or config.d_ff
        sizes.append(("tensor", options.tensor, f"the {name}'s num_heads", heads))
        sizes.append(("tensor", options.tensor, f"the {name}'s d_ff", d_ff))
    for axis, parts, name, size in sizes:
        if size % parts:
            raise ConfigError(f"mesh.{axis}={parts} does not divide {name}={size}")
