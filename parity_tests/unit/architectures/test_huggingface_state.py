"""The tensors that a file of transformers leaves out, on shapes only, and the reasons."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_transformer.architectures import huggingface, registry
from jax_transformer.architectures import huggingface_state as states
from jax_transformer.architectures.huggingface_config import from_config
from jax_transformer.config import Positions
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import LazyTensor, TensorInfo
from jax_transformer.transformer import shapes
from jax_transformer.weights.rules import Alias, torch_shapes

SMALL = {"vocab_size": 11, "d_model": 8, "pad_token_id": 0, "eos_token_id": 1}
SMALL["decoder_start_token_id"] = 0
SIZES = ("layers", "attention_heads", "ffn_dim")
BART = {f"{stack}_{size}": 2 for stack in ("encoder", "decoder") for size in SIZES}
BART["max_position_embeddings"] = 9
TWO = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 13}
T5 = {"num_layers": 2, "num_heads": 2, "d_kv": 3, "d_ff": 5}


FAMILIES = huggingface.families()


def config_of(name, **changes):
    family = FAMILIES[name]
    sizes = {key: value for key, value in (SMALL | BART | T5).items() if key in family.defaults}
    return from_config({"model_type": name} | sizes | changes)


def all_tensors(config) -> dict[str, TensorInfo]:
    table = registry.unchecked_table(config.architecture, config)
    expected = torch_shapes(table, shapes(config))
    return {name: TensorInfo(shape, "bfloat16") for name, shape in expected.items()}


@pytest.mark.parametrize(
    ("name", "changes"),
    [*((name, {}) for name in FAMILIES), ("fsmt", {"tie_word_embeddings": True})],
)
def test_abstract_shapes_are_completed_like_arrays(name, changes):
    config = config_of(name, **changes)
    full = all_tensors(config)
    file = states.saved(full, config)
    assert states.complete(file, config) == full
    assert not tensors.problems(full, {name: one.shape for name, one in full.items()})
    table = registry.unchecked_table(config.architecture, config)
    assert full.keys() - file.keys() >= {rule.torch for rule in table if isinstance(rule, Alias)}
    stored = config.encoder.positions is Positions.SINUSOIDAL_STORED
    computed = stored and config.mel_bins is None
    saved = [name for name in full if not (computed and "embed_positions" in name)]
    arrays = {name: np.zeros(full[name].shape, np.float32) for name in saved}
    completed = states.complete(arrays, config)
    assert {name: x.shape for name, x in completed.items()} == {k: x.shape for k, x in full.items()}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("name", "changes"), [("marian", {}), ("marian", TWO), ("bart", {}), ("fsmt", {})]
)
def test_what_a_file_lacks_is_in_its_dtype(name, changes, dtype):
    config, kind = config_of(name, **changes), np.dtype(jnp.dtype(dtype))
    full = all_tensors(config)
    zeros = {
        name: np.zeros(one.shape, kind)
        for name, one in full.items()
        if name != "final_logits_bias" and "embed_positions" not in name
    }
    infos = {name: TensorInfo(array.shape, dtype) for name, array in zeros.items()}
    lazy = {name: LazyTensor(infos[name], array.copy) for name, array in zeros.items()}
    completed = states.complete(zeros, config)
    assert completed.keys() > zeros.keys() and {x.dtype for x in completed.values()} == {kind}
    for key, tensor in states.complete(lazy, config).items():
        read = tensor.read()
        assert (read.dtype, tensor.dtype, read.shape) == (kind, dtype, full[key].shape)
        assert (read == completed[key]).all() and (key in zeros or read.any() == ("embed" in key))
        assert completed[key].shape == full[key].shape
    assert {info.dtype for info in states.complete(infos, config).values()} == {dtype}


@pytest.mark.parametrize(
    "present", ["model.shared.weight", "model.decoder.embed_tokens.weight", "lm_head.weight"]
)
def test_any_one_of_tied_tensors_suffices(present):
    config = config_of("bart")
    full = all_tensors(config)
    tied = {f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")}
    tied |= {"model.shared.weight", "lm_head.weight"}
    rest = {name: one for name, one in full.items() if name not in tied}
    assert states.complete(rest | {present: full[present]}, config) == full
    assert "model.shared.weight" not in states.complete(rest, config)


def test_dropped_tensors_have_reasons():
    marian, t5 = config_of("marian"), config_of("t5")
    assert states.why_completed("final_logits_bias", marian) == "is zero if a file does not hold it"
    actual = states.why_completed("model.encoder.embed_positions.weight", marian)
    assert actual == "is computed: sines and cosines"
    others = "shared.weight or encoder.embed_tokens.weight or decoder.embed_tokens.weight"
    repeated = f"repeats {others}, with which the model ties it"
    assert states.why_completed("lm_head.weight", t5) == repeated
    dropped = states.why_dropped("model.encoder.version", marian)
    assert dropped == "counts versions of fairseq's format"


def test_unknown_tensors_reach_the_table_and_are_refused():
    config = config_of("t5")
    extra = all_tensors(config) | {"adapter.weight": TensorInfo((3,), "float32")}
    assert "adapter.weight" in states.complete(extra, config)


def test_parameters_are_the_saved_ones_and_computed_positions_without_the_logits_bias():
    config = config_of("marian")
    full = all_tensors(config)
    saved = {x: LazyTensor(info, np.zeros) for x, info in states.saved(full, config).items()}
    sizes = [info.size for name, info in full.items() if name in saved or "positions" in name]
    assert states.parameters(saved, config) == sum(sizes) - config.target_vocab_size


def test_only_positions_that_were_rounded_are_computed_again():
    config = config_of("marian")
    exact = states._table(config)
    rounded = exact.astype(np.float16).astype(np.float32)
    name, table = "model.encoder.embed_positions.weight", "decoder.positions.table"
    for changed in (name, table):
        state = {name: rounded, table: rounded, "x": rounded} | {changed: rounded + 1}
        again = states.computed_again(tensors.in_memory(state), config)
        expected = {name: exact, table: exact, "x": rounded} | {changed: rounded + 1}
        assert all((again[x].read() == expected[x]).all() for x in state)
