"""The model of ``benchmarks/convert.py``, and the programs that it measures."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_transformer.architectures import huggingface_config, huggingface_state, registry
from jax_transformer.storage import huggingface_folder
from jax_transformer.storage.tensors import LazyTensor, TensorInfo

UMT5 = {
    "model_type": "umt5",
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
TINY = {"d_model": 8, "d_kv": 2, "num_heads": 4, "d_ff": 16, "vocab_size": 32, "shard": "8KB"}
SHARD = "100MB"
_MEASURED = """
import json, sys, time
{imports}
def peak():
    return open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]
for text in sys.argv[1:]:
    arguments = json.loads(text)
    before, begin, processor = peak(), time.perf_counter(), time.process_time()
{body}
    seconds = time.perf_counter() - begin
    print(seconds, time.process_time() - processor, before, peak(), flush=True)
"""
"""Does something for every argument; its last line is seconds, processor time, and both peaks."""
COMMAND = _MEASURED.format(
    imports="from jax_transformer import cli", body="    assert cli.main(arguments) == 0"
)
TORCH = _MEASURED.format(
    imports="import torch, safetensors.numpy",
    body="""\
    state = torch.load(arguments[1], weights_only=True)
    state = {name: tensor.numpy() for name, tensor in state.items()}
    safetensors.numpy.save_file(state, arguments[2])
    del state""",
)
TRANSFORMERS = _MEASURED.format(
    imports="import torch, transformers",
    body="""\
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(arguments[1])
    model.save_pretrained(arguments[2])
    del model""",
)


def make(path: Path, gigabytes: float, *, shard: str = SHARD, **sizes: Any) -> int:
    """Write a folder of about that size, one tensor at a time; return its largest tensor's bytes.

    ``sizes`` change the width and the vocabulary; the number of layers follows from the size.
    """
    data = UMT5 | sizes
    d, inner = data["d_model"], data["d_kv"] * data["num_heads"]
    tables, attention, ffn = 2 * d * data["vocab_size"], 4 * d * inner, 3 * d * data["d_ff"]
    layers = max(1, round((gigabytes * 1e9 / 4 - tables) / (3 * attention + 2 * ffn)))
    data |= {"num_layers": layers, "num_decoder_layers": layers}
    config = huggingface_config.from_config(data)
    shapes = registry.model_weights(config).shapes["torch"]
    draw = np.random.default_rng(0)
    state = {
        name: LazyTensor(
            TensorInfo(shape, "float32"), partial(draw.standard_normal, shape, np.float32)
        )
        for name, shape in shapes.items()
    }
    state = huggingface_state.saved(state, config)
    files = {"config.json": json.dumps(data).encode()}
    huggingface_folder.write(path, state, files, shard_size=huggingface_folder.size(shard))
    total = sum(tensor.nbytes for tensor in state.values())
    if total > 1e7:  # not the tiny one, whose memory is subtracted
        print(f"{total / 1e9:.2f} GB in {len(state)} tensors of float32\n")
    return max(tensor.nbytes for tensor in state.values())
