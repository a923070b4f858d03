"""Weight tables of models that are not this project's: there and back bit for bit, and the same
outputs, for NNX, Linen and plain pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from jax_transformer import weights
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.weights import Alias, Rule, Stacked, Unused, any_model

LAYERS, WIDTH, HEADS = 3, 6, 2


@pytest.fixture(autouse=True)
def _promotion():
    """Flax's own layers promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class TorchLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attn(y, y, y, need_weights=False)[0]


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, (2, 3))
        self.bn = nn.BatchNorm2d(WIDTH)
        self.layers = nn.ModuleList([TorchLayer() for _ in range(LAYERS)])
        self.up = nn.ConvTranspose1d(WIDTH, 5, 3, stride=2)
        self.head = nn.Linear(5, 4, bias=False)
        self.tied = nn.Linear(5, 4, bias=False)
        self.tied.weight = self.head.weight

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x))).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        x = self.up(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x) + self.tied(x)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attn(self.norm(x))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, WIDTH, (2, 3), padding="VALID", rngs=rngs)
        self.bn = nnx.BatchNorm(WIDTH, use_running_average=True, epsilon=1e-5, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer, out_axes=0))(rngs)
        self.up = nnx.ConvTranspose(WIDTH, 5, 3, 2, padding="VALID", rngs=rngs)
        self.head = nnx.Linear(5, 4, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = jax.nn.relu(self.bn(self.conv(x.transpose(0, 2, 3, 1))))
        x = x.reshape(len(x), -1, WIDTH)
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.layers
        )
        x = self.up(x)
        return 2 * self.head(x)


HEAD = ("(part h e) d -> d h e", {"h": HEADS})
QKV = [f"layers.{{i}}.attn.{name}" for name in ("query", "key", "value")]
OUT = "layers.{i}.attn.out"
TABLE = [
    *weights.convolution("conv", "conv"),
    *weights.layer_norm("bn", "bn"),
    Rule("bn.running_mean", "bn.mean"),
    Rule("bn.running_var", "bn.var"),
    Unused("bn.num_batches_tracked"),
    Stacked("layers"),
    *weights.repeat(
        LAYERS,
        [
            *weights.layer_norm("layers.{i}.norm", "layers.{i}.norm"),
            Rule("layers.{i}.attn.in_proj_weight", [f"{name}.kernel" for name in QKV], *HEAD),
            Rule(
                "layers.{i}.attn.in_proj_bias",
                [f"{name}.bias" for name in QKV],
                "(part h e) -> h e",
                {"h": HEADS},
            ),
            Rule(
                "layers.{i}.attn.out_proj.weight", "layers.{i}.attn.out.kernel", "d (h e) -> h e d"
            ),
            Rule("layers.{i}.attn.out_proj.bias", "layers.{i}.attn.out.bias"),
        ],
    ),
    Rule("up.weight", "up.kernel", "i o x -> -x i o"),
    Rule("up.bias", "up.bias"),
    *weights.linear("head", "head", bias=False),
    Alias("tied.weight", "head.weight"),
]


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    return module.double().eval()


