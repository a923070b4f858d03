"""Recording of a PyTorch model on one batch: each module's inputs, outputs and gradients.

Plain PyTorch in one file. ``jax_transformer.parity`` calls :func:`record`; as a script the file
serves an environment that has torch and safetensors but no JAX::

    python recording.py REQUEST.safetensors RESULT.safetensors package.module:make_model

REQUEST holds the batch as ``batch/0``, ``batch/1``, ..., the weights as ``state/NAME`` (if there
are none, ``make_model()`` sets them) and, as JSON in its metadata, the dtypes to run in and the
seed. RESULT receives the arrays of a :class:`Recording` for each dtype, and versions.
"""

import contextlib
import copy
import dataclasses
import importlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


@dataclass
class Recording:
    """Arrays of one run, named ``CALL/input``, ``CALL/output`` and the same with `` gradient``.

    CALL is a module's name and the number of its call, as ``encoder.layers.0#0``. Further
    floating-point and complex inputs are ``input 1`` and so on; a tensor that is passed twice
    counts once. Of several outputs the first is recorded; of the model's, the others are
    ``#0/result NAME``. The last axis of a complex array holds its real and imaginary parts.
    """

    order: list[str] = field(default_factory=list)
    """The calls in the order in which they ended."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    """Gradients of parameters by name; tied parameters appear once."""
    result: np.ndarray | None = None
    """The model's output."""
    narrow: dict[str, str] | None = None
    """The dtypes below float64 that modules compute in by themselves, the model as "", and those
    of parameters that are not trained, if these were replaced by float64; None if the run was left
    as it is."""
    rounded: list[str] = field(default_factory=list)
    """The modules that have tensors besides parameters, and the parameters that are not trained,
    which may be rounded to such a dtype."""
    note: str = ""
    """The reason why it was left so."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes of parameters by name; tied parameters appear once."""
    masks: dict[str, list[np.ndarray]] = field(default_factory=dict)
    """The booleans and integers that go into each call."""
    outputs: list[str] = field(default_factory=list)
    """Names of the floating-point tensors that the model returns; a lone one's is ""."""

    def get(self, name: str) -> np.ndarray | None:
        """The array of that name, or None."""
        return self.arrays.get(name)

    def named_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every array with its name in a file."""
        yield from ((f"arrays/{name}", array) for name, array in self.arrays.items())
        yield from ((f"parameters/{name}", array) for name, array in self.parameters.items())
        assert self.result is not None
        yield "result", self.result


def record(
    module: nn.Module,
    batch: Sequence[np.ndarray],
    *,
    names: Collection[str] | None = None,
    dtype: str = "float64",
    seed: int | None = 0,
    call: Callable[..., Any] | None = None,
    positions: np.ndarray | None = None,
) -> Recording:
    """Run a copy of ``module`` in ``dtype`` on ``batch`` and record it.

    Args:
        module: not changed. It runs in the mode (train, eval) that it is in.
        batch: arguments of the call; floating-point arrays are cast to ``dtype``, a name.
        names: names of the modules to record; all if None.
        seed: seed of R in the loss ``sum(R * output)`` whose gradients are recorded, with R
            standard normal; None records no gradients.
        call: ``call(module, *tensors)`` instead of ``module(*tensors)``.
        positions: R is 0 but where these booleans are True, on the first axes of the output.
    """

    def run(*, wide: bool) -> Recording:
        options = names, dtype, seed, call, positions
        try:
            return _record(_copy(module, dtype, shared=True), batch, *options, wide=wide)
        except Exception:  # of an operation that changes a parameter or reads its memory, perhaps
            return _record(_copy(module, dtype, shared=False), batch, *options, wide=wide)

    return in_float64(run) if dtype == "float64" else run(wide=False)


def in_float64(run: Callable[..., Any]) -> Any:
    """``run(wide=True)``, or ``run(wide=False)`` with a ``note`` why if that fails."""
    try:
        return run(wide=True)
    except Exception as error:  # an operation that needs its dtype, among others
        result = run(wide=False)
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        result.note = f"the PyTorch model is not run in float64 everywhere ({reason})"
        return result


class Wide(TorchDispatchMode):
    """Casts to narrower floats give float64 while the context is open, and so do new tensors."""

    def __init__(self, report: Callable[[torch.dtype], None]):
        super().__init__()
        self.report = report

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out torch.compile's wrapper, whose import takes five seconds."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is torch.ops.aten.view.dtype:
            raise TypeError("the bits of numbers are used")

        def widened(value: Any) -> Any:
            if not isinstance(value, torch.dtype) or not _is_narrow(value):
                return value
            self.report(value)
            return torch.complex128 if value.is_complex else torch.float64

        named = {name: widened(value) for name, value in (kwargs or {}).items()}
        try:
            result = function(*map(widened, args), **named)
        except RuntimeError as error:
            result = self._narrow(function, args, kwargs or {}, error)
        if function is torch.ops.aten.lift_fresh.default and _is_narrow(result.dtype):
            self.report(result.dtype)  # torch.tensor(..., dtype=torch.float32)
            result = in_dtype(result, torch.float64)
        return result

    def _narrow(self, function: Any, args: tuple, kwargs: dict, error: RuntimeError) -> Any:
        """The result in float64 of an operation that has no kernel for it, such as grouped_mm."""

        def cast(tensor: Any, source: torch.dtype, dtype: torch.dtype) -> Any:
            floating = isinstance(tensor, torch.Tensor) and tensor.dtype == source
            return tensor.to(dtype) if floating else tensor

        inputs = tree_map(lambda x: cast(x, torch.float64, torch.float32), (args, kwargs))
        try:
            result = function(*inputs[0], **inputs[1])
        except RuntimeError:
            raise error from None
        self.report(torch.float32)
        return tree_map(lambda x: cast(x, torch.float32, torch.float64), result)

    def __enter__(self) -> Any:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self.default)
        super().__exit__(*error)


def _is_narrow(dtype: torch.dtype) -> bool:
    return (dtype.is_floating_point and dtype != torch.float64) or (
        dtype.is_complex and dtype != torch.complex128
    )


class Cast(torch.Tensor):
    """A tensor in another dtype that takes no memory: each operation casts it anew, and its views
    are such tensors too. An operation that would change it raises TypeError."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    source: torch.Tensor

    @staticmethod
    def __new__(cls, source: torch.Tensor, dtype: torch.dtype) -> "Cast":
        options = {"strides": source.stride(), "storage_offset": source.storage_offset()}
        options |= {"dtype": dtype, "device": source.device}
        cast = torch.Tensor._make_wrapper_subclass(cls, source.shape, **options)
        torch._C._set_throw_on_mutable_data_ptr(cast)
        cast.source = source
        return cast

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        first, named = args[0] if args else None, kwargs or {}
        if function.is_view and isinstance(first, cls):
            result = function(first.source, *args[1:], **named)
            dtypes = {view.dtype for view in _tensors(result)}
            if dtypes == {first.source.dtype}:  # not, for example, a view as complex numbers
                return tree_map(lambda view: cls(view, first.dtype), result)
        parameters = function._schema.arguments
        values = dict(zip((each.name for each in parameters), args, strict=False)) | named
        written = [values.get(each.name) for each in parameters if each.is_write]
        if any(isinstance(tensor, cls) for tensor in _tensors(written)):
            raise TypeError("a parameter is changed")

        def cast(x: Any) -> Any:
            return _cast(x.source, x.dtype) if isinstance(x, cls) else x

        return function(*tree_map(cast, args), **tree_map(cast, named))


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in ``dtype``; a large one in a mapping of its own. On the heap, what is recorded
    next would take the beginning of its memory, and the next weight no longer fit in there."""
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    dense = tensor.device.type == "cpu" and extent == tensor.numel() > 2**16
    if tensor.dtype == dtype or not dense:
        return tensor.to(dtype)
    mapped = torch.frombuffer(mmap.mmap(-1, extent * dtype.itemsize), dtype=dtype)
    return mapped.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _copy(module: nn.Module, dtype: str, *, shared: bool) -> nn.Module:
    """A copy in ``dtype`` without gradients; if ``shared``, its parameters take no memory."""
    kind = getattr(torch, dtype)
    casts: dict[int, Any] = {}
    for parameter in module.parameters() if shared else ():
        if type(parameter) is nn.Parameter and parameter.is_floating_point():
            cast: Any = Cast(parameter.detach(), kind).requires_grad_(parameter.requires_grad)
            cast._is_param = True
            casts[id(parameter)] = cast
    module = copy.deepcopy(module, casts)
    module._apply(lambda tensor: in_dtype(tensor, kind))
    module.zero_grad(set_to_none=True)
    return module


def _record(
    module: nn.Module,
    batch: Sequence[np.ndarray],
    names: Collection[str] | None,
    dtype: str,
    seed: int | None,
    call: Callable[..., Any] | None,
    positions: np.ndarray | None,
    *,
    wide: bool,
) -> Recording:
    kind = getattr(torch, dtype)
    recording = Recording(sizes={name: p.numel() for name, p in module.named_parameters()})
    frozen = frozen_in_float32(module)
    narrow = dict.fromkeys([*float32_buffers(module), *frozen], torch.float32)
    recorded = {
        id(part): name
        for name, part in module.named_modules()
        if name and (names is None or name in names)
    }
    counts: dict[str, int] = {}
    open_calls: list[str] = []

    def before(part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        name = recorded[id(part)]
        key = f"{name}#{counts.get(name, 0)}"
        counts[name] = counts.get(name, 0) + 1
        open_calls.append(key)
        recording.masks[key] = [
            as_array(tensor)
            for tensor in _tensors((args, kwargs))
            if not (tensor.is_floating_point() or tensor.is_complex())
        ]
        for i, tensor in enumerate(
            {id(tensor): tensor for tensor in _floats((args, kwargs))}.values()
        ):
            args, kwargs = _recorded(
                (args, kwargs), tensor, f"{key}/input{f' {i}' if i else ''}", recording
            )
        return args, kwargs

    def after(part: nn.Module, args: tuple, kwargs: dict, result: Any) -> Any:
        key = open_calls.pop()
        recording.order.append(key)
        output = next(_floats(result), None)
        return result if output is None else _recorded(result, output, f"{key}/output", recording)

    for part in module.modules():
        if id(part) in recorded:
            part.register_forward_pre_hook(before, with_kwargs=True)
            part.register_forward_hook(after, with_kwargs=True)
    tensors = [as_tensor(array, kind) for array in batch]

    def report(dtype: torch.dtype) -> None:
        if recording.result is None:  # in the forward pass
            name = open_calls[-1].rpartition("#")[0] if open_calls else ""
            narrow[name] = min(dtype, narrow.get(name, dtype), key=lambda each: each.itemsize)

    with Wide(report) if wide else contextlib.nullcontext():
        result = (call or (lambda model, *arguments: model(*arguments)))(module, *tensors)
        output, recording.outputs = first_output(result), [*named_floats(result)]
        if output.is_complex():
            output = torch.view_as_real(output)
        recording.result = as_array(output)
        for name, tensor in [*named_floats(result).items()][1:]:
            recording.arrays[f"#0/result {name}"] = as_array(tensor)
        if seed is not None and output.requires_grad:
            weights = np.random.default_rng(seed).standard_normal(output.shape)
            if positions is not None and positions.shape == output.shape[: positions.ndim]:
                weights[~positions] = 0
            (output * torch.from_numpy(weights).to(output.dtype)).sum().backward()
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    recording.parameters[name] = as_array(parameter.grad)
                    parameter.grad = None
    names_of_dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in narrow.items()}
    recording.narrow = names_of_dtypes if wide else None
    recording.rounded = [*with_constants(module), *frozen]
    return recording


def first_output(result: Any) -> torch.Tensor:
    """The first floating-point or complex tensor of a model's result. Raises TypeError if there is
    none."""
    output, every = next(_floats(result), None), dict(_named(result))
    if output is None:
        kinds = ", ".join(f"{name or 'its result'} is {x.dtype}" for name, x in every.items())
        raise TypeError(
            "the PyTorch model returns no floating-point tensor"
            f" ({kinds or type(result).__name__}): pass call_torch= a function that does, or"
            " wrap the model in a module that does"
        )
    return output


def named_floats(result: Any) -> dict[str, torch.Tensor]:
    """A result's floating-point and complex tensors by name."""
    return {name: x for name, x in _named(result) if x.is_floating_point() or x.is_complex()}


