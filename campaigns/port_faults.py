"""Faults in strangers' ports: the share that the parity tool notices, and names the module of.

Each changes a port at run time: its weights, its attributes, or a function that a module calls.
"""

import contextlib
import copy
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from campaigns import ports
from jax_transformer.architectures import twins
from jax_transformer.parity import Report, comparison, recording
from jax_transformer.weights import any_model

Change = Callable[[Any], None]
PORTS = ["vit", "qwen3", "whisper_encoder", "whisper_decoder", "umt5"]
PORTS += ["resnet", "dinov3", "mamba2"]
COLUMNS = ["port", "faults", "float32", "bfloat16", "bfloat16 alone", "allclose", "KL"]
COLUMNS += ["pairs"]
CLEAN_COLUMNS = ["port", "runs without a fault", "false alarms"]
MOST, PAIRS, FLOOR, CLEAN = 40, 20, 10, 126
"""Numbers of faults in modules, of pairs of faults, and of runs without a fault, of each port:
those that the floor of bfloat16 is of, and those that count false alarms."""


@dataclass(frozen=True)
class Fault:
    kind: str
    expected: tuple[str, ...]
    """The module of the port that is to be named, and the one around it if that is not paired."""
    change: Change


def part(model: Any, path: str) -> Any:
    """The module of a dotted path."""
    steps = path.split(".") if path else []
    return functools.reduce(
        lambda m, step: m[int(step)] if step.isdecimal() else getattr(m, step), steps, model
    )


def during(path: str, owner: Any, name: str, other: Any) -> Change:
    """Replace a function in the calls of one module."""

    def change(model: Any) -> None:
        kind = type(part(model, path))

        def call(self: Any, *args: Any, **named: Any) -> Any:
            with mock.patch.object(owner, name, other):
                return kind.__call__(self, *args, **named)

        part(model, path).__class__ = type(kind.__name__, (kind,), {"__call__": call})

    return change


def attribute(path: str, name: str, value: Any) -> Change:
    return lambda model: setattr(part(model, path), name, value)


def weight(path: str, leaf: str, value: Callable[[Any], Any]) -> Change:
    def change(model: Any) -> None:
        variable = getattr(part(model, path), leaf)
        variable[...] = value(variable[...])

    return change


def transposed(kernel: Any) -> Any:
    """A square kernel of a linear layer, also with heads, or of a convolution; None if it is not
    square."""
    if kernel.ndim > 1 and kernel.shape[-1] == kernel.shape[-2]:
        return jnp.swapaxes(kernel, -1, -2)
    if kernel.ndim == 3 and max(kernel.shape) ** 2 == kernel.size:
        return kernel.reshape(max(kernel.shape), -1).T.reshape(kernel.shape)
    return None


def other_heads(kernel: Any) -> Any:
    """A kernel as if each head's numbers were apart."""
    axis = 1 if kernel.shape[0] > kernel.shape[-1] else 0
    heads, width = kernel.shape[axis : axis + 2]
    shape = (*kernel.shape[:axis], width, heads, *kernel.shape[axis + 2 :])
    return jnp.swapaxes(kernel.reshape(shape), axis, axis + 1)


def after(block: str, norm: str) -> Change:
    """A norm moves from the input of a block's part to the output of the block."""

    def change(model: Any) -> None:
        kind, of_norm = type(part(model, block)), type(part(model, f"{block}.{norm}"))

        def call(self: Any, *args: Any, **named: Any) -> Any:
            result = kind.__call__(self, *args, **named)
            return of_norm.__call__(getattr(self, norm), result)

        same = type(of_norm.__name__, (of_norm,), {"__call__": lambda self, x, *_, **__: x})
        part(model, block).__class__ = type(kind.__name__, (kind,), {"__call__": call})
        part(model, f"{block}.{norm}").__class__ = same

    return change


def attention(scale: float = 1.0, masked: bool = True, dtype: Any = None) -> Callable:
    """An attention function of ``nnx.MultiHeadAttention``; a wrong mask is causal, or none."""

    def call(query: Any, key: Any, value: Any, mask: Any = None, **_: Any) -> Any:
        scores = jnp.einsum("bqhe,bkhe->bhqk", query * scale / query.shape[-1] ** 0.5, key)
        if not masked:
            mask = jnp.tril(jnp.ones(scores.shape[2:], bool)) if mask is None else None
        scores = scores if mask is None else jnp.where(mask, scores, -1e30)
        weights = jax.nn.softmax(scores.astype(dtype or scores.dtype))
        return jnp.einsum("bhqk,bkhe->bqhe", weights.astype(value.dtype), value)

    return call


