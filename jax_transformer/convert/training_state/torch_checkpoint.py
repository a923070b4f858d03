"""Convert a training state between Optax and the checkpoint of a PyTorch loop: ``{"model",
"optimizer", "scheduler", "step", "config"}``. ``step`` is also the position in the data, because
batch n depends only on the run's data and n.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_transformer import convert, transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.convert.training_state import opt_state, torch_optimizer
from jax_transformer.convert.training_state.torch_optimizer import ADAM, ADAMW, Moments
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.storage import checkpoint, run_files, saving
from jax_transformer.storage.run_folder import RunFolder, parsed
from jax_transformer.training import optimizer, resume, run, step
from jax_transformer.training.options import TrainOptions, read_options
from jax_transformer.training.step import TrainState
from jax_transformer.weights import rules

# Conversion between a run's state and a PyTorch checkpoint


def to_checkpoint(
    state: TrainState,
    options: TrainOptions,
    config: TransformerConfig,
    parameter_names: Sequence[str],
) -> dict[str, Any]:
    """Return the checkpoint of a PyTorch loop at this step: plain containers with arrays.

    The inverse of :func:`from_checkpoint`. ``parameter_names`` are the module's, in its order:
    ``[name for name, _ in module.named_parameters()]``. Raises ConfigError for a moving average,
    which that loop does not have, for an optimizer that torch.optim does not have, and for a run
    that does not train every parameter.
    """
    _check_plain(options)
    table = convert.weight_table(config)
    shapes = {name: array.shape for name, array in state.params.items()}
    position = opt_state.position(state.opt_state)
    rate, peak = learning_rate(options, position), options.optimizer.rate.learning_rate
    moments = opt_state.from_optax(
        state.opt_state,
        opt_state.torch_kind(options.optimizer),
        {"lr": rate, "initial_lr": peak, **opt_state.hyperparameters(options.optimizer)},
        dict.fromkeys(state.params | state.frozen, options.optimizer.weight_decay),
    )
    model = convert.to_torch(transformer.unflatten(config, state.params | state.frozen))
    for name, of in rules.aliases(table).items():
        model[name] = model[of]  # one array, so that tied tensors are one in a file
    in_order = dict.fromkeys([*parameter_names, *model])  # the optimizer's order
    scheduler = {"base_lrs": [peak], "last_epoch": position, "_step_count": position + 1}
    scheduler |= {"_is_initial": False, "_get_lr_called_within_step": False}
    return {
        "model": {name: model[name] for name in in_order},
        "optimizer": torch_optimizer.to_torch(moments, table, shapes, parameter_names),
        "scheduler": scheduler | {"_last_lr": [rate], "lr_lambdas": [None]},
        "step": int(state.step),
        "config": config.to_json(),
    }


def from_checkpoint(
    saved: Mapping[str, Any], options: TrainOptions, config: TransformerConfig
) -> TrainState:
    """Return the state that ``train`` resumes from, converted from a PyTorch loop's checkpoint. The
    order of parameters is that of its ``model``, a module's ``state_dict()``.

    Raises InputError if the checkpoint lacks a part or does not fit the model, ConfigError if the
    run's options differ from those that it was trained with.
    """
    _check_plain(options)
    opt_state.torch_kind(options.optimizer)
    missing = [name for name in ("model", "optimizer", "scheduler", "step") if name not in saved]
    if missing:
        raise InputError(
            f"no training checkpoint: it has no {', '.join(map(repr, missing))}; without them a "
            "run cannot be resumed"
        )
    scheduler = saved["scheduler"]
    last_epoch = scheduler.get("last_epoch") if isinstance(scheduler, Mapping) else None
    position = _step_count(last_epoch, "scheduler.last_epoch")
    saved_step = _step_count(saved["step"], "step")
    model = convert.from_torch(saved["model"], config)
    state = step.initial_state(model, optimizer.make(options.optimizer, options.steps))
    table = convert.weight_table(config)
    shapes = {name: array.shape for name, array in state.params.items()}
    names = module_parameters(saved["model"], config)
    moments = torch_optimizer.from_torch(saved["optimizer"], table, shapes, names)
    _check_options(moments, options, position)
    return state._replace(
        step=jnp.asarray(saved_step, jnp.int32),
        opt_state=opt_state.into_optax(state.opt_state, moments, position),
    )


def module_parameters(state: Iterable[str], config: TransformerConfig) -> list[str]:
    """List PyTorch's parameters in the order of a module's ``state_dict()``, without position
    tables and the logits' bias, which are stored but never trained.
    """
    table = convert.weight_table(config)
    frozen = transformer.flatten(transformer.abstract(config), Frozen)
    buffers = [
        rule.torch
        for rule in rules.without_aliases(table)
        if all(
            name in frozen and (name.endswith(".positions.table") or name == "logits_bias")
            for name in rule.flax
        )
    ]
    return torch_optimizer.parameter_names(state, table, buffers)


def learning_rate(options: TrainOptions, position: int) -> float:
    """Return the learning rate after ``position`` updates, in float64 as PyTorch's scheduler."""
    with jax.enable_x64(True):
        return float(optimizer.schedule(options.optimizer, options.steps)(position))


