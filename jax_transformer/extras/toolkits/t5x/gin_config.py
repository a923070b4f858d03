"""The configuration of a checkpoint of T5X: sizes from its shapes, and what no shape shows from
``config.gin``.

T5X writes that file into the folder that holds its checkpoints. It is read line by line for the few
bindings that matter; no gin runs, and nothing in the file is imported or evaluated.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_transformer.architectures import huggingface_config
from jax_transformer.config import Activation, TransformerConfig
from jax_transformer.errors import InputError
from jax_transformer.extras.toolkits.t5x.t5x_checkpoint import CONFIG
from jax_transformer.extras.toolkits.t5x.t5x_names import Layout
from jax_transformer.storage.untrusted import shown

_LONGEST = 1_000_000
_BINDING = re.compile(r"(?:[\w/]+/)?([\w.]+)\.(\w+)\s*=\s*(.*)", re.ASCII)
_MACRO = re.compile(r"(\w+)\s*=\s*(.*)", re.ASCII)
_BLOCK = re.compile(r"([\w./]+)\s*:\s*", re.ASCII)
_TEXT = re.compile(r"'([^']*)'|\"([^\"]*)\"")
_PROJECTIONS = {
    ("relu",): "relu",
    ("gelu",): "gelu_new",  # flax's gelu is the approximation by tanh
    ("silu",): "silu",
    ("swish",): "silu",
    ("gelu", "linear"): "gated-gelu",
    ("relu", "linear"): "gated-relu",
    ("silu", "linear"): "gated-silu",
    ("swish", "linear"): "gated-silu",
}
_NAMES = {
    Activation.RELU: "relu",
    Activation.GELU_TANH: "gelu",
    Activation.SILU: "silu",
}


@dataclass(frozen=True)
class Gin:
    """The settings of a ``config.gin`` that no shape shows."""

    path: Path | None = None
    activations: tuple[str, ...] = ()
    """``mlp_activations``, such as gelu and linear; empty if the file does not say."""
    dropout: float | None = None
    scan_axis: int | None = None
    multilingual: bool = False
    """The vocabulary is mT5's."""


def find(folder: Path) -> Gin:
    """Read the ``config.gin`` in the folder of a checkpoint, or in the folder above it.

    Raises InputError if it cannot be read. Without such a file nothing is known.
    """
    for path in (folder / CONFIG, folder.absolute().parent / CONFIG):
        if path.is_file():
            return _read(path)
    return Gin()


def _read(path: Path) -> Gin:
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {shown(str(error), 120)}") from None
    if len(content) > _LONGEST:
        raise InputError(f"{path}: has more than {_LONGEST:,} bytes")
    values = _bindings(text)
    activations = values.get("T5Config.mlp_activations") or values.get("MlpBlock.activations", "")
    dropout = values.get("T5Config.dropout_rate", "")
    axis = values.get("T5Config.param_scan_axis", "")
    vocabulary = values.get("SentencePieceVocabulary.sentencepiece_model_file", "")
    return Gin(
        path,
        tuple(one or other for one, other in _TEXT.findall(activations)),
        float(dropout) if re.fullmatch(r"\d{1,3}(\.\d{0,20})?", dropout) else None,
        int(axis) if re.fullmatch(r"-?\d{1,3}", axis) else None,
        "/mc4." in vocabulary,
    )


def _bindings(text: str) -> dict[str, str]:
    """Return the text of each binding, by class and parameter; macros are replaced once."""
    values: dict[str, str] = {}
    macros: dict[str, str] = {}
    block = ""
    for line in _statements(text):
        if (match := _BLOCK.fullmatch(line)) is not None:
            block = match[1]
            continue
        indented = line[:1].isspace()
        line = f"{block}.{line.strip()}" if indented and block else line.strip()
        if (match := _BINDING.fullmatch(line)) is not None:
            values[f"{match[1].split('.')[-1]}.{match[2]}"] = match[3]
        elif (match := _MACRO.fullmatch(line)) is not None:
            macros[match[1]] = match[2]
    return {name: macros.get(value.removeprefix("%"), value) for name, value in values.items()}


