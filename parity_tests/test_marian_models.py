"""Models of Marian: to runs against Marian's arithmetic, to folders against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers

import jax_transformer as jt
from jax_transformer import cli
from jax_transformer.extras.toolkits.marian import marian_format, marian_model
from parity_tests import marian_files, tokenizer_models
from parity_tests.bounds import BOUNDS
from parity_tests.marks import quick_if

BOUND = BOUNDS["float64"]["logits"]
SQUARE = {"dim_vocabs": [8, 8], "dim_emb": 8, "transformer_dim_ffn": 8, "transformer_heads": 2}
SEPARATE = {"tied_embeddings_all": "false", "dim_vocabs": [11, 9]}
CASES = {
    "OPUS-MT": marian_files.options(),
    "square": marian_files.options(**SQUARE, enc_depth=2),
    "pre-norm, relu": marian_files.options(
        transformer_ffn_activation="relu", enc_depth=2, **marian_files.PRE_NORM
    ),
    "norms of embeddings, narrow decoder": marian_files.options(
        transformer_postprocess_emb="nd", transformer_decoder_dim_ffn=4
    ),
    "two vocabularies": marian_files.options(**SEPARATE),
    "two vocabularies, tied output": marian_files.options(
        **SEPARATE, tied_embeddings="true", output_omit_bias="true"
    ),
    "one embedding, another output": marian_files.options(
        tied_embeddings_all="false", tied_embeddings_src="true"
    ),
}
FAST = ("OPUS-MT", "pre-norm, relu", "two vocabularies, tied output")
LENGTHS = [7, 4, 1]


def batch(chosen: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """A source (3, 7), padded after ``LENGTHS``, a target (3, 4) without and with its start, and
    the start.
    """
    draw = np.random.default_rng(1)
    source_size, start = chosen["dim-vocabs"]
    source = draw.integers(0, source_size, (3, 7))
    for row, length in enumerate(LENGTHS):
        source[row, length:] = source_size
    target = draw.integers(1, start, (3, 4))
    return source, target, np.pad(target, ((0, 0), (1, 0)), constant_values=start), start


def written(chosen: dict[str, Any], path: Path) -> marian_files.Arrays:
    """Write a model of these options in float64, and return its weights."""
    arrays = marian_files.weights(chosen)
    path.write_bytes(marian_files.model(arrays, chosen, "<f8"))
    return arrays


def convert(*arguments: object) -> None:
    assert cli.main(["convert", *map(str, arguments), "--no-check"]) == 0


@pytest.mark.parametrize("name", [quick_if(name in FAST, name) for name in CASES])
def test_a_run_computes_what_marian_computes(name, tmp_path, in_float64):
    chosen, arrays = CASES[name], written(CASES[name], tmp_path / "model.npz")
    convert(tmp_path / "model.npz", tmp_path / "run")
    model, _ = jt.load(tmp_path / "run")
    source, target, begun, start = batch(chosen)
    actual = np.asarray(jax.jit(model)(source, begun))
    expected = marian_files.Reference(arrays, chosen).logits(source, LENGTHS, target)
    assert np.abs(actual[..., :start] - expected).max() <= BOUND * np.abs(expected).max()
    assert not np.asarray(actual[..., start]).any(), "padding has a score"
    other = marian_files.Reference(arrays, chosen, transformers=True)
    assert np.abs(other.logits(source, LENGTHS, target) - expected).max() > 1e-3


def transformers_model(folder) -> Any:
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    return transformers.MarianMTModel.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("name", ["square", quick_if(False, "OPUS-MT")])
def test_transformers_computes_the_same_with_its_positions_and_norms(name, tmp_path, in_float64):
    chosen, arrays = CASES[name], written(CASES[name], tmp_path / "model.npz")
    convert(tmp_path / "model.npz", tmp_path / "hf", "--to", "hf")
    source, target, begun, start = batch(chosen)
    ids = torch.from_numpy(source)
    with torch.no_grad():
        theirs = transformers_model(tmp_path / "hf")(
            ids, attention_mask=ids != start, decoder_input_ids=torch.from_numpy(begun)
        ).logits.numpy()
    reference = marian_files.Reference(arrays, chosen, transformers=True)
    expected = reference.logits(source, LENGTHS, target)
    assert np.abs(theirs[..., :start] - expected).max() <= BOUND * np.abs(expected).max()
    model, _ = jt.load(tmp_path / "hf")
    actual = np.abs(np.asarray(jax.jit(model)(source, begun)) - theirs).max()
    assert actual <= BOUND * np.abs(theirs).max()


@pytest.fixture(scope="module")
def opus(tmp_path_factory):
    """A folder as OPUS-MT publishes it, with SentencePiece models, and its vocabulary."""
    files = tokenizer_models.marian()
    ids = {token: i for token, i in files["vocab.json"].items() if token != "<pad>"}
    chosen = marian_files.options(dim_vocabs=[len(ids)] * 2, dec_depth=1)
    content = marian_files.model(marian_files.weights(chosen), chosen)
    folder = tmp_path_factory.mktemp("opus") / "en-fr"
    marian_files.opus(folder, content, ids, source=files["source.spm"], target=files["target.spm"])
    return folder, ids


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_an_opus_folder_becomes_what_transformers_loads(opus, tmp_path):
    folder, ids = opus
    convert(folder, tmp_path / "hf", "--to", "hf")
    tokenizer = transformers.MarianTokenizer.from_pretrained(tmp_path / "hf")
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in ids} == ids
    settings = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert settings["num_beams"] == 6 and settings["length_penalty"] == 1.0
    assert settings["bad_words_ids"] == [[len(ids)], [ids["<unk>"]]]
    line = "the quick brown fox"
    _, ours = jt.load(tmp_path / "hf")
    assert [*ours.encode(line), *ours.suffix] == tokenizer(line).input_ids
    model = transformers_model(tmp_path / "hf").float()
    generated = model.generate(**tokenizer([line], return_tensors="pt"), max_new_tokens=9)
    translated = jt.Translator.load(str(tmp_path / "hf"))([line], max_new_tokens=9)
    assert translated == tokenizer.batch_decode(generated, skip_special_tokens=True)


def test_ids_of_a_sentencepiece_vocabulary_are_those_of_its_pieces(opus, tmp_path):
    source = (opus[0] / "source.spm").read_bytes()
    shutil.copytree(opus[0], tmp_path / "opus")
    (tmp_path / "opus/vocab.spm").write_bytes(source)
    settings = (tmp_path / "opus/decoder.yml").read_text()
    settings = settings.replace("opus.spm32k-spm32k.vocab.yml", "vocab.spm")
    (tmp_path / "opus/decoder.yml").write_text(settings)
    model = marian_model.find(tmp_path / "opus")
    expected = {piece: i for i, piece in enumerate(tokenizer_models.pieces(source))}
    assert [marian_format._ids(model, side) for side in (0, 1, -1)] == [expected] * 3


def test_a_run_of_an_opus_folder_translates_greedily_as_marian(opus, tmp_path):
    folder, ids = opus
    convert(folder, tmp_path / "run", "--dtype", "float64")
    translator = jt.Translator.load(str(tmp_path / "run"))
    lines = ["the quick brown fox jumps", "dog"]
    tokenizer = translator.tokenizer
    encoded = [[*tokenizer.encode(line), *tokenizer.suffix] for line in lines]
    longest = max(map(len, encoded))
    source = np.array([[*line, *[len(ids)] * (longest - len(line))] for line in encoded])
    chosen = marian_files.options(dim_vocabs=[len(ids)] * 2, dec_depth=1)
    weights = marian_files.weights(chosen).items()
    arrays = {name: array.astype(np.float32).astype(np.float64) for name, array in weights}
    arrays["decoder_ff_logit_out_b"][0, ids["<unk>"]] = -1e9  # without --allow-unk
    words = marian_files.Reference(arrays, chosen).greedy(source, [*map(len, encoded)], 6)
    expected = [[*line[: [*line, 0].index(0)]] for line in words.tolist()]
    translated = translator(lines, num_beams=1, max_new_tokens=6)
    assert translated == [tokenizer.decode(line) for line in expected]
    assert any(expected)
