"""From options to a corpus: all sources agree, vocabularies fit, invalid input is refused."""

import dataclasses
import gzip
import itertools
import json
import math
import operator
import random
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.config import Tying
from jax_transformer.data import batches, encoding, parallel_text, phrases
from jax_transformer.data.encoding import load_tokenizer
from jax_transformer.data.options import DataOptions, DataSource, Task, TooLong, Vocabularies
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import run_files
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, recipe
from jax_transformer.training.optimizer import OptimizerOptions
from jax_transformer.training.options import MeshOptions, ModelOptions, TrainOptions
from parity_tests.unit import runs
from parity_tests.unit.helpers import tiny

WORDS = runs.WORDS
SIZES = dict(d_model=16, num_heads=2, d_ff=32, encoder_layers=1, decoder_layers=1, max_length=40)
MODEL = ModelOptions(**SIZES)
T5 = dataclasses.replace(MODEL, preset="t5")
DENOISE = {"task": Task.SPAN_CORRUPTION}
SMALL = {"vocab_size": 300, "tokens_per_batch": 128, "buckets": 2}


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    choose = random.Random(seed)
    sampled = [
        [choose.choice(list(WORDS)) for _ in range(choose.randint(1, 6))] for _ in range(count)
    ]
    return [(" ".join(words), " ".join(WORDS[word] for word in words)) for words in sampled]


TRAIN, VALID = sentences(60, 0), sentences(8, 1)


def write_lines(folder: Path, **splits: list[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Write two files of lines per split and return their options."""
    named = {}
    for split, pairs in splits.items():
        for side, lines in zip(("source", "target"), zip(*pairs, strict=True), strict=True):
            path = folder / f"{split}.{side}"
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
            named[f"{split}_{side}"] = (str(path),)
    return named


@pytest.fixture
def lines(tmp_path) -> dict[str, tuple[str, ...]]:
    return write_lines(tmp_path, train=TRAIN, valid=VALID)


def options(model: ModelOptions = MODEL, **data) -> TrainOptions:
    return TrainOptions(model=model, data=DataOptions(**{**SMALL, **data}))


def prepared(folder: Path, *arguments, rows_multiple: int = 1, **data) -> corpus.Corpus:
    chosen = options(*arguments, **data)
    return corpus.prepare(chosen, RunFolder(folder / "run"), lambda: rows_multiple)


@pytest.fixture
def no_training(monkeypatch):
    """Fail if the tokenizer's training starts."""

    def begun(*_, **__):
        raise AssertionError("the tokenizer is being trained")

    monkeypatch.setattr(Tokenizer, "train", begun)


# Sources of pairs


def test_the_pairs_of_a_file_have_its_weight(tmp_path):
    """Also if a pair of the first file is too long and dropped."""
    files = (
        table(tmp_path / "a.tsv", [("the " * 60, "die " * 60), ("", "leer"), *TRAIN[:19]]),
        table(tmp_path / "b.tsv", TRAIN[19:]),
    )
    named = {"train": files, "valid": (table(tmp_path / "c.tsv", VALID),)}
    limits = {"max_source_length": 30, "max_target_length": 30}
    data = prepared(tmp_path, **named, **limits, train_weights=(3.0, 0.5))
    assert data.about["dropped_long"] == 1
    assert data.plan.weights == (3.0, 0.5)
    assert data.plan.table.counts.sum(axis=1).tolist() == [19, 41]
    texts = [data.tokenizer.decode(ids) for ids in data.train.sources]
    assert sorted(texts[:19]) == sorted(source for source, _ in TRAIN[:19])
    assert prepared(tmp_path, **named, **limits).plan.weights == ()
    for temperature, weight in ((1.0, 1.0), (2.0, (41 / 19) ** 0.5), (1e9, 41 / 19)):
        data = prepared(tmp_path, **named, **limits, train_temperature=temperature)
        np.testing.assert_allclose(data.plan.weights, (weight, 1.0), rtol=1e-8)
        assert data.plan.table.counts.sum(axis=1).tolist() == [19, 41]
    a, b, valid = (
        write_lines(tmp_path, **{name: pairs}).values()
        for name, pairs in (("a", [("", "leer"), *TRAIN[:19]]), ("b", TRAIN[19:]), ("valid", VALID))
    )
    names = ("train_source", "train_target", "valid_source", "valid_target")
    files = dict(zip(names, (*map(operator.add, a, b), *valid), strict=True))
    data = prepared(tmp_path, **files, train_weights=(3.0, 0.5))
    assert data.plan.table.counts.sum(axis=1).tolist() == [19, 41]


def test_a_file_none_of_whose_pairs_fits_has_a_weight_too(tmp_path):
    names = ("a.tsv", [("the " * 60, "die " * 60)] * 2), ("b.tsv", TRAIN)
    files = tuple(table(tmp_path / name, pairs) for name, pairs in names)
    named = {"train": files, "valid": (table(tmp_path / "c.tsv", VALID),)}
    limits = {"max_source_length": 30, "max_target_length": 30}
    table_of_both = prepared(tmp_path, **named, **limits, train_weights=(1.0, 1.0)).plan.table
    assert table_of_both.counts.sum(axis=1).tolist() == [0, len(TRAIN)]
    with np.errstate(divide="ignore"):
        weights = corpus.weights(DataOptions(**named, train_temperature=2.0), table_of_both)
    np.testing.assert_allclose(weights, (len(TRAIN) ** 0.5, 1.0), rtol=1e-12)


def test_dropout_has_the_seed_of_the_run_and_the_tokenizer_of_each_side(tmp_path, lines):
    chosen = options(OUTPUT, **lines, vocabularies=Vocabularies.SEPARATE, bpe_dropout=0.5)
    data = corpus.prepare(dataclasses.replace(chosen, seed=5), RunFolder(tmp_path / "run"))
    drawn = data.drawn.at(0, np.arange(60), data.train, 40)
    assert data.drawn.seed == 5
    assert (drawn.lengths.sum(axis=0) > 1.2 * data.train.lengths.sum(axis=0)).all()
    lengths = data.drawn.lengths(data.train, 40)
    assert (lengths > data.train.lengths).any()
    assert data.plan.table.tokens.sum(axis=(0, 1)).tolist() == lengths.sum(axis=0).tolist()


def test_two_vocabularies_that_are_trained_have_the_model_s_pad_ids():
    separate = DataOptions(vocab_size=300, vocabularies=Vocabularies.SEPARATE)
    both = corpus.train_tokenizer(separate, TRAIN, tiny(source_pad_id=1, target_pad_id=4))
    assert (both.source.pad_id, both.target.pad_id) == (1, 4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), "1 weights, and there are 2 training files"),
        ((1.0, 0.0), r"data\.train_weights: 0\.0 must be above 0"),
        ((math.inf, 1.0), r"data\.train_weights: inf must be above 0"),
        ((1.0, math.nan), r"data\.train_weights: nan must be above 0"),
    ],
)
def test_weights_that_do_not_fit_the_files_are_refused(weights, message):
    with pytest.raises(ConfigError, match=message):
        DataOptions(train=("a.tsv", "b.tsv"), valid=("c.tsv",), train_weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_temperature": 0.99}, r"data\.train_temperature=0\.99 must be at least 1"),
        ({"train_temperature": math.nan}, r"data\.train_temperature=nan must be at least 1"),
        ({"train_weights": (1.0, 2.0)}, r"data\.train_weights and data\.train_temperature: leave"),
        ({"train": ("a.tsv",)}, r"data\.train_temperature=2\.0 needs several training files"),
        ({"train": (), "valid": ()}, "needs several training files"),
    ],
)
def test_a_temperature_that_does_not_fit_is_refused(options, message):
    files = {"train": ("a.tsv", "b.tsv"), "valid": ("c.tsv",), "train_temperature": 2.0}
    with pytest.raises(ConfigError, match=message):
        DataOptions(**files | options)


