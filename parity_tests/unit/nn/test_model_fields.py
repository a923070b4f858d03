"""Each configuration field has an effect: flipping it changes the same weights' result."""

import dataclasses
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.config import (
    AttentionBackend,
    AttentionSpan,
    Branch,
    Init,
    Mask,
    MaskFill,
    Norm,
    Part,
    Positions,
    Residual,
    StackConfig,
    TransformerConfig,
)
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.nn import layers
from jax_transformer.nn.embeddings import Embedding, Frozen, position_sinusoids, sinusoids
from jax_transformer.nn.sharding import FSDP, TENSOR
from parity_tests.unit.helpers import batch, furthest, random_model, shapes, skeleton, tiny

POSITIONS = ("encoder.positions", "decoder.positions")
BASE = tiny(num_layers=1, vocab_size=13, architecture="torch_nn")
SOURCE, TARGET = batch(BASE)
# inside a row: after its end, the causal mask hides padding from every token
SOURCE[0, 2], TARGET[0, 2] = (BASE.source_pad_id, BASE.target_pad_id)


@cache
def logits(
    config: TransformerConfig, *, seed: int | None = None, source_length: int = 7
) -> np.ndarray:
    """Return the logits, with dropout if there is a seed."""
    rngs = None if seed is None else jax.random.key(seed)
    return np.asarray(random_model(config)(SOURCE[:, :source_length], TARGET, rngs=rngs))


def compiled(config: TransformerConfig, dtype: str, *inputs: np.ndarray) -> np.ndarray:
    """Return the logits by one program: faster than many small ones that no other test has."""
    definition, state = nnx.split(random_model(config, dtype=dtype))
    call = jax.jit(lambda state, *inputs: nnx.merge(definition, state)(*inputs))
    return np.asarray(call(state, *inputs))


def both(old: TransformerConfig, new: TransformerConfig, **fields: Any) -> Any:
    """Return the two configurations with these fields changed in both."""
    return old.with_sizes(**fields), new.with_sizes(**fields)


def changes_logits(old: TransformerConfig, new: TransformerConfig):
    assert furthest(logits(old), logits(new)) > 1e-6


def changes_logits_where_both_sides_are_as_long(old: TransformerConfig, new: TransformerConfig):
    assert furthest(logits(old, source_length=5), logits(new, source_length=5)) > 1e-6


def changes_training_alone(old: TransformerConfig, new: TransformerConfig):
    assert furthest(logits(old), logits(new)) == 0
    assert furthest(logits(old, seed=0), logits(new, seed=0)) > 1e-6


def changes_masks(old: TransformerConfig, new: TransformerConfig):
    # threefry takes long to compile: two shapes, not seven
    changes_training_alone(*both(old, new, attention_dropout=0.0, activation_dropout=0.0))


def changes_weights(old: TransformerConfig, new: TransformerConfig):
    assert shapes(old) != shapes(new)
    assert jax.eval_shape(random_model(new), SOURCE, TARGET).shape == logits(old).shape


def changes_norms(old: TransformerConfig, new: TransformerConfig):
    changes_logits(old, new)
    assert (shapes(old) == shapes(new)) is (new.norm is Norm.LAYER_UNBIASED)


def changes_padding_alone(old: TransformerConfig, new: TransformerConfig):
    filled = both(old, new, mask_fill=-1e4)
    first, second = (np.asarray(random_model(config)(SOURCE, TARGET)) for config in filled)
    padding = old.target_pad_id == TARGET
    assert (first[~padding] == second[~padding]).all()
    if old.encoder == new.encoder:  # whose padding nothing reads
        assert furthest(first[padding], second[padding]) > 1e-6
    else:
        first, second = (random_model(config).encode(SOURCE) for config in filled)
        padding = old.source_pad_id == SOURCE
        assert furthest(first[padding], second[padding]) > 1e-6


def masks_queries(old: TransformerConfig, new: TransformerConfig):
    stacks = new.encoder, new.decoder
    masks = {mask for each in stacks for mask in (*each.self_mask, *each.cross_mask)}
    (changes_padding_alone if Mask.QUERY_PADDING in masks else changes_logits)(old, new)


