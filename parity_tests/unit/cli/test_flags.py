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
from jax_transformer.cli import arguments, help_text
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
from jax_transformer.parity import from_files
from jax_transformer.runtime import process
from jax_transformer.storage import atomic
from jax_transformer.training import evaluation
from jax_transformer.training.options import TrainOptions
from parity_tests.unit import helpers, runs

SEARCH = """--max-length=7 --beam=3 --length-penalty=0.5 --penalty=average --early-stopping=full
    --no-repeat-ngram-size=2 --encoder-no-repeat-ngram-size=2 --repetition-penalty=1.5
    --min-new-tokens=2"""
SAMPLING = "--sample --no-sample --temperature=0.5 --top-k=4 --top-p=0.5 --seed=4"
ENGINE = "--precision=bfloat16 --engine=ctranslate2 --quantization=int8"
LANGUAGES = "--source-lang=de --target-lang=fr"
SPEC = "; --architecture=a.py:B -> load_from.spec"
# Of each command: a call, and what each flag changes: the arguments of functions that are called,
# the output, or the files that are written. After a name with a colon, the argument, or its field,
# is named as the option; after an arrow come the changes, with a value if it is not the flag's.
TABLE = {
    "translate": f"""--run m; open: --weights=best; load: {ENGINE}
        ; load.settings: {SEARCH} {SAMPLING} {LANGUAGES} --tokens-per-batch=9 {SPEC}
        ; --n-best=2 -> load.settings.n_best out ~
        ; --precision=float64 -> load.precision x64=True; --run=n -> open.path
        ; --ensemble=o -> open2.path open2.weights=auto
        ; --ensemble=o --weights=best -> open.weights=best open2.path=o open2.weights=best
        ; --input=lines -> stream.windows.0.0=filed stream.windows.0.1=lines
        ; --output=o -> check_output.path=o files=o out; --too-long=cut -> stream.too_long
        ; --buffer=1 -> stream.window_size stream.windows.1.0=stdin ~
        ; --attention=p -> check_output.path=p write.path=p ~""",
    "evaluate": f"""--run m --source s --target t; evaluate.overrides: {SEARCH}
        ; evaluate: {ENGINE} --tokens-per-batch=9 --run=n --source=u --target=u --weights=best
          --bootstrap=7 --comet=c {SPEC}
        ; --precision=float64 -> evaluate.precision x64=True
        ; --source-field=f -> evaluate.fields.0; --target-field=f -> evaluate.fields.1
        ; --source-lang=de -> evaluate.languages.0; --target-lang=fr -> evaluate.languages.1
        ; --reference=r -> evaluate.references.0; --ensemble=o -> evaluate.ensemble.0
        ; --hypotheses=h -> check_output.path files; --json -> out ~""",
    "serve": f"""m; open: --weights=best; load.settings: {LANGUAGES} {SEARCH} {SAMPLING} {SPEC}
        ; Service.limits: --timeout=9.0 --max-lines=2 --max-characters=5 --max-body-bytes=5
          --max-beam=5 --max-configs=0 --batch-rows=2 --batch-wait=0.0
        ; --queue-size=64 -> Service.limits.queue_size Service.limits.max_lines=64
        ; --host=0.0.0.0 -> bind.host hosts.host; --port=80 -> bind.port
        ; --allowed-hosts=a.b -> Service.allowed_hosts.0 hosts.host=None ~""",
    "convert": f"""a b; prepare.request: --to=hf --dtype=float16 --weights=best --key=k --force
          --shard-size=5MB --scan-layers --param-scan-axis=2 --quantization=int8 --no-check
        ; prepare.request.description: --config=c --preset=p
        ; --set=num_heads=4 -> prepare.request.description.changes.num_heads=4
        ; prepare.request.names: --strip-prefix=p {SPEC}
        ; --ignore=x -> prepare.request.names.ignore.0
        ; --rename=a=1e3 -> prepare.request.names.rename.a=1e3
        ; --training -> training.request.source=a convert=None ~
        ; --dry-run -> refuse=True convert=None ~; --json -> show.as_json=True""",
    "inspect": "a; --json -> show.as_json=True",
    "parity": f"""a b; compare_files.description: --config=c --preset=p {SPEC}
        ; --set=num_heads=4 -> compare_files.description.changes.num_heads=4
        ; compare_files: --weights=best --dtype=float16 --no-gradients --seed=3 --steps=2
        ; --lengths=1,7 -> compare_files.lengths.0=1 compare_files.lengths.1=7
        ; --html=h -> check_output.path files; --json -> out
        ; --junit=j -> check_output.path files""",
    "golden": f"""make f m; create_golden: --weights=best --python=p {SPEC}
        ; --batch=b -> create_golden.batch_file; --seed=3 -> create_golden.seed""",
    "transcribe": """a --run m; load: --weights=best --precision=bfloat16
        ; call: --language=de --task=translate; --run=n -> load.path
        ; --precision=float64 -> load.precision x64=True; --beam=3 -> load.options.beam
        ; --timestamps -> call.timestamps=True out; --json -> call.timestamps=True out ~
        ; --output=o -> check_output.path files out""",
}