def with_constants(module: nn.Module) -> list[str]:
    """The names of modules that have floating-point tensors besides parameters."""
    return [
        name
        for name, part in module.named_modules()
        if next(_floats(part._buffers), None) is not None
    ]


def float32_buffers(module: nn.Module) -> list[str]:
    """The names of modules that have float32 numbers in a buffer that no state_dict has, such as
    sines: another model may compute these in float64."""
    return [
        name
        for name, part in module.named_modules()
        if any(
            key in part._non_persistent_buffers_set and _in_float32(tensor)
            for key, tensor in part._buffers.items()
            if tensor is not None and tensor.is_floating_point()
        )
    ]


def frozen_in_float32(module: nn.Module) -> list[str]:
    """The names of parameters that are not trained and have float32 numbers: if the other model has
    no such array, it may compute these in float64."""
    frozen = ((name, x) for name, x in module.named_parameters() if not x.requires_grad)
    return [name for name, x in frozen if x.is_floating_point() and _in_float32(x.detach())]


def _in_float32(tensor: torch.Tensor) -> bool:
    """True for numbers of float32. Those of few binary places are exact in any dtype."""
    wide = tensor[tensor.isfinite()].double()
    return torch.equal(wide.float().double(), wide) and bool((wide * 256).frac().any())


