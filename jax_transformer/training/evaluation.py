"""The quality of a model: validation while it is trained, and evaluation on a test set, by the loss
and by sacreBLEU's scores of its translations, or COMET's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_transformer import transformer
from jax_transformer.data import batches, encoding, parallel_text
from jax_transformer.data.batches import Batch
from jax_transformer.data.encoding import EncodedPairs
from jax_transformer.data.parallel_text import Pairs
from jax_transformer.errors import ConfigError, InputError, counted
from jax_transformer.formats import registry
from jax_transformer.generate.prepare import ModelStructure
from jax_transformer.inference import Engine, translation
from jax_transformer.inference.translation import Translator
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.training import step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.devices import Devices
from jax_transformer.training.loss import cross_entropy
from jax_transformer.training.options import TrainOptions
from jax_transformer.training.step import Arrays

# Scores

METRICS = {"bleu": "BLEU", "chrf": "CHRF", "ter": "TER"}


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *others: Sequence[str],
    names: Sequence[str] = ("bleu", "chrf"),
    bootstrap: int = 0,
) -> dict[str, Any]:
    """Return sacreBLEU's figures with their signatures, and the percentage of exactly right lines.

    Args:
        hypotheses: one string per line.
        references: one string per line, equally many.
        others: more references of each line, of which empty ones do not count. A line is exactly
            right if it is equal to one of its references.
        names: any of ``bleu``, ``chrf`` (0 to 100, higher is better) and ``ter`` (edits per 100
            words, lower is better). BLEU and chrF are cased, TER is not; BLEU uses tokenizer 13a.
        bootstrap: number of resamplings of the lines for a 95 % interval of each figure
            (Koehn 2004). 0: no intervals.

    Returns:
        each of ``names``, ``exact_match``, ``signatures`` by name and, with ``bootstrap``,
        ``confidence`` by name: the ``mean`` over the resampled lines and ``half_width``, half the
        width of the interval around it.
    """
    import sacrebleu.metrics

    if not references:
        raise InputError("there are no translations to score")
    if bootstrap < 0 or bootstrap == 1:
        raise ConfigError(f"bootstrap={bootstrap} must be 0 or at least 2")
    lines = zip(hypotheses, references, *others, strict=True)
    exact = sum(line in (first, *filter(None, more)) for line, first, *more in lines)
    figures: dict[str, Any] = {}
    signatures, confidence = {}, {}
    for name in names:
        # Resampled lines without a match have the score 0.0, others are NumPy's float32, and the
        # mean of both kinds is a TypeError in sacreBLEU
        class Metric(getattr(sacrebleu.metrics, METRICS[name])):  # type: ignore[misc]
            def _compute_score_from_stats(self, stats: Any) -> Any:
                result = super()._compute_score_from_stats(stats)
                result.score = float(result.score)
                return result

        metric = Metric()
        streams = list(map(list, (references, *others)))
        result = metric.corpus_score(list(hypotheses), streams, n_bootstrap=max(1, bootstrap))
        figures[name] = result.score
        signatures[name] = str(metric.get_signature())
        if bootstrap:
            confidence[name] = {"mean": float(result._mean), "half_width": float(result._ci)}
    figures |= {"exact_match": 100 * exact / len(references), "signatures": signatures}
    return figures | ({"confidence": confidence} if bootstrap else {})


def load_comet(path: str) -> Callable[[Sequence[tuple[str, str]], Sequence[str]], float]:
    """Return the function from pairs and translations to COMET's score of all (Rei et al. 2020).

    ``path`` is a checkpoint on disk, which is loaded as a pickle: only from a source that you
    trust. Raises ConfigError if the package is not installed, InputError if there is no such file.
    """
    try:
        from comet import load_from_checkpoint
    except ImportError:
        raise ConfigError(
            "COMET needs its package, unbabel-comet: docs/your-text.md says how to install it"
        ) from None
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file: give the .ckpt file of a COMET model")
    model = load_from_checkpoint(path)

    def comet_score(pairs: Sequence[tuple[str, str]], translations: Sequence[str]) -> float:
        data = [
            {"src": source, "mt": translation, "ref": reference}
            for (source, reference), translation in zip(pairs, translations, strict=True)
        ]
        return float(model.predict(data, batch_size=8, gpus=0, progress_bar=False).system_score)

    return comet_score


# During training

LOSS_OF = "valid_loss_"
"""Beginning of the name of a task's loss."""


