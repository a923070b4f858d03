"""Runs that begin with a preset of a Hugging Face family: transformers loads what they become."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jax_transformer as jt
from jax_transformer.architectures import huggingface, registry
from jax_transformer.data.tokenizer import Tokenizer
from parity_tests import preset_names
from parity_tests.marks import quick_if
from parity_tests.unit import runs

PRESETS = [
    name
    for name in jt.preset_names()
    if registry.presets()[name].config.architecture in huggingface.families()
    and name in preset_names.TEXT
]
LINES = [f"{i} a {'xyz'[i % 3]} b" for i in range(40)]
VOCABULARY = 280


def random_run(preset: str, folder: Path) -> Path:
    """Return a run of random weights and a tokenizer that was trained for them."""
    asked = jt.preset(preset, vocab_size=VOCABULARY)
    ids = {"pad_id": asked.target_pad_id, "bos_id": asked.bos_id, "eos_id": asked.eos_id}
    tokenizer = Tokenizer.train(LINES, VOCABULARY, **ids)
    sizes = dict(d_model=16, num_heads=2, d_ff=24, encoder_layers=2, decoder_layers=1)
    config = jt.preset(preset, vocab_size=tokenizer.vocab_size, max_length=40, **sizes)
    assert (config.target_pad_id, config.bos_id) == (tokenizer.pad_id, tokenizer.bos_id)
    jt.convert.save(jt.Transformer(config, rngs=nnx.Rngs(0)), folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def test_the_families_with_presets_are_listed():
    # mT5 and UMT5 have none: they are T5 with other values. No run is trained of sound
    families = {
        name
        for name, family in huggingface.families().items()
        if any(preset.config.mel_bins is None for preset in family.presets.values())
    }
    assert {*PRESETS} == families and len(PRESETS) == len(families)


# The others are built of the same parts, and Marian is trained below
@pytest.mark.parametrize("preset", [quick_if(name in ("bart", "t5"), name) for name in PRESETS])
def test_transformers_loads_a_run_s_folder_and_generates_the_same(preset, tmp_path):
    run, out = random_run(preset, tmp_path / "run"), tmp_path / "out"
    assert runs.main("convert", run, out, "--to", "hf", "--no-check") == 0
    check_equal(run, out)


def test_a_run_that_was_trained_from_scratch_becomes_a_folder(tmp_path):
    (tmp_path / "text").mkdir()
    options = "--model.preset marian --steps 2 --eval-every 2 --eval-pairs 2 --data.vocab-size 300"
    options += " --data.tokens-per-batch 256"
    options += " --model.d-model 16 --model.num-heads 2 --model.d-ff 24 --model.max-length 32"
    options += " --model.encoder-layers 1 --model.decoder-layers 1 --optimizer.warmup-steps 1"
    text = runs.write_text(tmp_path / "text")
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        done = runs.train("--run", tmp_path / "run", *text, *options.split())
    assert done.code == 0, done.err
    assert runs.main("convert", tmp_path / "run", tmp_path / "out", "--to", "hf", "--no-check") == 0
    check_equal(tmp_path / "run", tmp_path / "out")
    model, _ = jt.load(tmp_path / "run")  # CTranslate2 begins with an embedding of zeros
    table = np.asarray(model.target_embedding.embedding[...])
    assert table.any(axis=1).tolist() == [*[True] * (len(table) - 1), False]
    assert model.config.target_pad_id == len(table) - 1


def check_equal(run: Path, out: Path) -> None:
    """Assert that transformers reads lines, generates and writes as the run does."""
    model, tokenizer = jt.load(run)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(out).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    lines = LINES[:3]
    batch = their_tokenizer(lines, return_tensors="pt", padding=True, return_token_type_ids=False)
    source = np.full(batch["input_ids"].shape, tokenizer.pad_id, np.int32)
    for row, line in zip(source, lines, strict=True):
        ids = [*tokenizer.encode(line), *tokenizer.suffix]
        row[: len(ids)] = ids
    assert (batch["input_ids"].numpy() == source).all()
    start = theirs.generation_config.decoder_start_token_id
    assert start == model.config.bos_id == tokenizer.bos_id
    generation = theirs.generation_config
    assert generation.pad_token_id == their_tokenizer.pad_token_id == tokenizer.pad_id
    assert generation.eos_token_id == their_tokenizer.eos_token_id == tokenizer.eos_id
    ours = jt.generate.greedy(model, source, max_length=6)
    with torch.no_grad():
        ids = theirs.generate(**batch, num_beams=1, do_sample=False, max_length=7).numpy()[:, 1:]
    assert (np.asarray(ours)[:, : ids.shape[1]] == ids).all()
    expected = [tokenizer.decode(row) for row in ids]
    assert their_tokenizer.batch_decode(ids, skip_special_tokens=True) == expected
    translator = jt.Translator.load(out)  # and our own reader of such folders
    assert translator(lines, beam_size=1, max_length=6) == expected