def changes_weights_and_logits(old: TransformerConfig, new: TransformerConfig):
    changes_weights(old, new)
    changes_logits(old, new)


def changed_new_arrays(old: TransformerConfig, new: TransformerConfig) -> set[str]:
    first, second = (new_arrays(config.with_sizes(**SIZES)) for config in (old, new))
    assert first.keys() == second.keys()
    return {name for name in first if furthest(first[name], second[name]) > 0}


def changes_logits_with_embedding_norms(old: TransformerConfig, new: TransformerConfig):
    norms = {"encoder.embedding_norm": True, "decoder.embedding_norm": True}
    changes_logits(*both(old, new, **norms))


def changes_new_arrays(old: TransformerConfig, new: TransformerConfig):
    assert changed_new_arrays(old, new)


def changed_stack(old: TransformerConfig, new: TransformerConfig) -> str:
    (name,) = (name for name in ("encoder", "decoder") if getattr(old, name) != getattr(new, name))
    return name


def changes_new_arrays_of_one_stack(old: TransformerConfig, new: TransformerConfig):
    name = changed_stack(old, new)
    side = {"encoder": "source_embedding", "decoder": "target_embedding"}[name]
    # torch_transformer's differ in the stack
    assert {array.split(".")[0] for array in changed_new_arrays(old, new)} in ({name}, {name, side})


def changes_positions_computed_or_stored(old: TransformerConfig, new: TransformerConfig):
    name = changed_stack(old, new)
    assert changed_new_arrays(old, new) == {f"{name}.positions.table"}
    changes_logits(*both(old, new, **{f"{name}.positions": "sinusoidal"}))


def changes_computed_positions(old: TransformerConfig, new: TransformerConfig):
    changes_logits(*both(old, new, **dict.fromkeys(POSITIONS, "sinusoidal")))


def changes_relative_positions(old: TransformerConfig, new: TransformerConfig):
    """Few buckets, so that a row of seven, or five, reaches buckets of several distances."""
    few = dict.fromkeys(POSITIONS, "relative")
    for name, count in {"encoder": 8, "decoder": 4}.items():
        if getattr(new, name).relative_buckets == 32:
            few[f"{name}.relative_buckets"] = count
    changes_logits(*both(old, new, **few))


def changes_local_attention(old: TransformerConfig, new: TransformerConfig):
    """With transient-global attention of few tokens, except for the field that is flipped."""
    few: dict[str, Any] = {"encoder.positions": "relative", "encoder.relative_buckets": 8}
    usual = {"attention_span": "transient_global", "local_radius": 2, "global_block_size": 2}
    for name, value in usual.items():
        if getattr(new.encoder, name) == getattr(old.encoder, name):
            few[f"encoder.{name}"] = value
    first, second = (compiled(x, "float64", SOURCE, TARGET) for x in both(old, new, **few))
    assert furthest(first, second) > 1e-6


def changes_gradients_of_padding_alone(old: TransformerConfig, new: TransformerConfig):
    """Return one embedding's gradients; test_huggingface_gradients tests a whole model's."""
    ids = jnp.asarray([[3, old.target_pad_id, 5]])

    def gradient(config: TransformerConfig) -> np.ndarray:
        table = Embedding(config, config.target_vocab_size, config.target_pad_id, rngs=nnx.Rngs(0))
        definition, params = nnx.split(table)
        valid = ids != config.target_pad_id
        total = jax.grad(lambda p: nnx.merge(definition, p)(ids, valid).sum())(params)
        return np.asarray(total.embedding[...])

    first, second = gradient(old), gradient(new)
    assert furthest(logits(old), logits(new)) == 0
    assert np.flatnonzero(first.any(axis=1)).tolist() == [old.target_pad_id, 3, 5]
    assert np.flatnonzero(second.any(axis=1)).tolist() == [3, 5]


