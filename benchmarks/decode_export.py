"""Export of our weights to transformers and CTranslate2.

transformers' Marian (post-norm) or M2M100 (pre-norm), and CTranslate2's TransformerSpec.

Both are written here by name, tensor by tensor, so that all three libraries compute the same
function of the same numbers.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import jax_transformer as jt
from jax_transformer import config as configs
from jax_transformer import transformer
from jax_transformer.data import batches, encoding, phrases
from jax_transformer.nn import embeddings

Arrays = dict[str, np.ndarray]

# Our names to transformers'; kernels are transposed
NAMES = {
    "self_attention.": "self_attn.",
    "cross_attention.": "encoder_attn.",
    "attn.query.": "attn.q_proj.",
    "attn.key.": "attn.k_proj.",
    "attn.value.": "attn.v_proj.",
    "attn.out.": "attn.out_proj.",
    "feed_forward.up.": "fc1.",
    "feed_forward.down.": "fc2.",
    "final_norm.": "layer_norm.",
    ".blocks.": ".layers.",
    "scale": "weight",
    "kernel": "weight",
}
# The norm of each branch, in order
NORMS = {"encoder": ("self_attn", "final"), "decoder": ("self_attn", "encoder_attn", "final")}


def random(
    sizes: dict[str, int], shape: tuple[int, int], max_length: int
) -> tuple[transformer.Transformer, np.ndarray]:
    """A post-norm model with random weights that never ends a sentence, and sources (rows, s).

    The end token's logit is 0, below the best.
    """
    model = jt.Transformer(
        jt.preset("vaswani2017_base", max_length=max_length, **sizes), rngs=nnx.Rngs(0)
    )
    table = model.target_embedding.embedding
    table[...] = table[...].at[model.config.eos_id].set(0)
    sources = (
        np.random.default_rng(0).integers(3, model.config.source_vocab_size, shape).astype(np.int32)
    )
    sources[:, -1] = model.config.eos_id
    return model, sources


def trained(
    run: str, lines: Sequence[str] | None, rows: int
) -> tuple[transformer.Transformer, np.ndarray]:
    """A run's model, and ``count`` lines of middle length, batched by length as ``translate`` does.

    They are lines of the built-in task's test set if the run has no text.
    """
    model, tokenizer = jt.load(run)
    lines = [source for source, _ in phrases.load()["test"]] if lines is None else lines
    encoded = sorted(
        (ids for ids in tokenizer.encode_batch(lines) if 0 < len(ids) < model.config.max_length),
        key=len,
    )
    if len(encoded) < rows:
        raise SystemExit(f"{len(encoded)} lines to translate are too few for a batch of {rows}")
    first = (len(encoded) - rows) // 2
    chosen = encoded[first : first + rows]
    pad, special = model.config.source_pad_id, encoding.special_tokens(tokenizer)
    return model, batches.pad_rows(chosen, len(chosen[-1]) + 1, rows, pad, special)


def save(model: transformer.Transformer, folder: Path) -> None:
    """Write the model in float32, as :func:`load` reads it."""
    (folder / "config.json").write_text(model.config.to_json())
    np.savez(
        folder / "weights.npz",
        **{name: np.asarray(leaf, np.float32) for name, leaf in transformer.flatten(model).items()},
    )


def load(folder: Path, **changes: Any) -> transformer.Transformer:
    """Read the model with these changes to its config, the weights in the dtype of its products."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    config = configs.TransformerConfig.from_json(json.dumps(fields))
    with np.load(folder / "weights.npz") as arrays:
        dtype = config.compute_dtype
        return transformer.unflatten(
            config, {name: jax.numpy.asarray(array, dtype) for name, array in arrays.items()}
        )


