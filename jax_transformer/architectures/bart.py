"""BART, and what the families that follow it share: mBART, Marian, M2M100 with NLLB, Pegasus.

Lewis et al. 2020. Facts from ``configuration_bart.py``, ``modeling_bart.py`` and
``tokenization_roberta.py`` of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

from jax_transformer.architectures import base, huggingface, huggingface_config
from jax_transformer.architectures.huggingface import STACKS, HuggingFaceFamily
from jax_transformer.architectures.tokenizer_recipe import Algorithm, TokenizerRecipe
from jax_transformer.config import TYINGS, TransformerConfig, enums
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Rule, Table


def sizes(**of_both: int) -> dict[str, int]:
    """Return the attributes of both stacks: ``layers``, ``ffn_dim`` and ``attention_heads``."""
    return {f"{stack}_{name}": size for stack in STACKS for name, size in of_both.items()}


DEFAULTS: dict[str, Any] = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "d_model": 1024,
    **sizes(layers=12, ffn_dim=4096, attention_heads=16),
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "scale_embedding": False,
    "tie_word_embeddings": True,
    **huggingface.special_tokens(pad=1, bos=0, eos=2, start=2),
}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
SHARED = "model.shared.weight"
TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_READ_BY_OTHERS = ("normalize_before", "normalize_embedding")
_LINEARS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
_ATTENTIONS = {enums.Part.SELF: "self_attn", enums.Part.CROSS: "encoder_attn"}


class BartFamily(HuggingFaceFamily):
    """A family whose stacks have BART's attributes and names."""

    stack: Mapping[str, Any]
    """Fields of both stacks; with a final norm, norms stand before the branches."""
    decoder_stack: Mapping[str, Any] = {}
    """Fields that the decoder has otherwise."""
    logits_bias = True
    """The module has ``final_logits_bias``."""
    defaults: Mapping[str, Any] = DEFAULTS
    aliases: Mapping[str, str] = ALIASES
    prefix = "model."
    embedding_tensors: tuple[str, ...] = (SHARED, "model.decoder.embed_tokens.weight")

    def weight_table(self, config: TransformerConfig) -> Table:
        table: Table = []
        if config.logits_bias:
            table.append(Rule("final_logits_bias", "logits_bias", "1 v -> v"))
        if config.tying.one_embedding:
            table += rules.embedding("model.shared", "target_embedding")
            table += [Alias(f"model.{name}.embed_tokens.weight", SHARED) for name in STACKS]
        else:
            table += rules.embedding("model.encoder.embed_tokens", "source_embedding")
            table += rules.embedding("model.decoder.embed_tokens", "target_embedding")
        table += stacks(config)
        one = config.tying is enums.Tying.ALL
        tied = SHARED if one else "model.decoder.embed_tokens.weight"
        return [*table, *base.output("lm_head", tied, config, bias=False)]

    def vocabularies(self, values: Mapping[str, Any]) -> tuple[int, int, bool]:
        """Return the source's and target's vocabulary sizes, and if they have one embedding."""
        return values["vocab_size"], values["vocab_size"], True

    def to_transformer_config(self, values: Mapping[str, Any]) -> TransformerConfig:
        return TransformerConfig(**self.config_fields(values))

    def config_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the configuration of a model with these attributes."""
        activation = huggingface_config.activation_named(values["activation_function"])
        ids = huggingface_config.special_ids(values)
        counted = self.stack.get("position_index") is enums.PositionIndex.NOT_PADDING
        # fairseq's positions that are counted begin after padding's row
        offset = {"position_offset": ids["source_pad_id"] + 1} if counted else {}
        stacks = {}
        for name in STACKS:
            own = self.decoder_stack if name == "decoder" else {}
            stacks[name] = huggingface.stack(
                name,
                values[f"{name}_layers"],
                num_heads=values[f"{name}_attention_heads"],
                d_ff=values[f"{name}_ffn_dim"],
                activation=activation,
                **{**self.stack, **offset, **own},
            )
        source_size, target_size, shared = self.vocabularies(values)
        pre_norm, scale = self.stack.get("final_norm"), enums.EmbeddingScale
        return {
            "source_vocab_size": source_size,
            "target_vocab_size": target_size,
            "d_model": values["d_model"],
            "num_heads": values["encoder_attention_heads"],
            "d_ff": values["encoder_ffn_dim"],
            "max_length": values["max_position_embeddings"],
            "norm_placement": enums.NormPlacement.PRE if pre_norm else enums.NormPlacement.POST,
            "output_bias": False,
            "logits_bias": self.logits_bias,
            "padding_trained": False,
            "embedding_scale": scale.SQRT_D_MODEL if values["scale_embedding"] else scale.NONE,
            "tying": TYINGS[shared, values["tie_word_embeddings"]],
            "dropout": values["dropout"],
            "attention_dropout": values["attention_dropout"],
            "activation_dropout": values["activation_dropout"],
            "embedding_dropout": values["dropout"],
            "architecture": self.name,
            **ids,
            **stacks,
        }

    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
            values[f"{name}_layers"] = stack.layers
            values[f"{name}_attention_heads"] = config.heads(stack)
            values[f"{name}_ffn_dim"] = stack.d_ff or config.d_ff
        return values | {
            "max_position_embeddings": config.max_length,
            "activation_function": huggingface_config.activation_name(config.encoder.activation),
            "dropout": config.dropout,
            "attention_dropout": config.attention_dropout,
            "activation_dropout": config.activation_dropout,
            "scale_embedding": config.embedding_scale is enums.EmbeddingScale.SQRT_D_MODEL,
            # Not read by transformers, but by ct2-transformers-converter, as in published files
            **{name: self.fixed[name] for name in _READ_BY_OTHERS if name in self.fixed},
        }


def fixed(
    *, pre_norm: bool = False, embedding_norm: bool = False, computed_positions: bool = False
) -> dict[str, Any]:
    """Return the attributes of a family's blocks in old files, with one value in each family.

    With ``pre_norm``, norms also stand after the stacks. Old files of families whose positions are
    computed name other numbers of extra rows, which their tables never had.
    """
    return {
        "normalize_before": pre_norm,
        "add_final_layer_norm": pre_norm,
        "normalize_embedding": embedding_norm,
        "static_position_embeddings": computed_positions,
        "do_blenderbot_90_layernorm": False,
    } | ({} if computed_positions else {"extra_pos_embeddings": 2})


NO_EXTRA_ROWS = {"extra_pos_embeddings": "counts rows that a computed table of positions never had"}


def stacks(config: TransformerConfig, prefix: str = "model.") -> Table:
    """Return the rules for the names of both stacks without their embeddings."""
    table: Table = []
    for name, stack in (("encoder", config.encoder), ("decoder", config.decoder)):
        torch, flax = f"{prefix}{name}", f"{name}.blocks.{{i}}"
        if stack.positions in (enums.Positions.SINUSOIDAL_STORED, enums.Positions.LEARNED):
            positions = (f"{name}.positions.table",)
            table.append(Rule(f"{torch}.embed_positions.weight", positions, "(part l) d -> l d"))
        if stack.embedding_norm:
            table += rules.layer_norm(f"{torch}.layernorm_embedding", f"{name}.embedding_norm")
        layer: Table = []
        for number, branch in enumerate(stack.branches):
            (part,) = branch.parts
            norm = f"{flax}.residuals.{number}.norm"
            if part is enums.Part.FFN:
                layer += rules.linear(f"{torch}.layers.{{i}}.fc1", f"{flax}.feed_forward.up")
                layer += rules.linear(f"{torch}.layers.{{i}}.fc2", f"{flax}.feed_forward.down")
                layer += rules.layer_norm(f"{torch}.layers.{{i}}.final_layer_norm", norm)
            else:
                theirs, ours = f"{torch}.layers.{{i}}.{_ATTENTIONS[part]}", f"{flax}.{part.value}"
                layer += rules.attention(theirs, ours, _LINEARS, key_bias=config.key_bias)
                layer += rules.layer_norm(f"{theirs}_layer_norm", norm)
        table += rules.repeat(stack.layers, layer)
        if stack.final_norm:
            table += rules.layer_norm(f"{torch}.layer_norm", f"{name}.final_norm")
    return table


class Bart(BartFamily):
    name = "bart"
    title = "BART"
    source = "Lewis et al. 2020, BART (transformers' bart)"
    model_class = "BartForConditionalGeneration"
    fixed = fixed(embedding_norm=True)
    stack = {"positions": enums.Positions.LEARNED, "position_offset": 2, "embedding_norm": True}
    tokenizers = (
        TokenizerRecipe(
            name="Bart",
            other_classes=("RobertaTokenizer",),
            algorithm=Algorithm.BYTE_BPE,
            files=("vocab.json", "merges.txt"),
            tokens=TOKENS,
            before=("cls_token",),
            after=("sep_token",),
        ),
    )


ARCHITECTURE = Bart(
    "BART base (Lewis et al. 2020), whose translations begin with <s> here, not with </s>.",
    d_model=768,
    **sizes(layers=6, ffn_dim=3072, attention_heads=12),
    decoder_start_token_id=0,
)
