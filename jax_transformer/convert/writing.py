"""Write weights to any kind of file or folder, and check a conversion.

What was written is read back and compared bit for bit before the file or folder gets its name. A
conversion is checked by converting it back, bit for bit, and by running both models if the PyTorch
twin can be built.
"""

import importlib.util
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, DifferentError, InputError
from jax_transformer.storage import atomic, checkpoint, safetensors
from jax_transformer.storage import huggingface as folders
from jax_transformer.storage.kinds import CONFIG, Kind
from jax_transformer.storage.tensors import same
from jax_transformer.weights import rules

State = Mapping[str, np.ndarray]
# Relative to the largest number. A correct pair differs by 1e-14, the smallest fault known (another
# epsilon) by 1e-5.
_BOUND = 1e-9
_ROWS, _SOURCE, _TARGET = 3, 7, 5


def check_free(target: Path, kind: Kind, *, force: bool) -> None:
    """Raise InputError unless ``target`` may be written.

    A device or a FIFO may always be. With ``force`` it may replace a file or folder of its own
    kind. The parent of a run or of a Hugging Face folder, e.g. ``runs``, may be missing: it is
    created when the folder is written.
    """
    if kind.is_file:
        if atomic.is_stream(target):
            return
        target = Path(os.path.realpath(target))  # a link is followed
    parent = target.absolute().parent
    creates_parent = (
        kind in (Kind.RUN, Kind.HUGGINGFACE)
        and not os.path.lexists(parent)
        and parent.parent.is_dir()
    )
    if not parent.is_dir() and not creates_parent:
        raise InputError(f"{target.parent}: no such folder")
    if target.is_symlink():
        raise InputError(f"{target}: is a link, which no folder replaces")
    if not target.exists():
        return
    if not force:
        raise InputError(f"{target}: exists already, and is not overwritten without --force")
    if target.is_file() != kind.is_file:
        existing = "a file" if target.is_file() else "a folder"
        raise InputError(f"{target}: is {existing}, and --force replaces only a {kind.value}")
    if target.is_dir():
        _check_replaceable(target, kind)


def _check_replaceable(target: Path, kind: Kind) -> None:
    """Raise InputError unless ``target`` has only files that a conversion writes.

    A run that was trained is never replaced, because its training state would be lost.
    """
    names = sorted(path.name for path in target.iterdir())
    others = {
        Kind.RUN: [name for name in names if name not in (CONFIG, "checkpoints", folders.IN_RUN)],
        Kind.HUGGINGFACE: [name for name in names if not folders.is_written(name)],
        Kind.STEP: [],
    }[kind]
    if others:
        raise InputError(
            f"{target}: holds more than weights ({', '.join(others)}), "
            f"and --force does not replace that"
        )
    if kind is Kind.STEP and names and checkpoint.MANIFEST not in names:
        raise InputError(f"{target}: is no checkpoint, and --force does not replace it")


@dataclass(frozen=True)
class ExtraFiles:
    """Files that go into a folder with the weights."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by name in a Hugging Face folder; a run has these files in a subfolder."""
    shard_size: int = folders.SHARD_SIZE
    """Maximum size of one file of weights in a Hugging Face folder, in bytes."""


