"""A torch.optim state_dict as plain arrays: round trips, any Optax chain, and refusals."""

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_transformer import convert
from jax_transformer.convert.training_state import opt_state, torch_checkpoint, torch_optimizer
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions
from jax_transformer.training.options import LoraOptions, TrainOptions
from jax_transformer.weights import rules
from parity_tests.unit import runs

# Packed, fused by head, transposed, tied, frozen and square tensors: everything that a table does
TABLE = [
    *rules.embedding("emb", "target_embedding"),
    rules.Alias("src.weight", "emb.weight"),
    *rules.packed_attention("attn", "self_attention"),
    *rules.fused_attention("mix", "cross_attention", heads=2),
    *rules.linear("up", "up"),
    *rules.layer_norm("norm", "norm"),
    *rules.linear("unused", "idle"),
    rules.Rule("pe", "positions.table", "l 1 d -> l d"),
]
D = 4
SHAPES = {"target_embedding.embedding": (7, D), "up.kernel": (D, 6), "up.bias": (6,)}
SHAPES |= {"norm.scale": (D,), "norm.bias": (D,)}
for _part in ("self_attention", "cross_attention"):
    for _name in ("query", "key", "value", "out"):
        SHAPES |= {f"{_part}.{_name}.kernel": (D, D), f"{_part}.{_name}.bias": (D,)}
ALL_SHAPES = SHAPES | {"idle.kernel": (D, D), "idle.bias": (D,), "positions.table": (9, D)}
# A module's order: the tied embedding first under its other name, the frozen layer in the middle,
# no buffer
NAMES = "norm.weight norm.bias src.weight unused.weight unused.bias attn.in_proj_weight".split()
NAMES += "attn.in_proj_bias attn.out_proj.weight".split()
NAMES += "attn.out_proj.bias mix.qkv.weight mix.qkv.bias mix.linear_layer.weight".split()
NAMES += "mix.linear_layer.bias up.weight up.bias".split()
SWITCHES = dict(maximize=False, foreach=None, differentiable=False, fused=None)
ADAM = SWITCHES | dict(lr=1e-3, weight_decay=0.1, amsgrad=False, capturable=False)
GROUPS = {
    "adamw": ADAM | dict(betas=(0.9, 0.98), eps=1e-9, decoupled_weight_decay=True, initial_lr=2e-3),
    "adam": ADAM | dict(betas=(0.9, 0.999), eps=1e-8, decoupled_weight_decay=False),
    "sgd": SWITCHES | dict(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True),
}


def saved(kind: str, *, count: int = 3, dtype: str = "float64") -> dict[str, Any]:
    """Return an optimizer's ``state_dict()`` with random moments."""
    random, shapes, state = np.random.default_rng(1), rules.torch_shapes(TABLE, ALL_SHAPES), {}
    for number, name in enumerate(NAMES):
        if not name.startswith("unused"):
            first, second = (random.normal(size=shapes[name]).astype(dtype) for _ in range(2))
            adam = {"step": np.array(count, np.float32), "exp_avg": first, "exp_avg_sq": second}
            state[number] = {"momentum_buffer": first} if kind == "sgd" else adam
    return {"state": state, "param_groups": [GROUPS[kind] | {"params": list(range(len(NAMES)))}]}


def read(state: dict[str, Any], names: list[str] = NAMES, **more: Any) -> torch_optimizer.Moments:
    return convert.optimizer_from_torch(state, TABLE, SHAPES, names, **more)


def written(moments: torch_optimizer.Moments) -> dict[str, Any]:
    return convert.optimizer_to_torch(moments, TABLE, SHAPES, NAMES)


def assert_same(ours: Any, theirs: Any, where: str = "state_dict") -> None:
    """Assert that arrays are bitwise equal and all other values are equal."""
    assert type(ours) is type(theirs), where
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, np.ndarray):
        assert runs.bits(ours) == runs.bits(theirs), where
    elif isinstance(ours, list):
        assert_same(dict(enumerate(ours)), dict(enumerate(theirs)), where)
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("kind", list(GROUPS))
def test_there_and_back_is_the_identity(kind: str, dtype: str):
    state = saved(kind, dtype=dtype)
    moments = read(state)
    assert moments.kind == kind
    assert moments.first.keys() == SHAPES.keys()
    assert_same(written(moments), state)


