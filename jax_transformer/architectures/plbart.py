"""PLBART: BART for programs and their descriptions, with a language at the end of each line.

Ahmad et al. 2021. Facts from ``configuration_plbart.py``, ``modular_plbart.py`` and
``tokenization_plbart.py`` of transformers 5.23.
"""

from collections.abc import Mapping, Sequence

from jax_transformer.architectures import bart
from jax_transformer.architectures.tokenizer_recipe import (
    Algorithm,
    LanguagePlace,
    Languages,
    RebuiltPieces,
    Scored,
    TargetStart,
    TokenizerRecipe,
)
from jax_transformer.config import Positions

LANGUAGES = "java python en_XX".split()
LANGUAGES_MULTI = [*LANGUAGES, *"javascript php ruby go".split()]


def _arrange(scored: Scored, tokens: Mapping[str, str], own: Sequence[str]) -> Scored:
    """Put four tokens in the place of the file's first three pieces, then the languages, and the
    mask of the models that were trained with it, which have three languages.
    """
    first = [tokens[role] for role in ("bos_token", "pad_token", "eos_token", "unk_token")]
    masks = [tokens["mask_token"]] if len(own) == len(LANGUAGES) else []
    return [
        *((text, 0.0) for text in first),
        *scored[3:],
        *((text, 0.0) for text in (*own, *masks)),
    ]


class PLBart(bart.BartFamily):
    """BART's attributes, with languages."""

    name = "plbart"
    title = "PLBART"
    source = "Ahmad et al. 2021, PLBART (transformers' plbart)"
    model_class = "PLBartForConditionalGeneration"
    defaults = bart.DEFAULTS | {
        "vocab_size": 50005,
        "d_model": 768,
        "encoder_layers": 6,
        "encoder_ffn_dim": 3072,
        "encoder_attention_heads": 12,
        "decoder_layers": 6,
        "decoder_ffn_dim": 3072,
        "decoder_attention_heads": 12,
        "attention_dropout": 0.1,
        "scale_embedding": True,
        "decoder_start_token_id": None,
    }
    aliases = bart.ALIASES | {"initializer_range": "init_std"}
    fixed = bart.fixed(embedding_norm=True)
    stack = {"positions": Positions.LEARNED, "position_offset": 2, "embedding_norm": True}
    tokenizers = (
        TokenizerRecipe(
            name="PLBart",
            algorithm=Algorithm.ARRANGED_PIECES,
            files=("sentencepiece.bpe.model",),
            reads_own_files_first=True,
            pieces=RebuiltPieces(arrange=_arrange),
            cleans_up=True,
            tokens=bart.TOKENS,
            languages=Languages(
                token="__{}__",
                pattern="__(.+)__",
                place=LanguagePlace.LAST,
                target_start=TargetStart.DECODER_START,
                sets={"base": LANGUAGES, "multi": LANGUAGES_MULTI},
                default_sources={"multi": "en_XX"},
            ),
        ),
    )


ARCHITECTURE = PLBart(
    "PLBART base (Ahmad et al. 2021), whose translations begin with <s> here, not with a language.",
)