@dataclass(frozen=True)
class ValidationReport:
    """Figures, and source, reference and translation of every scored pair."""

    figures: dict[str, Any]
    lines: list[tuple[str, str, str]]

    def describe(self, name: str, number: int, count: int) -> Iterator[str]:
        """Yield the figures in one line, then ``count`` examples, all if there are fewer.

        Successive validations walk through the set and start again at its end. The examples of
        validation ``number`` depend on it only, so a resumed run shows the same.
        """
        figures = self.figures
        if not self.lines:
            losses = [
                f"  {key.removeprefix(LOSS_OF)} {value:.3f}"
                for key, value in figures.items()
                if key.startswith(LOSS_OF)
            ]
            yield f"{name}  validation loss {figures['valid_loss']:.3f}{''.join(losses)}"
            return
        yield (
            f"{name}  validation loss {figures['valid_loss']:.3f}  BLEU {figures['bleu']:.1f}  "
            f"chrF {figures['chrf']:.1f}  exact match {figures['exact_match']:.1f} %"
        )
        pairs = len(self.lines)
        for i in range(min(count, pairs)):
            source, reference, hypothesis = self.lines[(number * count + i) % pairs]
            right = "" if hypothesis == reference else f"\n         (reference: {reference})"
            yield f"    {source}\n      -> {hypothesis}{right}"


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
        of_tasks = {
            name: self._sums(weights, corpus.valid.take(numbers))
            for name, numbers in corpus.valid_tasks.items()
        }
        losses, tokens = sum(of_tasks.values()) if of_tasks else self._sums(weights, corpus.valid)
        if not self.pairs:  # texts without translations
            figures = {f"{LOSS_OF}{name}": float(a / b) for name, (a, b) in of_tasks.items()}
            return ValidationReport({"valid_loss": float(losses / tokens)} | figures, [])
        model = transformer.unflatten(corpus.config, weights)
        sources, references = map(list, zip(*self.pairs, strict=True))
        translator = translation.Translator(
            model, corpus.tokenizer, self.generation_config, widths=corpus.valid_shapes[0]
        )
        hypotheses = translator(sources)
        figures = {"valid_loss": float(losses / tokens), **score(hypotheses, references)}
        return ValidationReport(figures, list(zip(sources, references, hypotheses, strict=True)))

    def _sums(self, weights: Arrays, pairs: EncodedPairs) -> Any:
        """Return the summed loss of pairs, and their number of target tokens."""
        groups = batches.eval_batches(pairs, *self.corpus.valid_shapes)
        sums = [self.loss_sum(weights, self.devices.divide(batch)) for _, batch in groups]
        return np.array(jax.device_get(sums)).sum(axis=0)


# On a test set


class Evaluation(NamedTuple):
    """Figures, and a translation for each source line (empty if a side of its pair is empty)."""

    report: dict[str, Any]
    hypotheses: list[str]


def evaluate(
    run: str,
    source: str | None,
    target: str | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    pairs: str | None = None,
    fields: tuple[str, str] = ("source", "target"),
    references: Sequence[str] = (),
    comet: str | None = None,
    weights: str = "auto",
    bootstrap: int = 0,
    languages: tuple[str | None, str | None] = (None, None),
    ensemble: Sequence[str] = (),
    precision: str | None = None,
    engine: Engine = Engine.JAX,
    quantization: str | None = None,
    tokens_per_batch: int = translation.TOKENS_PER_BATCH,
) -> Evaluation:
    """BLEU, chrF, TER, exact match, loss (nats per token) and perplexity on a test set.

    Every pair counts for the scores, so a source that is too long is an error; pairs with an empty
    side are left out and counted. The loss leaves out pairs whose reference is longer than the
    model can generate: ``left_out_of_loss`` counts them; loss and perplexity are None if no pair
    remains.

    Args:
        run: a run or model folder.
        source: a file with one sentence per line, or None.
        target: a file with as many lines, or None without ``source``.
        pairs: a .tsv, .jsonl or .parquet file in their place, with these ``fields``.
        references: files of more references, line by line. The loss is ``target``'s.
        comet: a checkpoint of COMET, see :func:`load_comet`.
        overrides: changes to the folder's generation config, see
            :meth:`GenerationConfig.overridden`.
        weights: see :func:`jax_transformer.formats.registry.open`.
        bootstrap: see :func:`score`.
        languages: the source's and the target's, for a tokenizer with languages.
        ensemble: other folders, whose models' probabilities are averaged with ``run``'s.
        precision: see :meth:`Translator.load`.
        tokens_per_batch: see :meth:`Translator.load`.
        engine: see :func:`.translation.load`. Only JAX gives a loss.
        quantization: see :func:`.translation.load`.
    """
    comet_score = None if comet is None else load_comet(comet)
    opened = registry.open(run, weights)
    translator = translation.load(
        opened,
        *(registry.open(other, weights) for other in ensemble),
        engine=engine,
        quantization=quantization,
        source_lang=languages[0],
        target_lang=languages[1],
        precision=precision,
        tokens_per_batch=tokens_per_batch,
        **(overrides or {}),
    )
    name, lines, complete, others = _read(source, target, pairs, fields, references)
    scored, sources = complete.pairs, [line for line, _ in lines]
    longest = translator.model.config.longest
    encoding.encode_sources(sources, translator.tokenizer, longest, f"{name}: ")
    translated = translator([line for line, _ in scored])
    report: dict[str, Any] = {"weights": opened.weights, "step": opened.step}
    if ensemble:
        report["ensemble"] = list(ensemble)
    if engine is not Engine.JAX:
        report |= {"engine": engine.value, "quantization": quantization or "float32"}
    report |= {"pairs": len(scored), "dropped_empty": complete.dropped_empty}
    targets = [line for _, line in scored]
    report |= score(translated, targets, *others, names=tuple(METRICS), bootstrap=bootstrap)
    if comet_score is not None:
        report["comet"] = comet_score(scored, translated)
    if engine is Engine.JAX:
        total, tokens, pairs_counted = loss(translator, scored)
        report |= {
            "loss": total / tokens if tokens else None,
            "perplexity": math.exp(total / tokens) if tokens else None,
            "left_out_of_loss": len(scored) - pairs_counted,
        }
    left = iter(translated)
    in_place = [next(left) if s.strip() and t.strip() else "" for s, t in lines]
    return Evaluation(report, in_place)