def keeps_the_embedding_of_padding(old: TransformerConfig, new: TransformerConfig):
    """Return one embedding's gradients as an output layer, and compare the logits with others'."""
    x = jax.random.normal(jax.random.key(0), (1, 3, old.d_model), jnp.float32)
    pad = old.target_pad_id

    def outputs(config: TransformerConfig) -> tuple[np.ndarray, np.ndarray]:
        table = Embedding(config, config.target_vocab_size, pad, rngs=nnx.Rngs(0))
        assert not np.asarray(table.embedding[...])[pad].any()
        table.embedding[...] = table.embedding[...].at[pad].set(1)
        definition, params = nnx.split(table)
        values, pull = jax.vjp(lambda p: nnx.merge(definition, p).attend(x), params)
        gradients = pull(jnp.ones_like(values))[0].embedding[...]
        return np.asarray(values), np.asarray(gradients)

    (first, trained), (second, frozen) = map(outputs, (replace(new, padding_frozen=False), new))
    assert (first == second).all() and first[..., pad].all()
    assert trained[pad].any() and not frozen[pad].any()
    assert (np.delete(trained, pad, 0) == np.delete(frozen, pad, 0)).all()
    with pytest.raises(ConfigError, match="padding_frozen"):
        replace(new, padding_trained=True)


def adds_arrays_that_nothing_reads_or_trains(old: TransformerConfig, new: TransformerConfig):
    added = shapes(new).keys() - shapes(old).keys()
    assert added
    assert shapes(old).keys() < shapes(new).keys()
    assert all(".unused." in name for name in added)
    assert {type(skeleton(new)[1][name][1]) for name in added} == {Frozen}
    assert furthest(logits(old), logits(new)) == 0
    assert furthest(logits(old, seed=0), logits(new, seed=0)) == 0


def removes_biases_without_effect(old: TransformerConfig, new: TransformerConfig):
    """A bias of the keys adds the same to all scores of a query."""
    removed = shapes(old).keys() - shapes(new).keys()
    assert len(removed) == 3 and all(name.endswith("attention.key.bias") for name in removed)
    assert 0 < furthest(logits(old), logits(new)) < 1e-5


