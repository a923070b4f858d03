"""The command line: its output, its exit codes, and its errors, one line without a traceback."""

import ast
import dataclasses
import errno
import fnmatch
import gc
import inspect
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import jax
import pytest

import jax_transformer
from jax_transformer import cli, errors
from jax_transformer.cli import completion, config_file
from jax_transformer.cli.arguments import Command, listed
from jax_transformer.cli.help_text import is_rare, metavar
from jax_transformer.config.option import Option
from jax_transformer.runtime import distributed, process
from jax_transformer.training import options
from parity_tests.unit import helpers, runs

_FROZEN = tomllib.loads(Path(__file__).with_name("flags.toml").read_text(encoding="utf-8"))
FLAGS, FLAGS_0_1 = (
    {command: flags.split() for command, flags in _FROZEN[version].items()}
    for version in ("today", "0.1")
)
FLAGS["estimate"] = [
    *"--topology --length --device-memory --pairs --pair-tokens --json --no-json".split(),
    *(flag for flag in FLAGS["train"] if not flag.startswith("--distributed.")),
]

pytestmark = pytest.mark.usefixtures("as_a_user")


# Help, version and imports


def documented(module) -> dict[str, str]:
    """The text under every field of the dataclasses of a module, by class and field."""
    texts = {}
    for item in ast.parse(inspect.getsource(module)).body:
        for field, text in itertools.pairwise(item.body if isinstance(item, ast.ClassDef) else []):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[f"{item.name}.{field.target.id}"] = " ".join(text.value.value.split())
    return texts


@pytest.mark.parametrize("command", FLAGS)
def test_help_lists_every_flag_with_its_meaning(console, command):
    assert cli.flags(cli.COMMANDS[command].kind) == FLAGS[command]
    code, out, err = console.say(command, "--help")
    assert (code, err) == (0, "")
    printed = " ".join(out.split())
    positive = [f for f in FLAGS[command] if not f.startswith("--no-") and ".no-" not in f]
    positive += ["--no-repeat-ngram-size"] if "--no-repeat-ngram-size" in FLAGS[command] else []
    positive_only = printed.replace("--[no-]", "--")
    assert not [flag for flag in positive if f"{flag} " not in positive_only]
    printed = " ".join(console.say(command, "--help-all")[1].split())
    known = listed(cli.COMMANDS[command].kind)
    owners = {base for each in known for base in each.owner.__mro__[:-1]}  # without object
    meanings: dict[str, str] = {}
    for owner in owners:
        texts = documented(sys.modules[owner.__module__])
        meanings |= {k: x for k, x in texts.items() if k.startswith(f"{owner.__name__}.")}
    assert len(meanings) >= len(positive)
    assert not [text for text in meanings.values() if text.rstrip(".)") not in printed]


