"""Proposed weight tables: right for models whose names say nothing, and marked where unproven."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import linen, nnx

from jax_transformer import weights
from jax_transformer.cli import main
from jax_transformer.errors import ConfigError
from jax_transformer.parity import compare
from jax_transformer.parity.proposal import Proposal
from jax_transformer.parity.search import propose
from jax_transformer.storage import safetensors
from jax_transformer.weights import Rule, Stacked, Unused
from jax_transformer.weights.layouts import rotary
from parity_tests import test_any_model

WIDTH, HEADS, LAYERS = 6, 2, 2


@pytest.fixture(autouse=True)
def _promotion():
    """Flax's own layers promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def attend(q, k, v, softmax, swap):
    """Attention of (b, t, h·e) with HEADS heads."""
    q, k, v = (swap(x.reshape(*x.shape[:2], HEADS, -1), 1, 2) for x in (q, k, v))
    y = softmax(q @ swap(k, -1, -2) / 3.0) @ v
    return swap(y, 1, 2).reshape(y.shape[0], y.shape[2], -1)


torch_attend = functools.partial(
    attend, softmax=lambda x: x.softmax(-1), swap=lambda x, a, b: x.transpose(a, b)
)
flax_attend = functools.partial(attend, softmax=jax.nn.softmax, swap=jnp.swapaxes)


class Mixing(torch.nn.Module):
    """An attention and a gated feed-forward, all of whose matrices are square."""

    def __init__(self, packed: bool):
        super().__init__()
        self.packed = packed
        self.a = torch.nn.Linear(WIDTH, 3 * WIDTH if packed else WIDTH)
        if not packed:
            self.b, self.c = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.d, self.e, self.f, self.g = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.h, self.i = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = self.h(x)
        if self.packed:  # head after head, in each its key, query and value
            z = self.a(y).reshape(*x.shape[:2], HEADS, 3, -1)
            k, q, v = (z[:, :, :, part].reshape(x.shape) for part in range(3))
        else:
            v, k, q = self.a(y), self.b(y), self.c(y)
        x = x + self.d(torch_attend(q, k, v))
        y = self.i(x)
        return x + self.e(torch.tanh(self.f(y)) * self.g(y))


class Theirs(torch.nn.Module):
    def __init__(self, packed: bool = False):
        super().__init__()
        self.one = torch.nn.Embedding(11, WIDTH)
        self.two = torch.nn.ModuleList([Mixing(packed) for _ in range(LAYERS)])
        self.three = torch.nn.Linear(WIDTH, 5)

    def forward(self, ids):
        x = self.one(ids)
        for part in self.two:
            x = part(x)
        return self.three(x)


