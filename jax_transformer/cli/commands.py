"""The commands by name, in the order of the help."""

from jax_transformer.cli import (
    convert,
    estimate,
    evaluate,
    golden,
    inspect,
    parity,
    serve,
    train,
    translate,
)
from jax_transformer.cli.arguments import Command

COMMANDS: dict[str, Command] = {
    "train": train.COMMAND,
    "estimate": estimate.COMMAND,
    "translate": translate.COMMAND,
    "serve": serve.COMMAND,
    "evaluate": evaluate.COMMAND,
    "convert": convert.COMMAND,
    "inspect": inspect.COMMAND,
    "parity": parity.COMMAND,
    "golden": golden.COMMAND,
}
