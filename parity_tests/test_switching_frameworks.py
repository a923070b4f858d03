"""A run that changes frameworks twice equals one that stays in either, in float64."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.architectures import twins
from jax_transformer.config import codec
from jax_transformer.convert.training_state import torch_checkpoint
from jax_transformer.data import batches
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import atomic, pt
from jax_transformer.storage.pt import writer
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, optimizer, recipe, step
from jax_transformer.training.corpus import Corpus
from jax_transformer.training.optimizer import OptimizerName, OptimizerOptions, Schedule
from jax_transformer.training.options import ModelOptions, TrainOptions
from jax_transformer.training.step import TrainState
from jax_transformer.weights import torch_bridge
from parity_tests.marks import quick_if
from parity_tests.unit.runs import as_a_user, fields_of, main, metrics, write_text
from torch_reference import training

N = 4  # updates in each leg
BOUND = 1e-10
Checkpoint = dict[str, Any]


@dataclass
class Flight:
    """A run folder as ``train`` creates it before its first step, in both frameworks."""

    folder: RunFolder
    options: TrainOptions
    corpus: Corpus
    step: step.TrainStep
    start: Checkpoint
    """The state of step 0: PyTorch's initial weights in float64."""

    def torch(self, begin: Checkpoint) -> training.Loop:
        loop = training.Loop(training.read(self.folder.path), twins.twin(self.corpus.config))
        loop.load(as_tensors(begin))
        return loop

    def jax(self, state: TrainState, updates: int) -> tuple[TrainState, list[float]]:
        """Return the state after updates in JAX, and their losses."""
        losses, first, each = [], int(state.step), self.options.optimizer.accumulate
        indices = first * each, (first + updates) * each
        stream = batches.train_stream(self.corpus.train, self.corpus.plan, *indices)
        with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
            for _ in range(updates):
                parts = [next(stream) for _ in range(each)]
                state, measured = self.step(state, parts, jax.random.key(0))
                losses.append(float(measured["loss"]))
        return state, losses

    def into_jax(self, saved: Checkpoint) -> TrainState:
        return torch_checkpoint.from_checkpoint(saved, self.options, self.corpus.config)

    def into_torch(self, state: TrainState) -> Checkpoint:
        names = [name for name, _ in twins.twin(self.corpus.config).named_parameters()]
        return torch_checkpoint.to_checkpoint(state, self.options, self.corpus.config, names)


def as_arrays(value: Any) -> Any:
    return _mapped(value, torch.Tensor, torch_bridge.to_numpy)


def as_tensors(value: Any) -> Any:
    return _mapped(value, np.ndarray, torch_bridge.to_tensor)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, kind, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, kind, change) for item in value)
    return change(value) if isinstance(value, kind) else value


SIZES: dict[str, Any] = dict(d_model=16, num_heads=2, encoder_layers=1, decoder_layers=1)
SIZES |= dict(max_length=40, dropout=0.0, embedding_dropout=0.0)
# A tied and packed module; one with unused blocks, whose parameters the optimizer has and never
# updates; two batches per update
INNER: dict[str, Any] = dict(d_ff=32, attention_dropout=0.0, activation_dropout=0.0)
FLIGHTS = {
    "small": (ModelOptions("small", **SIZES, **INNER), {}),
    "deep_dive": (ModelOptions("deep_dive", **SIZES), {"accumulate": 2, "warmup_steps": 0}),
}


def prepared(path: Path, model: ModelOptions, **rule: Any) -> Flight:
    path.mkdir()
    sizes = dict(vocab_size=300, tokens_per_batch=128, buckets=2 if model.preset == "small" else 1)
    data = DataOptions(**fields_of(write_text(path)), **sizes)
    rule = {"warmup_steps": 3, "epsilon": 1e-8, "clip_norm": 0.5} | rule
    options = TrainOptions(
        steps=3 * N + 2, model=model, data=data, optimizer=OptimizerOptions(**rule)
    )
    folder = RunFolder(path / "run")
    folder.path.mkdir()
    prepared = corpus.prepare(options, folder)
    atomic.write_text(folder.train_config, codec.to_json(options))
    corpus.record(prepared, folder)
    torch.manual_seed(0)
    fresh = training.Loop(training.read(folder.path), twins.twin(prepared.config).double())
    rule_of_steps = optimizer.make(options.optimizer, options.steps)
    smoothing = options.optimizer.label_smoothing
    train = step.make_step(prepared.config, rule_of_steps, smoothing)
    return Flight(folder, options, prepared, train, as_arrays(fresh.state()))


