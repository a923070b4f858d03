"""A checkpoint of T5X: T5, mT5 and UMT5, unrolled and scanned.

Its configuration is made of sizes from its shapes, and what no shape shows from ``config.gin``. T5X
writes that file into the folder that holds its checkpoints. It is read line by line for the few
bindings that matter; no gin runs, and nothing in the file is imported or evaluated.
"""

import re
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jax_transformer.architectures import huggingface_config, registry
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import models
from jax_transformer.errors import ConfigError, InputError, about_file
from jax_transformer.extras.toolkits.t5x import t5x_checkpoint, t5x_names
from jax_transformer.extras.toolkits.t5x.t5x_names import Layout
from jax_transformer.formats import base
from jax_transformer.formats.base import Check, Destination, Format, Pretrained, Settled, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.storage import huggingface_folder, read_back, run_files, untrusted
from jax_transformer.storage.tensors import LazyState, LazyTensor, Note, Shape, TensorInfo
from jax_transformer.storage.untrusted import shown
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Rule

CONFIG = "config.gin"
"""T5X's configuration, in the folder that holds the checkpoints; an export has it in its own."""
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
_ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu", "silu": "silu"}
"""flax's names of activations."""
_BUCKETS = 32
"""Buckets of distances, in T5X's networks."""


@dataclass(frozen=True)
class T5XWeights(Pretrained):
    """The weights of a checkpoint, under this project's names."""

    layout: Layout | None = None
    config_gives_way: ClassVar[bool] = True  # config.gin is what is taken if nothing else is given

    def settle(self, description: models.ModelDescription) -> Settled:
        """Return the configuration of a checkpoint whose ``config.gin`` does not decide it.

        Its sizes are read from the shapes; the activation is the preset's, or ``--set
        activation=``. Raises ConfigError if neither says it, or if nothing describes the model.
        """
        layout = self.layout
        assert layout is not None  # open() finds it
        if (description.config is None) == (description.preset is None):
            raise ConfigError(
                f"{self.path}: no {CONFIG} tells mlp_activations: give --preset t5, with"
                " --set activation=gelu_tanh for T5 v1.1, mT5 and UMT5, or --config config.json"
            )
        if description.config is not None:
            names = stored_names(layout)
            config = models.read_config(Path(description.config), names)
            return Settled(config.with_sizes(**description.changes), {}, {})
        preset = registry.find_preset(description.preset or "").config
        changes = dict(description.changes)
        activation = changes.pop("activation", None)
        if preset.architecture not in t5x_names.FAMILIES:
            raise ConfigError(
                f"--preset {description.preset}: {self.path} is a model of T5X, and the preset t5 "
                "describes those"
            )
        if activation is None and layout.gated != preset.encoder.gated:
            raise ConfigError(
                f"{self.path}: has wi_0 and wi_1, and the preset {description.preset} does not say "
                "which activation is between them: --set activation=gelu_tanh for T5 v1.1, mT5 and "
                "UMT5"
            )
        name = preset.encoder.activation.value if activation is None else activation
        if name not in _ACTIVATIONS:
            raise ConfigError(f"--set activation={name}: give one of {', '.join(_ACTIVATIONS)}")
        activations = (_ACTIVATIONS[name], *(("linear",) if layout.gated else ()))
        gin = Gin(None, activations)
        config = configuration(layout, gin).with_sizes(**changes)
        fields = {} if activation is not None else {"activation": name}
        return Settled(config, layout.sizes(), fields | {"dropout": config.dropout})