def in_bfloat16(x: Any, *, axis: int = -1, softmax: Any = jax.nn.softmax) -> Any:
    return softmax(x.astype("bfloat16"), axis=axis).astype(x.dtype)


def interleaved(x: Any, sin: Any, cos: Any) -> Any:
    sin, cos, a, b = sin[:, :, None], cos[:, :, None], x[..., ::2], x[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1)
    return turned.reshape(x.shape).astype(x.dtype)


def tanh_gelu(x: Any, approximate: bool = True, gelu: Any = jax.nn.gelu) -> Any:
    return gelu(x, approximate=True)


def swapped_halves(x: Any) -> Any:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([b, -a], -1)


def halved_queries(text: str, x: Any, *others: Any, einsum: Any = jnp.einsum, **named: Any) -> Any:
    return einsum(text, x / 2 if text == "binc,bjnc->bnij" else x, *others, **named)


def of_modules(model: Any) -> Iterator[Fault]:
    """Faults of every module that Flax has."""
    for path, module in nnx.iter_modules(model):
        at = ".".join(map(str, path))
        names = at, at.rpartition(".")[0]
        for name in ("epsilon", "eps"):
            if getattr(module, name, None):
                value = 1e-5 if getattr(module, name) != 1e-5 else 1e-6
                yield Fault("epsilon", names, attribute(at, name, value))
        for leaf, kind, value in (
            ("bias", "forgotten bias", jnp.zeros_like),
            ("scale", "forgotten scale", jnp.ones_like),
            ("weight", "forgotten scale", jnp.ones_like),
            ("lambda1", "forgotten scale", jnp.ones_like),
            ("kernel", "transposed kernel", transposed),
            ("embedding", "rows of a table", lambda x: jnp.roll(x, 1, 0)),
        ):
            variable = getattr(module, leaf, None)
            value_of = variable.get_value() if isinstance(variable, nnx.Param) else None
            if value_of is not None and value(value_of) is not None:
                yield Fault(kind, names, weight(at, leaf, value))
        if isinstance(module, nnx.LinearGeneral | nnx.Einsum) and module.kernel.ndim == 3:
            yield Fault("order of heads", names, weight(at, "kernel", other_heads))
        if isinstance(module, nnx.MultiHeadAttention):
            for kind, other in (
                ("scale", attention(scale=2**0.5)),
                ("mask", attention(masked=False)),
                ("softmax's dtype", attention(dtype=jnp.bfloat16)),
            ):
                yield Fault(kind, names, attribute(at, "attention_fn", other))


def in_code(name: str) -> Iterator[Fault]:
    """Faults in a port's own code, in each of its first two layers."""

    def fault(kind: str, at: str, change: Change, inner: str = "") -> Fault:
        return Fault(kind, (at, f"{at}.{inner}") if inner else (at,), change)

    for i in (0, 1):
        at = f"layers.{i}"
        if name == "vit":
            yield fault("activation", at, during(at, jax.nn, "gelu", tanh_gelu))
            yield fault("norm's place", at, after(at, "layernorm_after"), "layernorm_after")
        if name == "whisper_encoder":
            yield fault("activation", at, attribute(at, "activation_fn", tanh_gelu))
            yield fault("norm's place", at, after(at, "final_layer_norm"), "final_layer_norm")
        if name == "qwen3":
            attn, mlp, code = f"{at}.attn", f"{at}.mlp", ports.bonsai(name)
            norm = "post_attention_layernorm"
            yield fault("scale", attn, attribute(attn, "scale", 0.5))
            yield fault("activation", mlp, during(mlp, nnx, "silu", jax.nn.gelu))
            yield fault("mask", attn, during(attn, code, "LARGE_NEGATIVE", -2.0))
            yield fault("rotary halves", attn, during(attn, code, "apply_rope", interleaved))
            yield fault("softmax's dtype", attn, during(attn, jax.nn, "softmax", in_bfloat16))
            yield fault("norm's place", at, after(at, norm), norm)
        if name == "resnet":
            at = f"layer{i}.blocks.0"
            yield fault("activation", at, during(at, nnx, "relu", nnx.gelu))
            yield fault("norm's place", at, after(at, "bn2"), "bn2")
            turned = weight(f"{at}.conv1", "kernel", lambda kernel: kernel[::-1])
            yield fault("window", f"{at}.conv1", turned)
        if name == "dinov3":
            at, code = f"layer.{i}", ports.bonsai(name)
            attn, mlp = f"{at}.attention", f"{at}.mlp"
            yield fault("scale", attn, during(attn, jnp, "sqrt", lambda x: x / 2))
            yield fault("activation", mlp, attribute(mlp, "act_fn", tanh_gelu))
            yield fault("rotary halves", attn, during(attn, code, "rotate_half", swapped_halves))
            yield fault("softmax's dtype", attn, during(attn, nnx, "softmax", in_bfloat16))
            yield fault("norm's place", at, after(at, "norm2"), "norm2")
        if name == "mamba2":
            at = f"backbone.layers.{i}.mixer"
            yield fault("activation", at, attribute(at, "act", jax.nn.gelu))
            yield fault("gate", f"{at}.norm", attribute(f"{at}.norm", "gate_residual", False))
            for leaf, value in (("A_log", jnp.zeros_like), ("D", jnp.ones_like)):
                yield fault("forgotten scale", at, weight(at, leaf, value))
            yield fault("forgotten bias", at, weight(at, "dt_bias", jnp.zeros_like))
            turned = weight(f"{at}.conv1d.conv", "kernel", lambda kernel: kernel[::-1])
            yield fault("window", f"{at}.conv1d", turned, "conv")
        if name == "umt5":
            for stack in ("encoder", "decoder"):
                attn = f"{stack}.block.{i}.layer.0.SelfAttention"
                yield fault("softmax's dtype", attn, during(attn, jax.nn, "softmax", in_bfloat16))
                scaled = during(attn, jnp, "einsum", halved_queries)
                yield fault("scale", attn, scaled)


