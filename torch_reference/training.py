"""A plain PyTorch training loop over a run folder of jax_transformer's ``train``.

It uses the run's text, tokenizer, batches, model, optimizer and schedule.

``python -m torch_reference.training RUN --steps 500 --checkpoint out.pt [--from in.pt]`` makes 500
updates, from the start or from the state in ``in.pt``, prints the loss of each as a line of JSON,
and saves an ordinary ``torch.save`` checkpoint. RUN is only read.
"""

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jax_transformer.architectures import twins
from jax_transformer.config import TransformerConfig
from jax_transformer.data import batches, encoding, parallel_text
from jax_transformer.data.encoding import load_tokenizer
from jax_transformer.data.options import Task, TooLong
from jax_transformer.storage import run_folder
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions, Schedule
from jax_transformer.training.options import TrainOptions, read_options


@dataclass(frozen=True)
class Run:
    """A run folder: the model, the options, and the encoded text with the plan of its batches."""

    config: TransformerConfig
    options: TrainOptions
    text: encoding.EncodedPairs
    plan: batches.BatchPlan

    def batch(self, number: int) -> list[Tensor]:
        """Source (b, s), target after <bos> (b, t) and target (b, t) of batch ``number``.

        Batches are counted from 0 over all epochs.
        """
        bucket, rows = self.plan.batch_indices(number)
        batch = batches.make_batch(
            self.text.take(rows), self.plan.widths[bucket], self.plan.rows[bucket]
        )
        return [torch.from_numpy(side).long() for side in batch]


def read(folder: Path) -> Run:
    """Read a run. Raises ValueError if its text or tokenizer changed since it began, or if this
    loop does not have what it needs."""
    run_folder.verify(folder)
    config = TransformerConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
    recorded = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    options = read_options(RunFolder(folder))
    if options.optimizer.ema:
        raise ValueError(
            f"{folder}: optimizer.ema={options.optimizer.ema}, "
            "but this loop keeps no moving average of the weights"
        )
    if config.compute_dtype is not None:
        raise ValueError(
            f"{folder}: compute_dtype={config.compute_dtype}, "
            "but this loop computes in the dtype of the parameters"
        )
    data, words = options.data, load_tokenizer(folder)
    for name in ("prepared", "packing", "bpe_dropout"):
        if value := getattr(data, name):
            raise ValueError(f"{folder}: data.{name}={value} is not known here")
    if data.task is not Task.TRANSLATION:
        raise ValueError(f"{folder}: data.task={data.task.value} is not known here")
    train = corpus.read_split(data, "train")
    pairs = train.pairs
    for name, now in (
        ("train_sha256", parallel_text.content_hash(pairs)),
        ("tokenizer_sha256", words.hash),
    ):
        if recorded[name] != now:
            raise ValueError(
                f"{folder}: {name} is {now}, but was {recorded[name]} when the run began"
            )
    limits = (
        length or config.longest for length in (data.max_source_length, data.max_target_length)
    )
    text = encoding.encode_pairs(
        pairs, words.source, words.target, *limits, cut=data.too_long is TooLong.CUT
    )
    table, order = batches.LengthTable.of(text.lengths, corpus.parts(data, train, text))
    plan = batches.BatchPlan(
        table, tuple(recorded["widths"]), tuple(recorded["rows"]), options.seed, data.train_weights
    )
    return Run(config, options, text.take(order), plan)


