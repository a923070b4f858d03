"""The share of each kind of operation in a training step, from XLA's own profile.

``python benchmarks/profile_step.py --size big`` prints tables in Markdown: kinds of operations, and
matrix products by shape; and page faults. Each operation counts with its shortest time of all
steps, which keeps out other work on the machine, but for operations of many milliseconds: if the
sum exceeds the processor's time, those are too long. With ``NPROC=1`` in the environment XLA has
one thread; otherwise what two cores do at the same time counts twice. See benchmarks/README.md.
"""

import argparse
import collections
import re
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import profile_decode, train_step
from jax_transformer.runtime import process

PRODUCTS = "matrix products"


def program(size: str, batch: int, length: int) -> tuple[Any, list[Any]]:
    """The compiled step, and its arguments."""
    ours = train_step.ours(size, batch, length)
    arguments = [ours.state, ours.batch, ours.key]
    return ours.make_step.one.lower(*arguments).compile(), arguments


def product(computation: Any, instruction: Any) -> str:
    """The shapes of a matrix product and the names of their axes: b, h, m, n, and the summed k."""
    sides = []
    for side, operand, other in zip(("lhs", "rhs"), instruction.operands, "mn", strict=True):
        shape = re.findall(r"\d+", computation[operand].result.partition("{")[0].partition("[")[2])
        names = [other] * len(shape)
        for kind, letters in (("batch", "bh"), ("contracting", "k")):
            listed = re.search(rf"{side}_{kind}_dims=\{{([\d,]+)\}}", instruction.attributes)
            axes = listed[1].split(",") if listed else []
            for axis, letter in zip(map(int, axes), letters, strict=False):
                names[axis] = letter
        sides.append(" ".join(f"{name}{size}" for name, size in zip(names, shape, strict=True)))
    return " by ".join(sides)


def kinds(text: str, vocabulary: int) -> dict[str, tuple[str, str]]:
    """The kind of each instruction of a compiled step, and of a matrix product its shapes."""
    from jax_transformer.extras.estimate import hlo

    computations, name = hlo.parse(text)
    entry = computations[name]
    result = {}
    for instruction in entry.values():
        inside = computations[instruction.called[0]] if instruction.called else entry
        inner = list(inside.values()) if instruction.called else [instruction]
        opcodes = {i.opcode for i in inner}
        shapes = ""
        if "dot" in opcodes:
            kind = PRODUCTS
            shapes = product(inside, next(i for i in inner if i.opcode == "dot"))
        elif "jvp" not in instruction.attributes:
            kind = "gradient's norm, clipping, AdamW"
        elif f",{vocabulary}]" in instruction.result or "scatter" in opcodes:
            kind = "loss and embedding's gradient"
        elif "xor" in opcodes:
            kind = "dropout, with what is joined to it"
        elif {"copy", "transpose"} & opcodes:
            kind = "copies and transposes"
        elif "bhqk" in instruction.attributes or instruction.result.count(",") > 3:
            kind = "softmax of attention"
        elif "reduce" in opcodes:
            kind = "sums (LayerNorm, biases)"
        else:
            kind = "elementwise (LayerNorm, residuals, ReLU)"
        result[instruction.name] = kind, shapes
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=train_step.SIZES, default="small")
    parser.add_argument("--batch", type=int, default=32, help="pairs (default: 32)")
    parser.add_argument("--length", type=int, default=32, help="tokens (default: 32)")
    parser.add_argument("--steps", type=int, default=20, help="steps (default: 20)")
    args = parser.parse_args()
    process.keep_freed_memory()
    import jax

    compiled, arguments = program(args.size, args.batch, args.length)

    def run() -> None:
        arguments[0], _ = compiled(*arguments)
        jax.block_until_ready(arguments[0])

    run()
    run()
    before = resource.getrusage(resource.RUSAGE_SELF)
    wall = min(train_step.seconds(run) for _ in range(args.steps))
    after = resource.getrusage(resource.RUSAGE_SELF)
    used, system = (
        1000 * (getattr(after, name) - getattr(before, name)) / args.steps
        for name in ("ru_utime", "ru_stime")
    )
    faults = (after.ru_minflt - before.ru_minflt) / args.steps
    kind_of = kinds(compiled.as_text(), train_step.SIZES[args.size]["vocab_size"])
    shortest: dict[str, float] = {}
    for _ in range(args.steps):
        taken: collections.Counter[str] = collections.Counter()
        for name, seconds in profile_decode.operations(run):
            if name in kind_of:
                taken[name] += seconds
        for name, seconds in taken.items():
            shortest[name] = min(seconds, shortest.get(name, seconds))
    total = sum(shortest.values())
    by_kind: collections.Counter[str] = collections.Counter()
    by_shape: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for name, seconds in shortest.items():
        for table, key in zip((by_kind, by_shape), kind_of[name], strict=True):
            table[key] += seconds
            counts[key] += 1
    print(
        f"**{args.size}**: {1000 * wall:.0f} ms for the shortest step without the profiler, "
        f"{used:.0f} ms of processor for the mean one and {system:.0f} ms of the system, "
        f"{faults:,.0f} page faults; {1000 * total:.0f} ms of operations with the profiler\n"
    )
    for title, table in (("", by_kind), ("products", by_shape)):
        print(f"| {title} | number | ms | share |\n|---|---|---|---|")
        for key, seconds in table.most_common(18):
            if key:
                print(f"| {key} | {counts[key]} | {1000 * seconds:.1f} | {seconds / total:.1%} |")
        print()


if __name__ == "__main__":
    main()
