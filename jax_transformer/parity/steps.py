"""Optimizer steps of a JAX model and a PyTorch model from the same weights, compared: the loss, the
gradient of each parameter, and the parameters after each step."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import linen, nnx

from jax_transformer.architectures import twins
from jax_transformer.errors import ConfigError
from jax_transformer.parity import comparison, difference, jaxprs, recording, search, structures
from jax_transformer.parity.functions import ModelFunction
from jax_transformer.parity.recording import Program
from jax_transformer.parity.steps_measured import ComparedSteps, Runs, Steps
from jax_transformer.parity.steps_report import TrainingReport
from jax_transformer.weights import any_model


def compare_training(
    flax_model: Any,
    torch_module: Any,
    batch: Sequence[np.ndarray] | np.ndarray | Mapping[str, np.ndarray],
    table: Sequence[Any] | None = None,
    *,
    steps: int = 3,
    optimizer_flax: optax.GradientTransformation | None = None,
    optimizer_torch: Callable[[Any], Any] | None = None,
    seed: int = 0,
    call_flax: Callable[..., Any] | None = None,
    call_torch: Callable[..., Any] | None = None,
) -> TrainingReport:
    """Return a report on the first step in which two models that train alike differ, and on what
    differs there first: the loss, the gradient of a parameter, or a parameter after the update.

    The JAX model gets the PyTorch module's weights. Each side then makes its own steps, in float64
    and in float32: a plain loop of PyTorch, and ``jax.value_and_grad`` with Optax. Neither model
    is changed.

    The first array that a model or its call returns is the loss, if it is a scalar. Otherwise the
    loss is the mean of ``(array - R)**2``, with R standard normal.

    Args:
        flax_model: as for :func:`jax_transformer.parity.compare`.
        torch_module: as there; it must hold the weights that both begin with.
        batch: as there. Every step takes the same batch.
        table: the weight table; None for that of this project's models, and for others the one
            that :func:`jax_transformer.weights.propose` returns.
        steps: number of updates.
        optimizer_flax: Optax's transformation; it gets the tree of parameters that the model's
            library has.
        optimizer_torch: a function of a module that returns its optimizer, or another object with
            the methods ``zero_grad`` and ``step``. AdamW with PyTorch's defaults on both sides if
            both are None.
        seed: seed of R.
        call_flax: as for :func:`jax_transformer.parity.compare`.
        call_torch: as there.

    Raises:
        ConfigError: no table is found that converts, one optimizer is missing, or what the models
            return has different shapes.
    """
    if steps < 1:
        raise ConfigError(f"steps={steps}: must be at least 1")
    if (optimizer_flax is None) != (optimizer_torch is None):
        raise ConfigError("optimizer_flax and optimizer_torch: pass both, or neither for AdamW")
    structures.check_torch(torch_module)
    tx = optimizer_flax or optax.adamw(1e-3, weight_decay=1e-2)
    inputs, call_flax, call_torch = structures.positional(batch, call_flax, call_torch)
    results = structures.Results()
    notes: dict[str, None] = {}
    comparison.model_function(flax_model, call_flax)  # refuses what is no model
    table = table or comparison.weight_table(flax_model)
    if table is None:
        calls = {"call_flax": call_flax, "call_torch": call_torch}
        proposal = search.propose(torch_module, flax_model, inputs, **calls)
        if not proposal.converts:
            raise ConfigError(
                f"pass table=, as the proposed one is not right: {proposal.summary()}"
            )
        table, notes["the weight table is proposed"] = proposal.table, None
    with jax.enable_x64(True):
        model = _with_weights(flax_model, torch_module.state_dict(), table)
        function = comparison.model_function(model, call_flax)
    trees = _Trees(model, function)

    def train_theirs(dtype: str) -> Any:
        options = {"steps": steps, "dtype": dtype, "seed": seed, "call": call_torch}
        return twins.trained(torch_module, inputs, optimizer_torch, **options)

    def train_ours(theirs: Any, dtype: str) -> Runs:
        results.theirs = theirs.outputs
        goal = np.random.default_rng(seed).standard_normal(theirs.shape)
        loss = dataclasses.replace(function, run=partial(_loss, function, results))
        recorder = recording.Recorder(loss, [*inputs, goal])
        x64 = dtype == "float64" or bool(jax.config.read("jax_enable_x64"))
        with jax.enable_x64(x64), jax.default_matmul_precision("highest"):
            train = partial(_trained, tx, trees, steps, difference.epsilon(dtype))
            ours, note = recorder.attempt(train, dtype)
        notes.update(dict.fromkeys(filter(None, (note, theirs.note))))
        return ours

    dtypes = "float64", "float32"
    runs, widest, more = recording.in_each_dtype(train_theirs, train_ours, dtypes)
    return ComparedSteps(runs, widest, table, function).report([*notes, *more])


def _with_weights(model: Any, state: Mapping[str, Any], table: Sequence[Any]) -> Any:
    """Return a model of any kind with the tensors of a state_dict."""
    if isinstance(model, tuple) and len(model) == 2:
        return model[0], any_model.from_torch(state, table, into=model[1])
    return any_model.from_torch(state, table, into=model)


def _loss(
    function: ModelFunction,
    results: structures.Results,
    arrays: Mapping[str, Any],
    inputs: Sequence[Any],
) -> jax.Array:
    *batch, goal = inputs
    output = recording.first_array(results.choose(function.run(arrays, batch)))
    if output.shape != goal.shape:
        raise structures.other_shapes(output, goal)
    return ((output - goal.astype(output.dtype)) ** 2).mean() if output.ndim else output


class _Trees:
    """The tree of parameters that a library's users give to Optax, from arrays by name."""

    def __init__(self, model: Any, function: ModelFunction):
        self.build = _tree_of(model)
        numbers = {name: np.asarray(float(i)) for i, name in enumerate(function.parameters)}
        names = [*numbers]
        self.names = [names[int(leaf)] for leaf in jax.tree.leaves(self.build(numbers))]

    def named(self, tree: Any) -> dict[str, Any]:
        """Return a tree's arrays by name."""
        return dict(zip(self.names, jax.tree.leaves(tree), strict=True))


