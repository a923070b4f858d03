"""The command line: what it prints where, its exit codes, and its refusals, each one line without a traceback."""

import ast
import contextlib
import gzip
import inspect
import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import jax_transformer
from jax_transformer import cli, commands, translation
from jax_transformer.training import data_options, options
from parity_tests.unit import runs

TRAIN_FLAGS = """
--config --run --init --resume --steps --seed --log-every --eval-every --eval-pairs --samples --keep --keep-best --best-by --patience
--average --average-of --devices --tensorboard --no-tensorboard --wandb --compilation-cache
--model.preset --model.d-model --model.num-heads --model.d-ff --model.encoder-layers --model.decoder-layers --model.max-length
--model.dropout --model.attention-dropout --model.activation-dropout --model.embedding-dropout --model.norm-placement --model.tying
--model.precision
--data.train-source --data.train-target --data.valid-source --data.valid-target --data.train --data.valid --data.dataset
--data.dataset-config --data.train-split --data.valid-split --data.source-field --data.target-field --data.vocabularies --data.vocab-size
--data.tokenizer --data.target-tokenizer --data.source-lang --data.target-lang --data.max-source-length
--data.max-target-length --data.too-long --data.tokens-per-batch --data.buckets
--optimizer.learning-rate --optimizer.schedule --optimizer.warmup-steps --optimizer.beta1 --optimizer.beta2 --optimizer.epsilon
--optimizer.weight-decay --optimizer.clip-norm --optimizer.label-smoothing --optimizer.accumulate --optimizer.ema
""".split()
FLAGS = {
    "train": TRAIN_FLAGS,
    "translate": """--run --weights --source-lang --target-lang --input --output --attention --max-length --beam --length-penalty --penalty
        --early-stopping --no-repeat-ngram-size --repetition-penalty --min-new-tokens --n-best --sample --no-sample --temperature --top-k --top-p
        --seed""".split(),
    "evaluate": """--run --source --target --weights --source-lang --target-lang --max-length --beam --length-penalty --penalty
        --early-stopping --no-repeat-ngram-size --repetition-penalty --min-new-tokens --bootstrap --hypotheses --json --no-json""".split(),
    "convert": """--to --config --preset --set --dtype --weights --key --strip-prefix --training --no-training --dry-run --no-dry-run
        --force --no-force --shard-size --check --no-check --json --no-json""".split(),
    "inspect": ["--json", "--no-json"],
}
LINES = ["the cat", "a red dog sees the small bird", "", "house", "the cat and the dog", "a", "bird"]


@pytest.fixture(scope="module", autouse=True)
def _as_a_user(tmp_path_factory):
    with runs.as_a_user(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="module")
def run(_as_a_user, tmp_path_factory) -> Path:
    """A trained run, to read."""
    return runs.trained(tmp_path_factory.getbasetemp()).path


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """A small .safetensors file."""
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    safetensors.numpy.save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float16)}, path)
    return path


@pytest.fixture
def console(capsys, monkeypatch) -> runs.Console:
    return runs.Console(capsys, monkeypatch)


# Help, version and what is loaded


def documented(module) -> dict[str, str]:
    """The text under every field of the dataclasses of a module, by class and field."""
    texts = {}
    for item in ast.parse(inspect.getsource(module)).body:
        for field, text in zip(getattr(item, "body", []), getattr(item, "body", [])[1:], strict=False):
            if isinstance(item, ast.ClassDef) and isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                texts[f"{item.name}.{field.target.id}"] = " ".join(text.value.value.split())
    return texts


