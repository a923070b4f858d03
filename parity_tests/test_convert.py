"""Weights round-trip with torch tensors, and ``convert`` with PyTorch's files and its check."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jax_transformer as jt
from jax_transformer.architectures import huggingface, registry, twins
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import conversion
from jax_transformer.convert.models import ModelDescription
from jax_transformer.convert.training_state import opt_state, torch_checkpoint, training_states
from jax_transformer.errors import ConfigError, DifferentError, InputError
from jax_transformer.storage import checkpoint, pt, run_folder, tensors
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training.options import read_options
from jax_transformer.weights import rules, torch_bridge
from parity_tests import huggingface as huggingface_models
from parity_tests.cases import CASES, ODD, config_of
from parity_tests.marks import quick_if
from parity_tests.twins import as_torch, pair, random_twin
from parity_tests.unit import runs
from parity_tests.unit.conversions import convert
from torch_reference.torch_nn import TorchTransformer

DTYPES = [(case, torch.float64) for case in CASES] + [
    (CASES[0], dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize(("case", "dtype"), DTYPES, ids=str)
def test_weights_round_trip_bit_for_bit(case, dtype):
    state = random_twin(case.config).to(dtype).state_dict()
    again = jt.convert.to_torch(jt.convert.from_torch(state, case.config))
    assert sorted(again) == sorted(state)
    for name, tensor in state.items():
        assert again[name].shape == tuple(tensor.shape)
        assert again[name].tobytes() == torch_bridge.to_numpy(tensor).tobytes(), name
        bits = torch_bridge.to_tensor(again[name]).view(torch.uint8)
        assert torch.equal(bits, tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("wrong", [0.5, -0.5, 1.5, -1.5, np.nan, np.inf])
def test_the_check_bounds_every_output(wrong, monkeypatch):
    """By a multiple of the bound of outputs of 1; NaN is no agreement."""
    config = jt.preset("lesson10", **ODD)
    theirs = {"encoder": np.ones((2, 3)), "logits": np.ones((2, 3))}
    ours = theirs | {"logits": np.array([[1, 1, 1], [1, 1 + wrong * conversion._BOUND, 1]])}
    monkeypatch.setattr(twins, "outputs", lambda *_: theirs)
    monkeypatch.setattr(conversion, "_outputs", lambda *_: ours)
    error = abs(wrong) * conversion._BOUND
    refused = pytest.raises(DifferentError, match=f"logits differs .* by {error:.3g};")
    with contextlib.nullcontext() if abs(wrong) == 0.5 else refused:
        errors = conversion._run(config, registry.model_weights(config).table, {}, {})
        assert errors == {"encoder": 0, "logits": pytest.approx(error)}


def test_into_torch_fills_a_module():
    both = pair(jt.preset("lesson10", **ODD))
    module = jt.convert.into_torch(both.flax, twins.twin(both.config).double().eval())
    with torch.no_grad():
        logits = module(as_torch(both.source), as_torch(both.target))
    assert torch.equal(logits, as_torch(both.logits()[1]))


def test_into_torch_keeps_parameters_tied():
    both = pair(jt.preset("vaswani2017_base", **(ODD | {"target_vocab_size": 11})))
    module = twins.twin(both.config)
    before = sum(parameter.numel() for parameter in module.parameters())
    jt.convert.into_torch(both.flax, module)
    assert module.src_emb.weight is module.tgt_emb.weight
    assert module.linear.weight is module.tgt_emb.weight
    assert sum(parameter.numel() for parameter in module.parameters()) == before


def test_into_torch_refuses_another_module():
    both = pair(jt.preset("lesson10", **ODD))
    with pytest.raises(ConfigError, match="unknown architecture 'none'"):
        jt.convert.into_torch(both.flax, both.torch, architecture="none")
    with pytest.raises(InputError, match=r"Missing key.*tgt_emb\.weight"):
        jt.convert.into_torch(both.flax, torch.nn.Linear(2, 2))


def test_training_the_torch_module_does_not_change_the_flax_model():
    """JAX on CPU may alias NumPy's memory, and NumPy may alias torch's."""
    both = pair(jt.preset("lesson10", **ODD))
    before = np.asarray(both.flax(both.source, both.target)).copy()
    with torch.no_grad():
        for parameter in both.torch.parameters():
            parameter.mul_(0)
    np.testing.assert_array_equal(np.asarray(both.flax(both.source, both.target)), before)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "int64"])
def test_arrays_and_tensors_have_the_same_bits_and_no_common_memory(dtype):
    array = (np.random.default_rng(0).normal(size=(4, 3)) * 9).astype(jax.numpy.dtype(dtype))
    for one in (array, array.T, array[::2], array[:, 1]):
        before, tensor = one.copy(), torch_bridge.to_tensor(one)
        for source in (tensor, tensor[::2]):
            back = torch_bridge.to_numpy(source)
            assert back.dtype == one.dtype and back.shape == tuple(source.shape)
            back[...] = 1
        one[...] = 2
        assert torch_bridge.to_numpy(tensor).tobytes() == before.tobytes()
        one[...] = before


def test_the_position_buffer_of_a_checkpoint_is_used():
    """A checkpoint's unusual table is used in both directions, and is not a parameter."""
    both = pair(jt.preset("lesson10", **ODD))
    state = both.torch.state_dict() | {"pos_enc.pe": torch.zeros_like(both.torch.pos_enc.pe)}
    model = jt.convert.from_torch(state, both.config)
    one, other = (each(both.source, both.target) for each in (model, both.flax))
    assert np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-2
    assert not jt.convert.to_torch(model)["pos_enc.pe"].any()


