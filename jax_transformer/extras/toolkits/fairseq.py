"""fairseq's Transformer for translation, under the names of its checkpoints.

Ott et al. 2019. Facts from ``models/transformer/`` (``transformer_config.py``,
``transformer_legacy.py``, ``transformer_encoder.py``, ``transformer_decoder.py``),
``modules/transformer_layer.py``, ``modules/sinusoidal_positional_embedding.py``,
``data/dictionary.py`` and ``trainer.py`` of fairseq 0.12.2. Positions count tokens that are not
padding, from the row after that of padding, and a translation begins with the token that ends one.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_transformer.architectures import bart, base
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TYINGS, TransformerConfig, enums
from jax_transformer.errors import InputError, about_file
from jax_transformer.extras.toolkits import toolkit
from jax_transformer.extras.toolkits.toolkit import Description, Options, Toolkit, Vocabularies
from jax_transformer.storage import untrusted
from jax_transformer.storage.untrusted import shown
from jax_transformer.weights.rules import Table

_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_PAD, _EOS = 1, 2
_ACTIVATIONS = {
    "relu": enums.Activation.RELU,
    "gelu": enums.Activation.GELU,
    "gelu_accurate": enums.Activation.GELU_TANH,
    "gelu_fast": enums.Activation.GELU_TANH,
}
_FIXED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """adaptive_input no_cross_attention cross_self_attention no_token_positional_embeddings
        char_inputs scale_fc scale_attn scale_heads scale_resids""".split(),
        (False,),
    ),
    **dict.fromkeys(("quant_noise_pq", "moe_freq", "base_layers"), (0,)),
    **dict.fromkeys(
        ("adaptive_softmax_cutoff", "encoder_layers_to_keep", "decoder_layers_to_keep"), (None,)
    ),
}
"""Options of one value; others act in training only, or change names, which are compared."""
_NO_WEIGHTS = {
    r"(encoder|decoder)\.version": "counts versions of fairseq's format",
    r"(encoder|decoder)\.embed_positions\.(weights|_float_tensor)": (
        "is computed: sines and cosines"
    ),
    r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)": (
        "is filled from the weights by fairseq's fast path"
    ),
}


def weight_table(config: TransformerConfig) -> Table:
    """Return the rules for the weights in the module's ``state_dict()``."""
    source, target = "encoder.embed_tokens", "decoder.embed_tokens"
    return [
        *toolkit.embeddings(config, source, target),
        *bart.stacks(config, prefix=""),
        *base.output("decoder.output_projection", f"{target}.weight", config, bias=False),
    ]


# Checkpoints