@pytest.fixture(scope="module", params=FLIGHTS)
def flight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Flight:
    model, rule = FLIGHTS[request.param]
    return prepared(tmp_path_factory.mktemp(request.param) / "flight", model, **rule)


@pytest.fixture(scope="module")
def stayed(flight: Flight) -> tuple[list[Checkpoint], list[float]]:
    """Return an all-PyTorch run's state at every switch, and all losses."""
    loop, states, losses = flight.torch(flight.start), [], []
    for _ in range(3):
        losses += list(loop.losses(N))
        states.append(as_arrays(loop.state()))
    return states, losses


def furthest(ours: Checkpoint, theirs: Checkpoint) -> float:
    """Return the largest error of weights and moments; all else must be equal."""
    errors = []

    def compare(a: Any, b: Any, where: str) -> None:
        assert type(a) is type(b) or {type(a), type(b)} <= {int, float}, where
        if isinstance(a, dict):
            assert a.keys() == b.keys(), where
            for key in a:
                compare(a[key], b[key], f"{where}.{key}")
        elif isinstance(a, list | tuple):
            assert len(a) == len(b), where
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{where}[{i}]")
        elif isinstance(a, np.ndarray):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), where
            errors.append(float(np.abs(a - b).max()))
        elif isinstance(a, float):
            assert a == pytest.approx(b, rel=1e-12), where
        else:
            assert a == b, where

    compare(ours, theirs, "checkpoint")
    return max(errors)


def test_both_frameworks_read_the_same_batches(flight: Flight):
    """Two epochs of batches have the same bytes."""
    count = 2 * flight.corpus.plan.batches_per_epoch
    run = training.read(flight.folder.path)
    theirs = [[side.to(torch.int32).numpy() for side in run.batch(i)] for i in range(count)]
    ours = batches.train_stream(flight.corpus.train, flight.corpus.plan, 0, count)
    first, second = ([b"|".join(x.tobytes() for x in each) for each in s] for s in (ours, theirs))
    assert first == second and len(set(first)) == count > 2


def test_a_run_that_changes_frameworks_twice_equals_one_in_pytorch(
    flight: Flight, stayed: tuple[list[Checkpoint], list[float]], tmp_path: Path
):
    """Go through files: torch.save, our reader, a run's checkpoint, our writer, torch.load."""
    first = flight.torch(flight.start)
    losses = list(first.losses(N))
    torch.save(first.state(), tmp_path / "n.pt")
    state, more = flight.jax(flight.into_jax(pt.read(tmp_path / "n.pt")), N)
    torch_checkpoint.save(flight.folder, state)
    writer.write(tmp_path / "2n.pt", flight.into_torch(torch_checkpoint.load(flight.folder, 2 * N)))
    second = flight.torch(as_arrays(torch.load(tmp_path / "2n.pt", weights_only=True)))
    losses += more + list(second.losses(N))
    assert np.abs(np.array(losses) - stayed[1]).max() < BOUND
    assert furthest(as_arrays(second.state()), stayed[0][2]) < BOUND
    assert losses[-1] < losses[0]
    before, after = (shown(state["model"]) for state in (flight.start, stayed[0][2]))
    assert before != after


def test_a_run_that_stays_in_jax_equals_it_too(
    flight: Flight, stayed: tuple[list[Checkpoint], list[float]]
):
    state, losses = flight.jax(flight.into_jax(flight.start), 3 * N)
    assert np.abs(np.array(losses) - stayed[1]).max() < BOUND
    assert furthest(flight.into_torch(state), stayed[0][2]) < BOUND


def test_there_and_back_changes_no_bit(
    flight: Flight, stayed: tuple[list[Checkpoint], list[float]]
):
    for saved in (flight.start, *stayed[0]):
        again = flight.into_torch(flight.into_jax(saved))
        assert furthest(again, saved) == 0
        assert shown(again["model"]) == shown(saved["model"])
        assert shown(again["optimizer"]["state"]) == shown(saved["optimizer"]["state"])
        order = [name for name, _ in twins.twin(flight.corpus.config).named_parameters()]
        for each in (again, saved):
            actual = torch_checkpoint.module_parameters(each["model"], flight.corpus.config)
            assert actual == order