def faults(name: str, model: Any) -> list[Fault]:
    every = list(of_modules(model))
    random.Random(0).shuffle(every)
    return every[:MOST] + list(in_code(name))


EXACT_GELU = during("", jax.nn, "gelu", functools.partial(jax.nn.gelu, approximate=False))


def repaired_dinov3(model: Any) -> None:
    during("", jnp, "bfloat16", jnp.float32)(model)
    for layer in model.layer:
        layer.mlp.act_fn = functools.partial(jax.nn.gelu, approximate=False)


REPAIRS = {
    "vit": EXACT_GELU,
    "whisper_encoder": EXACT_GELU,
    "dinov3": repaired_dinov3,
}
"""Repairs of what the ports do otherwise."""


@functools.cache
def models(name: str) -> tuple:
    """The models of ``ports``, with a bias of keys in both if the port has one."""
    theirs, *others = ports.models(name)
    for module in theirs.modules() if name.startswith("whisper") else ():
        if hasattr(module, "k_proj"):
            module.k_proj.bias = torch.nn.Parameter(torch.zeros(module.k_proj.out_features))
    return theirs, *others


class Port:
    """A port, and the module of transformers with the same random weights."""

    def __init__(self, name: str, seed: int):
        theirs, ours, batch, self.call, call_torch = models(name)
        numbers = np.random.default_rng(seed)
        self.batch = [
            numbers.permutation(x.ravel()).reshape(x.shape)
            if x.dtype.kind == "i"
            else numbers.standard_normal(x.shape).astype(x.dtype)
            for x in batch
        ]
        theirs = ports.randomized(copy.deepcopy(theirs), seed)
        self.ours = any_model.from_torch(theirs.state_dict(), table(name), into=ours)
        REPAIRS.get(name, lambda model: None)(self.ours)

        @functools.cache
        def recorded(dtype: str, seed: int | None) -> Any:
            options: dict[str, Any] = {"dtype": dtype, "seed": seed, "call": call_torch}
            return twins.recorded(theirs, self.batch, **options)

        self.recorded = recorded

    def report(self, dtype: str, *faults: Fault) -> Report:
        options: dict[str, Any] = {"dtype": dtype, "gradients": False, "call": self.call}
        recorder = lambda dtype, seed, _: self.recorded(dtype, seed)  # noqa: E731
        return comparison.compare_recorded(self.changed(faults), recorder, self.batch, **options)

    def changed(self, faults: Sequence[Fault]) -> Any:
        ours = nnx.clone(self.ours)
        for fault in faults:
            fault.change(ours)
        return ours

    def outputs(self, fault: Fault) -> tuple[np.ndarray, np.ndarray]:
        call = self.call or (lambda model, *batch: model(*batch))
        result = call(self.changed([fault]), *map(jnp.asarray, self.batch))
        return np.asarray(recording.first_array(result)), self.recorded("float32", None).result


@functools.cache
def table(name: str) -> list[Any]:
    return ports.proposed(*models(name)).table