def make_optimizer(
    options: OptimizerOptions, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The run's optimizer by torch.optim. Raises ValueError if PyTorch has none that is equal."""
    common = {"lr": options.rate.learning_rate, "weight_decay": options.weight_decay}
    adam: dict[str, Any] = {"betas": (options.beta1, options.beta2), "eps": options.epsilon}
    match options.name:
        case OptimizerName.ADAMW:
            return torch.optim.AdamW(parameters, **common, **adam)
        case OptimizerName.ADAM:
            return torch.optim.Adam(parameters, **common, **adam)
        case OptimizerName.SGD:
            momentum, nesterov = options.momentum, options.nesterov
            return torch.optim.SGD(parameters, **common, momentum=momentum, nesterov=nesterov)
    raise ValueError(
        f"optimizer.name={options.name.value}: "
        "torch.optim has no equal optimizer; choose adamw, adam or sgd"
    )


def relative_rate(step: int, kind: Schedule, warmup: int, steps: int) -> float:
    """The learning rate of update ``step``, counted from 0, as a fraction of the highest."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    since, remaining = step - warmup, max(1, steps - warmup)
    match kind:
        case Schedule.COSINE:
            return 0.5 * (1 + math.cos(math.pi * min(1.0, since / remaining)))
        case Schedule.LINEAR:
            return max(0.0, 1 - since / remaining)
        case Schedule.INVERSE_SQRT:
            return math.sqrt(max(1, warmup) / (since + max(1, warmup)))
        case Schedule.CONSTANT:
            return 1.0


class Loop:
    """A module with its torch.optim optimizer, a LambdaLR schedule, and its step in the run."""

    def __init__(self, run: Run, module: nn.Module):
        options = run.options.optimizer
        schedule = options.rate.schedule, options.rate.warmup_steps, run.options.steps
        self.run, self.module, self.step = run, module, 0
        self.optimizer = make_optimizer(
            options, [parameter for parameter in module.parameters() if parameter.requires_grad]
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: relative_rate(step, *schedule)
        )

    def state(self) -> dict[str, Any]:
        """The content of a checkpoint, for ``torch.save``."""
        parts = {"model": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()} | {
            "step": self.step,
            "config": self.run.config.to_json(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load another loop's state, in the dtype of its weights."""
        self.module.to(next(iter(state["model"].values())).dtype)
        for name, part in (
            ("model", self.module),
            ("optimizer", self.optimizer),
            ("scheduler", self.scheduler),
        ):
            part.load_state_dict(state[name])
        self.step = state["step"]

    def losses(self, updates: int) -> Iterator[float]:
        """Make updates and yield the loss of each, in nats per token.

        The batches of one update count together, each token weighing the same.
        """
        options = self.run.options.optimizer
        self.module.train()
        for _ in range(updates):
            # A function of the step: a resumed run draws the same dropout
            torch.manual_seed((self.run.options.seed * 2**32 + self.step) % 2**64)
            first = self.step * options.accumulate
            group = [self.run.batch(first + i) for i in range(options.accumulate)]
            tokens = max(
                1,
                sum(int((target != self.run.config.target_pad_id).sum()) for _, _, target in group),
            )
            self.optimizer.zero_grad()
            total = 0.0
            for batch in group:
                loss = self._summed_loss(*batch, options.label_smoothing) / tokens
                loss.backward()
                total += loss.item()
            if options.clip_norm:
                nn.utils.clip_grad_norm_(self.module.parameters(), options.clip_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            yield total

    def _summed_loss(
        self, source: Tensor, before: Tensor, target: Tensor, smoothing: float
    ) -> Tensor:
        logits, pad = self.module(source, before).flatten(0, 1), self.run.config.target_pad_id
        return nn.functional.cross_entropy(
            logits, target.flatten(), ignore_index=pad, label_smoothing=smoothing, reduction="sum"
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m torch_reference.training", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder of jax_transformer's `train`")
    parser.add_argument("--steps", type=int, required=True, help="number of updates")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="file to save the final state in"
    )
    parser.add_argument(
        "--from",
        dest="begin",
        type=Path,
        help="checkpoint to continue from (default: the twin's own initial weights)",
    )
    arguments = parser.parse_args()
    run = read(arguments.run)
    torch.manual_seed(run.options.seed)
    loop = Loop(run, twins.twin(run.config))
    if arguments.begin:
        loop.load(torch.load(arguments.begin, weights_only=True))
    for loss in loop.losses(arguments.steps):
        print(json.dumps({"step": loop.step, "loss": loss}), flush=True)
    temporary = arguments.checkpoint.with_name(f".{arguments.checkpoint.name}.{os.getpid()}")
    torch.save(loop.state(), temporary)
    os.replace(temporary, arguments.checkpoint)


if __name__ == "__main__":
    main()
