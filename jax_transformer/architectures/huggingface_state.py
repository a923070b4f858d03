"""The tensors of a file of transformers: completed to the module's ``state_dict()``, and reduced to
what is saved.

A file leaves out copies that the module ties and positions that it computes; a file of an older
version may have tensors too many. Everything here works on arrays, and on shapes only; jax is
loaded if positions have to be computed. Facts from ``_tied_weights_keys`` and ``_keys_to_ignore_*``
of the classes of transformers 5.23, and from its ``from_pretrained``.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from jax_transformer.architectures import huggingface, registry
from jax_transformer.config import Positions, TransformerConfig, Tying
from jax_transformer.errors import InputError
from jax_transformer.storage.tensors import LazyState, LazyTensor, Shape, TensorInfo
from jax_transformer.weights import rules

Tensor = TypeVar("Tensor", bound=Any)

_LOGITS_BIAS = "final_logits_bias"
_ORDER = """final_logits_bias shared model encoder decoder embed_tokens conv1 conv2 embed_positions
block layer layers k_proj v_proj q_proj out_proj q k v o relative_attention_bias
global_relative_attention_bias global_input_layer_norm wi wi_0 wi_1 wo SelfAttention
LocalSelfAttention TransientGlobalSelfAttention EncDecAttention DenseReluDense self_attn
self_attn_layer_norm encoder_attn encoder_attn_layer_norm fc1 fc2 layernorm_embedding layer_norm
final_layer_norm lm_head proj_out output_projection weight bias"""
"""The parts of names, in the order in which the modules of transformers 5.23 create them."""
_PLACES = {word: place for place, word in enumerate(_ORDER.split())}
_VERSIONS = dict.fromkeys(
    ("encoder.version", "decoder.version"), "counts versions of fairseq's format"
)


def complete(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Return the tensors of a file under all names of the whole module.

    A tied copy that is left out is put back (from whichever of the copies is there), and so are the
    logits' bias, which is zero, and positions that the module computes. What :func:`why_dropped`
    names is left out. What is missing or unknown beyond that stays so: the weight table refuses it.
    The tensors are arrays, lazy ones, or ``TensorInfo`` that describes them.
    """
    family = huggingface.family_of(config)
    # Without its output layer the model has names without the family's prefix
    prefix = "" if any(name.startswith(family.prefix) for name in state) else family.prefix
    named: dict[str, Any] = {}
    for name, value in state.items():
        full = name if name in (_LOGITS_BIAS, family.output_tensor) else f"{prefix}{name}"
        if _reason_unused(full, config) is None:
            named[full] = value
    for copies in _tied_names(config):
        present = [name for name in copies if name in named]
        for name in copies if present else ():
            named.setdefault(name, named[present[0]])
    embeddings = [named[name] for name in family.embedding_tensors if name in named]
    shapes = {_LOGITS_BIAS: (1, config.target_vocab_size)} if config.logits_bias else {}
    for name, shape in (shapes | _positions(config)).items() if embeddings else ():
        if name not in named:
            named[name] = _computed(name, shape, config, embeddings[0])
    return named


def saved(state: Mapping[str, Tensor], config: TransformerConfig) -> dict[str, Tensor]:
    """Return the tensors that transformers writes: one of tied copies, no computed positions.

    Raises InputError if positions are not those that it would compute, and would be lost.
    """
    family = huggingface.family_of(config)
    left_out = set() if family.saves_positions else set(_positions(config))
    for name in left_out & state.keys():
        _check_computed(name, state[name], config)
    if family.ties_always or config.tying is not Tying.EMBEDDINGS:  # most tie all or nothing
        left_out |= rules.aliases(registry.unchecked_table(config.architecture, config)).keys()
    left = {name: value for name, value in state.items() if name not in left_out}
    return dict(sorted(left.items(), key=lambda item: _place(item[0])))


def _place(name: str) -> list[int]:
    """Return a key that sorts names as in the modules' ``state_dict()``."""
    words = name.split(".")
    return [int(word) if word.isdecimal() else _PLACES.get(word, len(_PLACES)) for word in words]


def parameters(state: LazyState, config: TransformerConfig) -> int:
    """Return ``num_parameters()`` of the module of these tensors, which are all that it saves."""
    shapes = _positions(config) | {name: tensor.shape for name, tensor in state.items()}
    return sum(math.prod(shape) for name, shape in shapes.items() if name != _LOGITS_BIAS)