def test_moments_are_mapped_like_their_parameters():
    """Negative control of the identity above, which an unused table would pass too."""
    moments, state = read(saved("adamw")), saved("adamw")["state"]
    packed, fused, embedding = (
        state[NAMES.index(name)] for name in ("attn.in_proj_weight", "mix.qkv.weight", "src.weight")
    )
    key = packed["exp_avg"][D : 2 * D].T
    np.testing.assert_array_equal(moments.first["self_attention.key.kernel"], key)
    key = fused["exp_avg"].reshape(2, 3, D // 2, D)[:, 1].reshape(D, D).T
    np.testing.assert_array_equal(moments.first["cross_attention.key.kernel"], key)
    second = moments.second["target_embedding.embedding"]
    np.testing.assert_array_equal(second, embedding["exp_avg_sq"])
    assert set(moments.counts.values()) == {3} and moments.counts.keys() == SHAPES.keys()


@pytest.mark.parametrize("kind", list(GROUPS))
def test_before_its_first_update_an_optimizer_has_no_state(kind: str):
    state = saved(kind) | {"state": {}}
    moments = read(state)
    assert not moments.first and not moments.second and not any(moments.counts.values())
    assert_same(written(moments), state)


def split(state: dict[str, Any], at: int, **changes: Any) -> dict[str, Any]:
    (group,) = state["param_groups"]
    first, second = group["params"][:at], group["params"][at:]
    state["param_groups"] = [group | {"params": first}, group | {"params": second} | changes]
    return state


def test_groups_may_differ_in_weight_decay():
    state = split(saved("adamw"), 2, weight_decay=0.0)
    moments = read(state)
    decayed = {name for name, decay in moments.weight_decay.items() if decay}
    assert decayed == {"norm.scale", "norm.bias"}
    assert_same(written(moments), state)


OTHER: dict[str, Any] = dict(lr=0.7, initial_lr=0.8, eps=0.3, betas=(0.4, 0.6), momentum=0.5)
OTHER |= dict(nesterov=False, weight_decay=0.25, amsgrad=True, maximize=True, dampening=0.5)
SETTINGS = [(kind, name) for kind in GROUPS for name in OTHER if name in GROUPS[kind]]


@pytest.mark.parametrize(("kind", "name"), SETTINGS)
def test_each_setting_comes_back_and_only_decays_differ_between_three_groups(kind, name):
    state = saved(kind)
    (group,) = state["param_groups"]
    other = group | {name: OTHER[name]}
    if name in ("amsgrad", "maximize", "dampening"):  # also if only one group has it
        message = rf"param_groups\[2\] has {name}="
    else:
        message = rf"param_groups\[2\] has {name}=.* only in weight decay"
        changed = state | {"param_groups": [other]}
        moments = read(changed)
        assert_same(written(moments), changed)
    members = [[0, 1], [2, 3, 4, 5, 6], list(range(7, len(NAMES)))]
    listed = {key: list(v) if isinstance(v, tuple) else v for key, v in group.items()}
    settings = [read(state | {"param_groups": [each]}) for each in (group, listed)]
    assert settings[0].hyperparameters == settings[1].hyperparameters
    for odd in range(3):
        groups = [
            (other if number == odd else group) | {"params": names}
            for number, names in enumerate(members)
        ]
        changed = state | {"param_groups": groups}
        if name == "weight_decay":
            moments = read(changed)
            if odd == 1:  # neighbours with the same decay become one group
                assert_same(written(moments), changed)
            assert set(moments.weight_decay.values()) == {group[name], OTHER[name]}
            continue
        with pytest.raises(InputError, match=message.replace("2", "[012]")):
            read(changed)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_each_moment_has_the_shape_of_its_parameter(name):
    state = saved("adamw")
    state["state"][NAMES.index("up.weight")][name] = np.zeros((D, 6))
    with pytest.raises(InputError, match=rf"up.weight: {name} has .* \(4, 6\).* \(6, 4\)"):
        read(state)


def test_a_state_counts_from_one_update():
    moments = read(saved("adamw", count=1))
    assert set(moments.counts.values()) == {1}
    with pytest.raises(InputError, match="not a count of updates"):
        read(saved("adamw", count=0))


def test_an_older_file_says_which_adam_if_any_group_decays():
    state = split(saved("adam"), 2, weight_decay=0.1)
    state["param_groups"][0]["weight_decay"] = 0.0
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    with pytest.raises(InputError, match="does not say which"):
        read(state)
    for kind in ("adam", "adamw"):
        assert read(state, kind=kind).kind == kind
        assert [read(saved(stated), kind=kind).kind for stated in GROUPS] == [*GROUPS]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (TrainOptions(), ""),
        (TrainOptions(optimizer=OptimizerOptions(ema=1e-9)), "optimizer.ema="),
        (TrainOptions(optimizer=OptimizerOptions(ema=0.999)), "optimizer.ema="),
        (TrainOptions(freeze=("encoder.*",)), "freeze: "),
        (TrainOptions(lora=LoraOptions(rank=1)), "lora.rank: "),
    ],
)
def test_what_torch_s_loop_does_not_have_is_refused(options, words):
    refused = pytest.raises(ConfigError, match=f"^{words}") if words else nullcontext()
    with refused:
        torch_checkpoint._check_plain(options)


