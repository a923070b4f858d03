"""What may differ when a run goes on: which changes are refused, which are only named, and which do not matter."""

import os
import platform
from importlib.metadata import version
from typing import Any

from jax_transformer.training.options import TrainOptions

# Neither touches the result, or the content decides, and is checked by its hash
FREE = frozenset(
    "run resume log_every samples tensorboard wandb compilation_cache keep "
    "data.train_source data.train_target data.valid_source data.valid_target data.train data.valid data.dataset data.dataset_config "
    "data.train_split data.valid_split data.source_field data.target_field data.tokenizer data.target_tokenizer".split()
)
# The run goes on, and says so: it may no longer end where the uninterrupted one would
NAMED = frozenset(
    "steps eval_every eval_pairs keep_best best_by patience average average_of devices".split()
)


def changes(now: TrainOptions, before: TrainOptions) -> tuple[list[str], list[str]]:
    """The changed options that are refused and those that are named, each as ``name (before -> now)``."""
    changed = now.differences(before)
    refused = [text for name, text in changed.items() if name not in FREE | NAMED]
    return refused, [text for name, text in changed.items() if name in NAMED]


def environment_changes(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """The versions and devices that are not those of the checkpoint (:func:`environment`), each as ``name before -> now``."""
    found = []
    for group in ("versions", "machine"):
        mine, theirs = now[group], before.get(group, {})
        found += [
            f"{name} {theirs.get(name)} -> {mine[name]}"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
    return found


def environment() -> dict[str, Any]:
    """What a bit-exact continuation depends on beside the run folder: versions, device, cores and XLA's flags."""
    import jax

    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {
        "device": jax.devices()[0].device_kind,
        "cores": cores,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
        "machine": machine,
    }
