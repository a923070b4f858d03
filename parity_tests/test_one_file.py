"""docs/one_file.py computes what the package, its trainer and PyTorch compute."""

import ast
import dataclasses
import importlib.util
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_transformer as jt
from jax_transformer import generate, transformer
from jax_transformer.architectures import twins
from jax_transformer.data import batches, phrases
from jax_transformer.data.batches import Batch
from jax_transformer.training import step
from parity_tests.unit import runs

PATH = runs.ROOT / "docs/one_file.py"
PAGE = runs.ROOT / "docs/one-file.md"
SPEC = importlib.util.spec_from_file_location("one_file", PATH)
one_file = importlib.util.module_from_spec(SPEC)
sys.modules["one_file"] = one_file
SPEC.loader.exec_module(one_file)
SIZES = dict(d_model=16, num_heads=4, d_ff=24, num_layers=2)
TRAINED = one_file.Config(**SIZES | {"num_layers": 1}, steps=20, warmup_steps=5)


def package_config(config) -> jt.TransformerConfig:
    names = "vocab_size d_model num_heads d_ff num_layers dropout".split()
    return jt.preset("small", **{name: getattr(config, name) for name in names})


def with_weights(config, theirs: jt.Transformer):
    """The model of the file with the weights of the package's, which cross as PyTorch's."""
    model = one_file.Transformer(config, nnx.Rngs(1))
    one_file.load_torch(model, jt.convert.to_torch(theirs))
    return model