class Ours(nnx.Module):
    """The same with other names, in another order, and with arrays of nnx.scan."""

    class Part(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            linear = functools.partial(nnx.Linear, WIDTH, WIDTH, rngs=rngs)
            self.r, self.s, self.t, self.u, self.v, self.w, self.x = (linear() for _ in range(7))
            norm = functools.partial(nnx.LayerNorm, WIDTH, epsilon=1e-5, rngs=rngs)
            self.y, self.z = norm(use_fast_variance=False), norm(use_fast_variance=False)

        def __call__(self, x):
            y = self.z(x)
            x = x + self.u(flax_attend(self.t(y), self.s(y), self.r(y)))
            y = self.y(x)
            return x + self.v(self.w(y) * jnp.tanh(self.x(y)))

    def __init__(self, rngs: nnx.Rngs):
        self.p = nnx.Embed(11, WIDTH, rngs=rngs)
        self.q = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Ours.Part))(rngs)
        self.r = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, ids):
        run = nnx.scan(lambda x, part: part(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.r(run(self.p(ids), self.q))


IDS = np.random.default_rng(0).integers(0, 11, (2, 7))


@pytest.mark.parametrize("packed", [False, True])
def test_names_that_say_nothing_and_square_matrices_are_settled_by_the_outputs(packed):
    torch.manual_seed(0)
    theirs = Theirs(packed).eval()
    proposal = propose(theirs, Ours(nnx.Rngs(0)), IDS)
    assert proposal.proven, str(proposal)
    ours = weights.from_torch(theirs.state_dict(), proposal.table, into=Ours(nnx.Rngs(1)))
    expected = theirs(torch.from_numpy(IDS)).detach().numpy()
    np.testing.assert_allclose(ours(jnp.asarray(IDS)), expected, atol=2e-6)


class Separate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        return self.o(torch_attend(self.q(x), self.k(x), self.v(x)))


class Joined(nnx.Module):
    """Key, query and value in one kernel."""

    def __init__(self, rngs: nnx.Rngs):
        self.kqv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.o = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        k, q, v = jnp.split(self.kqv(x), 3, axis=-1)
        return self.o(flax_attend(q, k, v))


@pytest.mark.parametrize("size", [1.0, 0.01])
def test_an_array_that_joins_tensors_is_parts_of_itself(size):
    """Also with small weights, whose attention is the same whatever is a query."""
    theirs, x = Separate(), np.random.default_rng(0).standard_normal((2, 5, WIDTH))
    for parameter in theirs.parameters():
        parameter.data *= size
    proposal = propose(theirs, Joined(nnx.Rngs(0)), x)
    key_bias = "k.bias"  # a bias of keys does not act on the result, and has no module of its own
    assert {line.entry.torch for line in proposal.entries[2:] if not line.proven} == {key_bias}
    assert proposal.converts and run(proposal.code()) == proposal.table
    assert proposal.table[:2] == [
        Stacked("kqv.bias", axis=0, parts=3),
        Stacked("kqv.kernel", axis=1, parts=3),
    ]
    ours = weights.from_torch(theirs.state_dict(), proposal.table, into=Joined(nnx.Rngs(1)))
    expected = theirs(torch.from_numpy(x).float()).detach().numpy()
    np.testing.assert_allclose(ours(jnp.asarray(x, jnp.float32)), expected, atol=2e-6)


class TheirImage(torch.nn.Module):
    """Patches by a convolution, and a classifier of all channels' pixels."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm = torch.nn.Conv2d(3, 4, 2, stride=2), torch.nn.GroupNorm(2, 4)
        self.fc = torch.nn.Linear(4 * 6, 5)

    def forward(self, x):
        return self.fc(torch.tanh(self.norm(self.patch(x))).flatten(1))


class OurImage(nnx.Module):
    """Patches by a linear layer, and a classifier of all pixels' channels."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Linear(12, 4, rngs=rngs), nnx.Linear(24, 5, rngs=rngs)
        self.norm = nnx.GroupNorm(4, num_groups=2, epsilon=1e-5, rngs=rngs)

    def __call__(self, x, wrong=False):
        x = x.reshape(2, 3, 2, 2, 3, 2).transpose(0, 2, 4, 3, 5, 1).reshape(2, 6, 12)
        y = jnp.tanh(self.norm(self.embed(x))).reshape(2, -1)
        return self.head(jnp.exp(y) if wrong else y)


def test_patches_and_a_flattened_image_have_their_own_order():
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6))
    proposal = propose(TheirImage(), OurImage(nnx.Rngs(0)), x)
    assert proposal.proven and not proposal.first_difference, str(proposal)
    axes = {line.entry.torch: line.entry.axes for line in proposal.entries}
    assert axes["patch.weight"] == "d h e f -> (e f h) d"
    assert axes["fc.weight"] == "o (h e) -> (e h) o"


def test_where_outputs_differ_the_first_module_is_named_and_the_right_ones_are_said():
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 6))
    ours, call = OurImage(nnx.Rngs(0)), {"call_flax": lambda model, x: model(x, wrong=True)}
    proposal = propose(TheirImage(), ours, x, **call)
    assert proposal.first_difference == proposal.to_data()["first_difference"] == "head"
    assert "of the largest, first that of head;" in proposal.summary()
    reasons = {line.entry.torch: line.reason for line in proposal.entries}
    assert reasons["patch.weight"].endswith("the outputs differ, but not that of embed")
    assert reasons["fc.weight"].endswith("the outputs differ")


class TheirBlocks(torch.nn.Sequential):
    def __init__(self):
        def block() -> list[torch.nn.Module]:
            norm = torch.nn.BatchNorm2d(4)
            norm.running_mean.normal_()
            return [torch.nn.Conv2d(4, 4, 3, padding=1, bias=False), norm, torch.nn.Tanh()]

        super().__init__(*block(), *block())


