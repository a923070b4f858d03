"""Weights between every kind of file and folder: planned, moved bit for bit, read back, and run beside their PyTorch twin."""

from jax_transformer.convert.conversion import Description, Request, convert, prepare
from jax_transformer.convert.inspection import inspect
from jax_transformer.convert.library import load, plan, save
from jax_transformer.convert.report import Outcome, Planned
from jax_transformer.training.mid_flight import convert as convert_training

__all__ = [
    "Description",
    "Outcome",
    "Planned",
    "Request",
    "convert",
    "convert_training",
    "inspect",
    "load",
    "plan",
    "prepare",
    "save",
]