class T5XCheckpoint(Format):
    name, title = "t5x", "checkpoint of T5X"
    mark = t5x_checkpoint.INDEX
    has_torch_names = False
    open_options = ("scan_axis",)
    write_options = ("scan_layers", "param_scan_axis")

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and t5x_checkpoint.is_checkpoint(path)

    def hint(self, path: Path) -> str:
        """Return a question for the newest checkpoint, if a folder has checkpoints of T5X."""
        steps = [
            int(step)
            for folder in path.glob("checkpoint_*")
            if (step := folder.name.removeprefix("checkpoint_")).isdecimal()
            and self.recognises(folder)
        ]
        return f" (did you mean {path / f'checkpoint_{max(steps)}'}?)" if steps else ""

    def open(self, path: Path, scan_axis: int | None = None, **options: Any) -> Pretrained:
        """Open a checkpoint; the configuration is taken from ``config.gin``, if it is there."""
        opened = t5x_checkpoint.find(path)
        gin = find_gin(path)
        weights = opened.weights
        infos = {name: tensor.info for name, tensor in weights.items()}
        with about_file(path):
            layout = t5x_names.find(infos, gin.scan_axis if scan_axis is None else scan_axis)
            config = configuration(layout, gin) if gin.activations else None
        table, shapes = t5x_names.table(layout)
        return T5XWeights(
            self,
            path,
            str(path),
            {
                name: TensorInfo(shapes[name], infos[rule.torch].dtype)
                for rule in table
                for name in rule.flax
            },
            lambda: _to_flax(table, weights, shapes),
            config,
            files=(*opened.files, *((gin.path,) if gin.path else ())),
            dropped=tuple(_not_weights(opened)),
            stored_names=_places(layout),
            layout=layout,
        )

    def inspect(self, path: Path) -> Contents:
        opened = t5x_checkpoint.find(path)
        hashes = {name: read_back.sha256(array.read()) for name, array in opened.arrays.items()}
        return Contents(
            str(path),
            self.title,
            {name: array.info for name, array in opened.arrays.items()},
            {t5x_checkpoint.INDEX: run_files.sha256(path / t5x_checkpoint.INDEX)} | hashes,
            {"version": opened.version},
        )

    def is_written(self, name: str) -> bool:
        return name in (t5x_checkpoint.INDEX, CONFIG, "state.step") or name.startswith(
            t5x_checkpoint.TARGET
        )

    def files(self, to: Destination) -> Mapping[str, bytes]:
        assert to.config is not None  # a folder is not a copy of a file
        return {CONFIG: to_gin(to.config, _layout(to)).encode()}

    def layout(self, to: Destination, names: Iterable[str]) -> base.Layout:
        return base.Layout(_places(_layout(to)))

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        table, shapes = t5x_names.table(_layout(to))
        number = to.path.name.removeprefix("checkpoint_")
        step = int(number) if number.isdecimal() and int(number) < 2**31 else 0
        with read_back.new_folder(to.path, state) as new:
            t5x_checkpoint.write(new.path, rules.to_torch_lazily([*table], new.state), step)
            arrays = _to_flax(table, t5x_checkpoint.find(new.path).weights, shapes)
            new.compare(arrays)
            check(arrays)
            huggingface_folder.write_files(new.path, to.files)
            new.compare_files(to.files)
            return Written(new.sha256())


def _layout(to: Destination) -> Layout:
    """Return the layout to write. Raises ConfigError, naming the fields, if no network of T5X
    computes what the model computes."""
    assert to.config is not None  # a folder is not a copy of a file
    layout = t5x_names.layout_of(
        to.config,
        scan_layers=bool(to.options.get("scan_layers")),
        scan_axis=to.options.get("param_scan_axis"),
    )
    network = configuration(replace(layout, buckets=_BUCKETS), _gin(to.config, layout))
    different = huggingface_config.differences(to.config, network)
    if different:
        listed = [f"{name}={ours}, and T5X has {theirs}" for name, ours, theirs in different]
        raise ConfigError(f"cannot be written for T5X: {'; '.join(listed)}")
    return layout


def _places(layout: Layout) -> dict[str, str]:
    """Return the name of each array as T5X has it, with the layer that is meant."""
    stored = {}
    for rule in t5x_names.table(layout)[0]:
        for number, name in enumerate(rule.flax):
            layer = f"[layer {number} of axis {layout.scan_axis}]" if rule.cuts else ""
            stored[name] = f"{rule.torch}{layer}"
    return stored


def _to_flax(
    table: Sequence[Rule], stored: LazyState, shapes: Mapping[str, Shape]
) -> dict[str, LazyTensor]:
    """Return the Flax arrays, none of them read. Those of several layers are decompressed once."""
    spool, several = _Spool(), {rule.torch for rule in table if rule.cuts}
    state = {
        name: LazyTensor(tensor.info, partial(spool.read, name, tensor))
        if name in several
        else tensor
        for name, tensor in stored.items()
    }
    return rules.to_flax_lazily([*table], state, shapes)