@pytest.mark.parametrize("command", FLAGS)
def test_help_lists_every_flag_with_its_meaning(console, command):
    assert cli.flags(cli.COMMANDS[command][0]) == FLAGS[command]
    code, out, err = console.say(command, "--help")
    assert (code, err) == (0, "")
    said = " ".join(out.replace("│", " ").split())
    assert not [flag for flag in FLAGS[command] if flag not in said]
    nested = ["TrainCommand.", "ModelOptions.", "DataOptions.", "OptimizerOptions."] if command == "train" else []
    texts = documented(commands) | documented(options) | documented(data_options)
    meanings = {name: text for name, text in texts.items() if name.startswith((f"{command.title()}Options.", *nested))}
    assert len(meanings) >= len([flag for flag in FLAGS[command] if not flag.startswith("--no-")])
    assert not [text for text in meanings.values() if text not in said]


def test_help_shows_values_as_they_are_typed(console):
    assert "{cosine,inverse_sqrt,constant}" in console.say("train", "--help")[1]
    assert cli.parse("train", options.TrainOptions, ["--optimizer.schedule", "inverse_sqrt"]).optimizer.schedule == "inverse_sqrt"


def test_no_command_shows_what_there_is(console):
    for arguments, code in (((), 2), (("--help",), 0), (("-h",), 0)):
        found, out, err = console.say(*arguments)
        assert found == code
        assert not [name for name in FLAGS if f"  {name} " not in out + err]


def test_the_version(console):
    assert console.say("--version") == (0, f"jax-transformer {jax_transformer.__version__}\n", "")


def test_underscores_are_dashes():
    words = ["--eval_every", "7", "--optimizer.learning_rate=0.5", "--data.train_source", "a_b", *"--data.train-target b".split()]
    given = cli.parse("train", options.TrainOptions, [*words, "--data.valid_source", "c", "--data.valid-target", "d"])
    assert (given.eval_every, given.optimizer.learning_rate, given.data.train_source) == (7, 0.5, ("a_b",))


def test_debug_shows_the_traceback():
    with pytest.raises(jax_transformer.errors.ConfigError):
        runs.main("train", "--steps", "0", "--debug")


def finished(*arguments: str | Path, stdin: str = "", **options) -> tuple[int, str, str]:
    process = runs.start(*arguments, **options)
    out, err = process.communicate(stdin, timeout=120)
    return process.returncode, out, err


LOADED = (
    "import sys; print(sorted({name.split('.')[0] for name in sys.modules} & {'jax', 'jaxlib', 'flax', 'optax', 'torch', 'transformers'}))"
)


def test_an_error_does_not_wait_for_threads_that_never_end():
    """A save that fails can leave some."""
    code = "import sys, threading; threading.Thread(target=threading.Event().wait).start(); from jax_transformer import cli; cli.process('nope')"
    done = subprocess.run([sys.executable, "-c", code], env=runs.environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "unknown command 'nope'" in done.stderr


def test_importing_the_package_loads_neither_jax_nor_torch():
    assert finished(program=("-c", f"import jax_transformer, jax_transformer.cli; {LOADED}")) == (0, "[]\n", "")


def test_help_and_inspect_do_not_wait_for_jax(weights):
    program = (
        "import contextlib, io\nfrom jax_transformer import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"    assert cli.main(['inspect', {str(weights)!r}]) == 0; cli.main(['train', '--help'])\n{LOADED}"
    )
    assert finished(program=("-c", program)) == (0, "[]\n", "")


def test_the_module_and_train_py_are_the_command(tmp_path):
    assert finished("--version") == (0, f"jax-transformer {jax_transformer.__version__}\n", "")
    module, script = finished("train", "--help"), finished("--help", program=(str(runs.ROOT / "train.py"),), cwd=tmp_path)
    assert module == script and module[0] == 0 and "--optimizer.learning-rate" in module[1]
    assert finished("--steps", "0", program=(str(runs.ROOT / "train.py"),))[0] == 2


# Refusals before anything starts


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("trian", ["trian", "did you mean 'train'?", "translate"]),
        ("train --stepz 3", ["--stepz", "did you mean '--steps'?"]),
        ("train --learning_rate 1", ["did you mean '--optimizer.learning-rate'?"]),
        ("train --d_model 16", ["did you mean '--model.d-model'?"]),
        ("train --steps x", ["--steps", "'x'"]),
        ("train --steps", ["--steps"]),
        ("train --steps 0", ["steps=0"]),
        ("train --keep 0", ["keep=0"]),
        ("train more", ["more"]),
        ("train --optimizer.beta2 1", ["optimizer.beta2=1.0"]),
        ("train --optimizer.schedule linear", ["--optimizer.schedule", "linear", "cosine"]),
        ("train --optimizer.learning-rate 0", ["optimizer.learning_rate=0.0"]),
        ("train --model.d-model 10 --model.num-heads 3", ["d_model=10", "num_heads=3"]),
        ("train --model.preset lesson1", ["lesson1", "did you mean 'lesson10'?"]),
        ("train --model.tying al", ["tying", "'al'", "all"]),
        ("train --model.dropout 1.5", ["dropout=1.5"]),
        ("train --data.vocab-size 100", ["vocab_size=100"]),
        ("train --data.train-source a --data.valid-source b", ["data.train_target", "data.valid_target"]),
        ("translate", ["--run"]),
        ("translate --run a --beam two", ["--beam", "two"]),
        ("translate --run a --sample --beam 4", ["sample", "beam=4"]),
        ("translate --run a --beam 2 --n-best 3", ["n_best=3", "beam=2"]),
        ("translate --run a --top-k 3", ["top_k=3", "sample"]),
        ("evaluate --run a --source b", ["--target"]),
        ("convert a", ["convert"]),
        ("inspect", ["inspect"]),
    ],
)
def test_what_cannot_be_meant_is_refused(console, tmp_path, monkeypatch, command, words):
    monkeypatch.chdir(tmp_path)
    console.refused(2, words, *command.split())
    assert list(tmp_path.iterdir()) == []