@contextlib.contextmanager
def traced_once(*, run_once: bool = False) -> Iterator[None]:
    """Trace a model once for each dtype, whatever its weights and its batch are; run it once with
    the same replacements if these are always the same."""
    programs, runs = dict[Any, recording.Program](), dict[Any, recording.Recording]()
    make = recording.Program

    def program(function: Any, batch: Any, dtype: str, **options: Any) -> recording.Program:
        key = dtype, *options.items()
        if key not in programs:
            programs[key] = new = make(function, batch, dtype, **options)
            record = new.record

            def recorded(seed: int | None, replacements: Any) -> recording.Recording:
                chosen = (*((name, each[0]) for name, each in replacements.items()),)
                if (key, chosen) not in runs or not run_once:
                    runs[key, chosen] = record(seed, replacements)
                return runs[key, chosen]

            new.record = recorded  # type: ignore[assignment,method-assign]
        every = dict(function.parameters), dict(function.others), list(batch)
        cast = lambda x, old: jnp.asarray(x, old.dtype)  # noqa: E731
        programs[key].arrays = jax.tree.map(cast, every, programs[key].arrays)
        return programs[key]

    with mock.patch.object(recording, "Program", program):
        yield


# What notices a fault


def differ_at_1e_2(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return not np.allclose(ours, theirs, rtol=1e-2, atol=1e-2)


def diverge(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """The divergence of Kullback and Leibler, of the last axis as logits, exceeds 0.015."""
    p, q = (np.asarray(jax.nn.log_softmax(x)) for x in (theirs, ours))
    return bool((np.exp(p) * (p - q)).sum(-1).max() > 0.015)


def names(report: Report) -> list[str]:
    """The modules that a report names, the first one first; code outside of them is ""."""
    first = [report.first_fault] if report.first_fault else []
    named = [entry.ours for entry in (*first, *report.faults)]
    outside = report.own_result is not None and not report.own_result[0].agrees
    return [*dict.fromkeys(named), *([""] if outside else [])]


def times(report: Report) -> float:
    """The largest difference of a module in the report's dtype, in multiples of rounding."""
    return max(entry.output.narrow_times for entry in report.entries if entry.output)


def clean_row(name: str) -> list[str]:
    """The row of a port's runs without a fault, after a line for each false alarm."""
    table(name)
    alarms = 0
    with traced_once():
        for seed in range(1, CLEAN + 1):
            report = Port(name, seed).report("float32")
            alarms += not report.agrees
            if not report.agrees:
                print(f"{name}, false alarm of seed {seed}: {report.summary()}", flush=True)
    return [name, str(CLEAN), str(alarms)]


def row(name: str) -> list[str]:
    """The row of a port, after a line for each fault that is missed."""
    table(name)
    with jax.disable_jit():  # nothing is to be compiled for a single run
        return _row(name)


def _row(name: str) -> list[str]:
    port, counts = Port(name, 0), Counter[str]()
    with traced_once():
        clean = [Port(name, seed).report("bfloat16") for seed in range(1, FLOOR + 1)]
    floor = 2 * max(map(times, clean))
    compared = {entry.ours for entry in clean[0].entries if entry.output is not None}
    every = [
        replace(fault, expected=(*fault.expected, innermost(fault.expected[-1], compared)))
        for fault in faults(name, port.ours)
    ]
    for fault in every:
        with traced_once(run_once=True):
            reports = {dtype: port.report(dtype, fault) for dtype in ("float32", "bfloat16")}
        for dtype, report in reports.items():
            named = not report.agrees and names(report)[:1] in ([at] for at in fault.expected)
            counts[dtype] += named
            if not named:
                print(
                    f"{name}, {dtype}: {fault.kind} in {fault.expected[0]}: {report.summary()}",
                    flush=True,
                )
        counts["alone"] += times(reports["bfloat16"]) > floor
        for gate in (differ_at_1e_2, diverge):
            counts[gate.__name__] += gate(*port.outputs(fault))
    order = random.Random(1).sample(range(len(every)), len(every))
    both = [(every[i], every[j]) for i, j in itertools.pairwise(order)]
    both = [(a, b) for a, b in both if a.expected[0] != b.expected[0]][:PAIRS]
    for pair in both:
        named = names(port.report("float32", *pair))
        counts["pairs"] += all({*fault.expected} & {*named} for fault in pair)
        if not all({*fault.expected} & {*named} for fault in pair):
            kinds = " and ".join(f"{fault.kind} in {fault.expected[0]}" for fault in pair)
            print(f"{name}: {kinds}: named are {', '.join(named)}", flush=True)
    columns = ("float32", "bfloat16", "alone", "differ_at_1e_2", "diverge")
    cells = [name, len(every), *(counts[each] for each in columns)]
    return list(map(str, [*cells, f"{counts['pairs']} of {len(both)}"]))


def innermost(path: str, compared: Collection[str]) -> str:
    """The innermost compared module around a path, which may be its own; "" if there is none."""
    while path and path not in compared:
        path = path.rpartition(".")[0]
    return path
