"""Run a planned conversion, and report it; ``load`` and ``save`` for models in any kind of file.

A conversion reads, casts, renames, writes, reads back and checks.
"""

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_transformer.architectures import huggingface_state, tensor_names
from jax_transformer.architectures.base import Architecture
from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.convert import checking, planning, preparation
from jax_transformer.convert.planning import Plan
from jax_transformer.convert.preparation import ModelDescription, Prepared
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import pretrained
from jax_transformer.formats import registry as formats
from jax_transformer.formats.base import Checked, Destination
from jax_transformer.storage import lazy, tensors
from jax_transformer.storage.lazy import LazyState, LazyTensor
from jax_transformer.storage.untrusted import plain
from jax_transformer.weights import lazy_rules, rules

if TYPE_CHECKING:
    from jax_transformer.architectures.model_weights import ModelWeights


@dataclass(frozen=True)
class Planned:
    """A conversion that was only planned (``--dry-run``)."""

    plan: Plan
    preset_sizes: Mapping[str, Any]
    """Sizes that no shape shows, taken from the preset."""

    def lines(self) -> Iterator[str]:
        yield from _size_lines(self.plan, self.preset_sizes)
        yield from self.plan.lines()
        yield "nothing was written"

    def to_data(self) -> dict[str, Any]:
        return {"plan": self.plan.to_data(), "kept": dict(self.preset_sizes)}


@dataclass(frozen=True)
class Outcome:
    """A finished conversion."""

    plan: Plan
    summary: str
    preset_sizes: Mapping[str, Any]
    loss: tensors.CastLoss | None
    checked: Checked
    sha256: str
    """Hash of the file, or of a folder's weights by name, dtype, shape and bytes.

    The files of a folder themselves contain the time of writing.
    """
    files: tuple[str, ...] = ()
    """Files that were written with the weights."""

    def lines(self) -> Iterator[str]:
        yield self.summary
        yield from self.plan.prefix_lines()
        yield from _size_lines(self.plan, self.preset_sizes)
        yield from (f"tied: {' = '.join(names)}" for names in self.plan.ties)
        yield from (
            f"not converted: {plain(note.name)}: {note.reason}" for note in self.plan.dropped
        )
        yield from (f"with them: {', '.join(self.files)}" for _ in self.files[:1])
        yield from self.loss.lines() if self.loss is not None else ()
        yield self.checked.line()
        yield f"sha256 {self.sha256}"

    def to_data(self) -> dict[str, Any]:
        loss = vars(self.loss) if self.loss is not None else None
        extra = {
            "cast": loss,
            "check": {"how": self.checked.method, "errors": self.checked.errors},
            "sha256": self.sha256,
            "files": list(self.files),
        }
        return {"plan": self.plan.to_data(), "kept": dict(self.preset_sizes)} | extra


def _size_lines(plan: Plan, preset_sizes: Mapping[str, Any]) -> Iterator[str]:
    """Yield the sizes that were read from the shapes, and those taken from the preset."""
    if plan.inferred:
        yield (
            "from the shapes: "
            f"{', '.join(f'{name}={size}' for name, size in plan.inferred.items())}"
        )
    if preset_sizes:
        yield (
            "the preset's, as no shape shows it: "
            f"{', '.join(f'{name}={value}' for name, value in preset_sizes.items())}"
            " (--set changes it)"
        )


def convert(prepared: Prepared) -> Outcome:
    """Run the conversion; the destination appears complete, or stays as it was.

    Raises InputError listing everything that does not fit, before anything is written.
    """
    source, to, model = prepared.source, prepared.to, prepared.model
    from_torch, to_torch = source.format.has_torch_names, to.format.has_torch_names
    state = source.scan()
    aliases = rules.aliases(model.table) if model is not None and from_torch else {}
    prepared.refuse(lazy.differing_ties(aliases, state))
    casting = None if to.dtype is None else lazy.Cast(to.dtype)
    if casting is not None:
        state = casting.apply(state)
        if model is not None:
            state = huggingface_state.computed_again(state, model.config)
    result = renamed(state, model, from_torch=from_torch, to_torch=to_torch)
    stored = result if model is None else to.format.stored(result, model.config)
    reason = "no architecture was given" if model is None else "--no-check"
    checked = Checked(f"read back bit for bit; not run: {reason}")

    def check(read_back: LazyState) -> None:
        nonlocal checked
        if not to.self_check or model is None:
            return
        tied = [name for names in planning.ties_of(model.table) for name in names]
        after = to.format.completed(read_back, result, model.config, tied)
        before = state
        if to_torch and from_torch:
            before = lazy_rules.to_flax(model.table, state, model.shapes["flax"])
        elif not to_torch and not from_torch:
            before = lazy_rules.to_torch(model.table, state)
        sides = (after, before) if to_torch else (before, after)
        checked = checking.check(model.config, model.table, *sides)

    with _progress(stored, str(to.path)) as shown:
        written = to.format.write(to, shown, check)
    content = written.summary
    if content is None:
        dtypes = ", ".join(sorted({tensor.dtype for tensor in result.values()}))
        numbers = sum(tensor.info.size for tensor in stored.values())
        content = f"{len(stored)} tensors, {numbers:,} numbers, {dtypes}"
    return Outcome(
        prepared.plan,
        f"{source.title} -> {to.path}: {content}",
        prepared.preset_sizes,
        None if casting is None else casting.loss(),
        written.checked or checked,
        written.sha256,
        tuple(sorted(to.files)),
    )