def test_text_that_cannot_be_read_is_named(console, tmp_path, monkeypatch):
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
    source.unlink()
    console.refused(3, [source], *command)
    source.mkdir()
    console.refused(3, [source], *command)
    source.rmdir()
    source.write_bytes(good)
    console.refused(3, ["max_length=1"], *command, "--model.max-length", "1")
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_made_where_something_else_is(console, tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "photo.jpg").write_text("mine")
    command = ["train", *runs.write_text(tmp_path), *runs.OPTIONS, "--run"]
    for name in ("file", "folder", "file/run"):
        console.refused(2, [tmp_path / name], *command, tmp_path / name)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["photo.jpg"]


# translate


def translated(console: runs.Console, run: Path, lines: list[str], *more: str) -> list[str]:
    code, out, _ = console.say("translate", "--run", run, *more, stdin="".join(line + "\n" for line in lines).encode())
    assert code == 0 and out.endswith("\n")
    return out.removesuffix("\n").split("\n")


def test_each_line_is_translated_in_its_place(console, run):
    found = translated(console, run, LINES)
    assert len(found) == len(LINES)
    assert [i for i, line in enumerate(found) if not line] == [2]
    assert len(set(found)) >= 4
    assert translated(console, run, LINES[::-1]) == found[::-1]


def test_ends_of_lines_do_not_matter(console, run):
    expected = "".join(line + "\n" for line in translated(console, run, LINES))
    text = "\n".join(LINES).encode()
    for stdin in (text, text.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + text + b"\n"):
        assert console.say("translate", "--run", run, stdin=stdin) == (0, expected, "")
    assert console.say("translate", "--run", run, stdin=b"\n\n") == (0, "\n\n", "")
    assert console.say("translate", "--run", run, stdin="the\u2028cat\x0b\x85".encode())[1].count("\n") == 1


def test_nothing_in_nothing_out(console, run):
    assert console.say("translate", "--run", run, stdin=b"") == (0, "", "")


def test_beam_search_by_its_flag(console, run):
    found = translated(console, run, LINES, "--beam", "2", "--length-penalty", "1")
    assert len(found) == len(LINES) and not found[2] and all(line for i, line in enumerate(found) if i != 2)
    console.refused(2, ["beam_size=0"], "translate", "--run", run, "--beam", "0", stdin=b"a\n")
    console.refused(2, ["length_penalty=-1"], "translate", "--run", run, "--beam", "2", "--length-penalty", "-1", stdin=b"a\n")


