"""Architecture of "Lesson 10: Transformers II": a torch.nn.Transformer subclass that translates."""

from jax_transformer.architectures import base, torch_nn
from jax_transformer.architectures.base import Architecture, Arguments, Preset
from jax_transformer.config import Init, Mask, Positions, TransformerConfig


def base_config(*, repaired: bool) -> TransformerConfig:
    """Return the document's configuration; ``repaired`` masks source padding in cross-attention."""
    cross_mask = (Mask.SOURCE_PADDING,) if repaired else ()
    stored = Positions.SINUSOIDAL_STORED
    return TransformerConfig(
        source_vocab_size=10_000,
        target_vocab_size=10_000,
        d_model=512,
        num_heads=8,
        d_ff=2048,
        max_length=100,
        encoder=base.encoder(6, final_norm=True, positions=stored),
        decoder=base.decoder(6, cross_mask, final_norm=True, positions=stored),
        dropout=0.1,
        attention_dropout=0.1,
        activation_dropout=0.1,
        embedding_dropout=0.1,
        init=Init.TORCH_TRANSFORMER,
        architecture="lesson10",
        source_pad_id=1,
        target_pad_id=1,
        bos_id=2,
        eos_id=3,
    )


_FAITHFUL = Preset(
    base_config(repaired=False),
    '"Lesson 10: Transformers II": torch.nn.Transformer for translation. Faithful: the decoder'
    " attends to source padding.",
)
_REPAIRED = Preset(
    base_config(repaired=True),
    '"Lesson 10: Transformers II" with source padding masked in cross-attention.',
)


def _arguments(config: TransformerConfig) -> Arguments:
    rates = ("attention_dropout", "activation_dropout", "embedding_dropout")
    repaired = base.is_repaired(config, _FAITHFUL, _REPAIRED, *rates, "d_ff", "decoder.activation")
    base.one_rate(config, *rates)
    activation = config.decoder.activation.value
    return (), {**torch_nn.sizes(config), "activation": activation, "repaired": repaired}


ARCHITECTURE = Architecture(
    name="lesson10",
    source='"Lesson 10: Transformers II", a lecture notebook.',
    weight_table=torch_nn.weight_table,
    presets={"lesson10": _FAITHFUL, "lesson10_repaired": _REPAIRED},
    reference="torch_reference.lesson10:TranslationTransformer",
    reference_arguments=_arguments,
)
