"""Greedy decoding and beam search, timed against transformers and CTranslate2.

All have the same weights, in float32 on the CPU.

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
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import train_step
from benchmarks.train_step import cores, receive, start

OURS = "JAX"
CASES = {
    "greedy × 64": (1, 64),
    "beam 4 × 64": (4, 64),
    "greedy × 1": (1, 1),
    "beam 4 × 1": (4, 1),
}  # (beam, rows in a batch)
ROWS = 64  # lines
SOURCE, FORCED = 20, 32  # with random weights: tokens of a source and of an output
SINGLE = 4  # lines that are also decoded one by one
SAME_LOGITS = 1e-5
PAUSE = 0.5  # seconds between turns: the threads of the one before spin for a while
Batches = list[np.ndarray]


class Work(NamedTuple):
    """The inputs of every contender: a folder with the weights in each library's format, and the
    sources."""

    folder: str
    max_length: int
    pad: int
    eos: int


def batches(work: Work, case: str) -> Batches:
    """The sources of a case, (rows, s) each, with end token, padded after it."""
    sources = np.load(f"{work.folder}/sources.npy")
    rows = CASES[case][1]
    return [sources] if rows > 1 else [sources[i : i + 1] for i in range(SINGLE)]


def until_end(ids: Any, work: Work) -> list[int]:
    """An output up to its end token, without it."""
    return list(itertools.takewhile(lambda i: i not in (work.eos, work.pad), map(int, ids)))


class Jax:
    """jax_transformer.generate, as ``translate`` calls it."""

    def __init__(self, work: Work, settings: dict[str, Any]):
        from benchmarks import decode_export
        from jax_transformer import generate

        self.model, self.generate = decode_export.load(Path(work.folder)), generate
        self.max_length = work.max_length

    def decode(self, source: np.ndarray, beam: int) -> Any:
        if beam == 1:
            return np.asarray(self.generate.greedy(self.model, source, max_length=self.max_length))
        return np.asarray(
            self.generate.beam(
                self.model, source, beam_size=beam, length_penalty=0.0, max_length=self.max_length
            )[0]
        )


class Transformers:
    """transformers' generate, with its own key-value cache."""

    def __init__(self, work: Work, settings: dict[str, Any]):
        import torch

        from benchmarks import decode_export

        torch.set_num_threads(cores())
        torch.set_float32_matmul_precision(settings["precision"])
        self.module, self.torch, self.work = (
            decode_export.to_transformers(decode_export.load(Path(work.folder))),
            torch,
            work,
        )

    def decode(self, source: np.ndarray, beam: int) -> Any:
        ids = self.torch.from_numpy(source).long()
        search = dict(num_beams=beam, do_sample=False, max_new_tokens=self.work.max_length) | (
            dict(length_penalty=0.0) if beam > 1 else {}
        )
        with self.torch.inference_mode():
            return self.module.generate(
                input_ids=ids, attention_mask=(ids != self.work.pad).long(), **search
            )[:, 1:].numpy()


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
            f"{work.folder}/ctranslate2", device="cpu", compute_type="float32", **threads
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


def contenders() -> dict[str, tuple[type, dict[str, Any]]]:
    """Our decoder, and the others in every setting that may be their best."""
    settings_by_name: dict[str, tuple[type, dict[str, Any]]] = {OURS: (Jax, {})}
    settings_by_name |= {
        f"transformers, {precision}": (Transformers, {"precision": precision})
        for precision in ("highest", "medium")
    }
    for inter, packed in itertools.product(
        [n for n in range(1, cores() + 1) if cores() % n == 0], (False, True)
    ):
        name = f"CTranslate2 {inter} × {cores() // inter}{', packed' if packed else ''}"
        settings_by_name[name] = (CTranslate2, {"inter": inter, "packed": packed})
    return settings_by_name


def prepare(pipe: Any, folder: str, size: str, run: str | None, lines: list[str] | None) -> None:
    """Export the model and the sources, and check that all three libraries compute the same."""
    from benchmarks import decode_export

    try:
        model, sources = (
            decode_export.trained(run, lines, ROWS)
            if run
            else decode_export.random(train_step.SIZES[size], (ROWS, SOURCE))
        )
        decode_export.check(model.config)
        np.save(f"{folder}/sources.npy", sources)
        decode_export.save(model, Path(folder))
        decode_export.to_ctranslate2(model, Path(folder) / "ctranslate2")
        config = model.config
        # With trained weights sentences end before that
        max_length = min(config.max_length, 2 * sources.shape[1]) if run else FORCED
        work = Work(folder, max_length, config.target_pad_id, config.eos_id)
        pipe.send(
            {
                "work": work,
                "off": decode_export.differences(model, sources, Path(folder) / "ctranslate2"),
            }
        )
    except (Exception, SystemExit) as error:
        pipe.send({"failed": " ".join(str(error).split())[:300] or type(error).__name__})


