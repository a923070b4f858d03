"""Stored weights of each kind of file or folder: names, shapes, and the files next to them.

Loads no jax.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_transformer.architectures import (
    fairseq,
    huggingface_config,
    huggingface_state,
    joeynmt,
    marian_npz,
    opennmt_py,
    registry,
    t5x_config,
)
from jax_transformer.architectures import t5x as t5x_names
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.architectures.toolkit import Toolkit, Vocabularies
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.storage import (
    checkpoint,
    checkpoint_stream,
    kinds,
    lazy,
    pt,
    safetensors,
    t5x,
)
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage import marian as marian_files
from jax_transformer.storage.checkpoint import Checkpoint
from jax_transformer.storage.kinds import Kind
from jax_transformer.storage.lazy import LazyState, LazyTensor
from jax_transformer.storage.run_folder import RunFolder, open_weights, parsed
from jax_transformer.storage.tensors import Note, TensorInfo
from jax_transformer.storage.tensors import same as same_bits
from jax_transformer.weights import lora, rules, stacked

_WHY_NOT = {
    "params": "the moving average of the weights is taken instead",
    "opt_state": "the optimizer's state",
    "step": "the place in training",
}

_TOOLKITS = (joeynmt.TOOLKIT, opennmt_py.TOOLKIT, fairseq.TOOLKIT)

Stored = TypeVar("Stored", bound="StoredWeights")


@dataclass(frozen=True)
class StoredWeights:
    """Stored weights; see :class:`jax_transformer.pretrained.Pretrained`."""

    kind: Kind
    path: Path
    """The file or folder on this machine."""
    title: str
    """The path and the selected weights, for messages: ``runs/phrases (best, step 2000)``."""
    tensors: Mapping[str, TensorInfo]
    """Shapes and dtypes, under PyTorch's names if ``kind.has_torch_names``, otherwise under this
    project's.
    """
    scan: Callable[[], LazyState]
    """Return the tensors, none of them read; names that are tied have one LazyTensor."""
    config: TransformerConfig | None = None
    """The model's configuration; None for a bare file, which does not have one."""
    weights: str = ""
    """The selected weights of the folder: ``averaged``, ``best``, ``last``, a step's number, or a
    file's name.
    """
    step: int = 0
    """The training step that the weights are of, in a run."""
    run: RunFolder | None = None
    """The run that the weights are from."""
    files: tuple[Path, ...] = ()
    """Files that change with the weights: the manifest of a checkpoint, the index and shards of a
    folder, or the file.
    """
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    """Files of a Hugging Face folder that go with the weights, by name: configuration, tokenizer,
    card.
    """
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names of one tensor."""
    dropped: tuple[Note, ...] = ()
    """The entries of the file or folder that are no weights of the model."""
    derived: tuple[Note, ...] = ()
    """Those of ``tensors`` that are not stored, but copies of others or computed."""
    t5x: t5x_names.Layout | None = None
    """The layout of a checkpoint of T5X."""
    marian: marian_files.Model | None = None
    """The files of a model of Marian."""
    vocabularies: Vocabularies | None = None
    """The vocabularies of another toolkit's checkpoint."""

    def read(self) -> dict[str, np.ndarray]:
        """Read all tensors into memory; names that are tied have one array."""
        return lazy.arrays(self.scan())

    def with_names(self: Stored, changes: NameChanges) -> Stored:
        """The same weights under other names, without the ignored ones.

        Raises as :meth:`.NameChanges.apply`, and ConfigError for a folder.
        """
        if changes == NameChanges():
            return self
        if not self.kind.is_file:
            source = "transformers" if self.kind.has_torch_names else "this project"
            raise ConfigError(f"{changes}: {self.path} has the names of {source}")
        changed = changes.apply(self.tensors)

        def renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
            return {changed[name]: value for name, value in tensors.items() if name in changed}

        ties = [tuple(changed[name] for name in names if name in changed) for names in self.ties]
        ignored = [name for name in self.tensors if name not in changed]
        return replace(
            self,
            tensors=renamed(self.tensors),
            scan=lambda: renamed(self.scan()),
            ties=tuple(names for names in ties if len(names) > 1),
            dropped=(*self.dropped, *(Note(name, changes.why_ignored(name)) for name in ignored)),
        )


