"""Run a planned conversion and report it: it is read back, converted back bit for bit, and, if the
PyTorch twin can be built and there is memory for both models, they are run and compared.
"""

import contextlib
import importlib.util
import itertools
import os
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.architectures import huggingface_state
from jax_transformer.config import AttentionSpan, Mask, TransformerConfig
from jax_transformer.convert import models
from jax_transformer.convert.planning import Prepared
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.formats.base import Checked
from jax_transformer.storage import tensors
from jax_transformer.storage.tensors import LazyState, LazyTensor
from jax_transformer.storage.untrusted import plain
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias

State = Mapping[str, np.ndarray]
# Relative to the largest number. A correct pair differs by 1e-14, the smallest fault known (another
# epsilon) by 1e-5.
_BOUND = 1e-9
_ROWS, _SOURCE, _TARGET = 3, 7, 5
# Of the two models in float64: our arrays, JAX's, the twin's, and each side's own as read
_BYTES_A_NUMBER = 40


@dataclass(frozen=True)
class Outcome:
    """A finished conversion."""

    prepared: Prepared
    summary: str
    loss: tensors.CastLoss | None
    checked: Checked
    sha256: str
    """Hash of the file, or of a folder's weights: its files contain the time of writing."""
    files: tuple[str, ...] = ()
    """Files that were written with the weights."""

    def lines(self) -> Iterator[str]:
        plan = self.prepared.plan
        yield self.summary
        yield from plan.prefix_lines()
        yield from self.prepared.size_lines()
        for names in plan.ties:
            yield f"tied: {' = '.join(names)}"
        for note in plan.dropped:
            yield f"not converted: {plain(note.name)}: {note.reason}"
        if self.files:
            yield f"with them: {', '.join(self.files)}"
        if self.loss is not None:
            yield from self.loss.lines()
        errors, largest = self.checked.errors.values(), ""
        if errors:
            largest = f": largest difference {max(errors):.2g} over {len(errors)} outputs"
        yield f"checked: {self.checked.method}{largest}"
        yield f"sha256 {self.sha256}"

    def to_data(self) -> dict[str, Any]:
        return self.prepared.to_data() | {
            "cast": None if self.loss is None else vars(self.loss),
            "check": {"how": self.checked.method, "errors": self.checked.errors},
            "sha256": self.sha256,
            "files": list(self.files),
        }


def convert(prepared: Prepared) -> Outcome:
    """Convert, whole or not at all. Raises InputError first, listing all that does not fit."""
    source, to, model = prepared.source, prepared.to, prepared.model
    from_torch, to_torch = source.format.has_torch_names, to.format.has_torch_names
    state = source.scan()
    aliases = rules.aliases(model.table) if model is not None and from_torch else {}
    prepared.refuse(tensors.differing_ties(aliases, state))
    casting = None if to.dtype is None else tensors.Cast(to.dtype)
    if casting is not None:
        state = casting.apply(state)
        if model is not None:
            state = huggingface_state.computed_again(state, model.config)
    result = models.renamed(state, model, from_torch=from_torch, to_torch=to_torch)
    stored = result if model is None else to.format.stored(result, model.config)
    reason = "no architecture was given" if model is None else "--no-check"
    checked = Checked(f"read back bit for bit; not run: {reason}")

    def check_written(read_back: LazyState) -> None:
        nonlocal checked
        if not to.self_check or model is None:
            return
        tied = itertools.chain.from_iterable(models.ties_of(model.table))
        after = to.format.completed(read_back, result, model.config, tied)
        before = state
        if to_torch and from_torch:
            before = rules.to_flax_lazily(model.table, state, model.shapes["flax"])
        elif not to_torch and not from_torch:
            before = rules.to_torch_lazily(model.table, state)
        sides = (after, before) if to_torch else (before, after)
        checked = check(model.config, model.table, *sides)

    with _progress(stored, str(to.path)) as shown:
        written = to.format.write(to, shown, check_written)
    content = written.summary
    if content is None:
        dtypes = ", ".join(sorted({tensor.dtype for tensor in result.values()}))
        numbers = sum(tensor.info.size for tensor in stored.values())
        content = f"{len(stored)} tensors, {numbers:,} numbers, {dtypes}"
    return Outcome(
        prepared,
        f"{source.title} -> {to.path}: {content}",
        None if casting is None else casting.loss,
        written.checked or checked,
        written.sha256,
        tuple(sorted(to.files)),
    )