def test_rates_are_in_float64_and_compared_to_a_millionth_of_the_peak():
    run = TrainOptions(optimizer=OptimizerOptions(weight_decay=0.1), steps=10)
    with jax.enable_x64(False):
        rates = [torch_checkpoint.learning_rate(run, i) for i in range(10)]
    assert any(rate != float(np.float32(rate)) for rate in rates)
    peak = run.optimizer.rate.learning_rate
    for off, fits in ((-1.1, False), (-0.9, True), (0.9, True), (1.1, False)):
        settings = {"lr": rates[3] + off * 1e-6 * peak}
        settings |= opt_state.hyperparameters(run.optimizer)
        moments = torch_optimizer.Moments("adamw", {}, {}, {}, settings, {"a": 0.1})
        different = pytest.raises(ConfigError, match="rate after 3 updates")
        with nullcontext() if fits else different:
            torch_checkpoint._check_options(moments, run, 3)


def test_names_of_every_group_are_compared():
    state = split(saved("sgd"), 2)
    first, second = state["param_groups"]
    first["param_names"], second["param_names"] = NAMES[:2], NAMES[2:][::-1]
    with pytest.raises(InputError, match="another order"):
        read(state)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_momentum_begins_with_the_first_update(position):
    moments = read(saved("sgd"))
    state = opt_state.into_optax(CHAINS["sgd"]().init(params()), moments, position)
    again = opt_state.from_optax(state, "sgd", moments.hyperparameters, moments.weight_decay)
    assert bool(again.first) == (position > 0) and opt_state.position(state) == position


@pytest.mark.parametrize("nesterov", [False, True])
def test_settings_of_the_options_are_torch_s(nesterov):
    for name in (OptimizerName.ADAM, OptimizerName.ADAMW):
        options = OptimizerOptions(name, beta1=0.5, beta2=0.25, epsilon=0.1)
        assert opt_state.hyperparameters(options) == {"betas": (0.5, 0.25), "eps": 0.1}
    settings = {"momentum": 0.7, "nesterov": nesterov}
    options = OptimizerOptions(OptimizerName.SGD, **settings)
    assert opt_state.hyperparameters(options) == settings


@pytest.mark.parametrize(
    ("there", "here", "decays", "words"),
    [
        ("adamw", "adamw", (0.1,), ""),
        ("adam", "adamw", (0.1,), "the optimizer (adam there, adamw here)"),
        ("adam", "adamw", (0.0,), ""),
        ("adam", "adamw", (0.0, 0.1), "the optimizer (adam there, adamw here), weight_decay"),
        ("sgd", "adamw", (0.0,), "the optimizer (sgd there, adamw here)"),
        ("adamw", "adamw", (0.1, 0.2), "weight_decay ([0.1, 0.2] there, 0.1 here)"),
        ("adamw", "adamw", (0.1, 0.0), "weight_decay ([0.0, 0.1] there, 0.1 here)"),
    ],
)
def test_optimizers_are_compared_with_the_run_s_options(there, here, decays, words):
    options = OptimizerOptions(OptimizerName(here), weight_decay=decays[0])
    run = TrainOptions(optimizer=options, steps=10)
    settings = {"lr": torch_checkpoint.learning_rate(run, 3)}
    settings |= opt_state.hyperparameters(options)
    numbered = {str(number): decay for number, decay in enumerate(decays)}
    moments = torch_optimizer.Moments(there, {}, {}, {}, settings, numbered)
    refused = pytest.raises(ConfigError, match=re.escape(words)) if words else nullcontext()
    with refused:
        torch_checkpoint._check_options(moments, run, 3)