def table(path: Path, pairs: list[tuple[str, str]]) -> str:
    text = "".join(f"{source}\t{target}\n" for source, target in pairs)
    path.write_bytes(gzip.compress(text.encode()))
    return str(path)


def objects(path: Path, pairs: list[tuple[str, str]]) -> str:
    lines = [json.dumps({"pair": {"en": source, "de": target}}) for source, target in pairs]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


FIELDS = {"source_field": "pair.en", "target_field": "pair.de"}


def test_all_sources_of_pairs_give_the_same_corpus(tmp_path, lines, monkeypatch):
    class Rows(list):
        column_names = ("pair",)
        select_columns = lambda self, columns: self  # noqa: E731

    rows = {
        split: Rows({"pair": {"en": s, "de": t}} for s, t in pairs)
        for split, pairs in (("train", TRAIN), ("dev", VALID))
    }
    library = types.ModuleType("datasets")
    library.load_dataset = lambda path, name=None, *, split: rows[split] if name else Rows()
    monkeypatch.setitem(sys.modules, "datasets", library)
    halves = [*write_lines(tmp_path, half=TRAIN[:20], rest=TRAIN[20:]).values()]
    several = {"train_source": halves[0] + halves[2], "train_target": halves[1] + halves[3]}
    expected = prepared(tmp_path, **lines)
    assert (expected.about["train_pairs"], expected.about["valid_pairs"]) == (60, 8)
    assert expected.valid_pairs == VALID
    mixed = (table(tmp_path / "a.tsv.gz", TRAIN[:31]), objects(tmp_path / "b.jsonl", TRAIN[31:]))
    validation = (objects(tmp_path / "v.jsonl", VALID),)
    more = {"dataset_config": "en-de", "valid_split": "dev"}
    for kind, changes in (
        (DataSource.LINES, {**lines, **several}),
        (DataSource.PAIRS, {"train": mixed, "valid": validation, **FIELDS}),
        (DataSource.DATASET, {"dataset": "house/words", **more, **FIELDS}),
    ):
        assert options(**changes).data.kind is kind
        assert prepared(tmp_path, **changes).about == expected.about


