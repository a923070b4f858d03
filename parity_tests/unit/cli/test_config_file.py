"""``train --config``: flags over the file over the defaults, and every trap of YAML is named."""

import re
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from jax_transformer import cli
from jax_transformer.cli import config_file
from jax_transformer.cli import train as train_command
from jax_transformer.config import codec
from jax_transformer.errors import ConfigError, InputError, Refusal
from jax_transformer.training.optimizer import Schedule
from jax_transformer.training.options import Precision, TrainOptions
from parity_tests.unit import runs

FILE = """
# measured in November
steps: 70
tensorboard: on
model:  # nothing under it is nothing said
optimizer:
  learning_rate: 1e-3
  weight_decay: 0
  schedule: inverse_sqrt
data:
  train: [one.tsv, two.jsonl]
  valid: 2024-01-01.tsv
"""


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes):
        path = tmp_path / "run.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def parsed(*arguments) -> TrainOptions:
    words = [str(argument) for argument in arguments]
    return cli.parse("train", train_command.TrainCommand, words).options


def test_a_file_overrides_defaults_and_flags_override_the_file(write):
    path = write(FILE)
    options = parsed("--config", path)
    assert (options.steps, options.tensorboard, options.seed) == (70, True, TrainOptions().seed)
    assert options.optimizer.learning_rate == 1e-3
    assert options.optimizer.schedule is Schedule.INVERSE_SQRT
    assert type(options.optimizer.weight_decay) is float
    assert options.optimizer.beta2 == TrainOptions().optimizer.beta2
    assert options.data.train == ("one.tsv", "two.jsonl")
    assert options.data.valid == ("2024-01-01.tsv",)
    assert options.model == TrainOptions().model
    flags = """--steps 9 --no-tensorboard --optimizer.learning_rate=0.5
        --data.train a.tsv b.tsv c.tsv --model.precision bfloat16""".split()
    last = ["--config", path]
    for command in ([f"--config={path}", *flags], [*flags, *last], [*last, *flags, *last]):
        over = parsed(*command)
        assert (over.steps, over.tensorboard, over.optimizer.learning_rate) == (9, False, 0.5)
        assert over.data.train == ("a.tsv", "b.tsv", "c.tsv")
        assert over.model.precision is Precision.BFLOAT16
        assert over.optimizer.schedule is Schedule.INVERSE_SQRT
        assert over.data.valid == options.data.valid


def test_the_config_saved_by_a_run_can_be_passed_again(tmp_path):
    words = """--steps 7 --data.train café😀.tsv --data.valid v.tsv --optimizer.epsilon 1e-9
        --wandb no --model.d-model 12"""
    options = parsed(*words.split())
    (tmp_path / "train_config.json").write_text(codec.to_json(options))
    # escaped by JSON, which YAML parses differently
    assert "\\ud83d\\ude00" in codec.to_json(options)
    assert parsed("--config", tmp_path / "train_config.json") == options


def test_a_file_and_flags_are_checked_together(write):
    path = write("data: {train: a.tsv}\npatience: -1\n")
    both = parsed("--config", path, "--data.valid", "b.tsv", "--patience", "0")
    assert both.data.train == ("a.tsv",)
    message = rf"^training on files .* data\.valid \(with {path} underneath the flags\)$"
    with pytest.raises(ConfigError, match=message):
        parsed("--config", path, "--patience", "0")
    message = rf"^patience=-1 must be at least 0 \(with {path} underneath the flags\)$"
    with pytest.raises(ConfigError, match=message):
        parsed("--config", path, "--data.valid", "b.tsv")
    with pytest.raises(ConfigError, match="--config: needs a value"):
        parsed("--config")


@pytest.mark.parametrize("content", ["", "\n# nothing\n", "---\n", "{}", "\ufeff", "model:\n"])
def test_an_empty_file_changes_nothing(write, content):
    assert parsed("--config", write(content)) == TrainOptions()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 1e-3), ("1E3", 1e3), ("1.5e-3", 1.5e-3), (".5", 0.5), ("5.", 5.0), ("3", 3.0)),
        *(("1_000", 1e3), ("+2e+1", 20.0), ("9007199254740991", 2.0**53 - 1)),
    ],
)
def test_yaml_numbers_are_parsed_as_their_field_s_type(write, text, value):
    path = write(f"optimizer: {{learning_rate: {text}}}")
    number = parsed("--config", path).optimizer.learning_rate
    assert number == value and type(number) is float


