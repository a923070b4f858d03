"""What each command can be told: these dataclasses are the command line, and the text under a field is that flag's help."""

from dataclasses import dataclass, field

import tyro

from jax_transformer.cli import config_file
from jax_transformer.cli.arguments import Inline
from jax_transformer.generate.generation_config import BeamScorer, EarlyStopping
from jax_transformer.training.options import TrainOptions


@dataclass(frozen=True)
class TrainCommand:
    """Train an encoder-decoder on parallel text."""

    config: str | None = None
    """A YAML file of the options below, nested where their names have dots, or the train_config.json of a run; flags win over it."""
    options: Inline[TrainOptions] = field(default_factory=TrainOptions)

    @classmethod
    def from_file(cls, path: str) -> "TrainCommand":
        """What flags are put on top of; what several options must be together is checked when they are."""
        return cls(path, config_file.read(TrainOptions, path))


@dataclass(frozen=True)
class TranslateOptions:
    """Translate lines from standard input to standard output, one out for each in."""

    run: str
    """The run folder, or a Hugging Face folder, or hf:owner/name."""
    weights: str = "auto"
    """Which of the run's weights: averaged, best, last, a step, or auto: the first of these that there is."""
    source_lang: str | None = None
    """The language of the lines, by the tokenizer's code, where a Hugging Face model has several: eng_Latn, en_XX, en."""
    target_lang: str | None = None
    """The language to translate into, likewise."""
    input: str | None = None
    """A file of lines instead of standard input; plain or gzip."""
    output: str | None = None
    """A file instead of standard output; written whole or not at all."""
    attention: str | None = None
    """Also write an HTML page of the attention weights of the first 50 lines, to look at in a browser."""
    max_length: int | None = None
    """The most tokens of a translation; by default twice what its source is padded to, within the model's max_length."""
    beam: int | None = None
    """Hypotheses kept by beam search; 1, the default, is greedy. A Hugging Face folder has its own defaults for this and what follows."""
    length_penalty: float | None = None
    """Exponent of beam search's length penalty; by default 0.6."""
    penalty: BeamScorer | None = None
    """gnmt divides by ((5 + length) / 6) ** exponent and misses nothing; average, by length ** exponent, is the search of transformers."""
    early_stopping: EarlyStopping | None = None
    """When the search of transformers leaves a line: heuristic, full or never, which are its False, True and "never"."""
    no_repeat_ngram_size: int | None = None
    """No so many tokens come twice in a translation; 0 allows it."""
    repetition_penalty: float | None = None
    """Makes tokens that have been less likely where above 1."""
    min_new_tokens: int | None = None
    """The fewest tokens of a translation before its end."""
    n_best: int | None = None
    """Write the so many best of the beam, each as `line ||| translation ||| score` with lines counted from 0; 0 writes the best alone."""
    sample: bool = False
    """Draw tokens at random instead of searching for the likeliest."""
    temperature: float | None = None
    """What logits are divided by before drawing, by default 1; below 1 prefers likely tokens."""
    top_k: int | None = None
    """Draw from the so many likeliest tokens; 0, the default, is from all."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens that together have this probability; by default 1."""
    seed: int | None = None
    """Decides the draws; by default 0."""


@dataclass(frozen=True)
class EvaluateOptions:
    """Score a run on a test set: BLEU, chrF, TER, exact match, and loss."""

    run: str
    """The run folder, or a Hugging Face folder, or hf:owner/name."""
    source: str
    """Lines to translate; plain or gzip."""
    target: str
    """Their references, line by line."""
    weights: str = "auto"
    """Which of the run's weights: averaged, best, last, a step, or auto: the first of these that there is."""
    source_lang: str | None = None
    """The language of the source, by the tokenizer's code, where a Hugging Face model has several: eng_Latn, en_XX, en."""
    target_lang: str | None = None
    """The language of the target, likewise."""
    max_length: int | None = None
    """The most tokens of a translation; by default twice what its source is padded to, within the model's max_length."""
    beam: int | None = None
    """Hypotheses kept by beam search; 1, the default, is greedy. A Hugging Face folder has its own defaults for this and what follows."""
    length_penalty: float | None = None
    """Exponent of beam search's length penalty; by default 0.6."""
    penalty: BeamScorer | None = None
    """gnmt divides by ((5 + length) / 6) ** exponent and misses nothing; average, by length ** exponent, is the search of transformers."""
    early_stopping: EarlyStopping | None = None
    """When the search of transformers leaves a line: heuristic, full or never, which are its False, True and "never"."""
    no_repeat_ngram_size: int | None = None
    """No so many tokens come twice in a translation; 0 allows it."""
    repetition_penalty: float | None = None
    """Makes tokens that have been less likely where above 1."""
    min_new_tokens: int | None = None
    """The fewest tokens of a translation before its end."""
    bootstrap: int = 1000
    """How often the lines are resampled for the 95 % intervals of the scores; 0 is no intervals."""
    hypotheses: str | None = None
    """A file for the translations, line by line; written whole or not at all."""
    json: bool = False
    """Print one JSON object instead of lines."""


