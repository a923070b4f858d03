"""One page a layout: each names a PyTorch module's weights, see ``rules``."""

from jax_transformer.architectures import (
    bart_table,
    blog2023,
    deep_dive,
    from_scratch,
    part2_encoder,
    t5_table,
    torch_nn,
)
from jax_transformer.config import Layout, TransformerConfig
from jax_transformer.weights.rules import Table

_PAGES = {
    Layout.TORCH_NN: torch_nn.table,
    Layout.LESSON10: torch_nn.table,
    Layout.DEEP_DIVE: deep_dive.table,
    Layout.FROM_SCRATCH: from_scratch.table,
    Layout.PART2_ENCODER: part2_encoder.table,
    Layout.BLOG2023: blog2023.table,
    **dict.fromkeys(
        (Layout.BART, Layout.MBART, Layout.MARIAN, Layout.M2M_100, Layout.PEGASUS), bart_table.table
    ),
    **dict.fromkeys((Layout.T5, Layout.MT5, Layout.UMT5), t5_table.table),
}


def table(config: TransformerConfig) -> Table:
    """The weight table of the layout that the configuration names."""
    return _PAGES[config.layout](config)
