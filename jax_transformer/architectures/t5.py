"""T5, T5 v1.1 and Flan-T5, and what mT5, UMT5 and LongT5 share with them.

Raffel et al. 2020. A layer is a list of branches, each a module and its norm; positions are
distances, of which T5 and mT5 keep a stack's table in its first layer and UMT5 one in every layer.
Facts from ``configuration_t5.py``, ``modeling_t5.py`` and ``tokenization_t5.py`` of transformers
5.23.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jax_transformer.architectures import base, huggingface, huggingface_config, tokenizer_recipe
from jax_transformer.architectures.huggingface import STACKS, HuggingFaceFamily
from jax_transformer.architectures.tokenizer_recipe import Scored, Settings, TokenizerRecipe
from jax_transformer.config import RATES, TransformerConfig, enums
from jax_transformer.errors import ConfigError
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Rule, Table

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    # T5Config has none; every T5 starts with padding
    **huggingface.special_tokens(pad=0, bos=None, eos=1, start=0),
}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
DERIVED = {"dense_act_fn": "relu", "is_gated_act": False}
UNBOUNDED = 32_768
"""The ``max_length`` of these models: they add nothing to embeddings, and all long distances share
a bucket.
"""
_LINEARS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_SELF = {
    enums.AttentionSpan.FULL: "SelfAttention",
    enums.AttentionSpan.LOCAL: "LocalSelfAttention",
    enums.AttentionSpan.TRANSIENT_GLOBAL: "TransientGlobalSelfAttention",
}
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def _sentinels(settings: Settings) -> Sequence[str]:
    return [f"<extra_id_{i}>" for i in range(settings.number("extra_ids", 100))]


def _arrange(scored: Scored, tokens: Mapping[str, str], own: Sequence[str]) -> Scored:
    """Put the sentinels after the file's pieces, the last one first."""
    return tokenizer_recipe.arranged((), scored, own[::-1])


TOKENIZER = TokenizerRecipe(
    name="T5",
    other_classes=("MT5Tokenizer",),
    algorithm=tokenizer_recipe.Algorithm.REBUILT_PIECES,
    files=("spiece.model",),
    pieces=tokenizer_recipe.RebuiltPieces(arrange=_arrange, unknown_id=2, splits_words=True),
    tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    own_tokens=_sentinels,
    start="pad_token",
)


