"""Pretraining from plain lines: the loss of every update is that of transformers' model."""

import dataclasses
import types

import jax
import numpy as np
import pytest
import torch

from jax_transformer.data import batches, phrases
from jax_transformer.data.options import DataOptions, Task
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, optimizer, step
from jax_transformer.training.optimizer import OptimizerOptions
from jax_transformer.training.options import ModelOptions, TrainOptions
from parity_tests import huggingface
from parity_tests.marks import quick_if
from torch_reference import training

TASKS = {"t5": Task.SPAN_CORRUPTION, "bart": Task.DENOISING}
LINES = 300


class OfTransformers(torch.nn.Module):
    """A model of transformers with the arguments and the logits of a twin."""

    def __init__(self, both: huggingface.Pair) -> None:
        super().__init__()
        self.model, self.config = both.theirs, both.config

    def forward(self, source: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        inputs = huggingface.inputs(self.config, source.numpy())
        return self.model(**inputs, decoder_input_ids=before).logits


def losses(name: str, steps: int, monkeypatch, tmp_path) -> tuple[list[float], list[float]]:
    """Train both models on lines of the built-in task, from the same weights."""
    pairs = phrases.load()
    few = {"train": pairs["train"][: LINES // 2], "valid": pairs["valid"][:5]}
    monkeypatch.setattr(phrases, "load", lambda: few)
    options = TrainOptions(
        steps=steps,
        data=DataOptions(task=TASKS[name], vocab_size=500, tokens_per_batch=256, buckets=1),
        model=ModelOptions(preset=name, max_length=33),
        optimizer=OptimizerOptions(warmup_steps=steps // 10),
    )
    text = corpus.prepare(options, RunFolder(tmp_path / "run"))
    ids = {"decoder_start_token_id": text.config.bos_id, "eos_token_id": text.config.eos_id}
    ids |= {"pad_token_id": text.config.source_pad_id, "vocab_size": text.tokenizer.vocab_size}
    case = huggingface.CASES[name]
    shallow = dict.fromkeys((key for key in case.values if key.endswith("_layers")), 1)
    case = dataclasses.replace(case, values=case.values | ids | shallow)
    monkeypatch.setitem(huggingface.CASES, name, case)
    both = huggingface.pair(name, dropout=0.0)
    all_batches = list(batches.train_stream(text.train, text.plan, 0, steps, drawn=text.drawn))
    tensors = [[torch.from_numpy(side).long() for side in batch] for batch in all_batches]
    run = types.SimpleNamespace(options=options, config=both.config, batch=tensors.__getitem__)
    theirs = list(training.Loop(run, OfTransformers(both)).losses(steps))
    return of_steps(both, options, all_batches), theirs


def of_steps(both: huggingface.Pair, options: TrainOptions, all_batches: list) -> list[float]:
    """Return the losses of our steps."""
    chosen = options.optimizer
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        tx = optimizer.make(chosen, options.steps)
        train_step = step.make_step(both.config, tx, chosen.label_smoothing)
        state, ours = step.initial_state(both.ours, tx), []
        for batch in all_batches:
            state, measured = train_step(state, [batch], jax.random.key(0))
            ours.append(float(measured["loss"]))
    return ours


@pytest.mark.parametrize(
    ("name", "steps"), [("t5", 10), quick_if(False, "t5", 300), quick_if(False, "bart", 300)]
)
def test_losses_are_those_of_transformers(name, steps, in_float64, monkeypatch, tmp_path):
    ours, theirs = losses(name, steps, monkeypatch, tmp_path)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert steps == 10 or np.mean(ours[-5:]) < 0.75 * np.mean(ours[:5])
