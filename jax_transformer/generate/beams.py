"""What both beam searches do alike."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_transformer.generate import constraints
from jax_transformer.generate.arguments import Frame, Given
from jax_transformer.generate.generation_config import EarlyStopping
from jax_transformer.nn.cache import Cache, Prefix
from jax_transformer.transformer import Transformer


class Search(NamedTuple):
    """What a beam search is compiled for."""

    wanted: int
    """Hypotheses to give."""
    size: int
    """Beams."""
    frame: Frame
    early_stopping: EarlyStopping


class Continuations(NamedTuple):
    """The best 2k continuations of a row's k beams, best first: log-probabilities, whose they are, and their tokens."""

    log_probs: Float[Array, "b m"]
    parents: Int[Array, "b m"]
    tokens: Int[Array, "b m"]
    cache: Cache | Prefix

    def grown(self, tokens: Int[Array, "b k n"], step: Int[Array, ""]) -> Int[Array, "b m n"]:
        """Their whole hypotheses, of which ``tokens`` are those of the beams."""
        return jax.lax.dynamic_update_slice_in_dim(
            pick(tokens, self.parents), self.tokens[:, :, None], step, axis=2
        )


def pick(x: Array, beams: Int[Array, "b m"]) -> Array:
    """``x[row, beams[row]]`` for every row of (b, k, ...)."""
    return jnp.take_along_axis(x, beams.reshape(*beams.shape, *[1] * (x.ndim - 2)), axis=1)


def score_dtype(model: Transformer, cache: Cache | Prefix, batch: int, size: int) -> np.dtype:
    """What log-probabilities are added up in: what 16 bits would round away adds up over a hypothesis."""
    logits = jax.eval_shape(model.decode_step, jnp.zeros((batch, size), jnp.int32), cache)[0]
    return np.promote_types(logits.dtype, np.float32)


def continuations(
    model: Transformer,
    tokens: Int[Array, "b k n"],
    log_probs: Float[Array, "b k"],
    cache: Cache | Prefix,
    step: Int[Array, ""],
    search: Search,
    given: Given,
) -> Continuations:
    """Every beam goes on by every token, and the best of all that are kept."""
    last = tokens[:, :, jnp.maximum(step - 1, 0)]
    frame = search.frame
    logits, cache = model.decode_step(jnp.where(step == 0, frame.ids.bos, last), cache)
    scores = constraints.apply(
        frame.rules,
        jax.nn.log_softmax(logits.astype(log_probs.dtype)),
        tokens,
        step,
        given,
        frame.ids,
    )
    totals = scores + log_probs[:, :, None]
    vocabulary = totals.shape[-1]
    # Twice as many as beams: at most one continuation of each beam is the end token, so enough go on
    best, where = jax.lax.top_k(totals.reshape(len(totals), -1), 2 * search.size)
    return Continuations(best, where // vocabulary, (where % vocabulary).astype(jnp.int32), cache)
