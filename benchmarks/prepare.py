"""Text larger than memory: the time and memory of ``prepare``, and of a run that reads its folder.

``python benchmarks/prepare.py --pairs 2000000``

It makes synthetic pairs (words of a Zipf law, about 25 tokens a side), prepares them, begins a run,
reads batches as the run would, and prints a table. The folder is removed at the end.
"""

import argparse
import gzip
import itertools
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
from jax_transformer.data.prepared import MANIFEST, Prepared
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus
from jax_transformer.training.options import TrainOptions

BLOCK, BATCHES = 100_000, 500


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, help="folder for text and corpus (temporary)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        measure(folder, options.pairs)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, pairs: int) -> None:
    text, valid, prepared_folder = folder / "text.tsv.gz", folder / "valid.tsv", folder / "corpus"
    write_text(text, pairs)
    with gzip.open(text, "rt") as file:
        valid.write_text("".join(itertools.islice(file, 500)))
    command = [sys.executable, "-m", "jax_transformer", "prepare", str(prepared_folder)]
    command += ["--data.train", str(text), "--data.valid", str(valid), "--data.vocab-size", "8000"]
    times = []
    for _ in range(2):  # the second time with a tokenizer, from shards that are removed
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - began)
        if len(times) == 1:
            for file in (*prepared_folder.glob("train-*"), prepared_folder / MANIFEST):
                file.unlink()
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    began = time.perf_counter()
    data = DataOptions(prepared=str(prepared_folder), tokens_per_batch=4096)
    text_of_run = corpus.prepare(TrainOptions(data=data), RunFolder(folder / "run"))
    opened = time.perf_counter() - began
    stream = batches.train_stream(text_of_run.train, text_of_run.plan)
    next(stream)
    first = time.perf_counter() - began
    cpu, began = time.process_time(), time.perf_counter()
    for _ in range(BATCHES):
        next(stream)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    stream.close()
    prepared = Prepared.open(str(prepared_folder))
    tokens = sum(row[2] + row[3] for shard in prepared.manifest.shards for row in shard.table)
    alone = tokenizer_alone(prepared, text, min(pairs, 400_000))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    rows = {
        "pairs": f"{pairs:,}",
        "tokens": f"{tokens:,}",
        "text, gzip": f"{text.stat().st_size / 1e6:,.0f} MB",
        "shards": f"{prepared.manifest.total('size') / 1e6:,.0f} MB",
        "prepare, with a tokenizer to train": f"{times[0]:,.0f} s",
        "prepare": f"{times[1]:,.0f} s, {tokens / times[1]:,.0f} tokens/s",
        "tokenizers alone": f"{alone:,.0f} tokens/s",
        "largest process of prepare": f"{largest:,.0f} MiB",
        "a run's corpus is open after": f"{opened:.2f} s",
        "its first batch is there after": f"{first:.2f} s",
        "a batch of 4,096 tokens": f"{wall / BATCHES * 1e3:.2f} ms",
        "of it processor time": f"{cpu / BATCHES * 1e3:.2f} ms",
        "memory of this process": f"{own:,.0f} MiB",
    }
    print("| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
