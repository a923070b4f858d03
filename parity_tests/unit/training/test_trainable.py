"""Parameters frozen by name, and low-rank adapters: what a step changes, and what a run saves."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_transformer import transformer
from jax_transformer.errors import ConfigError
from jax_transformer.formats import registry
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.storage import checkpoint
from jax_transformer.training import step, trainable
from jax_transformer.training.options import LoraOptions, TrainOptions
from jax_transformer.weights.arrays import LORA_A, LORA_B, adapted_kernels
from parity_tests.unit import helpers, runs
from parity_tests.unit.training.test_step import KEY, NO_DROPOUT, batch_of, furthest, strict_off

CONFIG = helpers.tiny(num_layers=1, **NO_DROPOUT)
RATE = 0.1
SQUARE, WIDE = "*query.kernel", "encoder.*.up.kernel"
"""Kernels of (12, 12) and of (12, 20)."""


def after_one_step(options: TrainOptions) -> tuple[step.TrainState, step.TrainState]:
    """The states before and after one step of SGD on random weights, in float64."""
    tx, model = optax.sgd(RATE, momentum=0.9), helpers.random_model(CONFIG)
    params, frozen = (transformer.flatten(model, kind) for kind in (nnx.Param, Frozen))
    trained, others = trainable.divide(params, options)
    before = step.state_of(trained, frozen | others, tx)
    copy = jax.tree.map(jnp.copy, before)
    after, _ = strict_off(step.make_step(CONFIG, tx, 0.1))(before, [batch_of(CONFIG, 3)], KEY)
    return copy, after


def moments(state: step.TrainState) -> set[str]:
    """The names of the arrays that the optimizer has momentum for."""
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state)
    return {str(path[-1].key) for path, leaf in leaves if leaf.ndim}


def test_frozen_parameters_stay_and_have_no_optimizer_state():
    everything, all_trained = after_one_step(TrainOptions())
    before, after = after_one_step(TrainOptions(freeze=("encoder.*", "*.bias")))
    frozen = {name for name in everything.params if re.match(r"encoder\.|.*\.bias$", name)}
    assert frozen and frozen < everything.params.keys()
    assert set(after.params) == moments(after) == everything.params.keys() - frozen
    assert furthest(before.frozen, after.frozen) == 0
    expected = {name: all_trained.params[name] for name in after.params}
    assert furthest(expected, after.params) < 1e-15, "the others are trained as ever"
    assert set(after.trained) == set(after.params)


def test_adapters_follow_the_gradient_of_their_kernels():
    """With b = 0, the gradient of b is that of the kernel times a and the scale."""
    before, all_trained = after_one_step(TrainOptions())
    options = TrainOptions(lora=LoraOptions(rank=3, alpha=6.0, targets=("*query.kernel",)))
    adapters, after = after_one_step(options)
    kernels = adapted_kernels(adapters.params)
    assert kernels == [name for name in before.params if name.endswith("query.kernel")]
    assert set(after.trained) == set(kernels)
    assert furthest(adapters.weights, before.weights) == 0, "no change before the first step"
    assert furthest(adapters.frozen, after.frozen) == 0
    for name in kernels:
        gradient = (before.params[name] - np.array(all_trained.params[name])) / RATE
        a, b = adapters.params[name + LORA_A], np.array(after.params[name + LORA_B])
        assert np.array_equal(after.params[name + LORA_A], a)
        np.testing.assert_allclose(b, -RATE * 2.0 * a.T @ gradient, atol=1e-14)
        merged = before.params[name] + 2.0 * a @ b
        np.testing.assert_allclose(after.weights[name], merged, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": ("encoder.*", "encodr.*")}, r"^freeze: encodr\.\* fits no parameter"),
        ({"freeze": ("*",)}, "no parameter is left to train"),
        ({"freeze": ("encoder.*",), "lora": LoraOptions(2)}, r"not with lora\.rank"),
        ({"lora": LoraOptions(2, targets=("*.bias",))}, r"lora\.rank=2 does not fit .*\.bias"),
        ({"lora": LoraOptions(99)}, r"lora\.rank=99 does not fit .*query\.kernel"),
        ({"lora": LoraOptions(2, targets=("query",))}, "lora.targets: query fits no parameter"),
        ({"freeze": ("[a-f]*", "[g-z]*")}, "no parameter is left to train"),
        ({"lora": LoraOptions(13, targets=(SQUARE,))}, r"lora\.rank=13 does not fit .*query"),
        ({"lora": LoraOptions(13, targets=(SQUARE, WIDE))}, r"does not fit .*query"),
        ({"lora": LoraOptions(13, targets=(WIDE,))}, r"does not fit .*up\.kernel"),
        ({"lora": LoraOptions(2, targets=(SQUARE, "*.scale"))}, r"does not fit .*norm\.scale"),
        ({"lora": LoraOptions(-1)}, r"lora\.rank=-1 must be at least 0"),
        ({"lora": LoraOptions(1, targets=())}, "lora.targets: names no kernel"),
        ({"lora": LoraOptions(alpha=0.0)}, r"lora\.alpha=0\.0 must be above 0"),
        ({"lora": LoraOptions(alpha=float("nan"))}, r"lora\.alpha=nan must be above 0"),
        ({"lora": LoraOptions(alpha=8.0)}, r"lora\.alpha=8\.0 has no effect without lora\.rank"),
        (
            {"lora": LoraOptions(targets=(SQUARE, WIDE))},
            r"lora\.targets=\S+ \S+ has no effect without lora\.rank",
        ),
    ],
)
def test_patterns_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        trainable.check(TrainOptions(**options), CONFIG)


def test_a_rank_may_be_the_narrower_side_and_one_parameter_may_be_left():
    trainable.check(TrainOptions(lora=LoraOptions(12, targets=(SQUARE, WIDE))), CONFIG)
    names = list(transformer.shapes(CONFIG, of=nnx.Param))
    trainable.check(TrainOptions(freeze=tuple(names[1:])), CONFIG)


def test_each_adapter_has_its_own_numbers_by_the_seed_within_the_bound_of_pytorch():
    def drawn(seed: int) -> list[np.ndarray]:
        options = TrainOptions(seed=seed, lora=LoraOptions(3, targets=(SQUARE, "*.down.kernel")))
        params = transformer.flatten(helpers.random_model(CONFIG), nnx.Param)
        trained, rest = trainable.divide(params, options)
        assert all(rest[name] is params[name] for name in params)
        return [np.array(array) for name, array in trained.items() if name.endswith(LORA_A)]

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert len(first) == 5 and all(map(np.array_equal, first, again))
    everything = [*first, *other]
    assert len({array.tobytes() for array in everything}) == len(everything)
    for array in everything:
        bound = 1 / np.sqrt(len(array))
        assert bound * 0.7 < array.max() <= bound and -bound <= array.min() < -bound * 0.7


@pytest.fixture(scope="module")
def runs_of_adapters(tmp_path_factory):
    """A run, another that trained adapters on its weights, and the flags of the second."""
    temporary = tmp_path_factory.mktemp("lora")
    flags = [*runs.OPTIONS, *runs.write_text(temporary), "--model.preset", "lesson10"]
    few = {"--steps": 4, "--eval-every": 2, "--optimizer.warmup-steps": 1, "--data.buckets": 1}
    for name, value in few.items():
        flags = runs.with_option(flags, name, value)
    base, path = temporary / "base", temporary / "adapted"
    with runs.as_a_user():
        assert runs.train("--run", base, *flags).code == 0
        pairs = zip(flags[::2], flags[1::2], strict=True)
        own = [pair for pair in pairs if not pair[0].startswith(("--model.", "--data.vocab"))]
        flags = [flag for pair in own for flag in pair]
        flags += ["--init", str(base), "--lora.rank", "2", "--average", "2"]
        result = runs.train("--run", path, *flags)
    assert result.code == 0, result.err
    assert " 384 parameters of adapters (rank 2) are trained" in result.err  # 6 x (16 x 2 + 2 x 16)
    return base, path, flags


@pytest.fixture
def adapted(runs_of_adapters):
    with runs.as_a_user():
        yield runs_of_adapters


def test_a_run_of_adapters_is_read_as_a_model(adapted, tmp_path, console):
    base, path, _ = adapted
    before, after = registry.open(base).state(), registry.open(path, "4").state()
    assert before.keys() == after.keys()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed and all(re.search(r"(query|value)\.kernel$", name) for name in changed)
    arrays = checkpoint.open(path / "checkpoints", 4).arrays()
    for name in changed:
        a, b = (arrays[f"params/{name}{part}"] for part in (LORA_A, LORA_B))
        expected = before[name] + np.float32(8) * (a @ b)
        np.testing.assert_allclose(after[name], expected, atol=1e-6)
    averaged, second = (registry.open(path, name).state() for name in ("averaged", "2"))
    for name in before:
        np.testing.assert_allclose(averaged[name], (second[name] + after[name]) / 2, atol=1e-7)
    assert console.say("translate", "--run", path, stdin=b"the cat\n")[0] == 0
    assert console.say("convert", path, tmp_path / "model.safetensors")[0] == 0
    command = ["convert", path, tmp_path / "state.pt", "--training"]
    console.refused(2, ["--training"], *command)


def test_stored_positions_are_frozen_in_a_run_and_in_that_of_its_adapters(adapted):
    base, path, _ = adapted
    model = transformer.Transformer(registry.open(base).config, rngs=nnx.Rngs(0))
    fresh = jax.device_get(transformer.flatten(model, Frozen))
    assert set(fresh) == {"encoder.positions.table", "decoder.positions.table"}
    for run in (base, path):
        arrays = runs.arrays(run, 4)
        tables = {name: array for name, array in arrays.items() if "positions.table" in name}
        assert not runs.differing(tables, {f"frozen/{n}": array for n, array in fresh.items()})


@pytest.mark.parametrize(
    ("flags_of_lora", "message"),
    [(("--lora.rank", "17"), "lora.rank=17 does not fit"), (("--freeze", "*"), "left to train")],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    adapted, tmp_path, flags_of_lora, message
):
    flags = adapted[2][: adapted[2].index("--lora.rank")]
    result = runs.train("--run", tmp_path / "run", *flags, *flags_of_lora)
    assert (result.code, result.out) == (2, "") and message in result.err
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_of_adapters_is_bit_for_bit_the_same(adapted, tmp_path):
    _, path, flags = adapted
    again = shutil.copytree(path, tmp_path / "again")
    shutil.rmtree(again / "averaged")
    shutil.rmtree(again / "checkpoints" / "4")
    assert runs.train("--run", again, *flags).code == 0
    assert not runs.differing(runs.arrays(path, 4), runs.arrays(again, 4))