def readable(report: dict[str, Any]) -> Iterator[str]:
    """One line per figure, with its interval in sacreBLEU's form: mean ± half width."""
    report = dict(report)
    signatures, confidence = report.pop("signatures"), report.pop("confidence", {})
    for name, value in report.items():
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        text = " ".join(value) if isinstance(value, list) else text
        if name in confidence:
            mean, half_width = confidence[name]["mean"], confidence[name]["half_width"]
            text += f" (μ = {mean:.4f} ± {half_width:.4f})"
        yield f"{name:16} {text}"
    for name, signature in signatures.items():
        yield f"{name + ' signature':16} {signature}"


def loss(translator: Translator, pairs: list[tuple[str, str]]) -> tuple[float, int, int]:
    """Return the references' summed loss in nats, their tokens, and how many pairs fit."""
    config = translator.model.config
    try:
        encoded = encoding.encode_pairs(
            pairs, translator.tokenizer.source, translator.tokenizer.target, config.longest
        )
    except InputError:  # none fits
        return 0.0, 0, 0
    widths = translator.widths
    loss_sum = _loss_sum(translator)
    rows = batches.rows_per_batch(widths, translator.tokens_per_batch)
    groups = batches.eval_batches(encoded, widths, rows)
    sums = np.array(jax.device_get([loss_sum(batch) for _, batch in groups])).sum(axis=0)
    return float(sums[0]), int(sums[1]), len(encoded.sources)


def _loss_sum(translator: Translator) -> Callable[[Batch], tuple[jax.Array, jax.Array]]:
    """Return the summed loss and the target tokens of a batch, for one model or an ensemble."""
    model, split = translator.model, translator.split_model
    if len(translator.models) > 1:
        pad_id = model.config.target_pad_id
        return lambda batch: _ensemble_loss_sum(split.structure, split.arrays, batch, pad_id)
    loss_sum = step.make_evaluation(model.config)
    arrays = transformer.flatten(model, nnx.Param) | transformer.flatten(model, Frozen)
    return lambda batch: loss_sum(arrays, batch)


@partial(jax.jit, static_argnums=(0, 3))
def _ensemble_loss_sum(
    structure: ModelStructure, arrays: list[jax.Array], batch: Batch, pad_id: int
) -> tuple[jax.Array, jax.Array]:
    log_probs = structure.merge(arrays)(batch.source, batch.target_in)
    assert isinstance(log_probs, jax.Array), "without return_attention"
    return cross_entropy(log_probs, jnp.asarray(batch.target_out), pad_id=pad_id)


def _read(
    source: str | None,
    target: str | None,
    pairs: str | None,
    fields: tuple[str, str],
    references: Sequence[str],
) -> tuple[str, list[tuple[str, str]], Pairs, list[list[str]]]:
    """Return a test set: its name for messages, every pair, those without an empty side, and for
    each file of more references those of the complete pairs.
    """
    if pairs is not None:
        name, lines = pairs, parallel_text.read_pair_lines(pairs, *fields)
    else:
        name, target = source or "", target or ""
        # Each is read once: it may be a pipe
        sources, targets = parallel_text.read_lines(name), parallel_text.read_lines(target)
        parallel_text.paired(sources, targets, name, target)  # as many lines, and not the same
        lines = list(zip(sources, targets, strict=True))
    complete, others = parallel_text.checked(lines, name), []
    for path in references:
        more = parallel_text.read_lines(path)
        if len(more) != len(lines):
            raise InputError(f"{name} has {counted(len(lines), 'line')} and {path} has {len(more)}")
        in_both = zip(lines, more, strict=True)
        others.append([line for (s, t), line in in_both if s.strip() and t.strip()])
    return name, lines, complete, others
