"""``jax-transformer evaluate``: scores of a model on a test set."""

import json
from dataclasses import dataclass, field
from typing import Annotated

from jax_transformer.cli import translate
from jax_transformer.cli.arguments import Command
from jax_transformer.cli.translate import ModelOptions, SearchOptions
from jax_transformer.config import option
from jax_transformer.config.option import Option
from jax_transformer.data import parallel_text
from jax_transformer.errors import ConfigError
from jax_transformer.storage import atomic


@dataclass(frozen=True)
class EvaluateOptions(ModelOptions):
    """Score a model on a test set: BLEU, chrF, TER, exact match, and loss."""

    source: Annotated[option.PathText | None, Option(synonyms="src")] = None
    """Lines to translate, plain or gzip."""
    target: Annotated[option.PathText | None, Option(synonyms="tgt trg ref references")] = None
    """Reference translations, line by line, plain or gzip."""
    pairs: option.PathText | None = None
    """A .tsv, .jsonl or .parquet file in place of --source and --target."""
    source_field: option.FieldName = "source"
    """Field of the source in .jsonl, for example translation.de."""
    target_field: option.FieldName = "target"
    """Field of the reference in .jsonl, for example translation.en."""
    reference: option.Repeatable[tuple[option.PathText, ...]] = ()
    """More references, line by line. Repeatable."""
    search: Annotated[option.Inline[SearchOptions], Option(group="decoding")] = field(
        default_factory=SearchOptions
    )
    bootstrap: Annotated[int, Option(group="input and output")] = 1000
    """Resamples for the 95 % confidence intervals of the scores (0: no intervals)."""
    comet: option.PathText | None = None
    """Also score with this COMET checkpoint, a pickle that you trust; needs unbabel-comet."""
    hypotheses: Annotated[option.PathText | None, Option(synonyms="output out out_file")] = None
    """Also write the translations to this file, line by line."""
    json: bool = False
    """Print one JSON object instead of lines."""

    def __post_init__(self) -> None:
        lines = (self.source is not None, self.target is not None)
        if any(lines) if self.pairs is not None else not all(lines):
            raise ConfigError("evaluate needs either --source and --target, or --pairs")
        if self.pairs is not None and parallel_text.suffix(self.pairs) is None:
            known = ", ".join(parallel_text.SUFFIXES)
            raise ConfigError(
                f"--pairs {self.pairs}: must end with one of {known}; the first two may have "
                ".gz or .zst after"
            )


@translate.with_precision
def run(options: EvaluateOptions) -> int:
    """Print the scores and return the exit code."""
    from jax_transformer.runtime import process
    from jax_transformer.training import evaluation

    process.use_program_cache()
    atomic.check_output(options.hypotheses)
    names = "pairs comet weights bootstrap ensemble precision engine quantization tokens_per_batch"
    report, hypotheses = evaluation.evaluate(
        options.run,
        options.source,
        options.target,
        vars(options.search),
        fields=(options.source_field, options.target_field),
        references=options.reference,
        languages=(options.source_lang, options.target_lang),
        **{name: getattr(options, name) for name in names.split()},
    )
    if options.hypotheses is not None:
        with translate.output(options.hypotheses) as file:
            translate.write(file, hypotheses)
    if options.json:
        print(json.dumps(report))
        return 0
    for line in evaluation.readable(report):
        print(line)
    return 0


COMMAND = Command(
    EvaluateOptions,
    run,
    examples=(
        "evaluate --run runs/de-en --source test.de.gz --target test.en.gz --beam 4",
        "evaluate --run runs/de-en --pairs test.jsonl --source-field de --target-field en",
    ),
    synonyms="score test",
)
