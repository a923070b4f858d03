"""docs/notebooks/find_the_fault.ipynb: each report names the fault, and each mended port agrees."""

import json

import jax
import pytest

from parity_tests.unit import runs

NOTEBOOK = runs.ROOT / "docs/notebooks/find_the_fault.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
EXERCISES = [code for code in CODE if "class Ours(" in code and "\ncheck(" in code]
# What the report says, the wrong piece, and the right one
SOLUTIONS = [
    ("down | down: its input agrees and its output differs", ", use_bias=False", ""),
    (
        "norm | norm: its input agrees",
        "LayerNorm(WIDTH, rngs",
        "LayerNorm(WIDTH, epsilon=1e-5, rngs",
    ),
    ("up | up: its input agrees", 'state["up.weight"]', 'state["up.weight"].T'),
    (
        "down is the first that differs after up",
        "jax.nn.gelu(self.up(x))",
        "jax.nn.gelu(self.up(x), approximate=False)",
    ),
    (
        "the input of norm is the first that differs",
        "x + self.down(jax.nn.relu(self.up(self.norm(x))))",
        "self.norm(x + self.down(jax.nn.relu(self.up(x))))",
    ),
    (
        "positions | positions: its integers differ in 5 of 5 places, first at (0): 1 here",
        "shape[1]) + 1)",
        "shape[1]))",
    ),
    (
        "tokens: outputs agree, and so does the gradient",
        "self.table[...]",
        "self.tokens.embedding[...]",
    ),
    (
        "in it, the input of softmax is the first that differs",
        "math.sqrt(WIDTH)",
        "math.sqrt(q.shape[-1])",
    ),
    (
        "in it, the input of out is the first that differs after softmax",
        "(weights @ v).reshape",
        "(weights @ v).swapaxes(1, 2).reshape",
    ),
    ("attention.softmax: its input agrees and its output differs", "axis=-2", "axis=-1"),
    ("its mask differs in 6 of 50 places", "k=1, ", ""),
    ("its mask differs in 16 of 50 places, first at (0, 0, 1)", "| (ids", "& (ids"),
]


@pytest.fixture(scope="module")
def names():
    """The names that the notebook defines outside of its exercises."""
    names: dict = {}
    for code in CODE:
        if code not in EXERCISES and "%pip" not in code:
            exec(code, names)
    return names


@pytest.fixture
def run(names, capsys):
    def printed(code: str) -> str:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            exec(code, dict(names))
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize("number", range(1, 13))
def test_the_report_names_the_fault_and_the_mended_port_agrees(number, run):
    code, (report, wrong, right) = EXERCISES[number - 1], SOLUTIONS[number - 1]
    assert report in run(code) and code.count(wrong) == 1
    mended = code.replace(wrong, right)
    if number > 8:  # exercises 8 to 12 have one solution
        assert mended == EXERCISES[7].replace(*SOLUTIONS[7][1:])
    else:
        assert run(mended).startswith("Right: ")


def test_there_are_as_many_solutions_as_exercises():
    assert len(EXERCISES) == len(SOLUTIONS) == 12