def differences(
    model: transformer.Transformer, sources: np.ndarray, exported: Path
) -> dict[str, float]:
    """Largest differences from ours for random targets, divided by our largest value.

    They are those of transformers' logits, and of CTranslate2's log-probability of each token.
    """
    import ctranslate2
    import torch

    config, sources = model.config, sources[:8]
    targets = (
        np.random.default_rng(1)
        .integers(3, config.target_vocab_size, (len(sources), 9))
        .astype(np.int32)
    )
    targets[:, 0] = config.bos_id
    logits = np.asarray(jax.jit(lambda model, *ids: model(*ids))(model, sources, targets))
    ids = torch.from_numpy(sources).long()
    arguments = dict(
        input_ids=ids,
        attention_mask=(ids != config.source_pad_id).long(),
        decoder_input_ids=torch.from_numpy(targets).long(),
    )
    with torch.inference_mode():
        theirs = to_transformers(model)(**arguments).logits.numpy()
    following = np.concatenate(
        [targets[:, 1:], np.full_like(targets[:, :1], config.eos_id)], axis=1
    )
    ours = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), following[..., None], axis=-1
    )[..., 0]
    words = [
        [[str(i) for i in row if i != config.source_pad_id] for row in side]
        for side in (sources, targets[:, 1:])
    ]
    scored = ctranslate2.Translator(
        str(exported), device="cpu", compute_type="float32"
    ).score_batch(*words)
    pairs = {"transformers": (theirs, logits)}
    pairs["CTranslate2"] = np.array([row.log_probs for row in scored]), ours
    return {
        library: float(np.abs(each - reference).max() / np.abs(reference).max())
        for library, (each, reference) in pairs.items()
    }


def check(config: configs.TransformerConfig) -> None:
    """Exit with one line if the other libraries have no model of this architecture."""
    like = {
        "encoder": ("self_attention", "feed_forward"),
        "decoder": ("self_attention", "cross_attention", "feed_forward"),
    }
    fields = {
        "tying": ("all", config.tying),
        "output_bias": (False, config.output_bias),
        "bias": (True, config.bias),
        "embedding_scale": ("sqrt_d_model", config.embedding_scale),
        "score_scale": ("head_dim", config.score_scale),
        "head_width": (config.d_model // config.num_heads, config.head_width),
        "norm_epsilon": (1e-5, config.norm_epsilon),
        "decoder.cross_mask": (("source_padding",), config.decoder.cross_mask),
    }
    sinusoidal = (configs.Positions.SINUSOIDAL, configs.Positions.SINUSOIDAL_STORED)
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        parts = [branch.parts for branch in stack.branches]
        fields |= {
            f"{name}.branches": ([(part,) for part in like[name]], parts),
            f"{name}.final_norm": (config.norm_placement == "pre", stack.final_norm),
            f"{name}.activation": ("relu", stack.activation),
            f"{name}.positions": (True, stack.positions in sinusoidal),
        }
    wrong = [
        f"{name} is {value!s}" for name, (expected, value) in fields.items() if value != expected
    ]
    if wrong:
        raise SystemExit(
            f"transformers and CTranslate2 have no model like this one: {', '.join(wrong)}"
        )


def named(model: transformer.Transformer) -> Arrays:
    """The model's arrays under the names of transformers' models."""
    result = {}
    for name, leaf in transformer.flatten(model).items():
        array = np.asarray(leaf, np.float32)
        array = array.T if name.endswith("kernel") else array
        if name == "target_embedding.embedding":
            result["model.shared.weight"] = array
            continue
        if name.endswith("positions.table"):
            continue
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        stack = name.split(".")[0]
        name = re.sub(
            r"residuals\.(\d)\.norm",
            lambda match, stack=stack: f"{NORMS[stack][int(match[1])]}_layer_norm",
            name,
        )
        result[f"model.{name}"] = np.ascontiguousarray(array)
    return result


def position_table(model: transformer.Transformer) -> np.ndarray:
    """The rows that our stacks add, (max_length, d_model) float32."""
    table = embeddings.sinusoids(model.config.max_length, model.config.d_model).astype(np.float32)
    return np.asarray(transformer.flatten(model).get("encoder.positions.table", table), np.float32)


def to_transformers(model: transformer.Transformer) -> Any:
    """A PyTorch module of transformers with our weights and positions."""
    import torch
    import transformers

    config = model.config
    common = dict(
        vocab_size=config.target_vocab_size,
        d_model=config.d_model,
        max_position_embeddings=config.max_length,
        scale_embedding=True,
        activation_function="relu",
        pad_token_id=config.target_pad_id,
        bos_token_id=config.bos_id,
        eos_token_id=config.eos_id,
        decoder_start_token_id=config.bos_id,
        forced_eos_token_id=None,
    )
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        common |= {
            f"{name}_layers": stack.layers,
            f"{name}_ffn_dim": config.d_ff,
            f"{name}_attention_heads": config.num_heads,
        }
    table = torch.from_numpy(position_table(model))
    if config.norm_placement is configs.NormPlacement.POST:
        module = transformers.MarianMTModel(transformers.MarianConfig(**common))
        for stack in (module.model.encoder, module.model.decoder):
            stack.embed_positions.weight.data.copy_(table)
    else:
        module = transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**common))
        for stack in (module.model.encoder, module.model.decoder):
            stack.embed_positions.weights[config.target_pad_id + 1 :][: len(table)] = (
                table  # row pad_id is padding's
            )
    result = module.load_state_dict(
        {name: torch.from_numpy(array.copy()) for name, array in named(model).items()}, strict=False
    )
    copies = ("embed_tokens.weight", "lm_head.weight", "final_logits_bias")
    copies += ("embed_positions.weight",)
    left = [name for name in result.missing_keys if not name.endswith(copies)]
    if left := left + result.unexpected_keys:
        raise SystemExit(f"weights that do not fit transformers' model: {', '.join(left)}")
    return module.eval()


