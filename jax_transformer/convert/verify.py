"""Check a conversion: convert it back bit for bit, and run both sides if the PyTorch twin can be
built.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.storage.tensors import same
from jax_transformer.weights import rules

State = Mapping[str, np.ndarray]
# Relative to the largest number. A correct pair differs by 1e-14, the smallest fault known (another
# epsilon) by 1e-5.
_BOUND = 1e-9
_ROWS, _SOURCE, _TARGET = 3, 7, 5


@dataclass(frozen=True)
class Checked:
    """The check that was made, and the largest difference of each output."""

    how: str
    errors: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        worst = (
            f": largest difference {max(self.errors.values()):.2g} over {len(self.errors)} outputs"
            if self.errors
            else ""
        )
        return f"checked: {self.how}{worst}"


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
    for name, found in theirs.items():
        other = (
            ours[name] if found.shape == ours[name].shape else np.swapaxes(ours[name], 0, 1)
        )  # some twins put the length first
        if found.shape != other.shape:
            raise DifferentError(
                f"self-check: {name} is {found.shape} in PyTorch and {other.shape} here; nothing "
                "was changed"
            )
        errors[name] = float(np.abs(found - other).max())
        if not errors[name] <= _BOUND * max(1.0, float(np.abs(found).max())):
            raise DifferentError(
                f"self-check: {name} differs from the PyTorch twin's by {errors[name]:.3g}; "
                "nothing was changed"
            )
    return errors


def _blocks(config: TransformerConfig, table: rules.Table) -> dict[str, str]:
    """The PyTorch module of every block, by the block's name here."""
    found = {}
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
            found[block] = ".".join(names[0][:shared])
    return found


def _batch(config: TransformerConfig) -> tuple[np.ndarray, np.ndarray]:
    """Random ids (b, s) and (b, t), padded after rows of different lengths."""
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
    """The logits and the output of every block, in float64 on the CPU."""
    from dataclasses import replace

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
    """Each block's own output among those of all modules' methods."""
    from flax import nnx

    found = {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(captured)
    }
    return {block: found[f"{block}.__call__"][0].x for block in blocks}
