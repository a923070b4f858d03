"""Folders against transformers: byte for byte there and back, and exports that it runs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jax_transformer as jt
from jax_transformer.convert import planning
from jax_transformer.convert.planning import Request
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.storage import safetensors
from jax_transformer.weights.torch_bridge import to_numpy
from parity_tests import huggingface, tokenizer_models
from parity_tests.unit import runs
from parity_tests.unit.conversions import convert


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    index = folder / "model.safetensors.index.json"
    return safetensors.read(index if index.is_file() else folder / "model.safetensors")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder that transformers saved, by the case's name and a dtype."""
    folders: dict[tuple[str, torch.dtype], tuple] = {}

    def save(name: str, dtype: torch.dtype = torch.float32):
        if (name, dtype) not in folders:
            folder = tmp_path_factory.mktemp("saved") / "theirs"
            module = huggingface.module(name, dtype=dtype)
            module.save_pretrained(folder)
            folders[name, dtype] = module, folder
        return folders[name, dtype]

    return save


@pytest.mark.proves("round trip")
@pytest.mark.parametrize("name", huggingface.PARAMETERS)
def test_a_folder_round_trips_byte_for_byte(name, saved, tmp_path):
    module, theirs = saved(name)
    module.save_pretrained(tmp_path / "sharded", max_shard_size="8KB")
    convert(tmp_path / "sharded", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back", to="hf")
    convert(theirs, tmp_path / "straight", to="hf", shard_size="8KB")
    convert(theirs, tmp_path / "one", to="hf")
    for name, folder in (("back", "sharded"), ("straight", "sharded"), ("one", theirs)):
        expected = files(tmp_path / folder)
        assert files(tmp_path / name) == expected and len(expected) > 10 * (name != "one")
    again, report = type(module).from_pretrained(tmp_path / "straight", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = again.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in module.state_dict().items())


@pytest.mark.parametrize("name", ["marian", "mbart", "t5"])
def test_a_conversion_is_checked_against_transformers(name, saved, tmp_path):
    """The self-check's twin is transformers' own class."""
    outcome = convert(saved(name)[1], tmp_path / "run", check=True)
    assert "next to the PyTorch twin" in outcome.checked.method
    assert max(outcome.checked.errors.values()) < 1e-12


@pytest.mark.parametrize("name", ["marian two vocabularies", "t5"])
@pytest.mark.parametrize("shard", ["1GB", "8KB"])
def test_a_bin_file_and_its_shards_are_read(name, shard, saved, tmp_path):
    """Written by torch.save as earlier versions of transformers did, with tied copies."""
    module, theirs = saved(name)
    state = dict(module.state_dict())
    (tmp_path / "old").mkdir()
    for file_name in ("config.json", "generation_config.json"):
        (tmp_path / "old" / file_name).write_bytes((theirs / file_name).read_bytes())
    if shard == "1GB":
        torch.save(state, tmp_path / "old/pytorch_model.bin")
    else:
        halves = [dict(list(state.items())[::2]), dict(list(state.items())[1::2])]
        names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        for file, half in zip(names, halves, strict=True):
            torch.save(half, tmp_path / "old" / file)
        where = {key: file for file, half in zip(names, halves, strict=True) for key in half}
        index = json.dumps({"metadata": {}, "weight_map": where})
        (tmp_path / "old/pytorch_model.bin.index.json").write_text(index)
    convert(tmp_path / "old", tmp_path / "new", to="hf")
    assert runs.differing(tensors(theirs), tensors(tmp_path / "new")) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_stays_half(dtype, saved, tmp_path):
    module, theirs = saved("marian", dtype)
    model, _ = jt.load(theirs)
    arrays = jt.convert.to_torch(model)
    assert all(
        np.array_equal(arrays[key].view(np.uint16), to_numpy(tensor).view(np.uint16))
        for key, tensor in module.state_dict().items()
    )
    convert(theirs, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back", to="hf")
    assert runs.differing(tensors(theirs), tensors(tmp_path / "back")) == []


def test_a_cast_is_recorded_in_config_json(saved, tmp_path):
    convert(saved("marian")[1], tmp_path / "half", to="hf", dtype="bfloat16")
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half")
    assert again.dtype == torch.bfloat16


def test_half_precision_widens_as_in_transformers(saved, tmp_path):
    """Positions that are in no file have the new precision, in a folder and in a run from it."""
    _, half = saved("marian", torch.bfloat16)
    convert(half, tmp_path / "run", dtype="float32")
    convert(tmp_path / "run", tmp_path / "wide", to="hf")
    convert(half, tmp_path / "straight", to="hf", dtype="float32")
    assert runs.differing(tensors(tmp_path / "wide"), tensors(tmp_path / "straight")) == []
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "wide")
    assert again.dtype == torch.float32
    table = again.state_dict()["model.encoder.embed_positions.weight"]
    model, _ = jt.load(tmp_path / "run")
    assert np.asarray(model.encoder.positions.table[...]).tobytes() == table.numpy().tobytes()


def test_a_plan_lists_dropped_and_derived_tensors_with_reasons(saved, tmp_path):
    plan = planning.prepare(Request(str(saved("marian")[1]), str(tmp_path / "run"))).plan
    names = {name for move in plan.moves for name in move.source}
    assert names == tensors(saved("marian")[1]).keys()
    tables = ("encoder.positions.table", "decoder.positions.table")
    derived = {note.name: note.reason for note in plan.derived}
    assert derived == dict.fromkeys(tables, "is computed: sines and cosines")
    convert(saved("marian")[1], tmp_path / "run")
    plan = planning.prepare(Request(str(tmp_path / "run"), str(tmp_path / "back"), to="hf")).plan
    assert {name for move in plan.moves for name in move.target} == names
    assert {note.name for note in plan.dropped} == {*tables}


def test_transformers_loads_an_export_of_our_own_run_and_its_tokenizer(tmp_path):
    """With our byte-level BPE it has the same logits, ids and greedy translation."""
    lines = ["the cat sees the bird", "a bird sees a dog"]
    lines += ["ein Hund läuft", "zwei Vögel sehen den Hund"]
    tokenizer = Tokenizer.train(lines, 300, pad_id=0, bos_id=1, eos_id=2)
    both = huggingface.pair("t5", dtype=torch.float32)
    sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), tokenizer.vocab_size)
    sizes |= {"bos_id": 1, "eos_id": 2}
    ours = jt.Transformer(both.config.with_sizes(**sizes), rngs=nnx.Rngs(0))
    jt.convert.save(ours, tmp_path / "run")
    tokenizer.save(tmp_path / "run/tokenizer.json")
    convert(tmp_path / "run", tmp_path / "out", to="hf")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for line in (*lines, "", "  two  spaces ", "Ünïcödé 🙂 123"):
        assert words(line)["input_ids"] == [*tokenizer.encode(line), tokenizer.eos_id]
        assert words.decode(words(line)["input_ids"], skip_special_tokens=True) == line
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    inputs = words(lines[:1], return_tensors="pt")
    theirs = model.generate(**inputs, max_new_tokens=9)[0, 1:]
    tokens = np.asarray(jt.generate.greedy(ours, inputs["input_ids"].numpy(), max_length=9))[0]
    assert theirs.tolist() == tokens[: len(theirs)].tolist()
    card = (tmp_path / "out/README.md").read_text()
    assert card.startswith("---\n") and '["translation", "t5"]' in card
    assert "license:" not in card.split("---")[1]