def test_the_built_in_task_is_the_default():
    assert DataOptions().kind is DataSource.PHRASES
    assert DataOptions().builtin
    assert DataOptions().files == []


def test_every_file_that_is_named_is_looked_at_first():
    named = SEPARATE | {"tokenizer": "t", "target_tokenizer": "u"}
    for texts in (TABLES, LINES | {"train_target": ("b", "c"), "train_source": ("a", "f")}):
        files = sorted([*itertools.chain(*texts.values()), "t", "u"])
        assert sorted(DataOptions(**texts, **named).files) == files


def test_dropped_pairs_of_both_splits_are_counted(tmp_path):
    long = ("7" * 40, "y")  # each digit is a token
    valid = [("empty", " "), *VALID, long, long]
    files = write_lines(tmp_path, train=[*TRAIN, ("", "leer"), long], valid=valid)
    loaded = prepared(tmp_path, **files)
    counts = {"dropped_empty": 2, "dropped_long": 3, "cut_long": 0}
    assert counts.items() <= loaded.about.items() and loaded.valid_pairs == VALID


# Refusals before anything is trained or compiled

TABLES = {"train": ("a.tsv",), "valid": ("b.tsv.gz",)}
OBJECTS = {"train": ("a.jsonl",), "valid": ("b.jsonl",)}
LINES = {"train_source": ("a",), "valid_source": ("d",), "valid_target": ("e",)}
SEPARATE = {"vocabularies": Vocabularies.SEPARATE}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"train_source": ("a",), "valid_source": ("b",)},
            ["data.train_target", "data.valid_target"],
        ),
        ({"train": ("a.tsv",)}, ["not given: data.valid"]),
        ({"valid": ("a.tsv",)}, ["not given: data.train"]),
        ({"train": ("a.txt",), "valid": ("b.tsv",)}, ["a.txt", ".tsv or .jsonl"]),
        ({"train": ("a.tsv",), "valid": ("b.txt",)}, ["b.txt", ".tsv or .jsonl"]),
        (TABLES | {"dataset": "c"}, ["data.train or data.dataset"]),
        ({"train": ("a.tsv",), "valid_source": ("b",)}, ["data.valid_source or data.train"]),
        (LINES | {"train_target": ("b", "c")}, ["names 1 file", "train_target 2"]),
        ({"dataset_config": "de-en"}, ["data.dataset_config='de-en'", "data.dataset"]),
        (TABLES | {"train_split": "a"}, ["data.train_split='a'"]),
        (TABLES | {"valid_split": "a"}, ["data.valid_split='a'"]),
        (TABLES | {"source_field": "en"}, ["data.source_field='en'", ".jsonl"]),
        (OBJECTS | {"source_field": "en", "target_field": "en"}, ["both 'en'"]),
        ({"target_tokenizer": "a"}, ["data.vocabularies=separate"]),
        (SEPARATE | {"target_tokenizer": "a"}, ["not given: data.tokenizer"]),
        (SEPARATE | {"tokenizer": "a"}, ["not given: data.target_tokenizer"]),
        ({"max_source_length": 1}, ["data.max_source_length=1", "at least 2"]),
        ({"max_target_length": 1}, ["data.max_target_length=1", "at least 2"]),
        ({"bpe_dropout": 1.0}, ["data.bpe_dropout=1.0", "below 1"]),
        ({"bpe_dropout": -0.1}, ["data.bpe_dropout=-0.1", "at least 0"]),
        ({"buckets": 0}, ["data.buckets=0"]),
        ({"packing": 1}, ["data.packing=1", "at least 2"]),
        ({"noise_density": 0.2}, ["data.noise_density=0.2", "without data.task"]),
        ({"task": Task.PREFIX_LM, "mean_noise_span_length": 2.0}, ["span_length=2.0", "denoising"]),
        ({"train_tasks": (Task.DENOISING,)}, ["train_tasks has 1 tasks", "0 training files"]),
        ({"train_tasks": tuple(Task)}, ["train_tasks=translation", "tasks of plain lines"]),
        (DENOISE | {"train_tasks": (Task.PREFIX_LM,)}, ["data.task=span-corruption: leave"]),
        ({"prepared": "a", "train_tasks": (Task.PREFIX_LM,)}, ["with data.prepared"]),
        (DENOISE | {"noise_density": 0.0}, ["data.noise_density=0.0", "above 0"]),
        (DENOISE | {"noise_density": 1.0}, ["data.noise_density=1.0", "below 1"]),
        (DENOISE | {"mean_noise_span_length": 0.9}, ["span_length=0.9", "at least 1"]),
        (DENOISE | TABLES, ["data.task=span-corruption reads plain lines", "no data.train"]),
        (DENOISE | LINES, ["reads plain lines", "no data.valid_target"]),
        (DENOISE | {"train_source": ("a",)}, ["not given: data.valid_source"]),
        (DENOISE | SEPARATE, ["needs data.vocabularies=shared", "not separate"]),
        (DENOISE | {"bpe_dropout": 0.1}, ["data.bpe_dropout=0"]),
        ({"packing": 9, "bpe_dropout": 0.1}, ["data.packing=9", "data.bpe_dropout=0.1"]),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        DataOptions(**options)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_packed_rows_are_batches_and_validation_keeps_its_buckets(tmp_path, lines):
    plain = prepared(tmp_path, **lines, rows_multiple=16)
    data = prepared(tmp_path, **lines, packing=24, rows_multiple=16)
    about, rows = data.about, data.plan.packed
    assert rows is not None
    pairs = np.concatenate(rows.pairs(np.arange(len(rows)), 0, 0))
    assert sorted(pairs.tolist()) == list(range(len(TRAIN)))
    assert (about["widths"], about["rows"], about["train_pairs"]) == ([24], [16], len(TRAIN))
    assert about["batches_per_epoch"] == -(-len(rows) // 16) < plain.about["batches_per_epoch"]
    tokens = data.train.lengths.sum()
    cells = (24 + about["target_widths"][0]) * 16 * about["batches_per_epoch"]
    assert about["fill"] == round(tokens / cells, 4)
    assert data.valid_shapes == (plain.plan.widths, plain.plan.rows)
    assert plain.valid_shapes == (plain.plan.widths, plain.plan.rows)


def test_packed_rows_may_be_wider_in_targets(tmp_path):
    pairs = [("7" * 2, "8" * (9 + n % 5)) for n in range(60)]
    data = prepared(tmp_path, **write_lines(tmp_path, train=pairs, valid=pairs), packing=24)
    plan, source = data.plan, data.about["widths"][0]
    assert plan.target_widths == (24,) and source < 24
    assert plan.batches_per_epoch == -(-len(plan.packed) // plan.rows[0])
    tokens = data.train.lengths.sum()
    assert tokens / (plan.batches_per_epoch * plan.rows[0] * (source + 24)) > 0.5
    batch = next(batches.train_stream(data.train, plan, 0, 1))
    assert (batch.source.shape[1], batch.target_out.shape[1]) == (source, 24)


# The widest is a multiple of 4, or max_length
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("words", "longest", "widest"), [(20, 40, 24), (38, 40, 40), (36, 38, 38)])
def test_a_validation_pair_may_be_longer_than_all_of_training(
    tmp_path, words, longest, widest, order
):
    valid = [("7" * 3, "8"), ("7" * words, "8")[::order]]
    lines = write_lines(tmp_path, train=[("7" * 5, "8")] * 60, valid=valid)
    model = dataclasses.replace(MODEL, max_length=longest)
    data = prepared(tmp_path, model, **lines, rows_multiple=3)
    assert (data.plan.widths, data.plan.target_widths) == ((8,), None)
    assert data.valid_shapes == ((8, widest), (*data.plan.rows, 128 // widest // 3 * 3))
    (_, short), (_, long) = batches.eval_batches(data.valid, *data.valid_shapes)
    assert (short.source.shape[1], long.source.shape[1]) == (8, widest)


def test_the_density_that_runs_recorded_is_the_default():
    """So they go on: before there were other tasks than span corruption, it was the default."""
    assert DataOptions(noise_density=0.15) == DataOptions()
    for tasks, files, changed in (
        ({"task": Task.SPAN_CORRUPTION}, ("a",), False),
        ({"task": Task.DENOISING}, ("a",), True),
        ({"train_tasks": (Task.SPAN_CORRUPTION, Task.DENOISING)}, ("a", "c"), True),
    ):
        lines = tasks | {"train_source": files, "valid_source": ("b",)}
        assert (DataOptions(**lines, noise_density=0.15) != DataOptions(**lines)) == changed


@pytest.mark.parametrize(("packed", "density"), [(None, 0.3), (12, 0.3), (12, 0.7)])
def test_plain_lines_become_corrupted_texts(tmp_path, lines, packed, density):
    named = {name: lines[name] for name in ("train_source", "valid_source")}
    long = [" ".join(source for source, _ in TRAIN[i : i + 4]) for i in range(56)]
    Path(lines["train_source"][0]).write_text("\n".join(long) + "\n\n \n")
    noise = {"noise_density": density, "mean_noise_span_length": 1.5}
    named |= DENOISE | noise | SMALL | {"vocab_size": 400}
    data = prepared(tmp_path, T5, **named, packing=packed)
    last = data.tokenizer.vocab_size - 1
    assert data.tokenizer.sentinels == tuple(range(last, last - 100, -1))
    assert data.valid_pairs == [] and data.about["train_pairs"] == len(data.train.sources)
    assert data.about["dropped_empty"] == 2
    texts = [data.tokenizer.decode(ids) for ids in data.train.sources]
    if packed is None:
        assert sorted(texts) == sorted(long)
    assert data.plan.table.longest.max() <= (packed or 40)
    first, second = (
        next(iter(batches.train_stream(data.train, data.plan, n, n + 1, drawn=data.drawn)))
        for n in (0, data.plan.batches_per_epoch)
    )
    assert data.plan.target_widths is not None
    width, other = data.plan.widths[-1], data.plan.target_widths[-1]
    both = first.source.shape[1], other
    assert both == ({0.3: 12, 0.7: 8}[density], 12) if packed else other < width
    assert data.about["target_widths"] == list(data.plan.target_widths)
    assert first.target_out.shape[1] in data.plan.target_widths
    if packed is None:
        bucket, indices = data.plan.batch_indices(data.plan.batches_per_epoch)
        drawn = data.drawn.at(data.plan.batches_per_epoch, indices, data.train.take(indices), 0)
        shape = (data.plan.widths[bucket], data.plan.rows[bucket], other)
        expected = batches.make_batch(drawn, *shape)
        assert all(map(np.array_equal, second, expected))
    for batch in (first, second):  # every text begins with a token and its target with a sentinel
        begins = batch.target_in == data.config.bos_id
        assert set(batch.target_out[begins & (batch.target_out != 0)]) == {last}
    assert data.valid.targets[0][0] == last
    again = prepared(tmp_path, T5, **named, packing=packed)
    assert all(map(np.array_equal, again.valid.sources, data.valid.sources))


@pytest.mark.parametrize("packed", [None, 24])
@pytest.mark.parametrize("task", [Task.DENOISING, Task.PREFIX_LM])
def test_an_epoch_has_every_text_once(tmp_path, lines, task, packed):
    named = {name: lines[name] for name in ("train_source", "valid_source")} | {"task": task}
    data = prepared(tmp_path, T5, **named, packing=packed, max_source_length=16)
    stop = data.plan.batches_per_epoch
    epoch = list(batches.train_stream(data.train, data.plan, 0, stop, drawn=data.drawn))
    ids = (data.config.source_pad_id, data.config.eos_id)
    sources, targets = (
        np.concatenate([rows[~np.isin(rows, ids)] for rows in side])
        for side in ([batch.source for batch in epoch], [batch.target_out for batch in epoch])
    )
    text = np.concatenate(data.train.sources)
    if task is Task.PREFIX_LM:
        assert np.array_equal(np.sort([*sources, *targets]), np.sort(text))
        assert len(sources) > len(text) / 3 < len(targets)
    else:
        mask = data.tokenizer.vocab_size - 1
        assert np.array_equal(np.sort(targets), np.sort(text)) and mask not in text
        assert 0.5 * len(text) < np.sum(sources != mask) < 0.8 * len(text)


@pytest.mark.parametrize("packed", [None, 24])
def test_each_file_has_its_task(tmp_path, lines, packed):
    """And each task has a validation; a file of weight 2 comes twice."""
    path = lines["train_source"][0]
    other = tmp_path / "other"
    other.write_text("\n".join(f"{i} {i + 1}" for i in range(50)) + "\n")
    named = {"train_source": (path, str(other)), "valid_source": lines["valid_source"]}
    named |= {"train_tasks": (Task.SPAN_CORRUPTION, Task.DENOISING), "train_weights": (1.0, 2.0)}
    data = prepared(tmp_path, T5, **named, vocab_size=400, packing=packed)
    *_, sentinel, mask = range(data.tokenizer.vocab_size)
    assert data.tokenizer.sentinels[0] == sentinel
    turned = options(**named | {"train_tasks": named["train_tasks"][::-1]}, vocab_size=400).data
    sentinels = corpus.train_tokenizer(turned, [], data.config).sentinels
    assert len(sentinels) == len(data.tokenizer.sentinels)
    numbers = np.arange(len(data.train.sources))
    drawn = data.drawn.at(3, numbers, data.train, 0)
    assert np.array_equal(drawn.indices < len(TRAIN), [sentinel in row for row in drawn.sources])
    assert all(mask in source for source in drawn.sources if sentinel not in source)
    assert (drawn.lengths <= data.drawn.lengths(data.train, 0)).all()
    assert list(data.valid_tasks) == ["span-corruption", "denoising"]
    for token, valid in zip((sentinel, mask), data.valid_tasks.values(), strict=True):
        sources = data.valid.take(valid).sources
        assert all(token in source for source in sources)
        assert len(sources) == data.about["valid_pairs"] / 2 > 4
    stop = data.plan.batches_per_epoch
    epoch = list(batches.train_stream(data.train, data.plan, 0, stop, drawn=data.drawn))
    ends = sum((batch.target_out == data.config.eos_id).sum() for batch in epoch)
    assert ends == np.sum(data.train.indices < len(TRAIN)) + 2 * 50


def test_the_built_in_task_is_plain_text_of_both_sides(monkeypatch):
    splits = {"train": [("<2de> one", "eins")], "valid": [("<2de> two", "zwei")]}
    monkeypatch.setattr(phrases, "load", lambda: splits)
    train, valid = corpus.read_text(DataOptions(**DENOISE))
    assert train.pairs == [("<2de> one", ""), ("eins", "")]
    assert valid.pairs == [("<2de> two", ""), ("zwei", "")]
    assert corpus.read_text(DataOptions())[0].pairs == splits["train"]


def test_a_stream_of_packed_batches_goes_on_at_any_step(tmp_path, lines):
    data = prepared(tmp_path, **lines, packing=32)
    count = data.plan.batches_per_epoch
    epochs = list(batches.train_stream(data.train, data.plan, 0, 2 * count))
    later = next(batches.train_stream(data.train, data.plan, count + 1, count + 2))
    assert all(map(np.array_equal, later[:3], epochs[count + 1][:3]))
    assert all(map(np.array_equal, later.segments, epochs[count + 1].segments))
    for epoch in (epochs[:count], epochs[count:]):  # each target once
        ends = sum((batch.target_out == data.config.eos_id).sum() for batch in epoch)
        assert ends == len(TRAIN)
        tokens = sum((batch.segments[1] > 0).sum() for batch in epoch)
        filler = count * data.plan.rows[0] - len(data.plan.packed)
        assert tokens == data.train.lengths[:, 1].sum() + filler


def test_packing_is_refused_before_any_text_is_read(tmp_path, lines, no_training):
    Path(lines["train_source"][0]).write_text("one line\n")
    with pytest.raises(ConfigError, match=r"data\.packing=41 is over the model's max_length=40"):
        prepared(tmp_path, **lines, packing=41)
    with pytest.raises(
        ConfigError, match=r"data\.packing=32: lesson10: its attention sees padding"
    ):
        prepared(tmp_path, dataclasses.replace(MODEL, preset="lesson10"), **lines, packing=32)


def test_all_unreadable_files_are_named_at_once(tmp_path, lines, no_training):
    gone = [lines["train_target"][0], lines["valid_source"][0]]
    for path in gone:
        Path(path).unlink()
    with pytest.raises(InputError) as caught:
        prepared(tmp_path, **lines, tokenizer=str(tmp_path / "absent.json"))
    assert all(path in str(caught.value) for path in (*gone, "absent.json"))


@pytest.mark.parametrize("split", ["train", "valid"])
def test_faults_in_the_text_are_reported_before_the_tokenizer_is_trained(
    tmp_path, lines, no_training, split
):
    path = Path(lines[f"{split}_target"][0])
    good = path.read_bytes()
    for content, message in (
        (good + b"one more\n", r"has \d+ lines"),
        (good.replace(b"\n", b"\xff\n", 1), "line 1 is not valid UTF-8"),
    ):
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            prepared(tmp_path, **lines)
    for name in ("train", "valid"):  # the shorter text is read first
        Path(lines[f"{name}_target"][0]).write_bytes(b"\xff\n")
    with pytest.raises(InputError, match=r"valid\.target: line 1 is not valid"):
        prepared(tmp_path, **lines)


def test_swapped_validation_files_are_refused(tmp_path, lines, no_training, monkeypatch):
    swapped = {"valid_source": lines["valid_target"], "valid_target": lines["valid_source"]}
    turned = TRAIN, [(target, source) for source, target in VALID]
    monkeypatch.setattr(parallel_text, "looks_swapped", lambda *both: both == turned)
    message = "the validation sources are in the language of the training targets"
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, **lines | swapped)


def test_less_than_one_batch_is_refused_with_a_size_that_works(tmp_path):
    files = write_lines(tmp_path, train=TRAIN[:9], valid=VALID)
    message = r"9 training pairs are less than one batch of \d+ rows of 12 tokens; "
    message += r"lower .*tokens_per_batch to 108 "
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, **files, tokens_per_batch=1000, buckets=1)
    assert prepared(tmp_path, **files, tokens_per_batch=108, buckets=1).plan.rows == (9,)
    message = r"less than one batch of 10 rows .* lower devices, 10 now"
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, **files, tokens_per_batch=108, buckets=1, rows_multiple=10)