class OurBlocks(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = x.transpose(0, 2, 3, 1)
        for _ in range(2):
            x = linen.Conv(4, (3, 3), padding=1, use_bias=False)(x)
            x = jnp.tanh(linen.BatchNorm(use_running_average=True, epsilon=1e-5)(x))
        return x.transpose(0, 3, 1, 2)


def test_linen_s_statistics_belong_to_their_norm():
    x = np.random.default_rng(0).standard_normal((2, 4, 4, 4))
    variables = OurBlocks().init(jax.random.key(0), x)
    proposal = propose(TheirBlocks().eval(), (OurBlocks(), variables), x)
    assert proposal.proven, str(proposal)
    rules = [each for each in proposal.table if isinstance(each, Rule)]
    names = {rule.torch: rule.flax for rule in rules}
    assert names["1.weight"] == ("BatchNorm_0.scale",)
    assert names["4.running_var"] == ("batch_stats.BatchNorm_1.var",)


class TheirExperts(torch.nn.Module):
    """Two experts in one tensor of gates and values, before a product that has no float64."""

    def __init__(self):
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(3, 8, 6))
        self.q, self.k, self.v = (torch.nn.Linear(6, n, bias=False) for n in (6, 3, 3))

    def forward(self, x):
        gate, up = (x @ self.gate_up[1:].sum(0).T + x @ self.gate_up[0].T * 2).chunk(2, -1)
        y = torch.cat([(torch.tanh(gate) * up), self.k(x) * self.v(x)], -1)
        y = torch.nn.functional.pad(torch.cat([y, self.q(x)], -1), (0, 3))
        return torch._grouped_mm(y.reshape(1, -1, 16), torch.eye(16)[None].to(y))