class _Spool:
    """Arrays that are decompressed once, each into a temporary file without a name.

    A scanned array is read layer by layer; without this each layer would decompress all of them.
    """

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def read(self, name: str, tensor: LazyTensor) -> np.ndarray:
        """Return the array, which the first call copies into a file unless it is mapped already.

        Each call maps the file anew, so that pages of arrays that are no longer used are freed.
        """
        if name not in self._files:
            array = base = tensor.read()
            while isinstance(base.base, np.ndarray):
                base = base.base
            if isinstance(base, np.memmap):
                return array
            file = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the spool)
            weakref.finalize(self, file.close)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            self._files[name] = file
        raw = np.memmap(self._files[name], np.uint8, "r", 0, (tensor.nbytes,))
        return np.asarray(raw).view(tensor.info.numpy_dtype()).reshape(tensor.shape)


def _not_weights(opened: t5x_checkpoint.Checkpoint) -> Iterator[Note]:
    """Yield the arrays that are not weights, counted by the part of T5X's state."""
    parts: dict[str, list[str]] = {}
    for name in opened.arrays:
        if not name.startswith(t5x_checkpoint.TARGET):
            words = name.split(".")
            parts.setdefault(".".join(words[: 2 if words[0] == "state" else 1]), []).append(name)
    for part, names in parts.items():
        if part == "state.step":
            yield Note(part, "the place in training")
            continue
        listed = ", ".join(sorted({name.rpartition(".")[2] for name in names})[:6])
        yield Note(
            f"{part} ({len(names)} arrays: {listed})",
            "the optimizer's state, which no optimizer here continues"
            if part == "state.param_states"
            else "not weights of the model",
        )


# The configuration


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


def find_gin(folder: Path) -> Gin:
    """Read the ``config.gin`` in the folder of a checkpoint, or in the folder above it.

    Raises InputError if it cannot be read, UnsafeFileError if it is too large. Without such a file
    nothing is known.
    """
    paths = (folder / CONFIG, folder.absolute().parent / CONFIG)
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return Gin()
    values = _bindings(untrusted.read_lines(path, longest=_LONGEST))
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


def _bindings(lines: Iterable[str]) -> dict[str, str]:
    """Return the text of each binding, by class and parameter; macros are replaced once."""
    values: dict[str, str] = {}
    macros: dict[str, str] = {}
    block = ""
    for line in _statements(lines):
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


def _statements(lines: Iterable[str]) -> list[str]:
    """Return the lines without comments; what continues a line follows it."""
    statements: list[str] = []
    goes_on = False
    for line in lines:
        line = line.split("#")[0].rstrip()
        if goes_on and statements:
            statements[-1] += " " + line.strip().removesuffix("\\")
        elif line:
            statements.append(line.removesuffix("\\"))
        last = statements[-1] if statements else ""
        goes_on = line.endswith("\\") or last.count("(") > last.count(")")
        goes_on = goes_on and len(last) < 10_000
    return statements


def configuration(layout: Layout, gin: Gin) -> TransformerConfig:
    """Return the configuration of a checkpoint with these sizes and settings.

    It is UMT5 if every layer has a table of distances, otherwise T5 or, with its vocabulary, mT5.
    Raises InputError if no family has these activations, or not as many as the checkpoint has
    kernels.
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
        "model_type": "umt5" if layout.distances_in_layers else shared,
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
    return huggingface_config.from_config(data)


def stored_names(layout: Layout) -> set[str]:
    """Return transformers' names of the embedding and, if it is not tied, of the output layer."""
    return {"shared.weight"} | (set() if layout.tied else {"lm_head.weight"})


def _gin(config: TransformerConfig, layout: Layout) -> Gin:
    """Return the settings of a model. Raises InputError for an activation that flax lacks."""
    activation = config.encoder.activation.value
    if activation not in _ACTIVATIONS:
        raise InputError(f"activation={activation} is none that T5X's networks can name")
    activations = (_ACTIVATIONS[activation], *(("linear",) if layout.gated else ()))
    return Gin(None, activations, config.dropout, multilingual=config.architecture == "mt5")


def to_gin(config: TransformerConfig, layout: Layout) -> str:
    """Return the bindings of ``T5Config``."""
    network = "scalable_t5" if layout.split_heads else "t5"
    bindings: dict[str, Any] = {
        "dropout_rate": config.dropout,
        "emb_dim": layout.d_model,
        "head_dim": layout.head_dim,
        "logits_via_embedding": layout.tied,
        "mlp_activations": _gin(config, layout).activations,
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


FORMAT = T5XCheckpoint()
