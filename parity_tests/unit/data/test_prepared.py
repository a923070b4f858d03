"""A prepared corpus gives the batches of the same text in memory, also after a kill; what does not
fit is refused."""

import copy
import dataclasses
import errno
import itertools
import json
import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_transformer import cli
from jax_transformer.config import TransformerConfig, Tying
from jax_transformer.data import batches, encoding, parallel_text, prepared
from jax_transformer.data.options import OF_TRAINING, DataOptions, Task, TooLong, Vocabularies
from jax_transformer.data.prepared import IndexedPairs, Prepared, PreparedPairs
from jax_transformer.data.tokenizer import TokenizerPair
from jax_transformer.errors import ConfigError, InputError, LockedError, Refusal
from jax_transformer.runtime import distributed
from jax_transformer.storage import run_files, run_folder
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, preparation, recipe
from jax_transformer.training.options import ModelOptions, TrainOptions
from parity_tests.unit import helpers, runs

WORDS = "the a red blue cat dog house sees and 12 eats".split()
RANDOM = np.random.default_rng(0)
PAIRS = [
    (" ".join(RANDOM.choice(WORDS, n)), " ".join(RANDOM.choice(WORDS, m)).upper())
    for n, m in RANDOM.integers(1, 14, (90, 2))
]
LONG = [("cat " * 90, "X " * 90)] * 2 + [("cat " * 90, "cat " * 90)]
PAIRS[7], PAIRS[40] = ("", "LEER"), ("the " * 60, "DIE " * 60)
SMALL = {"vocab_size": 300, "tokens_per_batch": 64, "buckets": 3}


def tsv(path: Path, pairs) -> str:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return str(path)


@pytest.fixture
def text(tmp_path) -> dict[str, tuple[str, ...]]:
    """Two training files and one of validation."""
    cut = 52
    train = (tsv(tmp_path / "a.tsv", PAIRS[:cut]), tsv(tmp_path / "b.tsv", PAIRS[cut:]))
    return {"train": train, "valid": (tsv(tmp_path / "valid.tsv", PAIRS[:5]),)}


@pytest.fixture(autouse=True)
def shards_of_20_lines(monkeypatch):
    monkeypatch.setattr(preparation, "BLOCK", 20)


def options(**data) -> TrainOptions:
    return TrainOptions(
        model=ModelOptions(tying=Tying.OUTPUT, max_length=60), data=DataOptions(**data), seed=3
    )


def prepare(folder: Path, processes: int = 1, **data):
    return preparation.prepare(options(**data), folder / "corpus", processes)


def read(folder: Path, **data) -> corpus.Corpus:
    return corpus.prepare(options(**data), RunFolder(folder / "run"))


def from_folder(folder: Path, **data) -> corpus.Corpus:
    return read(folder, prepared=str(folder / "corpus"), **data)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


CASES = {
    "two files": {},
    "weights of files": {"train_weights": (2.0, 0.5)},
    "a temperature": {"train_temperature": 3.0},
    "two vocabularies, cut": {"vocabularies": Vocabularies.SEPARATE, "too_long": TooLong.CUT},
}
OF_THE_TEXT = {"vocab_size", "max_source_length", "max_target_length"}


def both(tmp_path, text: dict, chosen: dict) -> tuple[corpus.Corpus, corpus.Corpus]:
    """The same text in memory and prepared."""
    chosen = SMALL | chosen
    prepare(tmp_path, **text, **{k: v for k, v in chosen.items() if k not in OF_TRAINING})
    training = {name: value for name, value in chosen.items() if name not in OF_THE_TEXT}
    return read(tmp_path, **text, **chosen), from_folder(tmp_path, **training)


def assert_equal_batches(memory: corpus.Corpus, disk: corpus.Corpus) -> None:
    assert disk.tokenizer.hash == memory.tokenizer.hash and disk.config == memory.config
    differ = {name for name in memory.about if memory.about[name] != disk.about[name]}
    assert differ == {"train_sha256"} and memory.about.keys() == disk.about.keys()
    assert isinstance(disk.train, PreparedPairs | IndexedPairs)
    assert memory.about["train_pairs"] > 60
    count = 2 * memory.plan.batches_per_epoch
    assert count > batches.WINDOW or memory.plan.packed
    streams = (
        batches.train_stream(each.train, each.plan, 0, count, drawn=each.drawn)
        for each in (memory, disk)
    )
    for one, other in zip(*streams, strict=True):
        assert all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))
    assert list(map(list, memory.valid.sources)) == list(map(list, disk.valid.sources))
    assert list(map(list, memory.valid.targets)) == list(map(list, disk.valid.targets))
    assert memory.valid_pairs == disk.valid_pairs