def find(
    path: str | Path,
    weights: str = "auto",
    key: str | None = None,
    scan_axis: int | None = None,
) -> StoredWeights:
    """Find the weights at ``path``.

    Arguments and errors are those of :func:`jax_transformer.pretrained.open`.
    """
    path = kinds.local(path)
    kind = kinds.of(path)
    if weights != "auto" and kind is not Kind.RUN:
        raise ConfigError(
            f"--weights {weights}: {path} is no run folder, and has one set of weights"
        )
    if key is not None and kind is not Kind.PT:
        raise ConfigError(f"--key {key}: {path} is no PyTorch file")
    if scan_axis is not None and kind is not Kind.T5X:
        raise ConfigError(f"--param-scan-axis {scan_axis}: {path} is no checkpoint of T5X")
    if kind is Kind.T5X:
        return _t5x(path, scan_axis)
    if kind is Kind.MARIAN:
        return of_marian(marian_files.find(path))
    if kind is Kind.RUN:
        return _run(path, weights)
    if kind is Kind.STEP:
        return _step(path)
    if kind is Kind.HUGGINGFACE:
        return _huggingface(path)
    if kind is Kind.PT:
        return _pt(path, key)
    scan = partial(safetensors.scan, path)
    files = tuple(dict.fromkeys([path, *safetensors.files(path)]))
    return StoredWeights(kind, path, str(path), safetensors.describe(path), scan, files=files)


def _run(path: Path, weights: str) -> StoredWeights:
    folder = RunFolder(path)
    config = parsed(folder.config, TransformerConfig.from_json)
    candidate, opened = open_weights(folder, weights)
    title = f"{path} ({candidate.name}, step {candidate.step})"
    stored = _checkpoint(Kind.RUN, path, title, opened, folder, config)
    return replace(stored, weights=candidate.name)


def _step(path: Path) -> StoredWeights:
    path = path.absolute()
    if not path.name.isdecimal():
        raise InputError(f"{path}: a single checkpoint has its step as its name")
    config, folder = config_around(path), RunFolder(path.parent.parent)
    opened = checkpoint.open(path.parent, int(path.name))
    stored = _checkpoint(Kind.STEP, path, str(path), opened, folder if config else None, config)
    return replace(stored, weights=path.name)


def config_around(path: Path) -> TransformerConfig | None:
    """The configuration of the run folder of a checkpoint, which need not exist yet; None if it is
    in no run folder.
    """
    folder = RunFolder(path.absolute().parent.parent)
    return parsed(folder.config, TransformerConfig.from_json) if folder.config.is_file() else None


def _checkpoint(
    kind: Kind,
    path: Path,
    title: str,
    opened: Checkpoint,
    run: RunFolder | None,
    config: TransformerConfig | None,
) -> StoredWeights:
    """The weights for inference: the moving average if there is one, and the frozen arrays."""
    groups: dict[str, list[str]] = {}
    for name in opened.tensors:
        groups.setdefault(name.partition("/")[0], []).append(name)
    trained = "ema" if "ema" in groups else "params"
    if trained not in groups:
        raise CheckpointError(f"{path}: holds no weights among {', '.join(groups) or 'nothing'}")
    used = [group for group in (trained, "frozen") if group in groups]
    stored = {name.partition("/")[2]: name for group in used for name in groups.pop(group)}
    derived = tuple(Note(name, "with its low-rank adapter added") for name in lora.adapted(stored))
    dropped = tuple(
        Note(
            group if names == [group] else f"{group}/ ({len(names)} arrays)",
            _WHY_NOT.get(group, "no weights"),
        )
        for group, names in groups.items()
    )

    def scan() -> dict[str, LazyTensor]:
        arrays = checkpoint_stream.scan(opened, used)
        return _without_adapters({name: arrays[full] for name, full in stored.items()})

    tensors = {
        name: opened.tensors[full] for name, full in stored.items() if lora.is_parameter(name)
    }
    extra = run.path / folders.IN_RUN if run else None
    extra_files = {
        name: extra / name for name in folders.EXTRA_FILES if extra and (extra / name).is_file()
    }
    return StoredWeights(
        kind,
        path,
        title,
        tensors,
        scan,
        config,
        step=opened.step,
        run=run,
        files=(opened.path / checkpoint.MANIFEST,),
        extra_files=extra_files,
        dropped=dropped,
        derived=derived,
    )


