"""``translate`` and ``evaluate`` by the command line, and their errors about a damaged run."""

import contextlib
import gzip
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.cli import translate
from jax_transformer.formats.base import Pretrained
from jax_transformer.inference import translation
from jax_transformer.storage import checkpoint
from parity_tests.unit import helpers, runs
from parity_tests.unit.storage import test_checkpoint

LINES = "the cat|a red dog sees the small bird||house|the cat and the dog|a|bird".split("|")


pytestmark = pytest.mark.usefixtures("as_a_user")


# translate


def translated(console: runs.Console, run: Path, lines: list[str], *more: str) -> list[str]:
    text = "".join(line + "\n" for line in lines).encode()
    code, out, _ = console.say("translate", "--run", run, *more, stdin=text)
    assert code == 0 and out.endswith("\n")
    return out.removesuffix("\n").split("\n")


def test_line_endings_do_not_matter(console, run):
    expected = "".join(line + "\n" for line in translated(console, run, LINES))
    text = "\n".join(LINES).encode()
    windows = text.replace(b"\n", b"\r\n")
    for stdin in (text, windows, b"\xef\xbb\xbf" + text + b"\n", gzip.compress(text)):
        assert console.say("translate", "--run", run, stdin=stdin) == (0, expected, "")
    for empty in ("", "\n\n"):
        assert console.say("translate", "--run", run, stdin=empty.encode()) == (0, empty, "")
    dashes = ("--input", "-", "--output", "-")
    assert console.say("translate", "--run", run, *dashes, stdin=text) == (0, expected, "")
    one = console.say("translate", "--run", run, stdin="the\u2028cat\x0b\x85".encode())[1]
    assert one.count("\n") == 1


def test_flags_that_exclude_each_other_are_refused_before_the_weights_are_read(
    console, run, monkeypatch
):
    monkeypatch.setattr(Pretrained, "model", None)
    words, flags = ["sample", "beams=4"], ("--sample", "--beam", "4")
    console.refused(2, words, "translate", "--run", run, *flags, stdin=b"a\n")


def test_an_n_best_list_needs_a_beam(console, run):
    command = ["translate", "--run", run, "--n-best", "1"]
    console.refused(2, ["--n-best needs --beam"], *command, stdin=b"a\n")


def test_files_in_and_out(console, run, tmp_path):
    expected = "".join(line + "\n" for line in translated(console, run, LINES))
    text = "".join(line + "\n" for line in LINES).encode()
    for name, content in (("plain", text), ("packed.gz", gzip.compress(text))):
        (tmp_path / name).write_bytes(content)
        command = ["translate", "--run", run]
        command += ["--input", tmp_path / name, "--output", tmp_path / "out"]
        assert console.say(*command) == (0, "", "")
        assert (tmp_path / "out").read_bytes().decode() == expected
    (tmp_path / "plain").write_bytes(text + b"cat " * 50 + b"\n")
    out, none = ["--output", tmp_path / "out"], tmp_path / "none"
    console.refused(3, [f"line {len(LINES) + 1}"], *command[:4], tmp_path / "plain", *out)
    assert (tmp_path / "out").read_bytes().decode() == expected
    assert len(list(tmp_path.iterdir())) == 3
    console.refused(3, [none], *command[:4], none)
    console.refused(2, [none / "out"], *command[:5], "--output", none / "out")


def test_translations_are_utf8_and_one_line_each_on_every_output(run, monkeypatch):
    lines = [
        translation.Line(i, "", [], False, [translation.Hypothesis(text, np.zeros(0, int), None)])
        for i, text in enumerate(("Straße\n3 €", "b"))
    ]
    monkeypatch.setattr(translation.Translator, "stream", lambda *arguments, **options: [lines])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii"))
    assert runs.main("translate", "--run", run) == 0
    sys.stdout.flush()
    assert file.getvalue().decode() == "Straße 3 €\nb\n"


