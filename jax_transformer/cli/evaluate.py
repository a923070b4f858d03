"""``jax-transformer evaluate``: scores of a model on a test set."""

import json
from dataclasses import dataclass, field

from jax_transformer.cli import streams, translate
from jax_transformer.cli.arguments import Command, Inline, Repeatable
from jax_transformer.cli.translate import Precision, SearchOptions


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a model on a test set: BLEU, chrF, TER, exact match, and loss."""

    run: str
    """The model: a run folder, a Hugging Face folder, or hf:owner/name."""
    source: str
    """Lines to translate, plain or gzip."""
    target: str
    """Reference translations, line by line, plain or gzip."""
    weights: str = "auto"
    """Weights of the run: averaged, best, last, a step, or auto (the first that exists)."""
    ensemble: Repeatable[tuple[str, ...]] = ()
    """Another model with the same tokenizer: the mean of the probabilities decides. Repeatable."""
    precision: Precision | None = None
    """Dtype to compute in: float32, bfloat16 or float64 (default: that of the model)."""
    architecture: str | None = None
    """Register an architecture of yours, my_file.py:NAME or package.module:NAME."""
    source_lang: str | None = None
    """Source language of a multilingual Hugging Face model: eng_Latn, en_XX, en."""
    target_lang: str | None = None
    """Target language of a multilingual Hugging Face model."""
    search: Inline[SearchOptions] = field(default_factory=SearchOptions)
    bootstrap: int = 1000
    """Resamples for the 95 % confidence intervals of the scores (0: no intervals)."""
    hypotheses: str | None = None
    """Also write the translations to this file, line by line."""
    json: bool = False
    """Print one JSON object instead of lines."""


@translate.with_precision
def run(options: EvaluateOptions) -> int:
    """Print the scores and return the exit code."""
    from jax_transformer.training import devices, evaluation

    devices.use_cache()
    overrides = translate.generation_options(options.search)
    streams.check_output(options.hypotheses)
    report, hypotheses = evaluation.evaluate(
        options.run,
        options.source,
        options.target,
        overrides,
        weights=options.weights,
        bootstrap=options.bootstrap,
        languages=(options.source_lang, options.target_lang),
        ensemble=options.ensemble,
        precision=options.precision,
    )
    if options.hypotheses is not None:
        with streams.output(options.hypotheses) as file:
            streams.write(file, hypotheses)
    if options.json:
        print(json.dumps(report))
        return 0
    for line in evaluation.readable(report):
        print(line)
    return 0


COMMAND = Command(
    EvaluateOptions,
    run,
    groups={
        "model": "run weights ensemble precision architecture",
        "input and output": "source target source_lang target_lang hypotheses bootstrap json",
        "decoding": "*",
    },
    examples=("evaluate --run runs/de-en --source test.de.gz --target test.en.gz --beam 4",),
)
