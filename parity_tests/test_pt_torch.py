"""Our .pt files against PyTorch's reader (weights_only=True) and writer, bit for bit."""

import collections
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.storage import pt
from jax_transformer.storage.pt import writer, zip_archive

DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool "
    "complex64 complex128"
)
SMALL = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
PROTOCOLS = (2, 3, 4, 5)


def bits(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def differing(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """List the differences from PyTorch's value: containers, plain values, shapes, dtypes, bits."""
    if isinstance(theirs, torch.Tensor):
        plain = isinstance(ours, np.ndarray) and ours.flags.c_contiguous and ours.flags.writeable
        expected = f"{theirs.dtype} {tuple(theirs.shape)}"
        actual = f"torch.{ours.dtype} {ours.shape}" if plain else repr(ours)
        if actual != expected:
            return [f"{name}: {actual} for {expected}"]
        return [] if bits(theirs) == ours.tobytes() else [f"{name}: other bits"]
    if isinstance(theirs, torch.UntypedStorage):
        return differing(ours, torch.tensor([], dtype=torch.uint8).set_(theirs), name)
    if isinstance(theirs, torch.TypedStorage):
        return differing(ours, torch.tensor([], dtype=theirs.dtype).set_(theirs), name)
    if isinstance(theirs, dict):
        keys = [(key, type(key)) for key in theirs]
        if type(ours) is not dict or [(key, type(key)) for key in ours] != keys:
            return [f"{name}: other keys"]
        pairs = [(ours[key], theirs[key], f"{name}.{key}") for key in theirs]
        return [each for pair in pairs for each in differing(*pair)]
    if isinstance(theirs, list | tuple):
        kind = list if isinstance(theirs, list) else tuple
        if type(ours) is not kind or len(ours) != len(theirs):
            return [f"{name}: {type(ours).__name__} for {type(theirs).__name__}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for i, pair in pairs for each in differing(*pair, f"{name}.{i}")]
    if isinstance(theirs, torch.dtype | torch.device):
        theirs = str(theirs)
    if isinstance(theirs, bytearray):
        theirs = bytes(theirs)
    if isinstance(theirs, float):
        if isinstance(ours, float) and struct.pack("d", ours) == struct.pack("d", theirs):
            return []
        return [f"{name}: {ours} for {theirs}"]
    if type(ours) is type(theirs) and ours == theirs:
        return []
    return [f"{name}: {ours!r} for {theirs!r}"]


def loaded(path: Path) -> Any:
    """Return the value that PyTorch reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        return torch.load(path, weights_only=True)


def random_tensor(draw: random.Random, dtype: str) -> torch.Tensor:
    """Any bits (NaNs, denormals, infinities) in any shape, often not contiguous."""
    shape = [draw.choice((0, 1, 1, 2, 3, 5)) for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 4)))]
    kind = getattr(torch, dtype)
    number = int(np.prod(shape, dtype=int))
    if dtype == "bool":
        values = torch.tensor([draw.random() < 0.5 for _ in range(number + 7)], dtype=torch.bool)
    else:
        values = torch.frombuffer(
            bytearray(draw.randbytes((number + 7) * kind.itemsize)), dtype=kind
        )
    start = draw.choice((0, 0, 3))
    values = values[start : start + number].reshape(shape)
    return draw.choice(
        (
            lambda: values,
            lambda: values.clone(),
            lambda: values.permute(draw.sample(range(values.ndim), values.ndim)),
            lambda: values[..., ::2] if values.ndim else values,
            lambda: values.unsqueeze(0).expand(2, *values.shape) if number < 10 else values,
            lambda: (
                torch.nn.Parameter(values, requires_grad=draw.random() < 0.5)
                if values.is_floating_point()
                else values
            ),
        )
    )()


def random_value(draw: random.Random, depth: int, seen: list[Any], plain: bool) -> Any:
    """Return a random tree; ``plain``: of what weights_only reads in protocols 3 to 5."""
    if depth and draw.random() < 0.45:
        items = [
            random_value(draw, depth - 1, seen, plain) for _ in range(draw.choice((0, 1, 2, 5, 20)))
        ]
        kind = draw.choice((dict, collections.OrderedDict, list, tuple, collections.Counter))
        if kind is collections.Counter:
            return collections.Counter({f"n{i}": i for i in range(len(items))})
        if kind in (list, tuple):
            return kind(items)
        keys: list[Any] = [f"layers.{i}.wé" for i in range(len(items))]
        if draw.random() < 0.3:
            keys = draw.sample(range(300), len(items))
        return kind(zip(keys, items, strict=True))
    if seen and draw.random() < 0.15:
        return draw.choice(seen)  # the same object again: tied tensors, shared tuples
    leaf = draw.choice((random_tensor, random_tensor, random_plain))
    value = leaf(draw, draw.choice(DTYPES.split())) if leaf is random_tensor else random_plain(draw)
    seen.append(value)
    return value


def random_plain(draw: random.Random) -> Any:
    numbers = [0, 255, 256, 65536, -1, -(2**31), 2**31, 2**63, -(2**63), 2**64, 2**600, -(2**600)]
    floats = [0.0, -0.0, 1e-320, float("nan"), float("inf"), 0.1]
    texts = ["", "é😀", "x" * 300, "x" * 70_000]
    tuples = [(0.9, 0.999), (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    kinds = [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)]
    kinds += [torch.Size([2, 3]), complex(1, -0.0)]
    return draw.choice((None, True, False, *numbers, *floats, *texts, *tuples, *kinds))


@pytest.mark.parametrize(
    "seed", [*range(13), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(13, 100))]
)
def test_files_of_torch_are_read_equal(seed: int, tmp_path):
    """Protocol 2 against torch.load, which reads the others in part: against protocol 2."""
    draw = random.Random(seed)
    several = [random_value(draw, 3, [], True) for _ in range(5)]
    value = {"a": random_value(draw, 4, [], True), "b": several}
    path = tmp_path / "saved.pt"
    for protocol in PROTOCOLS:
        torch.save(value, path, pickle_protocol=protocol)
        ours = pt.read(path)
        assert differing(ours, loaded(path) if protocol == 2 else value) == []
    assert not pt.is_legacy(path)


@pytest.mark.parametrize("dtype", f"{DTYPES} {SMALL}".split())
def test_every_dtype(dtype: str, tmp_path):
    draw = random.Random(dtype)
    value = [random_tensor(draw, dtype) for _ in range(20)]
    torch.save(value, tmp_path / "a.pt")
    ours = pt.read(tmp_path / "a.pt")
    assert differing(ours, loaded(tmp_path / "a.pt")) == []
    writer.write(tmp_path / "b.pt", ours)
    assert differing(ours, loaded(tmp_path / "b.pt")) == []


def training_checkpoint() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    decayed, others = ([*model.parameters()][i::2] for i in range(2))
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    for _ in range(3):
        model(torch.randn(2, 3, 8), torch.randn(2, 4, 8)).square().sum().backward()
        optimizer.step()
        schedule.step()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    plain = {"epoch": 3, "best": float("inf"), "loss": float("nan")}
    plain |= {"args": {"lr": 1e-3, "name": None}}
    plain |= {"scaler": {"scale": 65536.0, "growth_factor": 2.0}, "rng": torch.get_rng_state()}
    return {name: part.state_dict() for name, part in parts.items()} | plain


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_training_checkpoint(protocol: int, tmp_path):
    value = training_checkpoint()
    torch.save(value, tmp_path / "a.pt", pickle_protocol=protocol)
    ours = pt.read(tmp_path / "a.pt")
    assert differing(ours, value) == []
    writer.write(tmp_path / "b.pt", ours)
    assert differing(ours, loaded(tmp_path / "b.pt")) == []
    fresh = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert set(fresh.state_dict()) == set(loaded(tmp_path / "b.pt")["optimizer"])


def test_tied_tensors_are_detected_and_stay_tied(tmp_path):
    weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    other = torch.arange(12.0).reshape(3, 4)
    value = {
        "a": weight,
        "b": {"c": weight, "t": weight.T},
        "flat": weight.view(-1),
        "half": weight[:2],
        "copy": other,
        "none": [torch.empty(0)] * 2,
    }
    torch.save(value, tmp_path / "a.pt")
    assert pt.ties(tmp_path / "a.pt") == [("a", "b.c", "b.t", "flat")]
    ours = pt.read(tmp_path / "a.pt")
    assert differing(ours, loaded(tmp_path / "a.pt")) == []
    assert ours["a"] is ours["b"]["c"] and ours["copy"] is not ours["a"]
    writer.write(tmp_path / "b.pt", ours)
    assert pt.ties(tmp_path / "b.pt") == [("a", "b.c")]
    again = loaded(tmp_path / "b.pt")
    assert again["a"].data_ptr() == again["b"]["c"].data_ptr() != again["copy"].data_ptr()


def test_torch_reads_our_files_strictly_and_mapped(tmp_path):
    module = torch.nn.TransformerEncoderLayer(8, 2, 16)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    writer.write(tmp_path / "a.pt", state)
    fresh = torch.nn.TransformerEncoderLayer(8, 2, 16)
    fresh.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True, mmap=True), strict=True)
    assert differing(state, dict(fresh.state_dict())) == []


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3), (), (1, 4, 1)])
def test_strides_are_those_of_a_new_tensor(shape, tmp_path):
    writer.write(tmp_path / "a.pt", {"a": np.zeros(shape)})
    assert loaded(tmp_path / "a.pt")["a"].stride() == torch.zeros(shape).stride()


def test_files_with_64_bit_fields(tmp_path, monkeypatch):
    """Files over 4 GB, simulated by a limit of 40 bytes, are read by PyTorch and by us."""
    monkeypatch.setattr(zip_archive, "LARGE", 40)
    state = {"a": np.arange(100.0), "b": np.arange(3, dtype=np.int8)}
    writer.write(tmp_path / "a.pt", state)
    assert b"PK\x06\x06" in (tmp_path / "a.pt").read_bytes()
    assert differing(state, loaded(tmp_path / "a.pt")) == []


def test_the_format_before_1_6_is_refused_with_a_hint(tmp_path):
    for protocol in PROTOCOLS:
        options = dict(_use_new_zipfile_serialization=False, pickle_protocol=protocol)
        torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", **options)
        assert pt.is_legacy(tmp_path / "a.pt")
        message = r"before PyTorch 1\.6: load it there, if you trust it, and torch\.save it again"
        with pytest.raises(InputError, match=message):
            pt.read(tmp_path / "a.pt")


def _conjugated() -> torch.Tensor:
    return torch.ones(2, dtype=torch.complex64).conj()


@pytest.mark.parametrize(
    "name, value",
    {
        "torch.nn.modules.linear.Linear": lambda: torch.nn.Linear(2, 2),
        "_rebuild_sparse_tensor": lambda: torch.eye(2).to_sparse(),
        "_rebuild_qtensor|QInt8Storage": lambda: torch.quantize_per_tensor(
            torch.ones(2), 0.1, 0, torch.qint8
        ),
        "negated or conjugated": _conjugated,
        "_rebuild_meta_tensor_no_storage": lambda: torch.ones(2, device="meta"),
        "torch.complex32": lambda: torch.ones(2).to(torch.complex32),
        "take more memory than the file has": lambda: torch.ones(1).expand(10_000),
        "builtins.frozenset": lambda: frozenset({1, 2}),
        "scalar": lambda: np.float64(1.0),
        "_reconstruct": lambda: np.ones(2),
    }.items(),
    # a function's repr has its address, which differs between processes
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_values_that_are_no_plain_arrays_are_refused_by_name(name: str, value: Any, tmp_path):
    with warnings.catch_warnings():
        # of quantised tensors and of complex32, which PyTorch itself discourages
        warnings.simplefilter("ignore")
        torch.save({"a": value()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeFileError, match=name):
        pt.read(tmp_path / "a.pt")


def test_files_without_checksums_are_refused(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(InputError, match="saved without checksums"):
        pt.read(tmp_path / "a.pt")


def test_every_flipped_bit_of_a_storage_is_detected(tmp_path):
    """Control of the comparison: PyTorch reads the flipped file, with a different value."""
    path, flipped = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    content = bytearray(path.read_bytes())
    at = content.index(torch.arange(4.0).numpy().tobytes())
    for bit in range(128):
        damaged = bytearray(content)
        damaged[at + bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(damaged)
        with pytest.raises(InputError, match="data/0' is damaged"):
            pt.read(flipped)
    assert differing(pt.read(path), loaded(flipped)) == [".a: other bits"]