def test_lines_that_cannot_be_translated_are_named(console, run):
    command = ["translate", "--run", run]
    stdin = b"a\n\n" + b"cat " * 50 + b"\nb\n"
    console.refused(3, ["line 3", "max_length=40"], *command, stdin=stdin)
    console.refused(3, ["standard input", "line 2"], *command, stdin=b"a\n\xff\n")


def test_translating_hashes_and_loads_each_file_of_a_checkpoint_once(console, run, monkeypatch):
    hashed, loaded = [], []
    sha256, open_arrays = checkpoint.sha256, checkpoint.open_arrays
    monkeypatch.setattr(checkpoint, "sha256", lambda path: (hashed.append(path), sha256(path))[1])
    monkeypatch.setattr(
        checkpoint, "open_arrays", lambda path: (loaded.append(path), open_arrays(path))[1]
    )
    assert console.say("translate", "--run", run, stdin=b"a\n")[0] == 0
    (path,) = loaded
    files = {file for file in path.rglob("*") if file.is_file()}
    assert sorted(hashed) == sorted(files - {path / checkpoint.MANIFEST})


def test_lines_are_translated_as_they_come(run, monkeypatch):
    """The second line is sent after the first one's translation has come."""
    (stdin, source), (translations, stdout) = os.pipe(), os.pipe()
    received = []

    def user():
        with open(source, "wb", buffering=0) as out, open(translations, "rb", buffering=0) as back:
            for text in (b"the cat\n", b"a red", b" dog\n", b"bird"):
                out.write(text)
                if text.endswith(b"\n"):
                    received.append(back.read(100))
            out.close()
            received.append(back.read(100))

    thread = threading.Thread(target=user, daemon=True)
    thread.start()
    with open(stdin) as source_file, open(stdout, "w") as target_file:
        monkeypatch.setattr(sys, "stdin", source_file)
        monkeypatch.setattr(sys, "stdout", target_file)
        assert runs.main("translate", "--run", run) == 0
    thread.join(timeout=60)
    assert [text.count(b"\n") for text in received] == [1, 1, 1]


def score(line: str) -> float:
    """The score of a line of an n-best list."""
    return float(line.rpartition(" ||| ")[2])


def test_lines_that_keep_coming_are_not_awaited_for_long(monkeypatch):
    def slowly(path: str):
        for number in range(60):
            time.sleep(0.02)
            yield [str(number)]

    monkeypatch.setattr(translate.parallel_text, "read_chunks", slowly)
    monkeypatch.setattr(translate, "WAIT", 0.1)
    windows = [*translate.windows_of("file", 1000)]
    assert len(windows) > 2, "each ends a while after its first line"
    assert [line for lines in windows for line in lines] == [str(number) for number in range(60)]


def test_small_buffers_give_the_same_translations(console, run):
    for flags in (("--sample", "--temperature", "3"), ("--beam", "2", "--n-best", "2")):
        small = translated(console, run, LINES, "--buffer", "2", *flags)
        expected = translated(console, run, LINES, *flags)
        if "--n-best" in flags:  # batches of other sizes round the last printed digit otherwise
            scores = [[score(line) for line in each] for each in (small, expected)]
            assert scores[0] == pytest.approx(scores[1], abs=2e-6)
            small, expected = (
                [text.rpartition(" ||| ")[0] for text in x] for x in (small, expected)
            )
        assert small == expected
    console.refused(2, ["buffer=0"], "translate", "--run", run, "--buffer", "0", stdin=b"a\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_translation_keeps_what_is_done(console, run, tmp_path, monkeypatch, number):
    translate, batches = translation.Translator._translate, []

    def interrupted(self, batch, config):
        batches.append(batch.lines)
        if batch.lines[-1].number > 5:
            signal.raise_signal(number)
        translate(self, batch, config)

    expected = translated(console, run, LINES)
    monkeypatch.setattr(translation.Translator, "_translate", interrupted)
    (tmp_path / "out").write_text("before")
    command = ["translate", "--run", run, "--buffer", "3", "--output", tmp_path / "out"]
    stdin = "\n".join(LINES).encode()
    # A shell starts what runs in the background with SIGINT ignored, and so it stays
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        code, _, err = console.say(*command, stdin=stdin)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, handler)
    partial = tmp_path / "out.partial"
    assert code == 130
    assert err.splitlines() == [
        f"translated 6 lines in {partial}; to go on, translate the input from line 7",
        "jax-transformer: stopped at once",
    ]
    assert partial.read_text().splitlines() == expected[:6]
    assert (tmp_path / "out").read_text() == "before"
    monkeypatch.undo()
    rest = stdin.split(b"\n", 6)[6]
    console.refused(2, [f"{partial} exists", "append the others"], *command, stdin=rest)
    code, out, _ = console.say(*command[:-2], stdin=rest)
    assert (partial.read_text() + out).splitlines() == expected
    partial.unlink()
    console.say(*command, stdin=stdin)
    assert (tmp_path / "out").read_text().splitlines() == expected and not partial.exists()


