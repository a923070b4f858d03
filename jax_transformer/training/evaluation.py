"""The evaluation of a trained model on a test set."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jax_transformer import pretrained, transformer, translation
from jax_transformer.data import batch_plan, batches, encoding, parallel_text
from jax_transformer.errors import InputError
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.training import metrics, step
from jax_transformer.translation import Translator


class Evaluation(NamedTuple):
    """Figures, and a translation for each source line (empty if a side of its pair is empty)."""

    report: dict[str, Any]
    hypotheses: list[str]


def evaluate(
    run: str,
    source: str,
    target: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    weights: str = "auto",
    bootstrap: int = 0,
    languages: tuple[str | None, str | None] = (None, None),
) -> Evaluation:
    """BLEU, chrF, TER, exact match, loss (nats per token) and perplexity on two files of lines.

    Every pair counts for the scores, so a source that is too long is an error; pairs with an empty
    side are left out and counted. The loss leaves out pairs whose reference is longer than the
    model can generate: ``left_out_of_loss`` counts them; loss and perplexity are None if no pair
    remains.

    Args:
        run: a run or model folder.
        source, target: files with one sentence per line.
        overrides: changes to the folder's generation config, see
            :meth:`GenerationConfig.overridden`.
        weights: see :func:`jax_transformer.pretrained.open`.
        bootstrap: see :func:`metrics.score`.
        languages: the source's and the target's, for a tokenizer with languages.
    """
    opened = pretrained.open(run, weights)
    translator = translation.Translator.from_opened(
        opened, source_lang=languages[0], target_lang=languages[1]
    )
    if message := translation.without_cache(translator.model.config):
        print(message, file=sys.stderr)
    # Read each file once: it may be a pipe
    sources, targets = parallel_text.read_lines(source), parallel_text.read_lines(target)
    parallel = parallel_text.paired(sources, targets, source, target)
    longest = translator.model.config.longest
    encoding.encode_sources(sources, translator.tokenizer, longest, f"{source}: ")
    pairs = parallel.pairs
    translated = translator([s for s, _ in pairs], **(overrides or {}))
    total, tokens, counted = loss(translator, pairs)
    report = {
        "weights": opened.weights,
        "step": opened.step,
        "pairs": len(pairs),
        "dropped_empty": parallel.dropped_empty,
        **metrics.score(
            translated, [t for _, t in pairs], names=tuple(metrics.METRICS), bootstrap=bootstrap
        ),
        "loss": total / tokens if tokens else None,
        "perplexity": math.exp(total / tokens) if tokens else None,
        "left_out_of_loss": len(pairs) - counted,
    }
    return Evaluation(report, _in_place(sources, targets, translated))


def readable(report: dict[str, Any]) -> Iterator[str]:
    """One line per figure, with its interval in sacreBLEU's form: mean ± half width."""
    report = dict(report)
    signatures, confidence = report.pop("signatures"), report.pop("confidence", {})
    for name, value in report.items():
        interval = (
            f" (μ = {confidence[name]['mean']:.4f} ± {confidence[name]['half_width']:.4f})"
            if name in confidence
            else ""
        )
        yield (
            f"{name:16} {value:.4f}{interval}" if isinstance(value, float) else f"{name:16} {value}"
        )
    for name, signature in signatures.items():
        yield f"{name + ' signature':16} {signature}"


def loss(translator: Translator, pairs: list[tuple[str, str]]) -> tuple[float, int, int]:
    """Summed loss of the references in nats, their tokens, and the number of pairs that fit."""
    config = translator.model.config
    try:
        encoded = encoding.encode_pairs(
            pairs, translator.tokenizer.source, translator.tokenizer.target, config.longest
        )
    except InputError:  # none fits
        return 0.0, 0, 0
    widths = translator.widths
    arrays = transformer.flatten(translator.model, nnx.Param) | transformer.flatten(
        translator.model, Frozen
    )
    loss_sum = step.make_evaluation(config)
    groups = batches.eval_batches(encoded, widths, batch_plan.rows_per_batch(widths, 4096))
    sums = np.array(jax.device_get([loss_sum(arrays, batch) for _, batch in groups])).sum(axis=0)
    return float(sums[0]), int(sums[1]), len(encoded.sources)


def _in_place(sources: Sequence[str], targets: Sequence[str], translated: list[str]) -> list[str]:
    """A line for each source line: its translation, or nothing if a side is empty."""
    left = iter(translated)
    return [
        next(left) if s.strip() and t.strip() else "" for s, t in zip(sources, targets, strict=True)
    ]