@pytest.mark.parametrize("case", CASES)
def test_batches_are_those_of_the_text_in_memory(case, tmp_path, text):
    assert_equal_batches(*both(tmp_path, text, CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_packed_batches_are_those_of_the_text_in_memory(case, tmp_path, text):
    memory, disk = both(tmp_path, text, CASES[case] | {"packing": 60})
    assert_equal_batches(memory, disk)
    assert isinstance(disk.train._records, np.memmap)
    packed, once = disk.plan.packed, not disk.plan.weights
    assert memory.plan.packed is not None and len(packed) < 60
    for epoch in range(2):
        pairs = np.concatenate(packed.pairs(np.arange(len(packed)), 3, epoch))
        assert sorted(pairs.tolist()) == list(range(memory.about["train_pairs"]))
        read = disk.train.take(pairs)
        assert all(map(np.array_equal, read.sources, memory.train.take(pairs).sources))
        assert once == (len(packed.parts) == 1)


def test_the_longest_pair_may_be_as_long_as_a_row(tmp_path, text):
    _, disk = both(tmp_path, text, {})
    longest = int(disk.plan.table.longest.max())
    assert longest > 32
    more = {"tokens_per_batch": 64, "buckets": 3}
    exact = from_folder(tmp_path, packing=longest, **more)
    assert_equal_batches(read(tmp_path, **text, packing=longest, vocab_size=300, **more), exact)
    assert max(exact.plan.packed.widths) == longest
    message = f"data.packing={longest - 1} is under the longest pair, {longest} tokens"
    assert message in refusal(lambda: from_folder(tmp_path, packing=longest - 1, **more))


def pairs_of(plan: batches.BatchPlan, step: int) -> np.ndarray:
    indices = plan.batch_indices(step)[1]
    if plan.packed is None:
        return indices
    return np.concatenate(plan.packed.pairs(indices, plan.seed, step // plan.batches_per_epoch))


@pytest.mark.parametrize("packing", [None, 60])
def test_any_number_of_processes_reads_its_rows_of_the_same_batches(tmp_path, text, packing):
    """1, then 2, 4 and 1, which begin at steps of their own."""
    _, disk = both(tmp_path, text, {"packing": packing, "tokens_per_batch": 256})
    plan, ends = disk.plan, (0, 5, 11, batches.WINDOW + 14, batches.WINDOW + 21)
    complete = list(batches.train_stream(disk.train, plan, 0, ends[-1]))

    def share(i: int, count: int, rows: int) -> np.ndarray:
        return np.array_split(np.arange(rows), count)[i]

    class Counted:
        def take(self, numbers):
            read.extend(numbers.tolist())
            return disk.train.take(numbers)

    for count, steps in zip((1, 2, 4, 1), itertools.pairwise(ends), strict=True):
        read: list[int] = []
        rows = [partial(share, i, count) for i in range(count)]
        streams = [batches.train_stream(Counted(), plan, *steps, local_rows=own) for own in rows]
        for batch, *parts in zip(complete[slice(*steps)], *streams, strict=True):
            for array, *own in zip(*map(jax.tree.leaves, (batch, *parts)), strict=True):
                joined = [part[of(len(part))] for part, of in zip(own, rows, strict=True)]
                assert np.array_equal(np.concatenate(joined), array)
        expected = np.concatenate([pairs_of(plan, step) for step in range(*steps)])
        assert sorted(read) == sorted(expected.tolist())


def test_a_run_prepares_its_text_first(tmp_path, text, monkeypatch, capsys):
    alone = prepare(tmp_path / "alone", **text, vocab_size=300)
    folder, run = tmp_path / "corpus", str(tmp_path / "run")

    def train(steps: int, **data) -> str:
        model = ModelOptions(tying=Tying.OUTPUT, max_length=60, d_model=8, num_heads=2, d_ff=8)
        data = SMALL | text | {"packing": 60, "buckets": 1} | data
        named = DataOptions(prepared=str(folder), **data)
        with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):  # as Optax needs
            recipe.train(TrainOptions(run=run, steps=steps, model=model, data=named, seed=3))
        return capsys.readouterr().err

    with monkeypatch.context() as several:
        several.setattr(distributed, "count", lambda: 2)
        complete = partial(preparation.complete, options(**text), folder)
        assert f"{folder} is not complete: prepare it first, in one" in refusal(complete)
    assert f"{folder}: {alone.total('pairs')} pairs, " in train(1)
    assert files(folder) == files(tmp_path / "alone/corpus")
    for paths in text.values():
        for path in paths:
            Path(path).unlink()
    error = train(2)
    assert f"{folder} is complete: the text is not read again\n" in error
    assert "continuing at step 1\n" in error
    assert "was begun with another vocab_size" in refusal(partial(train, 2, vocab_size=301))


def test_text_to_prepare_has_its_options_and_training_the_others():
    named = {"train_source": ("a",), "train_target": ("b",)}
    named |= {"valid_source": ("c",), "valid_target": ("d",)}
    of_both, of_text = {"max_source_length": 9}, {"vocab_size": 50, "tokenizer": "t"}
    of_training = {"packing": 16, "train_weights": (2.0,), "tokens_per_batch": 64, "buckets": 2}
    assert {*of_training, "train_temperature"} == {*OF_TRAINING}
    every = DataOptions(prepared="p", **named, **of_both, **of_text, **of_training)
    text = DataOptions(**named, **of_both, **of_text)
    assert every.parted() == (text, DataOptions(prepared="p", **of_both, **of_training))
    assert text.parted() == (None, text)
    for data, message in (
        (named | {"bpe_dropout": 0.1}, "data.bpe_dropout=0.1 has no meaning with data.prepared"),
        (named | {"valid_source": ()}, "not given: data.valid_source"),
        (named | {"valid": ("e.tsv",)}, "text comes from one place"),
        (named | {"dataset": "e"}, "text comes from one place"),
    ):
        assert message in refusal(lambda data=data: DataOptions(prepared="p", **data))


def test_a_run_does_not_warn_of_the_vocabulary_that_was_prepared(tmp_path, text):
    prepare(tmp_path, **text, vocab_size=300)
    chosen = options(prepared=str(tmp_path / "corpus"))
    assert chosen.data.vocab_size > 300
    folder = RunFolder(tmp_path / "run")
    lines = recipe.introduction(chosen, corpus.prepare(chosen, folder), folder, 0)
    assert not any("vocab_size" in line for line in lines)


@pytest.mark.parametrize("packing", [None, 24])
@pytest.mark.parametrize("task", [task for task in Task if task is not Task.TRANSLATION])
def test_texts_of_a_task_are_those_in_memory(tmp_path, task, packing):
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(source for source, _ in PAIRS[8:] * 2))
    text = {"train_source": (str(lines),), "valid_source": (str(lines),)}
    noise = {"noise_density": 0.4, "mean_noise_span_length": 2.0} if task.noisy else {}
    chosen = {"task": task, "vocab_size": 400, "max_source_length": 12, "packing": packing} | noise
    chosen |= {"max_target_length": 24} if packing else {}
    memory, disk = both(tmp_path, text, chosen)
    assert memory.plan.target_widths == disk.plan.target_widths
    assert_equal_batches(memory, disk)
    if noise:
        with pytest.raises(ConfigError, match=r"--data.noise-density 0\.4 \(not 0\.\d+\)"):
            from_folder(tmp_path, task=task, mean_noise_span_length=2.0)


def test_the_command_prepares_with_its_own_options(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(preparation, "prepare", lambda *call: calls.append(call))
    monkeypatch.setattr(preparation, "summary", lambda _: ["a", "b"])
    text = ["--data.train", "a.tsv", "--data.valid", "b.tsv"]
    for more in (["--processes", "3"], ["--preset", "lesson10"], ["--init", "before"]):
        assert cli.main(["prepare", "corpora/de-en", *text, *more]) == 0
        assert capsys.readouterr().out == "corpora/de-en: a; b\n"
    of_text = TrainOptions(data=DataOptions(train=("a.tsv",), valid=("b.tsv",)))
    of_preset = dataclasses.replace(of_text, model=ModelOptions(preset="lesson10"))
    of_init = TrainOptions(init="before", data=of_text.data)
    folder = Path("corpora/de-en")
    assert calls == [(of_text, folder, 3), (of_preset, folder, 0), (of_init, folder, 0)]


def test_tokens_are_wide_where_a_number_of_a_record_would_not_fit(tmp_path, text, monkeypatch):
    for most, wide in ((2**15 - 1, False), (2**15, True)):
        long = ModelOptions(max_length=most)
        chosen = dataclasses.replace(options(**text, vocab_size=300), model=long)
        assert preparation.prepare(chosen, tmp_path / str(most), 1).wide == wide
    sizes = [prepared._record_dtype(count).itemsize for count in (1, 2**32, 2**32 + 1)]
    assert sizes == [4, 4, 8]
    most = [np.iinfo(prepared.token_dtype(wide)).max for wide in (False, True)]
    assert most == [2**16 - 1, 2**32 - 1]
    for side, size in itertools.product(("source", "target"), (2**16 - 1, 2**16)):
        words = encoding.load_tokenizer(tmp_path / str(2**15))
        words = TokenizerPair(copy.copy(words), copy.copy(words))
        getattr(words, side).vocab_size = size
        monkeypatch.setattr(preparation, "_tokenizer", lambda *_, words=words: (words, (40, 40)))
        manifest = preparation.prepare(options(**text), tmp_path / f"{side} {size}", 1)
        assert manifest.wide == (size == 2**16)


def test_two_files_of_lines_are_read_together(tmp_path, text):
    sides = []
    for i, name in enumerate(("source", "target")):
        (tmp_path / name).write_text("\n".join(pair[i] for pair in PAIRS) + "\n")
        sides.append((str(tmp_path / name),))
    valid = dict(zip(("valid_source", "valid_target"), sides, strict=True))
    lines = dict(zip(("train_source", "train_target"), sides, strict=True)) | valid
    assert_equal_batches(*both(tmp_path, lines, {}))


def test_parquet_is_prepared_as_it_is_read(tmp_path, text):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"de": [pair[0] for pair in PAIRS], "en": [pair[1] for pair in PAIRS]})
    parquet.write_table(table, path, row_group_size=33)
    text = text | {"train": (str(path), text["train"][1]), "target_field": "en"}
    memory, disk = both(tmp_path, text | {"source_field": "de"}, {})
    assert_equal_batches(memory, disk)
    assert [shard.part for shard in Prepared.open(str(tmp_path / "corpus")).manifest.shards] == [
        *[0] * 5,
        *[1] * 2,
    ]


def test_a_run_to_train_further_gives_tokenizer_and_limits(trained, tmp_path, text):
    """``--init`` of both commands: the same batches as of text in memory."""
    before, folder = trained.path, tmp_path / "corpus"
    named = ["--data.train", *text["train"], "--data.valid", *text["valid"]]
    assert runs.main("prepare", folder, "--init", before, "--processes", "1", *named) == 0
    of_both = {"tokens_per_batch": 64}
    model = ModelOptions(scan_layers=True)
    options = TrainOptions(init=str(before), model=model, data=DataOptions(**text, **of_both))
    prepared = DataOptions(prepared=str(folder), **of_both)
    run = RunFolder(tmp_path / "run")
    memory = corpus.prepare(options, run)
    disk = corpus.prepare(dataclasses.replace(options, data=prepared), run)
    assert disk.init_source is not None and memory.about["dropped_long"] > 1
    run.path.mkdir()
    corpus.record(memory, run)
    recorded = TransformerConfig.from_json(run.config.read_text())
    assert memory.config.scan_layers and recorded == memory.config.portable
    run = RunFolder(tmp_path / "another")
    prepare(tmp_path / "other", **text, vocab_size=300)
    others = dataclasses.replace(options, data=DataOptions(prepared=f"{tmp_path}/other/corpus"))
    with pytest.raises(ConfigError, match=r"corpus was prepared with another tokenizer$"):
        corpus.prepare(others, run)
    assert (
        disk.about["tokenizer_sha256"]
        == json.loads(RunFolder(before).data.read_text())["tokenizer_sha256"]
    )
    assert_equal_batches(memory, disk)


def test_a_shard_may_be_empty(tmp_path, text):
    blank = (*text["train"], tsv(tmp_path / "c.tsv", [("", "X")] * 40 + PAIRS[:30]))
    assert_equal_batches(*both(tmp_path, dict(text, train=blank), {}))


def test_a_tokenizer_learns_from_the_first_pairs_of_each_file_in_equal_shares(
    tmp_path, text, monkeypatch
):
    samples, train = [], corpus.train_tokenizer

    def recorded(data: DataOptions, pairs: list, model: TransformerConfig):
        samples.append(pairs)
        return train(data, pairs, model)

    monkeypatch.setattr(preparation, "SAMPLE", 20)
    monkeypatch.setattr(corpus, "train_tokenizer", recorded)
    prepare(tmp_path, **text, vocab_size=300)
    assert samples == [[*PAIRS[:7], *PAIRS[8:10], *PAIRS[52:62]]]  # without the empty one


def test_the_manifest_counts_what_was_dropped(tmp_path, text):
    manifest = prepare(tmp_path, **text, vocab_size=300)
    assert [shard.part for shard in manifest.shards] == [0, 0, 0, 1, 1]
    first, second = preparation.summary(manifest)
    assert re.fullmatch(r"88 pairs, [\d,]+ tokens in 5 shards, [\d,]+ bytes", first)
    assert second == "dropped: 1 with an empty side, 1 too long; cut: 0 too long"
    data = from_folder(tmp_path, **{"tokens_per_batch": 64})
    assert (data.about["dropped_empty"], data.about["dropped_long"]) == (1, 1)
    lengths = data.train.take(np.arange(88)).lengths
    assert f" {lengths.sum():,} tokens" in first
    table, order = batches.LengthTable.of(lengths)
    assert order.tolist() == list(range(88))
    assert data.train.take(np.zeros(0, np.int64)).sources == []
    for name in ("counts", "tokens", "longest"):
        assert np.array_equal(getattr(table, name), getattr(data.plan.table, name))


def test_a_preparation_that_was_killed_goes_on_and_makes_the_same_files(
    tmp_path, text, monkeypatch
):
    expected = prepare(tmp_path / "a", **text, vocab_size=300)
    begun, encode = [], preparation.Encoder.__call__

    def killed(self, block):
        begun.append(block.name)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return encode(self, block)

    monkeypatch.setattr(preparation.Encoder, "__call__", killed)
    (tmp_path / "b").mkdir()
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path / "b", **text, vocab_size=300)
    folder = tmp_path / "b/corpus"
    with pytest.raises(InputError, match=r"not a corpus .* completed: manifest.json: No such file"):
        Prepared.open(str(folder))
    damaged = folder / "train-00000.array_record"
    damaged.write_bytes(damaged.read_bytes().replace(b"\0", b"\1"))
    lengths = folder / "train-00001.lengths"
    lengths.write_bytes(bytes(lengths.stat().st_size))
    assert prepare(tmp_path / "b", **text, vocab_size=300) == expected
    numbers = [int(re.search(r"\d+", name)[0]) for name in begun]
    assert numbers == [0, 1, 2, 0, 1, 2, 3, 4]
    assert files(folder) == files(tmp_path / "a/corpus")