def test_a_number_of_steps_is_whole_and_not_negative():
    for value in (0, 3, 3.0, np.array(3)):
        assert torch_checkpoint._step_count(value, "step") == value
    for value in (-1, -1.0, 2.5, np.nan, np.inf, "3", None):
        message = re.escape(f"step={value!r} of the training checkpoint is not a number of steps")
        with pytest.raises(InputError, match=message):
            torch_checkpoint._step_count(value, "step")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_missing_momentum_is_zero(dtype):
    """torch creates a buffer at the first gradient, with that value, as if it were zero before."""
    state = saved("sgd", dtype=dtype)
    state["state"][NAMES.index("up.bias")] = {"momentum_buffer": None}
    for each in state["param_groups"]:
        each["lr"] = 1  # no float
    moments = read(state)
    assert moments.hyperparameters["lr"] == 1
    np.testing.assert_array_equal(moments.first["up.bias"], np.zeros(6))
    assert {array.dtype.name for array in moments.first.values()} == {dtype}


@pytest.mark.parametrize("fields", ["step", "group"])
def test_forms_of_older_and_capturable_optimizers(fields: str):
    state = saved("adamw")
    expected = read(saved("adamw"))
    if fields == "step":  # a number, before 1.12
        for each in state["state"].values():
            each["step"] = 3
    else:
        named = {"lr": np.array(1e-3), "capturable": True, "fused": True, "param_names": NAMES}
        state["param_groups"][0] |= named
    converted = read(state)
    assert converted.counts == expected.counts
    assert converted.hyperparameters == expected.hyperparameters


def test_the_order_of_parameters_is_that_of_the_state_dict():
    state = [*NAMES[:3], "emb.weight", "pe", *NAMES[3:]]
    assert torch_optimizer.parameter_names(state, TABLE, {"pe"}) == NAMES
    state[2], state[3] = state[3], state[2]
    expected = [*NAMES[:2], "emb.weight", *NAMES[3:]]
    assert torch_optimizer.parameter_names(state, TABLE, {"pe"}) == expected