def write(
    target: Path,
    kind: Kind,
    state: State,
    config: TransformerConfig | None,
    frozen: Collection[str],
    check: Callable[[State], Any],
    extra_files: ExtraFiles | None = None,
) -> str | None:
    """Write ``state``, read it back and compare; ``target`` is replaced only after that.

    Returns the SHA-256 of the file, or None for a folder.

    Args:
        target: the file or folder.
        kind: its kind; runs and checkpoints have Flax's names, the others PyTorch's.
        state: the arrays by name.
        config: written into a run.
        frozen: names of the arrays that are never trained.
        check: called with the arrays that were read back; it may refuse them by an exception.
        extra_files: files that go into a folder with the weights.
    """
    extra = extra_files or ExtraFiles()
    with (atomic.file if kind.is_file else atomic.folder)(target) as temporary:
        if kind is Kind.SAFETENSORS:
            read_back = safetensors.save(temporary, state, target=target)
        elif kind is Kind.PT:
            from jax_transformer.storage import pt_writer

            read_back = pt_writer.save(temporary, dict(state), target=target)
        elif kind is Kind.HUGGINGFACE:
            read_back = folders.write(temporary, state, extra.files, shard_size=extra.shard_size)
            folders.describe(folders.find(temporary))
            _compare_files(target, temporary, extra.files)
        else:
            read_back = _write_checkpoint(temporary, kind, target, state, config, frozen)
            if kind is Kind.RUN and extra.files:
                folders.write_files(temporary / folders.IN_RUN, extra.files)
                _compare_files(target, temporary / folders.IN_RUN, extra.files)
        _compare(target, state, read_back)
        check(read_back)
        return checkpoint.sha256(temporary) if kind.is_file else None


def _write_checkpoint(
    temporary: Path,
    kind: Kind,
    target: Path,
    state: State,
    config: TransformerConfig | None,
    frozen: Collection[str],
) -> dict[str, np.ndarray]:
    groups: dict[str, dict[str, np.ndarray]] = {"params": {}, "frozen": {}}
    for name, array in state.items():
        groups["frozen" if name in frozen else "params"][name] = np.ascontiguousarray(array)
    step = int(target.name) if kind is Kind.STEP else 0
    run = temporary if kind is Kind.RUN else temporary.with_name(f"{temporary.name}.run")
    try:
        root = run / "checkpoints"
        root.mkdir(parents=True)
        checkpoint.save(root, step, groups, about={})
        arrays = checkpoint.open(root, step).arrays()
        if kind is Kind.STEP:
            os.rename(root / str(step), temporary)
        elif config is not None:
            atomic.write_text(run / CONFIG, config.to_json())
        return {name.partition("/")[2]: array for name, array in arrays.items()}
    finally:
        if kind is Kind.STEP:
            atomic.remove(run)


def _compare(target: Path, written: State, read_back: State) -> None:
    """Raise InputError naming every tensor that differs between disk and memory."""
    differing = sorted(written.keys() ^ read_back.keys()) or [
        name for name, array in written.items() if not same(array, read_back[name])
    ]
    if differing:
        raise InputError(
            f"{target}: {', '.join(differing)} reads back different; nothing was changed"
        )


