"""Time and memory of conversions: ``python benchmarks/convert.py --gigabytes 0.25``.

Makes a Hugging Face folder of T5 with random weights in shards, converts it in every direction, and
prints for each the seconds (start-up included), the seconds of the conversion only, its multiple of
``cp``, and the peak memory of the process. ``--by-hand`` adds what a user would write: torch.load
with safetensors' save_file, and transformers' from_pretrained with save_pretrained. ``--t5x``
converts a UMT5 to checkpoints of T5X and back instead, with the layers apart and in one array.
"""

import argparse
import filecmp
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jax_transformer import state_dict  # noqa: E402
from jax_transformer.architectures import huggingface_config, huggingface_state  # noqa: E402
from jax_transformer.storage import huggingface  # noqa: E402
from jax_transformer.storage.lazy import LazyTensor  # noqa: E402
from jax_transformer.storage.tensors import TensorInfo  # noqa: E402

T5 = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 64,
    "num_heads": 16,
    "d_ff": 2816,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
SHARD = "500MB"
# Runs one command in a process and prints its seconds without start-up and its peak memory
COMMAND = """
import sys, time
import jax
from orbax.checkpoint import v1
from jax_transformer import cli
from jax_transformer.convert import conversion
begin = time.perf_counter()
code = cli.main(sys.argv[1:])
seconds = time.perf_counter() - begin
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
print(code, seconds, peak)
"""
TORCH = """
import sys, time
import torch, safetensors.torch
begin = time.perf_counter()
state = torch.load(sys.argv[1], weights_only=True)
state = {name: tensor.contiguous().clone() for name, tensor in state.items()}
safetensors.torch.save_file(state, sys.argv[2])
seconds = time.perf_counter() - begin
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
print(0, seconds, peak)
"""
TRANSFORMERS = """
import sys, time
import torch, transformers
begin = time.perf_counter()
transformers.T5ForConditionalGeneration.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])
seconds = time.perf_counter() - begin
peak = open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
print(0, seconds, peak)
"""


def make_folder(path: Path, gigabytes: float, model_type: str) -> int:
    """Write a folder of about that size, one tensor at a time; return its bytes."""
    layer_bytes = 4 * (4 * 1024**2 + 3 * 1024 * 2816)
    most = gigabytes * 1e9 - 2 * 4 * 1024 * 32128
    layers = max(1, round(most / (layer_bytes * 2 + 4 * 4 * 1024**2)))
    data = T5 | {"model_type": model_type, "num_layers": layers, "num_decoder_layers": layers}
    config = huggingface_config.from_config(data, names=["lm_head.weight"])
    shapes = state_dict.model_weights(config).shapes["torch"]
    draw = np.random.default_rng(0)
    state = {
        name: LazyTensor(
            TensorInfo(shape, "float32"), partial(draw.standard_normal, shape, np.float32)
        )
        for name, shape in shapes.items()
    }
    state = huggingface_state.saved(state, config)
    files = {"config.json": json.dumps(data).encode()}
    huggingface.write(path, state, files, shard_size=huggingface.size(SHARD))
    largest = max(tensor.nbytes for tensor in state.values())
    total = sum(tensor.nbytes for tensor in state.values())
    print(f"{total / 1e9:.2f} GB in {len(state)} tensors, the largest {largest / 1e6:.0f} MB")
    return total