def test_n_best_lists_by_their_flag(console, run):
    best = translated(console, run, LINES[:3], "--beam", "3")
    found = [line.split(" ||| ") for line in translated(console, run, LINES[:3], "--beam", "3", "--n-best", "2")]
    assert [number for number, _, _ in found] == ["0", "0", "1", "1", "2"] and found[4][1:] == ["", "0.000000"]
    assert [text for _, text, _ in found[::2]] == best
    assert all(float(a[2]) >= float(b[2]) for a, b in (found[:2], found[2:4]))


def test_samples_by_their_flags(console, run):
    command = ["--sample", "--temperature", "3", "--top-k", "50", "--seed"]
    first, second = translated(console, run, LINES, *command, "1"), translated(console, run, LINES, *command, "2")
    assert len(first) == len(LINES) and not first[2] and first != second
    assert translated(console, run, LINES, *command, "1") == first
    assert translated(console, run, LINES[:4], *command, "1") == first[:4]
    assert translated(console, run, LINES, "--sample", "--top-k", "1") == translated(console, run, LINES)


def test_files_in_and_out(console, run, tmp_path):
    expected = "".join(line + "\n" for line in translated(console, run, LINES))
    text = "".join(line + "\n" for line in LINES).encode()
    for name, content in (("plain", text), ("packed.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(content)
        command = ["translate", "--run", run, "--input", tmp_path / name, "--output", tmp_path / "out"]
        assert console.say(*command) == (0, "", "")
        assert (tmp_path / "out").read_bytes().decode() == expected
    (tmp_path / "plain").write_bytes(text + b"cat " * 50 + b"\n")
    console.refused(3, [f"line {len(LINES) + 1}"], *command[:4], tmp_path / "plain", "--output", tmp_path / "out")
    assert (tmp_path / "out").read_bytes().decode() == expected and len(list(tmp_path.iterdir())) == 3
    console.refused(3, [tmp_path / "none"], *command[:4], tmp_path / "none")
    console.refused(2, [tmp_path / "none" / "out"], *command[:5], "--output", tmp_path / "none" / "out")


def test_translations_of_a_given_length(console, run):
    short = translated(console, run, LINES, "--max-length", "1")
    assert short != translated(console, run, LINES)
    console.refused(2, ["max_length=41"], "translate", "--run", run, "--max-length", "41", stdin=b"a\n")


def test_translations_are_utf8_and_of_one_line_each_wherever_they_go(run, monkeypatch):
    found = [[translation.Hypothesis(text, np.zeros(0, int), None)] for text in ("Straße\n3 €", "b")]
    monkeypatch.setattr(translation, "hypotheses", lambda *arguments, **options: found)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    assert runs.main("translate", "--run", run) == 0
    sys.stdout.flush()
    assert file.getvalue().decode() == "Straße 3 €\nb\n"


def test_lines_that_cannot_be_translated_are_named(console, run):
    command = ["translate", "--run", run]
    console.refused(3, ["line 3", "max_length=40"], *command, stdin=b"a\n\n" + b"cat " * 50 + b"\nb\n")
    console.refused(3, ["standard input", "line 2"], *command, stdin=b"a\n\xff\n")


def test_what_is_no_run_cannot_translate(console, run, tmp_path):
    console.refused(3, [tmp_path / "none"], "translate", "--run", tmp_path / "none")
    console.refused(3, [tmp_path, "config.json"], "translate", "--run", tmp_path)
    shutil.copy(run / "config.json", tmp_path)
    console.refused(5, [tmp_path / "checkpoints"], "translate", "--run", tmp_path, stdin=b"a\n")


@pytest.fixture(scope="module")
def broken(run, tmp_path_factory) -> Path:
    """A run to damage, and to leave as it was."""
    copy = tmp_path_factory.mktemp("broken") / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "100")
    return copy


@contextlib.contextmanager
def damaged(path: Path, content: bytes):
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["tokenizer.json", "data.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b'{"widths": [4', b"[]", b"{}", b"\xff"])
def test_a_run_with_a_damaged_file_is_refused_by_its_name(console, broken, name, content):
    with damaged(broken / name, content):
        console.refused(3, [broken, name], "translate", "--run", broken, stdin=b"a\n")


FILES = ("manifest.json", "_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt", "state/d/*", "state/ocdbt.process_0/d/*")


@pytest.mark.parametrize("command", [["translate", "--run"], ["inspect"]], ids=["translate", "inspect"])
@pytest.mark.parametrize("pattern", FILES)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(console, broken, command, pattern):
    path = max((broken / "checkpoints" / "200").glob(pattern), key=lambda found: found.stat().st_size)
    with damaged(path, path.read_bytes()[:-3]):
        console.refused(5, [path], *command, broken, stdin=b"a\n")


@pytest.mark.parametrize("command", ["inspect", "translate"])
def test_a_reader_that_goes_away_is_no_error(run, weights, command):
    arguments = ["inspect", weights] if command == "inspect" else ["translate", "--run", run]
    process = runs.start(*arguments)
    process.stdout.close()
    process.stdin.write("the cat\na dog\n")
    process.stdin.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), err) == (0, "")


