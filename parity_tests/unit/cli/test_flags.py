"""Every flag of every command acts: it changes the one thing that it names, and nothing else."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace as Stub
from typing import Any

import jax
import numpy as np
import pytest

import jax_transformer
from jax_transformer import cli
from jax_transformer.architectures import registry as architectures
from jax_transformer.cli import arguments
from jax_transformer.cli.arguments import docstrings
from jax_transformer.cli.translate import SamplingOptions, SearchOptions
from jax_transformer.convert import conversion, planning
from jax_transformer.convert.training_state import training_states
from jax_transformer.extras.serve import app
from jax_transformer.extras.serve.requests import Limits
from jax_transformer.extras.speech import transcription
from jax_transformer.formats import registry
from jax_transformer.generate.generation_config import ALIASES, Constraints, GenerationConfig
from jax_transformer.inference import attention_page, translation
from jax_transformer.inference.translation import Translator
from jax_transformer.parity import from_files
from jax_transformer.runtime import process
from jax_transformer.storage import atomic
from jax_transformer.training import evaluation
from jax_transformer.training.options import TrainOptions
from parity_tests.unit import helpers, runs

SEARCH = """
--max-length 7                         {}.max_length
--beam 3                               {}.num_beams
--length-penalty 0.5                   {}.length_penalty
--penalty average                      {}.penalty
--early-stopping full                  {}.early_stopping
--no-repeat-ngram-size 2               {}.no_repeat_ngram_size
--encoder-no-repeat-ngram-size 2       {}.encoder_no_repeat_ngram_size
--repetition-penalty 1.5               {}.repetition_penalty
--min-new-tokens 2                     {}.min_new_tokens
"""
SAMPLING = """
--sample                               {}.sample=True
--no-sample                            {}.sample=False
--temperature 0.5                      {}.temperature
--top-k 4                              {}.top_k
--top-p 0.5                            {}.top_p
--seed 4                               {}.seed
"""
MODEL = """
--weights best                         open.weights
--architecture a.py:B                  load_from.spec
--source-lang de                       {}.source_lang
--target-lang fr                       {}.target_lang
"""
ENGINE = """
--precision bfloat16                   {}.precision
--precision float64                    {}.precision x64=True
--engine ctranslate2                   {}.engine
--quantization int8                    {}.quantization
--tokens-per-batch 9                   {}.tokens_per_batch
"""
LOAD, SERVE, OPTIONS = "load.settings", "from_opened", "from_opened.options"
# Of each command: a call, and for each flag what it changes: the arguments of functions that are
# called, the output or the files. Without a value of its own, that of the flag.
TABLE: dict[str, tuple[str, str]] = {
    "translate": (
        "--run m",
        SEARCH.format(*[LOAD] * 9)
        + SAMPLING.format(*[LOAD] * 6)
        + MODEL.format(*[LOAD] * 2)
        + ENGINE.format("load", "load", "load", "load", LOAD)
        + """
--run n                                open.path
--ensemble o                           open2.path=o open2.weights=auto
--ensemble o --weights best            open.weights=best open2.path=o open2.weights=best
--input lines                          stream.windows.0.0=filed stream.windows.0.1=lines
--output o                             check_output.path=o files=o out
--buffer 1                             stream.window_size stream.windows.1.0=stdin ~
--too-long cut                         stream.too_long
--attention p                          check_output.path=p write.path=p ~
--n-best 2                             load.settings.n_best out ~
""",
    ),
    "evaluate": (
        "--run m --source s --target t",
        SEARCH.format(*["evaluate.overrides"] * 9)
        + ENGINE.format(*["evaluate"] * 5)
        + """
--run n                                evaluate.run
--source u                             evaluate.source
--target u                             evaluate.target
--source-field f                       evaluate.fields.0
--target-field f                       evaluate.fields.1
--reference r                          evaluate.references.0
--weights best                         evaluate.weights
--ensemble o                           evaluate.ensemble.0
--architecture a.py:B                  load_from.spec
--source-lang de                       evaluate.languages.0
--target-lang fr                       evaluate.languages.1
--bootstrap 7                          evaluate.bootstrap
--comet c                              evaluate.comet
--hypotheses h                         check_output.path files
--json                                 out ~
""",
    ),
    "serve": (
        "m",
        SEARCH.format(*[OPTIONS] * 9)
        + SAMPLING.format(*[OPTIONS] * 6)
        + MODEL.format(SERVE, SERVE)
        + """
--host 0.0.0.0                         bind.host hosts.host
--port 80                              bind.port
--allowed-hosts a.b                    Service.allowed_hosts.0 hosts.host=None ~
--queue-size 64                        Service.limits.queue_size Service.limits.max_lines=64
--timeout 9                            Service.limits.timeout=9.0
--max-lines 2                          Service.limits.max_lines
--max-characters 5                     Service.limits.max_characters
--max-body-bytes 5                     Service.limits.max_body_bytes
--max-beam 5                           Service.limits.max_beam
--max-configs 0                        Service.limits.max_configs
--batch-rows 2                         Service.limits.batch_rows
--batch-wait 0                         Service.limits.batch_wait=0.0
""",
    ),
    "convert": (
        "a b",
        """