def _compare_files(target: Path, folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        if (folder / name).read_bytes() != content:
            raise InputError(f"{target}: {name} reads back different; nothing was changed")


# Checks


@dataclass(frozen=True)
class Checked:
    """Result of a check that passed."""

    method: str
    """The kind of check, and the reason if the models were not run."""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest absolute difference of each output."""

    def line(self) -> str:
        worst = (
            f": largest difference {max(self.errors.values()):.2g} over {len(self.errors)} outputs"
            if self.errors
            else ""
        )
        return f"checked: {self.method}{worst}"


def check(
    config: TransformerConfig, table: rules.Table, torch_state: State, flax_state: State
) -> Checked:
    """Raise DifferentError if the two sides of a conversion are not equal."""
    back = rules.to_torch(table, flax_state)
    wrong = [
        name for name in back if name not in torch_state or not same(back[name], torch_state[name])
    ]
    if wrong:
        raise DifferentError(
            f"self-check: {', '.join(wrong)} do not come back bit for bit; nothing was changed"
        )
    reason = _cannot_run(flax_state)
    if reason is None:
        try:
            return Checked(
                "ran next to the PyTorch twin in float64, ragged random batches",
                _run(config, table, torch_state, flax_state),
            )
        except ConfigError as error:
            reason = f"the twin cannot be built: {error}"
    return Checked(f"there and back bit for bit ({reason})")


def _cannot_run(state: State) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed, so its twin was not run"
    if not all(np.isfinite(array.astype(np.float64)).all() for array in state.values()):
        return "not all weights are finite, so the twin was not run"
    return None


def _run(
    config: TransformerConfig, table: rules.Table, torch_state: State, flax_state: State
) -> dict[str, float]:
    from jax_transformer import torch_bridge

    source, target = _batch(config)
    blocks = _blocks(config, table)
    theirs = torch_bridge.outputs(config, torch_state, source, target, blocks)
    ours = _outputs(config, flax_state, source, target, list(blocks))
    errors = {}
    for name, expected in theirs.items():
        actual = ours[name]
        if actual.shape != expected.shape:
            actual = np.swapaxes(actual, 0, 1)  # some twins put the length first
        if actual.shape != expected.shape:
            raise DifferentError(
                f"self-check: {name} is {expected.shape} in PyTorch and {actual.shape} here; "
                "nothing was changed"
            )
        errors[name] = float(np.abs(expected - actual).max())
        if not errors[name] <= _BOUND * max(1.0, float(np.abs(expected).max())):
            raise DifferentError(
                f"self-check: {name} differs from the PyTorch twin's by {errors[name]:.3g}; "
                "nothing was changed"
            )
    return errors


def _blocks(config: TransformerConfig, table: rules.Table) -> dict[str, str]:
    """Map the name of every block here to the name of its PyTorch module."""
    modules = {}
    for stack, layers in (("encoder", config.encoder.layers), ("decoder", config.decoder.layers)):
        for block in (f"{stack}.blocks.{i}" for i in range(layers)):
            names = [
                rule.torch.split(".")
                for rule in table
                if isinstance(rule, rules.Rule) and rule.flax[0].startswith(f"{block}.")
            ]
            shared = 0
            while all(
                len(words) > shared + 1 and words[shared] == names[0][shared] for words in names
            ):
                shared += 1
            modules[block] = ".".join(names[0][:shared])
    return modules


def _batch(config: TransformerConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids (b, s) and (b, t), whose rows have different lengths before padding."""
    random = np.random.default_rng(0)
    lengths = [
        min(_SOURCE, config.longest),
        min(_SOURCE if config.equal_lengths else _TARGET, config.longest),
    ]
    vocabularies = [
        (config.source_vocab_size, config.source_pad_id),
        (config.target_vocab_size, config.target_pad_id),
    ]
    batches = []
    for length, (size, pad) in zip(lengths, vocabularies, strict=True):
        ids = random.integers(0, size, (_ROWS, length))
        ids[ids == pad] = (pad + 1) % size
        for row in range(_ROWS):
            ids[row, max(1, length - 2 * row) :] = pad
        batches.append(ids)
    return batches[0], batches[1]


def _outputs(
    config: TransformerConfig,
    state: State,
    source: np.ndarray,
    target: np.ndarray,
    blocks: list[str],
) -> dict[str, np.ndarray]:
    """Return the logits and the output of every block, in float64 on the CPU."""
    import jax
    from flax import nnx

    from jax_transformer import transformer

    def run(arrays: Mapping[str, Any], source: Any, target: Any) -> dict[str, Any]:
        model = transformer.unflatten(replace(config, compute_dtype=None), arrays)
        logits, captured = nnx.capture(model, nnx.Intermediate, method_outputs=nnx.Intermediate)(
            source, target
        )
        return {"logits": logits} | _by_block(captured, blocks)

    with (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.default_device(jax.devices("cpu")[0]),
    ):
        arrays = {name: jax.numpy.array(array.astype(np.float64)) for name, array in state.items()}
        return {
            name: np.asarray(value) for name, value in jax.jit(run)(arrays, source, target).items()
        }


def _by_block(captured: Any, blocks: list[str]) -> dict[str, Any]:
    """Select the output of each block among those of all modules' methods."""
    from flax import nnx

    outputs = {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(captured)
    }
    return {block: outputs[f"{block}.__call__"][0].x for block in blocks}
