"""Comparisons of models that people bring: convolutions, recurrent cells, a vision transformer,
state spaces, layers under scan. Each is compared right, without rules, and with three faults."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

import jax_transformer as jt
from jax_transformer.errors import ConfigError
from jax_transformer.parity import Report

NORM = {"epsilon": 1e-5, "use_fast_variance": False}


def compare(ours: Any, theirs: nn.Module, *arguments: Any, **options: Any) -> Report:
    """Return the report, with promotion of dtypes and ranks allowed, which Flax's layers need."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jt.parity.compare(ours, theirs, *arguments, **options)


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with random parameters and statistics: zero biases and unit scales hide faults."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
    for name, buffer in module.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.data = torch.rand(buffer.shape, generator=generator) + 0.5
    return module.eval()


def arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}


def fill(layer: nnx.Module, state: dict[str, np.ndarray], name: str) -> None:
    """Give a Flax layer the weights of the PyTorch layer of that name."""
    weight = state[f"{name}.weight"]
    if isinstance(layer, nnx.Conv | nnx.Linear):
        layer.kernel[...] = jnp.asarray(weight.transpose(*range(2, weight.ndim), 1, 0))
    else:
        layer.scale[...] = jnp.asarray(weight)
    if f"{name}.bias" in state:
        layer.bias[...] = jnp.asarray(state[f"{name}.bias"])
    if isinstance(layer, nnx.BatchNorm):
        layer.mean[...] = jnp.asarray(state[f"{name}.running_mean"])
        layer.var[...] = jnp.asarray(state[f"{name}.running_var"])


class Example(NamedTuple):
    """A PyTorch model, its port, and what compares them."""

    theirs: Callable[[], nn.Module]
    port: Callable[[dict[str, np.ndarray]], nnx.Module]
    batch: tuple[int, ...]
    pairs: set[tuple[str, str]]
    """Some pairs of modules that must be found without rules: Flax, PyTorch."""
    faults: dict[str, Callable[[Any], None]]
    """Changes of the port, by the module that must be named, or the one after the change."""
    call: Callable[[Any, Any], Any] | None = None
    layout: str = ""
    """The report's line on outputs of other shapes or other orders of axes."""


def negated(parameter: nnx.Variable) -> None:
    parameter[...] = -parameter[...]


# A convolutional network with batch norm, channels last here and first in PyTorch


class TorchConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, groups=3)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.relu(self.conv2(x)).mean((2, 3)))


class Conv(nnx.Module):
    def __init__(self, state):
        rngs = nnx.Rngs(0)
        self.conv1 = nnx.Conv(3, 6, (3, 3), strides=2, padding=1, rngs=rngs)
        self.bn1 = nnx.BatchNorm(6, use_running_average=True, epsilon=1e-5, rngs=rngs)
        self.conv2 = nnx.Conv(6, 6, (3, 3), padding=1, feature_group_count=3, rngs=rngs)
        self.fc = nnx.Linear(6, 5, rngs=rngs)
        for name in ("conv1", "bn1", "conv2", "fc"):
            fill(getattr(self, name), state, name)

    def __call__(self, x):
        x = jax.nn.relu(self.bn1(self.conv1(x)))
        return self.fc(jax.nn.relu(self.conv2(x)).mean((1, 2)))


def flip_window(model: Conv) -> None:
    model.conv2.kernel[...] = model.conv2.kernel[...][::-1]


def channels_last(model: Any, x: jax.Array) -> jax.Array:
    return model(x.transpose(0, 2, 3, 1))


CONV = Example(
    TorchConv,
    Conv,
    (2, 3, 7, 9),
    {("conv1", "conv1"), ("bn1", "bn1"), ("conv2", "conv2"), ("fc", "fc")},
    {
        "conv2": flip_window,
        "bn1": lambda model: negated(model.bn1.mean),
        "conv1": lambda model: negated(model.conv1.bias),
    },
    channels_last,
    "outputs with axes in the order (0, 3, 1, 2) there: conv1, bn1, conv2",
)


# A recurrent layer: PyTorch's is one module, Flax's calls a cell in a scan over time


class TorchGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.input = nn.Linear(4, 5)
        self.rnn = nn.GRU(5, 6, batch_first=True)
        self.output = nn.Linear(6, 3)

    def forward(self, x):
        return self.output(self.rnn(self.input(x))[0])


