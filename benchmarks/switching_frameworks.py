"""One training run that switches PyTorch → JAX → PyTorch, against runs that stay in either.

See docs/switching-frameworks.md.

``python benchmarks/switching_frameworks.py`` trains on the built-in task, in float64 and in
float32, with every switch through a .pt file, prints a Markdown table and draws the loss curve.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from benchmarks.train_step import RATES
from jax_transformer import transformer
from jax_transformer.architectures import twins
from jax_transformer.config import codec
from jax_transformer.convert.training_state import torch_checkpoint
from jax_transformer.data import batches
from jax_transformer.data.options import DataOptions
from jax_transformer.storage import atomic, pt
from jax_transformer.storage.pt import writer
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, curves, optimizer, step
from jax_transformer.training.optimizer import OptimizerOptions
from jax_transformer.training.options import ModelOptions, TrainOptions
from jax_transformer.transformer import Transformer
from torch_reference import training

DTYPES = ("float64", "float32")
SWITCHED, STAYED = "switched", "stayed in PyTorch"
STAYED_JAX = "stayed in JAX"


@dataclass
class Bench:
    """A run folder before its first step, and the ways to train it."""

    run: training.Run
    options: TrainOptions
    corpus: corpus.Corpus
    train_step: step.TrainStep

    @classmethod
    def prepare(cls, path: Path, steps: int) -> "Bench":
        rates = dict.fromkeys(RATES, 0.0)
        sizes = dict(d_model=64, num_heads=4, d_ff=128, max_length=64)
        sizes |= dict(encoder_layers=2, decoder_layers=2)
        options = TrainOptions(
            steps=steps,
            model=ModelOptions("small", **sizes, **rates),
            data=DataOptions(tokens_per_batch=256, buckets=1),
            optimizer=OptimizerOptions(learning_rate=3e-3, warmup_steps=steps // 10, epsilon=1e-8),
        )
        folder = RunFolder(path)
        path.mkdir(parents=True)
        prepared = corpus.prepare(options, folder)
        atomic.write_text(folder.train_config, codec.to_json(options))
        corpus.record(prepared, folder)
        tx = optimizer.make(options.optimizer, steps)
        return cls(
            training.read(path),
            options,
            prepared,
            step.make_step(prepared.config, tx, options.optimizer.label_smoothing),
        )

    def begin(self, dtype: str) -> dict[str, Any]:
        """The checkpoint with the initial weights of ``train``."""
        model = Transformer(self.corpus.config, rngs=nnx.Rngs(params=self.options.seed))
        arrays = {
            name: jnp.asarray(array, dtype) for name, array in transformer.flatten(model).items()
        }
        state = step.initial_state(
            transformer.unflatten(model.config, arrays),
            optimizer.make(self.options.optimizer, self.options.steps),
        )
        return self.from_jax(state)

    def from_jax(self, state: step.TrainState) -> dict[str, Any]:
        names = [name for name, _ in twins.twin(self.corpus.config).named_parameters()]
        return torch_checkpoint.to_checkpoint(state, self.options, self.corpus.config, names)

    def in_torch(self, source: Path, destination: Path, updates: int) -> list[float]:
        loop = training.Loop(self.run, twins.twin(self.corpus.config))
        loop.load(torch.load(source, weights_only=True))
        losses = list(loop.losses(updates))
        torch.save(loop.state(), destination)
        return losses

    def in_jax(self, source: Path, destination: Path, updates: int) -> list[float]:
        text, losses = self.corpus, []
        state = torch_checkpoint.from_checkpoint(pt.read(source), self.options, text.config)
        first = int(state.step)
        for batch in batches.train_stream(text.train, text.plan, first, first + updates):
            state, measured = self.train_step(state, [batch], jax.random.key(0))
            losses.append(float(measured["loss"]))
        writer.write(destination, self.from_jax(state))
        return losses


def flights(
    bench: Bench, folder: Path, dtype: str, updates: int
) -> Iterator[tuple[str, list[float], dict[str, Any]]]:
    """Yield name, losses and last checkpoint of each way to do three times ``updates`` steps."""
    folder.mkdir()
    start, end = folder / "0.pt", folder / "end.pt"
    writer.write(start, bench.begin(dtype))
    for name, legs in (
        (STAYED, [bench.in_torch]),
        (STAYED_JAX, [bench.in_jax]),
        (SWITCHED, [bench.in_torch, bench.in_jax, bench.in_torch]),
    ):
        files = [start, *(folder / f"{name} {i}.pt" for i in range(1, len(legs))), end]
        losses = []
        for leg, source, destination in zip(legs, files, files[1:], strict=False):
            print(f"{dtype}, {name}: from update {len(losses)}", file=sys.stderr, flush=True)
            losses += leg(source, destination, 3 * updates // len(legs))
        yield name, losses, pt.read(end)
        end.unlink()


def weight_differences(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float]:
    """The largest difference of any weight, and of any weight that the model's output depends on.

    A key's bias does not: its gradient is rounding.
    """
    errors = {
        name: np.abs(np.float64(ours["model"][name]) - theirs["model"][name])
        for name in ours["model"]
    }
    largest = max(float(error.max()) for error in errors.values())
    for name, error in errors.items():
        if name.endswith("in_proj_bias"):  # query, key, value
            errors[name] = np.delete(error, np.s_[len(error) // 3 : 2 * len(error) // 3])
    return largest, max(float(error.max()) for error in errors.values())


def draw(picture: Path, losses: dict[str, dict[str, list[float]]], updates: int) -> None:
    """Plot the float64 curve above, and below it the distance of each run from the PyTorch run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(curves.STYLE):
        figure, (above, below) = plt.subplots(
            2, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="constrained"
        )
        now = np.arange(1, 3 * updates + 1)
        above.plot(now, losses["float64"][STAYED], color="#bbbbbb", linewidth=5, label=STAYED)
        for leg, (framework, color) in enumerate(
            (("PyTorch", curves.ORANGE), ("JAX", curves.BLUE), ("PyTorch again", curves.ORANGE))
        ):
            part = slice(leg * updates, (leg + 1) * updates)
            curve = losses["float64"][SWITCHED][part]
            above.plot(now[part], curve, color=color, linewidth=1.2, label=framework)
        above.set(title="One run, two switches of framework", ylabel="loss, nats per token")
        above.legend()
        for dtype, color in (("float32", curves.GREEN), ("float64", curves.BLUE)):
            apart = np.abs(np.subtract(losses[dtype][SWITCHED], losses[dtype][STAYED]))
            some, label = apart > 0, f"{dtype}, if not equal"
            below.plot(now[some], apart[some], ".", color=color, label=label)
        below.set(yscale="log", ylim=(1e-17, 1), xlabel="update")
        below.set_ylabel("|difference of loss|\nto the run that stayed")
        below.legend()
        for axes in (above, below):
            for switch in (updates, 2 * updates):
                axes.axvline(switch + 0.5, color="#888888", linestyle=":")
        figure.savefig(picture, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--updates", type=int, default=40, help="in each of the three legs (%(default)s)"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("loss.png"),
        help="the picture (%(default)s)",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # the thread pools of two frameworks would compete
    losses: dict[str, dict[str, list[float]]] = {}
    rows = ["| | losses apart | weights apart | without key biases |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as temporary:
        bench = Bench.prepare(Path(temporary) / "run", 3 * options.updates)
        for dtype in DTYPES:
            with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
                runs = {
                    name: (curve, end)
                    for name, curve, end in flights(
                        bench, Path(temporary) / dtype, dtype, options.updates
                    )
                }
            losses[dtype] = {name: curve for name, (curve, _) in runs.items()}
            for name in (SWITCHED, STAYED_JAX):
                apart = np.abs(np.subtract(losses[dtype][name], losses[dtype][STAYED])).max()
                weights = weight_differences(runs[name][1], runs[STAYED][1])
                rows.append(
                    f"| {dtype}: {name} | {apart:.1e} | {weights[0]:.1e} | {weights[1]:.1e} |"
                )
    draw(options.plot, losses, options.updates)
    curve = losses["float64"][SWITCHED]
    print(
        f"{3 * options.updates} updates, loss {curve[0]:.2f} to {curve[-1]:.2f}; each against the"
        " run that stayed in PyTorch:\n"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
