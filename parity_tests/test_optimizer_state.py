"""Real torch.optim states convert to Optax and back, and both continue alike."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import twins
from jax_transformer.config import TransformerConfig
from jax_transformer.convert.training_state import opt_state, torch_checkpoint, torch_optimizer
from jax_transformer.errors import InputError
from jax_transformer.weights import rules
from parity_tests.cases import DOCUMENTS, config_of
from parity_tests.marks import quick_if
from parity_tests.test_switching_frameworks import as_arrays, as_tensors
from parity_tests.unit.convert.test_optimizer_state import assert_same

NAMES = [*DOCUMENTS, "small", "part2_encoder square", "lesson10 square"]
NAMES += ["torch.nn norm_first", "torch.nn tied output"]
RATE, DECAY = 1e-2, 0.1


class Setting:
    """A twin with an optimizer, and the table from its parameters to the Flax model's arrays."""

    def __init__(self, config: TransformerConfig, make: Callable[[Any], torch.optim.Optimizer]):
        torch.manual_seed(0)
        self.config, self.module = config, twins.twin(config).double()
        self.random = np.random.default_rng(0)
        self.names = [name for name, _ in self.module.named_parameters()]
        params = transformer.flatten(transformer.abstract(config), nnx.Param)
        self.shapes = {name: leaf.shape for name, leaf in params.items()}
        self.table = jt.convert.weight_table(config)
        self.trained = rules.restrict(self.table, self.shapes)
        self.torch = make(self.module)

    def params(self) -> dict[str, jax.Array]:
        """Return a copy of the twin's weights under Flax's names."""
        state = as_arrays(dict(self.module.state_dict()))
        state = {rule.torch: state[rule.torch] for rule in self.trained}
        arrays = rules.to_flax(self.trained, state, self.shapes)
        return {name: jnp.array(array, copy=True) for name, array in arrays.items()}

    def gradients(self) -> dict[str, np.ndarray]:
        """Return random gradients by PyTorch's names, for trained parameters only."""
        shapes = rules.torch_shapes(self.trained, self.shapes)
        return {name: self.random.normal(size=shape) for name, shape in shapes.items()}

    def step_torch(self, gradients: dict[str, np.ndarray]) -> None:
        state = self.module.state_dict(keep_vars=True)
        for name, gradient in gradients.items():
            state[name].grad = torch.from_numpy(gradient.copy())
        self.torch.step()

    def moments(self) -> torch_optimizer.Moments:
        state = as_arrays(self.torch.state_dict())
        return torch_optimizer.from_torch(state, self.table, self.shapes, self.names)


def decayed_alone(module: Any) -> list[dict[str, Any]]:
    """Return the usual two groups: weight decay for matrices, none for biases and norms."""
    matrices = [p for p in module.parameters() if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": DECAY},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


def by(kind: Callable, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda module: kind(module.parameters(), **settings)


ADAM: dict[str, Any] = dict(lr=RATE, betas=(0.9, 0.98), weight_decay=DECAY)
TORCH = {
    "adamw": by(torch.optim.AdamW, **ADAM),
    "adam": by(torch.optim.Adam, **ADAM),
    "sgd": by(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=DECAY),
    "nesterov": by(torch.optim.SGD, lr=RATE, momentum=0.9, nesterov=True),
}
OPTAX: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(RATE, 0.9, 0.98, weight_decay=DECAY),
    "adam": lambda: optax.chain(optax.add_decayed_weights(DECAY), optax.adam(RATE, 0.9, 0.98)),
    "sgd": lambda: optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE, 0.9)),
    "nesterov": lambda: optax.sgd(RATE, 0.9, nesterov=True),
}


@pytest.fixture(autouse=True)
def as_optax_needs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def differing(setting: Setting, rule: optax.GradientTransformation) -> list[str]:
    """List what differs after two updates in PyTorch and two more in both frameworks."""
    for _ in range(2):
        setting.step_torch(setting.gradients())
    moments, params = setting.moments(), setting.params()
    state = opt_state.into_optax(rule.init(params), moments, 2)
    for _ in range(2):
        gradients = setting.gradients()
        setting.step_torch(gradients)
        ours = {
            name: jnp.asarray(array)
            for name, array in rules.to_flax(setting.trained, gradients, setting.shapes).items()
        }
        updates, state = rule.update(ours, state, params)
        params = optax.apply_updates(params, updates)
    mine = opt_state.from_optax(state, moments.kind, moments.hyperparameters, moments.weight_decay)
    theirs = setting.moments()
    return [
        *far("weight", params, setting.params(), atol=1e-14),
        *far("first moment", mine.first, theirs.first, rtol=1e-13, atol=1e-15),
        *far("second moment", mine.second, theirs.second, rtol=1e-13, atol=1e-15),
        *([] if mine.counts == theirs.counts else [f"counts {mine.counts}, not {theirs.counts}"]),
    ]