class GRU(nnx.Module):
    def __init__(self, state):
        rngs = nnx.Rngs(0)
        self.input, self.output = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        self.rnn = nnx.RNN(GRUCell(state, rngs))
        fill(self.input, state, "input")
        fill(self.output, state, "output")

    def __call__(self, x):
        return self.output(self.rnn(self.input(x)))


class GRUCell(nnx.RNNCellBase):
    """PyTorch's cell, which has a bias of the new gate inside the reset."""

    def __init__(self, state, rngs):
        self.inputs, self.hidden = (nnx.Linear(width, 18, rngs=rngs) for width in (5, 6))
        for layer, name in ((self.inputs, "ih"), (self.hidden, "hh")):
            layer.kernel[...] = jnp.asarray(state[f"rnn.weight_{name}_l0"].T)
            layer.bias[...] = jnp.asarray(state[f"rnn.bias_{name}_l0"])

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros((*input_shape[:-1], 6), self.hidden.kernel.dtype)

    @property
    def num_feature_axes(self):
        return 1

    def __call__(self, carry, x):
        (a, b, c), (d, e, f) = (jnp.split(y, 3, -1) for y in (self.inputs(x), self.hidden(carry)))
        reset, update = jax.nn.sigmoid(a + d), jax.nn.sigmoid(b + e)
        carry = (1 - update) * jnp.tanh(c + reset * f) + update * carry
        return carry, carry


RECURRENT = Example(
    TorchGRU,
    GRU,
    (2, 7, 4),
    {("input", "input"), ("rnn", "rnn"), ("output", "output")},
    {
        "rnn": lambda model: negated(model.rnn.cell.hidden.bias),
        "input": lambda model: negated(model.input.bias),
        "output": lambda model: negated(model.output.kernel),
    },
)


# A vision transformer, its blocks under nnx.scan and nnx.remat


