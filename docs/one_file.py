"""An encoder-decoder Transformer (Vaswani et al. 2017) in one file, read from top to bottom.

``python docs/one_file.py`` trains it for a few minutes on a CPU to write English dates, prices and
lists in German, French and Spanish, then translates three lines. From the same first weights,
``train.py --data.vocab-size 259 --data.tokens-per-batch 2048`` has the same losses: a test says so.

Axes: batch, source, target, n (s or t), query, key, head, e (its width), d_model, ff, vocabulary.
"""

import lzma
import math
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

PAD, BOS, EOS = 0, 1, 2  # padding, begin and end of a sentence; tokens from 3 on are bytes
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # they come first in train.py
BYTES = [*PRINTABLE, *sorted(set(range(256)) - set(PRINTABLE))]
TOKENS = {byte: 3 + i for i, byte in enumerate(BYTES)}
# PyTorch's layer norm: by default Flax adds 1e-6, and computes the variance less exactly
LayerNorm = partial(nnx.LayerNorm, epsilon=1e-5, use_fast_variance=False)


@dataclass(frozen=True)
class Config:
    """The sizes of the model, and the numbers of its training."""

    vocab_size: int = 3 + len(BYTES)
    d_model: int = 128
    num_heads: int = 4
    d_ff: int = 512
    num_layers: int = 2  # of the encoder, and of the decoder
    dropout: float = 0.1
    label_smoothing: float = 0.1
    steps: int = 1600
    learning_rate: float = 3e-3  # after the warm-up; then it falls to 0
    warmup_steps: int = 200
    widths: tuple[int, ...] = (20, 28, 36, 60)  # a batch is padded to one of these
    tokens_per_batch: int = 2048  # padding included
    seed: int = 0


# The model: it holds weights and nothing else; the key of dropout comes with the call
class MultiHeadAttention(nnx.Module):
    """Section 3.2: softmax(q·k / sqrt(e)) v for every head, between four linear layers."""

    def __init__(self, config, rngs):
        d, xavier, self.heads = config.d_model, nnx.initializers.xavier_uniform(), config.num_heads
        linear = partial(nnx.Linear, d, d, kernel_init=xavier, rngs=rngs)
        self.query, self.key, self.value, self.out = linear(), linear(), linear(), linear()

    def __call__(self, x, memory, mask):  # x: b q d, memory: b k d, mask: b 1 q k, True is visible
        projected = self.query(x), self.key(memory), self.value(memory)  # b n d
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in projected)  # b n h e
        scores = jnp.einsum("bqhe,bkhe->bhqk", q / math.sqrt(q.shape[-1]), k)
        # Each query sees at least one key (BOS or EOS), so that no row of scores is all -inf
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return self.out(jnp.einsum("bhqk,bkhe->bqhe", weights, v).reshape(x.shape))


class FeedForward(nnx.Module):
    """Section 3.3: two linear layers, the same at every position."""

    def __init__(self, config, rngs):
        linear = partial(nnx.Linear, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)
        self.up, self.down = (
            linear(config.d_model, config.d_ff),
            linear(config.d_ff, config.d_model),
        )

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))  # b n d -> b n f -> b n d


def dropout(x, rate, key, site):
    """Zero elements of ``x`` with probability ``rate``: those whose hashed index is below it."""
    if key is None or rate == 0:
        return x
    first, second = jax.random.key_data(jax.random.fold_in(key, zlib.crc32(site.encode())))
    bits = jax.lax.iota(jnp.uint32, x.size).reshape(x.shape) * jnp.uint32(0x9E3779B1) + first
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D) ^ second
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    keep = (bits ^ (bits >> 16)) >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep, x / (1 - rate), 0)


class Block(nnx.Module):
    """Section 3.1: a layer of the encoder, or of the decoder, which attends to the memory too."""

    def __init__(self, config, name, rngs):
        self.rate, self.name, decoder = config.dropout, name, name.startswith("decoder")
        self.self_attention = MultiHeadAttention(config, rngs)
        self.cross_attention = MultiHeadAttention(config, rngs) if decoder else None
        self.feed_forward = FeedForward(config, rngs)
        self.norms = nnx.List([LayerNorm(config.d_model, rngs=rngs) for _ in range(2 + decoder)])

    def __call__(self, x, mask, memory, memory_mask, key):
        sublayers = [lambda y: self.self_attention(y, y, mask), self.feed_forward]
        if self.cross_attention is not None:
            sublayers.insert(1, lambda y: self.cross_attention(y, memory, memory_mask))
        for i, (sublayer, norm) in enumerate(zip(sublayers, self.norms, strict=True)):
            # The paper norms the sum; to norm what goes into the sublayer trains more easily
            x = x + dropout(sublayer(norm(x)), self.rate, key, f"{self.name}.branches.{i}.output")
        return x