def test_the_head_of_a_pipe(weights):
    command = f"{sys.executable} -m jax_transformer inspect {weights} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=runs.environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{weights}: safetensors\n", "")


# evaluate


def test_a_run_is_scored_as_at_the_end_of_its_training(console, run, tmp_path):
    command = [
        "evaluate",
        "--run",
        run,
        "--source",
        run.parent / "valid.source",
        "--target",
        run.parent / "valid.target",
        "--weights",
        "last",
    ]
    code, out, err = console.say(*command, "--json", "--bootstrap", "0", "--hypotheses", tmp_path / "hypotheses")
    report = json.loads(out)
    assert (code, out.count("\n"), err) == (0, 1, "")
    keys = {
        "weights",
        "step",
        "pairs",
        "dropped_empty",
        "bleu",
        "chrf",
        "ter",
        "exact_match",
        "signatures",
        "loss",
        "perplexity",
        "left_out_of_loss",
    }
    assert report.keys() == keys
    last = runs.metrics(run)[-1]
    assert not [name for name in ("bleu", "chrf", "exact_match") if report[name] != last[name]]
    assert last["signatures"].items() <= report["signatures"].items()
    assert (report["step"], report["pairs"], report["dropped_empty"], report["left_out_of_loss"]) == (runs.STEPS, 8, 0, 0)
    assert report["loss"] == pytest.approx(last["valid_loss"], rel=1e-5) and math.isfinite(report["loss"])
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert (tmp_path / "hypotheses").read_text().count("\n") == 8
    code, out, _ = console.say(*command, "--bootstrap", "20")
    assert code == 0 and not [name for name in keys - {"signatures"} if f"\n{name} " not in f"\n{out}"]
    assert f"{report['loss']:.4f}" in out and f"{report['bleu']:.4f} (μ = " in out and "bs:20" in out


def test_test_sets_that_cannot_be_scored_are_named(console, run, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    command = ["evaluate", "--run", run, "--source", source, "--target", target]
    source.write_text("the cat\n\na dog\n")
    console.refused(3, [target], *command)
    target.write_text("die Katze\nein\n")
    console.refused(3, [source, target, "3", "2"], *command)
    target.write_text("die Katze\nein\neine Hund\n")
    code, out, _ = console.say(*command, "--json")
    assert (code, json.loads(out)["pairs"], json.loads(out)["dropped_empty"]) == (0, 2, 1)
    source.write_text("the cat\n\n" + "cat " * 50 + "\n")
    console.refused(3, [source, "line 3", "max_length=40"], *command)
