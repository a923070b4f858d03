"""Checkpoints of T5X for the tests: written with TensorStore and flax.serialization as T5X's own
``Checkpointer`` calls them, and computed in NumPy as its networks are written.

Shares no code with the reader. Facts from ``t5x/checkpoints.py`` and from ``network.py`` and
``layers.py`` of ``examples/t5`` and ``examples/scalable_t5``.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore
from flax import serialization

Tree = dict[str, Any]
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """The fields of T5X's ``T5Config`` that differ between the tests."""

    vocab: int = 29
    emb: int = 12
    heads: int = 3
    head_dim: int = 5
    mlp: int = 14
    encoder: int = 2
    decoder: int = 3
    activations: tuple[str, ...] = ("relu",)
    via_embedding: bool = True
    scalable: bool = False
    """The network of ``scalable_t5``; otherwise that of ``t5``."""
    scan_axis: int | None = None
    vocabulary: str = "cc_all.32000.100extra"
    """The folder of the SentencePiece model; mT5's is ``mc4.250000.100extra``."""

    def gin(self) -> str:
        return (
            "# Parameters for seqio.SentencePieceVocabulary:\n"
            "seqio.SentencePieceVocabulary.sentencepiece_model_file = \\\n"
            f"    'gs://t5-data/vocabs/{self.vocabulary}/sentencepiece.model'\n"
            "# Parameters for network.T5Config:\n"
            "# ====================================\n"
            f"network.T5Config.mlp_activations = {self.activations!r}\n"
            f"network.T5Config.num_heads = {self.heads}\n"
        )


def params(sizes: Sizes, *, seed: int = 0, dtype: Any = np.float64) -> Arrays:
    """Return random weights under the names that T5X writes, without ``target.``."""
    draw = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return (draw.normal(size=shape) * 0.3).astype(dtype)

    arrays = {"token_embedder.embedding": random(sizes.vocab, sizes.emb)}
    for stack, count in (("encoder", sizes.encoder), ("decoder", sizes.decoder)):
        arrays[f"{stack}.{stack}_norm.scale"] = random(sizes.emb)
        if not sizes.scalable:
            arrays[f"{stack}.relpos_bias.rel_embedding"] = random(sizes.heads, 32)
        layers = [dict(_layer(stack, sizes, random)) for _ in range(count)]
        for name in layers[0]:
            each = [layer[name] for layer in layers]
            if sizes.scan_axis is None:
                arrays |= {f"{stack}.layers_{i}.{name}": array for i, array in enumerate(each)}
            else:
                arrays[f"{stack}.{stack}.{name}"] = np.stack(each, sizes.scan_axis)
    if not sizes.via_embedding:
        arrays["decoder.logits_dense.kernel"] = random(sizes.emb, sizes.vocab)
    return arrays


def _layer(stack: str, sizes: Sizes, random: Any) -> Iterator[tuple[str, np.ndarray]]:
    d, h, e, f = sizes.emb, sizes.heads, sizes.head_dim, sizes.mlp
    modules = {
        "encoder": {"attention": "pre_attention_layer_norm"},
        "decoder": {
            "self_attention": "pre_self_attention_layer_norm",
            "encoder_decoder_attention": "pre_cross_attention_layer_norm",
        },
    }[stack]
    for module, norm in modules.items():
        yield f"{norm}.scale", random(d)
        for name in ("query", "key", "value"):
            yield f"{module}.{name}.kernel", random(*((d, h, e) if sizes.scalable else (d, h * e)))
        yield f"{module}.out.kernel", random(*((h, e, d) if sizes.scalable else (h * e, d)))
    yield "pre_mlp_layer_norm.scale", random(d)
    gated = len(sizes.activations) > 1
    for name in ("wi_0", "wi_1") if gated else ("wi",):
        yield f"mlp.{name}.kernel", random(d, f)
    yield "mlp.wo.kernel", random(f, d)
    if sizes.scalable:
        yield "relpos_bias.rel_embedding", random(h, 32)


# As Checkpointer.save writes