@pytest.mark.parametrize("name", ["max_source_length", "max_target_length"])
def test_a_maximum_above_the_model_s_is_refused(tmp_path, lines, no_training, name):
    with pytest.raises(ConfigError, match=f"{name}=41 is over the model's max_length=40"):
        prepared(tmp_path, **lines, **{name: 41})
    limits = encoding.limits(DataOptions(**{name: 40}), tiny(max_length=40))
    assert limits == (40, 40)
    message = f"{name}=51 is over the model's positions, which reach 50 tokens$"
    with pytest.raises(ConfigError, match=message):
        encoding.limits(DataOptions(**{name: 51}), tiny("deep_dive", max_length=100))


# Long pairs


@pytest.mark.parametrize(
    ("too_long", "counts", "lengths", "width"),
    [(TooLong.CUT, (2, 2, 62), [40, 20], 40), (TooLong.DROP, (4, 0, 60), [15, 14], 16)],
)
def test_long_pairs_are_dropped_or_cut_and_a_huge_line_changes_nothing_else(
    tmp_path, too_long, counts, lengths, width
):
    train = [*TRAIN, ("7" * 10_000_000, "y"), ("z", "7" * 30)]
    valid = [("7" * 50, "y"), *VALID, ("z", "7" * 30)]
    lines = write_lines(tmp_path, train=train, valid=valid)
    loaded = prepared(tmp_path, **lines, max_target_length=20, too_long=too_long)
    names = ("dropped_long", "cut_long", "train_pairs")
    assert tuple(map(loaded.about.__getitem__, names)) == counts
    assert loaded.valid_pairs == VALID  # references are never cut
    assert loaded.train.lengths.max(axis=0).tolist() == lengths
    assert loaded.plan.widths[-1] == width