def _without_adapters(arrays: LazyState) -> dict[str, LazyTensor]:
    """The arrays of the model itself, with each low-rank adapter added to its kernel when it is
    read.
    """

    def merged(name: str) -> np.ndarray:
        names = [name, *(name + part for part in (lora.A, lora.B, lora.SCALE))]
        return lora.merge({each: arrays[each].read() for each in names})[name]

    adapted = {
        name: LazyTensor(arrays[name].info, partial(merged, name)) for name in lora.adapted(arrays)
    }
    return {name: arrays[name] for name in arrays if lora.is_parameter(name)} | adapted


def _huggingface(path: Path) -> StoredWeights:
    """A folder's tensors under all names of the module's ``state_dict()``, including those that are
    not in its file.
    """
    folder = folders.find(path)
    scanned = folders.scan(folder)
    stored = {name: tensor.info for name, tensor in scanned.items()}

    def same(one: str, other: str) -> bool:
        one_tensor, other_tensor = scanned[one], scanned[other]
        return one_tensor is other_tensor or same_bits(one_tensor.read(), other_tensor.read())

    try:
        config = huggingface_config.from_config(folder.data, names=stored, same=same)
    except InputError as error:
        raise InputError(f"{path}/{error}") from None
    tensors = huggingface_state.complete(stored, config)
    dropped = [
        Note(name, huggingface_state.why_dropped(name, config))
        for name in stored
        if name not in tensors
    ]
    derived = tuple(
        Note(name, huggingface_state.why_completed(name, config))
        for name in tensors
        if name not in stored
    )
    return StoredWeights(
        Kind.HUGGINGFACE,
        path,
        f"{path} ({folder.weights.name})",
        tensors,
        lambda: huggingface_state.complete(scanned, config),
        config,
        weights=folder.weights.name,
        files=tuple(folder.files),
        extra_files={name: path / name for name in folder.extra_names},
        dropped=(*dropped, *(Note(name, reason) for name, reason in folder.others)),
        derived=derived,
    )


def _pt(path: Path, key: str | None) -> StoredWeights:
    content = pt.describe(path)
    toolkit = None if key is not None else toolkit_of(content)
    if toolkit is not None:
        return _of_toolkit(path, toolkit, content)
    state = pt.open_state(path, key)
    title = f"{path} ({'.'.join(state.keys)})" if state.keys else str(path)
    return StoredWeights(
        Kind.PT,
        path,
        title,
        state.tensors,
        state.scan,
        files=(path,),
        ties=state.ties,
        dropped=state.others,
    )


def toolkit_of(content: Any) -> Toolkit | None:
    """The toolkit that wrote a PyTorch file with this content, if it is one of those known here."""
    if not isinstance(content, dict):
        return None
    return next((toolkit for toolkit in _TOOLKITS if toolkit.recognises(content)), None)