def far(
    kind: str, ours: dict[str, Any], theirs: dict[str, Any], *, atol: float, rtol: float = 0
) -> list[str]:
    """List the arrays that one side lacks, or that are not as close as these bounds."""
    return [
        f"{kind} {name}"
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours
        or name not in theirs
        or ours[name].shape != theirs[name].shape
        or not np.allclose(ours[name], theirs[name], rtol=rtol, atol=atol)
    ]


# Buffers, squares, unused blocks and tied weights; the others by `-m slow`: one table ports both
STATES = ("small", "lesson10", "lesson10 square", "deep_dive", "torch.nn tied output")


@pytest.mark.parametrize("name", [quick_if(name in STATES, name) for name in NAMES])
def test_adamw_of_every_architecture(name: str):
    """Unused blocks are in the optimizer, without state; buffers are not in it."""
    assert differing(Setting(config_of(name), TORCH["adamw"]), OPTAX["adamw"]()) == []


@pytest.mark.parametrize("kind", ["adam", "sgd", "nesterov"])
def test_the_other_optimizers(kind: str):
    assert differing(Setting(config_of("deep_dive"), TORCH[kind]), OPTAX[kind]()) == []


def test_weight_decay_groups():
    """Optax selects decayed arrays by a mask, and the converted state by its groups."""

    def grouped(module: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(decayed_alone(module), lr=RATE, betas=(0.9, 0.98))

    setting = Setting(config_of("small"), grouped)
    matrices, others = (
        [n for n, p in setting.module.named_parameters() if (p.dim() > 1) is decays]
        for decays in (True, False)
    )
    setting.names = [*matrices, *others]
    setting.step_torch(setting.gradients())
    decays = setting.moments().weight_decay
    mask = {name: decay > 0 for name, decay in decays.items() if name in setting.shapes}
    assert 0 < sum(mask.values()) < len(mask) and mask["encoder.blocks.0.feed_forward.up.kernel"]
    again = Setting(config_of("small"), grouped)
    again.names = setting.names
    decayed = optax.adamw(RATE, 0.9, 0.98, weight_decay=DECAY, mask=mask)
    assert differing(again, decayed) == []


@pytest.mark.parametrize("kind", list(TORCH))
@pytest.mark.parametrize("name", ["deep_dive", "small", "part2_encoder"])
def test_the_exported_state_is_an_ordinary_state_dict(name: str, kind: str):
    """Bit for bit, and the optimizer that loads it continues exactly."""
    setting = Setting(config_of(name), TORCH[kind])
    for _ in range(2):
        setting.step_torch(setting.gradients())
    before = as_arrays(setting.torch.state_dict())
    back = torch_optimizer.to_torch(setting.moments(), setting.table, setting.shapes, setting.names)
    assert_same({"state": back["state"]}, {"state": before["state"]})
    for ours, theirs in zip(back["param_groups"], before["param_groups"], strict=True):
        fast = ours.keys() & {"foreach", "fused", "capturable", "differentiable"}
        assert ours == theirs | {name: ours[name] for name in fast}
    other = Setting(config_of(name), TORCH[kind])
    other.module.load_state_dict(setting.module.state_dict())
    other.torch.load_state_dict(as_tensors(back))
    gradients = setting.gradients()
    setting.step_torch(gradients)
    other.step_torch(gradients)
    assert_same(as_arrays(other.module.state_dict()), as_arrays(dict(setting.module.state_dict())))


def test_the_order_of_parameters_is_that_of_the_module():
    """A tied parameter counts at its first name, a stored position table not at all."""
    for config in map(config_of, NAMES):
        module = twins.twin(config)
        names = torch_checkpoint.module_parameters(module.state_dict(), config)
        assert names == [name for name, _ in module.named_parameters()], config


OTHERS = "NAdam RAdam Adamax Adagrad RMSprop Rprop Adadelta ASGD Adafactor LBFGS".split()
OPTIONS = {
    "amsgrad": by(torch.optim.AdamW, amsgrad=True),
    "maximize": by(torch.optim.AdamW, maximize=True),
    "dampening": by(torch.optim.SGD, lr=RATE, momentum=0.9, dampening=0.1),
}


@pytest.mark.parametrize("name", [*OTHERS, *OPTIONS])
def test_other_optimizers_are_refused_by_name(name: str):
    make = OPTIONS[name] if name in OPTIONS else by(getattr(torch.optim, name))
    setting = Setting(config_of("small"), make)
    with pytest.raises(InputError, match=name):
        setting.moments()


def test_exchanged_moments_are_detected():
    """Negative control: exchanging first and second moments of one bias far exceeds the bound."""
    setting = Setting(config_of("small"), TORCH["adamw"])
    read = setting.moments

    def exchanged() -> torch_optimizer.Moments:
        state, name = read(), "encoder.blocks.0.feed_forward.up.bias"
        state.first[name], state.second[name] = state.second[name], abs(state.first[name])
        return state

    setting.moments = exchanged
    wrong = differing(setting, OPTAX["adamw"]())
    assert wrong == [
        f"{kind} encoder.blocks.0.feed_forward.up.bias"
        for kind in ("weight", "first moment", "second moment")
    ]