def shown(value: Any) -> Any:
    """Return the bytes of arrays by their names."""
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tobytes().hex()]
    return repr(value)


def moments_dropped(state: TrainState) -> TrainState:
    clip, adam, *rest = state.opt_state
    mu, nu = jax.tree.map(jnp.zeros_like, (adam.mu, adam.nu))
    return state._replace(opt_state=(clip, adam._replace(mu=mu, nu=nu), *rest))


def count_off_by_one(state: TrainState) -> TrainState:
    clip, adam, *rest = state.opt_state
    return state._replace(opt_state=(clip, adam._replace(count=adam.count + 1), *rest))


def schedule_off_by_one(state: TrainState) -> TrainState:
    *rest, rate = state.opt_state
    return state._replace(opt_state=(*rest, rate._replace(count=rate.count + 1)))


def data_off_by_one(state: TrainState) -> TrainState:
    return state._replace(step=state.step + 1)


@pytest.mark.parametrize(
    "wrong", [moments_dropped, count_off_by_one, schedule_off_by_one, data_off_by_one]
)
def test_a_loss_in_the_conversion_is_detected(
    flight: Flight, stayed: tuple[list[Checkpoint], list[float]], wrong: Callable
):
    """Negative control: each wrong moment, count, schedule step or position shows."""
    state, _ = flight.jax(wrong(flight.into_jax(stayed[0][0])), N)
    model = transformer.unflatten(flight.corpus.config, state.params | state.frozen)
    ours = jt.convert.to_torch(model)
    actual = max(float(np.abs(ours[name] - stayed[0][1]["model"][name]).max()) for name in ours)
    assert actual > 1e5 * BOUND


