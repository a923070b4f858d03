"""OpenNMT-py's Transformer, under the names of its checkpoints.

Klein et al. 2017. Facts from ``model_builder.py``, ``encoders/transformer.py``,
``decoders/transformer.py``, ``modules/`` (``embeddings.py``, ``multi_headed_attn.py``,
``position_ffn.py``), ``models/model_saver.py`` and ``inputters/text_utils.py`` of OpenNMT-py 3.5.1.
A source has no token at its end there.
"""

import glob
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.architectures import base
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TYINGS, TransformerConfig, enums
from jax_transformer.errors import InputError, about_file
from jax_transformer.extras.toolkits import toolkit
from jax_transformer.extras.toolkits.toolkit import Description, Options, Toolkit, Vocabularies
from jax_transformer.storage.untrusted import shown
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Table

_LONGEST = 5000
"""Rows of the table of positions, which is a buffer of every checkpoint."""
_WORDS = "{}.embeddings.make_embedding.emb_luts.0"
_LINEARS = {
    "query": "linear_query",
    "key": "linear_keys",
    "value": "linear_values",
    "out": "final_linear",
}
_LAYERS = {"encoder": "encoder.transformer.{i}", "decoder": "decoder.transformer_layers.{i}"}
_ATTENTIONS = {enums.Part.SELF: "self_attn", enums.Part.CROSS: "context_attn"}
_NORMS = {
    "encoder": ("layer_norm", "feed_forward.layer_norm"),
    "decoder": ("layer_norm_1", "layer_norm_2", "feed_forward.layer_norm"),
}
_ACTIVATIONS = {
    "relu": (enums.Activation.RELU, False),
    "gelu": (enums.Activation.GELU, False),
    "silu": (enums.Activation.SILU, True),
    "gated-gelu": (enums.Activation.GELU, True),
}
_SINUSOIDS = {
    "SinusoidalInterleaved": enums.Sinusoids.INTERLEAVED,
    "SinusoidalConcat": enums.Sinusoids.TENSOR2TENSOR,
}
_NORM_KINDS = {"standard": enums.Norm.LAYER, "rms": enums.Norm.RMS}
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_task": ("seq2seq",),
    "model_type": ("text",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "generator_function": ("softmax",),
    **dict.fromkeys(
        """max_relative_positions relative_positions_buckets num_kv num_experts sliding_window
        n_src_feats""".split(),
        (0,),
    ),
    **dict.fromkeys("parallel_residual copy_attn lora_embedding aan_useffn".split(), (False,)),
    **dict.fromkeys(("lora_layers", "quant_layers"), ([],)),
}
"""Options of one value; others act in training only, or change names, which are compared."""
_FFN_BIAS = re.compile(r"\.feed_forward\.w_[123]\.bias$")
_ROLES = {"pad": "<blank>", "eos": "</s>", "unknown": "<unk>"}


def weight_table(config: TransformerConfig) -> Table:
    """Return the rules for every name of the module's ``state_dict()``, ``generator.`` too."""
    source, target = (_WORDS.format(side) for side in ("encoder", "decoder"))
    output = base.output("generator", f"{target}.weight", config, bias=True)
    stacks = [rule for name in ("encoder", "decoder") for rule in _stack(name, config)]
    return [*toolkit.embeddings(config, source, target), *stacks, *output]


def _stack(name: str, config: TransformerConfig) -> Table:
    stack = getattr(config, name)
    torch, flax = _LAYERS[name], f"{name}.blocks.{{i}}"
    with_bias = config.norm is enums.Norm.LAYER
    layer: Table = []
    for branch, (part,) in enumerate(branch.parts for branch in stack.branches):
        norm = f"{torch}.{_NORMS[name][branch]}"
        layer += rules.layer_norm(norm, f"{flax}.residuals.{branch}.norm", bias=with_bias)
        if part is enums.Part.FFN:
            inner = {"w_1": "up", "w_2": "down"} | ({"w_3": "gate"} if stack.gated else {})
            for theirs, ours in inner.items():
                module = f"{torch}.feed_forward.{theirs}"
                layer += rules.linear(module, f"{flax}.feed_forward.{ours}", bias=config.bias)
        else:
            module, biases = f"{torch}.{_ATTENTIONS[part]}", bool(config.attention_bias)
            layer += rules.attention(module, f"{flax}.{part.value}", _LINEARS, bias=biases)
    table = f"{name}.embeddings.make_embedding.pe.pe"
    positions: Table = []
    if stack.positions is enums.Positions.SINUSOIDAL_STORED:
        positions.append(rules.Rule(table, f"{name}.positions.table", "l 1 d -> l d"))
    final = rules.layer_norm(f"{name}.layer_norm", f"{name}.final_norm", bias=with_bias)
    return [*positions, *rules.repeat(stack.layers, layer), *final]


# Checkpoints