@pytest.mark.parametrize("command", FLAGS)
def test_help_fits_two_screens_and_names_the_kind_of_every_value(console, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    lines = console.say(command, "--help")[1].splitlines()
    assert len(lines) <= 92 and max(map(len, lines)) <= 100
    known = list(listed(cli.COMMANDS[command].kind))
    assert ("--help-all explains" in "\n".join(lines)) == any(map(is_rare, known))
    patterns = {word for each in known for word in str(each.option.rare).split()}
    patterns -= {"True", "False"}
    names = [each.name for each in known]
    assert not [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    assert f"  jax-transformer {command} " in "\n".join(lines[lines.index("examples:") :])
    metavars = {metavar(each) for each in known}
    assert not metavars & {"TEXT", "STR", "INT"} and not [m for m in metavars if "None" in m]
    assert not [line for line in lines if line.endswith(":") and line.startswith("other options")]


@pytest.mark.parametrize("command", FLAGS_0_1)
def test_flags_of_version_0_1_still_work(command):
    known = listed(cli.COMMANDS[command].kind)
    accepted = {flag for each in known for flag in (*each.flags, *each.former)}
    assert not set(FLAGS_0_1[command]) - accepted


def test_help_shows_values_as_they_are_typed(console):
    assert "{cosine,inverse_sqrt,linear,constant}" in console.say("train", "--help")[1]
    words = ["--optimizer.schedule=inverse_sqrt", "--eval_every", "7"]  # or with a dash
    parsed = cli.parse("train", options.TrainOptions, words)
    assert (parsed.optimizer.schedule, parsed.eval_every) == ("inverse_sqrt", 7)


def test_no_command_lists_the_commands_by_what_they_say(console):
    for arguments, code in (((), 2), (("--help",), 0), (("-h",), 0)):
        exit_code, out, err = console.say(*arguments)
        assert exit_code == code
        for name, command in cli.COMMANDS.items():
            about = (command.kind.__doc__ or "").splitlines()[0]
            assert f"  {name:10} {about}" in (out + err).splitlines()


@pytest.mark.parametrize("name", ["inspect", "translate"])
def test_garbage_is_collected_after_the_start(monkeypatch, name):
    """At once, unless the command says when: ``translate`` does after its first batch."""
    seen = []

    def run(options):
        seen.append(gc.isenabled())
        process.started()
        seen.append(gc.isenabled())
        return 0

    command = dataclasses.replace(cli.COMMANDS[name], run=run)
    monkeypatch.setattr(f"jax_transformer.cli.{name}.COMMAND", command)
    process.start()
    try:
        words = {"inspect": ["a"], "translate": ["--run", "a"]}[name]
        assert cli.main([name, *words]) == 0
        assert seen == [name == "inspect", True]
    finally:
        gc.enable()


def test_a_command_that_cannot_be_loaded_is_a_line_on_stderr(console, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    runs.install(tmp_path, cli.ENTRY_POINTS, mine="no_such_module:COMMAND")
    code, out, err = console.say("--help")
    assert code == 0 and err.startswith("skipped an installed command: ") and err.count("\n") == 1
    assert "no_such_module" in err and not [n for n in FLAGS if f"\n  {n} " not in out]
    assert "skipped" not in out and "mine" not in out


def test_help_of_a_command(console):
    assert console.say("help") == console.say("--help")
    assert console.say("help", "inspect") == console.say("inspect", "--help")
    console.refused(2, ["unknown command 'inspct'", "did you mean 'inspect'?"], "help", "inspct")


@dataclass(frozen=True)
class Sizes:
    """A section with an option of its own."""

    width: Annotated[int, Option(metavar="N", synonyms="d_model hidden_size shade")] = 8
    """Width of the model."""


@dataclass(frozen=True)
class Tones:
    """A section that only --help-all explains."""

    depth: Annotated[int, Option(metavar="N")] = 2
    """Number of tones."""


@dataclass(frozen=True)
class Added:
    """Try an option that nothing lists."""

    config: Annotated[str | None, Option(metavar="PATH", group="files")] = None
    """YAML file of options."""
    num_colors: Annotated[int, Option(flag="colors", group="look", synonyms="palette_size")] = 3
    """Number of colours."""
    shade: Annotated[tuple[str, ...], Option(metavar="SHADE", rare=True)] = ()
    """Shades to leave out."""
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    tones: Annotated[Tones, Option(rare=True)] = dataclasses.field(default_factory=Tones)

    @classmethod
    def from_file(cls, path: str) -> "Added":
        """Return the options of a file."""
        return config_file.read(cls, path)


def test_an_option_is_one_field(console, monkeypatch, tmp_path):
    """In help, command line, YAML file, suggestions and completion."""
    seen = []
    added = Command(Added, lambda options: seen.append(options) or 0, ("train",))
    known = {"train": added, "completion": completion.COMMAND}
    monkeypatch.setattr(type(cli.COMMANDS), "__getitem__", lambda _, name: known.get(name, added))
    out = " ".join(console.say("train", "--help")[1].split())
    assert "look: --colors N Number of colours (default: 3) " in out
    assert "sizes: --sizes.width N Width of the model (default: 8) " in out
    assert "more options (--help-all explains them): --shade --tones.depth examples:" in out
    assert "  --shade SHADE ..." in console.say("train", "--help-all")[1]
    file = tmp_path / "options.yaml"
    file.write_text("{sizes: {width: 5}, shade: [dark]}")
    runs.main("train", "--colors", 4, "--shade", "a", "b", "--sizes.width=6")
    runs.main("train", "--num_colors", 7, "--config", file)
    assert seen == [Added(None, 4, ("a", "b"), Sizes(6)), Added(str(file), 7, ("dark",), Sizes(5))]
    console.refused(2, ["--palette-size (did you mean '--colors'?)"], "train", "--palette-size", 1)
    console.refused(2, ["--look.shade (did you mean '--shade'?)"], "train", "--look.shade", 1)
    file.write_text("hidden_size: 5")
    console.refused(2, ["(did you mean 'sizes.width'?)"], "train", "--config", file)
    assert "--sizes.width" in console.say("completion", "bash")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_options_and_choices(console, shell):
    code, out, err = console.say("completion", shell)
    assert (code, err) == (0, "")
    words = ["translate", "optimizer.schedule", "inverse_sqrt"]
    assert not [word for word in words if word not in out]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tr", ["train", "transcribe", "translate"]),
        ("translate --be", ["--beam"]),
        ("train --optimizer.schedule ", ["constant", "cosine", "inverse_sqrt", "linear"]),
        ("convert my", ["my file.pt", "my-run"]),
        ("translate --run my-", ["my-run"]),
        ("help transl", ["translate"]),
    ],
)
def test_bash_completes(console, tmp_path, words, expected):
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my file.pt").touch()
    script = console.say("completion", "bash")[1] + (
        'COMP_WORDS=(jax-transformer "$@"); COMP_CWORD=$#; _shtab_jax_transformer\n'
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "--norc", "-c", script, "bash", *words.split(" ")]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (sorted(answer.stdout.splitlines()), answer.stderr) == (expected, "")


def test_a_completion_needs_its_package_and_a_known_shell(console, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    console.refused(2, ["pip install shtab"], "completion", "bash")
    console.refused(2, ["did you mean 'fish'?"], "completion", "fihs")


def test_flags_have_the_names_of_transformers_as_well():
    short, long = (
        cli.parse("translate", cli.COMMANDS["translate"].kind, ["--run", "a", *words.split()])
        for words in ("--beam 4 --n-best 2", "--num-beams 4 --num_return_sequences=2")
    )
    assert short == long and (short.search.num_beams, short.num_return_sequences) == (4, 2)


def test_a_flag_may_be_repeated_with_its_value():
    kind = cli.COMMANDS["translate"].kind
    words = "--run a --run a --temperature 1e-1 --temperature=0.1 --beam 4 --num-beams 4 --sample"
    words += " --sample --ensemble a --ensemble b --ensemble a"  # which is Repeatable
    begins_with_a_dash = ["--length-penalty", "-.5", "--input", "-my file"]
    options = cli.parse("translate", kind, [*words.split(), *begins_with_a_dash])
    assert (options.search.length_penalty, options.input) == (-0.5, "-my file")
    assert (options.run, options.ensemble) == ("a", ("a", "b", "a"))
    assert (options.sampling.temperature, options.search.num_beams) == (0.1, 4)
    unset = cli.parse("translate", kind, ["--run", "None", "--beam", "None", "--precision=None"])
    assert (unset.run, unset.search.num_beams, unset.precision) == ("None", None, None)


def test_debug_shows_the_traceback():
    with pytest.raises(jax_transformer.errors.ConfigError):
        runs.main("train", "--steps", "0", "--debug")


def finished(*arguments: str | Path, stdin: str = "", **options) -> tuple[int, str, str]:
    process = runs.start(*arguments, **options)
    out, err = process.communicate(stdin, timeout=120)
    return process.returncode, out, err


def raising(error: BaseException):
    """A function that raises this error."""

    def run(_):
        raise error

    return run


@pytest.mark.parametrize(
    ("full", "command", "expected"),
    [
        ("1", "--version", (3, "", "jax-transformer: standard output: No space left on device\n")),
        ("2", "--version", (0, f"jax-transformer {jax_transformer.__version__}\n", "")),
        ("2", "none", (2, "jax-transformer: unknown command 'none'", "")),
        ("1 2", "none", (2, "", "")),
    ],
)
def test_a_standard_stream_on_a_full_disk_is_named_and_changes_no_other_exit_code(
    full, command, expected
):
    """The error goes to the stream that can be written, if a log has filled the disk."""
    redirected = " ".join(f"{number}>/dev/full" for number in full.split())
    shell = ["sh", "-c", f'"$0" -m jax_transformer {command} {redirected}', sys.executable]
    done = subprocess.run(shell, env=runs.environment(), capture_output=True, text=True, timeout=60)
    _, out, err = expected
    assert (done.returncode, done.stdout[: len(out)], done.stderr[: len(err)]) == expected
    assert bool(done.stdout) is bool(out) and bool(done.stderr) is bool(err)


def test_progress_on_a_full_disk_ends_a_command_with_its_message(monkeypatch, capsys):
    full = SimpleNamespace(**dict.fromkeys(("write", "flush"), helpers.failing(errno.ENOSPC)))
    monkeypatch.setattr(sys, "stderr", full)
    monkeypatch.setattr(cli, "_run", lambda _: print("step 1", file=sys.stderr))
    assert cli.main(["inspect"]) == 3
    message = "jax-transformer: standard error: No space left on device\n"
    assert capsys.readouterr().out == message


def test_an_error_of_the_system_that_is_a_value_error_too_is_one_line(console, monkeypatch):
    monkeypatch.setattr(cli, "_run", raising(io.UnsupportedOperation("fileno")))
    assert console.say("inspect") == (3, "", "jax-transformer: input or output: fileno\n")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9.00 GiB"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nMore"),
    ],
)
def test_a_lack_of_memory_is_one_line(console, monkeypatch, error):
    monkeypatch.setattr(cli, "_run", raising(error))
    reason = str(error).splitlines()[0]
    console.refused(2, [f"out of memory ({reason}): smaller batches need less"], "train")


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_an_error_that_nothing_raises_on_purpose_has_its_traceback(kind, monkeypatch):
    monkeypatch.setattr(cli, "_run", raising(kind("INTERNAL: broken")))
    with pytest.raises(kind, match="broken"):
        runs.main("train")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("KeyboardInterrupt: ")])
