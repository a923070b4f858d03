"""A document's models in PyTorch and Flax, with the same random weights, and what they compute."""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jax_transformer as jt
from jax_transformer.architectures import registry, twins
from jax_transformer.training import loss
from torch_reference import decoding

SIZES = {"source_vocab_size": 11, "target_vocab_size": 13, "d_model": 12, "num_heads": 3}
SIZES |= {"num_layers": 2, "max_length": 20}

Arrays = dict[str, np.ndarray]


@functools.cache
class PairedModels:
    """A preset's models in PyTorch and Flax with the same weights, and a batch."""

    def __init__(self, preset: str):
        is_ruled = "d_ff" in registry.presets()[preset].multiples
        self.config = jt.preset(preset, **SIZES, **({} if is_ruled else {"d_ff": 48}))
        self.twin = twins.twin(self.config).double().eval().requires_grad_(False)
        random = np.random.default_rng(6)
        for name, parameter in sorted(self.twin.named_parameters()):
            is_vector = parameter.ndim == 1
            size = 0.3 if is_vector else 1.0 if "emb" in name else parameter.shape[-1] ** -0.5
            mean = float(is_vector and not name.endswith(("bias", "beta")))
            parameter.data = torch.from_numpy(random.normal(mean, size, parameter.shape))
        self.model = jt.convert.from_torch(self.twin.state_dict(), self.config)
        ids = [i for i in range(11) if i not in (0, 1, 2)]
        length = 7 if jt.preset(preset.removesuffix("_repaired")).equal_lengths else 5
        self.source = np.array([random.choice(ids, 7), random.choice(ids, 7)])
        self.target = np.array([random.choice(ids, length), random.choice(ids, length)])
        self.source[1, 5:] = self.config.source_pad_id
        self.targets = np.roll(self.target, -1, axis=1)
        self.targets[1, -2:] = self.config.target_pad_id

    @functools.cached_property
    def torch(self) -> Arrays:
        """The outputs of every module by name, the first input under ``NAME<``; and results."""
        arrays: Arrays = {}
        hooks = [
            module.register_forward_hook(
                lambda _, inputs, result, name=name: _add(arrays, name, inputs, result)
            )
            for name, module in self.twin.named_modules()
        ]
        source, target, targets = map(torch.from_numpy, (self.source, self.target, self.targets))
        logits, pad = self.twin(source, target), self.config.target_pad_id
        for hook in hooks:
            hook.remove()
        ids = {"bos": self.config.bos_id, "eos": self.config.eos_id, "pad": pad}
        # A model of equal lengths needs no loop: no token depends on another
        alone = logits.argmax(-1)[:, :5] if self.config.equal_lengths else None
        tokens = decoding.greedy(self.twin, source, 5, **ids) if alone is None else alone
        summed = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=pad, label_smoothing=0.1
        )
        return arrays | {"logits": logits.numpy(), "loss": summed.numpy(), "tokens": tokens.numpy()}

    @functools.cached_property
    def flax(self) -> Arrays:
        """The same of Flax."""
        arrays = self.outputs(self.source, self.target)
        logits, targets = map(jnp.asarray, (arrays["logits"], self.targets))
        sums = loss.loss_sums(
            logits, targets, pad_id=self.config.target_pad_id, label_smoothing=0.1
        )
        return arrays | {
            "loss": np.asarray(float(sums.loss) / int(sums.tokens)),
            "tokens": self._greedy(5),
        }

    def _greedy(self, length: int) -> np.ndarray:
        cache, tokens = (
            self.model.init_cache(self.source, length),
            [np.full((2, 1), self.config.bos_id)],
        )
        for _ in range(length):
            logits, cache = self.model.decode_step(jnp.asarray(tokens[-1], jnp.int32), cache)
            tokens.append(np.asarray(logits.argmax(-1)))
        ids = np.concatenate(tokens[1:], axis=1)
        is_end = ids == self.config.eos_id
        return np.where(is_end.cumsum(axis=1) > is_end, self.config.target_pad_id, ids)

    def outputs(self, source: np.ndarray, target: np.ndarray) -> Arrays:
        arrays: Arrays = {}
        names = {id(m): ".".join(map(str, path)) for path, m in nnx.iter_modules(self.model)}

        def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(module: nnx.Module, *inputs: Any, **named: Any) -> Any:
                result = call(module, *inputs, **named)
                _add(arrays, names[id(module)], inputs, result)
                return result

            return wrapped

        kinds = {type(m): type(m).__call__ for _, m in nnx.iter_modules(self.model) if callable(m)}
        try:
            for kind, call in kinds.items():
                kind.__call__ = recorded(call)
            logits = self.model(source, target)
        finally:
            for kind, call in kinds.items():
                kind.__call__ = call
        return arrays | {"logits": np.asarray(logits)}

    @functools.cached_property
    def lines(self) -> set[tuple[str, int]]:
        """File and number of every line of the project that runs."""
        ran: set[tuple[str, int]] = set()

        def trace(frame: Any, *_: Any) -> Any:
            file = frame.f_code.co_filename
            if "/torch_reference/" in file or "/jax_transformer/" in file:
                ran.add((file, frame.f_lineno))
                return trace
            return None

        assert self.flax  # compiled before, which runs far more lines than it shows
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            self.twin(torch.from_numpy(self.source), torch.from_numpy(self.target))
            self.model(self.source, self.target)
            self._greedy(1)
        finally:
            sys.settrace(before)
        return ran


def _add(arrays: Arrays, name: str, inputs: tuple[Any, ...], result: Any) -> None:
    """Add a call's first input, output and attention weights; a second call's as ``NAME@1``."""
    count = next(n for n in itertools.count() if (f"{name}@{n}" if n else name) not in arrays)
    name = f"{name}@{count}" if count else name
    results = result if isinstance(result, tuple) else (result,)
    named = {f"{name}:weights": x for x in results[1:2]} | {f"{name}<": x for x in inputs[:1]}
    arrays |= {
        k: np.asarray(x) for k, x in ({name: results[0]} | named).items() if hasattr(x, "shape")
    }