def change(**settings: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["param_groups"][0].update(settings)


def without(*settings: str) -> Callable[[dict[str, Any]], Any]:
    return lambda state: [state["param_groups"][0].pop(name) for name in settings]


def at(name: str, **entries: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: state["state"].setdefault(NAMES.index(name), {}).update(entries)


def divided(state: dict[str, Any]) -> None:
    """Into two groups, of which the second has no base of a schedule."""
    (group,) = state["param_groups"]
    second = {name: value for name, value in group.items() if name != "initial_lr"}
    parts = ((group, slice(7)), (second, slice(7, None)))
    state["param_groups"] = [each | {"params": group["params"][of]} for each, of in parts]


OF_ADAMW = {
    "amsgrad": (change(amsgrad=True), ["amsgrad=True", "maximum"]),
    "amsgrad's state": (at("up.bias", max_exp_avg_sq=np.zeros(6)), ["up.bias", "max_exp_avg_sq"]),
    "maximize": (change(maximize=True), ["maximize=True", "made smaller"]),
    "no epsilon": (without("eps"), ["no setting 'eps'"]),
    "NAdam": (change(momentum_decay=0.004), ["NAdam"]),
    "RAdam": (without("amsgrad"), ["RAdam"]),
    "Adamax": (without("amsgrad", "decoupled_weight_decay"), ["Adamax"]),
    "a new setting": (change(cautious=True), ["unknown setting 'cautious'"]),
    "which Adam": (without("decoupled_weight_decay"), ["Adam or AdamW"]),
    "a rate that is none": (change(lr="fast"), ["lr='fast'"]),
    "betas that are none": (change(betas=0.9), ["betas=0.9"]),
    "one beta": (change(betas=[0.9]), ["betas=[0.9]"]),
    "a state too many": (at("unused.bias", exp_avg=np.zeros(D)), ["unused.bias has a state"]),
    "a state of nothing": (lambda state: state["state"].update({99: {}}), ["99"]),
    "half a count": (at("up.bias", step=np.array(2.5, np.float32)), ["up.bias", "2.5"]),
    "NaN as a count": (at("up.bias", step=np.array(np.nan, np.float32)), ["up.bias", "nan"]),
    "no array": (at("up.bias", exp_avg="much"), ["up.bias", "exp_avg is a str"]),
    "a parameter twice": (change(params=[*range(len(NAMES)), 0]), ["16 parameters"]),
    "one for another": (change(params=[0, *range(len(NAMES) - 1)]), ["14 of them different"]),
    "no base of one group": (divided, ["param_groups[1] has initial_lr=None", "[0] 0.002"]),
    "a parameter too few": (change(params=[*range(len(NAMES) - 1)]), ["14 parameters"]),
    "another order": (change(param_names=NAMES[::-1]), ["another order", "up.bias where norm.w"]),
    "no state_dict": (lambda state: state.pop("param_groups"), ["param_groups"]),
    "no states": (lambda state: state.update(state=[]), ["'state', a dict"]),
    "no dicts": (lambda state: state["state"].update({0: 1}), ["parameter 0"]),
    "no numbers": (change(params=["a", "b"]), ["numbers"]),
}
REFUSED = {name: ("adamw", *row) for name, row in OF_ADAMW.items()} | {
    "RMSprop": (
        "sgd",
        lambda state: (without("dampening", "nesterov")(state), change(centered=False)(state)),
        ["RMSprop"],
    ),
    "unknown": ("sgd", without("momentum"), ["unknown kind"]),
    "dampening": ("sgd", change(dampening=0.1), ["dampening=0.1", "has none"]),
    "no Nesterov": ("sgd", without("nesterov"), ["no setting 'nesterov'"]),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_state_without_an_exact_counterpart_is_refused_in_one_line(name: str):
    kind, spoil, words = REFUSED[name]
    state = copy.deepcopy(saved(kind))
    spoil(state)
    with pytest.raises(InputError) as refusal:
        read(state)
    assert "\n" not in str(refusal.value), refusal.value
    assert not [word for word in words if word not in str(refusal.value)], refusal.value


def test_all_problems_of_an_optimizer_state_are_one_error():
    state = saved("adamw")
    state["state"].pop(NAMES.index("up.bias"))
    state["state"][NAMES.index("norm.bias")]["exp_avg"] = np.zeros(9)
    with pytest.raises(InputError, match=r"2 problems.*up\.bias has no state.*norm\.bias: exp_avg"):
        read(state)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["up.bais"], ["unknown parameter up.bais", "mean 'up.bias'?", "up.bias is trained here"]),
        (["emb.weight"], ["emb.weight is there more than once"]),
        ([], ["15 parameters", "the model 14"]),
    ],
)
def test_names_that_do_not_fit_are_refused(names: list[str], words: list[str]):
    with pytest.raises(InputError) as refusal:
        read(saved("adamw"), [*NAMES[:-1], *names])
    assert not [word for word in words if word not in str(refusal.value)], refusal.value


def test_a_packed_tensor_has_one_count_and_one_decay():
    moments = read(saved("adamw"))
    moments.counts["self_attention.key.kernel"] = 9
    moments.weight_decay["self_attention.query.bias"] = 0.5
    message = r"in_proj_weight would have 2 counts: 3, 9.*in_proj_bias would have 2 weight decays: "
    with pytest.raises(InputError, match=message + r"0\.1, 0\.5"):
        written(moments)


def params() -> dict[str, jax.Array]:
    return {name: jnp.ones(shape) for name, shape in SHAPES.items()}