class TorchBlock(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class TorchViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, 4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 6, 8))
        self.blocks = nn.ModuleList([TorchBlock() for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Block(nnx.Module):
    def __init__(self, state, prefix, rngs, d=8):
        self.norm1, self.norm2 = (nnx.LayerNorm(d, **NORM, rngs=rngs) for _ in range(2))
        self.qkv, self.proj = nnx.Linear(d, 3 * d, rngs=rngs), nnx.Linear(d, d, rngs=rngs)
        self.fc1, self.fc2 = nnx.Linear(d, 2 * d, rngs=rngs), nnx.Linear(2 * d, d, rngs=rngs)
        for name in ("norm1", "norm2", "qkv", "proj", "fc1", "fc2"):
            fill(getattr(self, name), state, f"{prefix}.{name}")

    def __call__(self, x):
        b, n, d = x.shape
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(b, n, 3, 2, d // 2), 2, 0)
        # jax.nn.dot_product_attention has a softmax in float32 whatever the inputs are
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / (d // 2) ** 0.5
        mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)
        x = x + self.proj(mixed.reshape(b, n, d))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    def __init__(self, state):
        rngs = nnx.Rngs(0)
        self.patch_embed = nnx.Conv(3, 8, (4, 4), strides=4, rngs=rngs)
        self.pos_embed = nnx.Param(jnp.asarray(state["pos_embed"]))
        blocks = [Block(state, f"blocks.{i}", rngs) for i in range(3)]
        graphdef, *_ = nnx.split(blocks[0])
        states = [nnx.state(block) for block in blocks]
        self.blocks = nnx.merge(graphdef, jax.tree.map(lambda *x: jnp.stack(x), *states))
        self.norm = nnx.LayerNorm(8, **NORM, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)
        for name in ("patch_embed", "norm", "head"):
            fill(getattr(self, name), state, name)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def layers(block, x):
            return block(x)

        x = self.patch_embed(x)
        x = layers(self.blocks, x.reshape(len(x), -1, 8) + self.pos_embed[...])
        return self.head(self.norm(x).mean(1))


def wrong_second_layer(model: ViT) -> None:
    kernel = model.blocks.proj.kernel
    kernel[...] = kernel[...].at[1].set(kernel[...][1].T)


def shifted_scale(model: ViT) -> None:
    scale = model.blocks.norm2.scale
    scale[...] = jnp.roll(scale[...], 1, 0)


VIT = Example(
    TorchViT,
    ViT,
    (2, 3, 8, 12),
    {("patch_embed", "patch_embed"), ("head", "head")}
    | {(f"blocks.{i}{part}", f"blocks.{i}{part}") for i in range(3) for part in ("", ".qkv")},
    {
        "blocks.1.proj": wrong_second_layer,
        "blocks.0.norm2": shifted_scale,
        "patch_embed": lambda model: negated(model.patch_embed.bias),
    },
    channels_last,
)


# A selective state space as in Mamba: a scan over time inside a block


class TorchStateSpace(nn.Module):
    def __init__(self, d=6, n=4):
        super().__init__()
        self.in_proj, self.dt_proj = nn.Linear(d, d), nn.Linear(d, d)
        self.b_proj, self.c_proj = nn.Linear(d, n), nn.Linear(d, n)
        self.a_log = nn.Parameter(torch.zeros(d, n))
        self.out_proj = nn.Linear(d, d)

    def forward(self, x):
        x = nn.functional.silu(self.in_proj(x))
        dt = nn.functional.softplus(self.dt_proj(x))
        b, c, a = self.b_proj(x), self.c_proj(x), -torch.exp(self.a_log)
        state, out = x.new_zeros(len(x), *a.shape), []
        for t in range(x.shape[1]):
            step = dt[:, t, :, None]
            state = torch.exp(step * a) * state + step * b[:, t, None] * x[:, t, :, None]
            out.append((state * c[:, t, None]).sum(-1))
        return self.out_proj(torch.stack(out, 1))


class StateSpace(nnx.Module):
    def __init__(self, state, d=6, n=4):
        rngs = nnx.Rngs(0)
        self.in_proj, self.dt_proj = (nnx.Linear(d, d, rngs=rngs) for _ in range(2))
        self.b_proj, self.c_proj = (nnx.Linear(d, n, rngs=rngs) for _ in range(2))
        self.a_log = nnx.Param(jnp.asarray(state["a_log"]))
        self.out_proj = nnx.Linear(d, d, rngs=rngs)
        for name in ("in_proj", "dt_proj", "b_proj", "c_proj", "out_proj"):
            fill(getattr(self, name), state, name)

    def __call__(self, x):
        x = jax.nn.silu(self.in_proj(x))
        dt = jax.nn.softplus(self.dt_proj(x))
        b, c, a = self.b_proj(x), self.c_proj(x), -jnp.exp(self.a_log[...])

        def step(state, inputs):
            dt, b, c, x = inputs
            state = jnp.exp(dt[..., None] * a) * state + dt[..., None] * b[:, None] * x[..., None]
            return state, (state * c[:, None]).sum(-1)

        first = jnp.zeros((len(x), *a.shape), x.dtype)
        _, y = jax.lax.scan(step, first, [jnp.moveaxis(each, 1, 0) for each in (dt, b, c, x)])
        return self.out_proj(jnp.moveaxis(y, 0, 1))


def swap_projections(model: StateSpace) -> None:
    kernels = model.b_proj.kernel[...], model.c_proj.kernel[...]
    model.c_proj.kernel[...], model.b_proj.kernel[...] = kernels


STATE_SPACE = Example(
    TorchStateSpace,
    StateSpace,
    (2, 5, 6),
    {(f"{name}_proj", f"{name}_proj") for name in ("in", "dt", "b", "c", "out")},
    {
        "out_proj": lambda model: negated(model.a_log),
        "b_proj": swap_projections,
        "dt_proj": lambda model: negated(model.dt_proj.bias),
    },
)


# Siblings of one shape that are called in another order; heads on an axis of their own; a dropout
# that PyTorch's model calls twice


class TorchGated(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(d, 9), nn.Linear(d, 9), nn.Linear(9, d)
        self.dropout = nn.Dropout()

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.dropout(self.o(mixed.transpose(1, 2).flatten(2)))
        return self.dropout(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


class Gated(nnx.Module):
    def __init__(self, state, d=8):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v = (nnx.LinearGeneral(d, (2, d // 2), rngs=rngs) for _ in range(3))
        self.o, self.down = nnx.Linear(d, d, rngs=rngs), nnx.Linear(9, d, rngs=rngs)
        self.gate, self.up = (nnx.Linear(d, 9, rngs=rngs) for _ in range(2))
        self.dropout = nnx.Dropout(0.5, deterministic=True)
        for name in ("o", "gate", "up", "down"):
            fill(getattr(self, name), state, name)
        for name in "qkv":
            layer = getattr(self, name)
            layer.kernel[...] = jnp.asarray(state[f"{name}.weight"].T.reshape(d, 2, -1))
            layer.bias[...] = jnp.asarray(state[f"{name}.bias"].reshape(2, -1))

    def __call__(self, x):
        v, k, q = self.v(x), self.k(x), self.q(x)
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)
        x = x + self.o(mixed.reshape(x.shape))
        up, gate = self.up(x), self.gate(x)
        return self.dropout(self.down(jax.nn.silu(gate) * up))


SIBLINGS = Example(
    TorchGated,
    Gated,
    (2, 5, 8),
    {(name, name) for name in ("q", "k", "v", "o", "gate", "up", "down", "dropout")},
    {"v": lambda model: negated(model.v.bias), "gate": lambda model: negated(model.gate.kernel)},
    layout="outputs of shape (2, 5, 2, 4), there (2, 5, 8): v, k, q",
)


EXAMPLES = {"convolutions": CONV, "gru": RECURRENT, "vit": VIT, "state space": STATE_SPACE}
EXAMPLES |= {"siblings": SIBLINGS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_port_agrees_without_rules_and_each_fault_names_its_module(name):
    example = EXAMPLES[name]
    theirs = randomized(example.theirs())
    batch = np.random.default_rng(0).standard_normal(example.batch)
    report = compare(example.port(arrays(theirs)), theirs, batch, call_flax=example.call)
    report.check()
    assert example.pairs <= {(entry.ours, entry.theirs) for entry in report.entries}
    assert any("guessed" in note for note in report.notes)
    assert not example.layout or example.layout in [*report.lines()]
    for module, change in example.faults.items():
        model = example.port(arrays(theirs))
        change(model)
        report = compare(model, theirs, batch, call_flax=example.call, gradients=False)
        if report.first_fault is not None:
            assert report.first_fault.ours == module
            assert name != "siblings" or report.own_result[0].agrees
        else:  # between two modules
            assert f"the input of {module} is the first that differs" in report.summary()


def test_a_fault_between_modules_and_one_in_a_module_are_both_named():
    theirs = randomized(STATE_SPACE.theirs())
    model = STATE_SPACE.port(arrays(theirs))
    for module in ("out_proj", "dt_proj"):
        STATE_SPACE.faults[module](model)
    batch = np.random.default_rng(0).standard_normal(STATE_SPACE.batch)
    report = compare(model, theirs, batch, gradients=False)
    assert [entry.ours for entry in report.faults] == ["dt_proj"]
    assert report.own_result[1] == "out_proj" and not report.own_result[0].agrees
    data = report.to_data()
    assert data["own_result"]["place"] == "out_proj" and not data["own_result"]["agrees"]
    own = {module["ours"]: module["own"] for module in data["modules"]}
    assert own["in_proj"]["agrees"] and not own["dt_proj"]["agrees"]
    lines = " ".join([*report.lines()])
    assert "2 parts differ by themselves:" in lines
    assert "outside of paired modules: on the other model's arrays the input of out_proj" in lines
    assert report.summary().startswith("dt_proj | dt_proj: its input agrees")
    assert "; so does code outside of them; " in report.summary()


class TorchComplex(nn.Module):
    """A filter in the frequency domain, with complex weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.complex64)
        self.spectrum, self.magnitude = Call(torch.fft.fft), Call(torch.abs)

    def forward(self, x):
        return self.magnitude(self.linear(self.spectrum(x)))


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def filtered(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The same as a plain function; ``tap`` names its points."""
    x = jt.parity.tap("spectrum", jnp.fft.fft(x))
    x = jt.parity.tap("linear", x @ parameters["kernel"] + parameters["bias"])
    return jt.parity.tap("magnitude", jnp.abs(x))


def test_complex_arrays_of_a_plain_function_agree_and_a_conjugate_is_named():
    theirs = TorchComplex()
    state = arrays(theirs)
    parameters = {"kernel": state["linear.weight"].T, "bias": state["linear.bias"]}
    batch = np.random.default_rng(0).standard_normal((2, 3, 6))
    compare((filtered, parameters), theirs, batch).check()
    parameters["kernel"] = parameters["kernel"].conj()
    report = compare((filtered, parameters), theirs, batch, gradients=False)
    assert report.first_fault.title == "linear | linear"


class Tenth(nn.Module):
    """A linear layer, and a constant that is rounded to float32."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("tenth", torch.tensor(0.1), persistent=False)

    def forward(self, x):
        return torch.sin(self.linear(x) * self.tenth)


def test_a_function_is_compared_where_its_arrays_are_used():
    theirs = Tenth()
    state = arrays(theirs)
    parameters = {"kernel": state["linear.weight"].T, "bias": state["linear.bias"]}
    batch = np.random.default_rng(0).standard_normal((2, 3, 4))

    def ours(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sin((x @ parameters["kernel"] + parameters["bias"]) * 0.1)

    report = compare((ours, parameters), theirs, batch)
    assert report.agrees, report.summary()
    assert "outputs of 1 of 1 modules" in report.summary()
    assert report.notes[-1].startswith("a constant of the model is rounded to float32 in one of")
    wrong = compare((lambda *each: ours(*each) + 1e-4, parameters), theirs, batch)
    assert "the results differ, by 0.0001" in wrong.summary()
    wrong = compare((ours, parameters | {"bias": parameters["bias"] * 1.01}), theirs, batch)
    assert wrong.first_fault is not None and wrong.first_fault.theirs == "linear"


def test_a_function_that_uses_no_array_by_itself_is_compared_by_its_results():
    theirs = Tenth()
    state = arrays(theirs)
    kernel, bias = state["linear.weight"].T, state["linear.bias"]
    batch = np.random.default_rng(0).standard_normal((2, 3, 4))
    report = compare((lambda p, x: jnp.sin((x @ kernel + bias) * 0.1), {}), theirs, batch)
    assert report.agrees and "outputs of only 0 of 1 modules" in report.summary()
    wrong = compare((lambda p, x: jnp.sin((x @ kernel + bias) * 0.2), {}), theirs, batch)
    assert "the JAX model has no modules: only results are compared" in wrong.summary()


class TheirBlocks(nn.Module):
    """Layers of an attention without softmax, and a gated feed-forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        names = {"norm": nn.LayerNorm(8), "q_proj": nn.Linear(8, 8), "k_proj": nn.Linear(8, 8)}
        names |= {"v_proj": nn.Linear(8, 8, bias=False), "o_proj": nn.Linear(8, 8)}
        layers = [nn.ModuleDict(copy.deepcopy(names)) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            h = layer["norm"](x)
            q, k, v = (layer[f"{n}_proj"](h).unflatten(-1, (2, 4)).transpose(1, 2) for n in "qkv")
            x = x + layer["o_proj"]((q @ k.mT @ v).transpose(1, 2).flatten(2))
        return self.head(x)


def our_blocks(p: Any, ids: jax.Array) -> jax.Array:
    def layer(x, w):
        centred = x - x.mean(-1, keepdims=True)
        h = w["g"] * centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) + w["b"]
        q, k = (jnp.einsum("btd,dhe->bhte", h, w[n]) + w[f"b{n}"][:, None] for n in "qk")
        scores = jnp.einsum("bhqe,bhke->bhqk", q, k)
        mixed = jnp.einsum("bhqk,bhke->bhqe", scores, jnp.einsum("btd,dhe->bhte", h, w["v"]))
        return x + (jnp.einsum("bhte,hed->btd", mixed, w["o"]) + w["bo"]), None

    return jax.lax.scan(layer, p["embed"][ids], p["layers"])[0] @ p["head"]


def test_a_function_of_plain_arrays_is_proposed_and_its_first_fault_named():
    theirs, random = TheirBlocks().eval(), np.random.default_rng(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.from_numpy(random.normal(size=parameter.shape) / 2))
    shapes = {"g": (8,), "b": (8,), "q": (8, 2, 4), "k": (8, 2, 4), "v": (8, 2, 4)}
    shapes |= {"bq": (2, 4), "bk": (2, 4), "o": (2, 4, 8), "bo": (8,)}
    stacked = {name: np.zeros((3, *shape), np.float32) for name, shape in shapes.items()}
    zeros = {"embed": np.zeros((11, 8), np.float32), "head": np.zeros((8, 5), np.float32)}
    zeros |= {"layers": stacked}
    ids = random.integers(0, 11, (2, 6))
    with jax.numpy_rank_promotion("allow"):
        proposal = jt.weights.propose(theirs, (our_blocks, zeros), ids)
        assert proposal.proven, str(proposal)
        state = theirs.state_dict()
        p = jt.weights.from_torch(state, proposal.table, into=zeros)
        report = compare((our_blocks, p), theirs, ids)
        assert report.agrees, report.summary()
        assert "outputs of 17 of 17 modules" in report.summary(), report.summary()
        for name, module in (("v", "v_proj"), ("bk", "k_proj"), ("g", "norm")):
            wrong = {**p, "layers": {**p["layers"], name: np.array(p["layers"][name])}}
            wrong["layers"][name][1] *= 1.01
            report = compare((our_blocks, wrong), theirs, ids, gradients=False)
            fault = report.first_fault
            assert fault is not None and fault.theirs == f"layers.1.{module}", report.summary()


def layers(parameters: list[Any], x: jax.Array, reverse: bool = False) -> jax.Array:
    """Two linear layers in a scan: ``{}`` stands for its iteration."""
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *parameters)

    def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        return jt.parity.tap("{}", jnp.tanh(x @ weights["kernel"])), None

    return jax.lax.scan(layer, x, stacked, reverse=reverse)[0]


def test_a_tap_in_a_scan_names_the_iteration_and_does_nothing_elsewhere():
    pairs = [nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()) for _ in range(2)]
    theirs, rules = nn.Sequential(*pairs), {"0": "0", "1": "1"}
    parameters = [{"kernel": theirs[i][0].weight.detach().numpy().T} for i in range(2)]
    x = np.random.default_rng(0).standard_normal((2, 3))
    compare((layers, parameters), theirs, x, rules).check()
    reversed_ = {
        "call_flax": lambda function, parameters, x: function(parameters, x, reverse=True),
        "call_torch": lambda theirs, x: theirs[0](theirs[1](x)),
    }
    compare((layers, parameters), theirs, x, rules, **reversed_).check()
    parameters[1] = {"kernel": parameters[1]["kernel"].T}
    report = compare((layers, parameters), theirs, x, rules, gradients=False)
    assert report.first_fault.ours == "1"
    x = x.astype(np.float32)
    assert np.array_equal(jax.jit(layers)(parameters, x), layers(parameters, x))
    assert np.array_equal(jax.vmap(lambda x: jt.parity.tap("x", x), 1, 1)(x), x)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return x + linen.Dense(4, name="dense")(linen.LayerNorm(1e-5, name="norm")(x)), None


class LinenStack(linen.Module):
    axis: int

    @linen.compact
    def __call__(self, x):
        block = linen.remat(LinenBlock, prevent_cse=False)
        axes = {"params": self.axis}
        scan = linen.scan(block, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scan(name="layers")(x, None)[0]


class TorchStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([TorchLinenBlock() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class TorchLinenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x):
        return x + self.dense(self.norm(x))


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_under_scan_and_remat_of_linen_have_numbers(axis):
    theirs = randomized(TorchStack())
    state = arrays(theirs)

    def stacked(name: str) -> np.ndarray:
        return np.stack([state[f"layers.{i}.{name}"].T for i in range(3)], axis)

    norm = {"scale": stacked("norm.weight"), "bias": stacked("norm.bias")}
    dense = {"kernel": stacked("dense.weight"), "bias": stacked("dense.bias")}
    variables = {"layers": {"norm": norm, "dense": dense}}
    x = np.random.default_rng(0).standard_normal((2, 5, 4))
    report = compare((LinenStack(axis), {"params": variables}), theirs, x)
    report.check()
    assert all(report.coverage.parameters.values()), str(report.coverage)
    entries = {entry.ours: entry for entry in report.entries}
    assert entries["layers.2.dense"].parameters.keys() == {"kernel", "bias"}
    assert entries["layers.2.dense"].theirs == "layers.2.dense"
    variables["layers"]["dense"]["kernel"].swapaxes(0, axis)[1] *= -1
    report = compare((LinenStack(axis), {"params": variables}), theirs, x, gradients=False)
    assert report.first_fault.ours == "layers.1.dense"


class TrainedNorm(nnx.Module):
    def __init__(self, **options: Any):
        self.norm = nnx.BatchNorm(4, epsilon=1e-5, **options, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.norm(x)


def test_batch_norm_in_train_mode_uses_the_statistics_of_the_batch():
    theirs = nn.Sequential(nn.BatchNorm1d(4))
    x = np.random.default_rng(0).standard_normal((8, 4))
    compare(TrainedNorm(), theirs.train(), x).check()
    report = compare(TrainedNorm(use_running_average=True), theirs.train(), x, gradients=False)
    assert report.first_fault.ours == "norm"


def test_a_module_in_a_while_loop_is_refused():
    def until(model: TrainedNorm, x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() < 0, lambda x: model(x), x)

    model, x = TrainedNorm(use_running_average=True), np.ones((8, 4))
    with pytest.raises(ConfigError, match="inside while, whose body is not run a known number"):
        compare(model, nn.Sequential(nn.BatchNorm1d(4)), x, call_flax=until)
