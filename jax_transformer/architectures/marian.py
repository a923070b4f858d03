"""Marian: the models of OPUS-MT, for one pair of languages or for several targets.

Junczys-Dowmunt et al. 2018, Tiedemann and Thottingal 2020. Facts from ``configuration_marian.py``,
``modeling_marian.py`` and ``tokenization_marian.py`` of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any

from jax_transformer.architectures import bart, huggingface, tokenizer_recipe
from jax_transformer.architectures.tokenizer_recipe import TokenizerRecipe
from jax_transformer.config import Positions, Sinusoids, TransformerConfig


class Marian(bart.BartFamily):
    name = "marian"
    title = "Marian (OPUS-MT)"
    source = "Junczys-Dowmunt et al. 2018, Marian (transformers' marian)"
    model_class = "MarianMTModel"
    base_class = "MarianModel"
    defaults = bart.DEFAULTS | {
        "vocab_size": 58101,
        "decoder_vocab_size": None,
        "share_encoder_decoder_embeddings": True,
        **huggingface.special_tokens(pad=58100, bos=None, eos=0, start=58100),
    }
    fixed = bart.fixed(computed_positions=True)
    ignored = bart.NO_EXTRA_ROWS
    stack = {"positions": Positions.SINUSOIDAL_STORED, "sinusoids": Sinusoids.HALVES}
    saves_positions = False
    tokenizers = (
        TokenizerRecipe(
            name="Marian",
            algorithm=tokenizer_recipe.Algorithm.PIECES,
            files=("source.spm", "target.spm", "vocab.json"),
            reads_own_files_first=True,
            code_brackets=(">>", "<<"),
            underlines_are_spaces=True,
            tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
            start="pad_token",
            languages=tokenizer_recipe.Languages(
                token=">>{}<<",
                pattern=">>([^<>]+)<<",
                place=tokenizer_recipe.LanguagePlace.TARGET_BEFORE_SOURCE,
                target_start=tokenizer_recipe.TargetStart.SOURCE,
            ),
        ),
    )

    def vocabularies(self, values: Mapping[str, Any]) -> tuple[int, int, bool]:
        target_size = values["decoder_vocab_size"] or values["vocab_size"]
        return values["vocab_size"], target_size, values["share_encoder_decoder_embeddings"]

    def to_attributes(self, config: TransformerConfig) -> dict[str, Any]:
        return super().to_attributes(config) | {
            "decoder_vocab_size": config.target_vocab_size,
            "share_encoder_decoder_embeddings": config.tying.one_embedding,
        }

    def output_embedding(self, values: Mapping[str, Any]) -> str:
        """Return the name of the tensor the output may be tied to: the decoder's embedding."""
        return self.embedding_tensors[0 if values["share_encoder_decoder_embeddings"] else 1]


ARCHITECTURE = Marian(
    "The models of OPUS-MT (Tiedemann and Thottingal 2020): Marian's base Transformer. The"
    " last id is padding, and translations begin with it: an embedding of zeros.",
    last_ids=("source_pad_id", "target_pad_id", "bos_id"),
    padding_frozen=True,
    max_position_embeddings=512,
    d_model=512,
    **bart.sizes(layers=6, ffn_dim=2048, attention_heads=8),
    activation_function="swish",
    scale_embedding=True,
)
