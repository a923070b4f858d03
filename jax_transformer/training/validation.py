"""How good a model is on the validation text."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_transformer import transformer, translation
from jax_transformer.data import batches
from jax_transformer.training import metrics, step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.mesh import Devices
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.step import Arrays


@dataclass(frozen=True)
class Report:
    """Figures, and sources, references and translations of all scored pairs."""

    figures: dict[str, Any]
    lines: list[tuple[str, str, str]]

    def say(self, name: str, chosen: list[int]) -> Iterator[str]:
        """The figures in one line, then the chosen examples."""
        figures = self.figures
        scores = f"BLEU {figures['bleu']:.1f}  chrF {figures['chrf']:.1f}  exact match {figures['exact_match']:.1f} %"
        yield f"{name}  validation loss {figures['valid_loss']:.3f}  {scores}"
        for source, reference, hypothesis in (self.lines[i] for i in chosen):
            yield f"    {source}\n      -> {hypothesis}" + (
                "" if hypothesis == reference else f"\n         (reference: {reference})"
            )


class Validation:
    """Loss over all validation pairs, and scores of the first ``eval_pairs`` of them translated greedily."""

    def __init__(self, options: TrainOptions, corpus: Corpus, devices: Devices):
        self.corpus, self.devices = corpus, devices
        self.loss_sum = step.make_evaluation(corpus.config)
        self.pairs = corpus.valid_pairs[: options.eval_pairs]
        self.how = corpus.initial.decoding if corpus.initial is not None else None

    def __call__(self, weights: Arrays) -> Report:
        """The report of a model's arrays."""
        corpus = self.corpus
        groups = batches.eval_batches(corpus.valid, corpus.plan.widths, corpus.plan.rows)
        sums = [self.loss_sum(weights, self.devices.divide(batch)) for _, batch in groups]
        losses, tokens = np.array(jax.device_get(sums)).sum(axis=0)
        model = transformer.unflatten(corpus.config, weights)
        sources, references = (
            [source for source, _ in self.pairs],
            [target for _, target in self.pairs],
        )
        hypotheses = translation.translate(
            model, corpus.tokenizer, sources, self.how, widths=corpus.plan.widths
        )
        figures = {"valid_loss": float(losses / tokens), **metrics.score(hypotheses, references)}
        return Report(figures, list(zip(sources, references, hypotheses, strict=True)))