def _recorded(value: Any, tensor: torch.Tensor, name: str, recording: Recording) -> Any:
    """``value`` with one tensor in it recorded, and replaced by an alias.

    The gradient of the alias is that of this call only.
    """
    recording.arrays[name] = as_array(tensor)
    if not tensor.requires_grad:
        return value
    alias = tensor.view_as(tensor)

    def record_gradient(gradient: torch.Tensor) -> None:
        recording.arrays[f"{name} gradient"] = as_array(gradient)

    alias.register_hook(record_gradient)
    return _replaced(value, tensor, alias)


def _floats(value: Any) -> Any:
    """The floating-point and complex tensors in nested containers, in order."""
    for tensor in _tensors(value):
        if tensor.is_floating_point() or tensor.is_complex():
            yield tensor


def _tensors(value: Any) -> Any:
    """The tensors in nested tuples, lists, dicts and dataclasses, in order."""
    for _, tensor in _named(value):
        yield tensor


def _named(value: Any, name: str = "") -> Any:
    """The same with their dotted names."""
    items: Any = ()
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        items = value.items()
    elif hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(item.name, getattr(value, item.name)) for item in dataclasses.fields(value)]
    for key, item in items:
        yield from _named(item, f"{name}.{key}".lstrip("."))


def _replaced(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """``value`` with ``old`` replaced by ``new`` wherever it occurs."""
    if value is old:
        return new
    if isinstance(value, dict):
        for name in list(value):
            changed = _replaced(value[name], old, new)
            if changed is not value[name]:
                value = copy.copy(value)
                value[name] = changed
        return value
    if isinstance(value, tuple | list):
        items = [_replaced(item, old, new) for item in value]
        if all(one is other for one, other in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            changed = _replaced(getattr(value, item.name), old, new)
            if changed is not getattr(value, item.name):
                value = dataclasses.replace(value, **{item.name: changed})
    return value


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = in_dtype(torch.from_numpy(np.array(array)), dtype)
    return tensor.long() if tensor.dtype == torch.int32 else tensor


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A floating-point tensor in ``dtype``, a complex one in the complex dtype of its width."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """A copy; 16-bit floats become float32, which holds them exactly: NumPy has no bfloat16."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    elif tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.numpy()


def main(arguments: Sequence[str]) -> None:
    """Run the script; see the docstring of this module."""
    from safetensors import safe_open
    from safetensors.numpy import save_file
    from safetensors.torch import load_file

    request, result, factory = arguments
    with safe_open(request, "np") as file:
        settings = json.loads((file.metadata() or {})["settings"])
        batch = [file.get_tensor(f"batch/{i}") for i in range(settings["batch"])]
    module_name, _, name = factory.partition(":")
    torch.manual_seed(0)
    module = getattr(importlib.import_module(module_name), name)()
    if not isinstance(module, nn.Module):
        raise TypeError(f"it returns {type(module).__name__}, not a torch.nn.Module")
    state = {
        name.removeprefix("state/"): tensor
        for name, tensor in load_file(request).items()
        if name.startswith("state/")
    }
    if state:
        dtypes = (tensor.dtype for tensor in state.values())
        module.to(max(dtypes, key=lambda dtype: dtype.itemsize * dtype.is_floating_point))
        module.load_state_dict(state)
    arrays, order, about = {}, {}, {}
    for dtype in settings["dtypes"]:
        recording = record(module, batch, dtype=dtype, seed=settings["seed"])
        order[dtype] = recording.order
        fields = "narrow", "rounded", "note", "sizes", "outputs"
        about[dtype] = {name: getattr(recording, name) for name in fields}
        arrays |= {
            f"{dtype}/{name}": np.ascontiguousarray(array)
            for name, array in recording.named_arrays()
        }
    versions = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }
    texts = {"order": order, "about": about, "versions": versions}
    save_file(arrays, result, {name: json.dumps(text) for name, text in texts.items()})


if __name__ == "__main__":
    # The current folder replaces this file's, whose modules would hide others of the same names
    sys.path[0] = os.getcwd()
    main(sys.argv[1:])
