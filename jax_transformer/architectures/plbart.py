"""PLBART: BART for programs and their descriptions, with a language at the end of each line.

Ahmad et al. 2021. Facts from ``configuration_plbart.py``, ``modular_plbart.py`` and
``tokenization_plbart.py`` of transformers 5.23.
"""

from collections.abc import Mapping, Sequence

from jax_transformer.architectures import bart, tokenizer_recipe
from jax_transformer.architectures.tokenizer_recipe import Scored, TokenizerRecipe
from jax_transformer.config import Positions

LANGUAGES = "java python en_XX".split()
LANGUAGES_MULTI = [*LANGUAGES, *"javascript php ruby go".split()]


def _arrange(scored: Scored, tokens: Mapping[str, str], own: Sequence[str]) -> Scored:
    """Put four tokens in the place of the file's first three pieces, then the languages, and the
    mask of the models that were trained with it, which have three languages.
    """
    first = [tokens[role] for role in tokenizer_recipe.FIRST]
    masks = [tokens["mask_token"]] if len(own) == len(LANGUAGES) else []
    return tokenizer_recipe.arranged(first, scored[3:], [*own, *masks])


class PLBart(bart.BartFamily):
    name = "plbart"
    title = "PLBART"
    source = "Ahmad et al. 2021, PLBART (transformers' plbart)"
    model_class = "PLBartForConditionalGeneration"
    defaults = bart.DEFAULTS | {
        "vocab_size": 50005,
        "d_model": 768,
        **bart.sizes(layers=6, ffn_dim=3072, attention_heads=12),
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
            algorithm=tokenizer_recipe.Algorithm.ARRANGED_PIECES,
            files=("sentencepiece.bpe.model",),
            reads_own_files_first=True,
            pieces=tokenizer_recipe.RebuiltPieces(arrange=_arrange),
            cleans_up=True,
            tokens=bart.TOKENS,
            languages=tokenizer_recipe.Languages(
                token="__{}__",
                pattern="__(.+)__",
                place=tokenizer_recipe.LanguagePlace.LAST,
                target_start=tokenizer_recipe.TargetStart.DECODER_START,
                sets={"base": LANGUAGES, "multi": LANGUAGES_MULTI},
                default_sources={"multi": "en_XX"},
            ),
        ),
    )


ARCHITECTURE = PLBart(
    "PLBART base (Ahmad et al. 2021), whose translations begin with <s> here, not with a language.",
)
