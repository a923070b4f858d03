"""The fixture ``parity``: PyTorch in the same process, in another one, or as goldens."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import save_file

from jax_transformer import cli

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/parity-report.md"

MORE = """
import sys
from pathlib import Path

import numpy as np
import pytest
from our_block import port
from safetensors.numpy import load_file

RULES = {
    "layers.{i}": "blocks.{i}",
    "layers.{i}.layer_norm": "blocks.{i}.norm",
    "layers.{i}.fc1": "blocks.{i}.up",
}
batch = [np.random.default_rng(0).standard_normal((3, 5, 8))]


@pytest.fixture
def ours():
    return port(load_file("weights.safetensors"))


def test_other_process(ours, parity):
    report = OTHER_PROCESS
    assert len(report.entries) == 6
    assert "torch" not in sys.modules


def test_golden(ours, parity):
    GOLDEN
    assert Path("golden.safetensors").exists()
    assert "torch" not in sys.modules


def test_missing(ours, parity):
    parity(ours, golden="nowhere.safetensors")


def test_nothing_to_compare_with(ours, parity):
    parity(ours, batch=batch)
"""

SNIPPET = """
import numpy as np
from our_block import port
from their_block import make_model

torch_module = make_model()
flax_model = port({name: tensor.numpy() for name, tensor in torch_module.state_dict().items()})
flax_model.blocks[1].up.bias[...] += CHANGE
batch = [np.random.default_rng(0).standard_normal((3, 5, 8))]


"""


def run(folder: Path, *arguments: str, installed: bool = False) -> str:
    """Return pytest's output without this project's settings, with the plugin by name or not."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "PYTEST_ADDOPTS": ""}
    environment |= {"GITHUB_ACTIONS": "true"}
    if not installed:
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    named = () if installed else ("-p", "jax_transformer.parity.plugin")
    command = [sys.executable, "-m", "pytest", *named, "-p", "no:cacheprovider", "-rA", *arguments]
    captured = {"capture_output": True, "text": True}
    process = subprocess.run(command, cwd=folder, env=environment, timeout=300, **captured)
    return process.stdout + process.stderr


def verdicts(output: str) -> dict[str, str]:
    lines = re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\S+)", output, re.MULTILINE)
    return {name: verdict for verdict, name in lines}


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """Return the page's Python files."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in blocks] == ["their_block.py", "our_block.py", "test_port.py"]
    return dict(blocks)


def test_the_examples_pass_and_their_faults_are_named(tmp_path, files):
    """The page's test, and README's on models that fit it. pytest finds the fixture of the package
    if it is installed."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    wrong = {"epsilon": ("epsilon=1e-5, ", ""), "gelu": ("approximate=False", "approximate=True")}
    for name, (right, changed) in wrong.items():
        assert right in files["our_block.py"]
        (tmp_path / f"our_{name}.py").write_text(files["our_block.py"].replace(right, changed))
        text = files["test_port.py"].replace("our_block", f"our_{name}")
        text = text.replace("def test_port", f"def test_{name}")
        (tmp_path / f"test_{name}.py").write_text(text)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Parity in ten lines\n")[2].partition("\n## ")[0]
    (snippet,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for name, change in (("right", "0"), ("wrong", "1e-3")):
        assert "def test_port(parity):" in snippet
        text = SNIPPET.replace("CHANGE", change) + snippet.replace("test_port", f"test_{name}")
        (tmp_path / f"test_{name}.py").write_text(text)
    installed = importlib.metadata.entry_points(group="pytest11", name="jax_transformer")
    output = run(tmp_path, "--parity-pages", "pages", installed=bool(installed))
    faults = ("epsilon", "gelu", "wrong")
    passed, failed = ("test_port", "test_right"), [f"test_{name}" for name in faults]
    expected = dict.fromkeys(passed, "PASSED") | dict.fromkeys(failed, "FAILED")
    assert verdicts(output) == expected, output
    assert "blocks.0.norm | layers.0.layer_norm: its input agrees and its output differs" in output
    assert "blocks.0 | layers.0: its input agrees" in output
    assert "the input of down is the first that differs after up" in output
    line = "blocks.1.up | layers.1.fc1: its input agrees and its output differs, by 0.001 in float6"
    assert line in output
    assert re.search(r"^blocks\.0\.up +agrees  agrees", output, re.MULTILINE)
    pattern = r"^::error title=test_(\w+)\.py%3A%3Atest_\1::blocks\.\d"
    annotations = re.findall(pattern, output, re.MULTILINE)
    assert sorted(annotations) == sorted(faults)
    assert "plugin.py" not in output, "the message is the report, without a traceback"
    pages = {path.name for path in (tmp_path / "pages").iterdir()}
    assert pages == {f"test_{name}.py__test_{name}.html" for name in faults}


def test_torch_in_another_process_and_goldens(tmp_path, files, monkeypatch, capsys):
    for name in ("their_block.py", "our_block.py"):
        (tmp_path / name).write_text(files[name])
    page = PAGE.read_text(encoding="utf-8")
    calls = re.findall(r"```python\n(parity\(\n.*?\n\))\n```", page, re.DOTALL)
    other_process, recorded = calls
    assert "torch_python=" in other_process and "golden=" in recorded
    python = tmp_path / ".venv-torch/bin/python"  # as on the page
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    more = MORE.replace("OTHER_PROCESS", other_process).replace("GOLDEN", recorded)
    (tmp_path / "test_more.py").write_text(more)
    theirs: dict[str, object] = {}
    exec(files["their_block.py"], theirs)
    model = theirs["make_model"]()  # type: ignore[operator]
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    output = run(tmp_path, "--parity-make-goldens")
    failed = ("test_missing", "test_nothing_to_compare_with")
    expected = dict.fromkeys(("test_other_process", "test_golden"), "PASSED")
    assert verdicts(output) == expected | dict.fromkeys(failed, "FAILED"), output
    missing = "no such golden: pass torch_factory and batch, and run pytest --parity-make-goldens"
    assert f"nowhere.safetensors: {missing}" in output
    assert "pass torch_module and batch, or torch_factory and batch, or golden" in output
    # The command records the same bits again
    monkeypatch.chdir(tmp_path)
    assert cli.main(["golden", "check", "golden.safetensors", "--python", sys.executable]) == 0
    same = r"\d{2,} arrays are the same bit for bit, 0 within rounding, 0 differ\n"
    assert re.fullmatch(same, capsys.readouterr().out)


def test_the_plugin_is_declared_and_loads_neither_framework():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["pytest11"]
    assert declared == {"jax_transformer": "jax_transformer.parity.plugin"}
    loaded = "{'jax', 'torch', 'numpy'} & sys.modules.keys()"
    code = f"import sys, jax_transformer.parity.plugin; assert not {loaded}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