class T5Family(HuggingFaceFamily):
    """A family whose stacks have T5's attributes and names."""

    positions = enums.Positions.RELATIVE
    scales_logits = True
    """``scale_decoder_outputs`` decides if logits are scaled; False if the family never does it."""
    longest = 512
    """The longest source and target, in tokens, with which the models were trained."""
    defaults: Mapping[str, Any] = DEFAULTS
    derived: Mapping[str, Any] = DERIVED | {"scale_decoder_outputs": True}
    aliases: Mapping[str, str] = ALIASES
    ignored = {"n_positions": "bounds nothing: there is no table of positions"}
    not_written = (*HuggingFaceFamily.not_written, "max_length")
    embedding_tensors = ("shared.weight",)
    tensors_decide_tie = True
    ties_always = True
    shared_rates = ("embedding_dropout", "attention_dropout", "activation_dropout")
    unused_tensors = {
        _UNUSED: "belongs to attention between the stacks, which has no distances in transformers"
    }
    tokenizers = (TOKENIZER,)

    def usual_length(self, config: TransformerConfig) -> int:
        """Return the longest source and target: positions have no end."""
        return self.longest if config.max_length == UNBOUNDED else config.longest

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes with the logits' scale, which version 1's tied output implies."""
        if not self.scales_logits:
            return dict(values)
        return {"scale_decoder_outputs": values["tie_word_embeddings"], **values}

    def to_transformer_config(self, values: Mapping[str, Any]) -> TransformerConfig:
        activation, gated = _feed_forward(values)
        layers = values["num_layers"]
        fields: dict[str, Any] = {
            "positions": self.positions,
            "relative_buckets": values["relative_attention_num_buckets"],
            "relative_max_distance": values["relative_attention_max_distance"],
            "activation": activation,
            "gated": gated,
            "final_norm": True,
        }
        scaled = self.scales_logits and values["scale_decoder_outputs"]
        return TransformerConfig(
            source_vocab_size=values["vocab_size"],
            target_vocab_size=values["vocab_size"],
            d_model=values["d_model"],
            num_heads=values["num_heads"],
            head_dim=values["d_kv"],
            d_ff=values["d_ff"],
            max_length=UNBOUNDED,
            norm=enums.Norm.RMS,
            norm_placement=enums.NormPlacement.PRE,
            norm_epsilon=values["layer_norm_epsilon"],
            bias=False,
            output_bias=False,
            logit_scale=enums.LogitScale.INVERSE_SQRT_D_MODEL if scaled else enums.LogitScale.NONE,
            score_scale=enums.ScoreScale.NONE,
            embedding_scale=enums.EmbeddingScale.NONE,
            tying=enums.Tying.ALL if values["tie_word_embeddings"] else enums.Tying.EMBEDDINGS,
            **dict.fromkeys(RATES, values["dropout_rate"]),
            final_dropout=True,
            architecture=self.name,
            **huggingface_config.special_ids(values),
            encoder=huggingface.stack("encoder", layers, **fields),
            decoder=huggingface.stack("decoder", values["num_decoder_layers"] or layers, **fields),
        )

    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        encoder = config.encoder
        activation = huggingface_config.activation_name(encoder.activation)
        # transformers reads gated GELU as the approximation, and GELU without a gate as exact
        gelu = encoder.gated and encoder.activation is enums.Activation.GELU_TANH
        projection = "gelu" if gelu else activation
        values = {
            "d_kv": config.head_width,
            "d_ff": encoder.d_ff or config.d_ff,
            "num_layers": encoder.layers,
            "num_decoder_layers": config.decoder.layers,
            "num_heads": config.heads(encoder),
            "relative_attention_num_buckets": encoder.relative_buckets,
            "relative_attention_max_distance": encoder.relative_max_distance,
            "dropout_rate": config.dropout,
            "layer_norm_epsilon": config.norm_epsilon,
            "feed_forward_proj": f"gated-{projection}" if encoder.gated else projection,
            "dense_act_fn": activation,
            "is_gated_act": encoder.gated,
        }
        if self.scales_logits:
            scale = config.logit_scale
            values["scale_decoder_outputs"] = scale is enums.LogitScale.INVERSE_SQRT_D_MODEL
        return values

    def weight_table(self, config: TransformerConfig) -> Table:
        return [
            *rules.embedding("shared", "target_embedding"),
            *(Alias(f"{stack}.embed_tokens.weight", "shared.weight") for stack in STACKS),
            *_stack("encoder", config),
            *_stack("decoder", config),
            *base.output("lm_head", "shared.weight", config, bias=False),
        ]


def _feed_forward(values: Mapping[str, Any]) -> tuple[enums.Activation, bool]:
    """Return the activation, and True for a gated feed-forward.

    Files of later versions name the two separately, and these attributes win.
    """
    gated, _, name = values["feed_forward_proj"].rpartition("-")
    if gated not in ("", "gated"):
        raise ConfigError(
            f"feed_forward_proj={values['feed_forward_proj']!r} is neither an activation nor gated-"
            " and one"
        )
    # The one exception of its configuration: gated GELU is the approximation
    named = "gelu_new" if (gated, name) == ("gated", "gelu") else name
    activation = huggingface_config.activation_named(values.get("dense_act_fn", named))
    return activation, values.get("is_gated_act", bool(gated))


def _stack(name: str, config: TransformerConfig) -> Table:
    stack = getattr(config, name)
    flax, layer = f"{name}.blocks.{{i}}", []
    attentions = {enums.Part.SELF: _SELF[stack.attention_span], enums.Part.CROSS: "EncDecAttention"}
    has_sums = stack.attention_span is enums.AttentionSpan.TRANSIENT_GLOBAL
    for branch, (part,) in enumerate(branch.parts for branch in stack.branches):
        torch = f"{name}.block.{{i}}.layer.{branch}"
        if part is enums.Part.FFN:
            inputs = {"up": "wi_0", "gate": "wi_1"} if stack.gated else {"up": "wi"}
            for ours, theirs in (inputs | {"down": "wo"}).items():
                module, own = f"{torch}.DenseReluDense.{theirs}", f"{flax}.feed_forward.{ours}"
                layer += rules.linear(module, own, bias=False)
        else:
            module, own = f"{torch}.{attentions[part]}", f"{flax}.{part.value}"
            layer += rules.attention(module, own, _LINEARS, bias=False)
            if part is enums.Part.SELF and has_sums:
                norm = f"{module}.global_input_layer_norm"
                layer += rules.layer_norm(norm, f"{own}.global_norm", bias=False)
        norm = f"{flax}.residuals.{branch}.norm"
        layer += rules.layer_norm(f"{torch}.layer_norm", norm, bias=False)
    attention = f"{name}.block.{{i}}.layer.0.{attentions[enums.Part.SELF]}"
    relative = f"{attention}.relative_attention_bias.weight"
    shared: Table = []
    if stack.positions is enums.Positions.RELATIVE_PER_BLOCK:
        layer.append(Rule(relative, (f"{flax}.relative.embedding",)))
    if stack.positions is enums.Positions.RELATIVE:
        shared.append(Rule(relative.format(i=0), (f"{name}.relative.embedding",)))
    if has_sums:
        of_sums = relative.format(i=0).replace(".relative_", ".global_relative_")
        shared.append(Rule(of_sums, (f"{name}.global_relative.embedding",)))
    return [
        *rules.repeat(stack.layers, layer),
        *shared,
        *rules.layer_norm(f"{name}.final_layer_norm", f"{name}.final_norm", bias=False),
    ]


class T5(T5Family):
    name = "t5"
    title = "T5, T5 v1.1, Flan-T5"
    source = "Raffel et al. 2020, T5 (transformers' t5)"
    model_class = "T5ForConditionalGeneration"
    classes = (model_class, "T5Model", "T5WithLMHeadModel")


ARCHITECTURE = T5(
    "T5 small (Raffel et al. 2020), with heads of d_model / num_heads, and no limit of positions.",
)