def _statements(text: str) -> list[str]:
    """Return the lines without comments; what continues a line follows it."""
    statements: list[str] = []
    goes_on = False
    for line in text.splitlines():
        line = line.split("#")[0].rstrip()
        if goes_on and statements:
            statements[-1] += " " + line.strip().removesuffix("\\")
        elif line:
            statements.append(line.removesuffix("\\"))
        last = statements[-1] if statements else ""
        goes_on = line.endswith("\\") or last.count("(") > last.count(")")
        goes_on = goes_on and len(last) < 10_000
    return statements


def configuration(layout: Layout, gin: Gin, model_type: str | None = None) -> TransformerConfig:
    """Return the configuration of a checkpoint.

    Args:
        layout: its sizes.
        gin: its activations, and if they are known its dropout and vocabulary.
        model_type: the family of transformers; by default UMT5 if every layer has a table of
            distances, otherwise T5 or, with its vocabulary, mT5.

    Raises:
        InputError: no family has these activations, or not as many as the checkpoint has kernels.
    """
    if gin.activations not in _PROJECTIONS:
        known = ", ".join("(" + " ".join(names) + ")" for names in _PROJECTIONS)
        raise InputError(
            f"mlp_activations ({shown(' '.join(gin.activations))}) are none of {known}"
        )
    if (len(gin.activations) > 1) != layout.gated:
        kernels = "wi_0 and wi_1" if layout.gated else "wi"
        raise InputError(
            f"mlp_activations ({' '.join(gin.activations)}) do not belong to the kernels {kernels}"
        )
    shared = "mt5" if gin.multilingual and not layout.tied else "t5"
    data: dict[str, Any] = {
        "model_type": model_type or ("umt5" if layout.distances_in_layers else shared),
        "vocab_size": layout.vocabulary,
        "d_model": layout.d_model,
        "d_kv": layout.head_dim,
        "d_ff": layout.d_ff,
        "num_layers": layout.encoder_layers,
        "num_decoder_layers": layout.decoder_layers,
        "num_heads": layout.heads,
        "relative_attention_num_buckets": layout.buckets,
        "feed_forward_proj": _PROJECTIONS[gin.activations],
        "tie_word_embeddings": layout.tied,
    }
    if gin.dropout is not None:
        data["dropout_rate"] = gin.dropout
    return huggingface_config.from_config(data, names=stored_names(layout))


def stored_names(layout: Layout) -> set[str]:
    """Return transformers' names of the embedding and, if it is not tied, of the output layer."""
    return {"shared.weight"} | (set() if layout.tied else {"lm_head.weight"})


def to_gin(config: TransformerConfig, layout: Layout) -> str:
    """Return a ``config.gin`` with the bindings of T5X's ``T5Config`` for a model.

    Raises InputError for an activation that flax does not have.
    """
    activation = config.encoder.activation
    if activation not in _NAMES:
        raise InputError(f"activation={activation.value} is none that T5X's networks can name")
    network = "scalable_t5" if layout.split_heads else "t5"
    activations = (_NAMES[activation], *(("linear",) if layout.gated else ()))
    bindings: dict[str, Any] = {
        "dropout_rate": config.dropout,
        "emb_dim": layout.d_model,
        "head_dim": layout.head_dim,
        "logits_via_embedding": layout.tied,
        "mlp_activations": activations,
        "mlp_dim": layout.d_ff,
        "num_decoder_layers": layout.decoder_layers,
        "num_encoder_layers": layout.encoder_layers,
        "num_heads": layout.heads,
    }
    if layout.split_heads:
        bindings["scan_layers"] = layout.scan_axis is not None
        if layout.scan_axis is not None:
            bindings["param_scan_axis"] = layout.scan_axis
    bindings["vocab_size"] = layout.vocabulary
    lines = [f"network.T5Config.{name} = {value!r}" for name, value in bindings.items()]
    return "\n".join([f"import t5x.examples.{network}.network", "", *lines, ""])