def _tree_of(model: Any) -> Callable[[Mapping[str, Any]], Any]:
    if isinstance(model, nnx.Module):
        flat = [*nnx.to_flat_state(nnx.state(model, nnx.Param))]
        return lambda values: nnx.from_flat_state(
            [(path, each.replace(values[any_model.dotted(path)])) for path, each in flat]
        )
    if isinstance(model[0], linen.Module):
        params = any_model.opened({"params": model[1]["params"]})[1]
        return lambda values: params(values)["params"]
    merge = any_model.opened(model[1])[1]

    def only_arrays(leaf: Any) -> Any:
        return leaf if hasattr(leaf, "dtype") and recording.is_inexact(leaf) else None

    return lambda values: jax.tree.map(only_arrays, merge(values))


@jaxprs.on_one_device()
def _trained(
    tx: optax.GradientTransformation, trees: _Trees, steps: int, epsilon: float, program: Program
) -> Runs:
    """Return the steps of a program that returns a loss."""
    weights, *rest = program.cast(program.arrays)

    @jax.jit
    def step(parameters: Any, state: Any, rest: Any) -> tuple[Any, Any, Any, Any]:
        def loss(parameters: Any) -> Any:
            return program.result(trees.named(parameters), rest)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, state = tx.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value, gradients

    def run(parameters: Any) -> Steps:
        state, result = tx.init(parameters), Steps([], [], [_arrays(trees, parameters)])
        for _ in range(steps):
            parameters, state, value, gradients = step(parameters, state, rest)
            result.losses.append(np.asarray(value))
            result.gradients.append(_arrays(trees, gradients))
            result.parameters.append(_arrays(trees, parameters))
        return result

    random = np.random.default_rng(0)
    nudged = {
        name: x * (1 + epsilon * random.choice([-1, 1], x.shape)).astype(x.dtype)
        for name, x in weights.items()
    }
    runs = run(trees.build(weights)), run(trees.build(nudged))
    return Runs(*runs, bool(program.traced.rounded or program.traced_in))


def _arrays(trees: _Trees, tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in trees.named(tree).items()}
