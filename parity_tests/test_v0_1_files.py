"""Exports of version 0.1 are read by torch and transformers, and its runs export the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import jax_transformer as jt
from parity_tests.unit import v0_1_files as v0_1

MODELS = v0_1.expected()["models"]


pytestmark = pytest.mark.usefixtures("as_a_user")


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def hashes(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return v0_1.hashes({name: tensor.numpy() for name, tensor in state.items()})


def leaves(value: Any, where: str = "") -> dict[str, Any]:
    """Flatten nested containers by path; tensors as dtype, shape and bytes."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for name, inner in pairs for k, v in leaves(inner, f"{where}/{name}").items()}
    if isinstance(value, torch.Tensor):
        return {where: (str(value.dtype), tuple(value.shape), value.numpy().tobytes())}
    return {where: value}


def test_torch_reads_files_of_v0_1():
    assert hashes(loaded(v0_1.HERE / "deep_dive.pt")) == MODELS["deep_dive_run"]["tensors"]
    training = loaded(v0_1.HERE / "torch_training.pt")
    assert hashes(training["model"]) == MODELS["run last"]["tensors"]
    assert training["step"] == 203


def test_training_state_is_exported_as_by_v0_1(tmp_path):
    """Weights, every moment, counts and the schedule; the model's description may have grown."""
    v0_1.command("convert", v0_1.HERE / "run", tmp_path / "now.pt", "--training")
    now, then = (leaves(loaded(f)) for f in (tmp_path / "now.pt", v0_1.HERE / "torch_training.pt"))
    assert isinstance(json.loads(now.pop("/config")), dict) and then.pop("/config")
    assert now == then
    v0_1.command("convert", v0_1.HERE / "run/checkpoints/200", tmp_path / "other.pt", "--training")
    other = leaves(loaded(tmp_path / "other.pt"))
    assert other.keys() - {"/config"} == then.keys()
    moments = [name for name in then if "/exp_avg" in name]
    assert moments and not [name for name in moments if other[name] == then[name]]


def test_export_of_v0_1_agrees_with_its_pytorch_twin(tmp_path):
    options = v0_1.expected()["deep_dive"]
    output = v0_1.command("convert", v0_1.HERE / "deep_dive.pt", tmp_path / "run", *options)
    assert "ran next to the PyTorch twin" in output


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_transformers_computes_the_logits_of_v0_1_from_its_folder(name: str):
    recorded = MODELS[name]
    kind = {"marian": "MarianMTModel", "t5": "T5ForConditionalGeneration"}[name]
    module = getattr(transformers, kind).from_pretrained(v0_1.HERE / name).eval()
    source, target = (torch.tensor(recorded[side]) for side in ("source", "target"))
    visible = (source != module.config.pad_token_id).long()
    with torch.no_grad():
        logits = module(source, attention_mask=visible, decoder_input_ids=target).logits
    v0_1.assert_near(v0_1.chosen(logits.numpy()), recorded["numbers"]["some logits"])
    assert hashes(module.state_dict()).items() <= MODELS[name]["tensors"].items()


def test_weights_of_v0_1_round_trip_through_torch_tensors():
    model, _ = jt.load(v0_1.HERE / "deep_dive_run")
    state = {name: torch.from_numpy(np.array(a)) for name, a in jt.convert.to_torch(model).items()}
    again = jt.convert.from_torch(state, model.config)
    assert v0_1.hashes(jt.convert.to_torch(again)) == MODELS["deep_dive_run"]["tensors"]