def serve(pipe: Any, name: str, work: Work) -> None:
    """Run a contender: build, decode everything once, print the result, then time rounds on
    request."""
    try:
        kind, settings = contenders()[name]
        contender = kind(work, settings)
        outputs = {}
        for case, (beam, _) in CASES.items():
            outputs[case] = [
                until_end(row, work)
                for source in batches(work, case)
                for row in contender.decode(source, beam)
            ]
        pipe.send({"outputs": outputs})
        while pipe.recv():
            taken = {}
            for case, (beam, _) in CASES.items():
                sources = batches(work, case)
                contender.decode(sources[0][:1], beam)  # wakes threads and caches
                begin = time.perf_counter()
                for source in sources:
                    contender.decode(source, beam)
                taken[case] = (time.perf_counter() - begin) / len(sources)
            pipe.send(taken)
    except Exception as error:
        pipe.send({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})


def compare(
    name: str, folder: str, rounds: int, run: str | None = None, lines: list[str] | None = None
) -> dict[str, Any]:
    """Prepare, start the contenders one after another, and time them in turns."""
    prepared = receive(start(prepare, folder, name, run, lines))
    if "failed" in prepared:
        raise SystemExit(f"{name}: {prepared['failed']}")
    if not max(prepared["off"].values()) <= SAME_LOGITS:
        raise SystemExit(f"{name}: not the same computation: {prepared['off']}")
    pipes, results = {}, {}
    for contender in contenders():
        print(f"{name}: {contender} ...", file=sys.stderr)
        pipes[contender] = start(serve, contender, prepared["work"])
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
    return {"name": name, "off": prepared["off"], "contenders": results}


def table(compared: dict[str, Any]) -> str:
    """The figures of a model as markdown.

    Milliseconds per batch, ratios of the best medians, and the number of equal outputs.
    """
    results = compared["contenders"]
    off = ", ".join(
        f"{library} {difference:.0e}" for library, difference in compared["off"].items()
    )
    rows = [
        f"**{compared['name']}**; largest difference from ours over the largest figure: {off}\n"
    ]
    rows += [f"| ms per batch | {' | '.join(CASES)} |", "|---" * (len(CASES) + 1) + "|"]
    times = {
        name: {case: [turn[case] for turn in result["rounds"]] for case in CASES}
        for name, result in results.items()
    }
    for name in results:
        rows.append(
            f"| {name} | "
            + " | ".join(f"{1000 * statistics.median(times[name][case]):.0f}" for case in CASES)
            + " |"
        )
    for library in ("transformers", "CTranslate2"):
        speeds, shares = [], []
        for case in CASES:
            theirs = [name for name in results if name.startswith(library)]
            best = min(theirs, key=lambda name: statistics.median(times[name][case]))
            speeds.append(
                statistics.median(
                    b / t for b, t in zip(times[best][case], times[OURS][case], strict=True)
                )
            )
            pairs = zip(results[best]["outputs"][case], results[OURS]["outputs"][case], strict=True)
            shares.append(statistics.mean(a == b for a, b in pairs))
        rows.append(
            f"| **speed of ours, the best {library} = 1** | "
            + " | ".join(f"**{speed:.2f}**" for speed in speeds)
            + " |"
        )
        rows.append(
            f"| outputs equal to that one's | {' | '.join(f'{share:.1%}' for share in shares)} |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
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
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--json", help="also write every round and output to this file")
    args = parser.parse_args()
    missing = [
        name
        for name in ("torch", "transformers", "ctranslate2")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise SystemExit(
            f"benchmarks/decode.py needs {', '.join(missing)}: pip install 'jax-seq2seq[bench]'"
        )
    os.environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    load, compared = os.getloadavg()[0], []
    lines = Path(args.source).read_text(encoding="utf-8").split("\n") if args.source else None
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or f"{folder}/run"
        if args.run is None:
            train = [
                sys.executable,
                str(Path(__file__).parent.parent / "train.py"),
                "--run",
                run,
                "--steps",
                str(args.steps),
            ]
            subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
        for name in (*(("big", "small") if args.size == "both" else (args.size,)), "trained"):
            os.mkdir(f"{folder}/{name}")
            inputs = (run, lines) if name == "trained" else ()
            compared.append(compare(name, f"{folder}/{name}", args.rounds, *inputs))
            print(table(compared[-1]), flush=True)
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("transformers", "ctranslate2")
    )
    print(f"{train_step.machine('cpu')}, {versions}; load average before: {load:.1f}")
    if args.json:
        Path(args.json).write_text(json.dumps(compared, indent=1))


if __name__ == "__main__":
    main()