def test_an_interrupted_command_ends_with_one_line(console, monkeypatch, error):
    """Also if jaxlib makes another error of it."""
    monkeypatch.setattr(cli, "_run", raising(error))
    assert console.say("train") == (130, "", "jax-transformer: stopped at once\n")


def test_a_model_that_is_larger_than_the_memory_is_refused(console, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = runs.write_text(tmp_path)
    options = runs.with_option(runs.OPTIONS, "--model.d-ff", 10**12)
    command = ["train", *flags, *options, "--run", "run"]
    console.refused(2, ["the weights and the optimizer state take", "GiB of cpu"], *command)
    assert not (tmp_path / "run/config.json").exists()


def test_an_error_exits_although_a_thread_waits():
    """A failed save can leave threads of Orbax waiting. What was printed before is not lost."""
    code = (
        "import threading; threading.Thread(target=threading.Event().wait).start(); "
        "from jax_transformer import cli; print('before'); cli.process('nope')"
    )
    done = runs.python("-c", code)
    assert (done.returncode, done.stdout) == (2, "before\n")
    assert "unknown command 'nope'" in done.stderr


def test_the_module_and_train_py_run_the_command(tmp_path):
    assert finished("--version") == (0, f"jax-transformer {jax_transformer.__version__}\n", "")
    module = finished("train", "--help")
    script = finished("--help", program=(str(runs.ROOT / "train.py"),), cwd=tmp_path)
    assert module == script and module[0] == 0 and "--optimizer.learning-rate" in module[1]
    assert finished("--steps", "0", program=(str(runs.ROOT / "train.py"),))[0] == 2


# Refusals before anything starts


def test_invalid_options_are_refused(console, tmp_path, monkeypatch):
    """Each in the words of ``refusals.txt``; nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    expected = Path(__file__).with_name("refusals.txt")
    assert console.session(expected).splitlines() == expected.read_text("utf-8").splitlines()
    assert list(tmp_path.iterdir()) == []


def test_unreadable_text_is_named(console, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = runs.write_text(tmp_path)
    source, target = tmp_path / "train.source", tmp_path / "train.target"
    command, good = ["train", *flags, *runs.OPTIONS], source.read_bytes()
    for content, words in (
        (good.replace(b"\n", b"\n\xff", 1), ["line 2", "UTF-8", "0xff"]),
        (good + b"one more\n", ["61 lines", "60", target]),
        (b"", ["empty"]),
        (target.read_bytes(), [target, "same content"]),
        (b"\x1f\x8bnot gzip", ["gzip"]),
    ):
        source.write_bytes(content)
        console.refused(3, [source, *words], *command)
    source.write_bytes(good)
    options = runs.with_option(runs.OPTIONS, "--model.max-length", 1)
    console.refused(3, ["max_length=1"], "train", *flags, *options)
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_created_over_something_else(console, tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo.jpg").write_text("mine")
    command = ["train", *runs.write_text(tmp_path), *runs.OPTIONS, "--run"]
    for name in ("file", "folder", "file/run"):
        console.refused(2, [tmp_path / name], *command, tmp_path / name)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["photo.jpg"]


# Every refusal has the exit code that docs/exit-codes.md names

CODES = {
    errors.DifferentError: 1,
    errors.ConfigError: 2,
    errors.InputError: 3,
    errors.UnsafeFileError: 4,
    errors.CheckpointError: 5,
    errors.NonFiniteLossError: 6,
    errors.LockedError: 7,
    errors.LostProcessError: 8,
    errors.Preempted: 75,
}


def test_every_refusal_is_listed_and_documented():
    subclasses = errors.Refusal.__subclasses__()
    own = {kind for kind in subclasses if kind.__module__ == errors.__name__}
    # ReportedError has the code of the error that another process reports
    assert own - {errors.ReportedError} == CODES.keys()
    page = (runs.ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)}
    assert documented == {0, 130, *CODES.values()}


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_a_refusal_ends_the_command_with_its_code_and_one_line(kind, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_run", raising(kind("what is wrong")))
    assert cli.main(["translate"]) == CODES[kind]
    assert capsys.readouterr() == ("", "jax-transformer: what is wrong\n")


def test_a_message_is_printable_and_bounded():
    for text, shown in (("é" * 2000, "é" * 2000), ("é" * 2001, "é" * 1997 + "...")):
        assert str(errors.InputError(text)) == shown
    for text, shown in (("a\x1b\u202e\n", r"a\x1b\u202e\n"), ("a\x1b[1m", r"a\x1b[1m")):
        assert str(errors.InputError(text)) == shown


def test_programs_are_kept_in_the_user_s_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    own = tmp_path / "cache" / "jax_transformer" / "compiled"
    try:
        for current, folder, expected in (
            (None, None, own),
            (None, str(tmp_path), tmp_path),
            ("set", str(tmp_path), tmp_path),
            ("set", None, None),
            ("set", "none", None),
        ):
            jax.config.update(names[0], current)
            process.use_program_cache(folder)
            actual = getattr(jax.config, names[0])
            assert actual == current or Path(actual).parent == expected
            assert (actual == current) == (expected is None)
            assert expected is None or re.fullmatch(r"[\w-]+-[0-9a-f]{8}", Path(actual).name)
    finally:
        for name, setting in zip(names, before, strict=True):
            jax.config.update(name, setting)


def test_a_cache_that_cannot_be_written_is_one_line_and_another_that_was_named_a_refusal(
    monkeypatch, tmp_path, capsys
):
    def read_only(dir):
        raise OSError(errno.EROFS, "Read-only file system", str(dir))

    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    monkeypatch.setattr(jax.config, "update", lambda *_: pytest.fail("a cache was set"))
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None)
    for cache, reason in ((file, "Not a directory"), (tmp_path, "Read-only file system")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        process.use_program_cache()
        assert re.fullmatch(
            rf"compiled programs are not stored: {re.escape(str(cache))}/\S+: {reason}; "
            r"JAX_COMPILATION_CACHE_DIR can name another folder\n",
            capsys.readouterr().err,
        )
        with pytest.raises(OSError, match=reason):
            process.use_program_cache(str(cache))


def test_progress_goes_on_when_its_reader_has_gone(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        for number in range(3):
            distributed.say(f"step {number}")


def test_a_count_has_its_noun_in_the_right_number():
    assert [errors.counted(n, "line") for n in (0, 1, 2000)] == ["0 lines", "1 line", "2,000 lines"]
