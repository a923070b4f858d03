"""The table of what models need on accelerators that are not there, in docs/accelerators.md.

Every row is one call of ``jax-transformer estimate``; see benchmarks/README.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NLLB: dict[str, Any] = dict(
    model_type="m2m_100",
    vocab_size=256206,
    max_position_embeddings=1024,
    activation_function="relu",
    scale_embedding=True,
    encoder_attention_heads=16,
    decoder_attention_heads=16,
)
T5: dict[str, Any] = dict(model_type="t5", vocab_size=32128, d_model=1024, d_kv=128, num_layers=24)


def nllb(d_model: int, d_ff: int, layers: int) -> dict[str, Any]:
    """The published config.json of an NLLB model, as far as it decides sizes."""
    stacks = ("encoder", "decoder")
    sizes = {f"{stack}_layers": layers for stack in stacks}
    return NLLB | sizes | {f"{stack}_ffn_dim": d_ff for stack in stacks} | {"d_model": d_model}


FOLDERS = {
    "nllb-600M": nllb(1024, 4096, 12),
    "nllb-3.3B": nllb(2048, 8192, 24),
    "t5-3b": T5 | {"d_ff": 16384, "num_heads": 32},
    "t5-11b": T5 | {"d_ff": 65536, "num_heads": 128},
}
BASE = "--model.preset vaswani2017_base --data.vocab-size 32000"
MODELS = {
    "base": BASE,
    "big": f"{BASE} --model.d-model 1024 --model.num-heads 16 --model.d-ff 4096",
    **{name: f"--init {name}" for name in FOLDERS},
}
LESS_MEMORY = "--model.remat full --model.scan-layers --loss-chunks 8"
ROWS = [
    # model, topology, rows and length of a batch, options
    ("base", "h200:1", 256, 64, ""),
    ("base", "v5e:2x2", 256, 64, ""),
    ("big", "h200:1", 256, 64, LESS_MEMORY),
    ("nllb-600M", "h200:1", 64, 128, LESS_MEMORY),
    ("nllb-600M", "v5e:2x2", 128, 128, f"--mesh.fsdp 4 {LESS_MEMORY}"),
    ("nllb-3.3B", "h200:1", 64, 128, LESS_MEMORY),
    ("nllb-3.3B", "h200:1", 64, 128, "--model.scan-layers"),
    ("nllb-3.3B", "h200:1", 64, 128, ""),
    ("nllb-3.3B", "v5e:4x4", 128, 128, f"--mesh.fsdp 16 {LESS_MEMORY}"),
    ("nllb-3.3B", "v5e:4x4", 128, 128, LESS_MEMORY),
    ("nllb-3.3B", "v5e:4x4", 128, 128, "--mesh.fsdp 16 --model.scan-layers"),
    ("t5-3b", "h200:1", 64, 128, LESS_MEMORY),
    ("t5-11b", "h200:1", 64, 128, LESS_MEMORY),
    ("t5-11b", "v5e:4x8", 128, 128, f"--mesh.fsdp 32 {LESS_MEMORY}"),
]
HEAD = """\
| model | devices | batch | options | GiB a device | fits | TFLOP a device | ms, roofline |
|---|---|---|---|---|---|---|---|"""


def write_configs(folder: Path) -> None:
    """Make a folder with a config.json for each model that is no preset."""
    for name, config in FOLDERS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def compiled(row: tuple[str, str, int, int, str], folder: Path) -> dict[str, Any]:
    """The estimate of a row, as the command prints it."""
    model, topology, rows, length, options = row
    words = f"{MODELS[model]} {options} --topology {topology} --length {length}".split()
    words += ["--data.tokens-per-batch", str(rows * length), "--model.precision", "bfloat16"]
    command = [sys.executable, "-m", "jax_transformer", "estimate", "--json", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def line(row: tuple[str, str, int, int, str], estimate: dict[str, Any]) -> str:
    """A row of the table."""
    model, topology, rows, length, options = row
    memory, times = estimate["memory_bytes"], estimate["seconds"]
    at_least = "at least " if memory["refused"] else ""
    size = f"{at_least}{memory['peak'] / 2**30:.1f} of {memory['available'] / 2**30:.1f}"
    work = (estimate["flops"] + estimate["recomputed_flops"]) / estimate["devices"] / 1e12
    time = f"{1e3 * times['least']:.0f} – {1e3 * times['most']:.0f}" if times else ""
    name = f"{model}, {estimate['parameters'] / 1e6:,.0f} M"
    short = options.replace(LESS_MEMORY, "remat, scan, chunks").replace(" remat", ", remat")
    cells = [name, topology, f"{rows} x {length}", short.replace("--", "") or "none"]
    return f"| {' | '.join([*cells, size, 'yes' if estimate['fits'] else 'no'])} | " + (
        f"{work:.3g} | {time} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows with this text, as h200 or nllb")
    parser.add_argument("--results", default="estimates", help="folder of finished rows")
    parser.add_argument("--configs", help="only write the models' config.json to this folder")
    args = parser.parse_args()
    if args.configs:
        return write_configs(Path(args.configs))
    results = Path(args.results)
    results.mkdir(parents=True, exist_ok=True)
    print(HEAD)
    with tempfile.TemporaryDirectory() as folder:
        write_configs(Path(folder))
        for row in ROWS:
            label = "_".join(map(str, row))
            if args.only not in label:
                continue
            file = results / f"{label.replace(' ', '').replace(':', '-')}.json"
            if not file.exists():
                file.write_text(json.dumps(compiled(row, Path(folder))))
            print(line(row, json.loads(file.read_text())), flush=True)


if __name__ == "__main__":
    main()