class Stack(nnx.Module):
    """The encoder or the decoder: positional encoding, blocks, and a last norm."""

    def __init__(self, config, name, rngs):
        self.rate, self.name, numbers = config.dropout, name, range(config.num_layers)
        self.blocks = nnx.List([Block(config, f"{name}.blocks.{i}", rngs) for i in numbers])
        self.norm = LayerNorm(config.d_model, rngs=rngs)

    def __call__(self, x, mask, memory=None, memory_mask=None, key=None):  # x: b n d
        n, d = x.shape[1:]
        angles = np.arange(n)[:, None] / 10_000 ** (np.arange(0, d, 2) / d)  # section 3.5
        sinusoids = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, d)
        x = dropout(x + sinusoids.astype(x.dtype), self.rate, key, f"{self.name}.embedding")
        for block in self.blocks:
            x = block(x, mask, memory, memory_mask, key)
        return self.norm(x)


class Transformer(nnx.Module):
    """Figure 1: logits of the token after each token of the target."""

    def __init__(self, config, rngs):
        # One matrix is source embedding, target embedding and output layer: section 3.4
        table = jax.random.normal(rngs.params(), (config.vocab_size, config.d_model))
        self.embedding = nnx.Param(table / math.sqrt(config.d_model))
        self.encoder, self.decoder = (Stack(config, name, rngs) for name in ("encoder", "decoder"))

    def __call__(self, source, target, key=None):  # b s, b t -> b t v
        return self.decode(self.encode(source, key), source, target, key)

    def embed(self, ids):  # b n -> b n d
        return self.embedding[...][ids] * math.sqrt(self.embedding.shape[1])

    def encode(self, source, key=None):  # b s -> b s d
        return self.encoder(self.embed(source), (source != PAD)[:, None, None], key=key)

    def decode(self, memory, source, target, key=None):  # b s d, b s, b t -> b t v
        mask = (target != PAD)[:, None, None] & jnp.tri(target.shape[1], dtype=bool)  # b 1 q k
        x = self.decoder(self.embed(target), mask, memory, (source != PAD)[:, None, None], key)
        return x @ self.embedding[...].T


TORCH_NAMES = {  # of modules and weights; PyTorch has query, key and value in one matrix
    "blocks": "layers", "self_attention": "self_attn", "cross_attention": "multihead_attn",
    ".query.": ".in_proj_", ".key.": ".in_proj_", ".value.": ".in_proj_", ".out.": ".out_proj.",
    "feed_forward.up": "linear1", "feed_forward.down": "linear2", "embedding": "tgt_emb.weight",
    "norms.0": "norm1", "norms.1": "norm2", "norms.2": "norm3", "kernel": "weight",
    "scale": "weight",
}  # fmt: skip


def load_torch(model, state_dict):
    """Give the model all weights of a PyTorch model, as ``torch.load`` returns them."""
    state, unused = (
        nnx.state(model),
        state_dict.keys() - {"src_emb.weight", "linear.weight"},
    )  # tied
    for path, weight in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        for flax, torch in TORCH_NAMES.items():
            name = name.replace(flax, torch)
        array = np.array(state_dict[name])
        if "in_proj_" in name:
            array = np.split(array, 3)[("query", "key", "value").index(path[-2])]
        array = array.T if path[-1] == "kernel" else array  # PyTorch has (outputs, inputs)
        if array.shape != weight.shape:
            raise ValueError(f"{name}: {array.shape} is not {weight.shape}")
        weight.set_value(jnp.array(array))
        unused -= {name}
    if unused:
        raise ValueError(f"unexpected tensors: {sorted(unused)}")
    nnx.update(model, state)


# Text and batches
def read_pairs(split="train"):
    """Return the pairs of the built-in task, such as ``<2de> May 5, 2024`` and ``5. Mai 2024``."""
    packed = Path(__file__).parents[1] / "jax_transformer/data/phrases.tsv.xz"
    lines = lzma.decompress(packed.read_bytes()).decode().split("\n")
    return [tuple(line.split("\t")[1:]) for line in lines if line.startswith(split)]


def encode(text):
    return [*(TOKENS[byte] for byte in text.encode()), EOS]


def pad(rows, width):
    return np.array([[*row, *[PAD] * (width - len(row))] for row in rows], np.int32)