def test_a_full_disk_is_named_and_leaves_whole_batches(console, run, tmp_path):
    expected = translated(console, run, LINES)
    room = sum(len(line) + 1 for line in expected[:6]) + 2
    command = ["translate", "--run", run, "--buffer", "3", "--output", tmp_path / "out"]
    with helpers.largest_file(room):
        code, _, err = console.say(*command, stdin="\n".join(LINES).encode())
    partial = tmp_path / "out.partial"
    assert code == 3 and err.splitlines() == [
        f"translated 6 lines in {partial}; to go on, translate the input from line 7",
        f"jax-transformer: {tmp_path / 'out'}: File too large",
    ]
    assert partial.read_text().splitlines() == expected[:6]


def test_a_translation_in_the_background_goes_on(console, run, monkeypatch):
    """A shell starts it with SIGINT ignored."""
    translate = translation.Translator._translate

    def interrupted(self, batch, config):
        signal.raise_signal(signal.SIGINT)
        translate(self, batch, config)

    expected = translated(console, run, LINES)
    monkeypatch.setattr(translation.Translator, "_translate", interrupted)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert translated(console, run, LINES) == expected
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_interruption_that_python_drops_is_noticed_after_the_batch(console, run, monkeypatch):
    """JAX has callbacks of the garbage collector, in which Python drops exceptions."""
    translate = translation.Translator._translate

    class Dropped:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def interrupted(self, batch, config):
        translate(self, batch, config)
        Dropped()

    monkeypatch.setattr(translation.Translator, "_translate", interrupted)
    stdin = "\n".join(LINES).encode()
    code, out, err = console.say("translate", "--run", run, "--buffer", "3", stdin=stdin)
    assert code == 130 and 0 < out.count("\n") < len(LINES)
    assert err.endswith("\njax-transformer: stopped at once\n") and "Traceback" not in err


def test_long_lines_are_cut_or_skipped_as_told(console, run):
    stdin = "\n".join([*LINES, "cat " * 50]).encode()
    for choice, done in (("cut", "cut"), ("skip", "skipped")):
        command = ["translate", "--run", run, "--too-long", choice, "--buffer", "3"]
        code, out, err = console.say(*command, stdin=stdin)
        message = f"{done} 1 line over max_length=40: {len(LINES) + 1}\n"
        assert (code, err) == (0, message)
        *others, last = out.removesuffix("\n").split("\n")
        assert others == translated(console, run, LINES) and bool(last) == (choice == "cut")
    for count, end in ((10, ", 10\n"), (11, ", 10, ...\n")):
        stdin = (b"cat " * 50 + b"\n") * count
        _, out, err = console.say("translate", "--run", run, "--too-long", "skip", stdin=stdin)
        assert out == "\n" * count and err.endswith(end), err