@contextlib.contextmanager
def _progress(state: LazyState, title: str) -> Iterator[LazyState]:
    """Yield the tensors; in a terminal a bar on stderr counts the bytes that were read."""
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


# Checks


def check(
    config: TransformerConfig, table: rules.Table, torch_state: LazyState, flax_state: LazyState
) -> Checked:
    """Raise DifferentError if the two sides of a conversion are not equal."""
    wrong = [rule.torch for rule in table if not _comes_back(rule, torch_state, flax_state)]
    if wrong:
        raise DifferentError(
            f"self-check: {', '.join(wrong)} do not come back bit for bit; nothing was changed"
        )
    reason = _cannot_run(flax_state)
    if reason is None:
        try:
            return Checked(
                "ran next to the PyTorch twin in float64, ragged random batches",
                _run(config, table, tensors.arrays(torch_state), tensors.arrays(flax_state)),
            )
        except ConfigError as error:
            reason = f"the twin cannot be built: {error}"
    return Checked(f"there and back bit for bit ({reason})")


def _comes_back(rule: rules.Rule | Alias, torch_state: LazyState, flax_state: LazyState) -> bool:
    """Return True if the rule gives the tensor back; at most it is in memory twice."""
    if rule.torch not in torch_state:
        return False
    tensor = torch_state[rule.torch]
    if isinstance(rule, Alias):
        of = torch_state.get(rule.of)
        return of is tensor or (of is not None and tensors.same(of.read(), tensor.read()))
    return rule.holds(tensor.read(), [flax_state[name].read() for name in rule.flax])


def _cannot_run(state: LazyState) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed, so its twin was not run"
    needed = _BYTES_A_NUMBER * sum(tensor.info.size for tensor in state.values())
    free = _available_memory()
    if free is not None and needed > free:
        return (
            f"the twin was not run: both models take about {needed / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB of memory are free"
        )
    for tensor in state.values():
        if not np.isfinite(tensor.read().astype(np.float64)).all():
            return "not all weights are finite, so the twin was not run"
    return None


def _available_memory() -> int | None:
    """Return the bytes that are free, within a container's limit (cgroup 2); None if unknown."""
    free = []
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free += [1024 * int(number) for number in re.findall(r"MemAvailable:\s*(\d+)", text)]
    except (OSError, ValueError):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            free.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(OSError, ValueError):
        folder = Path("/sys/fs/cgroup")
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        statistics = (folder / "memory.stat").read_text().split()
        # Pages of files that were not used lately are given up first
        unused = statistics[statistics.index("inactive_file") + 1]
        free.append(limit - used + int(unused))
    return min(free, default=None)


def _run(
    config: TransformerConfig, table: rules.Table, torch_state: State, flax_state: State
) -> dict[str, float]:
    from jax_transformer.architectures import twins

    batch = random_batch(config)
    blocks = _blocks(config, table)
    theirs = twins.outputs(config, torch_state, *batch, blocks)
    ours = _outputs(config, flax_state, batch, list(blocks))
    # At padding, which nothing reads, transformers' local attention sees all keys, and ours none;
    # a query that is masked sees what the fill leaves it
    encoder, decoder = config.encoder, config.decoder
    unread = {}
    if encoder.attention_span is not AttentionSpan.FULL or Mask.QUERY_PADDING in encoder.self_mask:
        unread["encoder"] = batch[0] == config.source_pad_id
    if Mask.QUERY_PADDING in (*decoder.self_mask, *decoder.cross_mask):
        unread["decoder"] = unread["logits"] = batch[1] == config.target_pad_id
    errors = {}
    for name, expected in theirs.items():
        actual = _batch_first(ours[name], expected)
        if actual.shape != expected.shape:
            raise DifferentError(
                f"self-check: {name} is {expected.shape} in PyTorch and {actual.shape} here; "
                "nothing was changed"
            )
        if (padding := unread.get(name.partition(".")[0])) is not None:
            mask = padding[..., None]
            actual, expected = (np.where(mask, 0, value) for value in (actual, expected))
        errors[name] = float(np.abs(expected - actual).max())
        if not _close(actual, expected):
            parts = _parts(table, name)
            inside = twins.outputs(config, torch_state, *batch, parts)
            actual_inside = _outputs(config, flax_state, batch, list(parts))
            known = [part for part in inside if part in parts and part in actual_inside]
            both = [(part, _batch_first(actual_inside[part], inside[part])) for part in known]
            both = [(part, x) for part, x in both if x.shape == inside[part].shape]
            first = (f", first in {part}" for part, x in both if not _close(x, inside[part]))
            raise DifferentError(
                f"self-check: {name} differs from the PyTorch twin's by {errors[name]:.3g}"
                f"{next(first, '')}; nothing was changed"
            )
    return errors


