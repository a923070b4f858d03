"""Training of Hugging Face families: the loss from ``labels``, and every gradient."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jax_transformer import transformer
from jax_transformer.data.batches import Batch
from jax_transformer.nn.dropout import Dropout
from parity_tests import test_gradients as gradients_of
from parity_tests import twins
from parity_tests.huggingface import CASES, Pair, batch, exact_positions, inputs, pair
from parity_tests.levels import assert_close
from parity_tests.marks import quick_if
from parity_tests.test_dropout import DrawnDropout, GivenDropout


def labelled(both: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Return sources, and labels that are -100 after their end."""
    source, labels = batch(both.config)
    labels[:, 0] = labels[:, 1]
    return source, np.where(labels == both.config.target_pad_id, -100, labels)


def batch_of(both: Pair, source: np.ndarray, labels: np.ndarray) -> Batch:
    """Return the batch for our loss, shifted as the family shifts it: mBART, PLBART and FSMT move
    the last token to the front, the others put their start token there.
    """
    pad = both.config.target_pad_id
    target = np.where(labels == -100, pad, labels)
    last = np.take_along_axis(target, (target != pad).sum(axis=1, keepdims=True) - 1, axis=1)
    wraps = both.config.architecture in ("mbart", "plbart", "fsmt")
    first = last if wraps else np.full_like(last, both.config.bos_id)
    return Batch(
        source if both.config.mel_bins is not None else source.astype(np.int32),
        np.concatenate([first, target[:, :-1]], axis=1).astype(np.int32),
        target.astype(np.int32),
    )


def their_loss(both: Pair, source: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    shifted = {}
    if both.config.architecture == "fsmt":  # by itself it shifts the source, not the labels
        ids = torch.from_numpy(labels.copy())
        shifted["decoder_input_ids"] = both.theirs.prepare_decoder_input_ids_from_labels(ids)
    arguments = inputs(both.config, source) | shifted
    return both.theirs(**arguments, labels=torch.from_numpy(labels)).loss


def our_gradients(
    both: Pair, batch: Batch, dropout: Dropout | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    return gradients_of.flax_gradients(twins_of(both), batch, dropout, smoothing=0.0)


def twins_of(both: Pair) -> twins.Pair:
    return twins.Pair(both.config, both.ours, both.theirs, *batch(both.config))


def assert_same(
    both: Pair, ours: tuple[jax.Array, dict[str, jax.Array]], loss: torch.Tensor
) -> None:
    both.theirs.zero_grad()
    loss.backward()
    assert_close((ours[0], loss), 1e-12, "loss")
    gradients_of.assert_same_gradients(ours[1], gradients_of.torch_gradients(twins_of(both)))


# The suite has one family of each kind of embedding, positions and blocks, and `-m slow` all
QUICK = ("marian two vocabularies", "mbart", "umt5", "whisper")


@pytest.mark.proves("gradients")
@pytest.mark.parametrize(
    "name", [quick_if(name in QUICK, name) for name in CASES if "square" not in name]
)
def test_the_loss_from_labels_and_every_gradient(name: str, in_float64):
    both = exact_positions(pair(name))
    source, labels = labelled(both)
    ours = our_gradients(both, batch_of(both, source, labels))
    assert_same(both, ours, their_loss(both, source, labels))
    own, target = "source_embedding.embedding", "target_embedding.embedding"
    shared = own if own in ours[1] else target
    padding = np.asarray(ours[1][shared][both.config.source_pad_id])
    output = both.config.tying.tied_output
    # As a row of the output layer, padding's row still has a gradient
    tied = output and shared == target
    assert padding.any() == (tied or both.config.padding_trained)


def test_a_gradient_through_the_start_padding_is_detected():
    """Negative control: Marian starts with padding, whose row it does not train."""
    both = pair("marian")
    (source, labels), name = labelled(both), "target_embedding.embedding"
    assert both.config.bos_id == both.config.target_pad_id
    arrays = transformer.flatten(both.ours)
    other = both._replace(config=replace(both.config, padding_trained=True))
    other = other._replace(ours=transformer.unflatten(other.config, arrays))
    one, two = (
        np.asarray(our_gradients(each, batch_of(each, source, labels))[1][name])
        for each in (both, other)
    )
    rows = np.abs(one - two).max(axis=1)
    assert np.flatnonzero(rows > 1e-6).tolist() == [both.config.target_pad_id]


class MaskedFunction(GivenDropout):
    """torch.nn.functional.dropout with masks in the order of their draws."""

    def dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: Any = None):
        if not training or p == 0:
            return x
        assert p == self.rate, f"rate {p}, not {self.rate}"
        return self(x)


@pytest.mark.proves("gradients")
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_the_same_masks_of_dropout_give_the_same_loss_and_gradients(
    name: str, in_float64, monkeypatch
):
    """Draws come in one order, so every dropout is at its place; for the others' code too."""
    both = pair(name, dropout=0.3)
    source, labels = labelled(both)
    inputs = batch_of(both, source, labels)
    masks: dict[str, np.ndarray] = {}
    drawn = DrawnDropout(masks, {})
    ours = our_gradients(both, inputs, drawn)
    masked = MaskedFunction([*map(torch.from_numpy, masks.values())], 0.3)
    plain = their_loss(both, source, labels)
    monkeypatch.setattr(nn.functional, "dropout", masked.dropout)
    both.theirs.train()
    assert_same(both, ours, their_loss(both, source, labels))
    assert masked.calls == len(masks) and abs(plain.item() - ours[0].item()) > 1e-3