def test_a_terminal_is_told_that_it_is_read(console, run, tmp_path, monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setattr(io, "TextIOWrapper", Terminal)
    code, out, err = console.say("translate", "--run", run, stdin=b"the cat\n")
    assert (code, out.count("\n")) == (0, 1)
    assert err == "reading lines from the terminal; Ctrl-D ends\n"
    (tmp_path / "lines").write_text("the cat\n")
    command = ("translate", "--run", run, "--input", tmp_path / "lines")
    assert console.say(*command, stdin=b"") == (0, out, "")


def test_a_path_that_is_no_run_is_refused(console, run, tmp_path):
    console.refused(3, [tmp_path / "none"], "translate", "--run", tmp_path / "none")
    console.refused(3, ["did you mean hf:owner/name?"], "translate", "--run", "owner/name")
    console.refused(3, [tmp_path, "config.json"], "translate", "--run", tmp_path)
    shutil.copy(run / "config.json", tmp_path)
    console.refused(5, [tmp_path / "checkpoints"], "translate", "--run", tmp_path, stdin=b"a\n")


@pytest.fixture(scope="module")
def broken(run, tmp_path_factory) -> Path:
    """A run to damage, restored afterwards."""
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


@pytest.mark.parametrize(
    "command", [["translate", "--run"], ["inspect"]], ids=["translate", "inspect"]
)
@pytest.mark.parametrize("pattern", ["manifest.json", *test_checkpoint.FILES])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(console, broken, command, pattern):
    path = max((broken / "checkpoints" / "200").glob(pattern), key=lambda file: file.stat().st_size)
    with damaged(path, path.read_bytes()[:-3]):
        console.refused(5, [path], *command, broken, stdin=b"a\n")


def test_a_closed_pipe_is_no_error(run):
    process = runs.start("translate", "--run", run)
    process.stdout.close()
    process.stdin.write("the cat\na dog\n")
    process.stdin.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), err) == (0, "")


def test_head_may_close_the_pipe(weights):
    command = f"{sys.executable} -m jax_transformer inspect {weights} | head -1; "
    options = dict(env=runs.environment(), capture_output=True, text=True, timeout=60)
    done = subprocess.run(["bash", "-c", command + "exit ${PIPESTATUS[0]}"], **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{weights}: safetensors\n", "")


# evaluate


def test_evaluate_gives_the_scores_of_the_end_of_training(console, run, tmp_path):
    files = ["--source", run.parent / "valid.source", "--target", run.parent / "valid.target"]
    command = ["evaluate", "--run", run, *files, "--weights", "last"]
    options = ["--json", "--bootstrap", "0", "--hypotheses", tmp_path / "hypotheses"]
    code, out, err = console.say(*command, *options)
    report = json.loads(out)
    assert (code, out.count("\n"), err) == (0, 1, "")
    keys = set("weights step pairs dropped_empty bleu chrf ter exact_match signatures".split())
    keys |= {"loss", "perplexity", "left_out_of_loss"}
    assert report.keys() == keys
    last = runs.metrics(run)[-1]
    assert not [name for name in ("bleu", "chrf", "exact_match") if report[name] != last[name]]
    assert last["signatures"].items() <= report["signatures"].items()
    expected = {"step": runs.STEPS, "pairs": 8, "dropped_empty": 0, "left_out_of_loss": 0}
    assert expected.items() <= report.items()
    assert report["loss"] == pytest.approx(last["valid_loss"], rel=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert (tmp_path / "hypotheses").read_text().count("\n") == 8
    code, out, _ = console.say(*command, "--bootstrap", "20")
    assert code == 0 and f"{report['loss']:.4f}" in out and "bs:20" in out
    assert not [name for name in keys - {"signatures"} if f"\n{name} " not in f"\n{out}"]
    assert f"{report['bleu']:.4f} (μ = " in out


def test_unscorable_test_sets_are_named(console, run, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    command = ["evaluate", "--run", run, "--source", source, "--target", target]
    source.write_text("the cat\n\na dog\n")
    console.refused(3, [target], *command)
    target.write_text("die Katze\nein\n")
    console.refused(3, [source, target, "3", "2"], *command)
