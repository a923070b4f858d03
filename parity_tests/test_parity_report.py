"""Comparisons of our models with their twins: correct ones agree, a fault is named."""

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import jax
import numpy as np
import optax
import pytest
import torch

import jax_transformer as jt
from jax_transformer import cli
from jax_transformer.architectures import registry
from jax_transformer.parity import Report, from_files, golden
from jax_transformer.parity.recording import Recording
from parity_tests import huggingface
from parity_tests.cases import SQUARE, config_of
from parity_tests.marks import quick_if
from parity_tests.test_dropout import DrawnDropout, GivenDropout, dropping, inject
from parity_tests.twins import Pair, pair
from parity_tests.unit import runs

# Square, so that a transposed kernel has the right shape; one layer, which compiles fastest
SIZES = SQUARE | dict(num_layers=1, d_model=8, d_ff=8, num_heads=2)
CONFIG = jt.preset("lesson10_repaired", **SIZES)


@pytest.fixture(scope="module")
def both() -> Pair:
    return pair(CONFIG)


def encoded(model: Any, source: Any) -> Any:
    """Return the encoder's output, half as much to compile."""
    if isinstance(model, jt.Transformer):
        return model.encode(source)
    return model.encode(source).transpose(0, 1)


def compared(both: Pair, state: dict[str, np.ndarray] | None = None, config=CONFIG) -> Report:
    """Return the report on the encoders of a model with these weights and of the correct twin."""
    model = jt.convert.from_torch(both.torch.state_dict() if state is None else state, config)
    return jt.parity.compare(
        model, both.torch, [both.source], gradients=False, call_flax=encoded, call_torch=encoded
    )


def changed(both: Pair, name: str, change) -> dict[str, np.ndarray]:
    state = state_of(both.torch)
    state[name] = change(state[name])
    return state


def one_weight(matrix: np.ndarray) -> np.ndarray:
    matrix[3, 2] += 1e-3
    return matrix


def queries_and_keys_swapped(packed: np.ndarray) -> np.ndarray:
    query, key, value = np.split(packed, 3)
    return np.concatenate([key, query, value])


def test_a_correct_model_agrees_in_outputs_and_gradients(both):
    report = jt.parity.compare(both.flax, both.torch, (both.source, both.target))
    report.check()
    assert report.summary().startswith("the models agree: largest difference ")
    assert max(entry.output.times for entry in report.entries) < 30
    gradients = [entry.gradients for entry in report.entries if entry.gradients is not None]
    assert max(gradient.times for gradient in gradients) < 30
    assert len(gradients) == len(report.entries)
    named = {entry.ours: entry.theirs for entry in report.entries}
    assert named["decoder.blocks.0.cross_attention"] == "decoder.layers.0.multihead_attn"
    assert named["output"] == "linear"
    leaves = [f"encoder.layers.0.self_attn.out_proj.{leaf}" for leaf in ("weight", "bias")]
    assert set(report.entries[1].parameters) == set(leaves)
    data = json.loads(report.to_json())
    assert data["agrees"] and data["first_fault"] is None
    assert data["coverage"]["parameters"] == {"compared": 38, "all": 38}
    assert len(data["modules"]) == len(report.entries)


@pytest.mark.parametrize(
    ("name", "change", "module"),
    [
        ("linear1.weight", one_weight, ("feed_forward.up", "linear1")),
        ("linear2.weight", np.transpose, ("feed_forward.down", "linear2")),
        ("self_attn.in_proj_weight", queries_and_keys_swapped, ("self_attention", "self_attn")),
    ],
    ids=["one weight", "transposed square kernel", "swapped queries and keys"],
)
def test_wrong_weights_are_named_at_their_module(both, name, change, module):
    report = compared(both, changed(both, f"encoder.layers.0.{name}", change))
    ours, theirs = module
    named = f"encoder.blocks.0.{ours} | encoder.layers.0.{theirs}"
    assert report.summary().startswith(f"{named}: its input agrees and its output differs")


def test_two_wrong_weights_are_both_named_though_axes_are_in_another_order_and_equal():
    """In PyTorch the length comes before the batch, and both are 3: only numbers tell which."""
    both = pair(CONFIG, source=3, target=3)
    state = changed(both, "encoder.layers.0.self_attn.out_proj.weight", one_weight)
    state["encoder.norm.bias"] = state["encoder.norm.bias"] + 1
    report = compared(both, state)
    named = [entry.ours for entry in report.faults]
    assert named == ["encoder.final_norm", "encoder.blocks.0.self_attention.out"]
    assert report.own_result[0].agrees and report.first_fault is report.faults[1]


