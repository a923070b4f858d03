"""Attention by kernels of JAX and of tokamax, for calls that need no weights."""

import dataclasses
import logging
from functools import cache, partial
from types import ModuleType

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
    check_kernel(enums.AttentionBackend.SDPA, q.dtype)
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
    check_kernel(enums.AttentionBackend.CUDNN, q.dtype)
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


def tokamax_attend(
    q: Float[Array, "b q h e"],
    k: Float[Array, "b k h e"],
    v: Float[Array, "b k h e"],
    mask: Bool[Array, "#b #h #q k"] | None,
    bias: Float[Array, "#b h q k"] | None = None,
    *,
    scale: float,
    causal: bool,
) -> Float[Array, "b q h e"]:
    """:func:`fused_attend` by tokamax's flash attention (Triton), which also takes a ``bias``.

    Its backward pass stores the bias' gradient of each row, (b, h, q, k) in float32, before the
    sum. ``causal`` says that the mask hides later keys, whose blocks are left out. Raises
    ConfigError without the library, an NVIDIA GPU of compute capability 8.0, or on a mesh.
    """
    check_kernel(enums.AttentionBackend.TOKAMAX, q.dtype)
    try:
        mixed = _tokamax().dot_product_attention(
            *(q, k, v),
            bias=None if bias is None else bias.astype(jnp.float32),
            mask=mask,
            scale=scale,
            is_causal=causal,
            implementation="triton",
        )
    except NotImplementedError as error:  # a GPU that is too old
        raise ConfigError(f"attention_backend='tokamax': {error}") from None
    return mixed if mask is None else _zero_without_keys(mixed, mask)


@cache
def _tokamax() -> ModuleType:
    """Import tokamax, which would read our command line, and warn for each shape not tuned."""
    try:
        import tokamax
        from absl import flags
    except ImportError:
        needs = "needs the package tokamax: pip install 'jax-seq2seq[kernels]'"
        raise ConfigError(f"attention_backend='tokamax' {needs}") from None
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    untuned = "Autotuning cache miss"
    logging.getLogger("absl").addFilter(lambda line: not str(line.msg).startswith(untuned))
    return tokamax


def check_kernel(backend: enums.AttentionBackend, dtype: jnp.dtype | str | None) -> None:
    """Raise ConfigError if a backend cannot compute attention in this dtype where JAX computes."""
    dtype, name = jnp.dtype(dtype or jnp.float32), f"attention_backend='{backend}'"
    if backend is enums.AttentionBackend.XLA:
        return
    if dtype.itemsize > 4:
        takes = f"takes softmax in float32, and the model is {dtype}"
        raise ConfigError(f"{name} {takes}: use attention_backend='xla'")
    if backend is enums.AttentionBackend.SDPA:
        return
    if backend is enums.AttentionBackend.CUDNN and dtype.itemsize > 2:
        raise ConfigError(
            f"{name} computes in bfloat16, and the model in {dtype}: "
            "use --model.precision bfloat16, or attention_backend='sdpa'"
        )
    if (platform := jax.default_backend()) != "gpu":
        needs = f"needs an NVIDIA GPU, and JAX computes on {platform}"
        raise ConfigError(f"{name} {needs}; 'sdpa' and 'xla' do not")
    if backend is enums.AttentionBackend.TOKAMAX:
        _tokamax()
        if (devices := jax.sharding.get_abstract_mesh().size) > 1:
            raise ConfigError(f"{name} computes on one device, and the mesh has {devices}")


def with_kernel(
    config: TransformerConfig, backend: enums.AttentionBackend | str, *, packed: bool = False
) -> TransformerConfig:
    """Return the configuration with ``cudnn`` or ``tokamax``.

    Raises ConfigError with the reason if that does not compute this model, rows that are
    ``packed``, or anything on the present devices.
    """
    config = dataclasses.replace(config, attention_backend=enums.AttentionBackend(backend))
    if packed and config.unpackable:
        raise ConfigError(config.unpackable)
    attend = cudnn_attend if backend == enums.AttentionBackend.CUDNN else tokamax_attend
    attention = partial(attend, mask=None, scale=1.0, causal=False)
    for stack in (config.encoder, config.decoder):
        shape = (1, 2, 1, config.head_width_of(stack))
        heads = jax.ShapeDtypeStruct(shape, config.compute_dtype or jnp.float32)
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
