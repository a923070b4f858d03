"""Checkpoints of T5X: to Hugging Face folders and back, against T5X's networks in NumPy."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from jax_transformer import cli
from parity_tests import t5x_files
from parity_tests.marks import quick_if
from parity_tests.t5x_files import Sizes
from parity_tests.unit import runs

GATED = {"activations": ("gelu", "linear"), "via_embedding": False}
SQUARE = {"vocab": 32, "emb": 32, "heads": 32, "head_dim": 1, "mlp": 32, "encoder": 1, "decoder": 2}
CASES = {
    "t5 1.0": Sizes(),
    "t5 1.1": Sizes(**GATED),
    "t5 1.1 square": Sizes(**GATED | SQUARE),
    "t5 of Flan": Sizes(**GATED, emb=16, heads=3, head_dim=4, mlp=32, encoder=2, decoder=2),
    "mt5": Sizes(**GATED, vocab=41, heads=2, vocabulary="mc4.250000.100extra"),
    "umt5": Sizes(**GATED, scalable=True),
    "umt5 scanned": Sizes(**GATED, scalable=True, scan_axis=1),
    "umt5 scanned in axis 0, tied, square": Sizes(
        **SQUARE, activations=("silu", "linear"), scalable=True, scan_axis=0
    ),
}
REPEATED = ("t5 of Flan", "umt5")
"""Cases made of the same parts as others; their tests are slow."""


def convert(*arguments: object) -> int:
    return cli.main(["convert", *map(str, arguments), "--no-check"])


def batch(sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return a source (3, 7) with ragged padding, and a target (3, 5) that begins with 0."""
    draw = np.random.default_rng(1)
    source = draw.integers(2, sizes.vocab, (3, 7))
    for row, length in enumerate((7, 4, 1)):
        source[row, length:] = 0
    target = draw.integers(2, sizes.vocab, (3, 5))
    target[:, 0] = 0
    return source, target


def theirs(folder, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        ids = torch.from_numpy(source)
        out = model(ids, attention_mask=ids > 0, decoder_input_ids=torch.from_numpy(target))
    return out.logits.numpy()


def back(sizes: Sizes) -> list[str]:
    if sizes.scan_axis is None:
        return ["--to", "t5x"]
    return ["--to", "t5x", "--scan-layers", "--param-scan-axis", str(sizes.scan_axis)]


@pytest.mark.parametrize("name", [quick_if(name not in REPEATED, name) for name in CASES])
def test_transformers_computes_what_t5x_computes_and_the_way_back_is_exact(
    name, tmp_path, in_float64
):
    sizes = CASES[name]
    weights = t5x_files.params(sizes)
    folder = t5x_files.write(tmp_path / "model/checkpoint_7", weights)
    (tmp_path / "model/config.gin").write_text(sizes.gin())
    assert convert(folder, tmp_path / "hf", "--to", "hf") == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["model_type"] == name.split()[0]
    source, target = batch(sizes)
    expected = t5x_files.logits(sizes, weights, source, target)
    actual = theirs(tmp_path / "hf", source, target)
    assert np.abs(actual - expected).max() <= 1e-12 * np.abs(expected).max()
    assert convert(tmp_path / "hf", tmp_path / "checkpoint_7", *back(sizes)) == 0
    assert not runs.differing(t5x_files.read(tmp_path / "checkpoint_7"), weights)
    index = (tmp_path / "checkpoint_7/checkpoint").read_bytes()
    assert index == (folder / "checkpoint").read_bytes()


def exchanged(weights: t5x_files.Arrays) -> t5x_files.Arrays:
    other = {"wi_0": "wi_1", "wi_1": "wi_0"}
    names = {name: ".".join(other.get(word, word) for word in name.split(".")) for name in weights}
    return {names[name]: array for name, array in weights.items()}


def transposed(weights: t5x_files.Arrays) -> t5x_files.Arrays:
    return {name: array.T if name.endswith("kernel") else array for name, array in weights.items()}


def without_head(weights: t5x_files.Arrays) -> t5x_files.Arrays:
    return weights | {"decoder.logits_dense.kernel": weights["token_embedder.embedding"].T * 0.5}


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [
        (exchanged, CASES["t5 1.1 square"]),
        (transposed, CASES["t5 1.1 square"]),
        (without_head, Sizes(**SQUARE)),
    ],
)
def test_the_faults_of_other_converters_change_the_logits(fault, sizes):
    """So that equal logits, above, exclude them. No shape shows any of them here."""
    weights = t5x_files.params(sizes)
    source, target = batch(sizes)
    right = t5x_files.logits(sizes, weights, source, target)
    if fault is without_head:
        sizes = dataclasses.replace(sizes, via_embedding=False)
    wrong = t5x_files.logits(sizes, fault(weights), source, target)
    assert np.abs(wrong - right).max() > 0.01 * np.abs(right).max()


def test_a_run_has_the_weights_of_the_checkpoint_in_their_own_dtype(tmp_path, capsys):
    sizes = dataclasses.replace(CASES["umt5 scanned"], decoder=1)
    weights = t5x_files.params(sizes, dtype=ml_dtypes.bfloat16)
    state = t5x_files.adafactor(weights)
    folder = t5x_files.write(tmp_path / "t5x", weights, state=state, chunks=halves)
    (folder / "config.gin").write_text(sizes.gin())
    assert convert(folder, tmp_path / "run", "--json") == 0
    dropped = json.loads(capsys.readouterr().out)["plan"]["dropped"]
    assert {note["name"] for note in dropped} == {
        f"state.param_states ({len(state)} arrays: m, v, v_col, v_row)",
        "state.step",
    }
    assert convert(tmp_path / "run", tmp_path / "again", *back(sizes)) == 0
    assert not runs.differing(t5x_files.read(tmp_path / "again"), weights)


def halves(shape: tuple[int, ...]) -> list[int]:
    """Chunks of which the last of an axis reach beyond the array."""
    return [-(-length // 2) for length in shape]
