"""Is a run that stops and resumes the same, at sizes that fill a device?

It takes the options of ``jax-transformer estimate``, as ``benchmarks/measured_step.py`` does, and
its weights and ids are random. One process makes all steps; a second one stops half way and saves;
a third one loads that and goes on. The states must be the same, bit for bit: exit code 1 if not.
See campaigns/README.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import measured_step
from campaigns.interruptions import comparison

STEPS = int(os.environ.get("STEPS", "20"))
"""Steps of the run."""


def run(words: list[str], folder: Path, first: int, last: int) -> dict[str, Any]:
    """Make the steps after ``first`` up to ``last``, and save half way if the steps end there."""
    import jax

    from jax_transformer.storage import checkpoint, saving
    from jax_transformer.training import run as training_run

    setup = measured_step.Step(words)
    corpus: Any = SimpleNamespace(config=setup.config, init_source=None)  # weights are random
    seconds = {}
    began = time.perf_counter()
    saved = checkpoint.open(folder, first) if first else None
    state = jax.block_until_ready(training_run.start(setup.options, corpus, setup.devices, saved))
    seconds["load" if first else "begin"] = time.perf_counter() - began
    step, key = training_run.make_step(setup.options, setup.config, state), setup.devices.key(0)
    with setup.devices.context():
        for number in range(first, last):
            state, metrics = step(state, setup.batches(number), key)
            if number == first:
                jax.block_until_ready(state)
                began = time.perf_counter()
    jax.block_until_ready(state)
    seconds["step"] = (time.perf_counter() - began) / max(1, last - first - 1)
    if last < STEPS:
        began = time.perf_counter()
        saving.save(folder, last, state, about={})
        seconds["save"] = time.perf_counter() - began
    digest, memory = comparison.state_digest(state), measured_step.largest_memory()
    loss = float(metrics["loss"])
    return {"digest": digest, "loss": loss, "memory": memory, "seconds": seconds}


def process(words: list[str], folder: Path, first: int, last: int) -> dict[str, Any]:
    """The same in a process of its own, so that nothing of another one is left."""
    # On a GPU, kernels are the same in two processes if they are deterministic
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    done = subprocess.run(
        [sys.executable, "-m", "campaigns.interruptions.stop_and_resume", *words],
        env=os.environ | {"RUN_STEPS": f"{folder}:{first}:{last}", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"steps {first} to {last} ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    times = ", ".join(f"{name} {each:.2f} s" for name, each in result["seconds"].items())
    memory = f", {result['memory'] / 2**30:.1f} GiB" if result["memory"] else ""
    print(
        f"steps {first} to {last}: loss {result['loss']:.6f}, {times}{memory}, "
        f"state {result['digest'][:16]}",
        flush=True,
    )
    return result


def main() -> None:
    words = sys.argv[1:]
    if "RUN_STEPS" in os.environ:
        folder, first, last = os.environ["RUN_STEPS"].rsplit(":", 2)
        print(json.dumps(run(words, Path(folder), int(first), int(last))))
        return
    print(" ".join(words))
    with tempfile.TemporaryDirectory(dir=os.environ.get("OUT")) as name:
        folder = Path(name) / "checkpoints"
        folder.mkdir()
        uninterrupted = process(words, folder, 0, STEPS)
        process(words, folder, 0, STEPS // 2)
        resumed = process(words, folder, STEPS // 2, STEPS)
    same = uninterrupted["digest"] == resumed["digest"]
    print(f"after {STEPS} steps: {'the same state' if same else 'ANOTHER STATE'}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
