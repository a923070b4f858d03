"""Make a planned conversion: read, cast, rename, write, read back, check."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from jax_transformer.architectures import huggingface_state as states
from jax_transformer.convert import planning, report, verify, writing
from jax_transformer.convert.preparation import Prepared
from jax_transformer.convert.report import Outcome
from jax_transformer.storage.kinds import Kind
from jax_transformer.weights import casting, fit, rules

if TYPE_CHECKING:
    from jax_transformer.state_dict import ModelWeights

State = dict[str, np.ndarray]


def convert(prepared: Prepared) -> Outcome:
    """Make it: the destination is there whole, or as it was. Raises InputError with everything that does not fit, and nothing is written."""
    request, source, kind, model = prepared.request, prepared.source, prepared.kind, prepared.model
    state = source.read()
    names_torch, to_torch = source.kind.has_torch_names, kind.has_torch_names
    aliases = rules.aliases(model.table) if model is not None and names_torch else {}
    ties = fit.differing_ties(aliases, state)
    fit.refuse([*prepared.problems, *ties])
    loss = None
    if request.dtype is not None:
        state, loss = casting.cast(state, request.dtype)
        if model is not None:
            state = states.computed_again(state, model.config)
    result = moved(state, model, to_torch=to_torch, from_torch=names_torch)
    written = (
        states.saved(result, model.config)
        if kind is Kind.HUGGINGFACE and model is not None
        else result
    )
    checked = verify.Checked(
        "read back bit for bit; not run: no architecture was given"
        if model is None
        else "read back bit for bit; not run"
    )

    def check(again: Mapping[str, np.ndarray]) -> None:
        nonlocal checked
        if request.check and model is not None:
            again = _whole(model, result, again) if kind is Kind.HUGGINGFACE else again
            theirs, ours = _sides(model, state, again, from_torch=names_torch, to_torch=to_torch)
            checked = verify.check(model.config, model.table, theirs, ours)

    config = model.config if model is not None else None
    frozen = model.frozen if model is not None else frozenset()
    writing.write(prepared.target, kind, written, config, frozen, check, prepared.extra_files)
    dtypes = ", ".join(sorted({str(array.dtype) for array in result.values()}))
    summary = f"{source.title} -> {prepared.target}: {len(written)} tensors, {sum(array.size for array in written.values()):,} numbers, {dtypes}"
    sha256 = report.file_sha256(prepared.target) if kind.is_file else report.content_sha256(written)
    return Outcome(
        prepared.plan,
        summary,
        prepared.preset_sizes,
        loss,
        checked,
        sha256,
        tuple(sorted(prepared.extra_files.files)),
    )


def moved(state: State, model: "ModelWeights | None", *, from_torch: bool, to_torch: bool) -> State:
    """The weights under the names of the destination; what the model ties is one array."""
    if model is not None and from_torch != to_torch:
        state = (
            rules.to_torch(model.table, state)
            if to_torch
            else rules.to_flax(model.table, state, model.shapes["flax"])
        )
    if model is not None and to_torch:
        state = {name: state[name] for rule in model.table for name in (rule.torch,)}
        for first, *others in planning.ties_of(model.table):
            state |= dict.fromkeys(others, state[first])
    return state


def _whole(model: "ModelWeights", state: State, again: Mapping[str, np.ndarray]) -> State:
    """What was read back under all names of the module. Positions that a file leaves out are taken as they were: transformers computes them, and
    how near they are is checked before they are left out."""
    found = states.complete(again, model.config)
    tied = {name for names in planning.ties_of(model.table) for name in names}
    return found | {
        name: array for name, array in state.items() if name not in again and name not in tied
    }


def _sides(
    model: "ModelWeights",
    before: State,
    after: Mapping[str, np.ndarray],
    *,
    from_torch: bool,
    to_torch: bool,
) -> tuple[State, State]:
    """The same weights under PyTorch's names and under Flax's, one of them from what was written."""
    if to_torch:
        return dict(after), rules.to_flax(
            model.table, before, model.shapes["flax"]
        ) if from_torch else before
    return before if from_torch else rules.to_torch(model.table, before), dict(after)