def _weights(path: Path) -> tuple[Path, ...]:
    """Return the weights next to a checkpoint: one file of its name, or parts with numbers."""
    name = path.name.removesuffix(".pt")
    one = path.with_name(f"{name}.safetensors")
    parts = sorted(path.parent.glob(f"{glob.escape(name)}.*.safetensors"))
    if parts and one.is_file():
        raise InputError(f"has no weights, and both {one.name} and {parts[0].name} have some")
    if not parts and not one.is_file():
        raise InputError(f"has no weights, and {one.name} is not next to it")
    return tuple(parts) or (one,)


def configuration(options: Options, words: Vocabularies) -> TransformerConfig:
    """Return the configuration. Raises InputError naming every option that no model here has."""
    options.check_fixed(_FIXED)
    width = options.number("enc_hid_size", options.values.get("hidden_size"))
    for name in ("dec_hid_size", "src_word_vec_size", "tgt_word_vec_size"):
        if options.number(name, width) != width:
            raise InputError(f"{name} is not enc_hid_size={width}")
    norm = options.choice("layer_norm", _NORM_KINDS, "standard")
    bias, scale = norm is enums.Norm.LAYER, enums.EmbeddingScale
    if options.flag("add_ffnbias", True) and not bias:
        raise InputError("add_ffnbias=True: with rms norms no layer has biases here")
    positions = options.flag("position_encoding", False)
    activation, gated = options.choice("pos_ffn_activation_fn", _ACTIVATIONS, "relu")
    shared: dict[str, Any] = {
        "activation": activation,
        "gated": gated,
        "positions": enums.Positions.SINUSOIDAL_STORED if positions else enums.Positions.NONE,
        "sinusoids": options.choice("position_encoding_type", _SINUSOIDS, "SinusoidalInterleaved"),
        "final_norm": True,
    }
    shared_embeddings = options.flag("share_embeddings", False)
    tying = TYINGS[shared_embeddings, options.flag("share_decoder_embeddings", False)]
    dropout = options.real("dropout", 0.3)
    return TransformerConfig(
        **words.config_fields(),
        d_model=width,
        num_heads=options.number("heads", 8),
        d_ff=options.number("transformer_ff", 2048),
        max_length=_LONGEST,
        norm=norm,
        norm_placement=enums.NormPlacement.PRE,
        norm_epsilon=options.real("norm_eps", 1e-6),
        bias=bias,
        attention_bias=options.flag("add_qkvbias", False),
        output_bias=True,
        padding_trained=False,
        embedding_scale=scale.SQRT_D_MODEL if positions else scale.NONE,
        tying=tying,
        dropout=dropout,
        attention_dropout=options.real("attention_dropout", dropout),
        activation_dropout=dropout,
        embedding_dropout=dropout,
        architecture="opennmt_py",
        encoder=base.encoder(options.layers("enc_layers", 2), **shared),
        decoder=base.decoder(options.layers("dec_layers", 2), **shared),
    )


def _vocabularies(vocab: Mapping[str, Any]) -> Vocabularies:
    """Return the two lists of tokens. Raises InputError if they are not text, or lack a token."""
    if vocab.get("src_feats") or vocab.get("data_task", "seq2seq") != "seq2seq":
        raise InputError("vocab: features of the source, or a language model, are not supported")
    begin = vocab.get("decoder_start_token") or "<s>"
    if not isinstance(begin, str):
        raise InputError(f"vocab: decoder_start_token is {shown(begin)}, and no text")
    sides = []
    for side in ("src", "tgt"):
        tokens = vocab.get(side)
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise InputError(f"vocab: {side} is not a list of tokens")
        missing = [token for token in (*_ROLES.values(), begin) if token not in tokens]
        if missing or len(set(tokens)) != len(tokens):
            raise InputError(f"vocab: {side} has a token twice, or has no {', '.join(missing)}")
        sides.append(tuple(tokens))
    source, target = sides
    return Vocabularies(source, target, bos=begin, source_ends=False, **_ROLES)


class OpenNMTPy(Toolkit):
    name, toolkit = "opennmt_py", "OpenNMT-py"

    def recognises_content(self, content: Mapping[str, Any]) -> bool:
        parts, vocab = ["opt", "vocab"], content.get("vocab")
        if "model" in content:
            parts += ["model", "generator"]
        elif not isinstance(vocab, dict) or "src" not in vocab:  # save_format: safetensors
            return False
        return all(isinstance(content.get(part), dict) for part in parts)

    def describe(self, path: Path, content: Mapping[str, Any]) -> Description:
        with about_file(path):
            words = _vocabularies(content["vocab"])
            options = Options(content["opt"])
            config = configuration(options, words)
            zero: tuple[str, ...] = ()
            if not options.flag("add_ffnbias", True):
                names = [rule.torch for rule in weight_table(config)]
                zero = tuple(filter(_FFN_BIAS.search, names))
            states, weights = {"": ("model",), "generator.": ("generator",)}, tuple[Path, ...]()
            if "model" not in content:
                states, weights = {}, _weights(path)
        return Description(config, states, zero=zero, vocabularies=words, weights=weights)


FORMAT = OpenNMTPy()

ARCHITECTURE = Architecture(
    name="opennmt_py",
    source="Klein et al. 2017, OpenNMT (checkpoints of OpenNMT-py)",
    weight_table=weight_table,
)
