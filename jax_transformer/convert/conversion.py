"""Run a planned conversion: read, cast, rename, write, read back, check."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jax_transformer.architectures import huggingface_state as states
from jax_transformer.convert import planning, report, verify, writing
from jax_transformer.convert.preparation import Prepared
from jax_transformer.convert.report import Outcome
from jax_transformer.storage import tensors
from jax_transformer.storage.kinds import Kind
from jax_transformer.weights import rules

if TYPE_CHECKING:
    from jax_transformer.state_dict import ModelWeights

State = dict[str, np.ndarray]


def convert(prepared: Prepared) -> Outcome:
    """Run the conversion; the destination appears complete, or stays as it was.

    Raises InputError listing everything that does not fit, before anything is written.
    """
    request, source, kind, model = prepared.request, prepared.source, prepared.kind, prepared.model
    from_torch, to_torch = source.kind.has_torch_names, kind.has_torch_names
    state = source.read()
    aliases = rules.aliases(model.table) if model is not None and from_torch else {}
    tensors.refuse([*prepared.problems, *tensors.differing_ties(aliases, state)])
    loss = None
    if request.dtype is not None:
        state, loss = tensors.cast(state, request.dtype)
        if model is not None:
            state = states.computed_again(state, model.config)
    result = renamed(state, model, from_torch=from_torch, to_torch=to_torch)
    written = result
    if kind is Kind.HUGGINGFACE and model is not None:
        written = states.saved(result, model.config)
    reason = "no architecture was given" if model is None else "--no-check"
    checked = verify.Checked(f"read back bit for bit; not run: {reason}")

    def check(read_back: Mapping[str, np.ndarray]) -> None:
        nonlocal checked
        if request.check and model is not None:
            if kind is Kind.HUGGINGFACE:
                read_back = _completed(model, result, read_back)
            sides = _sides(model, state, read_back, from_torch=from_torch, to_torch=to_torch)
            checked = verify.check(model.config, model.table, *sides)

    config, frozen = (model.config, model.frozen) if model is not None else (None, frozenset())
    writing.write(prepared.target, kind, written, config, frozen, check, prepared.extra_files)
    dtypes = ", ".join(sorted({str(array.dtype) for array in result.values()}))
    numbers = sum(array.size for array in written.values())
    sha256 = report.file_sha256(prepared.target) if kind.is_file else report.content_sha256(written)
    return Outcome(
        prepared.plan,
        f"{source.title} -> {prepared.target}: {len(written)} tensors, {numbers:,} numbers, "
        f"{dtypes}",
        prepared.preset_sizes,
        loss,
        checked,
        sha256,
        tuple(sorted(prepared.extra_files.files)),
    )


def renamed(
    state: State, model: "ModelWeights | None", *, from_torch: bool, to_torch: bool
) -> State:
    """Rename the weights for the destination; tensors that the model ties become one array."""
    if model is None:
        return state
    if from_torch and not to_torch:
        return rules.to_flax(model.table, state, model.shapes["flax"])
    if not from_torch and to_torch:
        state = rules.to_torch(model.table, state)
    if to_torch:
        state = {rule.torch: state[rule.torch] for rule in model.table}
        for first, *others in planning.ties_of(model.table):
            state |= dict.fromkeys(others, state[first])
    return state


def _completed(model: "ModelWeights", state: State, read_back: Mapping[str, np.ndarray]) -> State:
    """Return the tensors of a folder under all names of the module.

    Position tables that the file leaves out, because transformers computes them, are taken from
    ``state``; they were compared with the computed ones before they were left out.
    """
    tied = {name for names in planning.ties_of(model.table) for name in names}
    left_out = {
        name: array for name, array in state.items() if name not in read_back and name not in tied
    }
    return states.complete(read_back, model.config) | left_out


def _sides(
    model: "ModelWeights",
    before: State,
    after: Mapping[str, np.ndarray],
    *,
    from_torch: bool,
    to_torch: bool,
) -> tuple[State, State]:
    """Return the weights by PyTorch's and by Flax's names; the destination's are read back."""
    if to_torch:
        flax = rules.to_flax(model.table, before, model.shapes["flax"]) if from_torch else before
        return dict(after), flax
    return before if from_torch else rules.to_torch(model.table, before), dict(after)