def adafactor(weights: Arrays) -> Arrays:
    """Return the state that T5X's Adafactor has for some weights: factored for matrices."""
    state = {}
    for name, array in weights.items():
        one = np.zeros((1,), np.float32)
        moments = {"m": one, "v": one, "v_col": one, "v_row": one}
        if array.ndim == 2:
            rows, columns = array.shape
            moments["v_row"] = np.ones(rows, np.float32)
            moments["v_col"] = np.ones(columns, np.float32)
        else:
            moments["v"] = np.ones(array.shape, np.float32)
        state |= {f"{name}.{moment}": value for moment, value in moments.items()}
    return state


def write(
    folder: Path,
    weights: Arrays,
    *,
    state: Arrays | None = None,
    step: int = 7,
    metadata: Mapping[str, Any] | None = None,
    chunks: Any = None,
    kvstore: Mapping[str, Any] | None = None,
    version: int = 3,
) -> Path:
    """Write a checkpoint.

    Args:
        folder: the new folder.
        weights: arrays by name, for ``target``.
        state: arrays of the optimizer by name, for ``state/param_states``; small ones are inline.
        step: the step.
        metadata: entries of TensorStore's metadata instead of T5X's, such as the compressor.
        chunks: the shape of a chunk by the shape of an array.
        kvstore: entries of the store in the index, as of a checkpoint that was written to gcs.
        version: of the format.
    """
    folder.mkdir(parents=True)
    tree: Tree = {"target": {}, "state": {"step": np.asarray(step, np.int32)}}
    named = {f"target/{name.replace('.', '/')}": array for name, array in weights.items()}
    if state is not None:
        above = "state/param_states"
        named |= {f"{above}/{name.replace('.', '/')}": array for name, array in state.items()}
    writes = []
    for name, array in named.items():
        place = tree
        *above, last = name.split("/")
        for word in above:
            place = place.setdefault(word, {})
        if state is not None and array.size < 2:
            place[last] = array
            continue
        own = {"compressor": {"id": "gzip"}, "shape": list(array.shape)}
        own |= {"chunks": list(chunks(array.shape) if chunks else array.shape)}
        spec = {
            "driver": "zarr",
            "dtype": array.dtype.name,
            "kvstore": {"driver": "file", "path": name.replace("/", ".")},
            "metadata": own | dict(metadata or {}),
        }
        described = tensorstore.Spec(spec).to_json()
        writes.append(_write_array(folder, described, array))
        place[last] = described | {"kvstore": {**described["kvstore"], **(kvstore or {})}}
    asyncio.run(_all(writes))
    # As to_bytes does with a tree of tensorstore.Spec, whose state_dict T5X registers as its JSON
    # after its own tree_map, which sorts names
    tree = jax.tree.map(lambda leaf: leaf, tree)
    content = serialization.msgpack_serialize({"version": version, "optimizer": tree})
    (folder / "checkpoint").write_bytes(content)
    return folder


async def _all(writes: list[Any]) -> None:
    await asyncio.gather(*writes)


async def _write_array(folder: Path, spec: Tree, array: np.ndarray) -> None:
    store = {**spec["kvstore"], "path": str(folder / spec["kvstore"]["path"])}
    opened = await tensorstore.open({**spec, "kvstore": store}, create=True, open=True)
    await opened.write(array)


def read(folder: Path) -> Arrays:
    """Return the weights as flax and TensorStore read them."""
    index = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    weights: Arrays = {}

    def visit(tree: Tree, above: tuple[str, ...]) -> None:
        for key, value in tree.items():
            if "kvstore" in value:
                path = str(folder / value["kvstore"]["path"])
                spec = {**value, "kvstore": {"driver": "file", "path": path}}
                array = tensorstore.open(spec).result().read().result()
                weights[".".join((*above, key))] = np.asarray(array)
            else:
                visit(value, (*above, key))

    visit(index["optimizer"]["target"], ())
    return weights


# The networks