def renamed(
    state: LazyState, model: "ModelWeights | None", *, from_torch: bool, to_torch: bool
) -> LazyState:
    """Rename the weights for the destination; tensors that the model ties become one."""
    if model is None:
        return state
    if from_torch and not to_torch:
        return lazy_rules.to_flax(model.table, state, model.shapes["flax"])
    if not from_torch and to_torch:
        return lazy_rules.to_torch(model.table, state)
    if to_torch:
        state = {rule.torch: state[rule.torch] for rule in model.table}
        for first, *others in planning.ties_of(model.table):
            state |= dict.fromkeys(others, state[first])
    return state


@contextmanager
def _progress(state: LazyState, title: str) -> Iterator[LazyState]:
    """Yield the tensors, with a bar on stderr that counts the bytes of those that were read.
    Without a terminal there is none.
    """
    if not sys.stderr.isatty():
        yield state
        return
    from tqdm import tqdm

    total = sum(tensor.nbytes for tensor in state.values())
    with tqdm(
        desc=title, total=total, unit="B", unit_scale=True, dynamic_ncols=True, leave=False
    ) as bar:

        def counted(tensor: LazyTensor) -> np.ndarray:
            array = tensor.read()
            bar.update(array.nbytes)
            return array

        shown: dict[int, LazyTensor] = {}  # so that ties stay
        yield {
            name: shown.setdefault(id(tensor), LazyTensor(tensor.info, partial(counted, tensor)))
            for name, tensor in state.items()
        }


# Models


def load(
    path: str | Path,
    config: TransformerConfig | None = None,
    *,
    preset: str | None = None,
    dtype: str | None = None,
    weights: str = "auto",
    key: str | None = None,
    strip_prefix: str = "",
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    architecture: Architecture | str | None = None,
    scan_axis: int | None = None,
    **sizes: Any,
) -> Any:
    """Load the ``Transformer`` at ``path``.

    Every file or folder that :func:`jax_transformer.formats.pretrained.open` opens can be loaded.

    Args:
        path: a file or folder; its content shows its kind, and no code in it is run.
        config: the configuration of a bare file of weights, unless ``preset`` names one.
        preset: the name of a preset. Its sizes are read from the shapes, or set by ``sizes`` as in
            :func:`jax_transformer.preset`. A run folder needs neither.
        dtype: dtype to which every array is cast; None keeps their own.
        weights: the checkpoint of a run folder, as for ``translate --weights``.
        key: the key of the state_dict in a PyTorch file, e.g. ``model``; needed only if there are
            several.
        strip_prefix: prefix to remove from every name, e.g. ``module.``. By default a prefix that
            stands before most of the model's names is removed.
        ignore: patterns of names to leave out, e.g. ``criterion.*``; see
            :class:`jax_transformer.architectures.tensor_names.NameChanges`.
        rename: new names by old ones, or by the words before a dot of old ones.
        architecture: the architecture whose names the PyTorch weights have, or its registered
            name; that of the configuration if None.
        scan_axis: T5X's ``param_scan_axis``, if the shapes of a checkpoint fit several.

    Raises:
        ConfigError: neither a configuration nor a preset describes the model, or both do.
        InputError: names are missing or unexpected, shapes are wrong, or tied tensors differ, all
            in one message; or the weights are float64 in JAX's 32-bit mode.
        UnsafeFileError: the file tries to run code, or declares more data than it has.
    """
    tensors.check_dtype(dtype)
    changes = NameChanges(strip_prefix, ignore=tuple(ignore), rename=rename or {})
    source = pretrained.open(path, weights, key=key, scan_axis=scan_axis)
    if source.config_gives_way and (config is not None or preset is not None):
        source = dataclasses.replace(source, config=None)
    if source.config is not None and (config is not None or preset is not None or sizes):
        raise ConfigError(
            f"{path} has its own config.json: config, preset and sizes are for bare files of "
            "weights"
        )
    if source.config is None and (config is None) == (preset is None):
        raise ConfigError(f"{path} does not tell its architecture: give either config or preset")
    if config is not None and sizes:
        raise ConfigError(f"{', '.join(sizes)}: sizes go with a preset; a config has its own")
    description = ModelDescription(None, preset, sizes)
    names: set[str] = set()
    if source.format.is_file and source.config is None:
        names = (
            description.torch_names(source, architecture)
            if config is None
            else preparation.torch_names(config, architecture)
        )
        source, _ = preparation.with_model_names(source, changes, names)
    else:
        source = source.with_names(changes)
    if config is None and preset is not None:
        config = description.settle(source, architecture).config
    try:
        return source.model(config, dtype=dtype, architecture=architecture)
    except InputError as error:
        raise tensor_names.explained(error, source.tensors, names) from None


def save(
    model: Any,
    path: str | Path,
    *,
    force: bool = False,
    architecture: Architecture | str | None = None,
) -> Path:
    """Save a ``Transformer`` and return its path.

    The name of ``path`` decides: a .safetensors or PyTorch file with PyTorch's names, or a new run
    folder. Equal weights give equal files. ``path`` appears after it was read back and compared, or
    stays as it was. Raises InputError if it exists and ``force`` is not set.
    """
    from jax_transformer import transformer
    from jax_transformer.architectures import model_weights

    format = formats.to_write(Path(path))
    names = model_weights.model_weights(model.config, architecture)
    to = Destination(format, Path(path), config=model.config, frozen=names.frozen)
    format.check_free(to.path, force=force)
    leaves = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    to_torch = format.has_torch_names
    state = renamed(lazy.in_memory(leaves), names, from_torch=False, to_torch=to_torch)
    format.write(to, state, lambda read_back: None)
    return to.path