def test_a_configuration_without_a_twin_is_refused():
    with pytest.raises(ValueError, match="head_dim"):
        twins.twin(jt.preset("small", head_dim=8))
    with pytest.raises(ValueError, match="norm_placement"):
        twins.twin(jt.preset("lesson10", norm_placement="pre"))


def test_weights_that_do_not_fit_the_twin_are_no_fault_of_the_twin():
    """Otherwise the self-check would be left out."""
    config = config_of("lesson10")
    state = {name: tensor.numpy() for name, tensor in random_twin(config).state_dict().items()}
    state.popitem()
    with pytest.raises(InputError):
        twins.outputs(config, state, *conversion.random_batch(config), {})


# ``convert``: files of torch.save, torch.load of ours, and the self-check

ONE_EACH = list({case.config.architecture: case for case in reversed(CASES)}.values())
TIED = next(case for case in CASES if case.name == "small")
USUAL = ("deep_dive", "small")


@pytest.mark.parametrize(
    "case", [quick_if(case.name in USUAL, case, id=str(case)) for case in (*ONE_EACH, TIED)]
)
def test_files_of_torch_round_trip_and_are_checked_against_the_twin(case, tmp_path):
    both = pair(case.config)
    state = both.torch.state_dict()
    torch.save({"model": state, "epoch": 1}, tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(case.config.to_json())
    described = ModelDescription(str(tmp_path / "config.json"))
    outcome = convert(tmp_path / "a.pt", tmp_path / "run", check=True, description=described)
    assert "next to the PyTorch twin" in outcome.checked.method
    blocks = case.config.encoder.layers + case.config.decoder.layers
    assert len(outcome.checked.errors) == 1 + blocks
    assert max(outcome.checked.errors.values()) < 1e-12
    convert(tmp_path / "run", tmp_path / "b.pt")
    again = torch.load(tmp_path / "b.pt", weights_only=True)
    assert sorted(again) == sorted(state)
    for name, tensor in state.items():
        bits = tensor.contiguous().view(torch.uint8)
        assert torch.equal(again[name].view(torch.uint8), bits), name
    for names in outcome.prepared.plan.ties:
        assert len({again[name].data_ptr() for name in names}) == 1
    both.torch.load_state_dict(again, strict=True)
    convert(tmp_path / "b.pt", tmp_path / "again", description=described)
    convert(tmp_path / "again", tmp_path / "c.pt")
    assert (tmp_path / "c.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_every_architecture_is_tried():
    """Those of Hugging Face families are tried in test_huggingface_folders.py."""
    assert {case.config.architecture for case in ONE_EACH} == {
        preset.config.architecture for preset in registry.presets().values()
    } - huggingface.families().keys()


def test_the_check_detects_two_exchanged_weights():
    """Swapped square kernels fit every shape and round-trip through the same wrong table."""
    both = pair(TIED.config)
    model = registry.model_weights(TIED.config)
    state = {name: x.numpy() for name, x in both.torch.state_dict().items()}

    def exchanged(rule):
        query, key, value = rule.flax
        return dataclasses.replace(rule, flax=(key, query, value))

    def check(table):
        flax = rules.to_flax(table, state, model.shapes["flax"])
        sides = tensors.in_memory(state), tensors.in_memory(flax)
        return conversion.check(TIED.config, table, *sides)

    packed = [rule.torch.endswith("0.self_attn.in_proj_weight") for rule in model.table]
    rows = zip(model.table, packed, strict=True)
    first = r"^self-check: encoder\.blocks\.0 differs from the PyTorch twin's by "
    first += r"[\d.]+, first in encoder\.blocks\.0\.self_attention; "
    with pytest.raises(DifferentError, match=first):
        check([exchanged(rule) if wrong else rule for rule, wrong in rows])
    assert max(check(model.table).errors.values()) < 1e-12


@pytest.mark.parametrize(
    ("tensor", "module"),
    [("self_attn.k_proj", "self_attention.key"), ("encoder_attn.out_proj", "cross_attention.out")],
)
def test_the_check_names_the_module_of_a_wrong_rule(tensor, module):
    both = huggingface_models.pair("bart square")
    model = registry.model_weights(both.config)
    wrong = f"model.decoder.layers.1.{tensor}.weight"
    table = [rules.Rule(wrong, rule.flax) if rule.torch == wrong else rule for rule in model.table]
    state = jt.convert.to_torch(both.ours)
    flax = rules.to_flax(table, state, model.shapes["flax"])
    sides = tensors.in_memory(state), tensors.in_memory(flax)
    first = rf"by [\d.e-]+, first in decoder\.blocks\.1\.{module};"
    with pytest.raises(DifferentError, match=first):
        conversion.check(both.config, table, *sides)


def test_a_conversion_without_a_twin_reports_it(tmp_path):
    config = TIED.config.with_sizes(head_dim=8)
    model = registry.model_weights(config)
    random, shapes = np.random.default_rng(0), model.shapes["flax"]
    flax = {name: random.normal(size=shape) for name, shape in shapes.items()}
    sides = map(tensors.in_memory, (rules.to_torch(model.table, flax), flax))
    checked = conversion.check(config, model.table, *sides)
    assert not checked.errors
    assert "there and back" in checked.method and "head_dim=8" in checked.method


# Training checkpoints, through the command


def test_a_run_round_trips_through_a_training_checkpoint(trained, console, tmp_path):
    run = trained.path
    step = runs.STEPS
    code, out, err = console.say("convert", run, tmp_path / "out.pt", "--training")
    assert (code, err) == (0, "") and f"step {step}" in out and "there and back bit for bit" in out
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    assert saved.keys() == {"model", "optimizer", "scheduler", "step", "config"}
    assert saved["step"] == saved["scheduler"]["last_epoch"] == step
    (group,), options = saved["optimizer"]["param_groups"], read_options(RunFolder(run))
    now, peak = torch_checkpoint.learning_rate(options, step), options.optimizer.rate.learning_rate
    assert saved["scheduler"]["_last_lr"] == [group["lr"]] == [now] != [peak]
    assert saved["scheduler"]["base_lrs"] == [group["initial_lr"]] == [peak]
    earlier = min(checkpoint.steps(run / "checkpoints"))
    flags = ["--training", "--json", "--weights", str(earlier)]
    _, out, _ = console.say("convert", run, tmp_path / "a.pt", *flags)
    assert json.loads(out)["step"] == earlier < step
    config = TransformerConfig.from_json(saved["config"])
    moved = pt.read(tmp_path / "out.pt") | {"step": step + 2}  # in the data, not in the schedule
    state = torch_checkpoint.from_checkpoint(moved, options, config)
    assert (int(state.step), opt_state.position(state.opt_state)) == (step + 2, step)
    module = twins.twin(config)
    module.load_state_dict(saved["model"], strict=True)
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    console.refused(3, [str(step), "--force"], "convert", tmp_path / "out.pt", folder, "--training")
    newer = shutil.copytree(folder / "checkpoints" / str(step), folder / f"checkpoints/{step + 1}")
    flags = ["--training", "--force"]
    console.refused(3, [f"holds step {step + 1}"], "convert", tmp_path / "out.pt", folder, *flags)
    shutil.rmtree(newer.parent)
    assert console.say("convert", tmp_path / "out.pt", folder, "--training")[0] == 0
    assert runs.differing(runs.arrays(folder, step), runs.arrays(run, step)) == []
    place = folder / "checkpoints" / str(step)
    assert console.say("convert", tmp_path / "out.pt", place, *flags)[0] == 0
    command = ("convert", place, tmp_path / "again.pt", "--training", "--json")
    code, out, _ = console.say(*command)
    assert code == 0 and json.loads(out)["step"] == step
    assert (tmp_path / "again.pt").read_bytes() == (tmp_path / "out.pt").read_bytes()


def test_invalid_training_checkpoints_are_refused(trained, console, tmp_path):
    bare, file, folder = tmp_path / "bare.pt", tmp_path / "a.pt", tmp_path / "run"
    torch.save({"model": {}}, bare)
    shutil.copytree(trained.path, folder)
    place, carry = folder / "checkpoints/300", "--training"

    def refused(code: int, words: list[str], *arguments: object) -> None:
        console.refused(code, words, "convert", *arguments)

    refused(3, ["bare.pt", "optimizer"], bare, folder, carry)
    refused(2, ["--dtype"], folder, file, carry, "--dtype", "float16")
    refused(2, ["--dry-run"], folder, file, carry, "--dry-run")
    for source, target in ((folder, "a.safetensors"), (folder, "b"), (bare, "b.pt")):
        refused(2, ["between a run and a PyTorch file"], source, tmp_path / target, carry)
    words = ["--weights best", "resumes from its last checkpoint"]
    refused(2, words, folder, file, carry, "--weights", "best")
    assert console.say("convert", folder, file, carry, "--weights", "100")[0] == 0
    refused(2, ["give --training"], file, place)
    refused(3, ["holds step 200"], file, folder, carry)
    refused(2, ["is of step 100"], file, place, carry)
    (folder / "train_config.json").unlink()
    refused(3, ["train_config.json"], file, folder, carry)


def test_the_check_of_a_training_state_names_a_moment_that_differs():
    def state(weight: float, moment: float) -> dict[str, Any]:
        optimizer = {"state": {0: {"exp_avg": np.full(2, moment)}}}
        return {"model": {"w": np.full(2, weight)}, "optimizer": optimizer}

    for other, name in ((state(2, 1), "model.w"), (state(1, 2), "optimizer.state.0.exp_avg")):
        with pytest.raises(DifferentError, match=f"^a.pt: {name} do not come back bit for bit"):
            training_states._check(state(1, 1), other, Path("a.pt"))
    training_states._check(state(1, 1), state(1, 1), Path("a.pt"))


def test_the_newest_step_is_chosen_under_the_lock(trained, console, tmp_path, monkeypatch):
    """A run that trains until the lock is taken may leave a newer step."""
    folder, lock = tmp_path / "run", run_folder.lock
    shutil.copytree(trained.path, folder)
    earlier = ("convert", folder, tmp_path / "a.pt", "--training", "--weights", "100")
    assert console.say(*earlier)[0] == 0
    shutil.move(folder / "checkpoints" / str(runs.STEPS), tmp_path / "newer")

    def trained_until_then(path: Path):
        shutil.move(tmp_path / "newer", folder / "checkpoints" / str(runs.STEPS))
        return lock(path)

    monkeypatch.setattr(run_folder, "lock", trained_until_then)
    before = (folder / "checkpoints/100/manifest.json").read_bytes()
    command = ["convert", tmp_path / "a.pt", folder, "--training", "--force"]
    console.refused(3, [f"holds step {runs.STEPS}"], *command)
    assert (folder / "checkpoints/100/manifest.json").read_bytes() == before
    with lock(folder):
        monkeypatch.setattr(run_folder, "lock", lock)
        console.refused(7, [folder, "in use"], *command)


def test_the_check_leaves_out_padding_that_is_no_query(monkeypatch):
    config = config_of("torch.nn unbiased deviation, fill -10000, masked queries")
    state = {name: x.numpy() for name, x in random_twin(config).double().state_dict().items()}
    table = registry.weight_table(config)
    flax = rules.to_flax(table, state, jt.transformer.shapes(config))
    queries = TorchTransformer._of_queries
    seeing = lambda *inputs: torch.zeros_like(queries(*inputs))  # noqa: E731
    monkeypatch.setattr(TorchTransformer, "_of_queries", seeing)
    assert max(conversion._run(config, table, state, flax).values()) < 1e-12
