"""A checkpoint of T5X: T5, mT5 and UMT5, unrolled and scanned."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import models
from jax_transformer.errors import ConfigError, about_file
from jax_transformer.extras.toolkits.t5x import gin_config, t5x_checkpoint, t5x_names
from jax_transformer.extras.toolkits.t5x.t5x_names import Layout
from jax_transformer.formats import base
from jax_transformer.formats.base import Destination, Format, Pretrained, Settled, Written
from jax_transformer.formats.contents import Contents
from jax_transformer.storage import huggingface_folder, read_back, run_files
from jax_transformer.storage.tensors import LazyState, Note, TensorInfo
from jax_transformer.weights import stacked

_ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu", "silu": "silu"}


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
                f"{self.path}: no {gin_config.CONFIG} tells mlp_activations: give --preset t5, with"
                " --set activation=gelu_tanh for T5 v1.1, mT5 and UMT5, or --config config.json"
            )
        if description.config is not None:
            names = gin_config.stored_names(layout)
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
        gin = gin_config.Gin(None, activations)
        config = gin_config.configuration(layout, gin).with_sizes(**changes)
        fields = {} if activation is not None else {"activation": name}
        return Settled(config, layout.sizes(), fields | {"dropout": config.dropout})

    def notes_for(self, to: Destination) -> tuple[Note, ...]:
        return _scale_note(to.config)


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
        gin = gin_config.find(path)
        weights = opened.weights
        infos = {name: tensor.info for name, tensor in weights.items()}
        with about_file(path):
            layout = t5x_names.find(infos, gin.scan_axis if scan_axis is None else scan_axis)
            config = gin_config.configuration(layout, gin) if gin.activations else None
        table = t5x_names.table(layout)
        return T5XWeights(
            self,
            path,
            str(path),
            {
                name: TensorInfo(rule.flax_shape, infos[rule.stored].dtype)
                for rule in table
                for name in rule.flax
            },
            lambda: stacked.to_flax(table, weights),
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
        return t5x_checkpoint.is_written(name)

    def files(self, to: Destination) -> Mapping[str, bytes]:
        assert to.config is not None  # a folder is not a copy of a file
        return {gin_config.CONFIG: gin_config.to_gin(to.config, _layout(to)).encode()}

    def layout(self, to: Destination, names: Iterable[str]) -> base.Layout:
        is_twice = to.source is not None and to.source.format is self
        notes = () if is_twice else _scale_note(to.config)
        return base.Layout(_places(_layout(to)), notes=notes)

    def write(
        self, to: Destination, state: LazyState, check: Callable[[LazyState], Any]
    ) -> Written:
        table = t5x_names.table(_layout(to))
        number = to.path.name.removeprefix("checkpoint_")
        step = int(number) if number.isdecimal() and int(number) < 2**31 else 0
        with read_back.new_folder(to.path, state) as new:
            t5x_checkpoint.write(new.path, stacked.to_stored(table, new.state), step)
            arrays = stacked.to_flax(table, t5x_checkpoint.find(new.path).weights)
            new.compare(arrays)
            check(arrays)
            huggingface_folder.write_files(new.path, to.files)
            new.compare_files(to.files)
            return Written(new.sha256())


def _layout(to: Destination) -> Layout:
    """Return the layout to write. Raises ConfigError if T5X has no network for the model."""
    assert to.config is not None  # a folder is not a copy of a file
    return t5x_names.layout_of(
        to.config,
        scan_layers=bool(to.options.get("scan_layers")),
        scan_axis=to.options.get("param_scan_axis"),
    )


def _places(layout: Layout) -> dict[str, str]:
    """Return the name of each array as T5X has it, with the layer that is meant."""
    rules = t5x_names.table(layout)
    return {name: rule.place(number) for rule in rules for number, name in enumerate(rule.flax)}


def _scale_note(config: TransformerConfig | None) -> tuple[Note, ...]:
    """Return a note on the scale of UMT5's logits, which differs between T5X and transformers."""
    if config is None or not t5x_names.scale_differs(config):
        return ()
    note = Note(
        "the scale of the logits",
        "transformers multiplies the logits of every UMT5 by d_model**-0.5, and T5X only with a "
        "tied output layer: the most probable token is the same, probabilities are not",
    )
    return (note,)


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


FORMAT = T5XCheckpoint()