def _step_count(value: Any, name: str) -> int:
    """Return a value as an int. Raises InputError if it is not a number of steps."""
    value = torch_optimizer.plain(value)
    if not isinstance(value, int | float) or value != value // 1 or value < 0:
        raise InputError(f"{name}={value!r} of the training checkpoint is not a number of steps")
    return int(value)


def _check_plain(options: TrainOptions) -> None:
    if options.freeze or options.lora.rank:
        name = "freeze" if options.freeze else "lora.rank"
        raise ConfigError(
            f"{name}: the training state of a run that does not train every parameter cannot be "
            "converted; its weights can (convert without --training)"
        )
    if options.optimizer.ema:
        raise ConfigError(
            f"optimizer.ema={options.optimizer.ema}: torch.optim's state has no moving average of "
            "the weights"
        )


def _check_options(moments: Moments, options: TrainOptions, position: int) -> None:
    """Raise ConfigError naming every setting in which the checkpoint and the run differ."""
    settings, decays = moments.hyperparameters, sorted(set(moments.weight_decay.values()))
    kind, here = opt_state.torch_kind(options.optimizer), options.optimizer
    # Without weight decay Adam and AdamW are the same
    if moments.kind == kind or ({moments.kind, kind} == {ADAM, ADAMW} and decays == [0.0]):
        names = {"betas": "beta1 and beta2", "eps": "epsilon"}
        pairs: dict[str, tuple[Any, Any]] = {
            names.get(name, name): (settings[name], value)
            for name, value in opt_state.hyperparameters(here).items()
        }
    else:
        pairs = {"the optimizer": (moments.kind, kind)}
    decay = decays[0] if len(decays) == 1 else decays
    pairs["weight_decay"] = (decay, here.weight_decay)
    different = [f"{name} ({a} there, {b} here)" for name, (a, b) in pairs.items() if a != b]
    theirs, ours = settings["lr"], learning_rate(options, position)
    # Schedules are often computed in float32
    if abs(theirs - ours) > 1e-6 * here.rate.learning_rate:
        rates = f"{theirs:.6g} there, {ours:.6g} here"
        different.append(f"the learning rate after {position} updates ({rates})")
    if different:
        raise ConfigError(
            "the run's options are not those that the checkpoint was trained with: "
            f"{', '.join(different)}"
        )


# The state in a run folder


def load(folder: RunFolder, at: int) -> TrainState:
    """Load the state of step ``at``, in the checkpoint's dtypes. Raises CheckpointError if it is
    damaged, of another model, or has float64 arrays in JAX's 32-bit mode.
    """
    options, config = read_options(folder), parsed(folder.config, TransformerConfig.from_json)
    opened = checkpoint.open(folder.checkpoints, at)
    if any(tensor.dtype == "float64" for tensor in opened.tensors.values()) and not jax.config.read(
        "jax_enable_x64"
    ):
        raise CheckpointError(
            f"{folder.checkpoints / str(at)} holds float64 and JAX is in 32-bit mode: set "
            "JAX_ENABLE_X64=1"
        )

    def typed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        saved = opened.tensors.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        return jax.ShapeDtypeStruct(leaf.shape, saved.dtype if saved else leaf.dtype)

    return opened.load(jax.tree_util.tree_map_with_path(typed, run.abstract_state(options, config)))


def save(folder: RunFolder, state: TrainState) -> Path:
    """Write the checkpoint that ``train`` resumes from. Raises CheckpointError if that fails."""
    about = {**resume.environment(), "unrecorded": []}
    about |= run_files.about_run(folder.checkpoints / str(int(state.step)))
    return saving.save(folder.checkpoints, int(state.step), state, about=about)
