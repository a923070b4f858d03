"""UMT5: mT5 with a table of distances in every block.

Chung et al. 2023. Facts: ``configuration_umt5.py``, ``modeling_umt5.py`` of transformers 5.24.
"""

from jax_transformer.architectures import mt5, t5
from jax_transformer.config import Positions


class UMT5(t5.T5Family):
    name = "umt5"
    title = "UMT5"
    source = "Chung et al. 2023, UMT5 (transformers' umt5)"
    model_class = "UMT5ForConditionalGeneration"
    defaults = mt5.DEFAULTS
    # The published files say so for the tables in every block, which transformers' class always has
    fixed = {"scalable_attention": True}
    positions = Positions.RELATIVE_PER_BLOCK


ARCHITECTURE = UMT5()
