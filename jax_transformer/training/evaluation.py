"""A trained run against a test set."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_transformer import transformer, translation
from jax_transformer.data import batches, encoding, parallel_text
from jax_transformer.errors import InputError
from jax_transformer.nn.positions import Frozen
from jax_transformer.training import metrics, step
from jax_transformer.training.trained import TrainedRun, load_run


def _check_lengths(source: str, trained: TrainedRun) -> None:
    """Raises InputError for the first line that the model cannot read."""
    longest = trained.model.config.max_length
    for number, ids in enumerate(trained.tokenizer.encode_batch(parallel_text.read_lines(source)), 1):
        if len(ids) >= longest:
            raise InputError(f"{source}: line {number} is {len(ids) + 1} tokens long, over the model's max_length={longest}")


def evaluate(run: str, source: str, target: str, *, beam_size: int, length_penalty: float) -> dict[str, Any]:
    """BLEU, chrF, exact match, loss (nats a token) and perplexity of the run's newest checkpoint on two files of lines.

    Every pair counts for the scores, so an over-long source is an error; pairs with an empty side are left out and counted.
    """
    trained = load_run(run)
    pairs = parallel_text.read_pairs(source, target)
    _check_lengths(source, trained)
    sources, references = [s for s, _ in pairs.pairs], [t for _, t in pairs.pairs]
    hypotheses = translation.translate(
        trained.model, trained.tokenizer, sources, widths=trained.widths, beam_size=beam_size, length_penalty=length_penalty
    )
    config = trained.model.config
    encoded = encoding.encode_pairs(pairs.pairs, trained.tokenizer.source, trained.tokenizer.target, config.max_length)
    widths = tuple(sorted({*trained.widths, config.max_length}))
    arrays = transformer.flatten(trained.model, nnx.Param), transformer.flatten(trained.model, Frozen)
    loss_sum = jax.jit(lambda params, carried, batch: step.loss_sum(params, carried, batch, config))
    sums = [loss_sum(*arrays, batch) for _, batch in batches.eval_batches(encoded, widths, batches.rows_per_batch(widths, 4096))]
    total, tokens = np.array(jax.device_get(sums)).sum(axis=0)
    return {
        "step": trained.weights.step,
        "pairs": len(references),
        "dropped_empty": pairs.dropped_empty,
        **metrics.score(hypotheses, references),
        "loss": float(total / tokens),
        "perplexity": float(np.exp(total / tokens)),
    }
