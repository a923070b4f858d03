"""MVP: BART trained on labelled tasks of generation, without its prompts.

Tang et al. 2023. Facts from ``configuration_mvp.py`` and ``modeling_mvp.py`` of transformers 5.23.
"""

from dataclasses import replace

from jax_transformer.architectures import bart


class Mvp(bart.Bart):
    name = "mvp"
    title = "MVP"
    source = "Tang et al. 2023, MVP (transformers' mvp)"
    model_class = "MvpForConditionalGeneration"
    defaults = bart.DEFAULTS | {"vocab_size": 50267}
    fixed = bart.Bart.fixed | {"use_prompt": False}
    ignored = dict.fromkeys(("prompt_length", "prompt_mid_dim"), "describes prompts, of which none")
    tokenizers = (replace(bart.Bart.tokenizers[0], name="Mvp", other_classes=()),)


ARCHITECTURE = Mvp()
