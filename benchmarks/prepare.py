"""Text larger than memory: the time and memory of ``prepare``, and of a run that reads its folder.

``python benchmarks/prepare.py --pairs 50000000``

It makes synthetic pairs (words of a Zipf law, about 25 tokens a side; after a million they are
repeated), prepares them, and reads batches as a run would, packed and not, each in a process of its
own. It prints a table. The folder, 250 bytes a pair, is removed at the end.
"""

import argparse
import gzip
import itertools
import multiprocessing
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from jax_transformer.data import batches
from jax_transformer.data.options import DataOptions
from jax_transformer.data.prepared import Prepared
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus
from jax_transformer.training.options import TrainOptions

DISTINCT, BLOCK, BATCHES = 1_000_000, 100_000, 500


def write_text(path: Path, pairs: int) -> None:
    """Write pairs of random words, the same in every run."""
    random = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(random.choice(letters, n)) for n in random.integers(2, 9, 20_000)])
    chance = 1 / np.arange(1, len(words) + 1)
    chance /= chance.sum()
    with gzip.open(path, "wt", compresslevel=1) as file:
        for begin in range(0, pairs, BLOCK):
            lengths = random.integers(4, 22, (min(BLOCK, pairs - begin), 2))
            drawn = iter(random.choice(words, lengths.sum(), p=chance).tolist())
            for source, target in lengths.tolist():
                sides = (" ".join(itertools.islice(drawn, n)) for n in (source, target))
                file.write("\t".join(sides) + "\n")


def tokenizer_alone(prepared: Prepared, text: Path, pairs: int) -> float:
    """Return the tokens a second that the library encodes with its own threads."""
    with gzip.open(text, "rt") as file:
        lines = [side for line in itertools.islice(file, pairs) for side in line.split("\t")]
    bpe = prepared.tokenizer.source.bpe
    began, tokens = time.perf_counter(), 0
    for i in range(0, len(lines), 20_000):
        tokens += sum(map(len, bpe.encode_batch_fast(lines[i : i + 20_000])))
    return tokens / (time.perf_counter() - began)


def read(prepared: Path, packing: int | None) -> dict[str, str]:
    """Return what a run needs to begin, and to read batches."""
    began = time.perf_counter()
    data = DataOptions(prepared=str(prepared), tokens_per_batch=4096, packing=packing)
    text = corpus.prepare(TrainOptions(data=data), RunFolder(prepared.parent / "run"))
    opened = time.perf_counter() - began
    stream = batches.train_stream(text.train, text.plan)
    next(stream)
    first = time.perf_counter() - began
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(BATCHES):
        next(stream)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    stream.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {
        "the corpus is open after": f"{opened:.2f} s",
        "the first batch is there after": f"{first:.2f} s",
        "a batch of 4,096 tokens": f"{wall / BATCHES * 1e3:.2f} ms",
        "of it processor time": f"{cpu / BATCHES * 1e3:.2f} ms",
        "full": f"{text.about['fill']:.1%}",
        "memory of the process, with its libraries": f"{memory:,.0f} MiB",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--pairs", type=int, default=2_000_000, help="rounded to millions above one"
    )
    parser.add_argument("--folder", type=Path, help="folder for text and corpus (temporary)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(folder, options.pairs)
    finally:
        shutil.rmtree(folder)


def prepare(folder: Path, text: Path, *options: str) -> float:
    """Prepare text, and return the seconds."""
    valid, began = folder.parent / "valid.tsv", time.perf_counter()
    command = [sys.executable, "-m", "jax_transformer", "prepare", str(folder)]
    command += ["--data.train", str(text), "--data.valid", str(valid), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(folder: Path, pairs: int) -> None:
    block, text, small = folder / "block.tsv.gz", folder / "text.tsv.gz", folder / "small"
    write_text(block, min(pairs, DISTINCT))
    with gzip.open(block, "rt") as file:
        (folder / "valid.tsv").write_text("".join(itertools.islice(file, 500)))
    with open(text, "wb") as file:
        for _ in range(max(1, pairs // DISTINCT)):
            file.write(block.read_bytes())
    trained = prepare(small, block, "--data.vocab-size", "8000")
    tokenizer = small / "tokenizer.json"
    taken = prepare(folder / "corpus", text, "--data.tokenizer", str(tokenizer))
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    prepared = Prepared.open(str(folder / "corpus"))
    manifest = prepared.manifest
    tokens = sum(row[2] + row[3] for shard in manifest.shards for row in shard.table)
    size = sum(file.stat().st_size for file in (folder / "corpus").iterdir())
    alone = tokenizer_alone(prepared, text, 400_000)
    rows = {
        "pairs": f"{manifest.total('pairs'):,}",
        "tokens": f"{tokens:,}",
        "text, gzip": f"{text.stat().st_size / 1e6:,.0f} MB",
        "the folder": f"{size / 1e6:,.0f} MB",
        "a million pairs, with a tokenizer to train": f"{trained:,.0f} s",
        "prepare": f"{taken:,.0f} s, {tokens / taken:,.0f} tokens/s",
        "tokenizers alone": f"{alone:,.0f} tokens/s",
        "largest process of prepare": f"{largest:,.0f} MiB",
    }
    for packing in (None, 64):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            figures = pool.apply(read, (folder / "corpus", packing))
        rows |= {f"{'packed: ' if packing else ''}{name}": x for name, x in figures.items()}
    print("| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