--to hf                                prepare.request.to
--config c                             prepare.request.description.config
--preset p                             prepare.request.description.preset
--architecture a.py:B                  load_from.spec
--set num_heads=4                      prepare.request.description.changes.num_heads=4
--dtype float16                        prepare.request.dtype
--weights best                         prepare.request.weights
--key k                                prepare.request.key
--strip-prefix p                       prepare.request.names.strip_prefix
--ignore x                             prepare.request.names.ignore.0
--rename a=b                           prepare.request.names.rename.a=b
--training                             training.request.source=a convert=None ~
--dry-run                              refuse=True convert=None ~
--force                                prepare.request.force=True
--shard-size 5MB                       prepare.request.shard_size
--scan-layers                          prepare.request.scan_layers=True
--param-scan-axis 2                    prepare.request.param_scan_axis
--quantization int8                    prepare.request.quantization
--no-check                             prepare.request.check=False
--json                                 show.as_json=True
""",
    ),
    "inspect": ("a", "--json                                 show.as_json=True"),
    "parity": (
        "a b",
        """
--config c                             compare_files.description.config
--preset p                             compare_files.description.preset
--architecture a.py:B                  load_from.spec
--set num_heads=4                      compare_files.description.changes.num_heads=4
--weights best                         compare_files.weights
--dtype float16                        compare_files.dtype
--no-gradients                         compare_files.gradients=False
--lengths 1,7                          compare_files.lengths.0=1 compare_files.lengths.1=7
--seed 3                               compare_files.seed
--html h                               check_output.path files
--json                                 out
""",
    ),
    "golden": (
        "make f m",
        """
--batch b                              create_golden.batch_file
--weights best                         create_golden.weights
--architecture a.py:B                  load_from.spec
--python p                             create_golden.python
--seed 3                               create_golden.seed out ~
""",
    ),
    "transcribe": (
        "a --run m",
        """