def test_the_loop_by_its_command(
    flight: Flight, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Twice two updates equal four, bit for bit; torch.load reads with weights_only."""

    def run(steps: int, name: str, *more: str) -> list[dict]:
        files = [str(flight.folder.path), "--checkpoint", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", ["", *files, "--steps", str(steps), *more])
        training.main()
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    lines = run(2, "two.pt")
    lines += run(2, "four.pt", "--from", str(tmp_path / "two.pt"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    saved = torch.load(tmp_path / "four.pt", weights_only=True)
    assert saved.keys() == {"model", "optimizer", "scheduler", "step", "config"}
    assert saved["step"] == 4
    torch.manual_seed(0)
    loop = training.Loop(training.read(flight.folder.path), twins.twin(flight.corpus.config))
    assert list(loop.losses(4)) == [line["loss"] for line in lines]
    assert furthest(as_arrays(loop.state()), as_arrays(saved)) == 0


OTHER_OPTIMIZERS = {
    # With a smaller epsilon Adam enlarges the rounding of gradients that are nearly zero
    "adam": {"name": "adam", "schedule": "linear", "weight_decay": 0.1, "epsilon": 1e-5},
    "sgd": {"name": "sgd", "nesterov": True, "epsilon": 1e-9, "learning_rate": 0.1},
    "without momentum": {"name": "sgd", "momentum": 0.0, "epsilon": 1e-9},
}


@pytest.mark.parametrize("name", [quick_if(name == "adam", name) for name in OTHER_OPTIMIZERS])
def test_adam_and_sgd_change_frameworks_too(name: str, tmp_path: Path):
    """PyTorch, JAX, PyTorch, against PyTorch all the way; every conversion back is exact."""
    options = OTHER_OPTIMIZERS[name]
    enums = {"name": OptimizerName(options["name"])}
    enums |= {"schedule": Schedule(options["schedule"])} if "schedule" in options else {}
    flight = prepared(tmp_path / "flight", FLIGHTS["small"][0], **options | enums)
    stays = flight.torch(flight.start)
    losses = list(stays.losses(2))
    saved = as_arrays(stays.state())
    for checkpoint in (flight.start, saved):
        assert furthest(flight.into_torch(flight.into_jax(checkpoint)), checkpoint) == 0
    state, ours = flight.jax(flight.into_jax(saved), 2)
    moves = flight.torch(flight.into_torch(state))
    assert np.abs(np.array(ours) - list(stays.losses(2))).max() < BOUND
    assert np.abs(np.array(list(moves.losses(1))) - list(stays.losses(1))).max() < BOUND
    assert furthest(as_arrays(moves.state()), as_arrays(stays.state())) < BOUND
    assert losses[0] != losses[1]
    saved["optimizer"]["param_groups"][0]["weight_decay"] = 0.7
    with pytest.raises(ConfigError, match=r"weight_decay \(0\.7 there"):
        flight.into_jax(saved)


@pytest.mark.parametrize("name", [OptimizerName.ADAFACTOR, OptimizerName.LION])
def test_an_optimizer_that_pytorch_does_not_have_is_refused_by_name(
    flight: Flight, stayed: tuple[list[Checkpoint], list[float]], name: OptimizerName
):
    options = dataclasses.replace(flight.options, optimizer=OptimizerOptions(name))
    names = [name for name, _ in twins.twin(flight.corpus.config).named_parameters()]
    state = flight.into_jax(stayed[0][0])
    for refused in (
        lambda: torch_checkpoint.from_checkpoint(stayed[0][0], options, flight.corpus.config),
        lambda: torch_checkpoint.to_checkpoint(state, options, flight.corpus.config, names),
    ):
        with pytest.raises(ConfigError, match=rf"^optimizer\.name={name.value}: [^\n]+$"):
            refused()


def group(**changes: Any) -> Callable[[Checkpoint], None]:
    return lambda saved: saved["optimizer"]["param_groups"][0].update(changes)


def later(saved: Checkpoint) -> None:
    saved["scheduler"]["last_epoch"] += 1


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda saved: saved.pop("scheduler"), InputError, ["'scheduler'"]),
        (lambda saved: saved.update(step=2.5), InputError, ["step=2.5"]),
        (lambda saved: saved.update(step=-1), InputError, ["step=-1"]),
        (group(eps=1e-6), ConfigError, ["epsilon (1e-06 there, 1e-08 here)"]),
        (group(weight_decay=0.3), ConfigError, ["weight_decay (0.3 there, 0.01 here)"]),
        (later, ConfigError, ["the learning rate after 5 updates"]),
        (group(amsgrad=True), InputError, ["amsgrad"]),
    ],
)
def test_files_of_another_run_are_refused(
    flight: Flight, stayed, change: Callable, kind: type, words: list[str]
):
    saved = _mapped(stayed[0][0], np.ndarray, np.copy)
    change(saved)
    with pytest.raises(kind) as refusal:
        flight.into_jax(saved)
    assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value)


def test_train_resumes_from_a_file_of_pytorch(flight: Flight, tmp_path: Path):
    """In float32, as for users: PyTorch, then ``train``, equals PyTorch to the end."""
    if flight.options.model.preset != "small":
        pytest.skip("one model is enough for the commands: what crosses is tested above")
    run = tmp_path / "run"
    shutil.copytree(flight.folder.path, run, ignore=shutil.ignore_patterns("checkpoints"))
    loop = training.Loop(training.read(run), twins.twin(flight.corpus.config))
    weights = as_tensors(flight.start["model"]).items()
    loop.load({**loop.state(), "model": {name: tensor.float() for name, tensor in weights}})
    before = list(loop.losses(N))
    torch.save(loop.state(), tmp_path / "n.pt")
    with as_a_user():
        assert main("convert", tmp_path / "n.pt", run, "--training") == 0
        recipe.train(dataclasses.replace(flight.options, run=str(run), log_every=1))
        assert main("convert", run, tmp_path / "end.pt", "--training") == 0
    losses = {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}
    assert sorted(losses) == list(range(N + 1, flight.options.steps + 1))
    rest = list(loop.losses(flight.options.steps - N))
    np.testing.assert_allclose([losses[step] for step in sorted(losses)], rest, rtol=1e-4)
    assert abs(before[0] - rest[0]) > 0.01
    end = torch.load(tmp_path / "end.pt", weights_only=True)
    assert end["step"] == flight.options.steps
    assert end["model"]["linear.weight"].data_ptr() == end["model"]["tgt_emb.weight"].data_ptr()
    loop.load(end)
    assert next(loop.losses(1)) < before[0]


def test_the_loop_refuses_other_text(flight: Flight):
    path = Path(flight.options.data.train_source[0])
    before = path.read_bytes()
    try:
        path.write_bytes(before.replace(b"cat", b"cow", 1))
        with pytest.raises(ValueError, match="train_sha256"):
            training.read(flight.folder.path)
    finally:
        path.write_bytes(before)
