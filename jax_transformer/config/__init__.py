"""The description of one encoder-decoder: frozen dataclasses that check themselves."""

from jax_transformer.config.enums import *  # noqa: F403 (all of them)
from jax_transformer.config.fields import Branch as Branch
from jax_transformer.config.fields import StackConfig as StackConfig
from jax_transformer.config.model import EXECUTION as EXECUTION
from jax_transformer.config.model import RATES as RATES
from jax_transformer.config.model import TransformerConfig as TransformerConfig