def permutation(count, keys):
    """Permute ``range(count)`` by hashing each number; those that leave it are hashed again."""
    bits = (count - 1).bit_length()
    order, beyond = np.arange(count, dtype=np.uint64), slice(None)
    while len(order[beyond]):
        for key in keys:  # all of this is one to one on numbers of so many bits
            hashed = (order[beyond] + (key >> 32)) * (key | 1) & (2**bits - 1)
            order[beyond] = hashed ^ (hashed >> ((bits + 1) // 2))
        beyond = order >= count
    return order


def batches(pairs, config):
    """Yield batches of similar lengths for ever: source, decoder input and its next tokens."""
    pairs = [(encode(source), encode(target)) for source, target in pairs]
    pairs.sort(key=lambda pair: -(-max(map(len, pair)) // 4))
    longest = [max(map(len, pair)) for pair in pairs]
    ends = np.searchsorted(longest, config.widths[:-1], side="right")
    buckets = np.split(np.arange(len(pairs)), ends)
    for epoch in range(2**63):
        keys = np.random.Philox(key=[config.seed, epoch]).random_raw((1 + 2 * len(buckets), 8))
        groups, left = [], []
        for width, bucket, key in zip(config.widths, buckets, keys[1::2], strict=True):
            rows = config.tokens_per_batch // width
            drawn = [*left, *bucket[permutation(len(bucket), key)]]
            *full, left = np.split(drawn, range(rows, len(drawn) + 1, rows))
            groups += [(rows, width, group) for group in full]  # what is left goes into the next
        groups += [(rows, width, left)] if len(left) else []
        for i in permutation(len(groups), keys[0]):
            rows, width, group = groups[i]
            filler = [([EOS], [])] * (rows - len(group))
            sources, targets = zip(*(pairs[j] for j in group), *filler, strict=True)
            target_in = [[BOS, *ids[:-1]] for ids in targets]
            yield [pad(each, width) for each in (sources, target_in, targets)]


# Training: section 5
def loss_per_token(params, graphdef, config, batch, key=None):
    """Return the cross entropy with label smoothing: a part of the target is spread evenly."""
    source, target_in, target_out = batch
    logits, counted = nnx.merge(graphdef, params)(source, target_in, key), target_out != PAD
    labels = optax.smooth_labels(jnp.eye(config.vocab_size)[target_out], config.label_smoothing)
    loss = optax.softmax_cross_entropy(logits, labels)  # b t v -> b t
    return jnp.where(counted, loss, 0).sum() / counted.sum()


def train(model, config, pairs):
    """Train the model, and yield the loss of each step."""
    peak, warmup = config.learning_rate, config.warmup_steps
    schedule = optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, config.steps)
    adamw = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.01)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    graphdef, params = nnx.split(model, nnx.Param)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch, key):
        loss, gradients = jax.value_and_grad(loss_per_token)(params, graphdef, config, batch, key)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    key = jax.random.key(config.seed)
    for number, batch in zip(range(config.steps), batches(pairs, config), strict=False):
        params, opt_state, loss = step(params, opt_state, batch, jax.random.fold_in(key, number))
        nnx.update(model, params)
        yield float(loss)


# Decoding
@nnx.jit(static_argnames="length")
def greedy(model, source, length):
    """Return the most likely next token, again and again, up to EOS: b s -> b length."""
    memory = model.encode(source)

    def step(i, target):
        token = model.decode(memory, source, target)[:, i].argmax(-1).astype(target.dtype)
        ended = (target == EOS).any(axis=1)
        return target.at[:, i + 1].set(jnp.where(ended, PAD, token))

    start = jnp.full((source.shape[0], length + 1), PAD, jnp.int32).at[:, 0].set(BOS)
    return jax.lax.fori_loop(0, length, step, start)[:, 1:]


def translate(model, config, lines):
    rows = list(map(encode, lines))
    ids = np.array(greedy(model, pad(rows, max(map(len, rows))), config.widths[-1]))
    return [bytes(BYTES[i - 3] for i in row if i > EOS).decode(errors="replace") for row in ids]


if __name__ == "__main__":
    config, model = Config(), Transformer(Config(), nnx.Rngs(Config.seed))
    for number, loss in enumerate(train(model, config, read_pairs())):
        if number % 50 == 0:
            print(f"step {number}: loss {loss:.3f}", flush=True)
    lines = ["<2de> March 5, 2024", "<2fr> 3 hours ago", "<2es> €1,250.50"]
    print(*map(" -> ".join, zip(lines, translate(model, config, lines), strict=True)), sep="\n")
