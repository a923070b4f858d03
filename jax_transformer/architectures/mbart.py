"""mBART and mBART-50: BART with norms before the branches, for many languages.

Liu et al. 2020, Tang et al. 2020. Facts from ``configuration_mbart.py``, ``modeling_mbart.py``,
``tokenization_mbart.py`` and ``tokenization_mbart50.py`` of transformers 5.23.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jax_transformer.architectures import bart, tokenizer_recipe
from jax_transformer.architectures.tokenizer_recipe import Scored, TokenizerRecipe
from jax_transformer.config import Positions

LANGUAGES = (
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT"
    " lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
).split()
LANGUAGES_50 = [
    *LANGUAGES,
    *(
        "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL"
        " ps_AF pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
    ).split(),
]


def _arrange(scored: Scored, tokens: Mapping[str, str], own: Sequence[str]) -> Scored:
    """Replace the file's first three pieces by four tokens; append the languages and the mask."""
    first = [tokens[role] for role in tokenizer_recipe.FIRST]
    return tokenizer_recipe.arranged(first, scored[3:], [*own, tokens["mask_token"]])


def _arrange_50(scored: Scored, tokens: Mapping[str, str], own: Sequence[str]) -> Scored:
    return _arrange(scored, {**tokens, "bos_token": tokens["cls_token"]}, own)


_LANGUAGES = tokenizer_recipe.Languages(
    token="{}",
    pattern="([a-z]{2}_[A-Z]{2})",
    place=tokenizer_recipe.LanguagePlace.LAST,
    target_start=tokenizer_recipe.TargetStart.DECODER_START,
    published=LANGUAGES,
    default_source="en_XX",
)
MBART = TokenizerRecipe(
    name="MBart",
    algorithm=tokenizer_recipe.Algorithm.REBUILT_PIECES,
    files=("sentencepiece.bpe.model",),
    pieces=tokenizer_recipe.RebuiltPieces(
        arrange=_arrange,
        unknown_id=3,
        normalizes=False,  # as the class of transformers 5
        splits_words=True,
    ),
    tokens=bart.TOKENS,
    token_flags={"mask_token": {"lstrip": True, "normalized": False}},
    own_tokens=lambda settings: LANGUAGES,
    languages=_LANGUAGES,
)
MBART50 = replace(
    MBART,
    name="MBart50",
    pieces=tokenizer_recipe.RebuiltPieces(
        arrange=_arrange_50,
        unknown_id=3,
        replaces=((" {2,}", " "),),
        replaces_without_map=((" {2,}", " "),),
    ),
    own_tokens=lambda settings: LANGUAGES_50,
    languages=replace(
        _LANGUAGES,
        place=tokenizer_recipe.LanguagePlace.FIRST,
        target_start=tokenizer_recipe.TargetStart.FORCED,
        published=LANGUAGES_50,
    ),
)


class MBart(bart.BartFamily):
    name = "mbart"
    title = "mBART, mBART-50"
    source = "Liu et al. 2020, mBART (transformers' mbart)"
    model_class = "MBartForConditionalGeneration"
    defaults = bart.DEFAULTS | {"decoder_start_token_id": None}
    fixed = bart.fixed(pre_norm=True, embedding_norm=True)
    stack = {
        "positions": Positions.LEARNED,
        "position_offset": 2,
        "embedding_norm": True,
        "final_norm": True,
    }
    tokenizers = (MBART, MBART50)


ARCHITECTURE = MBart(
    "mBART large (Liu et al. 2020), whose translations begin with <s> here, not with a language.",
    vocab_size=250027,
    decoder_start_token_id=0,
    scale_embedding=True,
)