# Vocabularies

OUTPUT = dataclasses.replace(MODEL, tying="output")


def test_separate_vocabularies_have_their_own_sizes_and_files(tmp_path, lines):
    separate = {**lines, "vocabularies": Vocabularies.SEPARATE, "vocab_size": 9999}
    loaded = prepared(tmp_path, OUTPUT, **separate)
    assert isinstance(loaded.tokenizer, TokenizerPair) and loaded.config.tying is Tying.OUTPUT
    # the text has no more merges
    source, target, config = loaded.tokenizer.source, loaded.tokenizer.target, loaded.config
    sizes = [source.vocab_size, target.vocab_size]
    assert [config.source_vocab_size, config.target_vocab_size] == sizes
    assert 259 < min(sizes) < max(sizes) < 400
    first = TRAIN[loaded.train.indices[0]]
    assert source.decode(loaded.train.sources[0]) == first[0]
    assert target.decode(loaded.train.targets[0]) == first[1]
    assert len(source.encode("sees")) < len(target.encode("sees"))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    corpus.record(loaded, folder)
    assert {*run_files.SIDE_FILES} <= {path.name for path in folder.path.iterdir()}
    assert load_tokenizer(folder.path).hash == loaded.tokenizer.hash
    with pytest.raises(InputError, match=r"its tokenizer does not fit data\.vocabularies=shared"):
        prepared(tmp_path, **lines)