def logits(sizes: Sizes, weights: Arrays, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the logits (b, t, v) of T5X's network. Padding of the source is 0."""
    seen = (source > 0)[:, None, None, :]
    embedding = weights["token_embedder.embedding"]
    memory = _run("encoder", sizes, weights, embedding[source], seen, None)
    causal = np.tri(target.shape[1], dtype=bool)[None, None]
    y = _run("decoder", sizes, weights, embedding[target], causal, (memory, seen))
    if sizes.via_embedding:
        return y @ embedding.T / np.sqrt(y.shape[-1])
    return y @ weights["decoder.logits_dense.kernel"]


def _run(
    stack: str, sizes: Sizes, weights: Arrays, x: np.ndarray, mask: np.ndarray, memory: Any
) -> np.ndarray:
    for i in range(sizes.encoder if stack == "encoder" else sizes.decoder):

        def param(name: str, i: int = i) -> np.ndarray:
            if sizes.scan_axis is None:
                return weights[f"{stack}.layers_{i}.{name}"]
            return np.take(weights[f"{stack}.{stack}.{name}"], i, sizes.scan_axis)

        name = "relpos_bias.rel_embedding"
        table = param(name) if sizes.scalable else weights[f"{stack}.{name}"]
        bias = _distances(table, x.shape[1], bidirectional=stack == "encoder")
        prefix, module = ("", "attention") if memory is None else ("self_", "self_attention")
        y = _norm(x, param(f"pre_{prefix}attention_layer_norm.scale"))
        x = x + _attention(sizes, param, module, y, y, mask, bias)
        if memory is not None:
            y = _norm(x, param("pre_cross_attention_layer_norm.scale"))
            x = x + _attention(sizes, param, "encoder_decoder_attention", y, *memory, 0.0)
        x = x + _mlp(sizes, param, _norm(x, param("pre_mlp_layer_norm.scale")))
    return _norm(x, weights[f"{stack}.{stack}_norm.scale"])


def _norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _attention(
    sizes: Sizes, param: Any, module: str, x: np.ndarray, over: np.ndarray, mask: Any, bias: Any
) -> np.ndarray:
    shape = (sizes.emb, sizes.heads, sizes.head_dim)
    q, k, v = (
        np.einsum("bld,dhe->blhe", inputs, param(f"{module}.{name}.kernel").reshape(shape))
        for name, inputs in (("query", x), ("key", over), ("value", over))
    )
    scores = np.where(mask, np.einsum("bqhe,bkhe->bhqk", q, k) + bias, -1e10)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bhqk,bkhe->bqhe", weights / weights.sum(-1, keepdims=True), v)
    out = param(f"{module}.out.kernel").reshape(sizes.heads, sizes.head_dim, sizes.emb)
    return np.einsum("bqhe,hed->bqd", mixed, out)


_FUNCTIONS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "linear": lambda x: x,
}


def _mlp(sizes: Sizes, param: Any, x: np.ndarray) -> np.ndarray:
    result = np.ones(())
    for i, name in enumerate(sizes.activations):
        kernel = "wi" if len(sizes.activations) == 1 else f"wi_{i}"
        result = result * _FUNCTIONS[name](x @ param(f"mlp.{kernel}.kernel"))
    return result @ param("mlp.wo.kernel")


def _distances(table: np.ndarray, length: int, *, bidirectional: bool) -> np.ndarray:
    """Return the bias (1, h, q, k) of ``RelativePositionBiases``."""
    index = np.arange(length)
    n = index[:, None] - index[None, :]
    buckets = 32
    result = np.zeros((length, length), int)
    if bidirectional:
        buckets //= 2
        result += (n < 0) * buckets
        n = np.abs(n)
    n = np.maximum(n, 0)
    exact = buckets // 2
    eps = np.finfo(np.float32).eps
    ratio = np.log(n.astype(np.float32) / exact + eps) / np.log(128 / exact)
    far = exact + (ratio * (buckets - exact)).astype(int)
    result += np.where(n < exact, n, np.minimum(far, buckets - 1))
    return table[:, result][None]
