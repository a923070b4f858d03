"""mT5: T5 v1.1 for a hundred languages.

Xue et al. 2021. Facts from ``configuration_mt5.py`` and ``modeling_mt5.py`` of transformers 5.23.
"""

from jax_transformer.architectures import t5

DEFAULTS = t5.DEFAULTS | {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
}


class MT5(t5.T5Family):
    name = "mt5"
    title = "mT5"
    source = "Xue et al. 2021, mT5 (transformers' mt5)"
    model_class = "MT5ForConditionalGeneration"
    defaults = DEFAULTS
    derived = t5.DERIVED
    scales_logits = False


ARCHITECTURE = MT5()