@pytest.fixture
def pair():
    """The two models with the same random weights in float64, and a ragged batch."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        config = dataclasses.replace(one_file.Config(**SIZES), vocab_size=11)
        random = np.random.default_rng(1)
        theirs = jt.Transformer(package_config(config), rngs=nnx.Rngs(0))
        shapes = transformer.shapes(theirs.config).items()
        arrays = {name: jnp.asarray(random.normal(size=shape) / 3) for name, shape in shapes}
        theirs = transformer.unflatten(theirs.config, arrays)
        batch = Batch(
            np.array([[3, 4, 5, 6, 7, 8, 2], [9, 10, 2, 0, 0, 0, 0], [4, 2, 0, 0, 0, 0, 0]]),
            np.array([[1, 5, 6, 0, 0], [1, 7, 8, 9, 10], [1, 3, 0, 0, 0]]),
            np.array([[5, 6, 2, 0, 0], [7, 8, 9, 10, 2], [3, 2, 0, 0, 0]]),
        )
        yield config, with_weights(config, theirs), theirs, batch


def test_logits_equal_the_package_and_pytorch(pair):
    _, model, theirs, batch = pair
    logits = np.asarray(model(batch.source, batch.target_in))
    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, theirs(batch.source, batch.target_in), rtol=0, atol=1e-12)
    module = jt.convert.into_torch(theirs, twins.twin(theirs.config).double().eval())
    reference = module(*map(torch.from_numpy, batch[:2])).detach().numpy()
    np.testing.assert_allclose(logits, reference, rtol=0, atol=1e-12)


def theirs_name(path: tuple) -> str:
    name = re.sub(r"\.norms\.(\d)", r".residuals.\1.norm", ".".join(map(str, path)))
    name = re.sub(r"^(encoder|decoder)\.norm\.", r"\1.final_norm.", name)
    return "target_embedding.embedding" if name == "embedding" else name


def test_gradients_equal_the_package(pair):
    """With dropout, whose masks are equal, and label smoothing."""
    config, model, theirs, batch = pair
    key = jax.random.key(3)
    graphdef, params = nnx.split(model, nnx.Param)

    def our_loss(params):
        return one_file.loss_per_token(params, graphdef, config, batch, key)

    def their_loss(arrays):
        return step.loss_sum(arrays, {}, batch, theirs.config, config.label_smoothing, key)[0]

    expected = jax.jit(jax.grad(their_loss))(transformer.flatten(theirs))
    gradients = nnx.to_flat_state(jax.jit(jax.grad(our_loss))(params))
    ours = {theirs_name(path): gradient[...] for path, gradient in gradients}
    assert ours.keys() == expected.keys() and len(ours) == len(gradients)
    tokens = np.count_nonzero(batch.target_out)
    for name, gradient in ours.items():
        close = {"rtol": 0, "atol": 1e-12, "err_msg": name}
        np.testing.assert_allclose(gradient, expected[name] / tokens, **close)


def test_greedy_decoding_equals_the_package(pair):
    _, model, theirs, _ = pair
    source = np.random.default_rng(1).integers(3, 11, (64, 7))
    source[:32, 4:] = [2, 0, 0]
    ids = np.asarray(one_file.greedy(model, source, length=9))
    np.testing.assert_array_equal(ids, generate.greedy(theirs, source, max_length=9))
    ended = np.count_nonzero((ids == one_file.EOS).any(axis=1))
    assert 0 < ended < len(ids) and len(np.unique(ids)) > 3


@pytest.mark.usefixtures("as_a_user")
def test_twenty_losses_equal_train_py(tmp_path):
    """With dropout, from the same weights: tokens, batches, masks, loss and optimizer are equal."""
    pairs = one_file.read_pairs()[:240]
    for split, part in (("train", pairs), ("valid", pairs[:2])):
        (tmp_path / f"{split}.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in part))
    folder = tmp_path / "run"
    config = dataclasses.replace(TRAINED, tokens_per_batch=480)
    sizes = {"encoder_layers": config.num_layers, "decoder_layers": config.num_layers}
    for name in ("d_model", "num_heads", "d_ff"):
        sizes[name] = getattr(config, name)
    options = {f"model.{name}": size for name, size in sizes.items()}
    options |= {f"data.{split}": tmp_path / f"{split}.tsv" for split in ("train", "valid")}
    options |= {f"data.{n}": getattr(config, n) for n in ("vocab_size", "tokens_per_batch")}
    options |= {"optimizer.warmup_steps": config.warmup_steps, "data.buckets": 2, "run": folder}
    options |= {"steps": config.steps, "eval_every": config.steps, "log_every": 1}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert runs.main("train", *words) == 0
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    expected = [line["loss"] for line in lines if "loss" in line]
    about = json.loads((folder / "data.json").read_text())
    assert about["batches_per_epoch"] < config.steps, "the second epoch is compared, too"
    config = dataclasses.replace(config, widths=tuple(about["widths"]))
    theirs = jt.Transformer(package_config(config), rngs=nnx.Rngs(params=config.seed))
    losses = list(one_file.train(with_weights(config, theirs), config, pairs))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)


def test_the_default_batches_are_those_of_train_py():
    texts = one_file.read_pairs()
    assert texts == phrases.load()["train"]
    lengths = np.array([[len(side.encode()) + 1 for side in pair] for pair in texts])
    table, _ = batches.LengthTable.of(lengths)
    assert one_file.Config.widths == batches.choose_widths(table, 4, 128)


def test_it_is_300_lines_and_imports_no_package_of_this_project():
    text = PATH.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300 and max(map(len, text.splitlines())) <= 100
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    modules = {name.split(".")[0] for name in names}
    assert modules - sys.stdlib_module_names == {"jax", "flax", "optax", "numpy"}


def test_weights_of_another_model_are_refused(pair):
    _, model, theirs, _ = pair
    state = jt.convert.to_torch(theirs)
    fewer = {name: array for name, array in state.items() if name != "decoder.norm.bias"}
    with pytest.raises(ValueError, match=r"unexpected tensors: \['other'\]"):
        one_file.load_torch(model, state | {"other": np.zeros(3)})
    with pytest.raises(KeyError, match=r"decoder\.norm\.bias"):
        one_file.load_torch(model, fewer)
    with pytest.raises(ValueError, match=r"decoder.norm.bias: \(3,\) is not \(16,\)"):
        one_file.load_torch(model, state | {"decoder.norm.bias": np.zeros(3)})


def test_each_question_of_the_page_names_a_definition():
    rows = re.findall(r"^\| .+\? \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    defined = {
        node.name
        for node in ast.walk(ast.parse(PATH.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    named = [re.findall(r"`(\w+)(?:\.\w+)*`", row) for row in rows]
    assert len(rows) >= 12 and all(named)
    assert {name for names in named for name in names} <= defined
