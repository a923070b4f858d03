"""Greedy decoding and beam search, timed against transformers and CTranslate2.

All have the same weights, in float32 or bfloat16, on the CPU or a GPU.

Every contender has a process of its own and waits for its turn on a pipe, as in
benchmarks/train_step.py; this process imports none of the libraries. See benchmarks/README.md and
docs/speed.md.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import train_step
from benchmarks.train_step import cores, receive, start

OURS = "JAX"
AGAIN = "JAX again"
IN_FLOAT32, IN_MEDIUM, INT8 = "float32: JAX", "medium: JAX", "int8: CTranslate2"
BEAM = 4
LENGTHS = (20, 32)  # with random weights: tokens of a source and of an output
SINGLE = 4  # lines that are also decoded one by one
SAME_LOGITS = 1e-5
MEMORY = "memory"
PAUSE = 0.5  # seconds between turns: the threads of the one before spin for a while
Batches = list[np.ndarray]


class Work(NamedTuple):
    """The inputs of every contender: a folder with the weights in each library's format, and the
    sources."""

    folder: str
    max_length: int
    pad: int
    eos: int
    rows: tuple[int, ...]
    """Rows of the batches."""
    beam: int = BEAM
    device: str = "cpu"
    """cpu or cuda, where all contenders compute."""

    @property
    def cases(self) -> dict[str, tuple[int, int]]:
        """The beam and the rows of each case."""
        searches = {"greedy": 1, f"beam {self.beam}": self.beam}
        return {
            f"{name} × {rows}": (beam, rows)
            for rows in self.rows
            for name, beam in searches.items()
        }


def batches(work: Work, case: str) -> Batches:
    """The sources of a case, (rows, s) each, with end token, padded after it."""
    sources = np.load(f"{work.folder}/sources.npy")
    rows = work.cases[case][1]
    return [sources[i : i + rows] for i in range(SINGLE if rows == 1 else 1)]


def until_end(ids: Any, work: Work) -> list[int]:
    """An output up to its end token, without it."""
    return list(itertools.takewhile(lambda i: i not in (work.eos, work.pad), map(int, ids)))


class Jax:
    """``jax_transformer.generate.generate``, as ``translate`` calls it."""

    def __init__(self, work: Work, settings: dict[str, Any]):
        from benchmarks import decode_export
        from jax_transformer import generate

        self.model = generate.split(decode_export.load(Path(work.folder), **settings))
        self.generate = generate
        self.max_length = work.max_length

    def decode(self, source: np.ndarray, beam: int) -> Any:
        config = self.generate.GenerationConfig(
            num_beams=beam, length_penalty=0.0, max_new_tokens=self.max_length
        )
        return self.generate.generate(self.model, source, config)[0][:, 0]


class Transformers:
    """transformers' generate, with its own key-value cache."""

    def __init__(self, work: Work, settings: dict[str, Any]):
        import torch

        from benchmarks import decode_export

        torch.set_num_threads(cores())
        torch.set_float32_matmul_precision(settings["precision"])
        model = decode_export.load(Path(work.folder))
        self.module = decode_export.to_transformers(model).to(work.device)
        self.torch, self.work = torch, work

    def decode(self, source: np.ndarray, beam: int) -> Any:
        ids = self.torch.from_numpy(source).long().to(self.work.device)
        search = dict(num_beams=beam, do_sample=False, max_new_tokens=self.work.max_length) | (
            dict(length_penalty=0.0) if beam > 1 else {}
        )
        with self.torch.inference_mode():
            return self.module.generate(
                input_ids=ids, attention_mask=(ids != self.work.pad).long(), **search
            )[:, 1:].numpy(force=True)


