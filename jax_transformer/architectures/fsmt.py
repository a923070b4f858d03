"""FSMT: fairseq's models of WMT 2019, with a vocabulary for each side.

Ng et al. 2019. Facts from ``configuration_fsmt.py``, ``modeling_fsmt.py`` and
``tokenization_fsmt.py`` of transformers 5.23, whose decoder has a causal mask only without a cache
(``use_cache=False``); sizes of the models from fairseq's ``examples/wmt19``.
"""

from collections.abc import Mapping
from typing import Any

from jax_transformer.architectures import bart, base
from jax_transformer.architectures.tokenizer_recipe import Algorithm, TokenizerRecipe
from jax_transformer.config import TransformerConfig, enums
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Table

_EMBEDDINGS = ("model.decoder.embed_tokens", "model.encoder.embed_tokens")
_OUTPUT = "model.decoder.output_projection"
_DEFAULTS = {name: value for name, value in bart.DEFAULTS.items() if name != "vocab_size"}


class FSMT(bart.BartFamily):
    name = "fsmt"
    title = "FSMT (WMT 2019)"
    source = "Ng et al. 2019, FAIR's WMT19 submission (transformers' fsmt)"
    model_class = "FSMTForConditionalGeneration"
    defaults = _DEFAULTS | {
        "src_vocab_size": 42024,
        "tgt_vocab_size": 42024,
        "activation_function": "relu",
        "scale_embedding": True,
        "tie_word_embeddings": False,
    }
    aliases = bart.ALIASES | {"vocab_size": "tgt_vocab_size"}
    fixed = bart.fixed(computed_positions=True)
    ignored = bart.NO_EXTRA_ROWS | {
        "langs": "names the languages, which the tokenizer knows itself",
        "decoder": "repeats the size of the target's vocabulary",
    }
    stack = {
        "positions": enums.Positions.SINUSOIDAL_STORED,
        "sinusoids": enums.Sinusoids.TENSOR2TENSOR,
        "position_index": enums.PositionIndex.NOT_PADDING,
    }
    # Unlike other families, it masks the decoder's padding: the start token is the end of a line
    decoder_stack = {"self_mask": (enums.Mask.CAUSAL, enums.Mask.TARGET_PADDING)}
    logits_bias = False
    embedding_tensors = tuple(f"{name}.weight" for name in _EMBEDDINGS)
    output_tensor = f"{_OUTPUT}.weight"
    tokenizers = (
        TokenizerRecipe(
            name="FSMT",
            algorithm=Algorithm.MOSES_BPE,
            files=("vocab-src.json", "vocab-tgt.json", "merges.txt"),
            reads_own_files_first=True,
            tokens={
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "sep_token": "</s>",
                "pad_token": "<pad>",
            },
            after=("sep_token",),
        ),
    )

    def vocabularies(self, values: Mapping[str, Any]) -> tuple[int, int, bool]:
        return values["src_vocab_size"], values["tgt_vocab_size"], values["tie_word_embeddings"]

    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        return super().to_attributes(config) | {
            "src_vocab_size": config.source_vocab_size,
            "tgt_vocab_size": config.target_vocab_size,
        }

    def weight_table(self, config: TransformerConfig) -> Table:
        target, source = _EMBEDDINGS
        one = config.tying is enums.Tying.ALL
        tied: Table = [Alias(f"{source}.weight", f"{target}.weight")]
        return [
            *(tied if one else rules.embedding(source, "source_embedding")),
            *rules.embedding(target, "target_embedding"),
            *bart.stacks(config),
            *base.output(_OUTPUT, f"{target}.weight", config, bias=False),
        ]


ARCHITECTURE = FSMT(
    "The models of WMT 2019 (Ng et al. 2019), of six layers, whose translations begin with"
    " <s> here, not with </s>.",
    **bart.sizes(layers=6, ffn_dim=8192),
    decoder_start_token_id=0,
)
