"""Which tensors a file of transformers leaves out, and what a file of older versions has too many: to all names of the module's
``state_dict()``, and back to those that transformers itself saves. Works on arrays, and on shapes alone. Loads no jax but where it computes.

Facts from ``_tied_weights_keys`` and ``_keys_to_ignore_*`` of the classes of transformers 5.23, and from its ``from_pretrained``.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from jax_transformer import architectures
from jax_transformer.architectures.attributes import T5_LIKE
from jax_transformer.config import Layout, Positions, TransformerConfig, Tying
from jax_transformer.errors import InputError
from jax_transformer.storage.tensors import TensorInfo
from jax_transformer.weights.rules import Alias

Tensor = TypeVar("Tensor", bound=Any)

_LOGITS_BIAS = "final_logits_bias"
_EMBEDDINGS = ("shared.weight", "model.shared.weight", "model.decoder.embed_tokens.weight")
_VERSION = "counts versions of fairseq's format"
_COMPUTED = "repeats sines and cosines that the model computes itself"
_UNUSED = "belongs to attention between the stacks, where transformers uses no distances"


def complete(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """What a file holds, under all names of the whole module: a copy that is left out is put back (whichever of those that are one is there),
    as are the logits' bias, which is zero, and positions that the model computes; what :func:`why_dropped` names is left out.

    The values are arrays, or what :mod:`..planning` describes them by. What is missing or unknown beyond that stays so: the table refuses it.
    """
    found = {_renamed(name, state, config): value for name, value in state.items()}
    found = {name: value for name, value in found.items() if _unwanted(name, config) is None}
    for copies in _groups(config):
        present = next((name for name in copies if name in found), None)
        if present is not None:
            found |= {name: found[present] for name in copies if name not in found}
    embedding = next((found[name] for name in _EMBEDDINGS if name in found), None)
    if embedding is not None:
        found |= {name: value for name, value in _computed(config, embedding) if name not in found}
    return found


def saved(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Of a whole module's state, what transformers writes: one of those that are one, and no positions that it computes.

    Raises InputError where such positions are not those that it would compute, because they would be lost.
    """
    left_out = set(_positions(config)) if config.layout is Layout.MARIAN else set()
    for name in left_out & state.keys():
        _check_computed(name, state[name], config)
    if (
        config.layout in T5_LIKE or config.tying is not Tying.EMBEDDINGS
    ):  # the others tie nothing at all where they do not tie the output
        left_out |= {rule.torch for rule in architectures.table(config) if isinstance(rule, Alias)}
    return {name: value for name, value in state.items() if name not in left_out}


def why_completed(name: str, config: TransformerConfig) -> str:
    """Why the whole module has a tensor that its file has not."""
    if name == _LOGITS_BIAS:
        return "is zero where a file does not hold it"
    if name in _positions(config):
        return "is computed: sines and cosines"
    group = next((copies for copies in _groups(config) if name in copies), None)
    if group is not None:
        return f"repeats {' or '.join(other for other in group if other != name)}, with which the model ties it"
    return f"is {name.removeprefix('model.')} in the file, which holds the model without its output layer"


def why_dropped(name: str, config: TransformerConfig) -> str:
    """Why the model has no counterpart of a tensor that is in a file."""
    return _unwanted(name, config) or f"is model.{name} where the output layer is there, too"


def _renamed(name: str, state: Mapping[str, Any], config: TransformerConfig) -> str:
    """``model.`` is missing where the model without its output layer was saved."""
    if (
        config.layout in T5_LIKE
        or name in (_LOGITS_BIAS, "lm_head.weight")
        or any(other.startswith("model.") for other in state)
    ):
        return name
    return f"model.{name}"