--run n                                load.path
--weights best                         load.weights
--precision bfloat16                   load.precision
--precision float64                    load.precision x64=True
--language de                          call.language
--task translate                       call.task
--timestamps                           call.timestamps=True out
--beam 3                               load.options.beam
--output o                             check_output.path files out
--json                                 call.timestamps=True out ~
""",
    ),
}
# Flags that say the default, and one that excludes two that the call has
APART = "--no-json --no-dry-run --no-force --no-training --no-scan-layers --check --gradients"
APART += " --no-timestamps --pairs"
LIMITS = "1024 30.0 256 100000 1000000 16 16 64 0.005"
# What a call without these flags passes on, if it is not the default of the parameter
DEFAULTS: dict[str, dict[str, Any]] = {
    "translate": {"load.settings.tokens_per_batch": 4096, "stream.window_size": 8192},
    "evaluate": {"evaluate.bootstrap": 1000},
    "serve": {"bind.host": "127.0.0.1", "bind.port": 8000}
    | {
        f"Service.limits.{field.name}": ast.literal_eval(value)
        for field, value in zip(dataclasses.fields(Limits), LIMITS.split(), strict=True)
    },
    "golden": {"create_golden.seed": 0, "create_golden.weights": "auto"},
}
MADE = {"evaluate.overrides", "Service.allowed_hosts", "Service.title", "Service.limits"}


class Record(dict[str, Any]):
    """Arguments of the functions that are called, by function, parameter and field."""

    def __init__(self, patch: pytest.MonkeyPatch):
        super().__init__()
        self.patch = patch
        self.called: set[str] = set()
        self.unlike: set[str] = set()
        """Those that are not the default of their parameter."""

    def watch(self, owner: Any, name: str, result: Any = None, title: str = "") -> None:
        """Replace a function with one that returns ``result``."""
        signature = inspect.signature(getattr(owner, name))

        def called(*positional: Any, **named: Any) -> Any:
            where = (title or name) + "2" * ((title or name) in self.called)
            self.called.add(where)
            self.update({where: True} if where in ("convert", "training") else {})
            for key, value in signature.bind(*positional, **named).arguments.items():
                self.add(f"{where}.{key}", value)
                if signature.parameters[key].default not in (inspect.Parameter.empty, value):
                    self.unlike.add(f"{where}.{key}")
            return result

        self.patch.setattr(owner, name, called)

    def add(self, key: str, value: Any) -> None:
        if isinstance(value, tuple | list):
            value = dict(enumerate(value))
        elif dataclasses.is_dataclass(value):
            value = vars(value)
        if isinstance(value, Mapping):
            for name, each in value.items():
                self.add(f"{key}.{name}", each)
        elif value is None or isinstance(value, str | int | float):
            self[key] = value


@pytest.fixture
def record(monkeypatch, tmp_path) -> Record:
    """A record of what the commands call, which does nothing else; the folder is empty."""
    record = Record(monkeypatch)
    for name in "s t".split():
        (tmp_path / name).touch()
    (tmp_path / "lines").write_text("filed\nlines\n")
    monkeypatch.chdir(tmp_path)
    report = Stub(agrees=True, lines=lambda: ["a"], to_data=dict, summary=str)
    report.to_page = lambda title: "page"
    phrase = Stub(text="b", start=0.0, end=3661.25, _asdict=dict)
    described = Stub(config=helpers.tiny("lesson10"))

    class Model:
        """A translator, a transcriber, and a planned conversion."""

        model, generation_config = described, GenerationConfig(num_beams=2)
        config = Stub(timestamps=False)
        plan = preset_sizes = None

        def __call__(self, *source: Any, **options: Any) -> Any:
            record.add("call", {"source": source, **options})
            return Stub(text="b", language="de", segments=[phrase])

        def stream(self, windows: Any, window_size: int, **options: Any) -> Iterator[list[Any]]:
            record.add("stream", {"windows": [*windows], "window_size": window_size, **options})
            several = [translation.Hypothesis("a", np.zeros(0), 0.5)] * 2
            yield [translation.Line(0, "a", [], False, several)]

        def refuse(self) -> None:
            record["refuse"] = True

    opened, golden = Stub(path="m", step=3), Stub(versions={"torch": 1}, arrays=[], seed=0)
    for owner, calls in {
        registry: {"open": opened, "inspect": report},
        architectures: {"load_from": None},
        translation: {"load": Model()},
        Translator: {"from_opened": Model()},
        transcription.Transcriber: {"load": Model()},
        attention_page: {"write": None},
        evaluation: {"evaluate": ({"bleu": 1}, ["a"]), "readable": ["a"]},
        app: {"bind": None, "hosts": ("h",), "Service": None, "serve": None},
        planning: {"prepare": Model()},
        conversion: {"convert": report, "Planned": report},
        training_states: {"convert": report},
        from_files: {"compare_files": [("title", report)], "create_golden": golden},
        atomic: {"check_output": None},
        arguments: {"show": None},
    }.items():
        for name, result in calls.items():
            record.watch(owner, name, result, "training" * (owner is training_states))
    monkeypatch.setattr(process, "use_program_cache", lambda *_: None)
    monkeypatch.setattr(process, "keep_freed_memory", lambda *_: None)
    enabled = jax.enable_x64
    monkeypatch.setattr(jax, "enable_x64", lambda on: record.update(x64=on) or enabled(on))
    return record


def recorded(
    console: runs.Console, record: Record, command: str, words: list[str]
) -> dict[str, Any]:
    """The record of a command that ended well, with its output and the files that it wrote."""
    record.clear(), record.called.clear()
    before = set(Path().iterdir())
    code, out, err = console.say(command, *words, stdin=b"from\nstdin\n")
    assert code == 0, err
    new = set(Path().iterdir()) - before
    files = " ".join(path.name for path in new)
    for path in new:
        path.unlink()
    return {**record, "out": out, "files": files}


@pytest.mark.parametrize("command", TABLE)
def test_each_flag_changes_what_it_names_and_nothing_else(console, record, command):
    call, table = TABLE[command]
    rows = [re.split(r"\s\s+", line) for line in table.strip().splitlines() if line.strip()]
    expected = {*cli.flags(cli.COMMANDS[command].kind)} - {*APART.split()}
    assert {words.split()[0] for words, _ in rows} == expected
    before = recorded(console, record, command, call.split())
    defaults = DEFAULTS.get(command, {})
    assert defaults.items() <= before.items() and record.unlike <= {*MADE, *defaults}
    for words, effects in rows:
        after = recorded(
            console, record, command, runs.last_of_each([*call.split(), *words.split()])
        )
        changed = {
            key: after.get(key)
            for key in before.keys() | after.keys()
            if before.get(key) != after.get(key)
        }
        for effect in effects.split():
            key, _, value = effect.partition("=")
            if effect != "~":
                value = value or (words.split()[-1] if key != "out" else "")
                actual = changed.pop(key, "nothing")
                assert not value or str(actual) == value, (words, effect, actual)
        assert not changed or effects.endswith("~"), (words, changed)


def test_the_help_of_decoding_says_the_defaults_of_its_settings():
    settings, count = vars(GenerationConfig()) | vars(Constraints()), 0
    for name, text in [*docstrings(SearchOptions).items(), *docstrings(SamplingOptions).items()]:
        default = settings[ALIASES.get(name, name)]
        for word in re.findall(r"default: ([\d.]+|heuristic)", text):
            count += 1
            assert word == (f"{default:g}" if isinstance(default, int | float) else default), name
        neutral = re.search(r"\((\d): off\)", text)
        assert neutral is None or int(neutral[1]) == default
    assert count == 7


def test_training_reads_each_of_its_options():
    package = Path(jax_transformer.__file__).parent
    code = "".join(
        path.read_text("utf-8")
        for path in package.rglob("*.py")
        if path.name not in ("options.py", "command.py") and path.parent.name != "cli"
    )
    names = {each.path[-1] for each in arguments.listed(TrainOptions)}
    assert len(names) > 60 and not [n for n in names if not re.search(rf"\.{n}\b|\b{n}=", code)]