def why_completed(name: str, config: TransformerConfig) -> str:
    """Return the reason why the whole module has a tensor that its file does not have."""
    if name == _LOGITS_BIAS:
        return "is zero if a file does not hold it"
    if name in _positions(config):
        return "is computed: sines and cosines"
    for copies in _tied_names(config):
        if name in copies:
            copies.remove(name)
            return f"repeats {' or '.join(copies)}, with which the model ties it"
    bare = name.removeprefix(huggingface.family_of(config).prefix)
    return f"is {bare} in the file, which holds the model without its output layer"


def why_dropped(name: str, config: TransformerConfig) -> str:
    """Return the reason why the model has no counterpart of a tensor that is in a file."""
    prefix = huggingface.family_of(config).prefix
    return _reason_unused(name, config) or f"is {prefix}{name} in a model with an output layer"


def computed_again(state: LazyState, config: TransformerConfig) -> dict[str, LazyTensor]:
    """Return weights that were cast with positions as transformers computes them in that dtype.

    Rounded positions give way to computed ones if the family's files do not hold them. The tensors
    have their names in PyTorch or in Flax.
    """
    family = huggingface.find_family(config.architecture)
    if family is None or family.saves_positions:
        return dict(state)
    names = [*_positions(config)]
    names += [f"{name.split('.')[-3]}.positions.table" for name in names]
    return dict(state) | {
        name: LazyTensor(state[name].info, _table_in(config, state[name].info.numpy_dtype()))
        for name in names
        if name in state and _gap(state[name].read(), config) is None
    }


def _reason_unused(name: str, config: TransformerConfig) -> str | None:
    family = huggingface.family_of(config)
    return {**_VERSIONS, **family.unused_tensors}.get(name.removeprefix(family.prefix))


def _tied_names(config: TransformerConfig) -> Iterable[list[str]]:
    """Return groups of names of one tensor, each with the name first that transformers saves."""
    groups: dict[str, list[str]] = {}
    for name, of in rules.aliases(registry.unchecked_table(config.architecture, config)).items():
        groups.setdefault(of, [of]).append(name)
    return groups.values()


def _positions(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return the tables of sines and cosines that belong to the module and may be missing in a
    file, with their shapes: in a file of a model that reads sound they never are.
    """
    prefix, positions = huggingface.family_of(config).prefix, {}
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        if stack.positions is Positions.SINUSOIDAL_STORED and config.input_layer is None:
            rows = config.max_length + stack.position_offset
            positions[f"{prefix}{name}.embed_positions.weight"] = rows, config.d_model
    return positions


def _computed(name: str, shape: Shape, config: TransformerConfig, like: Any) -> Any:
    """Return a tensor that transformers makes if no file has it, in ``like``'s kind and dtype."""
    if isinstance(like, TensorInfo):
        return replace(like, shape=shape)
    dtype = like.info.numpy_dtype() if isinstance(like, LazyTensor) else like.dtype
    read = partial(np.zeros, shape, dtype) if name == _LOGITS_BIAS else _table_in(config, dtype)
    is_lazy = isinstance(like, LazyTensor)
    return LazyTensor(TensorInfo(shape, like.dtype), read) if is_lazy else read()


def _table_in(config: TransformerConfig, dtype: np.dtype) -> Callable[[], np.ndarray]:
    return lambda: _table(config).astype(dtype)


def _table(config: TransformerConfig) -> np.ndarray:
    """Return the positions (n, d) in float32: transformers computes them so for every dtype."""
    from jax_transformer.nn.embeddings import position_sinusoids  # loads jax

    return position_sinusoids(config, config.encoder).astype(np.float32)


def _gap(value: np.ndarray, config: TransformerConfig) -> float | None:
    """Return a table's largest difference from the computed one; None if rounding to its dtype, or
    to one of 16 bits on the way, explains it."""
    exact = _table(config)
    if value.shape != exact.shape:
        return float("inf")
    # Two units in the last place at 1, of bfloat16 and float32
    unit = {2: 2**-7, 4: 2**-22, 8: 2**-22}[value.dtype.itemsize]
    kinds = (value.dtype, np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    rounded = (exact.astype(kind).astype(value.dtype).astype(np.float64) for kind in kinds)
    gaps = [float(np.abs(value.astype(np.float64) - each).max()) for each in rounded]
    return None if min(gaps) <= unit else gaps[0]


def _check_computed(name: str, value: Any, config: TransformerConfig) -> None:
    value = value.read() if isinstance(value, LazyTensor) else value
    difference = _gap(value, config) if isinstance(value, np.ndarray) else None
    if difference is not None:
        raise InputError(
            f"{name} is up to {difference:.2g} off the sines and cosines that transformers computes"
            " instead of reading them: a model with other positions cannot be written as one of"
            " its own"
        )