@pytest.mark.parametrize(
    "text",
    ["2024-01-01", "007", "1:30", "0x10", "1e", "=", "<<", "nope", "'12'", '"off"', "a.b", "-x"],
)
def test_yaml_text_stays_text(write, text):
    assert parsed("--config", write(f"run: {text}")).run == text.strip("'\"")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepz: 3", "unknown key 'stepz' (did you mean 'steps'?)"),
        ("d_model: 3", "unknown key 'd_model' (did you mean 'model.d_model'?)"),
        ("eval-every: 3", "unknown key 'eval-every' (did you mean 'eval_every'?)"),
        ("model: {d_modle: 3}", "unknown key 'model.d_modle' (did you mean 'model.d_model'?)"),
        (
            "model: {learning_rate: 3}",
            "unknown key 'model.learning_rate' (did you mean 'optimizer.learning_rate'?)",
        ),
        ("optimiser: {beta1: 0.5}", "unknown key 'optimiser' (did you mean 'optimizer'?)"),
        ("lr: 3", "unknown key 'lr' (did you mean 'optimizer.learning_rate'?)"),
        (
            "stepz: 3\nmodel: {d_modle: 3}\nzzz: 1",
            "unknown keys 'stepz' (did you mean 'steps'?), "
            "'model.d_modle' (did you mean 'model.d_model'?), 'zzz'",
        ),
        ("config: other.yaml", "unknown key 'config'"),
        ("1: 2", "unknown key '1'"),
        ("model.d_model: 3", "'model.d_model' has a dot: write 'd_model' under 'model'"),
        ("model: 3", "model must be an object, not int"),
        ("- steps", "the configuration must be an object, not list"),
        ("steps", "the configuration must be an object, not str"),
        ("steps: three", "steps must be int, not 'three'"),
        ("steps: 010", "steps must be int, not '010'"),
        ("steps: 1e3", "steps must be int, not 1000.0"),
        ("steps: true", "steps must be int, not True"),
        ("steps:", "steps must be int, not None"),
        ("tensorboard: 1", "tensorboard must be bool, not 1"),
        ("run: .NaN", "run must be str, not nan"),
        (
            "wandb: off",
            "wandb must be str, not False; YAML reads yes, no, on and off so, "
            "unless they are in quotes",
        ),
        ("model: {preset: 12}", "model.preset must be str, not 12"),
        (
            "data: {train: [a.tsv, no]}",
            "data.train[1] must be str, not False; YAML reads yes, no, on and off so, "
            "unless they are in quotes",
        ),
        ("data: {train: {a: b}}", "data.train must be a list, not {'a': 'b'}"),
        (
            "optimizer: {schedule: cosin}",
            "optimizer.schedule='cosin' is not one of cosine, inverse_sqrt, linear, constant "
            "(did you mean 'cosine'?)",
        ),
        # what is no YAML, or not ours, by its line
        ("model:\n  d_ff: 3\n  d_ff: 3\n", "line 3: the key 'd_ff' is given twice"),
        ("steps: 3\nseed: [1\n", "line 3: "),
        ("steps: 3\n\tseed: 1\n", "line 2: "),
        ("steps: 3\n---\nsteps: 4\n", "line 2: "),
        (b"steps: 3\nrun: caf\xe9\n", "line 2 is not valid UTF-8 (byte 0xe9)"),
        (b"steps: \x00", "is not YAML: "),
        ("run: !!python/object/apply:os.getcwd []", "line 1: "),
        ("run: !!timestamp 2024-01-01", "line 1: "),
        ("steps: !!int three", "is not YAML: "),
        ("steps: !!bool maybe", "is not YAML: "),
        ("{[a]: 3}", "line 1: "),
        ("[" * 5000, "is not YAML: "),
    ],
)
def test_invalid_values_and_yaml_are_refused_by_file_and_key_or_line(write, content, message):
    path = write(content)
    with pytest.raises(Refusal) as error:
        parsed("--config", path)
    of_yaml = message.startswith(("line ", "is not YAML"))
    assert type(error.value) is (InputError if of_yaml else ConfigError)
    assert str(error.value).startswith(f"{path}: {message}") and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_a_bad_input_file(capsys, monkeypatch, tmp_path):
    console = runs.Console(capsys, monkeypatch)
    none, bad = tmp_path / "none.yaml", tmp_path / "bad.yaml"
    console.refused(3, [none, "No such file"], "train", "--config", none)
    console.refused(3, [tmp_path, "directory"], "train", "--config", tmp_path)
    bad.write_text("stepz: 1")
    console.refused(2, [bad, "stepz", "'steps'"], "train", "--config", bad)
    console.refused(2, ["--confi", "did you mean '--config'?"], "train", "--confi", "a")


