"""JoeyNMT's Transformer, under the names of its checkpoints.

Kreutzer, Bastings and Riezler 2019. Facts from ``model.py``, ``encoders.py``, ``decoders.py``,
``transformer_layers.py``, ``embeddings.py`` and ``vocabulary.py`` of JoeyNMT 2.3.0. Without
``layer_norm`` in its options an encoder has norms before the branches and none at its end, and a
decoder norms after them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_transformer.architectures import base
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import TYINGS, TransformerConfig, enums
from jax_transformer.errors import InputError, about_file
from jax_transformer.extras.toolkits import toolkit
from jax_transformer.extras.toolkits.toolkit import Description, Options, Toolkit, Vocabularies
from jax_transformer.storage import untrusted, yaml_data
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Table

CONFIG = "config.yaml"
_LONGEST = 5000
"""Rows of the table of positions, which is a buffer of every checkpoint."""
_LONGEST_CONFIG = 1_000_000
_STATE = "model_state"
_LINEARS = {"query": "q_layer", "key": "k_layer", "value": "v_layer", "out": "output_layer"}
_ATTENTIONS = {
    ("encoder", enums.Part.SELF): "src_src_att",
    ("decoder", enums.Part.SELF): "trg_trg_att",
    ("decoder", enums.Part.CROSS): "src_trg_att",
}
_NORMS = {
    "encoder": ("layer_norm", "feed_forward.layer_norm"),
    "decoder": ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm"),
}
_ACTIVATIONS = {
    "relu": enums.Activation.RELU,
    "gelu": enums.Activation.GELU,
    "swish": enums.Activation.SILU,
}
_STACK_OPTIONS = frozenset(
    "type num_layers num_heads embeddings hidden_size ff_size dropout freeze layer_norm activation"
    " alpha".split()
)
_SPECIALS = {"unk": (0, "<unk>"), "pad": (1, "<pad>"), "bos": (2, "<s>"), "eos": (3, "</s>")}


def weight_table(config: TransformerConfig) -> Table:
    """Return the rules for every name of the module's ``state_dict()``."""
    target = "trg_embed.lut"
    return [
        *toolkit.embeddings(config, "src_embed.lut", target),
        *(rule for name in ("encoder", "decoder") for rule in _stack(name, config)),
        *base.output("decoder.output_layer", f"{target}.weight", config, bias=False),
    ]


def _stack(name: str, config: TransformerConfig) -> Table:
    stack = getattr(config, name)
    torch, flax = f"{name}.layers.{{i}}", f"{name}.blocks.{{i}}"
    layer: Table = []
    for branch, (part,) in enumerate(branch.parts for branch in stack.branches):
        norm = f"{torch}.{_NORMS[name][branch]}"
        layer += rules.layer_norm(norm, f"{flax}.residuals.{branch}.norm")
        if part is enums.Part.FFN:
            inner = f"{torch}.feed_forward.pwff_layer"
            layer += rules.linear(f"{inner}.0", f"{flax}.feed_forward.up")
            layer += rules.linear(f"{inner}.3", f"{flax}.feed_forward.down")
        else:
            module = f"{torch}.{_ATTENTIONS[name, part]}"
            layer += rules.attention(module, f"{flax}.{part.value}", _LINEARS)
    table: Table = [rules.Rule(f"{name}.pe.pe", f"{name}.positions.table", "1 l d -> l d")]
    final = rules.layer_norm(f"{name}.layer_norm", f"{name}.final_norm") if stack.final_norm else []
    return [*table, *rules.repeat(stack.layers, layer), *final]


# Checkpoints


