"""The validation of a model during training: its loss, and scores of its translations."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jax_transformer import transformer
from jax_transformer.data import batches
from jax_transformer.inference import translation
from jax_transformer.inference.scores import score
from jax_transformer.training import step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.devices import Devices
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.step import Arrays


@dataclass(frozen=True)
class ValidationReport:
    """Figures, and source, reference and translation of every scored pair."""

    figures: dict[str, Any]
    lines: list[tuple[str, str, str]]

    def describe(self, name: str, examples: list[int]) -> Iterator[str]:
        """Yield the figures in one line, then the examples with these indices."""
        figures = self.figures
        scores = (
            f"BLEU {figures['bleu']:.1f}  chrF {figures['chrf']:.1f}  "
            f"exact match {figures['exact_match']:.1f} %"
        )
        yield f"{name}  validation loss {figures['valid_loss']:.3f}  {scores}"
        for source, reference, hypothesis in (self.lines[i] for i in examples):
            yield f"    {source}\n      -> {hypothesis}" + (
                "" if hypothesis == reference else f"\n         (reference: {reference})"
            )


class Validation:
    """Loss over all validation pairs; scores of the first ``eval_pairs``, translated greedily."""

    def __init__(self, options: TrainOptions, corpus: Corpus, devices: Devices):
        self.corpus, self.devices = corpus, devices
        self.loss_sum = step.make_evaluation(corpus.config, options.loss_chunks)
        self.pairs = corpus.valid_pairs[: options.eval_pairs]
        source = corpus.init_source
        self.generation_config = source.generation_config if source is not None else None

    def __call__(self, weights: Arrays) -> ValidationReport:
        """Return the report of a model with these arrays."""
        corpus = self.corpus
        groups = batches.eval_batches(corpus.valid, corpus.plan.widths, corpus.plan.rows)
        sums = [self.loss_sum(weights, self.devices.divide(batch)) for _, batch in groups]
        losses, tokens = np.array(jax.device_get(sums)).sum(axis=0)
        model = transformer.unflatten(corpus.config, weights)
        sources = [source for source, _ in self.pairs]
        references = [target for _, target in self.pairs]
        translator = translation.Translator(
            model, corpus.tokenizer, self.generation_config, widths=corpus.plan.widths
        )
        hypotheses = translator(sources)
        figures = {"valid_loss": float(losses / tokens), **score(hypotheses, references)}
        return ValidationReport(figures, list(zip(sources, references, hypotheses, strict=True)))


def choose_examples(number: int, pairs: int, count: int) -> list[int]:
    """Return indices of the ``count`` examples that validation ``number`` shows, out of ``pairs``.

    Successive validations walk through the set and start again at its end. They depend on the
    number only, so a resumed run shows the same. All indices, if there are fewer than ``count``.
    """
    return [(number * count + i) % pairs for i in range(min(count, pairs))]