def test_another_epsilon_is_named_at_the_first_norm(both):
    report = compared(both, config=dataclasses.replace(CONFIG, norm_epsilon=1e-6))
    named = "encoder.blocks.0.residuals.0.norm | encoder.layers.0.norm1: "
    assert report.summary().startswith(named)
    assert 1e6 < report.first_fault.output.times < 1e13
    assert report.first_fault.output.wide.max_abs < 1e-3


def test_another_gelu_is_named_between_two_linear_layers(both):
    report = compared(both, config=CONFIG.with_sizes(**{"encoder.activation": "gelu"}))
    assert report.summary().startswith("encoder.blocks.0 | encoder.layers.0: ")
    actual = "in it, the input of feed_forward.down is the first that differs after feed_forward.up"
    assert actual in report.summary()


class Wrapped(torch.nn.Module):
    """A twin under other names: each has the prefix ``model.``."""

    def __init__(self, twin: torch.nn.Module):
        super().__init__()
        self.model = twin


def test_an_unregistered_architecture_names_the_modules(both):
    known = registry.resolve("lesson10")

    def prefixed(config):
        tables = known.weight_table(config)
        return [dataclasses.replace(rule, torch=f"model.{rule.torch}") for rule in tables]

    calls = {"call_flax": encoded, "call_torch": lambda outer, x: encoded(outer.model, x)}
    calls |= {"architecture": dataclasses.replace(known, name="wrapped", weight_table=prefixed)}
    models = both.flax, Wrapped(both.torch)
    report = jt.parity.compare(*models, [both.source], gradients=False, **calls)
    report.check()
    assert all(entry.theirs.startswith("model.") for entry in report.entries)


@pytest.mark.parametrize("name", [quick_if(n == "deep_dive", n) for n in ("deep_dive", "blog2023")])
def test_documents_agree_if_the_batch_is_as_long_as_the_sequence(name):
    both = pair(config_of(name).with_sizes(num_layers=1), source=3, target=3)
    report = jt.parity.compare(both.flax, both.torch, (both.source, both.target), gradients=False)
    report.check()
    assert len(report.entries) > 15
    assert all(entry.output is not None or entry.note for entry in report.entries)


def test_inputs_of_another_kind_and_calls_in_another_order_are_not_differences():
    """One table embeds both texts, the target first in PyTorch, and the stacks add positions only
    in one of the models: everything agrees in a batch of equal lengths.
    """
    sizes = dict(vocab_size=11, d_model=8, num_heads=2, num_layers=1, d_ff=12, max_length=7)
    both = pair(jt.preset("small", **sizes), source=5, target=5)
    report = jt.parity.compare(both.flax, both.torch, (both.source, both.target), gradients=False)
    report.check()
    embedded = [entry for entry in report.entries if entry.ours == "target_embedding"]
    assert [entry.call for entry in embedded] == [0, 1]
    assert all(entry.output.agrees for entry in embedded)
    assert {"encoder", "decoder"} <= {entry.ours for entry in report.entries}
    assert not [line for line in report.lines() if "DIFFERS" in line or "not compared" in line]
    state = changed(both, "decoder.layers.0.linear1.weight", one_weight)
    wrong = jt.convert.from_torch(state, both.config)
    report = jt.parity.compare(wrong, both.torch, (both.source, both.target), gradients=False)
    assert [entry.ours for entry in report.faults] == ["decoder.blocks.0.feed_forward.up"]
    assert report.own_result[0].agrees


