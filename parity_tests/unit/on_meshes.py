"""Training on four simulated devices, in a process of its own: JAX counts them when it starts.

    python -m parity_tests.unit.on_meshes FILE

writes the results of calls of the functions below. It reads them from standard input: their names
and arguments, as Python prints them.
"""

import ast
import hashlib
import pickle
import sys
import tempfile
import threading
import unittest.mock as mock
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_transformer import transformer
from jax_transformer.config import TransformerConfig
from jax_transformer.generate import decoding, prepare
from jax_transformer.generate.generation_config import Constraints, GenerationConfig
from jax_transformer.nn import sharding
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.runtime import distributed
from jax_transformer.storage import checkpoint, run_folder, saving
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import init_source, optimizer, run, step
from jax_transformer.training.devices import Devices
from jax_transformer.training.optimizer import OptimizerOptions
from jax_transformer.training.options import TrainOptions, read_options
from parity_tests.unit import helpers
from parity_tests.unit.training.test_step import batch_of

SIZES: dict[str, Any] = dict(source_vocab_size=24, target_vocab_size=24, d_model=32, d_ff=64)
SIZES |= dict(num_heads=4, num_layers=1, dropout=0.2, attention_dropout=0.1)
Mesh = tuple[int, int, int]
"""Devices on the axes data, fsdp and tensor."""
ONE: Mesh = (1, 1, 1)


def devices_of(mesh: Mesh) -> Devices:
    data, fsdp, tensor = mesh
    return Devices.of(jax.devices()[: data * fsdp * tensor], fsdp, tensor)


def leaves_by_path(tree: Any) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def digest(state: step.TrainState) -> str:
    """The SHA-256 of every array of a state, with their names."""
    combined = hashlib.sha256()
    for name, leaf in leaves_by_path(state).items():
        combined.update(name.encode() + distributed.on_host(leaf).tobytes())
    return combined.hexdigest()


def bytes_on(device: jax.Device, arrays: list[jax.Array]) -> int:
    """Bytes of the arrays' parts that lie on a device, each part of memory once."""
    buffers = {}
    for array in arrays:
        if not array.is_deleted() and not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
            for shard in array.addressable_shards:
                if shard.device == device:
                    buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


# Cases


def updates(preset: str, mesh: Mesh, vocabulary: int = 24) -> dict[str, Any]:
    """Five updates of a tiny model in float64, with dropout: losses and compiled programs; every
    array of the last state and the axes that divide it, by its path; its bytes on each device.
    """
    devices = devices_of(mesh)
    sizes = SIZES | dict(source_vocab_size=vocabulary, target_vocab_size=vocabulary)
    config = helpers.tiny(preset, **sizes)
    tx = optimizer.make(OptimizerOptions(learning_rate=1e-3, warmup_steps=2), 10)
    model = helpers.random_model(config)
    weights = [transformer.flatten(model, kind) for kind in (nnx.Param, Frozen)]
    state = devices.place(step.state_of(*weights, tx, ema=True))
    laid = jax.tree.map(lambda x: x.sharding, state)
    train = step.make_step(config, tx, 0.1, 0.9, shardings=laid)
    key, losses = devices.key(0), []
    with devices.context():
        for i in range(5):
            batch = devices.divide(batch_of(config, 8, seed=i))
            state, metrics = train(state, [batch], key)
            losses.append(float(metrics["loss"]))
    leaves = leaves_by_path(state)
    return {
        "losses": losses,
        "programs": train.programs(),
        "arrays": {name: distributed.on_host(leaf) for name, leaf in leaves.items()},
        "specs": {name: tuple(leaf.sharding.spec) for name, leaf in leaves.items()},
        "bytes": [bytes_on(device, list(leaves.values())) for device in devices.mesh.devices.flat],
    }


def beginning(preset: str, mesh: Mesh) -> tuple[str, dict[str, tuple]]:
    """The digest of a new run's state, and the axes that divide each array of it, and its shape."""
    config = helpers.tiny(preset, **SIZES)
    state = run.start(OPTIONS, corpus_of(config), devices_of(mesh), None)
    leaves = leaves_by_path(state).items()
    return digest(state), {name: (tuple(x.sharding.spec), x.shape) for name, x in leaves}


def continued(mesh: Mesh, others: tuple[Mesh, ...]) -> dict[str, Any]:
    """The digests of a state that is saved on one mesh, as saved and as loaded on each other one;
    and those after one more update, of the state that was not saved and of the one loaded.
    """
    config, devices = helpers.tiny("small", **SIZES), devices_of(mesh)
    state, key = run.start(OPTIONS, corpus_of(config), devices, None), devices.key(0)
    train = run.make_step(OPTIONS, config, state)

    def update(state: step.TrainState, seed: int) -> step.TrainState:
        with devices.context():
            return train(state, [devices.divide(batch_of(config, 8, seed=seed))], key)[0]

    with tempfile.TemporaryDirectory() as folder:
        state = update(state, 0)
        saving.save(Path(folder), 1, state, about={})
        saved = checkpoint.open(Path(folder), 1)
        loaded = {
            each: run.start(OPTIONS, corpus_of(config), devices_of(each), saved)
            for each in (mesh, *others)
        }
        return {
            "saved": digest(state),
            "loaded": {each: digest(other) for each, other in loaded.items()},
            "next": [digest(update(each, 1)) for each in (state, loaded[mesh])],
        }