def test_separate_vocabularies_cannot_be_tied_all(tmp_path, lines, no_training):
    with pytest.raises(ConfigError, match=r"tying=all .* give model\.tying output or none"):
        prepared(tmp_path, **lines, vocabularies=Vocabularies.SEPARATE)


def given_tokenizer(path: Path, pairs: list[tuple[str, str]], **ids: int) -> str:
    text = (line for pair in pairs for line in pair)
    Tokenizer.train(text, 290, **{"pad_id": 5, "bos_id": 7, "eos_id": 3, **ids}).save(path)
    return str(path)


def ids_of(loaded: corpus.Corpus) -> list[int]:
    names = ("source_pad_id", "target_pad_id", "bos_id", "eos_id")
    return [getattr(loaded.config, name) for name in names]


def test_a_given_tokenizer_is_used_unchanged(tmp_path, lines):
    path = given_tokenizer(tmp_path / "mine.json", TRAIN)
    loaded = prepared(tmp_path, **lines, tokenizer=path, vocab_size=999)
    config = loaded.config
    assert loaded.tokenizer.hash == Tokenizer.load(path).hash
    assert (config.source_vocab_size, config.target_vocab_size) == (290, 290)
    assert ids_of(loaded) == [5, 5, 7, 3] and loaded.train.ids == (5, 3, 5, 7, 3)