def changes_the_source(old: TransformerConfig, new: TransformerConfig):
    """Compare what the model of ``new`` reads: spectrograms of its sizes, and no ids."""
    model, shape = random_model(new), (3, new.mel_bins, new.mel_frames)
    with pytest.raises(InputError, match=f"{shape[1]} mel bins, {shape[2]} frames"):
        model(SOURCE, TARGET)
    one, other = np.random.default_rng(0).standard_normal((2, *shape))
    features = jax.eval_shape(model.encode_features, one)
    assert features.shape == (3, new.mel_frames // 2, new.d_model)
    first, second = (compiled(new, "float64", sound, TARGET) for sound in (one, other))
    assert furthest(first, second) > 1e-3
    with pytest.raises(InputError):
        model(one[:, :, 2:], TARGET)
    with pytest.raises(ConfigError, match="reads ids of text"):
        random_model(old).encode_features(one)


def sound(bins: int, frames: int) -> dict[str, Any]:
    """Return the fields of a model that reads spectrograms, which have no padding."""
    encoder, decoder = replace(BASE.encoder, self_mask=()), replace(BASE.decoder, cross_mask=())
    return {"mel_bins": bins, "mel_frames": frames, "encoder": encoder, "decoder": decoder}


def changes_rows_that_see_no_key(old: TransformerConfig, new: TransformerConfig):
    """Return logits for three sources, the second only padding."""
    assert furthest(logits(old), logits(new)) == 0
    source = np.where(np.arange(3)[:, None] == 1, old.source_pad_id, SOURCE)
    first, second = (np.asarray(random_model(config)(source, TARGET)) for config in (old, new))
    assert (first[[0, 2]] == second[[0, 2]]).all() and np.isfinite(first).all()
    if new.mask_fill is MaskFill.MINUS_INFINITY:
        assert np.isnan(second[1]).all()
    else:
        assert furthest(first[1], second[1]) > 1e-3


def changes_what_is_refused(old: TransformerConfig, new: TransformerConfig):
    assert np.isfinite(logits(old)).all()
    with pytest.raises(InputError):
        logits(new)


def changes_decoding(old: TransformerConfig, new: TransformerConfig):
    """Trace the program without compiling it; test_generate tests its handling of ids."""

    def decoding(config: TransformerConfig) -> str:
        call = partial(jt.generate.greedy, random_model(config), SOURCE, max_length=4)
        return str(jax.make_jaxpr(call)())

    assert decoding(old) == decoding(old) != decoding(new)


def changes_dtype(old: TransformerConfig, new: TransformerConfig):
    dtypes = [jax.eval_shape(random_model(config), SOURCE, TARGET).dtype for config in (old, new)]
    assert dtypes == [np.float64, new.compute_dtype]


def program(config: TransformerConfig, dtype: str = "float64") -> str:
    model = random_model(config, dtype=dtype)
    return str(jax.make_jaxpr(lambda: model(SOURCE, TARGET))())


def computes_the_same_by_another_program(old: TransformerConfig, new: TransformerConfig):
    """test_scan_and_remat compares gradients, with dropout."""
    assert shapes(old) == shapes(new) and old == new.portable
    assert program(old) != program(new)
    assert furthest(logits(old), logits(new)) < 1e-12


def computes_float32_by_another_program(old: TransformerConfig, new: TransformerConfig):
    """test_attention_backends compares outputs and gradients; this backend is not for float64."""
    assert shapes(old) == shapes(new)
    old = replace(old, attention_dropout=0.0)
    assert program(old, "float32") != program(new, "float32")
    plain, other = (compiled(each, "float32", SOURCE, TARGET) for each in (old, new))
    assert furthest(plain, other) < 1e-5


def rounds_factors_of_float32_only(old: TransformerConfig, new: TransformerConfig):
    """test_products compares products and their gradients; float64 is never rounded."""
    assert program(old, "float64") == program(new, "float64")
    plain, other = (compiled(each, "float32", SOURCE, TARGET) for each in (old, new))
    assert 1e-4 < furthest(plain, other) / float(np.abs(plain).max()) < 2e-2


def others(name: str, owner=BASE) -> list[dict]:
    """Return flips of the field to every other member of its enum."""
    current = getattr(owner, name)
    return [{name: member} for member in type(current) if member is not current]


def stack(name: str, *several: dict) -> list[dict]:
    """Return a configuration whose ``encoder`` or ``decoder`` has fields changed."""
    return [{name: replace(getattr(BASE, name), **changes)} for changes in several]


def branches(name: str, **changes) -> list[dict]:
    """Return configurations with fields of one branch of a stack changed, for each branch."""
    stack = getattr(BASE, name)
    several = [
        (*stack.branches[:k], replace(branch, **changes), *stack.branches[k + 1 :])
        for k, branch in enumerate(stack.branches)
    ]
    return [{name: replace(stack, branches=each)} for each in several]


SPANS = (
    dict(attention_span=AttentionSpan.LOCAL),
    dict(attention_span=AttentionSpan.TRANSIENT_GLOBAL, positions=Positions.RELATIVE),
)
FIELDS = "activation head_merge mixing position_index positions positions_at".split()
NEW_ORDER = (Part.CROSS, Part.FFN, Part.SELF)
# Each field with the effect of a flip, and the flips.
FLIPS = {
    "source_vocab_size": (changes_what_is_refused, [dict(source_vocab_size=9)]),
    "target_vocab_size": (changes_what_is_refused, [dict(target_vocab_size=9)]),
    "d_model": (changes_weights, [dict(d_model=24)]),
    "matmul_precision": (rounds_factors_of_float32_only, others("matmul_precision")),
    "attention_backend": (
        computes_float32_by_another_program,
        # cudnn needs a GPU: test_attention_backends
        [dict(attention_backend=AttentionBackend.SDPA, attention_dropout=0.0)],
    ),
    "remat": (computes_the_same_by_another_program, others("remat")),
    "scan_layers": (computes_the_same_by_another_program, [dict(scan_layers=True)]),
    "num_heads": (changes_logits, [dict(num_heads=4)]),
    "d_ff": (changes_weights, [dict(d_ff=21)]),
    "max_length": (changes_what_is_refused, [dict(max_length=6)]),
    "head_dim": (changes_weights, [dict(head_dim=5)]),
    "norm": (changes_norms, others("norm")),
    "norm_placement": (changes_logits, others("norm_placement")),
    "norm_epsilon": (changes_logits, [dict(norm_epsilon=1e-4)]),
    "bias": (changes_weights_and_logits, [dict(bias=False)]),
    "attention_bias": (changes_weights_and_logits, [dict(attention_bias=False)]),
    "key_bias": (removes_biases_without_effect, [dict(key_bias=False)]),
    "mel_bins": (changes_the_source, [sound(7, 8)]),
    "mel_frames": (changes_the_source, [sound(7, 12)]),
    "output_bias": (changes_weights_and_logits, [dict(output_bias=False)]),
    "logits_bias": (changes_weights_and_logits, [dict(logits_bias=True)]),
    "logit_scale": (changes_logits, others("logit_scale")),
    "score_scale": (changes_logits, others("score_scale")),
    "mask_fill": (changes_rows_that_see_no_key, [*others("mask_fill"), dict(mask_fill=-1e4)]),
    "embedding_scale": (changes_logits, others("embedding_scale")),
    "padding_trained": (changes_gradients_of_padding_alone, [dict(padding_trained=False)]),
    "padding_frozen": (
        keeps_the_embedding_of_padding,
        [dict(padding_frozen=True, padding_trained=False)],
    ),
    "tying": (changes_weights_and_logits, others("tying")),
    "dropout": (changes_training_alone, [dict(dropout=0.3)]),
    "attention_dropout": (changes_training_alone, [dict(attention_dropout=0.3)]),
    "activation_dropout": (changes_training_alone, [dict(activation_dropout=0.3)]),
    "embedding_dropout": (changes_training_alone, [dict(embedding_dropout=0.3)]),
    "embedding_dropouts": (changes_training_alone, [dict(embedding_dropouts=2)]),
    "final_dropout": (changes_training_alone, [dict(final_dropout=True)]),
    "dropout_site": (changes_training_alone, others("dropout_site")),
    "dropout_masks": (changes_masks, others("dropout_masks")),
    "init": (changes_new_arrays, others("init")),
    "compute_dtype": (
        changes_dtype,
        [dict(compute_dtype=name) for name in ("bfloat16", "float16", "float32")],
    ),
    "source_pad_id": (changes_logits, [dict(source_pad_id=5)]),
    "target_pad_id": (changes_logits, [dict(target_pad_id=5)]),
    "bos_id": (changes_decoding, [dict(bos_id=4)]),
    "eos_id": (changes_decoding, [dict(eos_id=4)]),
    "encoder.attention_span": (changes_local_attention, stack("encoder", *SPANS)),
    "encoder.local_radius": (changes_local_attention, stack("encoder", dict(local_radius=1))),
    "encoder.global_block_size": (
        changes_local_attention,
        stack("encoder", dict(global_block_size=2)),
    ),
    **{
        # both stacks are of one class: every value in one of them, and one in the other
        f"{name}.{field}": (effect, stack(name, *(flips if name == "encoder" else flips[:1])))
        for name in ("encoder", "decoder")
        for effect, fields in {
            changes_logits: {
                "branches": [dict(branches=getattr(BASE, name).branches[::-1])],
                "num_heads": [dict(num_heads=4)],
                **{field: others(field, BASE.encoder) for field in FIELDS},
            },
            changes_logits_with_embedding_norms: {
                "embedding_norm_of": others("embedding_norm_of", BASE.encoder)
            },
            changes_weights: {"d_ff": [dict(d_ff=21)]},
            changes_weights_and_logits: {
                "layers": [dict(layers=2)],
                "gated": [dict(gated=True)],
                "embedding_norm": [dict(embedding_norm=True)],
                "final_norm": [dict(final_norm=False)],
            },
            changes_positions_computed_or_stored: {
                "position_exponent": [dict(position_exponent=2.0)],
                "sinusoids": others("sinusoids", BASE.encoder),
            },
            changes_computed_positions: {"position_offset": [dict(position_offset=2)]},
            changes_relative_positions: {
                "relative_buckets": [dict(relative_buckets=6)],
                "relative_max_distance": [dict(relative_max_distance=5)],
            },
            changes_training_alone: {
                "attention_dropout": [dict(attention_dropout=0.0), dict(attention_dropout=0.3)]
            },
            changes_new_arrays_of_one_stack: {
                "init": [dict(init=init) for init in Init if init is not BASE.init]
            },
            adds_arrays_that_nothing_reads_or_trains: {
                "unused": [dict(unused=(Branch((Part.SELF,)), Branch((Part.FFN,))))]
            },
        }.items()
        for field, flips in fields.items()
    },
    **{
        f"{name}.{field}": (
            masks_queries,
            stack(
                name,
                *({field: mask} for mask in others),
                {field: (*getattr(getattr(BASE, name), field), Mask.QUERY_PADDING)},
            ),
        )
        for name, field, others in (
            ("encoder", "self_mask", [()]),
            ("decoder", "self_mask", [(), (Mask.CAUSAL,), (Mask.TARGET_PADDING,)]),
            ("decoder", "cross_mask", [()]),
        )
    },
    "encoder.branches.parts": (changes_logits, branches("encoder", parts=(Part.SELF, Part.FFN))),
    "decoder.branches.parts": (changes_logits, branches("decoder", parts=NEW_ORDER)),
    "decoder.branches.residual": (
        changes_logits_where_both_sides_are_as_long,
        branches("decoder", residual=Residual.MEMORY),
    ),
    "encoder.branches.dropout": (changes_training_alone, branches("encoder", dropout=0.3)),
    "decoder.branches.dropout": (changes_training_alone, branches("decoder", dropout=0.0)),
}
# Fields without a flip, and the reason.
EXEMPT = {
    "encoder": "its fields are flipped one by one",
    "decoder": "its fields are flipped one by one",
    "architecture": "it names a PyTorch twin and its weights; the Flax model is the same, "
    "and the parity tests compare the two",
    "encoder.cross_mask": "an encoder has no cross-attention: () is the only value, "
    "see test_checks",
    **dict.fromkeys(
        ("decoder.attention_span", "decoder.local_radius", "decoder.global_block_size"),
        "a decoder attends to all tokens before: FULL is the only span, see test_checks",
    ),
    "encoder.branches.residual": "an encoder has no memory: INPUT is the only value, "
    "see test_checks",
}


def test_every_field_is_flipped_or_exempt_for_a_reason():
    owners: dict[str, Any] = {"": TransformerConfig}
    for name in ("encoder", "decoder"):
        owners |= {f"{name}.": StackConfig, f"{name}.branches.": Branch}
    fields = {
        f"{prefix}{field.name}"
        for prefix, kind in owners.items()
        for field in dataclasses.fields(kind)
    }
    assert fields == FLIPS.keys() | EXEMPT.keys() and not FLIPS.keys() & EXEMPT.keys()
    assert all(flips for _, flips in FLIPS.values())


@pytest.mark.parametrize("field", FLIPS)
def test_flipping_a_field_changes_its_effect(field):
    effect, flips = FLIPS[field]
    for changes in flips:
        new = replace(BASE, **changes)
        assert new != BASE
        effect(BASE, new)


SIDES = ("encoder", "decoder")


@pytest.mark.parametrize("name", SIDES)
def test_a_stack_s_own_value_overrides_the_model_s(name):
    """None in a stack's own field means the model's value; of ``init``, see below."""
    stacks = {side: replace(getattr(BASE, side), attention_dropout=0.3) for side in SIDES}
    own, everywhere = replace(BASE, **stacks), replace(BASE, attention_dropout=0.3)
    one = replace(BASE, **{name: stacks[name]})
    dropped = [logits(config, seed=0) for config in (own, everywhere, one)]
    assert furthest(dropped[0], dropped[1]) == 0 < furthest(dropped[2], dropped[1])


def test_attention_can_have_its_own_bias_setting():
    for rest in (False, True):
        names = shapes(replace(BASE, bias=rest, attention_bias=not rest))
        biases = {name for name in names if name.endswith("bias")} - {"output.bias"}
        assert biases and all(("_attention." in name) is not rest for name in biases)
        same = replace(BASE, bias=rest, attention_bias=rest)
        assert shapes(replace(BASE, bias=rest)) == shapes(same)


# Distributions of new parameters

D, F = 64, 96
# few shapes to compile
SIZES = dict(d_model=D, d_ff=F, num_heads=4, vocab_size=F, max_length=F, num_layers=1)


def bound(xavier: float, torch: float) -> dict[Init, float]:
    """Bounds of a matrix of the stacks in each scheme."""
    return {Init.XAVIER: xavier, Init.TORCH_TRANSFORMER: xavier, Init.TORCH: torch}


KERNELS = {
    **{name: bound(math.sqrt(6 / (3 * D + D)), D**-0.5) for name in ("query", "key", "value")},
    "out": bound(math.sqrt(6 / (D + D)), D**-0.5),
    "up": bound(math.sqrt(6 / (D + F)), D**-0.5),
    "down": bound(math.sqrt(6 / (D + F)), F**-0.5),
    "output": {
        Init.XAVIER: math.sqrt(6 / (D + F)),
        Init.TORCH_TRANSFORMER: D**-0.5,
        Init.TORCH: D**-0.5,
    },  # outside the stacks
}


def new_arrays(config: jt.TransformerConfig, seed: int = 0) -> dict[str, jax.Array]:
    return transformer.flatten(jt.Transformer(config, rngs=nnx.Rngs(seed)))


def test_convolutions_are_drawn_as_pytorch_draws_them():
    arrays = new_arrays(tiny(**sound(7, 8), **SIZES))
    for part, inputs in (("first", 7), ("second", D)):
        kernel, bias = (np.abs(arrays[f"stem.{part}.{leaf}"]).max() for leaf in ("kernel", "bias"))
        limit = (3 * inputs) ** -0.5
        assert 0.95 * limit < kernel <= limit and bias <= limit


@pytest.mark.parametrize("init", Init)
def test_new_parameters_follow_the_named_distributions(init):
    config = tiny(
        init=init.value,
        **SIZES,
        **{f"{stack}.positions": "learned" for stack in ("encoder", "decoder")},
    )
    arrays = {name: np.asarray(a) for name, a in new_arrays(config).items()}
    assert all(array.dtype == np.float32 for array in arrays.values())
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    assert len(matrices) == 4 * 3 + 2 * 2 + 5
    assert len({arrays[name].tobytes() for name in matrices}) == len(matrices)
    for name, array in arrays.items():
        *_, owner, kind = name.split(".")
        if kind in ("embedding", "table"):
            deviation, sigma = D**-0.5 if init is Init.XAVIER else 1.0, array.size**-0.5
            assert abs(array.std() / deviation - 1) < 4 * sigma, name
            assert abs(array.mean() / deviation) < 4 * sigma, name
            assert np.abs(array).max() > 3 * deviation, f"{name}: normal, not uniform"
        elif kind == "kernel":
            limit = KERNELS[owner][init]
            assert 0.99 * limit < np.abs(array).max() <= limit, name
            assert abs(array.std() / (limit / math.sqrt(3)) - 1) < 4 * array.size**-0.5
            assert abs(array.mean()) < 4 * limit * array.size**-0.5
        elif kind == "scale":
            assert (array == 1).all(), name
        elif owner in ("norm", "final_norm") or init is Init.XAVIER:
            assert (array == 0).all(), name
        elif init is Init.TORCH_TRANSFORMER and any(
            part.value in name for part in (Part.SELF, Part.CROSS)
        ):
            assert (array == 0).all(), name  # in_proj_bias and out_proj.bias
        else:
            limit = (F if owner == "down" else D) ** -0.5
            assert 0.9 * limit < np.abs(array).max() <= limit, name
            assert abs(array.mean()) < 4 * limit * array.size**-0.5, name


@pytest.mark.parametrize("init", Init)
def test_a_stack_s_own_scheme_is_that_of_its_arrays_and_its_embedding(init):
    learned = {f"{stack}.positions": "learned" for stack in ("encoder", "decoder")}
    own = {f"{stack}.init": init.value for stack in ("encoder", "decoder")}
    expected = new_arrays(tiny(init=init.value, **SIZES, **learned))
    for other in Init:
        arrays = new_arrays(tiny(init=other.value, **SIZES, **learned, **own))
        for name in [name for name in expected if not name.startswith("output.")]:
            assert (arrays[name] == expected[name]).all(), (other, name)


def test_new_values_are_drawn_on_the_devices_that_keep_them(monkeypatch):
    """The whole of a large matrix never lies on one device."""
    mesh = AbstractMesh((2, 3), (FSDP, TENSOR))
    drawn: list[Any] = []
    monkeypatch.setattr(jax.sharding, "get_mesh", lambda: mesh)
    monkeypatch.setattr(
        jax, "jit", lambda call, **options: drawn.append(options.get("out_shardings")) or call
    )
    key = jax.random.key(0)
    layers.uniform(1.0, key, (4, 6))
    layers.uniform(1.0, key, (4, 5))
    layers.uniform(1.0, key, (4,))
    layers.normal(1.0, key, (6, 4), TENSOR, FSDP)
    specs = [P(FSDP, TENSOR), P(FSDP), P(), P(TENSOR, FSDP)]
    assert drawn == [NamedSharding(mesh, spec) for spec in specs]


def test_biases_of_distances_start_as_small_as_t5_s():
    arrays = new_arrays(tiny("longt5", **SIZES))
    tables = {name: array for name, array in arrays.items() if "relative" in name}
    assert len(tables) == 3
    for name, array in tables.items():
        assert abs(float(array.std()) * D**0.5 - 1) < 4 * array.size**-0.5, name


def test_the_embedding_of_padding_starts_at_zero_on_its_own_side():
    config = tiny(padding_trained=False, source_pad_id=2, target_pad_id=5, bos_id=1, eos_id=4)
    arrays = new_arrays(config)
    for side, pad in (("source", 2), ("target", 5)):
        zero = ~np.asarray(arrays[f"{side}_embedding.embedding"]).any(axis=1)
        assert np.flatnonzero(zero).tolist() == [pad]


def test_a_table_without_padding_s_row_changes_no_other_one():
    fields = {"encoder.position_offset": 2, "encoder.sinusoids": "tensor2tensor"}
    stack = BASE.with_sizes(**fields).encoder
    plain = position_sinusoids(BASE, stack)
    counting = BASE.with_sizes(**fields, **{"encoder.position_index": "not_padding"}).encoder
    counted = position_sinusoids(BASE, counting)
    assert not counted[1].any() and (np.delete(counted, 1, 0) == np.delete(plain, 1, 0)).all()
    assert plain[1].any() and not np.may_share_memory(plain, counted)
    assert (position_sinusoids(BASE, stack) == plain).all()


def test_stored_tables_start_as_sinusoids_and_seeds_differ():
    first, second = (new_arrays(tiny(**SIZES), seed) for seed in (0, 1))
    table = sinusoids(F, D).astype(np.float32)
    for stack in ("encoder", "decoder"):
        assert (np.asarray(first[f"{stack}.positions.table"]) == table).all()
    assert furthest(first["output.kernel"], second["output.kernel"]) > 0.1