def _batch_first(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return our array with the axes of the twin's: some twins put the length first."""
    same = actual.shape == expected.shape or actual.ndim < 2
    return actual if same else np.swapaxes(actual, 0, 1)


def _close(actual: np.ndarray, expected: np.ndarray) -> bool:
    off = np.abs(expected - actual).max()
    return bool(off <= _BOUND * max(1.0, float(np.abs(expected).max())))


def _parts(table: rules.Table, block: str) -> dict[str, str]:
    """Map the modules in a block to the PyTorch modules that have the same weights."""
    arrays = rules.without_aliases(table)
    names = (name.split(".") for rule in arrays for name in rule.flax)
    modules = dict.fromkeys(".".join(parts[:end]) for parts in names for end in range(len(parts)))
    parts = {}
    for module in (name for name in modules if name.startswith(f"{block}.")):
        inside = [rule for rule in arrays if all(n.startswith(f"{module}.") for n in rule.flax)]
        paths = [rule.torch.rpartition(".")[0].replace(".", "/") for rule in inside]
        theirs = posixpath.commonpath(paths or [""]).replace("/", ".")
        if inside and inside == [r for r in arrays if r.torch.startswith(f"{theirs}.")]:
            parts[theirs] = module  # the innermost comes last
    return {module: theirs for theirs, module in parts.items()}


def _blocks(config: TransformerConfig, table: rules.Table) -> dict[str, str]:
    """Map the name of every block here to the name of its PyTorch module."""
    modules = {}
    for stack, layers in (("encoder", config.encoder.layers), ("decoder", config.decoder.layers)):
        for i in range(layers):
            block = f"{stack}.blocks.{i}"
            paths = [
                rule.torch.rpartition(".")[0].replace(".", "/")
                for rule in rules.without_aliases(table)
                if rule.flax[0].startswith(f"{block}.")
            ]
            modules[block] = posixpath.commonpath(paths).replace("/", ".")
    return modules


def random_batch(
    config: TransformerConfig, seed: int = 0, length: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return random ids (b, s) and (b, t), whose rows have different lengths before padding.

    A model that reads sound has a random spectrogram (b, c, w) as its source. ``length`` sets s and
    t, or t alone if the source is sound; they are 7 and 5, or less, if None.
    """
    random = np.random.default_rng(seed)
    target = length or (_SOURCE if config.equal_lengths else _TARGET)
    batch = []
    for n, size, pad in (
        (length or _SOURCE, config.source_vocab_size, config.source_pad_id),
        (target, config.target_vocab_size, config.target_pad_id),
    ):
        n = min(n, config.longest)
        ids = random.integers(0, size, (_ROWS, n))
        ids[ids == pad] = (pad + 1) % size
        for row in range(_ROWS):
            ids[row, max(1, n - 2 * row) :] = pad
        batch.append(ids)
    if config.mel_shape is None:
        return batch[0], batch[1]
    return random.standard_normal((_ROWS, *config.mel_shape)), batch[1]


def _outputs(
    config: TransformerConfig, state: State, batch: tuple[np.ndarray, np.ndarray], blocks: list[str]
) -> dict[str, np.ndarray]:
    """Return the logits and the output of every block, in float64 on the CPU."""
    import jax
    from flax import nnx

    from jax_transformer import transformer

    def run(arrays: Mapping[str, Any], source: Any, target: Any) -> dict[str, Any]:
        model = transformer.unflatten(replace(config, compute_dtype=None), arrays)
        kind = nnx.Intermediate
        logits, captured = nnx.capture(model, kind, method_outputs=kind)(source, target)
        outputs = {"logits": logits}
        for path, leaf in nnx.to_flat_state(captured):
            block, _, method = ".".join(map(str, path)).rpartition(".")
            if block in blocks and method == "__call__":
                outputs[block] = jax.tree.leaves(leaf.get_value()[0])[0]
        return outputs

    with (
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.default_device(jax.devices("cpu")[0]),
    ):
        arrays = {name: jax.numpy.array(array.astype(np.float64)) for name, array in state.items()}
        return jax.tree.map(np.asarray, jax.jit(run)(arrays, *batch))
