"""BlenderbotSmall: conversations; BART's blocks; the decoder norms tokens before positions.

Roller et al. 2020. Facts from ``configuration_blenderbot_small.py``,
``modeling_blenderbot_small.py`` and ``tokenization_blenderbot_small.py`` of transformers 5.23, and
from ``configuration_bart.py`` of transformers 3.4, which made the published files.
"""

from jax_transformer.architectures import bart, huggingface
from jax_transformer.architectures.tokenizer_recipe import Algorithm, TokenizerRecipe
from jax_transformer.config import EmbeddingNormOf, Positions


class BlenderbotSmall(bart.BartFamily):
    name = "blenderbot-small"
    title = "BlenderbotSmall"
    source = "Roller et al. 2020, BlenderBot of 90M (transformers' blenderbot-small)"
    model_class = "BlenderbotSmallForConditionalGeneration"
    defaults = bart.DEFAULTS | {
        "max_position_embeddings": 512,
        **bart.sizes(layers=8, ffn_dim=2048),
        "d_model": 512,
        **huggingface.special_tokens(pad=0, bos=1, eos=2, start=1),
    }
    fixed = bart.fixed(embedding_norm=True) | {
        "do_blenderbot_90_layernorm": True,
        "extra_pos_embeddings": 0,
        "extra_layer_norm": False,
        "layernorm_variant": "xlm",
    }
    stack = {"positions": Positions.LEARNED, "embedding_norm": True}
    decoder_stack = {"embedding_norm_of": EmbeddingNormOf.TOKENS}
    tokenizers = (
        TokenizerRecipe(
            name="BlenderbotSmall",
            algorithm=Algorithm.WORD_BPE,
            files=("vocab.json", "merges.txt"),
            tokens={
                "bos_token": "__start__",
                "eos_token": "__end__",
                "unk_token": "__unk__",
                "pad_token": "__null__",
            },
            after=(),
            after_target=("eos_token",),
            start="bos_token",
        ),
    )


ARCHITECTURE = BlenderbotSmall(
    "BlenderBot of 90M (Roller et al. 2020), with norms after the branches.",
    vocab_size=54944,
    **bart.sizes(attention_heads=16),
    scale_embedding=True,
)
