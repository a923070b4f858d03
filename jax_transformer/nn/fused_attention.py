"""Attention by ``jax.nn.dot_product_attention``, for calls that need no weights."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_transformer.config import TransformerConfig, enums
from jax_transformer.errors import ConfigError


def fused_attend(
    q: Float[Array, "b q h e"],
    k: Float[Array, "b k h e"],
    v: Float[Array, "b k h e"],
    mask: Bool[Array, "#b #h #q k"] | None,
    *,
    scale: float,
) -> Float[Array, "b q h e"]:
    """Return the values weighted by softmax(scale · q·k); zeros for a query that may see no key.

    JAX is asked for no implementation: in 0.10 that is XLA on every device.
    """
    if q.dtype.itemsize > 4:
        takes = f"takes softmax in float32, and the model is {q.dtype}"
        raise ConfigError(f"attention_backend='sdpa' {takes}: use attention_backend='xla'")
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)
    return mixed if mask is None else _zero_without_keys(mixed, mask)


def cudnn_attend(
    q: Float[Array, "b q h e"],
    k: Float[Array, "b k h e"],
    v: Float[Array, "b k h e"],
    mask: Bool[Array, "#b 1 #q k"] | None,
    *,
    scale: float,
    causal: bool,
) -> Float[Array, "b q h e"]:
    """:func:`fused_attend` by cuDNN's flash attention, which never holds the scores in memory.

    cuDNN is given the number of keys of each row and ``causal``, since JAX passes a mask as a bias,
    with a gradient (https://github.com/jax-ml/jax/issues/28974, .../30593). A row whose ``mask`` is
    another one, such as padding before the end, is NaN. Raises ConfigError without an NVIDIA GPU.
    """
    check_cudnn(q.dtype)
    lengths = _key_lengths(mask, q.shape[0], k.shape[1])
    try:
        mixed = jax.nn.dot_product_attention(
            # JAX's check demands an even number of tokens of every gradient: the last one is zeros
            *(jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v)),
            scale=scale,
            is_causal=causal,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )[:, : q.shape[1]]
    except (RuntimeError, NotImplementedError) as error:  # no cuDNN, or a GPU that is too old
        raise ConfigError(f"attention_backend='cudnn': {error}") from None
    if mask is None:
        return mixed
    keys = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, None]
    computed = keys < lengths[:, None, None, None]
    if causal:
        computed &= jnp.tri(q.shape[1], k.shape[1], dtype=bool)[None, None]
    same = (computed == mask).all(axis=(1, 2, 3)) | ~mask.any(axis=(1, 2, 3))
    mixed = jnp.where(same[:, None, None, None], mixed, jnp.full((), jnp.nan, mixed.dtype))
    return _zero_without_keys(mixed, mask)


def check_cudnn(dtype: jnp.dtype | str | None) -> None:
    """Raise ConfigError if cuDNN cannot compute attention in this dtype on the present devices."""
    name = jnp.dtype(dtype or jnp.float32).name
    if name not in ("bfloat16", "float16"):
        raise ConfigError(
            f"attention_backend='cudnn' computes in bfloat16, and the model in {name}: "
            "use --model.precision bfloat16, or attention_backend='sdpa'"
        )
    if (platform := jax.default_backend()) != "gpu":
        needs = f"needs an NVIDIA GPU, and JAX computes on {platform}"
        raise ConfigError(f"attention_backend='cudnn' {needs}; 'sdpa' and 'xla' do not")


def with_cudnn(config: TransformerConfig, *, packed: bool = False) -> TransformerConfig:
    """Return the configuration with cuDNN's attention.

    Raises ConfigError with the reason if cuDNN does not compute this model, rows that are
    ``packed``, or anything on the present devices.
    """
    config = dataclasses.replace(config, attention_backend=enums.AttentionBackend.CUDNN)
    if packed and config.unpackable:
        raise ConfigError(config.unpackable)
    dtype = config.compute_dtype or jnp.float32
    attention = partial(cudnn_attend, mask=None, scale=1.0, causal=False)
    for stack in (config.encoder, config.decoder):
        heads = jax.ShapeDtypeStruct((1, 2, 1, config.head_width_of(stack)), dtype)
        jax.eval_shape(attention, heads, heads, heads)  # raises without cuDNN and on old GPUs
    return config


def _key_lengths(mask: Bool[Array, "#b 1 #q k"] | None, rows: int, keys: int) -> Int[Array, " b"]:
    """Return the number of keys of each row that any query may see; 1 if there are none."""
    if mask is None:
        return jnp.full((rows,), keys, jnp.int32)
    seen = mask.any(axis=(1, 2)).sum(axis=-1, dtype=jnp.int32)
    return jnp.broadcast_to(jnp.maximum(seen, 1), (rows,))


def _zero_without_keys(
    mixed: Float[Array, "b q h e"], mask: Bool[Array, "#b #h #q k"]
) -> Float[Array, "b q h e"]:
    """Return zeros for a query that may see no key."""
    sees = mask.any(axis=-1).swapaxes(1, 2)[..., None]
    return jnp.where(sees, mixed, jnp.zeros((), mixed.dtype))
