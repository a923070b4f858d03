"""UMT5: mT5 with a table of distances in every block.

Chung et al. 2023. Facts from ``configuration_umt5.py`` and ``modeling_umt5.py`` of transformers
5.23.
"""

from jax_transformer.architectures import mt5, t5
from jax_transformer.architectures.base import Architecture
from jax_transformer.config import Positions

ARCHITECTURE = Architecture(
    name="umt5",
    source="Chung et al. 2023, UMT5 (transformers' umt5)",
    weight_table=t5.weight_table,
    huggingface=t5.T5Family(
        model_type="umt5",
        title="UMT5",
        model_class="UMT5ForConditionalGeneration",
        base_class="UMT5Model",
        defaults=mt5.DEFAULTS,
        # The published files say so for the tables in every block, which transformers' class has
        # always
        fixed={"scalable_attention": True},
        positions=Positions.RELATIVE_PER_BLOCK,
        scales_logits=True,
    ),
)
