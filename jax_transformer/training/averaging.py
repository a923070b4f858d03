"""The mean of several checkpoints' weights (Vaswani et al. 2017, section 6.1)."""

from typing import Any

import jax
import numpy as np

from jax_transformer.storage import checkpoint
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import step


def mean(folder: RunFolder, steps: list[int], like: step.TrainState) -> dict[str, np.ndarray]:
    """The mean of the validated weights of ``steps``, computed in float64 and rounded once.

    ``like`` gives shapes and dtypes.
    """
    group = "ema" if like.ema else "params"
    abstract = {group: getattr(like, group)}
    total: dict[str, Any] = {}
    for each in steps:
        arrays = checkpoint.load(folder.checkpoints, each, abstract, partial=True)[group]
        total = {
            name: np.asarray(array, np.float64) + total.get(name, 0)
            for name, array in arrays.items()
        }
    averaged = {
        name: (array / len(steps)).astype(abstract[group][name].dtype)
        for name, array in total.items()
    }
    return jax.tree.map(np.ascontiguousarray, averaged)