def saved(folder: str, mesh: Mesh, began: int) -> dict[str, Any]:
    """A state on this mesh, of the checkpoint of step ``began`` in a folder or a new one if 0: its
    digest, and those after one more update, which is saved, and as it is loaded again.
    """
    config, devices = helpers.tiny("small", **SIZES), devices_of(mesh)
    train = step.make_step(config, optimizer.make(OPTIONS.optimizer, OPTIONS.steps), 0.1, 0.9)

    def opened(number: int) -> step.TrainState:
        saved = checkpoint.open(Path(folder), number) if number else None
        return run.start(OPTIONS, corpus_of(config), devices, saved)

    state = opened(began)
    begins = digest(state)
    with devices.context():
        batch = devices.divide(batch_of(config, 8, seed=began))
        state, metrics = train(state, [batch], devices.key(0))
    saving.save(Path(folder), began + 1, state, about={})
    ends, loss = digest(state), float(metrics["loss"])
    return {"begins": begins, "ends": ends, "loaded": digest(opened(began + 1)), "loss": loss}


def opened(path: str, mesh: Mesh) -> str:
    """The digest of the state that the run in a folder continues from."""
    folder = RunFolder(Path(path))
    config = TransformerConfig.from_json(folder.config.read_text())
    saved, _ = run_folder.newest_intact(folder.checkpoints)
    return digest(run.start(read_options(folder), corpus_of(config), devices_of(mesh), saved))


def loading(mesh: Mesh) -> float:
    """The most bytes that a device holds at any time while a state is loaded, as a multiple of the
    parameters' bytes on it. Sampled from ``jax.live_arrays`` by another thread.
    """
    config = helpers.tiny("small", **SIZES | dict(d_model=256, d_ff=512))
    devices, options = devices_of(mesh), TrainOptions(steps=10)
    device = devices.mesh.devices.flat[-1]
    with tempfile.TemporaryDirectory() as folder:
        state = run.start(options, corpus_of(config), devices, None)
        size = bytes_on(device, list(state.params.values()))
        saving.save(Path(folder), 0, state, about={})
        saved = checkpoint.open(Path(folder), 0)
        del state
        return sampled(device, lambda: run.start(options, corpus_of(config), devices, saved)) / size


def initialized(path: str, mesh: Mesh) -> dict[str, Any]:
    """A state that begins with the weights of the run in a folder: its digest; the bytes on the
    first device when its arrays are about to be placed, and the most at any time, as a multiple of
    the parameters' bytes on it.
    """
    devices, options = devices_of(mesh), TrainOptions(steps=10, init=path)
    device, at_placing, place = devices.mesh.devices.flat[0], [], sharding.place

    def watched(tree: Any, shardings: Any) -> Any:
        at_placing.append(bytes_on(device, jax.live_arrays()))
        return place(tree, shardings)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sharding, "place", watched):
        source = init_source.find(options, RunFolder(Path(folder)))
        assert source is not None
        corpus, states = SimpleNamespace(config=source.config, init_source=source), []
        before = bytes_on(device, jax.live_arrays())
        most = sampled(device, lambda: states.append(run.start(options, corpus, devices, None)))
    size = bytes_on(device, list(states[0].params.values()))
    return {
        "digest": digest(states[0]),
        "at placing": [each - before for each in at_placing],
        "most": most / size,
        "of": size / sum(x.nbytes for x in states[0].params.values()),
    }


def sampled(device: jax.Device, work: Callable[[], Any]) -> int:
    """The most bytes on a device during and after ``work``, without those before."""
    before, samples, ended = bytes_on(device, jax.live_arrays()), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            samples.append(bytes_on(device, jax.live_arrays()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    samples.append(bytes_on(device, jax.live_arrays()))
    ended.set()
    watcher.join()
    del result
    return max(samples) - before


def translated(mesh: Mesh) -> tuple[np.ndarray, tuple]:
    """Greedy translations with divided weights, and the axes that divide their rows."""
    config, devices = helpers.tiny("small", **SIZES), devices_of(mesh)
    arrays = devices.place(transformer.flatten(helpers.random_model(config)))
    model = prepare.split(transformer.unflatten(config, arrays))
    source = batch_of(config, 8).source
    settings = GenerationConfig(max_new_tokens=9, constraints=Constraints(no_repeat_ngram_size=1))
    with devices.context():
        inputs, _ = prepare.prepare(model, source, settings)
        tokens, _ = decoding.generate(model, source, settings)
    spec = inputs.source.sharding.spec if mesh != ONE else ()
    return tokens, tuple(spec)


OPTIONS = TrainOptions(steps=10, optimizer=OptimizerOptions(ema=0.9))


def corpus_of(config: TransformerConfig) -> Any:
    """The part of a corpus that the beginning of a run needs."""
    return SimpleNamespace(config=config, init_source=None)


if __name__ == "__main__":
    results = {case: globals()[case[0]](*case[1:]) for case in ast.literal_eval(sys.stdin.read())}
    Path(sys.argv[1]).write_bytes(pickle.dumps(results))