def test_help_names_the_file_and_shows_its_values(capsys, monkeypatch, write):
    console = runs.Console(capsys, monkeypatch)
    files = ["--config", "the last counts.yaml", "--config", write(FILE)]
    code, out, err = console.say("train", *files, "--help")
    printed = " ".join(out.split())
    assert (code, err) == (0, "")
    assert "--config PATH YAML file of options" in printed
    assert "--steps N Optimizer updates (default: 70)" in printed
    assert console.say("train", "--config", "--help") == console.say("train", "--help")


def test_the_documented_example_is_valid(write):
    page = (runs.ROOT / "docs" / "configuration.md").read_text("utf-8")
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    options = parsed("--config", write(example))
    assert options.run == "runs/de-en"
    assert options.optimizer.learning_rate == 1e-3
    assert options.data.train_source == ("train.1.de", "train.2.de.gz")


def test_no_arguments_give_the_defaults():
    """``python train.py``, the first thing that anyone runs."""
    assert cli.parse("train", train_command.TrainCommand, []) == train_command.TrainCommand()


@dataclass(frozen=True)
class Section:
    """A section with an option that had another name."""

    RENAMED: ClassVar[dict[str, str]] = {"rate": "learning_rate"}

    learning_rate: float = 1.0
    """The rate."""


@dataclass(frozen=True)
class Renamed:
    """Options two of which had other names."""

    RENAMED: ClassVar[dict[str, str]] = {"updates": "steps"}

    steps: int = 1
    """The steps."""
    optimizer: Section = field(default_factory=Section)


def test_names_of_earlier_versions_work_and_name_the_new_ones(capsys, write):
    expected = Renamed(7, Section(0.5))
    assert cli.parse("train", Renamed, ["--updates", "7", "--optimizer.rate=0.5"]) == expected
    assert capsys.readouterr().err.splitlines() == [
        "--updates is now called --steps",
        "--optimizer.rate is now called --optimizer.learning-rate",
    ]
    assert config_file.read(Renamed, write("{updates: 7, optimizer: {rate: 0.5}}")) == expected
    assert capsys.readouterr().err.splitlines() == [
        "updates is now called steps",
        "optimizer.rate is now called optimizer.learning_rate",
    ]
    data = {"updates": 7, "optimizer": {"rate": 0.5}}
    assert codec.from_dict(Renamed, data) == expected
    assert data == {"updates": 7, "optimizer": {"rate": 0.5}}
    assert codec.from_dict(Renamed, data | {"steps": 3}).steps == 3
    assert capsys.readouterr().err == ""  # files that a run wrote are read silently


@dataclass(frozen=True)
class Positive:
    """A section that checks itself."""

    n: int = 1
    """A number."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"n={self.n}")


@dataclass(frozen=True)
class Outer:
    """Options with that section."""

    inner: Positive = field(default_factory=Positive)


def test_values_of_a_file_are_checked_with_the_flags_at_every_depth(write):
    assert config_file.read(Outer, write("{inner: {n: 0}}")).inner.n == 0
    with pytest.raises(ConfigError, match="n=0"):
        codec.from_dict(Outer, {"inner": {"n": 0}})