def _sections(content: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the options of model and task: of ``cfg``, or before fairseq 0.10 of ``args``."""
    cfg = content.get("cfg")
    if isinstance(cfg, dict) and isinstance(cfg.get("model"), dict):
        return cfg["model"], cfg.get("task") or {}
    args = content.get("args")
    return (args, args) if isinstance(args, dict) else None


def _rows(state: Mapping[str, Any], name: str) -> int:
    shape: tuple[int, ...] = getattr(state.get(name), "shape", ())
    if len(shape) != 2 or shape[0] <= len(_SPECIALS):
        raise InputError(f"{name} is not an embedding")
    return shape[0]


def configuration(model: Options, source_size: int, target_size: int) -> TransformerConfig:
    """Return the configuration. Raises InputError naming every option that no model here has."""
    model.check_fixed(_FIXED)
    width = model.number("encoder_embed_dim", 512)
    for name in ("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"):
        if model.number(name, width) != width:
            raise InputError(f"{name} is not encoder_embed_dim={width}")
    pre = [model.flag(f"{side}_normalize_before", False) for side in ("encoder", "decoder")]
    learned = [model.flag(f"{side}_learned_pos", False) for side in ("encoder", "decoder")]
    longest = [model.number(f"max_{side}_positions", 1024) for side in ("source", "target")]
    toolkit.equal("normalize_before", pre)
    if toolkit.equal("learned_pos", learned):
        toolkit.equal("max_positions", longest)
    norms = [pre[0], pre[1] and not model.flag("no_decoder_final_norm", False)]
    stacks = [
        make(
            model.layers(f"{side}_layers", 6),
            num_heads=model.number(f"{side}_attention_heads", 8),
            d_ff=model.number(f"{side}_ffn_embed_dim", 2048),
            activation=model.choice("activation_fn", _ACTIVATIONS, "relu"),
            positions=enums.Positions.LEARNED if learned[0] else enums.Positions.SINUSOIDAL,
            sinusoids=enums.Sinusoids.TENSOR2TENSOR,
            position_index=enums.PositionIndex.NOT_PADDING,
            position_offset=_PAD + 1,
            embedding_norm=model.flag("layernorm_embedding", False),
            final_norm=final_norm,
        )
        for side, make, final_norm in zip(
            ("encoder", "decoder"), (base.encoder, base.decoder), norms, strict=True
        )
    ]
    shared = model.flag("share_all_embeddings", False)
    tied = model.flag("share_decoder_input_output_embed", False)
    scaled = not model.flag("no_scale_embedding", False)
    dropout = model.real("dropout", 0.1)
    return TransformerConfig(
        source_vocab_size=source_size,
        target_vocab_size=target_size,
        source_pad_id=_PAD,
        target_pad_id=_PAD,
        bos_id=_EOS,
        eos_id=_EOS,
        d_model=width,
        num_heads=stacks[0].num_heads or 0,
        d_ff=stacks[0].d_ff or 0,
        max_length=min(longest),
        norm_placement=enums.NormPlacement.PRE if pre[0] else enums.NormPlacement.POST,
        output_bias=False,
        padding_trained=False,
        embedding_scale=enums.EmbeddingScale.SQRT_D_MODEL if scaled else enums.EmbeddingScale.NONE,
        tying=TYINGS[shared, shared or tied],
        dropout=dropout,
        attention_dropout=model.real("attention_dropout", 0.0),
        activation_dropout=model.real("activation_dropout", 0.0),
        embedding_dropout=dropout,
        architecture="fairseq",
        encoder=stacks[0],
        decoder=stacks[1],
    )


def _dictionary(path: Path, size: int) -> tuple[str, ...]:
    """Return the tokens of a dictionary: four special ones, and those of lines ``token count``."""
    words = []
    for number, line in enumerate(untrusted.read_lines(path), 1):
        word, _, count = line.rstrip().rpartition(" ")
        if line.strip() and (not word or not count.isdecimal()):
            raise InputError(f"{path}: line {number}: {shown(line)} is not a token and its count")
        words += [word] if word else []
    tokens = (*_SPECIALS, *words)
    if len(set(tokens)) != len(tokens):
        raise InputError(f"{path}: has a token twice")
    if len(tokens) != size:
        raise InputError(f"{path}: has {len(tokens):,} tokens, and the model's embedding {size:,}")
    return tokens


class Fairseq(Toolkit):
    name, toolkit = "fairseq", "fairseq"

    def recognises_content(self, content: Mapping[str, Any]) -> bool:
        state = content.get("model")
        named = isinstance(state, dict) and "decoder.embed_tokens.weight" in state
        return named and _sections(content) is not None

    def describe(self, path: Path, content: Mapping[str, Any]) -> Description:
        sections = _sections(content)
        assert sections is not None  # it was recognised
        state = content["model"]
        with about_file(path):
            model, task = (Options(section) for section in sections)
            sizes = [_rows(state, f"{side}.embed_tokens.weight") for side in ("encoder", "decoder")]
            config = configuration(model, sizes[0], sizes[1])
        ignored = {
            name: reason
            for name in state
            for pattern, reason in _NO_WEIGHTS.items()
            if re.fullmatch(pattern, name)
        }
        languages = [task.values.get(f"{side}_lang") for side in ("source", "target")]
        files = [path.parent / f"dict.{language}.txt" for language in languages]
        if not all(re.fullmatch(r"dict\.[\w-]{1,40}\.txt", file.name, re.ASCII) for file in files):
            raise InputError(f"{path}: source_lang and target_lang are not names of languages")
        words = None
        if all(file.is_file() for file in files):
            source, target = (
                _dictionary(file, size) for file, size in zip(files, sizes, strict=True)
            )
            end = _SPECIALS[_EOS]
            words = Vocabularies(source, target, _SPECIALS[_PAD], end, end, _SPECIALS[-1])
        return Description(config, {"": ("model",)}, ignored, words, tuple(files) if words else ())


FORMAT = Fairseq()

ARCHITECTURE = Architecture(
    name="fairseq",
    source="Ott et al. 2019, fairseq (its checkpoints of translation)",
    weight_table=weight_table,
)