def measured(code: str, *arguments: Any) -> tuple[float, float, float]:
    """Seconds with and without start-up, and MiB at the peak, of a process of its own."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    total = time.perf_counter() - begin
    if done.returncode or done.stdout.split()[-3] != "0":
        raise SystemExit(f"{arguments}: {done.stdout[-500:]}{done.stderr[-1000:]}")
    seconds, peak = done.stdout.split()[-2:]
    return total, float(seconds), int(peak) / 1024


def conversions(folder: Path, by_hand: bool) -> Iterator[tuple[str, str, list[Any]]]:
    """The name of each measurement, its program and its arguments, in an order that works.

    What came back is compared and removed. Raises SystemExit if it is not equal byte for byte.
    """
    hf, run, back = folder / "hf", folder / "run", folder / "back"
    first, again = folder / "first.safetensors", folder / "again.safetensors"
    pt, pt_again = folder / "first.pt", folder / "again.pt"
    to_hf = ["--to", "hf", "--shard-size", SHARD]
    yield "Hugging Face folder -> run", COMMAND, ["convert", hf, run]
    yield "run -> Hugging Face folder", COMMAND, ["convert", run, back, *to_hf]
    for path in hf.glob("*.safetensors*"):
        check_equal(path, back / path.name)
    shutil.rmtree(back)
    yield "run -> .safetensors", COMMAND, ["convert", run, first]
    shutil.rmtree(run)
    yield ".safetensors -> .pt", COMMAND, ["convert", first, pt]
    yield ".pt -> .safetensors", COMMAND, ["convert", pt, again]
    check_equal(first, again)
    again.unlink()
    first.unlink()
    if by_hand:
        yield "torch.load, save_file", TORCH, [pt, folder / "hand.safetensors"]
        yield "from_pretrained, save_pretrained", TRANSFORMERS, [hf, folder / "hand"]
    yield ".pt -> run", COMMAND, ["convert", pt, run, "--config", hf / "config.json"]
    yield "run -> .pt", COMMAND, ["convert", run, pt_again]
    config = ["--config", hf / "config.json"]
    yield ".pt -> Hugging Face folder", COMMAND, ["convert", pt_again, back, *to_hf, *config]
    for path in hf.glob("*.safetensors*"):
        check_equal(path, back / path.name)


def with_t5x(folder: Path) -> Iterator[tuple[str, str, list[Any]]]:
    """The measurements with T5X, as :func:`conversions`."""
    hf, t5x, back = folder / "hf", folder / "checkpoint_0", folder / "back"
    to_hf = ["--to", "hf", "--shard-size", SHARD]
    for title, options in (("layers apart", []), ("layers in one array", ["--scan-layers"])):
        command = ["convert", hf, t5x, "--to", "t5x", *options]
        yield f"Hugging Face folder -> T5X, {title}", COMMAND, command
        yield f"T5X, {title} -> Hugging Face folder", COMMAND, ["convert", t5x, back, *to_hf]
        for path in hf.glob("*.safetensors*"):
            check_equal(path, back / path.name)
        shutil.rmtree(t5x)
        shutil.rmtree(back)


def check_equal(one: Path, other: Path) -> None:
    if not filecmp.cmp(one, other, shallow=False):
        raise SystemExit(f"{one} and {other} differ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=0.25, help="size of the model")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/convert-benchmark"))
    parser.add_argument("--by-hand", action="store_true", help="also torch and transformers")
    parser.add_argument("--t5x", action="store_true", help="checkpoints of T5X instead")
    parser.add_argument("--check", action="store_true", help="with the check, without --no-check")
    options = parser.parse_args()
    options.folder.mkdir()
    try:
        make_folder(options.folder / "hf", options.gigabytes, "umt5" if options.t5x else "t5")
        begin = time.perf_counter()
        subprocess.run(["cp", "-r", options.folder / "hf", options.folder / "copy"], check=True)
        copied = time.perf_counter() - begin
        shutil.rmtree(options.folder / "copy")
        print(f"cp {copied:.2f} s")
        print("| conversion | seconds | without start-up | times cp | peak MiB |")
        print("|---|---|---|---|---|")
        pairs = (
            with_t5x(options.folder)
            if options.t5x
            else conversions(options.folder, options.by_hand)
        )
        for name, code, arguments in pairs:
            no_check = ["--no-check"] if code is COMMAND and not options.check else []
            total, seconds, peak = measured(code, *arguments, *no_check)
            times = seconds / copied
            print(f"| {name} | {total:.1f} | {seconds:.1f} | {times:.1f} | {peak:,.0f} |")
            sys.stdout.flush()
        print("everything came back byte for byte")
        return 0
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    raise SystemExit(main())