class OurExperts(nnx.Module):
    """The same in two arrays; keys and values are one kernel, of the size of another tensor."""

    def __init__(self, rngs: nnx.Rngs):
        self.w_up, self.w_gate = (nnx.Param(jnp.zeros((3, 6, 4))) for _ in range(2))
        self.q, self.kv = (nnx.Linear(6, 6, use_bias=False, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        gate, up = (x @ w[1:].sum(0) + x @ w[0] * 2 for w in (self.w_gate[...], self.w_up[...]))
        k, v = jnp.split(self.kv(x), 2, -1)
        y = jnp.concatenate([jnp.tanh(gate) * up, k * v, self.q(x)], -1)
        return jnp.pad(y, ((0, 0), (0, 0), (0, 3))).reshape(1, -1, 16)


def test_arrays_of_one_module_joined_arrays_and_products_without_float64():
    x = np.random.default_rng(0).standard_normal((2, 4, 6))
    proposal = propose(TheirExperts(), OurExperts(nnx.Rngs(0)), x)
    assert proposal.proven, str(proposal)
    assert Stacked("kv.kernel", axis=1, parts=2) in proposal.table
    (rule,) = (each for each in proposal.table[1:] if each.torch == "gate_up")
    assert rule.flax == ("w_gate", "w_up") and rule.axes == "o (part i) x -> o x i"


class TheirMixture(torch.nn.Module):
    """Layers of two experts each."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x):
        for one, two in self.layers:
            x = one(x) - two(x) ** 2
        return x


def test_experts_of_layers_are_arrays_in_arrays():
    def layer(x, p):
        y = jnp.einsum("btd,edf->ebtf", x, p["kernel"]) + p["bias"][:, None, None]
        return y[0] - y[1] ** 2, None

    layers = {"kernel": jnp.zeros((2, 2, 4, 4)), "bias": jnp.zeros((2, 2, 4))}
    ours = (lambda p, x: jax.lax.scan(layer, x, p["layers"])[0]), {"layers": layers}
    proposal = propose(TheirMixture(), ours, np.random.default_rng(0).standard_normal((2, 3, 4)))
    assert proposal.proven, str(proposal)
    stacks = [each.flax for each in proposal.table if isinstance(each, Stacked)]
    assert stacks == ["layers", "layers.{i}.bias", "layers.{i}.kernel"]


class Recurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        def cell(inputs: int) -> nnx.RNN:
            return nnx.RNN(nnx.LSTMCell(inputs, 4, rngs=rngs))

        self.layers = nnx.List([nnx.Bidirectional(cell(n), cell(n)) for n in (3, 8)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_an_rnn_of_two_layers_and_directions_has_biases_without_an_array():
    theirs = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    x = np.random.default_rng(0).standard_normal((2, 3, 3))
    call = {"call_torch": lambda module, x: module(x)[0]}
    proposal = propose(theirs, Recurrent(nnx.Rngs(0)), x, **call)
    lines = {line.entry.torch: line for line in proposal.entries}
    second = {name for name, line in lines.items() if not line.proven}
    assert second == {name for name in lines if name.startswith("bias_ih")}, str(proposal)
    assert proposal.off_by < 1e-5 and not proposal.converts and not proposal.missing
    assert lines["bias_ih_l1"].reason == (
        "no array for its shape (16,); the rest is compared with zeros in it"
    )
    assert lines["weight_hh_l1_reverse"].entry.flax == tuple(
        f"layers.1.backward_rnn.cell.h{gate}.kernel" for gate in "ifgo"
    )


class TheirTies(torch.nn.Module):
    """One matrix under three names."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Embedding(11, WIDTH), torch.nn.Embedding(11, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.two.weight = self.head.weight = self.one.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.one(ids) + 2 * self.two(ids.flip(1))))


class OurCopies(nnx.Module):
    """Three arrays that hold that matrix."""

    def __init__(self, rngs: nnx.Rngs):
        self.one, self.two = nnx.Embed(11, WIDTH, rngs=rngs), nnx.Embed(11, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 11, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        return self.head(jnp.tanh(self.one(ids) + 2 * self.two(ids[:, ::-1])))


def test_the_gradient_of_a_tied_tensor_is_that_of_all_its_copies():
    proposal = propose(TheirTies(), OurCopies(nnx.Rngs(0)), IDS)
    assert proposal.proven and len(proposal.entries) == 3, str(proposal)


class TheirNorms(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(4), torch.nn.LayerNorm(4)

    def forward(self, x):
        return self.first(torch.tanh(self.second(x)))


class OurNorms(nnx.Module):
    def __init__(self):
        norm = functools.partial(nnx.LayerNorm, 4, epsilon=1e-5, use_fast_variance=False)
        self.first, self.second = norm(rngs=nnx.Rngs(0)), norm(rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def test_names_that_mislead_are_corrected_also_where_weights_are_zeros_and_ones():
    x = np.random.default_rng(0).standard_normal((3, 4))
    proposal = propose(TheirNorms(), OurNorms(), x)
    assert proposal.proven, str(proposal)
    table = {rule.torch: rule.flax for rule in proposal.table}
    assert table["first.weight"] == ("second.scale",) and table["second.bias"] == ("first.bias",)


def test_a_proposal_is_the_table_that_was_written_by_hand():
    """Convolutions, statistics, stacked layers, packed heads, ties, and a count of batches."""
    theirs = test_any_model.randomized(test_any_model.TorchModel()).float()
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    proposal = propose(theirs, test_any_model.Model(nnx.Rngs(0)), x)
    assert proposal.proven, str(proposal)
    empty = nnx.eval_shape(lambda: test_any_model.Model(nnx.Rngs(0)))
    del empty.dropout
    expected, ours = (
        nnx.state(weights.from_torch(theirs.state_dict(), table, into=empty))
        for table in (test_any_model.TABLE, run(proposal.code()))
    )
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


def run(code: str) -> list:
    """The table of a file."""
    names: dict = {}
    exec(code, names)
    return names["table"]


def test_the_code_of_a_table_is_the_table():
    sized = Rule("a.2.x", "b.1.x", sizes={"h": 2})
    table = [*test_any_model.TABLE, Rule('a"b.\\0.c', "a.0.b"), sized]
    table += [Stacked("qkv.kernel", axis=-1, parts=3), *(Rule(f"b.{i}", f"c.{i}") for i in (0, 2))]
    code = weights.code(table, {"conv.bias": "a note", "layers.1.norm.bias": "of one layer"})
    names = {name: getattr(weights, name) for name in weights.__all__}
    exec(code, names)
    assert sorted(map(repr, names["table"])) == sorted(map(repr, table))
    assert '    # a note\n    Rule("conv.bias"' in code and "# of one layer\n" in code
    assert code.count("repeat(") == 1 and "layers.0" not in code
    for outer, inner, repeats in ((3, 2, 1), (2, 3, 2)):  # {i} is that of more layers
        table = [Rule(f"a.{i}.b.{j}", f"c.{i}.{j}") for i in range(outer) for j in range(inner)]
        exec(code := weights.code(table), names)
        assert sorted(map(repr, names["table"])) == sorted(map(repr, table))
        assert code.count("repeat(") == repeats


class TwoLayers(nnx.Module):
    def __init__(self, activation):
        self.up, self.down = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))
        self.activation = activation

    def __call__(self, x):
        return self.down(self.activation(self.up(x)))


def two_layers(activation) -> Proposal:
    theirs = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    return propose(theirs, TwoLayers(activation), np.random.default_rng(0).standard_normal((5, 4)))


def test_a_port_that_is_a_little_off_gets_its_table_and_the_difference_is_said():
    proposal = two_layers(lambda x: jnp.tanh(x) * (1 + 1e-4))
    assert proposal.proven and 1e-6 < proposal.off_by < 1e-3, str(proposal)


def test_nothing_is_proven_of_another_function():
    proposal = two_layers(lambda x: 2 * jnp.sin(3 * x))
    assert not proposal.converts and proposal.off_by > 1e-2
    assert len(proposal.entries) == 4 and not any(line.proven for line in proposal.entries)
    assert "# unproven: " in proposal.code()
    first = proposal.entries[0]
    assert sorted((first.entry.axes, *first.candidates)) == ["o i -> i o", "the same axes"]


class Inner(nnx.Module):
    def __init__(self):
        self.scale = nnx.Param(jnp.ones((4,)))
        self.inert = nnx.Param(jnp.ones((5,)))
        self.shift, self.stopped = nnx.Param(jnp.ones((4,))), nnx.Param(jnp.ones((4,)))

    def __call__(self, x):
        return x * self.scale + jax.lax.stop_gradient(self.shift + self.stopped**3)


class TheirInner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.inert = torch.nn.Parameter(torch.zeros(5))
        self.register_buffer("shift", torch.zeros(4))
        self.stopped = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.scale + self.shift + self.stopped**3


class Partly(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        self.inner = Inner()
        self.more = nnx.Param(jnp.ones((7,)))

    def __call__(self, x):
        return self.inner(self.first(x))


class TheirPart(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.inner = TheirInner()
        self.unused = torch.nn.Parameter(torch.zeros(6))
        self.register_buffer("count", torch.tensor(3))
        self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x):
        return self.inner(self.first(x))


def test_what_acts_on_nothing_or_has_no_counterpart_is_marked():
    x = np.random.default_rng(0).standard_normal((2, 3))
    proposal = propose(TheirPart(), Partly(), x)
    by_name = {getattr(line.entry, "torch", ""): line for line in proposal.entries}
    assert {name: line.proven for name, line in by_name.items()} == {
        "first.weight": True,
        "first.bias": True,
        "inner.scale": True,
        "inner.inert": False,
        "inner.shift": True,
        "inner.stopped": False,
        "unused": False,
        "count": True,
        "frozen": True,
    }
    assert "does not act on the result" in by_name["inner.inert"].reason
    assert by_name["inner.shift"].reason.endswith("by a result")  # it has no gradient
    assert by_name["inner.stopped"].reason.endswith("the gradients differ")
    assert proposal.missing == ["more"] and not proposal.round_trip and not proposal.converts
    assert "no tensor for more" in str(proposal) and "# no tensor for more" in proposal.code()
    data = proposal.to_data()
    proven = [line.proven for line in proposal.entries]
    assert data["missing"] == ["more"] and [each["proven"] for each in data["entries"]] == proven
    frozen = propose(TheirPart().requires_grad_(False), Partly(), x)
    unused = [line for line in frozen.entries if isinstance(line.entry, Unused)]
    assert [(line.entry.torch, line.proven) for line in unused] == [
        ("unused", False),
        ("frozen", False),
        ("count", True),
    ]


class OneWay(nnx.Module):
    """An output of another shape."""

    def __call__(self, x):
        return x[:1]


def test_models_that_cannot_be_compared_are_one_line():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(ConfigError, match=r"returns shape \(1, 3\) and the PyTorch model \(2, 3\)"):
        propose(torch.nn.Identity(), OneWay(), x)
    with pytest.raises(ConfigError, match=r"returns shape \(3, 2\) and the PyTorch model \(2, 3\)"):
        propose(torch.nn.Identity(), (lambda p, x: x.T, {}), x)
    with pytest.raises(ConfigError, match="no tensor of the PyTorch module has the size"):
        propose(torch.nn.Identity(), (lambda p, x: x, {}), x)


FILE = """
import numpy as np
import torch
from flax import nnx

BATCH = np.ones((2, 3), np.float32)


def theirs():
    return torch.nn.Linear(3, 3)


def ours():
    return nnx.Linear(3, 3, rngs=nnx.Rngs(0))


def other():
    return nnx.Linear(3, 3, use_bias=False, rngs=nnx.Rngs(0))


def broken():
    raise RuntimeError("no weights")


def text():
    return "a model"


def wide():
    return torch.nn.Linear(4, 3)


def kind():
    return torch.nn.Linear


def empty():
    return nnx.eval_shape(ours)


def call_flax(model, x):
    return 2 * model(x)


def call_torch(module, x):
    return 2 * module(x)
"""


def test_the_command_prints_the_table_as_code(tmp_path, capfd):
    path, batch = tmp_path / "models.py", tmp_path / "batch.safetensors"
    path.write_text(FILE, encoding="utf-8")
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    safetensors.write(batch, {"0": x}, {})
    models = ["propose", f"{path}:theirs", f"{path}:ours", "--batch", str(batch)]
    assert main(models) == 0
    code, lines = capfd.readouterr()
    assert run(code) == [Rule("weight", "kernel", "o i -> i o"), Rule("bias", "bias")]
    assert "2 of 2 rules proven" in lines
    assert main([*models, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["proven"] is True
    for arguments, code, text in (
        (
            [f"{path}:theirs", f"{path}:other", "--batch", str(batch)],
            1,
            ", 1 tensor without an array;",
        ),
        ([f"{path}:theirs", f"{path}:ours"], 2, "no batch: define batch()"),
        ([f"{path}:theirs", f"{path}:our"], 2, "has no 'our' (did you mean 'ours'?)"),
        ([f"{path}:theirs", f"{path}:BATCH"], 2, "is a ndarray, not a function"),
        ([f"{path}:broken", f"{path}:ours"], 2, "models.py:broken: RuntimeError: no weights"),
        (
            [f"{path}:text", f"{path}:ours", "--batch", str(batch)],
            2,
            "returns a str, not a PyTorch module",
        ),
        (
            [f"{path}:wide", f"{path}:ours", "--batch", str(batch)],
            2,
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        (
            [f"{path}:kind", f"{path}:ours", "--batch", str(batch)],
            2,
            "the PyTorch model is the class Linear: pass an instance of torch.nn.Module",
        ),
        (
            [f"{path}:theirs", f"{path}:empty", "--batch", str(batch)],
            2,
            "bias of the JAX model has a shape and no numbers",
        ),
        ([f"{path}:theirs", "models"], 2, "give my_file.py:NAME or package.module:NAME"),
    ):
        assert main(["propose", *arguments]) == code
        assert text in capfd.readouterr().err
    other = tmp_path / "with_batch.py"
    function = "def batch():\n    return [np.eye(3, dtype=np.float32)]\n"
    other.write_text(f"{FILE}\n\n{function}", encoding="utf-8")
    assert main(["propose", f"{other}:theirs", f"{other}:ours"]) == 0


def rotary_attention(q, k, v, paired, constant, einsum, softmax):
    """Attention of (b, t, h, e), with positions that turn pairs of neighbouring features, or of
    those that are half a head apart."""
    size, length = q.shape[-1], q.shape[1]
    a, b = np.arange(size).reshape(-1, 2).T if paired else np.arange(size).reshape(2, -1)
    angles = np.outer(np.arange(length), 0.5 ** np.arange(size // 2))[:, None]
    cos, sin, turn = (np.zeros((n, 1, size)) for n in (length, length, size))
    cos[..., a] = cos[..., b] = np.cos(angles)
    sin[..., a] = sin[..., b] = np.sin(angles)
    turn[b, 0, a], turn[a, 0, b] = -1, 1
    cos, sin, turn = (constant(x, q) for x in (cos, sin, turn[:, 0]))
    q, k = (x * cos + x @ turn * sin for x in (q, k))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, size)
    attended = softmax(einsum("bqhge,bkhe->bhgqk", q, k))
    return einsum("bhgqk,bkhe->bqhge", attended, v).reshape(*q.shape[:2], -1)


class TheirRotary(torch.nn.Module):
    """Four heads of queries for two of keys; the queries' and keys' heads may have a norm."""

    def __init__(self, paired: bool, norms: bool):
        super().__init__()
        self.paired = paired
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(24, n) for n in (24, 12, 12))
        norm = functools.partial(torch.nn.RMSNorm, 6, eps=1e-6) if norms else torch.nn.Identity
        self.q_norm, self.k_norm = norm(), norm()
        self.o_proj = torch.nn.Linear(24, 5)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 6)) for p in (self.q_proj, self.k_proj, self.v_proj))
        heads = self.q_norm(q), self.k_norm(k), v
        own = {"constant": lambda c, x: torch.from_numpy(c).to(x), "einsum": torch.einsum}
        own["softmax"] = lambda x: x.softmax(-1)
        return self.o_proj(rotary_attention(*heads, self.paired, **own))


class OurRotary(nnx.Module):
    """The same with the other order of features."""

    def __init__(self, rngs: nnx.Rngs, paired: bool, norms: bool, divided: bool):
        self.paired = paired
        linear = functools.partial(nnx.LinearGeneral if divided else nnx.Linear, 24, rngs=rngs)
        outputs = [(n, 6) if divided else 6 * n for n in (4, 2, 2)]
        self.query, self.key, self.value = map(linear, outputs)
        norm = (
            functools.partial(nnx.RMSNorm, 6, epsilon=1e-6, rngs=rngs) if norms else nnx.Sequential
        )
        self.q_norm, self.k_norm = norm(), norm()
        self.out = nnx.Linear(24, 5, rngs=rngs)

    def __call__(self, x):
        projections = self.query, self.key, self.value
        q, k, v = (p(x).reshape(*x.shape[:2], -1, 6) for p in projections)
        heads = self.q_norm(q), self.k_norm(k), v
        own = {"constant": lambda c, x: jnp.asarray(c, x.dtype), "einsum": jnp.einsum}
        return self.out(rotary_attention(*heads, self.paired, softmax=jax.nn.softmax, **own))


@pytest.mark.parametrize(
    ("paired", "norms", "divided"), [(True, False, False), (False, True, True)]
)
def test_features_of_rotary_positions_may_have_another_order(paired, norms, divided):
    theirs = TheirRotary(not paired, norms).eval()
    ours = OurRotary(nnx.Rngs(0), paired, norms, divided)
    batch = np.random.default_rng(0).normal(size=(2, 7, 24)).astype(np.float32)
    proposal = propose(theirs, ours, batch)
    assert proposal.proven, str(proposal)
    assert str(proposal).count("features of rotary positions") == 4 + 2 * norms
    ours = weights.from_torch(theirs.state_dict(), proposal.table, into=ours)
    expected = theirs(torch.from_numpy(batch)).detach().numpy()
    np.testing.assert_allclose(ours(jnp.asarray(batch)), expected, atol=2e-6)
    report = compare(ours, theirs, batch)
    assert report.agrees, report.summary()
    assert f"gradients of {8 + 2 * norms} of {8 + 2 * norms} parameters" in report.summary()
    named = {entry.ours for entry in report.entries if "order of features" in entry.layout}
    assert named == {"query", "key", "q_norm", "k_norm"}
    assert all(entry.input is not None for entry in report.entries)
    ours.query.bias[...] += 1e-3
    wrong = compare(ours, theirs, batch)
    assert [entry.ours for entry in wrong.faults] == ["query"], wrong.summary()
    ours.query.bias[...] -= 1e-3
    ours.key.bias[...] = jnp.roll(ours.key.bias[...], 1, -1)
    ours.key.kernel[...] = jnp.roll(ours.key.kernel[...], 1, -1)
    wrong = compare(ours, theirs, batch, gradients=False)
    assert "key" in [entry.ours for entry in wrong.faults], wrong.summary()


class TheirJoined(torch.nn.Module):
    """Each of four heads has its query, key and value together, or those of all follow."""

    def __init__(self, by_head: bool):
        super().__init__()
        self.by_head = by_head
        self.query_key_value, self.dense = torch.nn.Linear(12, 36), torch.nn.Linear(12, 5)

    def forward(self, x):
        sizes, axis = ((4, 3, 3), 3) if self.by_head else ((3, 4, 3), 2)
        q, k, v = self.query_key_value(x).unflatten(-1, sizes).unbind(axis)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k).softmax(-1)
        return self.dense(torch.einsum("bhqk,bkhe->bqhe", scores, v).flatten(2))


class OurJoined(nnx.Module):
    """The same in the other order, of one axis or of several."""

    def __init__(self, rngs: nnx.Rngs, by_head: bool, divided: bool = False):
        self.by_head = by_head
        self.qkv = nnx.LinearGeneral(12, (3, 4, 3) if divided else 36, rngs=rngs)
        self.out = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, x):
        sizes, axis = ((4, 3, 3), 3) if self.by_head else ((3, 4, 3), 2)
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(*x.shape[:2], *sizes), axis, 0)
        scores = jax.nn.softmax(jnp.einsum("bqhe,bkhe->bhqk", q, k))
        return self.out(jnp.einsum("bhqk,bkhe->bqhe", scores, v).reshape(x.shape))


@pytest.mark.parametrize(("by_head", "divided"), [(False, False), (True, False), (False, True)])
def test_joined_queries_keys_and_values_may_be_by_head_on_one_side(by_head, divided):
    theirs, ours = TheirJoined(not by_head).eval(), OurJoined(nnx.Rngs(0), by_head, divided)
    batch = np.random.default_rng(0).normal(size=(2, 7, 12)).astype(np.float32)
    proposal = propose(theirs, ours, batch)
    assert proposal.proven, str(proposal)
    assert str(proposal).count("heads of joined tensors") == (0 if divided else 2)
    ours = weights.from_torch(theirs.state_dict(), proposal.table, into=ours)
    report = compare(ours, theirs, batch)
    assert report.agrees, report.summary()
    assert [e.ours for e in report.entries if "order of features" in e.layout] == ["qkv"]


def test_a_joined_kernel_with_its_inputs_first_has_no_order_of_heads():
    theirs = torch.nn.Sequential(transformers.pytorch_utils.Conv1D(36, 12))
    parameters = {"attn": {"kernel": jnp.zeros((12, 36)), "bias": jnp.zeros(36)}}

    def double(arrays, x):
        return 2 * (x @ arrays["attn"]["kernel"] + arrays["attn"]["bias"])

    proposal = propose(theirs, (double, parameters), np.eye(12, dtype=np.float32))
    assert 0.9 < proposal.off_by < 1.1 and "train mode" in proposal.summary()
    assert "train mode" not in propose(theirs.eval(), (double, parameters), np.eye(12)).summary()


class TheirPooler(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pooler = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x):
        hidden = self.body(x)
        return hidden, self.pooler(hidden[:, 0]).tanh()


class OurPooler(nnx.Module):
    """Its second result is of a kernel that is not transposed."""

    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Linear(6, 6, rngs=rngs)
        self.matrix = nnx.Param(jax.random.normal(rngs.params(), (6, 6)))
        self.shift = nnx.Param(jnp.zeros(6))

    def __call__(self, x):
        hidden = self.body(x)
        return hidden, jnp.tanh(hidden[:, 0] @ self.matrix[...].T + self.shift[...])


def test_rules_of_a_second_result_are_searched_and_proven():
    ours, batch = OurPooler(nnx.Rngs(0)), np.random.default_rng(0).normal(size=(2, 5, 6))
    proposal = propose(TheirPooler().eval(), ours, batch.astype(np.float32))
    assert proposal.proven, str(proposal)
    assert str(proposal).count("by a result") == 2
    assert Rule("pooler.weight", "matrix") in proposal.table
    wrong = propose(
        TheirPooler().eval(), ours, batch, call_flax=lambda model, x: (model(x)[0], 2 * model(x)[1])
    )
    assert not wrong.proven and wrong.off_by > 0.1


class TheirLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = torch.nn.ModuleList(), torch.nn.LayerNorm(6)
        for _ in range(2):
            parts = {"norm": torch.nn.LayerNorm(6), "up": torch.nn.Linear(6, 8, bias=False)}
            parts |= {"down": torch.nn.Linear(8, 6, bias=False)}
            self.layers.append(torch.nn.ModuleDict(parts))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down"](layer["up"](layer["norm"](x)).relu())
        return self.norm(x)


def test_a_scan_over_plain_arrays_is_proven_by_the_result():
    """No module is seen, so the first table must be nearly right."""

    def norm(x, scale, shift):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + shift

    def run(arrays, x):
        def layer(x, w):
            return x + jax.nn.relu(norm(x, w["n1"], w["b1"]) @ w["w1"]) @ w["w2"], None

        x, _ = jax.lax.scan(layer, x, arrays["layers"])
        return norm(x, arrays["norm"], arrays["shift"])

    shapes = {"norm": (6,), "shift": (6,)}
    shapes |= {"layers": {"n1": (2, 6), "b1": (2, 6), "w1": (2, 6, 8), "w2": (2, 8, 6)}}
    arrays = jax.tree.map(jnp.ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    batch = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    proposal = propose(TheirLayers().eval(), (run, arrays), batch)
    assert proposal.proven, str(proposal)


def test_a_kernel_that_was_permuted_by_mistake_is_named():
    """Read in the other order its output would agree, and the attention would not."""
    theirs, ours = TheirRotary(True, False).eval(), OurRotary(nnx.Rngs(0), True, False, False)
    for name, other in zip("qkvo", ("query", "key", "value", "out"), strict=True):
        linear, own = getattr(theirs, f"{name}_proj"), getattr(ours, other)
        own.kernel[...] = jnp.asarray(linear.weight.detach().numpy().T)
        own.bias[...] = jnp.asarray(linear.bias.detach().numpy())
    batch = np.random.default_rng(0).normal(size=(2, 7, 24)).astype(np.float32)
    assert compare(ours, theirs, batch).agrees
    order = rotary(12, 6)[0].indices(12)
    ours.key.kernel[...], ours.key.bias[...] = ours.key.kernel[:, order], ours.key.bias[order]
    report = compare(ours, theirs, batch)
    assert report.first_fault is not None and report.first_fault.ours == "key", report.summary()
