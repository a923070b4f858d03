"""Measured error of both frameworks against float64, by level and precision, on this device.

Writes docs/tolerances.md.

The oracle is the PyTorch twin in float64 with the weights that the dtype holds, so that what is
measured is arithmetic. See benchmarks/README.md.
"""

import argparse
import copy
import dataclasses
import json
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax_transformer as jt  # noqa: E402
from jax_transformer.config import TransformerConfig  # noqa: E402
from jax_transformer.training import optimizer, step  # noqa: E402
from parity_tests import levels, test_gradients  # noqa: E402
from parity_tests.bounds import BOUNDS, RATIO  # noqa: E402
from parity_tests.cases import CASES  # noqa: E402
from parity_tests.twins import Pair, pair, without_dropout  # noqa: E402

SHOWN = ["lesson10", "small", "deep_dive", "torch.nn norm_first", "blog2023_repaired"]
TRAINED = ["lesson10", "small"]
PRECISIONS = {
    "float64": (torch.float64, "highest"),
    "float32 highest": (torch.float32, "highest"),
    "float32 high": (torch.float32, "high"),
    "float32 default": (torch.float32, "default"),
    "bfloat16": (torch.bfloat16, "default"),
    "float16": (torch.float16, "default"),
}
STEPS = (10, 100)
Errors = dict[str, tuple[float, float]]
"""Our and PyTorch's error against the oracle, by level."""
ErrorTable = dict[str, dict[str, list[tuple[float, float]]]]
"""Errors of every configuration and seed, by precision and level."""


def oracle_of(both: Pair) -> Pair:
    """The pair in float64 with the same weights."""
    module = copy.deepcopy(both.torch).double()
    return dataclasses.replace(
        both, torch=module, flax=jt.convert.from_torch(module.state_dict(), both.config)
    )


def wide(array: Any) -> np.ndarray:
    return levels.arrays((0, array))[1].astype(np.float64)


def relative_error(array: Any, exact: Any) -> float:
    """The largest difference, divided by the largest value of the oracle."""
    array, exact = wide(array), wide(exact)
    return float(np.abs(array - exact).max() / np.abs(exact).max())


def forward(both: Pair, exact: Pair) -> Errors:
    """The outputs of every level. In float64 the twin is the oracle, and its own error is
    unknown."""
    errors_by_name = {}
    with torch.no_grad():
        for name in levels.levels(both.config):
            (ours, theirs), reference = levels.LEVELS[name](both), levels.LEVELS[name](exact)[1]
            both_errors = relative_error(ours, reference), relative_error(theirs, reference)
            errors_by_name[name] = both_errors
    return errors_by_name


def gradients(both: Pair, exact: Pair) -> Errors:
    """The error of the worst leaf, relative to the model's largest gradient."""
    batch, leaves = test_gradients.batch_of(both), {}
    for name, each in {"exact": exact, "theirs": both}.items():
        each.torch.zero_grad()
        test_gradients.torch_loss(each, batch).backward()
        leaves[name] = {
            n: p.grad.double().numpy()
            for n, p in each.torch.named_parameters()
            if p.grad is not None
        }
    table, _ = test_gradients.trained_table(both)
    _, ours = test_gradients.flax_gradients(both, batch)
    leaves["ours"] = {
        rule.torch: rule.joined([np.asarray(ours[part], np.float64) for part in rule.flax])
        for rule in table
    }
    largest = max(np.abs(gradient).max() for gradient in leaves["exact"].values())
    worst = {
        name: max(np.abs(leaves[name][n] - g).max() for n, g in leaves["exact"].items()) / largest
        for name in ("ours", "theirs")
    }
    return {"gradients": (worst["ours"], worst["theirs"])}


