"""Low-rank adapters (LoRA, Hu et al. 2021): a kernel plus the product of two narrow matrices.

The adapters of ``x.kernel`` (shape (in, out)) are the arrays ``x.kernel.lora_a`` (in, rank),
``x.kernel.lora_b`` (rank, out) and ``x.kernel.lora_scale`` (). The model computes with
``kernel + scale * (a @ b)``, so merging them changes no result. The functions take arrays of NumPy
and of JAX.
"""

from collections.abc import Mapping
from typing import Any

A, B, SCALE = ".lora_a", ".lora_b", ".lora_scale"


def is_parameter(name: str) -> bool:
    """Return True for the name of an array of the model, false for one of an adapter."""
    return not name.endswith((A, B, SCALE))


def adapted(arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of the kernels that have adapters among ``arrays``."""
    return [name.removesuffix(A) for name in arrays if name.endswith(A)]


def merge(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of the model itself, with each adapter added to its kernel."""
    merged = {name: array for name, array in arrays.items() if is_parameter(name)}
    for name in adapted(arrays):
        change = arrays[name + SCALE] * (arrays[name + A] @ arrays[name + B])
        merged[name] = (merged[name] + change).astype(merged[name].dtype)
    return merged
