"""Measured errors against PyTorch, by level, in float64 and float32, as markdown.

These are the errors that parity_tests bound. Five seeds per case.

An error is the largest absolute difference over the largest absolute value of the reference. See
benchmarks/README.md.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.training import optimizer, step
from parity_tests import levels, test_forward, test_gradients
from parity_tests.bounds import BOUNDS
from parity_tests.cases import CASES, DOCUMENTS
from parity_tests.twins import Pair, pair, without_dropout

SHOWN = [*DOCUMENTS, "vaswani2017_base", "small", "torch.nn norm_first", "torch.nn post-norm"]
FULL = "lesson10 at full size: 6+6 layers, d 512"
SEEDS = range(5)
GRADIENT, LOSSES = "gradients", "losses of ten AdamW steps"
WEIGHTS = "weights after ten AdamW steps"
# Their gradient is only rounding, which Adam divides by its own size
KEY_BIASES = "key biases after ten AdamW steps"
# Tested in float64 only
TRAINED = {GRADIENT: 1e-12, LOSSES: 1e-10, WEIGHTS: 1e-10, KEY_BIASES: 1e-10}
Errors = dict[str, float]


def bound(level: str, dtype: torch.dtype) -> str:
    """The bound of the tests."""
    if level in TRAINED:
        return f"{TRAINED[level]:.0e}" if dtype is torch.float64 else "–"
    return f"{BOUNDS[str(dtype).removeprefix('torch.')][level]:.0e}"


def forward_errors(both: Pair) -> Errors:
    with torch.no_grad():
        return {
            name: levels.error(levels.LEVELS[name](both)) for name in levels.levels(both.config)
        }


def remember() -> optax.GradientTransformation:
    """An optimizer that changes nothing and stores the last gradients as its state.

    So the compiled step returns them.
    """
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )


class Trained:
    """The training step of one configuration and dtype, without dropout, compiled once for all
    seeds."""

    def __init__(self, config: TransformerConfig):
        self.options = test_gradients.OPTIMIZER
        self.tx = optax.chain(remember(), optimizer.make(self.options, 10))
        self.step = step.make_step(without_dropout(config), self.tx, self.options.label_smoothing)

    def errors(self, both: Pair) -> Errors:
        """The errors of every gradient of the first batch, and of ten steps from the same weights.

        Changes the twin's weights.
        """
        state, losses, gradient = step.initial_state(both.flax, self.tx), [], math.nan
        for i in range(10):
            state, measured = self.step(
                state, [test_gradients.batch_of(both, i)], jax.random.key(0)
            )
            losses.append(float(measured["loss"]))
            if i == 0:
                gradient = gradient_error(both, state.opt_state[0])
        reference = list(test_gradients.torch_steps(both, self.options))
        theirs = transformer.flatten(
            jt.convert.from_torch(both.torch.state_dict(), both.config), nnx.Param
        )
        weights = {
            name: levels.error((state.params[name], np.asarray(theirs[name]))) for name in theirs
        }
        return {
            GRADIENT: gradient,
            LOSSES: levels.error((np.array(losses), np.array(reference))),
            WEIGHTS: max(error for name, error in weights.items() if not name.endswith("key.bias")),
            KEY_BIASES: max(
                (error for name, error in weights.items() if name.endswith("key.bias")), default=0.0
            ),
        }


def gradient_error(both: Pair, ours: dict[str, jax.Array]) -> float:
    """The largest error of all leaves, relative to the largest gradient of the model."""
    test_gradients.torch_loss(both, test_gradients.batch_of(both)).backward()
    theirs = test_gradients.torch_gradients(both)
    largest = max(np.abs(gradient).max() for gradient in theirs.values())
    return max(levels.error((ours[name], theirs[name]), relative_to=largest) for name in theirs)


def measure(config: TransformerConfig, dtype: torch.dtype) -> Errors:
    """The largest errors over all seeds."""
    trained, errors_by_seed = Trained(config), []
    for seed in SEEDS:
        both = pair(config, dtype, seed=seed)
        errors_by_seed.append(forward_errors(both) | trained.errors(both))
    return {name: max(errors[name] for errors in errors_by_seed) for name in errors_by_seed[0]}


def full_size(dtype: torch.dtype) -> float:
    """The errors of logits at the document's own sizes, with a small vocabulary and two seeds."""
    errors = []
    for seed in (0, 1):
        both = pair(jt.preset("lesson10", vocab_size=101), dtype, seed=seed, source=23, target=19)
        with torch.no_grad():
            errors.append(levels.error(levels.logits(both)))
    return max(errors)


def rows(
    measured_errors: dict[tuple[str, torch.dtype], Errors], full: dict[torch.dtype, float]
) -> Iterator[str]:
    """Yield two tables: errors by level over all cases, and errors of the logits by case."""
    head = ("float64", "allowed", "float32", "allowed")
    yield f"| | {' | '.join(head)} |\n|---|---|---|---|---|"
    for level in [*levels.LEVELS, *TRAINED]:
        cells = []
        for dtype in test_forward.DTYPES:
            cells += [
                f"{max(measured_errors[name, dtype].get(level, 0.0) for name in SHOWN):.1e}",
                bound(level, dtype),
            ]
        yield f"| {level.replace('_', ' ')} | {' | '.join(cells)} |"
    yield f"\n| logits of | {' | '.join(head[::2])} |\n|---|---|---|"
    logits = {
        name: {dtype: measured_errors[name, dtype]["logits"] for dtype in full} for name in SHOWN
    } | {FULL: full}
    for name, errors in logits.items():
        yield f"| {name} | {' | '.join(f'{errors[dtype]:.1e}' for dtype in full)} |"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_default_matmul_precision", "highest")
    torch.set_float32_matmul_precision("highest")
    warnings.filterwarnings("ignore", module="torch")  # the two that pyproject.toml names
    configs = {case.name: case.config for case in CASES}
    measured_errors = {}
    for name in SHOWN:
        for dtype in test_forward.DTYPES:
            print(f"{name}, {dtype} ...", file=sys.stderr)
            measured_errors[name, dtype] = measure(configs[name], dtype)
    for line in rows(measured_errors, {dtype: full_size(dtype) for dtype in test_forward.DTYPES}):
        print(line)


if __name__ == "__main__":
    main()
