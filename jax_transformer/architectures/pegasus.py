"""Pegasus: summaries.

Zhang et al. 2020. Facts from ``configuration_pegasus.py``, ``modeling_pegasus.py`` and
``tokenization_pegasus.py`` of transformers 5.23.
"""

from collections.abc import Mapping, Sequence

from jax_transformer.architectures import bart, huggingface, tokenizer_recipe
from jax_transformer.architectures.tokenizer_recipe import Scored, Settings, TokenizerRecipe
from jax_transformer.config import Positions, Sinusoids

_FIRST_MASK = "<mask_1>"


def _own_tokens(settings: Settings) -> Sequence[str]:
    return [_FIRST_MASK, *(f"<unk_{i}>" for i in range(2, settings.number("offset", 103)))]


def _arrange(scored: Scored, tokens: Mapping[str, str], own: Sequence[str]) -> Scored:
    """Replace the file's first two pieces by four tokens and those kept for later use."""
    first = (tokens["pad_token"], tokens["eos_token"], _FIRST_MASK, tokens["mask_token"])
    unused = [text for text in own if text.startswith("<unk_")]
    return [*((text, 0.0) for text in first), *((text, -100.0) for text in unused), *scored[2:]]


class Pegasus(bart.BartFamily):
    name = "pegasus"
    title = "Pegasus"
    source = "Zhang et al. 2020, PEGASUS (transformers' pegasus)"
    model_class = "PegasusForConditionalGeneration"
    defaults = bart.DEFAULTS | {
        **huggingface.special_tokens(pad=0, bos=None, eos=1, start=0),
    }
    fixed = bart.fixed(pre_norm=True, computed_positions=True)
    ignored = bart.NO_EXTRA_ROWS
    stack = {
        "positions": Positions.SINUSOIDAL_STORED,
        "sinusoids": Sinusoids.HALVES,
        "final_norm": True,
    }
    tokenizers = (
        TokenizerRecipe(
            name="Pegasus",
            algorithm=tokenizer_recipe.Algorithm.REBUILT_PIECES,
            files=("spiece.model",),
            pieces=tokenizer_recipe.RebuiltPieces(
                arrange=_arrange,
                replaces=((" {2,}", " "),),
                replaces_without_map=(("\n", " "), (" {2,}", " ")),
            ),
            tokens={
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "pad_token": "<pad>",
                "mask_token": "<mask_2>",
            },
            own_tokens=_own_tokens,
            start="pad_token",
        ),
    )


ARCHITECTURE = Pegasus(
    "PEGASUS base (Zhang et al. 2020): norms before the branches, sines and cosines.",
    vocab_size=96103,
    max_position_embeddings=512,
    d_model=768,
    **bart.sizes(ffn_dim=3072, attention_heads=12),
    activation_function="relu",
    scale_embedding=True,
)