def test_what_a_killed_process_left_is_removed_and_a_second_one_is_refused(tmp_path, text):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / ".train-00000.array_record.4711").write_bytes(b"unfinished")
    with run_folder.lock(folder), pytest.raises(LockedError, match="corpus is in use by process"):
        prepare(tmp_path, **text, vocab_size=300)
    prepare(tmp_path, **text, vocab_size=300)
    assert [name for name in files(folder) if name.startswith(".")] == [".lock"]


def test_several_processes_make_the_same_files(tmp_path, text):
    prepare(tmp_path / "a", **text, vocab_size=300)
    prepare(tmp_path / "b", 2, **text, vocab_size=300)
    assert files(tmp_path / "a/corpus") == files(tmp_path / "b/corpus")


def refusal(call) -> str:
    with pytest.raises(Refusal) as caught:
        call()
    assert isinstance(caught.value, ConfigError | InputError) and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_a_preparation_is_refused(tmp_path, text):
    prepare(tmp_path, **text, vocab_size=300)
    again = dict(text, vocab_size=300)
    for other in ({"too_long": TooLong.CUT}, {"vocab_size": 400}):
        message = refusal(lambda chosen=again | other: prepare(tmp_path, **chosen))
        assert f"corpus was begun with another {next(iter(other))} (options.json)" in message
    other = dataclasses.replace(options(**again), model=ModelOptions(preset="lesson10_repaired"))
    message = refusal(lambda: preparation.prepare(other, tmp_path / "corpus", 1))
    assert "was begun with another" in message and "preset" in message
    tsv(Path(text["train"][1]), [*PAIRS[52:-1], ("cat", "HUND")])
    changed = refusal(lambda: prepare(tmp_path, **again))
    assert "train-00004.array_record: its lines have changed since it was made" in changed

    def moved(at: int) -> None:
        """Prepare two files of the same 60 lines, of which the first has so many."""
        parts = {"one.tsv": PAIRS[:at], "two.tsv": PAIRS[at:60]}.items()
        chosen = dict(again, train=tuple(tsv(tmp_path / name, part) for name, part in parts))
        preparation.prepare(options(**chosen), tmp_path / "moved", 1)

    moved(40)
    assert "train-00001.array_record: its lines have changed" in refusal(lambda: moved(20))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    full = lambda: preparation.prepare(options(**again), tmp_path / "full", 1)  # noqa: E731
    assert "is not empty: it holds file" in refusal(full)
    words, killed = encoding.load_tokenizer(tmp_path / "corpus"), tmp_path / "killed"
    killed.mkdir()  # it was killed while it saved its tokenizer
    for name in ("tokenizer.json", *run_files.SIDE_FILES, run_files.LANGUAGES_FILE, "huggingface"):
        (killed / name).touch()
    preparation._begin(killed, words, {})
    (killed / "options.json").write_text("[1]")
    assert "killed/options.json: " in refusal(partial(preparation._begin, killed, words, {}))
    fresh = itertools.count()

    def of(**data) -> str:
        folder = tmp_path / f"fresh{next(fresh)}"
        return refusal(lambda: preparation.prepare(options(**data), folder, 1))

    assert "prepare reads files" in of()
    for name, value in (("packing", 16), ("bpe_dropout", 0.1)):
        assert of(**again, **{name: value}) == f"data.{name}={value} is an option of train"
    (bad := tmp_path / "bad.tsv").write_text("a\tA\n" * 44 + "no tab\n")
    named = dict(text, train=(str(bad),), tokenizer=str(tmp_path / "corpus/tokenizer.json"))
    assert "bad.tsv: line 45 has 0 tabs" in of(**named)
    same = dict(again, train=(tsv(tmp_path / "same.tsv", [("cat", "cat")]),))
    assert "have the same content" in of(**same)
    empty = dict(again, train=(tsv(tmp_path / "empty.tsv", [("cat", ""), ("", "X")]),))
    assert "has an empty side; nothing is left" in of(**empty)
    longer = dict(again, train=(tsv(tmp_path / "longer.tsv", LONG),))
    assert "none of the 3 pairs is within max_length=20 tokens" in of(
        **longer, max_source_length=20, max_target_length=20
    )


