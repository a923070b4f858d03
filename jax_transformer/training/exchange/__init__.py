"""Weights between every kind of file and folder: planned, moved bit for bit, read back, and run beside their PyTorch twin."""

from jax_transformer.training.exchange.conversion import Description, Request, convert, prepare
from jax_transformer.training.exchange.inspection import inspect
from jax_transformer.training.exchange.library import load, plan, save
from jax_transformer.training.exchange.mid_flight import convert as convert_training
from jax_transformer.training.exchange.report import Outcome, Planned

__all__ = ["Description", "Outcome", "Planned", "Request", "convert", "convert_training", "inspect", "load", "plan", "prepare", "save"]