class CTranslate2:
    """CTranslate2's Translator; a batch is split among the workers."""

    def __init__(self, work: Work, settings: dict[str, Any]):
        if settings["packed"]:
            os.environ["CT2_USE_EXPERIMENTAL_PACKED_GEMM"] = "1"  # read when the library is loaded
        import ctranslate2

        threads = {
            "inter_threads": settings["inter"],
            "intra_threads": cores() // settings["inter"],
        }
        self.translator = ctranslate2.Translator(
            f"{work.folder}/ctranslate2",
            device=work.device,
            compute_type=settings["compute_type"],
            **threads,
        )
        self.workers, self.work = settings["inter"], work

    def decode(self, source: np.ndarray, beam: int) -> Any:
        words = [[str(i) for i in row if i != self.work.pad] for row in source]
        limits = dict(
            max_decoding_length=self.work.max_length,
            max_batch_size=-(-len(words) // self.workers),
            batch_type="examples",
        )
        results = self.translator.translate_batch(
            words, beam_size=beam, length_penalty=0.0, **limits
        )
        return [[int(word) for word in result.hypotheses[0]] for result in results]


def contenders(
    against_self: bool, device: str, precision: str
) -> dict[str, tuple[type, dict[str, Any]]]:
    """Our decoder, and itself once more, or the others in every setting that may be their best."""
    ours: dict[str, Any] = {}
    if precision != "float32":
        ours = {"compute_dtype": precision, "matmul_precision": "medium"}
    contenders: dict[str, tuple[type, dict[str, Any]]] = {OURS: (Jax, ours)}
    if against_self:
        return contenders | {AGAIN: (Jax, ours)}
    contenders[IN_MEDIUM] = Jax, {"matmul_precision": "medium"}
    # Its packages compute no bfloat16 on a CPU
    prefixes = {"CTranslate2": "float32" if device == "cpu" else precision}
    if precision == "float32":
        contenders |= {
            f"transformers, {each}": (Transformers, {"precision": each})
            for each in ("highest", "medium")
        }
    else:
        contenders[IN_FLOAT32] = Jax, {}
        prefixes[INT8] = "int8"
    workers = [n for n in range(1, cores() + 1) if cores() % n == 0] if device == "cpu" else [1]
    for (prefix, compute_type), inter, packed in itertools.product(
        prefixes.items(), workers, (False, True) if device == "cpu" else (False,)
    ):
        name = f"{prefix} {inter} × {cores() // inter}{', packed' if packed else ''}"
        settings = {"inter": inter, "packed": packed, "compute_type": compute_type}
        contenders[name] = CTranslate2, settings
    return contenders


class Inputs(NamedTuple):
    """The model and the lines of a comparison."""

    size: str
    """A size with random weights, or ``trained``."""
    rows: tuple[int, ...]
    lengths: tuple[int, int] = LENGTHS
    run: str | None = None
    lines: list[str] | None = None
    beam: int = BEAM
    device: str = "cpu"
    precision: str = "float32"


def prepare(pipe: Any, folder: str, inputs: Inputs, against_self: bool) -> None:
    """Export the model and the sources, and check that all three libraries compute the same."""
    import jax

    from benchmarks import decode_export

    jax.config.update("jax_default_matmul_precision", "highest")  # only to compare the libraries
    try:
        rows, (width, forced) = max(*inputs.rows, SINGLE), inputs.lengths
        model, sources = (
            decode_export.trained(inputs.run, inputs.lines, rows)
            if inputs.run
            else decode_export.random(
                train_step.SIZES[inputs.size], (rows, width), max(128, *inputs.lengths)
            )
        )
        decode_export.check(model.config)
        np.save(f"{folder}/sources.npy", sources)
        decode_export.save(model, Path(folder))
        config = model.config
        # With trained weights sentences end before that
        length = min(config.max_length, 2 * sources.shape[1]) if inputs.run else forced
        ids = (config.target_pad_id, config.eos_id)
        work = Work(folder, length, *ids, inputs.rows, inputs.beam, inputs.device)
        off = {}
        if not against_self:
            decode_export.to_ctranslate2(model, Path(folder) / "ctranslate2")
            off = decode_export.differences(model, sources, Path(folder) / "ctranslate2")
        pipe.send({"work": work, "off": off})
    except (Exception, SystemExit) as error:
        pipe.send({"failed": " ".join(str(error).split())[:300] or type(error).__name__})


def serve(pipe: Any, contender: tuple[type, dict[str, Any]], work: Work) -> None:
    """Run a contender: build, decode everything once, print the result, then time rounds on
    request."""
    try:
        kind, settings = contender
        decoder = kind(work, settings)
        outputs = {}
        for case, (beam, _) in work.cases.items():
            outputs[case] = [
                until_end(row, work)
                for source in batches(work, case)
                for row in decoder.decode(source, beam)
            ]
        pipe.send({"outputs": outputs})
        while pipe.recv():
            taken = {}
            for case, (beam, _) in work.cases.items():
                sources = batches(work, case)
                decoder.decode(sources[0][:1], beam)  # wakes threads and caches
                begin = time.perf_counter()
                for source in sources:
                    decoder.decode(source, beam)
                taken[case] = (time.perf_counter() - begin) / len(sources)
            pipe.send(taken | {MEMORY: train_step.resident()})
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def compare(folder: str, inputs: Inputs, rounds: int, against_self: bool) -> dict[str, Any]:
    """Prepare, start the contenders one after another, and time them in turns."""
    name = inputs.size
    prepared = receive(start(prepare, folder, inputs, against_self))
    if "failed" in prepared:
        raise SystemExit(f"{name}: {prepared['failed']}")
    if not max(prepared["off"].values(), default=0) <= SAME_LOGITS:
        raise SystemExit(f"{name}: not the same computation: {prepared['off']}")
    pipes, results = {}, {}
    for contender, settings in contenders(against_self, inputs.device, inputs.precision).items():
        print(f"{name}: {contender} ...", file=sys.stderr)
        pipes[contender] = start(serve, settings, prepared["work"])
        results[contender] = receive(pipes[contender])
        if "failed" in results[contender]:
            raise SystemExit(f"{contender}: {results[contender]['failed']}")
        results[contender]["rounds"] = []
    for _ in range(rounds):
        for contender, pipe in pipes.items():
            time.sleep(PAUSE)
            pipe.send(True)
            received = receive(pipe)
            if "failed" in received:
                raise SystemExit(f"{contender}: {received['failed']}")
            results[contender]["rounds"].append(received)
    for pipe in pipes.values():
        pipe.send(False)
    if not inputs.run:
        name += f", {inputs.lengths[0]} + {inputs.lengths[1]} tokens"
    cases = list(prepared["work"].cases)
    return {"name": name, "off": prepared["off"], "cases": cases, "contenders": results}


def table(compared: dict[str, Any]) -> str:
    """The figures of a model as markdown.

    Milliseconds per batch (median, and quartiles), ratios of the best medians, and the number of
    equal outputs.
    """
    results, cases = compared["contenders"], compared["cases"]
    off = ", ".join(
        f"{library} {difference:.0e}" for library, difference in compared["off"].items()
    )
    agreement = f"\n\nlargest difference from ours over the largest figure: {off}" if off else ""
    rows = [f"**{compared['name']}**{agreement}\n"]
    rows += [
        f"| ms per batch | {' | '.join(cases)} | memory, GB |",
        "|---" * (len(cases) + 2) + "|",
    ]
    times = {
        name: {case: [turn[case] for turn in result["rounds"]] for case in cases}
        for name, result in results.items()
    }
    for name, result in results.items():
        cells = [spread([1000 * seconds for seconds in times[name][case]]) for case in cases]
        memory = max(turn[MEMORY] for turn in result["rounds"])
        rows.append(f"| {name} | {' | '.join(cells)} | {memory:.2f} |")
    for library in (AGAIN, "transformers", "CTranslate2", INT8, IN_MEDIUM, IN_FLOAT32):
        theirs = [name for name in results if name.startswith(library)]
        if not theirs:
            continue
        speeds, shares = [], []
        for case in cases:
            best = min(theirs, key=lambda name: statistics.median(times[name][case]))
            ratios = [b / t for b, t in zip(times[best][case], times[OURS][case], strict=True)]
            speeds.append(spread(ratios, "**{}**"))
            pairs = zip(results[best]["outputs"][case], results[OURS]["outputs"][case], strict=True)
            shares.append(statistics.mean(a == b for a, b in pairs))
        title = library if len(theirs) == 1 else f"the best {library}"
        rows.append(f"| **speed of ours, {title} = 1** | {' | '.join(speeds)} | |")
        share = " | ".join(f"{share:.1%}" for share in shares)
        rows.append(f"| outputs equal to that one's | {share} | |")
    return "\n".join(rows) + "\n"


def spread(figures: list[float], form: str = "{}") -> str:
    """The median of some figures, and their quartiles."""
    if len(figures) < 2:
        return form.format(digits(figures[0]))
    low, median, high = map(digits, statistics.quantiles(figures, n=4, method="inclusive"))
    return f"{form.format(median)} ({low}–{high})"


def digits(figure: float) -> str:
    """A figure with three digits."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size",
        choices=[*train_step.SIZES, "both"],
        default="both",
        help="random weights; tiny tries the command out",
    )
    parser.add_argument(
        "--run",
        help="trained weights: a run folder; without it, the built-in task is trained for --steps",
    )
    parser.add_argument("--steps", type=int, default=600, help="steps of that training")
    parser.add_argument(
        "--source", help="a file of lines for the run to translate; without it, the built-in task's"
    )
    parser.add_argument("--beam", type=int, default=BEAM, help="beams of the search")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where all of them compute"
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="bfloat16: beside CTranslate2 in float32 (on a GPU bfloat16) and int8",
    )
    parser.add_argument(
        "--random", action="store_true", help="only random weights: no training of --steps"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 1], help="rows of the batches")
    parser.add_argument(
        "--length",
        type=int,
        nargs="+",
        help="with random weights: tokens of sources and outputs (default: 20 and 32)",
    )
    parser.add_argument(
        "--against-self",
        action="store_true",
        help="time ours twice and nothing else: the ratios are the noise of the machine",
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--json", help="also write every round and output to this file")
    return parser.parse_args()


def check_libraries() -> None:
    """Exit if a library to compare with is not installed."""
    names = ("torch", "transformers", "ctranslate2")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"benchmarks/decode.py needs {', '.join(missing)}: pip install 'jax-seq2seq[bench]'"
        )


def trained(folder: str, steps: int) -> str:
    """A run of the built-in task."""
    run, train = f"{folder}/run", str(Path(__file__).parent.parent / "train.py")
    command = [sys.executable, train, "--run", run, "--steps", str(steps)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run


def cases(args: argparse.Namespace, folder: str) -> list[Inputs]:
    """Random weights by size and length, and a trained run."""
    rows = tuple(args.batch)
    where = dict(beam=args.beam, device=args.device, precision=args.precision)
    lengths = [(n, n) for n in args.length] if args.length else [LENGTHS]
    sizes = ("big", "small") if args.size == "both" else (args.size,)
    random = [Inputs(size, rows, each, **where) for size in sizes for each in lengths]
    if args.random:
        return random
    run = args.run or trained(folder, args.steps)
    lines = Path(args.source).read_text(encoding="utf-8").split("\n") if args.source else None
    return [*random, Inputs("trained", rows, run=run, lines=lines, **where)]


def main() -> None:
    args = parse()
    if not args.against_self:
        check_libraries()
    if args.device == "cpu":
        os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    load, compared = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder:
        for number, inputs in enumerate(cases(args, folder)):
            os.mkdir(f"{folder}/{number}")
            compared.append(compare(f"{folder}/{number}", inputs, args.rounds, args.against_self))
            print(table(compared[-1]), flush=True)
    print(f"load average before: {load:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(compared, indent=1))


if __name__ == "__main__":
    main()