def state_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def compare_family(both: huggingface.Pair, ours: jt.Transformer) -> Report:
    """Return the report on one of transformers' models."""
    source, target = huggingface.batch(both.config, source=7, target=5)

    def call(model: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = (source != both.config.source_pad_id).long()
        return model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits

    return jt.parity.compare(ours, both.theirs, (source, target), call_torch=call, gradients=False)


def test_a_position_table_is_not_named_for_a_later_fault():
    """BART's embed_positions returns rows, ours returns x plus rows: neither is wrong."""
    both = huggingface.pair("bart")
    state = state_of(both.theirs)
    state["model.encoder.layers.0.fc2.bias"][3] += 0.5
    report = compare_family(both, jt.convert.from_torch(state, both.config))
    named = "encoder.blocks.0.feed_forward.down | model.encoder.layers.0.fc2: "
    assert report.summary().startswith(named)


def test_faults_after_norms_in_float32_are_named():
    """T5's norm is in float32 whatever its input is: float64 is used there too."""
    both = huggingface.pair("t5")
    state = state_of(both.theirs)
    wrong = {
        "encoder.block.1.layer.0.SelfAttention.k": "encoder.blocks.1.self_attention.key",
        "decoder.block.0.layer.2.layer_norm": "decoder.blocks.0.residuals.2.norm",
    }
    for name in wrong:
        state[f"{name}.weight"].flat[0] += 1e-5
    report = compare_family(both, jt.convert.from_torch(state, both.config))
    dtypes = {entry.ours: entry.narrow for entry in report.faults}
    assert dtypes == dict(zip(wrong.values(), ["", "float32"], strict=True))
    assert report.own_result[0].agrees and report.first_fault.theirs == next(iter(wrong))


@pytest.mark.parametrize("name", [quick_if(name == "marian", name) for name in ("t5", "marian")])
def test_families_of_transformers_agree(name):
    both = huggingface.pair(name)
    report = compare_family(both, both.ours)
    report.check()
    assert len(report.entries) > 40
    noted = {entry.ours.partition(".")[2] for entry in report.entries if entry.note}
    assert noted <= {"positions"}, "theirs are of a batch of one"


def test_dropout_with_the_same_masks():
    both = pair(dropping(CONFIG))
    masks: dict[str, np.ndarray] = {}
    drawn = DrawnDropout(masks, rates := {})

    def call(model, source, target):
        return model(source, target, rngs=drawn)

    jax.eval_shape(lambda: call(both.flax, both.source, both.target))  # draws the masks
    inject(both, masks, rates)
    both.torch.train()
    models, ids = (both.flax, both.torch), (both.source, both.target)
    jt.parity.compare(*models, ids, call_flax=call, gradients=False).check()
    site = next(site for site in reversed(masks) if "feed_forward" in site)
    masks[site] = masks[site].copy()
    masks[site][0, 0] ^= True
    for module in both.torch.modules():
        if isinstance(module, GivenDropout):
            module.calls = 0
    report = jt.parity.compare(*models, ids, call_flax=call, gradients=False)
    assert report.first_fault.ours == "decoder.blocks.0", report.summary()


# The commands


@pytest.fixture(scope="module")
def run(both, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity")
    model = jt.convert.from_torch(both.torch.state_dict(), CONFIG, dtype="float32")
    jt.convert.save(model, folder / "run")
    torch.save(both.torch.float().state_dict(), folder / "good.pt")
    state = changed(both, "decoder.layers.0.linear1.weight", one_weight)
    torch.save({name: torch.from_numpy(array) for name, array in state.items()}, folder / "bad.pt")
    both.torch.double()
    return folder


def parity(folder: Path, *arguments: str | Path) -> int:
    return runs.main("parity", folder / "run", *arguments)


def test_the_command_names_the_first_fault_and_exits_with_1(run, capsys, monkeypatch):
    page, junit = run / "report.html", run / "report.xml"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    options = "--no-gradients", "--html", page, "--junit", junit
    assert parity(run, run / "bad.pt", *options) == 1
    output = capsys.readouterr()
    *table, annotation = output.out.splitlines()
    assert annotation.startswith(f"::error title={run}/run and {run}/bad.pt::decoder.blocks.0.")
    # On this batch ReLU stops the difference, so the results are equal; the weight is wrong anyway
    named = "decoder.blocks.0.feed_forward.up | decoder.layers.0.linear1"
    line = f"{named}: its input agrees and its output differs"
    assert output.err.startswith(f"jax-transformer: {line}") and output.err.count("\n") == 1
    assert output.err.endswith("; the results agree on this batch\n")
    assert max(map(len, table[:-1])) <= 100
    (suite,) = ElementTree.parse(junit).getroot()
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == [named, "result"] and suite.get("failures") == "2"
    assert len(suite.findall("testcase")) == int(suite.get("tests")) > 15
    assert "feed_forward.up" in page.read_text(encoding="utf-8")


def test_the_command_agrees_with_the_twin_at_a_length(run, capsys):
    assert parity(run, "twin", "--no-gradients", "--lengths", "20", "--json") == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["about"]["batch"] for report in reports] == [[[3, 20], [3, 20]]]
    assert all(report["agrees"] for report in reports)
    assert parity(run, "twin", "--lengths", "21") == 2
    assert "--lengths 21: this model takes 1 to 20" in capsys.readouterr().err


def test_a_sweep_of_lengths_shows_at_which_the_models_differ(run, both, capsys):
    """Biases of queries change nothing if there is one key."""
    name = "decoder.layers.0.self_attn.in_proj_bias"
    wrong = changed(both, name, lambda bias: bias + np.repeat([1e-3, 0, 0], len(bias) // 3))
    tensors = {name: torch.from_numpy(array).float() for name, array in wrong.items()}
    torch.save(tensors, run / "queries.pt")
    assert parity(run, run / "queries.pt", "--no-gradients", "--lengths", "1,7") == 1
    output = capsys.readouterr()
    named = "decoder.blocks.0.self_attention | decoder.layers.0.self_attn"
    fault = f"{named}: its input agrees and its output differs"
    assert "queries.pt, length 1: the models agree" in output.out
    assert f"queries.pt, length 7: {fault}" in output.err and output.err.count("\n") == 1


@pytest.mark.parametrize("agree", [(True, True), (True, False), (False, False)])
def test_one_of_several_reports_is_shown_in_full(run, monkeypatch, capsys, agree):
    """The first that differs, otherwise the last; each that differs is an annotation."""
    reports = [(str(i), mock.Mock(agrees=each)) for i, each in enumerate(agree)]
    for title, report in reports:
        report.configure_mock(**{"lines.return_value": [f"all of {title}"]})
        report.configure_mock(**{"summary.return_value": "s"})
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setattr(from_files, "compare_files", lambda *_, **__: reports)
    assert parity(run, "twin") == (not all(agree))
    full = agree.index(False) if False in agree else 1
    lines = [f"all of {i}" if i == full else f"{i}: s" for i in range(2)]
    lines += [f"::error title={i}::s" for i in range(2) if not agree[i]]
    assert capsys.readouterr().out.splitlines() == lines


def test_the_command_compares_steps_from_the_weights_of_the_run(run, capsys, monkeypatch):
    with jax.numpy_dtype_promotion("standard"):  # which Optax needs
        assert parity(run, "twin", "--steps", "2", "--lengths", "5", "--json") == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert report["title"].endswith(", length 5") and report["agrees"]
    assert len(report["steps"]) == 2 and len(report["steps"][0]["gradients"]) == 38
    monkeypatch.setattr(optax, "adamw", lambda rate, **options: optax.sgd(rate))
    assert parity(run, "twin", "--steps", "1") == 1
    output = capsys.readouterr()
    assert "the gradients of step 1 agree, and after the update the parameter differs" in output.err
    assert output.out.startswith("step") and output.out.splitlines()[-1] in output.err
    for other, options, message in (
        ("twin", "0", "steps=0: must be at least 1"),
        (run / "good.pt", "1", f"begin with the same weights: twin, not {run}/good.pt"),
        ("twin", "1 --dtype float16 --junit j", "--steps: --dtype, --junit can only be used"),
        ("twin", "1 --html h --no-gradients", "--steps: --no-gradients, --html can only be used"),
    ):
        assert parity(run, other, "--steps", *options.split()) == 2
        assert message in capsys.readouterr().err


def test_a_golden_of_a_module_with_another_kind_of_batch_is_refused(run, capsys):
    x = np.zeros((2, 3))
    path, source = run / "other.safetensors", {"factory": "a:b"}
    golden.create(path, lambda *_: Recording(result=x), [x], source=source)
    assert parity(run, path) == 2
    assert "its batch is float64 (2, 3), but " in capsys.readouterr().err


def test_a_golden_of_a_run_needs_no_torch_afterwards(run, capsys, monkeypatch):
    path = str(run / "golden.safetensors")
    assert cli.main(["golden", "make", path, str(run / "run"), "--seed", "4"]) == 0
    assert cli.main(["golden", "check", path]) == 0
    assert "0 within rounding, 0 differ" in capsys.readouterr().out
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for options in ([], ["--no-gradients"]):
        assert parity(run, path, *options) == 0
        assert "the models agree" in capsys.readouterr().out
    assert parity(run, path, "--seed", "3") == 2
    assert "is a golden, whose batch and gradients belong to seed 4" in capsys.readouterr().err
    assert parity(run, "twin") == 2
    assert "pip install 'jax-seq2seq[torch]'" in capsys.readouterr().err
    version = torch.__version__
    assert golden.load(path).versions["torch"] in (version, version.partition("+")[0])