def test_swapped_validation_files_are_refused_by_the_first_lines(tmp_path, text, monkeypatch):
    asked: list[tuple] = []
    monkeypatch.setattr(parallel_text, "looks_swapped", lambda *both: asked.append(both))
    prepare(tmp_path, **text, vocab_size=300)
    assert asked == [(PAIRS[:7] + PAIRS[8:20], PAIRS[:5])]
    monkeypatch.setattr(parallel_text, "looks_swapped", lambda *_: True)
    swapped = refusal(partial(prepare, tmp_path / "other", **text, vocab_size=300))
    assert "the validation sources are in the language of the training targets" in swapped


def test_what_does_not_fit_a_run_is_refused(tmp_path, text):
    prepare(tmp_path, **text, vocab_size=300)
    folder = tmp_path / "corpus"

    def of(**data) -> str:
        return refusal(lambda: from_folder(tmp_path, **data))

    assert "has no meaning with data.prepared" in of(vocab_size=500)
    assert "was prepared with --data.too-long drop (not cut)" in of(too_long=TooLong.CUT)
    assert "--data.max-source-length 60 (not 20)" in of(max_source_length=20)
    for weights in ((1.0,), (1.0, 2.0, 3.0)):
        assert f"{len(weights)} weights, and " in of(train_weights=weights)
    one = tmp_path / "one"
    prepare(one, vocab_size=300, train=text["train"][:1], valid=text["valid"])
    several = partial(from_folder, one, train_temperature=2.0)
    assert "data.train_temperature=2.0 needs several training files, and " in refusal(several)
    small = dataclasses.replace(options(prepared=str(folder)), model=ModelOptions(max_length=16))
    assert "over the model's max_length=16" in refusal(
        lambda: corpus.prepare(small, RunFolder(tmp_path / "run"))
    )
    shard = folder / "train-00002.array_record"
    content = shard.read_bytes()
    shard.write_bytes(content[:-3])
    assert f"{shard}: {len(content) - 3:,} bytes long, and was {len(content):,}" in of()
    shard.unlink()
    assert f"{shard}: missing, and was" in of()
    middle = len(content) // 2
    shard.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    pairs = Prepared.open(str(folder)).train(by_part=False)
    assert f"{shard}: cannot be read" in refusal(lambda: pairs.take(np.arange(88)))
    shard.write_bytes(content)
    valid = folder / "valid.jsonl"
    valid.write_text(valid.read_text() + '["cat", "HUND"]\n')
    assert f"{valid}: missing, or changed" in of()
    valid.unlink()
    assert f"{valid}: missing, or changed" in of()
    manifest = folder / "manifest.json"
    known = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(known | {"other": 1}))
    assert f"{manifest}: unknown key 'other'" in of()
    manifest.write_text(json.dumps(known | {"tokenizer_sha256": "0"}))
    assert "its tokenizer has changed" in of()