class ComputingIn(torch.nn.Module):
    """A twin that computes in another dtype than its weights', as a run with ``--model.precision``.

    Its logits are wide.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # A weight shared by two modules needs both names: functional_call (2.13) would not restore
        # the other
        slots = (
            (owner, part)
            for owner, module in self.module.named_modules()
            for part in module.named_parameters(recurse=False)
        )
        narrow = {
            f"{owner}.{name}".lstrip("."): weight.to(self.dtype) for owner, (name, weight) in slots
        }
        narrow |= {
            name: x.to(self.dtype) if x.is_floating_point() else x
            for name, x in self.module.named_buffers()
        }
        return torch.func.functional_call(
            self.module, narrow, (source, target), tie_weights=False
        ).float()


def stepped(
    config: TransformerConfig, dtype: torch.dtype, seeds: int
) -> dict[str, list[tuple[float, float]]]:
    """Losses and weights after AdamW steps with clipping and a schedule, without key biases.

    Models of 16 bits compute in these, and keep their weights and step them in float32.
    """
    config = config.with_sizes(num_layers=1)
    options, most = test_gradients.OPTIMIZER, max(STEPS)
    tx = optimizer.make(options, most)
    narrow = dtype.itemsize == 2
    computed = dataclasses.replace(
        without_dropout(config), compute_dtype=str(dtype).removeprefix("torch.") if narrow else None
    )
    train = step.make_step(computed, tx, options.label_smoothing)
    errors_by_name: dict[str, list[tuple[float, float]]] = {}
    for seed in range(seeds):
        both = pair(config, torch.float32 if narrow else dtype, seed=seed)
        exact = oracle_of(both)
        state, losses = step.initial_state(both.flax, tx), []
        judged = dataclasses.replace(both, torch=ComputingIn(both.torch, dtype)) if narrow else both
        twins = (test_gradients.torch_steps(each, options, most) for each in (judged, exact))
        for i, (mine, oracle) in enumerate(zip(*twins, strict=True), 1):
            state, measured = train(
                state, [test_gradients.batch_of(both, i - 1)], jax.random.key(0)
            )
            losses.append((float(measured["loss"]), mine, oracle))
            if i in STEPS:
                ours, torchs, exacts = map(np.array, zip(*losses, strict=True))
                errors_by_name.setdefault(f"losses of {i} steps", []).append(
                    (relative_error(ours, exacts), relative_error(torchs, exacts))
                )
                errors_by_name.setdefault(f"weights after {i} steps", []).append(
                    weights(both, exact, state)
                )
    return errors_by_name


def weights(both: Pair, exact: Pair, state: step.TrainState) -> tuple[float, float]:
    """The errors of the worst array."""
    table, _ = test_gradients.trained_table(both)
    theirs, oracle = both.torch.state_dict(), exact.torch.state_dict()
    ours = {
        rule.torch: rule.joined([np.asarray(state.params[part]) for part in rule.flax])
        for rule in table
    }
    judged = [name for name in ours if not name.endswith(("in_proj_bias", "key.bias"))]
    return max(relative_error(ours[name], oracle[name]) for name in judged), max(
        relative_error(theirs[name], oracle[name]) for name in judged
    )


def measure(seeds: int, results: Path | None, log: Callable[[str], None]) -> ErrorTable:
    """Errors of both frameworks by precision and level, for each configuration and seed.

    Precisions that are already in ``results`` are not measured again.
    """
    errors_by_name: ErrorTable = (
        json.loads(results.read_text()) if results is not None and results.exists() else {}
    )
    for precision, (dtype, matmul) in PRECISIONS.items():
        if precision in errors_by_name:
            continue
        rows: dict[str, list[tuple[float, float]]] = {}
        # As `train --model.precision` computes
        products = "medium" if dtype is torch.bfloat16 else "highest"
        configs = {case.name: case.config.with_sizes(matmul_precision=products) for case in CASES}
        torch.set_float32_matmul_precision("highest" if matmul == "highest" else "high")
        with jax.default_matmul_precision(matmul):
            for name in SHOWN:
                log(f"{precision}: {name}")
                for seed in range(seeds):
                    both = pair(configs[name], dtype, seed=seed)
                    exact = oracle_of(both)
                    for level, errors in (forward(both, exact) | gradients(both, exact)).items():
                        rows.setdefault(level, []).append(errors)
                jax.clear_caches()  # all compiled programs together would take gigabytes
            for name in TRAINED:
                log(f"{precision}: steps of {name}")
                with jax.numpy_dtype_promotion("standard"):
                    for level, several in stepped(configs[name], dtype, seeds).items():
                        rows.setdefault(level, []).extend(several)
        errors_by_name[precision] = rows
        if results is not None:
            results.write_text(json.dumps(errors_by_name))
    return errors_by_name


def ratio(several: list[tuple[float, float]]) -> float:
    """The ratio of the median of our errors to that of PyTorch's."""
    ours, theirs = zip(*several, strict=True)
    return statistics.median(ours) / statistics.median(theirs)


def page(errors_by_name: ErrorTable, seeds: int) -> Iterator[str]:
    """Yield markdown: our and PyTorch's median and worst errors, and the bounds of the tests."""
    device = jax.devices()[0].device_kind
    yield (
        f"Device: {device} ({platform.machine()}); jax {jax.__version__},"
        f" torch {torch.__version__}.\n{len(SHOWN)} configurations, {seeds} seeds each"
        f" ({', '.join(SHOWN)});\nsteps of {' and '.join(TRAINED)}."
    )
    titles: dict[str, str] = {}  # on a CPU the precisions of float32 are the same
    for precision in errors_by_name:
        same = (name for name in titles if errors_by_name[name] == errors_by_name[precision])
        first = next(same, precision)
        titles[first] = f"{titles[first]}, {precision}" if first in titles else precision
    for precision, title in titles.items():
        rows = errors_by_name[precision]
        exact, sixteen = precision == "float64", precision in ("bfloat16", "float16")
        heads = ["level", "ours: median", "worst"]
        heads += [] if exact else ["PyTorch: median", "worst", "ratio of medians"]
        heads += ["allowed ratio"] if sixteen else ["the tests allow", "margin"]
        yield f"\n## {title}\n\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
        for level, several in rows.items():
            ours, theirs = ([pair[i] for pair in several] for i in (0, 1))
            cells = [level.replace("_", " "), f"{statistics.median(ours):.1e}", f"{max(ours):.1e}"]
            if not exact:
                cells += [f"{statistics.median(theirs):.1e}", f"{max(theirs):.1e}"]
                cells.append(f"{ratio(several):.2f}")
            if sixteen:
                cells.append(f"{RATIO}" if precision == "bfloat16" else "–")
            else:
                bound = BOUNDS.get(precision.partition(" ")[0], {}).get(level)
                margin = "–" if bound is None else f"{bound / max(ours):.0f}"
                cells += ["–" if bound is None else f"{bound:.0e}", margin]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="random weights of each configuration (%(default)s)"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="file of results; precisions with results are not measured again",
    )
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    warnings.filterwarnings("ignore", module="torch")  # the two that pyproject.toml names
    errors_by_name = measure(
        options.seeds, options.results, lambda text: print(text, file=sys.stderr, flush=True)
    )
    print("\n".join(page(errors_by_name, options.seeds)))
    over = [
        f"{level} {ratio(several):.2f}"
        for level, several in errors_by_name["bfloat16"].items()
        if ratio(several) > RATIO
    ]
    if over:
        sys.exit(f"bfloat16: more than {RATIO} times PyTorch's error: {', '.join(over)}")


if __name__ == "__main__":
    main()