def rows(command: str) -> Iterator[tuple[list[str], list[str]]]:
    """Flags of a row of the table, and its changes."""
    known = {
        flag: each for each in arguments.listed(cli.COMMANDS[command].kind) for flag in each.flags
    }
    for part in TABLE[command].split(";")[1:]:
        words, _, changes = part.partition(" -> ")
        prefix, *flags = words.split() if ": " in words else ("", *words.split())
        if changes:
            yield flags, changes.split()
        for word in flags if not changes else ():
            flag, equals, value = word.partition("=")
            name = f"{prefix[:-1]}.{known[flag].path[-1]}"
            yield [word], [f"{name}={value if equals else flag == known[flag].flags[0]}"]


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
    report = Stub(agrees=True, lines=lambda: ["a"], to_data=dict, summary=str, coverage=None)
    report.to_page, report.entries = lambda title: "page", ()
    phrase = Stub(text="b", start=0.0, end=3661.25, _asdict=dict)
    described = Stub(config=helpers.tiny("lesson10"))

    class Model:
        """A translator, a transcriber, and a planned conversion."""

        model, generation_config = described, GenerationConfig(num_beams=2)
        config = Stub(timestamps=False)

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
        transcription.Transcriber: {"load": Model()},
        attention_page: {"write": None},
        evaluation: {"evaluate": ({"bleu": 1}, ["a"]), "readable": ["a"]},
        app: {"bind": None, "hosts": ("h",), "Service": None, "serve": None},
        planning: {"prepare": Model()},
        conversion: {"convert": report},
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
    assert "--json" not in words or out.count("\n") < 2
    new = set(Path().iterdir()) - before
    files = " ".join(path.name for path in new)
    for path in new:
        path.unlink()
    return {**record, "out": out, "files": files}


@pytest.mark.parametrize("command", TABLE)
def test_each_flag_changes_what_it_names_and_nothing_else(console, record, command):
    call = TABLE[command].partition(";")[0].split()
    expected = {*cli.flags(cli.COMMANDS[command].kind)} - {*APART.split()}
    assert {words[0].partition("=")[0] for words, _ in rows(command)} == expected
    before, defaults = recorded(console, record, command, call), DEFAULTS.get(command, {})
    assert defaults.items() <= before.items() and record.unlike <= {*MADE, *defaults}
    for words, effects in rows(command):
        split = [part for word in words for part in word.split("=", 1)]
        after = recorded(console, record, command, runs.last_of_each([*call, *split]))
        changed = {
            key: after.get(key)
            for key in before.keys() | after.keys()
            if before.get(key) != after.get(key)
        }
        for effect in {*effects} - {"~"}:
            key, _, value = effect.partition("=")
            value = value or (split[-1] if key != "out" else "")
            actual = changed.pop(key, "nothing")
            assert not value or str(actual) == value, (words, effect, actual)
        assert not changed or "~" in effects, (words, changed)


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


def test_the_help_of_an_option_says_one_default():
    for command in cli.COMMANDS.values():
        for argument in arguments.listed(command.kind):
            assert help_text._text(argument).count("default: ") <= 1, argument.name


def test_training_reads_each_of_its_options():
    package = Path(jax_transformer.__file__).parent
    code = "".join(
        path.read_text("utf-8")
        for path in package.rglob("*.py")
        if path.name not in ("options.py", "command.py") and path.parent.name != "cli"
    )
    names = {each.path[-1] for each in arguments.listed(TrainOptions)}
    assert len(names) > 60 and not [n for n in names if not re.search(rf"\.{n}\b|\b{n}=", code)]