def _of_toolkit(path: Path, toolkit: Toolkit, content: Any) -> StoredWeights:
    """The checkpoint of another toolkit, under its own names."""
    try:
        described = toolkit.describe(path, content)
    except InputError as error:
        named = str(error).startswith(str(path.parent))
        raise error if named else InputError(f"{path}: {error}") from None

    config = described.config
    ties = rules.aliases(registry.weight_table(config.architecture, config))

    def stored() -> LazyState:
        states = pt.states(path, described.states)
        return {name: tensor for name, tensor in states.items() if name not in described.ignored}

    def scan() -> LazyState:
        """Add tied copies that the file leaves out."""
        tensors = stored()
        left_out = {name: tensors[of] for name, of in ties.items() if of in tensors}
        return left_out | dict(tensors)

    infos = {name: tensor.info for name, tensor in scan().items()}
    derived = [
        Note(name, f"repeats {ties[name]}, with which the model ties it")
        for name in infos.keys() - stored().keys()
    ]
    keys = {keys[0] for keys in described.states.values()}
    others = [Note(str(name), "not part of the weights") for name in content if name not in keys]
    ignored = [Note(name, reason) for name, reason in described.ignored.items()]
    return StoredWeights(
        Kind.PT,
        path,
        f"{path} ({toolkit.title})",
        infos,
        scan,
        config,
        files=(path, *described.files),
        dropped=(*ignored, *others),
        derived=tuple(derived),
        vocabularies=described.vocabularies,
    )


def of_marian(model: marian_files.Model, *, for_transformers: bool = False) -> StoredWeights:
    """A model of Marian under transformers' names, with the row of zeros for padding.

    With ``for_transformers``, its configuration has the positions and norms that transformers
    computes, and not Marian's.
    """
    try:
        config = marian_npz.configuration(model.options)
        weights = marian_npz.state(model.arrays, config)
        config = replace(config, eos_id=marian_files.end_id(model))
    except InputError as error:
        named = InputError(f"{model.path}: {error}")
        named.details = error.details
        raise named from None
    if for_transformers:
        config = marian_npz.as_transformers_computes(config)
    tensors = huggingface_state.complete(
        {name: tensor.info for name, tensor in weights.items()}, config
    )
    derived = tuple(
        Note(name, huggingface_state.why_completed(name, config))
        for name in tensors
        if name not in weights
    )
    return StoredWeights(
        Kind.MARIAN,
        model.path,
        str(model.path),
        tensors,
        lambda: huggingface_state.complete(weights, config),
        config,
        weights=model.path.name,
        files=model.files,
        derived=derived,
        marian=model,
    )


def _t5x(path: Path, scan_axis: int | None) -> StoredWeights:
    """A checkpoint of T5X under this project's names; the configuration is that of ``config.gin``,
    if it is there.
    """
    opened = t5x.find(path)
    gin = t5x_config.find(path)
    weights = opened.weights
    infos = {name: tensor.info for name, tensor in weights.items()}
    try:
        layout = t5x_names.find(infos, gin.scan_axis if scan_axis is None else scan_axis)
        config = t5x_config.configuration(layout, gin) if gin.activations else None
    except InputError as error:
        named = InputError(f"{path}: {error}")
        named.details = error.details
        raise named from None
    table = t5x_names.table(layout)
    tensors = {
        name: TensorInfo(rule.flax_shape, infos[rule.stored].dtype)
        for rule in table
        for name in rule.flax
    }
    return StoredWeights(
        Kind.T5X,
        path,
        str(path),
        tensors,
        lambda: stacked.to_flax(table, weights),
        config,
        files=(*opened.files, *((gin.path,) if gin.path else ())),
        dropped=tuple(_not_weights(opened)),
        t5x=layout,
    )


def _not_weights(opened: t5x.Checkpoint) -> Iterator[Note]:
    """The arrays that are no weights, counted by the part of T5X's state that they belong to."""
    parts: dict[str, list[str]] = {}
    for name in opened.arrays:
        if not name.startswith(t5x.TARGET):
            words = name.split(".")
            parts.setdefault(".".join(words[: 2 if words[0] == "state" else 1]), []).append(name)
    for part, names in parts.items():
        if part == "state.step":
            yield Note(part, _WHY_NOT["step"])
            continue
        kinds_of = sorted({name.rpartition(".")[2] for name in names})
        listed = ", ".join(kinds_of[:6])
        yield Note(
            f"{part} ({len(names)} arrays: {listed})",
            "the optimizer's state, which no optimizer here continues"
            if part == "state.param_states"
            else "no weights of the model",
        )
