"""Temporary memory and compile time of a training step by option, in docs/accelerators.md.

The step is compiled and does not run; see benchmarks/README.md.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax_transformer.config import Remat
from jax_transformer.extras.estimate import topologies
from jax_transformer.training.options import ModelOptions, Precision, TrainOptions

SMALL = dict(d_model=256, num_heads=4, d_ff=1024)
BIG = dict(d_model=1024, num_heads=16, d_ff=4096)
MODELS: dict[str, dict[str, int]] = {"small": SMALL, "base": {}, "big": BIG}
"""Sizes of ``vaswani2017_base``, 6+6 layers."""
VOCABULARY = {"small": 8000, "base": 32000, "big": 32000}
ROWS: list[tuple[str, bool, int]] = [
    # model.remat, model.scan_layers, loss_chunks
    ("none", False, 1),
    ("none", False, 8),
    *((remat, False, 1) for remat in Remat if remat is not Remat.NONE),
    ("none", True, 1),
    *((remat, True, 1) for remat in Remat if remat is not Remat.NONE),
    *((remat, True, 8) for remat in Remat if remat is not Remat.NONE),
]


def options_of(args: argparse.Namespace, remat: str, scan: bool, chunks: int) -> TrainOptions:
    """The options of ``train`` for a row of the table, with dropout 0.1 at every site."""
    rates = ("dropout", "attention_dropout", "activation_dropout", "embedding_dropout")
    model = ModelOptions(
        preset="vaswani2017_base",
        precision=Precision(args.precision),
        remat=Remat(remat),
        scan_layers=scan,
        **dict.fromkeys(rates, 0.1),
        **MODELS[args.model],
    )
    options = TrainOptions(model=model, loss_chunks=chunks)
    data = dataclasses.replace(
        options.data,
        vocab_size=VOCABULARY[args.model],
        tokens_per_batch=args.batch * args.length,
    )
    return dataclasses.replace(options, data=data)


def measured(args: argparse.Namespace, options: TrainOptions) -> tuple[Any, float]:
    """The estimate, and the CPU seconds of tracing and compiling."""
    from jax_transformer.extras.estimate import estimate

    began = time.process_time()
    topology = topologies.Topology.parse(args.topology)
    result = estimate.estimate(options, topology, length=args.length)
    return result, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default="cpu:1", help="as v5e:1x1 or h200:1, if installed")
    parser.add_argument("--model", default="small", choices=MODELS)
    parser.add_argument("--precision", default="float32", choices=list(Precision))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--only", default="", help="rows with this text, as scan")
    args = parser.parse_args()
    topologies.prepare(topologies.Topology.parse(args.topology))
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    print("| options | temporary MiB | traffic, GB | arithmetic | compile, CPU s |")
    print("|---|---|---|---|---|")
    for remat, scan, chunks in ROWS:
        flags = {
            "--model.scan-layers": scan,
            f"--model.remat {remat}": remat != "none",
            f"--loss-chunks {chunks}": chunks > 1,
        }
        name = " ".join(flag for flag, is_set in flags.items() if is_set)
        if args.only not in name:
            continue
        result, seconds = measured(args, options_of(args, remat, scan, chunks))
        size = (result.memory.refused or result.memory.temporaries) / 2**20
        moved = f"{result.traffic.bytes / 1e9:.1f}" if result.traffic else "–"
        more = result.recomputed / result.flops
        print(
            f"| {f'`{name}`' if name else 'none'} | {size:,.0f} | {moved} | +{more:.0%} "
            f"| {seconds:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
