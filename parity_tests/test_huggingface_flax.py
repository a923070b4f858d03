"""Folders of transformers' old Flax classes, which the tests create from PyTorch models."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from flax import serialization, traverse_util

import jax_transformer as jt
from jax_transformer import cli
from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits import flax_msgpack, msgpack
from jax_transformer.formats import registry
from jax_transformer.storage import safetensors
from parity_tests import huggingface

# M2M100 and UMT5 had no Flax class, and Marian's had one vocabulary
NAMES = ["bart", "bart square", "mbart", "marian", "pegasus", "t5", "t5 v1.1", "mt5"]
NAMES += ["blenderbot", "blenderbot-small", "longt5 global"]


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module's Flax class by path, from each part's type."""
    tensors = {}
    if hasattr(module, "final_logits_bias"):
        tensors["final_logits_bias"] = module.final_logits_bias
    for name, part in module.named_modules():
        path, kind = name.replace(".", "/"), type(part).__name__
        match part:
            case torch.nn.Linear():
                tensors[f"{path}/kernel"] = part.weight.T
                if part.bias is not None:
                    tensors[f"{path}/bias"] = part.bias
            case torch.nn.LayerNorm():
                tensors |= {f"{path}/scale": part.weight, f"{path}/bias": part.bias}
            case torch.nn.Embedding():
                if "Sinusoidal" not in kind and not name.endswith("embed_tokens"):
                    tensors[f"{path}/embedding"] = part.weight
            case _ if "LayerNorm" in kind:
                tensors[f"{path}/weight"] = part.weight
    if module.config.tie_word_embeddings:
        del tensors["lm_head/kernel"]
    return tensors


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    tree = traverse_util.unflatten_dict(arrays, sep="/")
    path.write_bytes(serialization.msgpack_serialize(tree))


def saved(folder: Path, module: Any, *, shards: int = 1, bfloat16: bool = False) -> Path:
    """Write the folder as transformers 4 did."""
    dtype = ml_dtypes.bfloat16 if bfloat16 else None
    arrays = {
        name: np.ascontiguousarray(value.detach().numpy(), dtype)
        for name, value in parameters(module).items()
    }
    config = json.loads(module.config.to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "4.38.0"}))
    names = [f"flax_model-{i:05}-of-{shards:05}.msgpack" for i in range(1, shards + 1)]
    names = names if shards > 1 else [flax_msgpack.FILE]
    parts = {name: dict(list(arrays.items())[i::shards]) for i, name in enumerate(names)}
    for name, part in parts.items():
        write(folder / name, part)
    if shards > 1:
        where = {key: name for name, part in parts.items() for key in part}
        (folder / flax_msgpack.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def saved_and_opened(name: str, folder: Path, **options: Any) -> tuple[Any, registry.Pretrained]:
    """Return a family's module, and the opened folder of its Flax class."""
    module = huggingface.module(name)
    if name == "t5 v1.1":
        module.config.tie_word_embeddings = False  # transformers 5 sets it
    return module, registry.open(saved(folder, module, **options))


@pytest.mark.parametrize("name", NAMES)
def test_flax_state_equals_that_of_the_pytorch_class(tmp_path, name):
    module, opened = saved_and_opened(name, tmp_path, shards=1 + NAMES.index(name) % 2)
    state = opened.read()
    theirs = {key: value.numpy() for key, value in module.state_dict().items()}
    assert state.keys() == theirs.keys()
    assert [key for key, value in theirs.items() if not np.array_equal(state[key], value)] == []


@pytest.mark.parametrize("name", ["marian", "t5 v1.1"])
def test_logits_are_those_of_the_pytorch_class(tmp_path, in_float64, name):
    module, opened = saved_and_opened(name, tmp_path)
    ours = jt.convert.from_torch(opened.read(), opened.config)
    source, target = huggingface.batch(opened.config)
    theirs = huggingface.Pair(module, opened.config, ours).logits(source, target)
    assert abs(np.asarray(ours(source, target)) - theirs).max() <= 1e-12 * abs(theirs).max()


def test_a_kernel_that_is_not_transposed_is_detected_in_a_square_model(tmp_path, monkeypatch):
    monkeypatch.setattr(flax_msgpack, "_transposed", msgpack.read)
    module, opened = saved_and_opened("bart square", tmp_path)
    state, theirs = opened.read(), module.state_dict()
    differ = {name for name in state if not np.array_equal(state[name], theirs[name].numpy())}
    kernels = ("_proj.weight", "fc1.weight", "fc2.weight")
    assert differ == {name for name in theirs if name.endswith(kernels)}


def test_half_precision_becomes_a_folder_that_transformers_loads_bit_for_bit(tmp_path):
    module = huggingface.module("marian", dtype=torch.float32)
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    saved(old, module, shards=3, bfloat16=True)
    assert cli.main(["convert", str(old), str(new), "--to", "hf"]) == 0
    written = safetensors.read(new / "model.safetensors")
    assert {array.dtype.name for array in written.values()} == {"bfloat16"}
    loaded = transformers.MarianMTModel.from_pretrained(new).state_dict()
    for name, value in module.state_dict().items():
        if "embed_positions" not in name:
            assert torch.equal(loaded[name].float(), value.bfloat16().float()), name


def test_a_mismatch_of_file_and_configuration_is_one_error(tmp_path):
    module = huggingface.module("bart", dtype=torch.float32)
    folder = saved(tmp_path, module)
    tree = serialization.msgpack_restore((folder / flax_msgpack.FILE).read_bytes())
    arrays = traverse_util.flatten_dict(tree, sep="/")
    del arrays["model/encoder/layers/1/fc1/kernel"]
    write(folder / flax_msgpack.FILE, arrays)
    opened = registry.open(folder)
    with pytest.raises(InputError, match=r"model\.encoder\.layers\.1\.fc1\.weight"):
        jt.convert.from_torch(opened.read(), opened.config)