def numpy(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("abstract", [False, True])
def test_a_model_of_convolutions_stacked_layers_and_statistics_is_equal_and_comes_back(abstract):
    theirs = randomized(TorchModel())
    state = numpy(theirs)
    empty = nnx.eval_shape(lambda: Model(nnx.Rngs(0))) if abstract else Model(nnx.Rngs(0))
    if abstract:
        del empty.dropout
    ours = weights.from_torch(theirs.state_dict(), TABLE, into=empty)
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    expected = theirs(torch.from_numpy(x)).detach().numpy()
    # Flax's attention has a softmax in float32
    np.testing.assert_allclose(np.asarray(ours(jnp.asarray(x))), expected, rtol=2e-6)
    back = weights.to_torch(ours, TABLE, unused=state)
    assert back.keys() == state.keys()
    for name, array in back.items():
        assert array.tobytes() == state[name].tobytes() and array.dtype == state[name].dtype, name
    assert state.keys() - weights.to_torch(ours, TABLE).keys() == {"bn.num_batches_tracked"}


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.BatchNorm(use_running_average=True, epsilon=1e-5)(linen.Dense(4)(x))


def test_variables_of_linen_and_plain_pytrees():
    theirs = randomized(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    x = np.random.default_rng(0).standard_normal((3, 5))
    expected = theirs(torch.from_numpy(x)).detach().numpy()
    table = [
        *weights.linear("0", "Dense_0"),
        *weights.layer_norm("1", "BatchNorm_0"),
        Rule("1.running_mean", "batch_stats.BatchNorm_0.mean"),
        Rule("1.running_var", "batch_stats.BatchNorm_0.var"),
        Unused("1.num_batches_tracked"),
    ]
    model = LinenModel()
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = weights.from_torch(theirs.state_dict(), table, into=shapes)
    np.testing.assert_allclose(model.apply(variables, x), expected, rtol=1e-12)

    experts = {f"experts.{i}.w.weight": np.random.rand(2, 3) for i in range(4)}
    tree = {"moe": [{"w": np.zeros((3, 4, 2), np.float32)}, "relu"]}
    table = [
        Stacked("moe.0.w", axis=1),
        *weights.repeat(4, [Rule("experts.{i}.w.weight", "moe.0.w.{i}", "o i -> i o")]),
    ]
    filled = weights.from_torch(experts, table, into=tree)
    assert filled["moe"][1] == "relu" and filled["moe"][0]["w"].dtype == np.float64
    for i in range(4):
        expert = experts[f"experts.{i}.w.weight"]
        np.testing.assert_array_equal(filled["moe"][0]["w"][:, i], expert.T)
    back = weights.to_torch(filled, table)
    assert all((back[name] == experts[name]).all() for name in experts)
    narrow = weights.from_torch(experts, table, into=tree, dtype="float32")
    assert narrow["moe"][0]["w"].dtype == np.float32
    experts["experts.2.w.weight"] = np.float32(experts["experts.2.w.weight"])
    with pytest.raises(InputError, match=r"moe\.0\.w: its layers are float64 and float32"):
        weights.from_torch(experts, table, into=tree)


A, B = Rule("a", "x.a"), Rule("b", "x.b")
TREE = {"x": {"a": np.zeros((2, 3)), "b": np.zeros(2)}}


@pytest.mark.parametrize(
    ("table", "state", "kind", "message"),
    [
        ([A], "ab", ConfigError, r"arrays of the model without a rule: x\.b"),
        ([A, B, Rule("c", "x.c")], "abc", ConfigError, r"not arrays of the model: x\.c"),
        ([A, B], "a", InputError, "missing b"),
        ([A, B], "abc", InputError, "unexpected c"),
        ([A, B, Unused("c")], "ab", InputError, "missing c, which the table leaves unused"),
        (
            [Rule("a", "x.a", "o i -> i o"), B],
            "ab",
            InputError,
            r"mis-shaped a: .* \(2, 3\), .* \(3, 2\)",
        ),
        ([Rule("a", "x.a", "o -> o"), B], "ab", ConfigError, r"x\.a has the shape \(2, 3\)"),
        ([Stacked("y"), A, B], "ab", ConfigError, r"the model has no arrays of y"),
        ([Stacked("x", 1), A, B], "ab", ConfigError, r"x\.b has no axis 1 of layers"),
    ],
)
def test_what_does_not_fit_is_named(table, state, kind, message):
    shapes = {"a": (2, 3), "b": (2,), "c": ()}
    with pytest.raises(kind, match=message):
        weights.from_torch({name: np.zeros(shapes[name]) for name in state}, table, into=TREE)


def test_other_leaves_than_weights_stay_and_nothing_is_shared_or_narrowed():
    tree = {"a": np.zeros(2), "key": jax.random.key(7), "count": np.zeros(2, np.int32)}
    table = [Rule("a", "a"), Rule("n", "count"), Unused("u")]
    state = {"a": np.ones(2), "n": np.arange(2), "u": np.ones(1)}
    assert any_model.opened(tree)[0].keys() == {"a", "count"}
    filled = weights.from_torch(state, table, into=tree)
    assert filled["key"] is tree["key"] and filled["count"].dtype == np.int64
    unused = weights.to_torch(filled, table, unused=state)["u"]
    assert unused == 1 and not np.shares_memory(unused, state["u"])
    with jax.enable_x64(False), pytest.raises(InputError, match="count is int64 and JAX is in 32"):
        weights.from_torch(state, table, into=tree, dtype="float32")
    with pytest.raises(ConfigError, match="two arrays of the model have the same path"):
        any_model.opened({"params": {"a": np.ones(1)}, "a": np.ones(1)})


def test_stacks_within_stacks_and_the_axis_of_each():
    """Experts of layers: (experts, d, layers), as views of one array."""
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    layers = any_model.Parts(
        [
            Stacked("blocks", axis=-1),
            Stacked("blocks.{i}.experts.w"),
            *(Rule(f"{i}.{j}", f"blocks.{i}.experts.w.{j}") for i in range(4) for j in range(2)),
        ]
    ).layers({"blocks.experts.w": array})
    assert len(layers) == 8
    for i in range(4):
        for j in range(2):
            origin, layer = layers[f"blocks.{i}.experts.w.{j}"]
            assert origin == "blocks.experts.w" and np.shares_memory(layer, array)
            np.testing.assert_array_equal(layer, array[j, :, i])
