"""M2M100 and NLLB: one model for a hundred and two hundred languages.

Fan et al. 2021, NLLB Team 2022. NLLB is a model of M2M100 with another tokenizer. Facts from
``configuration_m2m_100.py``, ``modeling_m2m_100.py``, ``tokenization_m2m_100.py`` and
``tokenization_nllb.py`` of transformers 5.23.
"""

from collections.abc import Collection, Mapping, Sequence

from jax_transformer.architectures import bart, tokenizer_recipe
from jax_transformer.architectures.tokenizer_recipe import Scored, TokenizerRecipe
from jax_transformer.config import PositionIndex, Positions, Sinusoids

LANGUAGES = """
    af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu
    ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr
    ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk
    ur uz vi wo xh yi yo zh zu
""".split()
LANGUAGES_WMT21 = "en ha is ja cs ru zh de".split()
LANGUAGES_NLLB = """
    ace_Arab ace_Latn acm_Arab acq_Arab aeb_Arab afr_Latn ajp_Arab aka_Latn amh_Ethi apc_Arab
    arb_Arab ars_Arab ary_Arab arz_Arab asm_Beng ast_Latn awa_Deva ayr_Latn azb_Arab azj_Latn
    bak_Cyrl bam_Latn ban_Latn bel_Cyrl bem_Latn ben_Beng bho_Deva bjn_Arab bjn_Latn bod_Tibt
    bos_Latn bug_Latn bul_Cyrl cat_Latn ceb_Latn ces_Latn cjk_Latn ckb_Arab crh_Latn cym_Latn
    dan_Latn deu_Latn dik_Latn dyu_Latn dzo_Tibt ell_Grek eng_Latn epo_Latn est_Latn eus_Latn
    ewe_Latn fao_Latn pes_Arab fij_Latn fin_Latn fon_Latn fra_Latn fur_Latn fuv_Latn gla_Latn
    gle_Latn glg_Latn grn_Latn guj_Gujr hat_Latn hau_Latn heb_Hebr hin_Deva hne_Deva hrv_Latn
    hun_Latn hye_Armn ibo_Latn ilo_Latn ind_Latn isl_Latn ita_Latn jav_Latn jpn_Jpan kab_Latn
    kac_Latn kam_Latn kan_Knda kas_Arab kas_Deva kat_Geor knc_Arab knc_Latn kaz_Cyrl kbp_Latn
    kea_Latn khm_Khmr kik_Latn kin_Latn kir_Cyrl kmb_Latn kon_Latn kor_Hang kmr_Latn lao_Laoo
    lvs_Latn lij_Latn lim_Latn lin_Latn lit_Latn lmo_Latn ltg_Latn ltz_Latn lua_Latn lug_Latn
    luo_Latn lus_Latn mag_Deva mai_Deva mal_Mlym mar_Deva min_Latn mkd_Cyrl plt_Latn mlt_Latn
    mni_Beng khk_Cyrl mos_Latn mri_Latn zsm_Latn mya_Mymr nld_Latn nno_Latn nob_Latn npi_Deva
    nso_Latn nus_Latn nya_Latn oci_Latn gaz_Latn ory_Orya pag_Latn pan_Guru pap_Latn pol_Latn
    por_Latn prs_Arab pbt_Arab quy_Latn ron_Latn run_Latn rus_Cyrl sag_Latn san_Deva sat_Beng
    scn_Latn shn_Mymr sin_Sinh slk_Latn slv_Latn smo_Latn sna_Latn snd_Arab som_Latn sot_Latn
    spa_Latn als_Latn srd_Latn srp_Cyrl ssw_Latn sun_Latn swe_Latn swh_Latn szl_Latn tam_Taml
    tat_Cyrl tel_Telu tgk_Cyrl tgl_Latn tha_Thai tir_Ethi taq_Latn taq_Tfng tpi_Latn tsn_Latn
    tso_Latn tuk_Latn tum_Latn tur_Latn twi_Latn tzm_Tfng uig_Arab ukr_Cyrl umb_Latn urd_Arab
    uzn_Latn vec_Latn vie_Latn war_Latn wol_Latn xho_Latn ydd_Hebr yor_Latn yue_Hant zho_Hans
    zho_Hant zul_Latn
""".split()
_COMPUTED = "repeats sines and cosines that the model computes itself"


