"""The core without ``jax_transformer/extras``: only what they bring is refused, in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jax_transformer
from parity_tests.unit import runs

EXTRAS = {
    "serve": ("serve", "run"),
    "transcribe": ("transcribe", "a.wav", "--run", "run"),
    "estimate": ("estimate", "--topology", "cpu:1"),
    "engine": ("translate", "--run", "run", "--engine", "ctranslate2"),
    "CTranslate2": ("convert", "run", "new", "--to", "ct2"),
    "StableHLO": ("convert", "run", "new", "--to", "stablehlo"),
    "Whisper": ("train", "--model.preset", "whisper_tiny"),
}
"""Commands that need an extra."""

SCRIPT = """
import contextlib, importlib.metadata, io, json, os, sys
where, commands = sys.argv[1], json.loads(sys.argv[2])
if where == "missing":  # as if installed without the entry points
    importlib.metadata.entry_points = lambda **_: importlib.metadata.EntryPoints(())
import jax_transformer
from jax_transformer import cli
results = {"file": jax_transformer.__file__}
for name, arguments in commands.items():
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = open("lines.txt")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(arguments)
    results[name] = code, out.getvalue(), err.getvalue()
try:
    jax_transformer.Transcriber
except ImportError as error:
    results["Transcriber"] = str(error)
config = jax_transformer.preset(
    "lesson10", source_vocab_size=11, target_vocab_size=13, mel_bins=4, mel_frames=8,
    **{"encoder.self_mask": (), "decoder.cross_mask": ()},
)
try:
    jax_transformer.transformer.abstract(config)
except jax_transformer.errors.ConfigError as error:
    results["input layer"] = str(error)
results["presets"] = jax_transformer.preset_names()
results["loaded"] = [name for name in sys.modules if name.startswith("jax_transformer.extras")]
os.write(1, json.dumps(results).encode())
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A copy of the package and the twins, without the extras."""
    folder = tmp_path_factory.mktemp("core")
    package = Path(jax_transformer.__file__).parent
    ignored = shutil.ignore_patterns("extras", "__pycache__")
    for source in (package, package.parent / "torch_reference"):
        shutil.copytree(source, folder / source.name, ignore=ignored)
    return folder


@pytest.mark.parametrize("entry_points", ["broken", "missing"])
def test_the_core_works_without_its_extras(
    entry_points: str, core: Path, tmp_path: Path, run: Path
):
    """Without entry points less can go wrong: nothing is trained or translated."""
    text = runs.write_text(tmp_path)
    (tmp_path / "lines.txt").write_text("the cat\n")
    options = runs.with_option(runs.with_option(runs.OPTIONS, "--steps", 2), "--eval-every", 2)
    commands = {"help": ["--help"], "inspect": ["inspect", "run"]}
    if entry_points == "missing":
        shutil.copytree(run, tmp_path / "run")
    else:
        commands = {"train": ["train", "--run", "run", *text, *options]} | commands
        commands |= {
            "translate": ["translate", "--run", "run", "--max-length", "5"],
            "to .pt": ["convert", "run", "a.pt", "--no-check"],
            "from .pt": ["convert", "a.pt", "imported", "--config", "run/config.json"],
            "back": ["convert", "imported", "b.pt"],
            "parity": ["parity", "imported", "twin", "--no-gradients"],
        }
    program = [sys.executable, "-c", SCRIPT, entry_points, json.dumps(commands | EXTRAS)]
    path = os.pathsep.join([str(core), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert not done.returncode, done.stderr
    results = json.loads(done.stdout)
    assert Path(results["file"]).is_relative_to(core) and results["loaded"] == []
    for name in commands:
        assert results[name][0] == 0, (name, results[name])
    if entry_points == "broken":
        assert results["translate"][1].count("\n") == 1
        assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert "lesson10" in results["presets"] and "whisper_tiny" not in results["presets"]
    assert results["Transcriber"] == "No module named 'jax_transformer.extras'"
    assert "'mel'" in results["input layer"] or "entry point mel" in results["input layer"]
    assert not (tmp_path / "new").exists()
    for name in EXTRAS:
        code, out, err = results[name]
        lines = [line for line in err.splitlines() if not line.startswith("skipped an installed")]
        assert code == 2 and not out and len(lines) == 1, (name, results[name])