def test_an_index_that_does_not_fit_is_refused(tmp_path, text):
    prepare(tmp_path, **text, vocab_size=300)
    folder = tmp_path / "corpus"
    index, manifest = folder / "train.index", folder / "manifest.json"
    content, known = index.read_bytes(), json.loads(manifest.read_text())
    pairs = from_folder(tmp_path, packing=60).train
    assert pairs._records.dtype.itemsize == 4
    begin = known["index"]["cells"] * 32
    assert len(content) == begin + 4 * len(pairs.pairs) == known["index"]["size"]
    for record in (87, 88):  # of another kind, and none
        index.write_bytes(content[:begin] + record.to_bytes(4, "little") + content[begin + 4 :])
        damaged = refusal(lambda: from_folder(tmp_path, packing=60).train.take(np.arange(1)))
        assert damaged == f"{index}: damaged; prepare the corpus again"
    for change in (lambda: index.write_bytes(content[:-1]), index.unlink):
        change()
        size = f"{len(content):,} bytes as when prepared"
        assert f"{index}: missing, or not {size}" in refusal(lambda: from_folder(tmp_path))
    manifest.write_text(json.dumps(known | {"index": None}))
    from_folder(tmp_path)
    assert "corpus was prepared without train.index, which data.packing needs" in refusal(
        lambda: from_folder(tmp_path, packing=60)
    )


def test_a_full_disk_is_reported_with_the_name_of_the_shard(tmp_path, text):
    folder, chosen = tmp_path / "corpus", options(**text)
    preparation.prepare(chosen, folder, 1)
    shard = next(folder.glob("*.array_record"))
    room = shard.stat().st_size // 2
    for name in (shard, shard.with_suffix(".json"), folder / prepared.MANIFEST):
        name.unlink()
    with helpers.largest_file(room), pytest.raises(OSError, match="File too large") as error:
        preparation.prepare(chosen, folder, 1)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(shard))
