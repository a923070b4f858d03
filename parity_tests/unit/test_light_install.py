"""Comparisons and weight tables in an environment that has only what action.yml installs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools import notebooks

ROOT = Path(__file__).parents[2]
LEFT_OUT = (
    "scipy matplotlib orbax tensorstore grain tokenizers sacrebleu torch transformers".split()
)
SCRIPT = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Refused())
import numpy as np
import jax_transformer as jt
from jax_transformer import parity, weights
from jax_transformer.parity import golden, plugin
table = weights.linear("a", "b")
state = {"a.weight": np.ones((2, 3), np.float32), "a.bias": np.ones(2, np.float32)}
arrays = {"b": {"kernel": np.zeros((3, 2)), "bias": np.zeros(2)}}
back = weights.to_torch(weights.from_torch(state, table, into=arrays), table)
assert back.keys() == state.keys() and jt.parity.compare is parity.compare
"""


def commands(text: str) -> list[str]:
    return [line.strip() for line in re.findall(r"^ *pip install -c .*$", text, re.MULTILINE)]


def test_weights_and_parity_import_nothing_of_the_trainer():
    script = [sys.executable, "-W", "ignore", "-c", SCRIPT, *LEFT_OUT]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_action_runs_commands_that_exist():
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    steps = action["runs"]["steps"]
    assert action["runs"]["using"] == "composite"
    assert all("uses" in step or "shell" in step for step in steps)
    named = set(re.findall(r"inputs\.([\w-]+)", str(steps)))
    assert named == action["inputs"].keys()
    plugin = (ROOT / "jax_transformer/parity/plugin.py").read_text(encoding="utf-8")
    (tests,) = (step["run"] for step in steps if "pytest -" in step.get("run", ""))
    assert all(f'"{option}"' in plugin for option in re.findall(r"--[\w-]+", tests))
    page = (ROOT / "docs/parity.md").read_text(encoding="utf-8")
    ours = commands(
        steps[1]["run"].replace('"$GITHUB_ACTION_PATH/constraints.txt"', "constraints.txt")
    )
    assert ours and [c.replace('"$GITHUB_ACTION_PATH"', ".") for c in ours] == commands(page)
    assert not set(LEFT_OUT) & set(" ".join(ours).split())


@pytest.mark.parametrize("path", ["docs/parity-workflow.yml", "docs/parity.md"])
def test_the_pages_use_the_action(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        text = text.partition("```yaml\n")[2].partition("```")[0]
    data = yaml.safe_load(text)
    steps = data["jobs"]["goldens"]["steps"] if isinstance(data, dict) else data
    assert [step["uses"].partition("@")[0] for step in steps][-1] == notebooks.REPOSITORY