def test_two_given_tokenizers_give_each_side_its_ids(tmp_path, lines):
    own = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    tokenizers = {
        "tokenizer": given_tokenizer(tmp_path / "s.json", TRAIN),
        "target_tokenizer": given_tokenizer(tmp_path / "t.json", VALID, **own),
    }
    loaded = prepared(tmp_path, OUTPUT, **lines, vocabularies=Vocabularies.SEPARATE, **tokenizers)
    assert ids_of(loaded) == [5, 0, 1, 2] and loaded.train.ids == (5, 3, 0, 1, 2)
    assert loaded.config.source_vocab_size == 290
    assert loaded.config.target_vocab_size == loaded.tokenizer.target.vocab_size


# Resuming


@pytest.fixture
def recorded(tmp_path, lines) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    corpus.record(prepared(tmp_path, **lines), folder)
    return folder


def test_a_resumed_run_uses_its_own_tokenizer(tmp_path, lines, recorded, no_training):
    again = prepared(tmp_path, **lines)
    assert corpus.changes(again, recorded) == []
    before = {path.name: path.read_bytes() for path in recorded.path.iterdir()}
    corpus.record(again, recorded)
    assert before == {path.name: path.read_bytes() for path in recorded.path.iterdir()}
    assert set(before) == {"config.json", "data.json", "tokenizer.json"}
    recorded.data.unlink()  # it was written last: without it the tokenizer may be another text's
    with pytest.raises(AssertionError, match="the tokenizer is being trained"):
        prepared(tmp_path, **lines)
    recorded.data.touch()
    recorded.path.joinpath("tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"run/tokenizer\.json: missing"):
        prepared(tmp_path, **lines)


def test_every_entry_of_the_record_is_compared(tmp_path, lines, recorded):
    """One that differs and one that is missing; version 0.1 has no order."""
    again, before = prepared(tmp_path, **lines), json.loads(recorded.data.read_text())
    for name in again.about:
        others = {key: value for key, value in before.items() if key != name}
        for changed, shown in ((others | {name: -1}, "-1"), (others, "None")):
            recorded.data.write_text(json.dumps(changed))
            named = [reason.partition(" -> ")[0] for reason in corpus.changes(again, recorded)]
            assert named == ([] if (name, shown) == ("order", "None") else [f"{name} ({shown}"])


def test_other_data_are_named_and_refused(tmp_path, lines, recorded):
    again = prepared(tmp_path, **{**lines, **write_lines(tmp_path, train=TRAIN[:-1])})
    changed = corpus.changes(again, recorded)
    assert "train_pairs (60 -> 59)" in changed
    assert any(reason.startswith("train_sha256 (") for reason in changed)
    assert not any("valid" in reason or "tokenizer" in reason for reason in changed)
    message = r"the data changed since this run began \(.*train_sha256"
    with pytest.raises(ConfigError, match=message):
        corpus.check(again, recorded)


def test_another_tokenizer_is_named(tmp_path, lines):
    path = given_tokenizer(tmp_path / "mine.json", TRAIN)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    corpus.record(prepared(tmp_path, **lines, tokenizer=path), folder)
    assert corpus.changes(prepared(tmp_path, **lines, tokenizer=path), folder) == []
    shutil.copy(given_tokenizer(tmp_path / "other.json", TRAIN[:5]), path)
    changed = corpus.changes(prepared(tmp_path, **lines, tokenizer=path), folder)
    assert changed[0].startswith("tokenizer_sha256 (")
    assert not any("_pairs" in reason for reason in changed)


@pytest.mark.parametrize("content", ["", "{", "[1]", "5"])
def test_a_damaged_record_is_named(tmp_path, lines, recorded, content):
    again = prepared(tmp_path, **lines)
    recorded.data.write_text(content)
    with pytest.raises(InputError, match=r"data\.json: damaged"):
        corpus.changes(again, recorded)
    with pytest.raises(InputError, match=r"data\.json: damaged"):
        prepared(tmp_path, **lines)


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_a_run_keeps_its_rows_if_they_divide_over_other_devices(tmp_path, lines, fsdp, tensor):
    def on(devices: int, folder: Path = tmp_path) -> corpus.Corpus:
        chosen = dataclasses.replace(options(**lines), mesh=MeshOptions(fsdp, tensor))
        return corpus.prepare(chosen, RunFolder(folder / "run"), lambda: devices // tensor)

    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    six = on(6 * tensor)
    corpus.record(six, folder)
    for devices in (n for n in (1, 2, 3, 6) if n % fsdp == 0):
        again = on(devices * tensor)
        assert again.plan.rows == six.plan.rows and corpus.changes(again, folder) == []
    assert on(fsdp * tensor, tmp_path / "new").plan.rows != six.plan.rows
    many = 10 * tensor
    message = rf"run: {many} devices cannot share .* with --devices {6 * tensor}, or give"
    with pytest.raises(ConfigError, match=message):
        on(many)


@pytest.mark.parametrize("rows", [[], [6], ["6", "6"], [6, 0], None, "66"])
def test_rows_of_a_damaged_record_are_ignored(tmp_path, lines, recorded, rows):
    expected = prepared(tmp_path / "new", **lines).plan.rows
    recorded.data.write_text(json.dumps({**json.loads(recorded.data.read_text()), "rows": rows}))
    again = prepared(tmp_path, **lines)
    assert again.plan.rows == expected and corpus.changes(again, recorded)[0].startswith("rows (")


# The first lines of a run


@pytest.mark.parametrize("task", [Task.SPAN_CORRUPTION, Task.PREFIX_LM])
def test_the_fill_of_shorter_texts_is_a_bound(tmp_path, lines, task):
    named = {name: lines[name] for name in ("train_source", "valid_source")}
    chosen = options(T5, **named, task=task, vocab_size=400)
    data, folder = prepared(tmp_path, T5, **named, task=task, vocab_size=400), RunFolder(tmp_path)
    shown = next(line for line in recipe.introduction(chosen, data, folder, 0) if "full" in line)
    assert ("at most" in shown) == (task is Task.PREFIX_LM)


def test_a_vocabulary_or_warm_up_that_is_not_reached_is_named(tmp_path, lines):
    def warnings(optimizer: OptimizerOptions, **data) -> list[str]:
        chosen = dataclasses.replace(options(**data), steps=20, optimizer=optimizer)
        folder = RunFolder(tmp_path / "run")
        corpus_of_run = corpus.prepare(chosen, folder)
        introduction = recipe.introduction(chosen, corpus_of_run, folder, 0)
        return [line for line in introduction if line.startswith("warning: ")]

    short = OptimizerOptions(learning_rate=0.5, warmup_steps=19)
    size = corpus.prepare(options(**lines, vocab_size=100_000), RunFolder(tmp_path)).config
    assert warnings(OptimizerOptions(warmup_steps=20), **lines, vocab_size=100_000) == [
        "warning: data.vocab_size=100000 is not reached: the training text yields a vocabulary of "
        f"{size.source_vocab_size}",
        "warning: the learning rate never reaches 0.003: optimizer.warmup_steps=20 are not fewer "
        "than steps=20",
    ]
    assert warnings(short, **lines, vocab_size=size.source_vocab_size) == []
