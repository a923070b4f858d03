"""The share of each kind of operation in decoding, from XLA's own profile, and Python's share.

``python benchmarks/profile_decode.py --size big --batch 64 --beam 4`` prints a table in Markdown.
Times are of threads: what two cores do at the same time counts twice. See benchmarks/README.md.
"""

import argparse
import collections
import cProfile
import pstats
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import decode, decode_export, train_step

KINDS = {
    "matrix products": r"ynn|dot|matmul|gemm",
    "writes into the cache": r"dynamic-update-slice",
    "largest score (argmax, top-k)": r"topk|top_k|top-k|sort|iota",
    "softmax": r"exponential|divide|subtract",
    "copies and transposes": r"copy|transpose|pad|concatenate|broadcast",
    "gathers": r"gather|scatter|slice",
}
# Events that contain others, or only wait for them
OUTER = re.compile(
    r"ThunkExecutor|Execute|while|conditional|call|end: |Slinky|Pjit|Pjrt|Await|Wait|Handle|shard|"
    r"Parse|Create|Allocate|Threadpool|DevicePut|PythonRef|PjRt"
)


def kind_of(name: str) -> str:
    """The kind of an operation, by its name in the compiled program."""
    return next((kind for kind, form in KINDS.items() if re.search(form, name)), "elementwise")


def operations(run: Callable[[], Any]) -> Iterator[tuple[str, float]]:
    """The name and the seconds of each operation of XLA's thread pools while ``run`` runs."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if not OUTER.search(event.name):
                    yield event.name, event.duration_ns / 1e9


def table(run: Callable[[], Any], rounds: int) -> str:
    """The table of kinds, and the longest operations."""
    wall = min(train_step.seconds(run) for _ in range(rounds))
    by_kind: collections.Counter[str] = collections.Counter()
    by_name: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for name, taken in operations(run):
        by_kind[kind_of(name)] += taken
        by_name[name] += taken
        counts[name] += 1
    total = sum(by_kind.values())
    rows = [
        f"{1000 * wall:.1f} ms a batch without the profiler; {1000 * total:.1f} ms of operations "
        f"({counts.total():,}) with it\n",
        "| | ms | share |",
        "|---|---|---|",
    ]
    rows += [f"| {k} | {1000 * t:.2f} | {t / total:.0%} |" for k, t in by_kind.most_common()]
    rows += ["", "| longest operations | times | ms | share |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | {counts[name]} | {1000 * taken:.2f} | {taken / total:.0%} |"
        for name, taken in by_name.most_common(8)
    ]
    return "\n".join(rows) + "\n"


def python(run: Callable[[], Any], repeats: int) -> str:
    """The functions of Python that take longest in a call, waiting for the device included."""
    profile, begin = cProfile.Profile(), time.perf_counter()
    profile.enable()
    for _ in range(repeats):
        run()
    profile.disable()
    call = (time.perf_counter() - begin) / repeats
    functions: Any = vars(pstats.Stats(profile))["stats"]
    stats = sorted(functions.items(), key=lambda item: -item[1][2])
    rows = [
        f"{1000 * call:.2f} ms a call of Translator, under Python's profiler\n",
        "| Python | calls | ms | share |",
        "|---|---|---|---|",
    ]
    for (file, _, name), (_, calls, own, *_) in stats[:8]:
        where = f"{Path(file).stem}.{name}" if file != "~" else name
        milliseconds = 1000 * own / repeats
        rows.append(
            f"| `{where}` | {calls / repeats:.0f} | {milliseconds:.3f} "
            f"| {own / repeats / call:.0%} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size", choices=train_step.SIZES, default="small", help="random weights (default: small)"
    )
    parser.add_argument("--run", help="trained weights: a run folder")
    parser.add_argument("--batch", type=int, default=64, help="rows (default: 64)")
    parser.add_argument("--beam", type=int, default=1, help="beams; 1 is greedy (default: 1)")
    parser.add_argument("--length", type=int, nargs=2, default=decode.LENGTHS, metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    import numpy as np

    from jax_transformer import generate
    from jax_transformer.generate import GenerationConfig
    from jax_transformer.inference.translation import Translator

    source_length, length = args.length
    if args.run:
        model, source = decode_export.trained(args.run, None, args.batch)
        length = min(model.config.max_length, 2 * source.shape[1])
    else:
        shape = (args.batch, source_length)
        model, source = decode_export.random(
            train_step.SIZES[args.size], shape, max(128, *args.length)
        )
    split = generate.split(model)
    config = GenerationConfig(num_beams=args.beam, max_new_tokens=length)

    def run() -> np.ndarray:
        return generate.generate(split, source, config)[0]

    run()
    name = args.run or args.size
    search = f"beam {args.beam}" if args.beam > 1 else "greedy"
    print(f"**{name}, {search} × {args.batch}**\n\n{table(run, args.rounds)}")
    if args.run:
        translator = Translator.load(args.run, beam_size=args.beam)
        lines = ["<2de> Monday, May 5"] * args.batch
        translator(lines)
        print(python(lambda: translator(lines), 10 * args.rounds))


if __name__ == "__main__":
    main()
