"""A plain PyTorch training loop over a run folder: the text, tokenizer, batches, model and schedule that ``train`` of jax_transformer would use.

``python -m torch_reference.training RUN --steps 500 --checkpoint out.pt [--from in.pt]`` makes 500 updates, from the start or from where ``in.pt``
stands, prints the loss of each as a line of JSON, and saves an ordinary ``torch.save`` checkpoint. RUN is only read.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jax_transformer import torch_bridge
from jax_transformer.config import TransformerConfig
from jax_transformer.data import (
    batch_plan,
    batches,
    encoding,
    hub,
    pair_files,
    parallel_text,
    phrases,
    run_tokenizer,
)


@dataclass(frozen=True)
class Run:
    """What a run folder says: the model, the options, and the encoded text with the plan of its batches."""

    config: TransformerConfig
    options: dict[str, Any]
    text: encoding.EncodedPairs
    plan: batch_plan.BatchPlan

    def batch(self, number: int) -> list[Tensor]:
        """Source (b, s), target behind <bos> (b, t) and target (b, t) of batch ``number``, counted from 0 over all epochs."""
        bucket, rows = self.plan.batch_indices(number)
        made = batches.make_batch(self.text, rows, self.plan.widths[bucket], self.plan.rows[bucket])
        return [torch.from_numpy(side).long() for side in made]


def read(folder: Path) -> Run:
    """The run. Raises ValueError where its text or tokenizer is no longer the one that it began with, or where this loop lacks what it asks for."""
    config = TransformerConfig.from_json((folder / "config.json").read_text(encoding="utf-8"))
    options, recorded = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("train_config.json", "data.json")
    )
    if options["optimizer"]["ema"]:
        raise ValueError(
            f"{folder}: optimizer.ema={options['optimizer']['ema']}, and this loop keeps no moving average"
        )
    if config.compute_dtype is not None:
        raise ValueError(
            f"{folder}: compute_dtype={config.compute_dtype}, and this loop computes in its parameters' dtype"
        )
    data, words, pairs = (
        options["data"],
        run_tokenizer.load_folder(folder),
        read_pairs(options["data"]),
    )
    for name, now in (
        ("train_sha256", parallel_text.content_hash(pairs)),
        ("tokenizer_sha256", words.hash),
    ):
        if recorded[name] != now:
            raise ValueError(
                f"{folder}: {name} is {now}, and was {recorded[name]} when the run began"
            )
    limits = (data[f"max_{side}_length"] or config.longest for side in ("source", "target"))
    text = encoding.encode_pairs(
        pairs, words.source, words.target, *limits, cut=data["too_long"] == "cut"
    )
    plan = batch_plan.BatchPlan(
        text.lengths, tuple(recorded["widths"]), tuple(recorded["rows"]), options["seed"]
    )
    return Run(config, options, text, plan)


def read_pairs(data: dict[str, Any]) -> list[tuple[str, str]]:
    """The training text, from wherever the options have it."""
    fields = data["source_field"], data["target_field"]
    if data["train_source"]:
        files = zip(data["train_source"], data["train_target"], strict=True)
        return parallel_text.joined(
            [parallel_text.read_pairs(source, target) for source, target in files]
        ).pairs
    if data["train"]:
        return parallel_text.joined(
            [pair_files.read_pairs(path, *fields) for path in data["train"]]
        ).pairs
    if data["dataset"]:
        return hub.read_pairs(
            data["dataset"], data["dataset_config"], data["train_split"], *fields
        ).pairs
    return phrases.load()["train"]


def relative_rate(step: int, kind: str, warmup: int, steps: int) -> float:
    """The learning rate of update ``step``, counted from 0, as a share of the highest."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    since = step - warmup
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * min(1.0, since / max(1, steps - warmup))))
    return math.sqrt(max(1, warmup) / (since + max(1, warmup))) if kind == "inverse_sqrt" else 1.0


class Loop:
    """A module with torch.optim.AdamW, a LambdaLR schedule, and its place in the run."""

    def __init__(self, run: Run, module: nn.Module):
        rule = run.options["optimizer"]
        schedule = rule["schedule"], rule["warmup_steps"], run.options["steps"]
        self.run, self.module, self.step = run, module, 0
        self.adam = torch.optim.AdamW(
            [parameter for parameter in module.parameters() if parameter.requires_grad],
            lr=rule["learning_rate"],
            betas=(rule["beta1"], rule["beta2"]),
            eps=rule["epsilon"],
            weight_decay=rule["weight_decay"],
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.adam, lambda step: relative_rate(step, *schedule)
        )

    def state(self) -> dict[str, Any]:
        """What ``torch.save`` is given."""
        parts = {"model": self.module, "optimizer": self.adam, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()} | {
            "step": self.step,
            "config": self.run.config.to_json(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from another loop's state, in the dtype of its weights."""
        self.module.to(next(iter(state["model"].values())).dtype)
        for name, part in (
            ("model", self.module),
            ("optimizer", self.adam),
            ("scheduler", self.scheduler),
        ):
            part.load_state_dict(state[name])
        self.step = state["step"]

    def losses(self, updates: int) -> Iterator[float]:
        """Make updates, and give the loss of each in nats a token: its batches together, each token weighing the same."""
        rule = self.run.options["optimizer"]
        self.module.train()
        for _ in range(updates):
            torch.manual_seed(
                (self.run.options["seed"] * 2**32 + self.step) % 2**64
            )  # a function of the step: dropout goes on as it was
            first = self.step * rule["accumulate"]
            group = [self.run.batch(first + i) for i in range(rule["accumulate"])]
            tokens = max(
                1,
                sum(int((target != self.run.config.target_pad_id).sum()) for _, _, target in group),
            )
            self.adam.zero_grad()
            total = 0.0
            for batch in group:
                loss = self._summed_loss(*batch, rule["label_smoothing"]) / tokens
                loss.backward()
                total += loss.item()
            if rule["clip_norm"]:
                nn.utils.clip_grad_norm_(self.module.parameters(), rule["clip_norm"])
            self.adam.step()
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
    parser = argparse.ArgumentParser(prog="python -m torch_reference.training", description=__doc__)
    parser.add_argument(
        "run", type=Path, help="a run folder, as `train` of jax_transformer makes it"
    )
    parser.add_argument("--steps", type=int, required=True, help="how many updates to make")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="where to save the state behind them"
    )
    parser.add_argument(
        "--from",
        dest="begin",
        type=Path,
        help="a checkpoint to go on from; without one, the twin's own initial weights",
    )
    told = parser.parse_args()
    run = read(told.run)
    torch.manual_seed(run.options["seed"])
    loop = Loop(run, torch_bridge.twin(run.config))
    if told.begin:
        loop.load(torch.load(told.begin, weights_only=True))
    for loss in loop.losses(told.steps):
        print(json.dumps({"step": loop.step, "loss": loss}), flush=True)
    temporary = told.checkpoint.with_name(f".{told.checkpoint.name}.{os.getpid()}")
    torch.save(loop.state(), temporary)
    os.replace(temporary, told.checkpoint)


if __name__ == "__main__":
    main()