def _arrange(scored: Scored, tokens: Mapping[str, str], own: Sequence[str]) -> Scored:
    """Put four tokens first, and only there."""
    first = [tokens[role] for role in tokenizer_recipe.FIRST]
    return tokenizer_recipe.arranged(first, [each for each in scored if each[0] not in first])


M2M100 = TokenizerRecipe(
    name="M2M100",
    algorithm=tokenizer_recipe.Algorithm.PIECES,
    files=("sentencepiece.bpe.model", "vocab.json"),
    reads_own_files_first=True,
    tokens={
        role: bart.TOKENS[role] for role in bart.TOKENS if role not in ("cls_token", "mask_token")
    },
    languages=tokenizer_recipe.Languages(
        token="__{}__",
        pattern="__([a-z]{2,3})__",
        place=tokenizer_recipe.LanguagePlace.FIRST,
        target_start=tokenizer_recipe.TargetStart.FORCED,
        sets={"m2m100": LANGUAGES, "wmt21": LANGUAGES_WMT21},
        default_source="en",
    ),
)
NLLB = TokenizerRecipe(
    name="Nllb",
    algorithm=tokenizer_recipe.Algorithm.REBUILT_PIECES,
    files=("sentencepiece.bpe.model",),
    pieces=tokenizer_recipe.RebuiltPieces(arrange=_arrange, bpe=True, replaces=((" {2,}", " "),)),
    tokens=bart.TOKENS,
    token_flags={"mask_token": {"lstrip": True, "normalized": True}},
    own_tokens=lambda settings: () if settings.lists_tokens else LANGUAGES_NLLB,
    added_last="mask_token",  # as in the published embeddings
    languages=tokenizer_recipe.Languages(
        token="{}",
        pattern="([a-z]{3}_[A-Z][a-z]{3})",
        place=tokenizer_recipe.LanguagePlace.FIRST,
        last_if="legacy_behaviour",
        target_start=tokenizer_recipe.TargetStart.FORCED,
        published=LANGUAGES_NLLB,
        default_source="eng_Latn",
    ),
)


class M2M100Family(bart.BartFamily):
    name = "m2m_100"
    title = "M2M100, NLLB"
    source = "Fan et al. 2021, M2M100 (transformers' m2m_100)"
    model_class = "M2M100ForConditionalGeneration"
    defaults = bart.DEFAULTS | {
        "vocab_size": 128112,
        "activation_function": "relu",
        "attention_dropout": 0.1,
        "scale_embedding": True,
    }
    fixed = bart.fixed(pre_norm=True, computed_positions=True)
    ignored = bart.NO_EXTRA_ROWS
    stack = {
        "positions": Positions.SINUSOIDAL,
        "sinusoids": Sinusoids.TENSOR2TENSOR,
        "position_index": PositionIndex.NOT_PADDING,
        "final_norm": True,
    }
    logits_bias = False
    unused_tensors = {
        f"{stack}.embed_positions.{leaf}": _COMPUTED
        for stack in ("encoder", "decoder")
        for leaf in ("weights", "_float_tensor")
    }
    tokenizers = (M2M100, NLLB)

    def recipe(self, files: Collection[str]) -> TokenizerRecipe:
        """Return NLLB's recipe without ``vocab.json``: its vocabulary is SentencePiece's."""
        return M2M100 if "vocab.json" in files else NLLB


ARCHITECTURE = M2M100Family(
    "M2M100 of 418M (Fan et al. 2021), whose translations begin with <s> here, not with"
    " </s> and a language.",
    decoder_start_token_id=0,
)