def _unwanted(name: str, config: TransformerConfig) -> str | None:
    bare = name.removeprefix("model.")
    if bare in ("encoder.version", "decoder.version"):
        return _VERSION
    if config.layout in T5_LIKE:
        return (
            _UNUSED
            if bare == "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
            else None
        )
    computed = {
        f"{stack}.embed_positions.{leaf}"
        for stack in ("encoder", "decoder")
        for leaf in ("weights", "_float_tensor")
    }
    return _COMPUTED if config.layout is Layout.M2M_100 and bare in computed else None


def _groups(config: TransformerConfig) -> Iterator[list[str]]:
    """The names that are one tensor, each group with the one first that transformers keeps."""
    groups: dict[str, list[str]] = {}
    for rule in architectures.table(config):
        if isinstance(rule, Alias):
            groups.setdefault(rule.of, [rule.of]).append(rule.torch)
    yield from groups.values()


def _positions(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """The tables of sines and cosines that belong to the module, with their shapes."""
    stacks = {"encoder": config.encoder, "decoder": config.decoder}
    shape = (config.max_length, config.d_model)
    return {
        f"model.{name}.embed_positions.weight": shape
        for name, s in stacks.items()
        if s.positions is Positions.SINUSOIDAL_STORED
    }


def _computed(config: TransformerConfig, like: Any) -> Iterator[tuple[str, Any]]:
    """What transformers makes where it is not in a file, in the dtype of ``like``."""
    if config.logits_bias:
        shape = (1, config.target_vocab_size)
        yield (
            _LOGITS_BIAS,
            np.zeros(shape, like.dtype)
            if isinstance(like, np.ndarray)
            else TensorInfo(shape, like.dtype),
        )
    for name, shape in _positions(config).items():
        yield (
            name,
            _table(config).astype(like.dtype)
            if isinstance(like, np.ndarray)
            else TensorInfo(shape, like.dtype),
        )


def _table(config: TransformerConfig) -> np.ndarray:
    """In float32, in which transformers makes it, whatever it is then kept in."""
    from jax_transformer.nn.positions import sinusoids  # loads jax

    return np.asarray(
        sinusoids(config.max_length, config.d_model, layout=config.encoder.sinusoids)
    ).astype(np.float32)


def computed_again(
    state: Mapping[str, np.ndarray], config: TransformerConfig
) -> dict[str, np.ndarray]:
    """Weights that were cast, under PyTorch's names or ours, with the positions that transformers computes as it computes them in their dtype:
    not as another dtype had rounded them."""
    if config.layout is not Layout.MARIAN:  # the others' belong to the file
        return dict(state)
    ours = {f"{name.split('.')[1]}.positions.table" for name in _positions(config)}
    again = {
        name
        for name in (*_positions(config), *ours)
        if name in state and _is_computed(state[name], config)
    }
    return {
        name: _table(config).astype(value.dtype) if name in again else value
        for name, value in state.items()
    }


def _is_computed(value: np.ndarray, config: TransformerConfig) -> bool:
    return _gap(value, config) is None


def _gap(value: np.ndarray, config: TransformerConfig) -> float | None:
    """How far a table is off the computed one; None where rounding, to its own dtype or on the way to one of 16 bits, explains it."""
    exact = _table(config)
    if value.shape != exact.shape:
        return float("inf")
    unit = {2: 2**-7, 4: 2**-22, 8: 2**-22}[
        value.dtype.itemsize
    ]  # two units in the last place at 1, of bfloat16 and float32
    gaps = []
    for kind in (value.dtype, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        rounded = exact.astype(kind).astype(value.dtype).astype(np.float64)
        gaps.append(float(np.abs(value.astype(np.float64) - rounded).max()))
    return None if min(gaps) <= unit else gaps[0]


def _check_computed(name: str, value: Any, config: TransformerConfig) -> None:
    if not isinstance(value, np.ndarray):
        return
    difference = _gap(value, config)
    if difference is not None:
        raise InputError(
            f"{name} is up to {difference:.2g} off the sines and cosines that transformers computes instead of reading them: "
            "a model with other positions cannot be written as one of its own"
        )