@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_a_marian_folder_translates_as_it_does_in_transformers(tmp_path):
    """Only the folder is named: all settings are its own. A run from it translates alike."""
    folder = tokenizer_models.write(tmp_path / "marian", tokenizer_models.marian())
    words = transformers.MarianTokenizer.from_pretrained(folder)
    case = huggingface.CASES["marian"]
    special = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), words.pad_token_id)
    special |= dict.fromkeys(("eos_token_id", "forced_eos_token_id"), words.eos_token_id)
    sizes = dict.fromkeys(("vocab_size", "decoder_vocab_size"), words.vocab_size)
    configuration, model = case.classes
    torch.manual_seed(0)
    module = model(configuration(**(case.values | special | sizes))).eval()
    settings = dict(num_beams=3, max_length=20, bad_words_ids=[[words.pad_token_id]])
    module.generation_config.update(**settings)
    module.save_pretrained(folder)
    lines = ["the quick dog", "le renard brun est-ce vrai ?"]
    rows = [module.generate(**words([line], return_tensors="pt"))[0] for line in lines]
    expected = [words.decode(row, skip_special_tokens=True) for row in rows]
    assert all(expected) and expected[0] != expected[1]
    convert(folder, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back", to="hf")
    for place in (folder, tmp_path / "run", tmp_path / "back"):
        translator = jt.Translator.load(place)
        assert translator.generation_config.num_beams == 3
        assert translator(lines) == expected