def configuration(model: Options, words: Vocabularies) -> TransformerConfig:
    """Return the configuration. Raises InputError naming every option that no model here has."""
    encoder, decoder = model.section("encoder"), model.section("decoder")
    for stack, kind in ((encoder, "recurrent"), (decoder, "transformer")):
        stack.choice("type", {"transformer": True}, kind)
        stack.check_fixed({"alpha": (1, 1.0)})
        stack.check_known(_STACK_OPTIONS)
    tied_embeddings = model.flag("tied_embeddings", False)
    if tied_embeddings and words.source != words.target:
        raise InputError("tied_embeddings: the vocabularies differ")
    stacks = (encoder, decoder)
    d_model = toolkit.equal("hidden_size", [stack.number("hidden_size", 512) for stack in stacks])
    dropout = toolkit.equal("dropout", [stack.real("dropout", 0.1) for stack in stacks])
    scaled = [stack.section("embeddings").flag("scale", False) for stack in stacks]
    if not tied_embeddings:  # a shared embedding is the encoder's
        toolkit.equal("embeddings.scale", scaled)
    scale, is_pre = enums.EmbeddingScale, {"pre": True, "post": False}
    sides = ((encoder, "pre"), (decoder, "post"))
    norms = [stack.choice("layer_norm", is_pre, usual) for stack, usual in sides]
    pre = toolkit.equal("layer_norm", norms)
    return TransformerConfig(
        **words.config_fields(),
        d_model=d_model,
        num_heads=encoder.number("num_heads", 4),
        d_ff=encoder.number("ff_size", 2048),
        max_length=_LONGEST,
        norm_placement=enums.NormPlacement.PRE if pre else enums.NormPlacement.POST,
        norm_epsilon=1e-6,
        output_bias=False,
        padding_trained=False,
        embedding_scale=scale.SQRT_D_MODEL if scaled[0] else scale.NONE,
        tying=TYINGS[tied_embeddings, model.flag("tied_softmax", False)],
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        embedding_dropout=encoder.section("embeddings").real("dropout", dropout),
        architecture="joeynmt",
        encoder=base.encoder(encoder.layers("num_layers", 8), **_sizes(encoder, 4, pre)),
        decoder=base.decoder(decoder.layers("num_layers", 4), **_sizes(decoder, 8, pre)),
    )


def _sizes(stack: Options, heads: int, pre: bool) -> dict[str, Any]:
    return {
        "num_heads": stack.number("num_heads", heads),
        "d_ff": stack.number("ff_size", 2048),
        "activation": stack.choice("activation", _ACTIVATIONS, "relu"),
        "positions": enums.Positions.SINUSOIDAL_STORED,
        "final_norm": pre and "layer_norm" in stack.values,
    }


def _vocabularies(lines: Sequence[Sequence[str]], symbols: Options) -> Vocabularies:
    """Return both vocabularies: the special tokens, language tags, and the lines of the files."""
    values = symbols.values
    roles = {role: values.get(f"{role}_token", text) for role, (_, text) in _SPECIALS.items()}
    others = [values.get("sep_token"), *(values.get("lang_tags") or [])]
    first = [*roles.values(), *(token for token in others if token is not None)]
    if not all(isinstance(token, str) for token in first):
        raise InputError("special_symbols are not text")
    source, target = (tuple(dict.fromkeys([*first, *tokens])) for tokens in lines)
    for role, (number, _) in _SPECIALS.items():
        if source.index(roles[role]) != symbols.number(f"{role}_id", number):
            raise InputError(f"{role}_id is not the id of {role}_token")
    return Vocabularies(source, target, roles["pad"], roles["bos"], roles["eos"], roles["unk"])


class JoeyNMT(Toolkit):
    name, toolkit = "joeynmt", "JoeyNMT"

    def recognises_content(self, content: Mapping[str, Any]) -> bool:
        state = content.get(_STATE)
        return isinstance(state, dict) and "src_embed.lut.weight" in state

    def describe(self, path: Path, content: Mapping[str, Any]) -> Description:
        file = path.parent / CONFIG
        if not file.is_file():
            raise InputError(f"{file}: missing; JoeyNMT writes it next to its checkpoints")
        content = yaml_data.read(file, longest=_LONGEST_CONFIG)
        files = [path.with_name(f"{side}_vocab.txt") for side in ("src", "trg")]
        lines = [untrusted.read_lines(file) for file in files]
        with about_file(file):
            options = Options(content)
            words = _vocabularies(lines, options.section("data").section("special_symbols"))
            config = configuration(options.section("model"), words)
        return Description(config, {"": (_STATE,)}, {}, words, (file, *files))


FORMAT = JoeyNMT()

ARCHITECTURE = Architecture(
    name="joeynmt",
    source="Kreutzer, Bastings and Riezler 2019, Joey NMT (its checkpoints)",
    weight_table=weight_table,
)
