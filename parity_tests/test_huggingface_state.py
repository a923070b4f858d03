"""Tensors of a file, against save_pretrained and from_pretrained of transformers' classes."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import jax_transformer as jt
from jax_transformer.architectures import huggingface_state as states
from jax_transformer.architectures import twins
from jax_transformer.architectures.huggingface_config import from_config
from jax_transformer.config import Tying
from jax_transformer.errors import InputError
from jax_transformer.weights import torch_bridge
from parity_tests.huggingface import CASES, PARAMETERS, module
from parity_tests.unit import runs


def saved(name: str, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict]:
    """Return a module's state, the tensors that it saves, and its config.json."""
    theirs = module(name, dtype=torch.float32)
    theirs.save_pretrained(folder)
    state = {key: torch_bridge.to_numpy(value) for key, value in theirs.state_dict().items()}
    data = json.loads((folder / "config.json").read_text())
    return state, load_file(folder / "model.safetensors"), data


def described(data: dict, file: dict[str, np.ndarray]) -> jt.TransformerConfig:
    """Return the configuration of a file's tensors, copies among them."""
    same = lambda one, other: file[one].tobytes() == file[other].tobytes()  # noqa: E731
    return from_config(data, names=file, same=same)


@pytest.mark.proves("round trip")
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_saved_file_is_completed_and_round_trips(name: str, tmp_path: Path):
    state, file, data = saved(name, tmp_path)
    config = from_config(data, names=file)
    assert not runs.differing(states.complete(file, config), state)
    assert not runs.differing(states.saved(state, config), file)
    assert len(file) < len(state) or name == "fsmt"  # which ties and computes nothing
    model = jt.convert.from_torch(states.complete(file, config), config)
    assert not runs.differing(states.saved(jt.convert.to_torch(model), config), file)


@pytest.mark.parametrize("name", ["t5 v1.1", "mt5", "umt5"])
def test_an_untied_output_layer_stays_untied(name: str, tmp_path: Path):
    """Published weights of T5 v1.1, mT5 and UMT5 have one; from_pretrained keeps and saves it."""
    _, file, data = saved(name, tmp_path)
    head = np.random.default_rng(0).normal(size=file["shared.weight"].shape)
    file["lm_head.weight"] = head.astype(np.float32)
    save_file(file, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = CASES[name].classes[1].from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    config = described(data, file)
    assert config.tying is Tying.EMBEDDINGS
    assert not runs.differing(states.saved(states.complete(file, config), config), again)
    assert "lm_head.weight" in again
    ours = jt.convert.from_torch(states.complete(file, config), config)
    source, target = np.asarray([[5, 6, 7, 1]]), np.asarray([[0, 9, 8]])
    with torch.no_grad():
        ids = torch.from_numpy(source), torch.from_numpy(target)
        logits = theirs(input_ids=ids[0], decoder_input_ids=ids[1]).logits.numpy()
    assert np.abs(logits - np.asarray(ours(source, target))).max() < 1e-5 * np.abs(logits).max()
    # otherwise transformers' class ties it
    through = jt.convert.into_torch(ours, twins.twin(config)).state_dict()
    back = {key: value.numpy() for key, value in through.items()}
    assert not runs.differing(back, states.complete(file, config))


def test_files_of_older_versions(tmp_path: Path):
    """They have every copy and computed table, and tensors that fairseq and T5 once wrote."""
    stacks = ("encoder", "decoder")
    for name, junk in (
        ("bart", [f"model.{stack}.version" for stack in stacks]),
        ("marian", []),
        ("m2m_100", [f"model.{stack}.embed_positions.weights" for stack in stacks]),
        ("t5", ["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"]),
    ):
        state, file, data = saved(name, tmp_path)
        old = state | {key: np.ones(3, np.float32) for key in junk}
        config = described(data, old)
        assert config == from_config(data, names=file)
        assert not runs.differing(states.complete(old, config), state)
        assert all(states.why_dropped(key, config) for key in junk)


def test_a_model_without_its_output_layer(tmp_path: Path):
    """Like facebook/bart-base: names without the prefix, no output layer, no bias of the logits."""
    state, _, data = saved("bart", tmp_path)
    bare = {
        key.removeprefix("model."): value
        for key, value in state.items()
        if key.startswith("model.") and "embed_tokens" not in key
    }
    config = from_config(data | {"architectures": ["BartModel"]}, names=bare)
    expected = state | {"final_logits_bias": np.zeros_like(state["final_logits_bias"])}
    assert not runs.differing(states.complete(bare, config), expected)
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = CASES["bart"].classes[1].from_pretrained(tmp_path).state_dict()
    assert not runs.differing({key: value.numpy() for key, value in theirs.items()}, expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["marian", "pegasus"])
def test_computed_positions_equal_transformers_bit_for_bit(name: str, dtype: str):
    theirs = module(name, dtype=getattr(torch, dtype))
    state = {key: torch_bridge.to_numpy(value) for key, value in theirs.state_dict().items()}
    config = from_config(json.loads(theirs.config.to_json_string()))
    without = {key: value for key, value in state.items() if "embed_positions" not in key}
    assert not runs.differing(states.complete(without, config), state)
    table = "model.encoder.embed_positions.weight"
    for kind in (np.float16, ml_dtypes.bfloat16):  # on the way
        rounded = state[table].astype(kind).astype(state[table].dtype)
        states.saved(state | {table: rounded}, config)
    other = state | {table: state[table][::-1]}
    if name == "marian":
        message = r"^model\.encoder\.embed_positions\.weight is up to .* off the sines and cosines"
        with pytest.raises(InputError, match=message):
            states.saved(other, config)
    else:
        # Pegasus saves it
        assert states.saved(other, config).keys() == states.saved(state, config).keys()


def test_copies_that_differ_are_refused_by_name(tmp_path: Path):
    state, _, data = saved("bart", tmp_path)
    state["model.encoder.embed_tokens.weight"] = state["model.encoder.embed_tokens.weight"] + 1
    config, names = from_config(data, names=state), (r"encoder\.embed_tokens", "shared")
    copy, original = (rf"model\.{name}\.weight" for name in names)
    message = f"{copy} differs from {original}, but the model ties them"
    with pytest.raises(InputError, match=message):
        jt.convert.from_torch(states.complete(state, config), config)