@dataclass(frozen=True)
class ConvertOptions:
    """Convert weights between PyTorch files, .safetensors files, Hugging Face folders, run folders and single checkpoints."""

    source: tyro.conf.Positional[str]
    """A .pt, .pth or .bin file, a .safetensors file or the index of several, a Hugging Face folder or hf:owner/name, a run folder, or one
    checkpoint of a run; known by its content."""
    destination: tyro.conf.Positional[str]
    """A .safetensors, .pt, .pth or .bin file, a folder, or one checkpoint, RUN/checkpoints/STEP."""
    to: str | None = None
    """Which folder is made: hf is one that transformers loads, run one of this project, as without it."""
    config: str | None = None
    """The model's config.json, where neither side says what model it is."""
    preset: str | None = None
    """Or the preset that it is of, with the sizes that the shapes show;"""
    set: tuple[str, ...] = ()
    """these sizes are not read from the shapes, as num_heads=4 max_length=40."""
    dtype: str | None = None
    """Cast the weights to this dtype, and say what that loses; they keep their own without it."""
    weights: str = "auto"
    """Which weights of a run folder: averaged, best, last, a step, or auto: the first of these that there is."""
    key: str | None = None
    """Where in a PyTorch file the state_dict is, as model; found where there is only one."""
    strip_prefix: str = ""
    """Take this from the beginning of every name, as module. or _orig_mod."""
    training: bool = False
    """Carry the optimizer's state and the place in the data, too: between a run folder and the checkpoint of a PyTorch loop."""
    dry_run: bool = False
    """Print what would be done with every tensor, and write nothing."""
    force: bool = False
    """Replace what is at the destination: a file, or a folder of weights that holds nothing else."""
    shard_size: str | None = None
    """With --to hf, the most bytes of weights in one file, as 200MB; 5GB without it."""
    check: bool = True
    """Run the converted weights beside the PyTorch twin in float64, or without PyTorch carry them back, before they get their name."""
    json: bool = False
    """Print one JSON object instead of lines."""


@dataclass(frozen=True)
class InspectOptions:
    """Show what is in a file or folder of weights: names, shapes, dtypes, ties, sizes, hashes. Runs nothing and loads no weights."""

    path: tyro.conf.Positional[str]
    """A .safetensors file or the index of several, a PyTorch file, a Hugging Face folder or hf:owner/name, a run folder, or one checkpoint."""
    json: bool = False
    """Print one JSON object instead of lines."""


@dataclass(frozen=True)
class ParityOptions:
    """Compare a model with PyTorch module by module, and name the first module that differs."""

    model: tyro.conf.Positional[str]
    """The weights to run in JAX: a run folder, one checkpoint, a Hugging Face folder, a .safetensors or PyTorch file."""
    other: tyro.conf.Positional[str]
    """What to compare with: any of these, run in the PyTorch twin; the word twin, for the same weights; or a file that `golden make` wrote."""
    config: str | None = None
    """The model's config.json, where neither side says what model it is."""
    preset: str | None = None
    """Or the preset that it is of, with the sizes that the shapes show;"""
    set: tuple[str, ...] = ()
    """these sizes are not read from the shapes, as num_heads=4 max_length=40."""
    weights: str = "auto"
    """Which weights of a run folder: averaged, best, last, a step, or auto: the first of these that there is."""
    dtype: str | None = None
    """Show figures of this dtype too, as bfloat16; of the weights' own without it. Agreement is decided in float64."""
    gradients: bool = True
    """Compare gradients, too."""
    lengths: str | None = None
    """Compare at each of these lengths of source and target, with commas between them; at 7 and 5 without it."""
    seed: int | None = None
    """Decides the batch of random tokens, and the numbers that the outputs are weighted with for gradients; 0 without it, a golden's own with one."""
    html: str | None = None
    """Also write the report as an HTML page, to look at in a browser."""
    json: bool = False
    """Print JSON instead of a table: a list of reports."""


@dataclass(frozen=True)
class GoldenOptions:
    """Record the numbers of a PyTorch model in a file that models are compared with where torch is not installed; or make them again."""

    action: tyro.conf.Positional[str]
    """make writes FILE; check makes its numbers again and compares."""
    file: tyro.conf.Positional[str]
    """The golden, a .safetensors file."""
    model: tyro.conf.Positional[str | None] = None
    """What to record: a folder whose weights run in the PyTorch twin; or package.module:callable, which gives a PyTorch module."""
    batch: str | None = None
    """For package.module:callable: a .safetensors file with the arguments of the module's call, named 0, 1, and so on."""
    weights: str = "auto"
    """Which weights of a run folder."""
    python: str | None = None
    """The Python that package.module:callable runs in, where torch is in another environment."""
    seed: int = 0
    """Decides the batch and the gradients."""