def to_ctranslate2(model: transformer.Transformer, folder: Path) -> None:
    """Write a CTranslate2 model folder with our weights and positions; its vocabulary is the
    ids."""
    from ctranslate2 import specs

    config, arrays = model.config, named(model)
    pre_norm = config.norm_placement is configs.NormPlacement.PRE
    spec = specs.TransformerSpec.from_config(
        (config.encoder.layers, config.decoder.layers), config.num_heads, pre_norm=pre_norm
    )

    def linear(target: Any, *names: str) -> None:
        target.weight = np.concatenate([arrays[f"{name}.weight"] for name in names])
        target.bias = np.concatenate([arrays[f"{name}.bias"] for name in names])

    def norm(target: Any, name: str) -> None:
        target.gamma, target.beta = arrays[f"{name}.weight"], arrays[f"{name}.bias"]

    for name, stack in (("encoder", spec.encoder), ("decoder", spec.decoder)):
        embeddings = stack.embeddings[0] if name == "encoder" else stack.embeddings
        embeddings.weight = arrays["model.shared.weight"]
        stack.position_encodings.encodings = position_table(model)
        for i, layer in enumerate(stack.layer):
            here = f"model.{name}.layers.{i}"
            q, k, v, out = (f"{here}.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))
            linear(layer.self_attention.linear[0], q, k, v)
            linear(layer.self_attention.linear[1], out)
            norm(layer.self_attention.layer_norm, f"{here}.self_attn_layer_norm")
            if name == "decoder":
                q, k, v, out = (
                    f"{here}.encoder_attn.{part}_proj" for part in ("q", "k", "v", "out")
                )
                linear(layer.attention.linear[0], q)
                linear(layer.attention.linear[1], k, v)
                linear(layer.attention.linear[2], out)
                norm(layer.attention.layer_norm, f"{here}.encoder_attn_layer_norm")
            linear(layer.ffn.linear_0, f"{here}.fc1")
            linear(layer.ffn.linear_1, f"{here}.fc2")
            norm(layer.ffn.layer_norm, f"{here}.final_layer_norm")
        if pre_norm:
            norm(stack.layer_norm, f"model.{name}.layer_norm")
    spec.decoder.projection.weight = arrays["model.shared.weight"]
    words = [str(i) for i in range(config.target_vocab_size)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = spec.config.decoder_start_token = str(config.bos_id)
    spec.config.eos_token, spec.config.unk_token = str(config.eos_id), str(config.target_pad_id)
    spec.config.layer_norm_epsilon = config.norm_epsilon
    spec.validate()
    spec.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
