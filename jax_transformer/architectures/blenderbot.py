"""Blenderbot: conversations; BART's blocks with norms before the branches, and learned positions.

Roller et al. 2020. Facts from ``configuration_blenderbot.py``, ``modeling_blenderbot.py`` and
``tokenization_blenderbot.py`` of transformers 5.23, and from ``configuration_bart.py`` of
transformers 3.4, which made the published files.
"""

from jax_transformer.architectures import bart, huggingface
from jax_transformer.architectures.tokenizer_recipe import Algorithm, TokenizerRecipe
from jax_transformer.config import Positions


class Blenderbot(bart.BartFamily):
    name = "blenderbot"
    title = "Blenderbot"
    source = "Roller et al. 2020, BlenderBot (transformers' blenderbot)"
    model_class = "BlenderbotForConditionalGeneration"
    defaults = bart.DEFAULTS | {
        "vocab_size": 8008,
        "max_position_embeddings": 128,
        **bart.sizes(ffn_dim=10240, attention_heads=32),
        "encoder_layers": 2,
        "decoder_layers": 24,
        "d_model": 2560,
        **huggingface.special_tokens(pad=0, bos=1, eos=2, start=1),
    }
    fixed = {
        "normalize_before": True,
        "add_final_layer_norm": True,
        "normalize_embedding": False,
        "static_position_embeddings": False,
        "extra_pos_embeddings": 0,
        "extra_layer_norm": False,
        "layernorm_variant": "prelayernorm",
    }
    ignored = {  # true in published files
        "do_blenderbot_90_layernorm": "orders a norm of embeddings that the model does not have"
    }
    stack = {"positions": Positions.LEARNED, "final_norm": True}
    tokenizers = (
        TokenizerRecipe(
            name="Blenderbot",
            algorithm=Algorithm.BYTE_BPE,
            files=("vocab.json", "merges.txt"),
            prefix_space=True,
            tokens=bart.TOKENS,
            token_flags={"mask_token": {"lstrip": True, "normalized": False}},
            # As published: transformers 5.23 loses the end of lines without a tokenizer.json
            after=("eos_token",),
            start="bos_token",
        ),
    )


ARCHITECTURE = Blenderbot(
    "BlenderBot of 400M, distilled (Roller et al. 2020).",
    d_model=1280,
    **bart.sizes(ffn_dim=5120),
    decoder_layers=12,
    scale_embedding=True,
)