MATRICES = {name: len(shape) > 1 for name, shape in SHAPES.items()}
CHAINS = {
    "adamw": lambda: optax.chain(
        optax.identity(), optax.adamw(optax.constant_schedule(1.0), mask=MATRICES)
    ),
    "adam": lambda: optax.chain(
        optax.add_decayed_weights(0.1), optax.adam(lambda count: 1.0 / (count + 1))
    ),
    "sgd": lambda: optax.sgd(optax.constant_schedule(0.1), momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", list(CHAINS))
def test_optax_chains_round_trip(kind: str):
    moments = read(saved(kind))
    state = opt_state.into_optax(CHAINS[kind]().init(params()), moments, 7)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    counts = {int(leaf) for path, leaf in leaves if "count" in jax.tree_util.keystr(path)}
    assert counts == ({7} if kind == "sgd" else {3, 7})
    again = opt_state.from_optax(state, kind, moments.hyperparameters, moments.weight_decay)
    assert_same(written(again), saved(kind))


@pytest.mark.parametrize("kind", list(CHAINS))
def test_a_fresh_optax_state_has_no_moments(kind: str):
    fresh = CHAINS[kind]().init(params())
    moments = opt_state.from_optax(fresh, kind, GROUPS[kind], dict.fromkeys(ALL_SHAPES, 0.0))
    assert not moments.first and not moments.second and not any(moments.counts.values())
    assert written(moments)["state"] == {}
    assert read(saved(kind) | {"state": {}}).counts == moments.counts


def test_moments_are_those_of_all_arrays_and_copies():
    fresh = optax.scale_by_adam().init(params())
    for change in (lambda arrays: arrays.pop("up.bias"), lambda arrays: arrays.update({"x": 1})):
        for part in ("first", "second"):
            moments = read(saved("adamw"))
            change(getattr(moments, part))
            with pytest.raises(
                InputError, match=r"other arrays than the model trains: (up\.bias|x)"
            ):
                opt_state.into_optax(fresh, moments, 0)
    state = opt_state.into_optax(fresh, read(saved("adamw")), 0)
    again = opt_state.from_optax(state, "adamw", {}, {})
    assert all(x.flags.writeable for x in (*again.first.values(), *again.second.values()))
    twice = optax.chain(optax.scale_by_adam(), optax.scale_by_adam()).init(params())
    with pytest.raises(ConfigError, match="this Optax state is not adamw's"):
        opt_state.into_optax(twice, read(saved("adamw")), 0)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_may_be_an_array_of_one_number(shape):
    state = saved("adamw")
    change(lr=np.full(shape, 0.5))(state)
    assert read(state).hyperparameters["lr"] == 0.5


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_position_is_that_of_one_schedule(count):
    schedules = [optax.scale_by_schedule(lambda i: 1.0)] * count
    state = optax.chain(optax.identity(), *schedules).init(params())
    with pytest.raises(ConfigError, match=f"{count} schedules") if count != 1 else nullcontext():
        assert opt_state.position(state) == 0


def test_momentum_needs_an_optimizer_that_has_it():
    state, moments = optax.sgd(0.1).init(params()), read(saved("sgd"))
    with pytest.raises(ConfigError, match="not sgd's"):
        opt_state.into_optax(state, moments, 0)
    opt_state.into_optax(state, read(saved("sgd") | {"state": {}}), 0)
    assert opt_state.from_optax(state, "sgd", {"momentum": 0.0}, {}).first == {}
    for kind, settings in (("sgd", {"momentum": 0.9}), ("adamw", {})):
        with pytest.raises(ConfigError, match=f"not {kind}'s: no moments"):
            opt_state.from_optax(state, kind, settings, {})


def test_another_optax_state_is_refused():
    moments = read(saved("adamw"))
    with pytest.raises(ConfigError, match="not adamw's: it holds TraceState"):
        opt_state.into_optax(optax.trace(0.9).init(params()), moments, 0)
    with pytest.raises(ConfigError, match="is not sgd's"):
        opt_state.from_optax(optax.adam(1.0).init(params()), "sgd", {}, {})
    lion = optax.chain(optax.scale_by_adam(), optax.scale_by_lion()).init(params())
    with pytest.raises(ConfigError, match="is not adamw's"):
        opt_state.from_optax(lion, "adamw", {}, {})


def test_counts_that_differ_and_other_dtypes_are_refused():
    fresh = optax.scale_by_adam().init(params())
    state = saved("adamw")
    state["state"][NAMES.index("up.bias")]["step"] = np.array(5, np.float32)
    with pytest.raises(InputError, match=r"different numbers of updates \(.* 3, up\.bias 5\)"):
        opt_state.into_optax(fresh, read(state), 0)
    narrow = read(saved("adamw", dtype="float32"))
    with pytest.raises(InputError, match=r"are float32 .* the parameter is float64"):
        opt_state.into_optax(fresh, narrow, 0)
