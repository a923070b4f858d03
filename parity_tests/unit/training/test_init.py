"""A run that starts from another: what is copied, what may change, and that it reads once."""

import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from jax_transformer import cli, convert, transformer
from jax_transformer.cli.train import TrainCommand
from jax_transformer.config import RATES, codec
from jax_transformer.data.huggingface_tokenizer import load_huggingface
from jax_transformer.data.options import DataOptions
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry
from jax_transformer.formats.base import Pretrained
from jax_transformer.generate.generation_config import Constraints, GenerationConfig
from jax_transformer.storage import run_files
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import init_source
from jax_transformer.training.optimizer import ADAPTERS, FINE_TUNING, FROM_SCRATCH, Schedule
from jax_transformer.training.options import ModelOptions, Precision, TrainOptions, read_options
from parity_tests import tokenizer_models
from parity_tests.unit import helpers, runs

OPTIONS = [
    *"--data.buckets 1 --data.tokens-per-batch 128".split(),
    *"--optimizer.learning-rate 1e-3 --optimizer.warmup-steps 1".split(),
    *"--model.dropout 0.3 --steps 20 --eval-every 10 --log-every 1 --eval-pairs 4".split(),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    return runs.write_text(tmp_path_factory.mktemp("more"))


@pytest.fixture(scope="module")
def tuned(trained, text, tmp_path_factory) -> tuple[Path, list[str]]:
    """A run from a copy of that run, and its arguments."""
    folder = tmp_path_factory.mktemp("tuned")
    shutil.copytree(trained.path, folder / "before")
    arguments = ["--init", str(folder / "before"), *text, *OPTIONS]
    result = runs.train("--run", folder / "run", *arguments)
    assert result.code == 0, result.err
    return folder / "run", arguments


def options(init: Path, **more) -> TrainOptions:
    return TrainOptions(init=str(init), **more)


def source_of(init: Path, folder: Path, **more) -> init_source.InitSource:
    """Return the model and tokenizer that the run in a folder begins with."""
    return init_source.find(options(init, **more), RunFolder(folder))


def test_init_copies_weights_configuration_and_tokenizer(trained, tmp_path):
    source = source_of(trained.path, tmp_path, model=ModelOptions(dropout=0.25))
    model = registry.open(trained.path).model()
    expected = {name: np.asarray(x) for name, x in transformer.flatten(model).items()}
    assert runs.differing(source.arrays(), expected) == []
    assert source.config == model.config.with_sizes(dropout=0.25) and source.config != model.config
    assert source.tokenizer.hash == Tokenizer.load(trained.path / "tokenizer.json").hash
    assert not list(source.lines())


def test_the_first_loss_equals_that_of_the_initial_model(trained, tuned):
    run, _ = tuned
    fresh, first = (runs.metrics(path)[0]["loss"] for path in (trained.path, run))
    assert first < fresh / 2
    assert json.loads((run / "config.json").read_text())["dropout"] == 0.3
    assert not (run / "huggingface").exists()
    assert (run / "tokenizer.json").read_bytes() == (trained.path / "tokenizer.json").read_bytes()


def test_it_resumes_bit_for_bit_without_the_init_folder(tuned, tmp_path):
    run, arguments = tuned
    again = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(again / "checkpoints" / "20")
    gone = Path(arguments[1])
    gone.rename(gone.with_name("elsewhere"))
    try:
        result = runs.train("--run", again, *arguments)
    finally:
        gone.with_name("elsewhere").rename(gone)
    assert result.code == 0 and "continuing at step 10" in result.err, result.err
    assert (
        "learning_rate 0.001, schedule linear, warmup_steps 1 (optimizer.learning_rate and "
        "optimizer.warmup_steps as given, the rest by default for fine-tuning)\n" in result.err
    )
    assert not runs.differing(runs.arrays(run, 20), runs.arrays(again, 20))
    assert runs.metrics(run) == runs.metrics(again)


def test_another_init_is_refused_on_resume(tuned, trained, tmp_path):
    run, arguments = tuned
    result = runs.train("--run", run, *runs.with_option(arguments, "--init", trained.path))
    assert result.code == 2 and "is a run of other options: init (" in result.err


def test_a_run_that_continues_reads_the_tokenizer_that_is_named(tuned, tmp_path):
    """So that a file that has changed since is refused."""
    run, (_, init, *_) = tuned
    named = tmp_path / "tokenizer.json"
    Tokenizer.train(["der Hund"], 400, pad_id=0, bos_id=1, eos_id=2).save(named)
    assert source_of(init, run).tokenizer.hash == Tokenizer.load(run / "tokenizer.json").hash
    source = source_of(init, run, data=DataOptions(tokenizer=str(named)))
    assert source.tokenizer.hash == Tokenizer.load(named).hash


def test_an_init_that_changed_before_the_first_checkpoint_is_refused(tuned, trained, tmp_path):
    run, arguments = tuned
    again = shutil.copytree(run, tmp_path / "run")
    other = shutil.copytree(trained.path, tmp_path / "before")
    shutil.rmtree(again / "checkpoints")
    shutil.rmtree(other / "checkpoints" / "200")
    told_config = json.loads((again / "train_config.json").read_text()) | {"init": str(other)}
    run_files.replace(again, "train_config.json", json.dumps(told_config))
    result = runs.train("--run", again, *runs.with_option(arguments, "--init", other))
    assert result.code == 2, result.err
    assert "the data changed since this run began (init_sha256 (" in result.err, result.err


def test_an_init_is_known_by_its_configuration_and_its_weights(trained, tmp_path):
    other = shutil.copytree(trained.path, tmp_path / "other")

    def sha256() -> str:
        return source_of(other, tmp_path / "new").sha256

    before = sha256()
    config = json.loads((other / "config.json").read_text())
    run_files.replace(other, "config.json", json.dumps(config | {"dropout": 0.25}))
    changed = sha256()
    shutil.rmtree(other / "checkpoints" / "200")
    assert len({before, changed, sha256()}) == 3
    files = tmp_path / "first", tmp_path / "second"
    opened, hashes = dataclasses.replace(registry.open(trained.path), files=files), set()
    for contents in ("ab", "cb", "ac"):
        for path, content in zip(files, contents, strict=True):
            path.write_text(content)
        hashes.add(init_source._of(opened, options(trained.path)).sha256)
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": ModelOptions(d_model=8, tying="all")}, "model.d_model=8, model.tying=all"),
        ({"model": ModelOptions(preset="lesson10")}, "model.preset=lesson10"),
        ({"data": DataOptions(vocab_size=500)}, "data.vocab_size=500"),
    ],
    ids=["sizes", "preset", "vocabulary"],
)
def test_options_that_init_decides_are_refused(more, words):
    message = f"{words} cannot be changed: model and tokenizer are those of init="
    with pytest.raises(ConfigError, match=message):
        TrainOptions(init="somewhere", **more)


def test_init_has_defaults_for_fine_tuning_and_options_win(tmp_path):
    assert TrainOptions().optimizer.rate == FROM_SCRATCH
    tuning = options(Path("somewhere"))
    assert tuning.optimizer.rate == FINE_TUNING
    assert codec.from_json(TrainOptions, codec.to_json(tuning)) == tuning
    (tmp_path / "run.yaml").write_text("init: somewhere\noptimizer: {learning_rate: 3e-3}\n")
    file = ["--config", str(tmp_path / "run.yaml")]
    for more, expected in (
        (["--init", "somewhere"], FINE_TUNING),
        (["--init", "somewhere", "--lora.rank", "2"], ADAPTERS),
        (["--lora.rank", "2"], FROM_SCRATCH),
        (file, FINE_TUNING._replace(learning_rate=3e-3)),
        ([*file, "--optimizer.schedule", "cosine"], FINE_TUNING._replace(
            learning_rate=3e-3, schedule=Schedule.COSINE)),
        ([*file, "--optimizer.learning-rate", "1e-4"], FINE_TUNING._replace(learning_rate=1e-4)),
    ):  # fmt: skip
        assert cli.parse("train", TrainCommand, more).options.optimizer.rate == expected


@pytest.fixture
def by_version_0_1(tuned, tmp_path) -> tuple[Path, list[str]]:
    """That run as version 0.1 recorded it, with its default rate, and arguments without a rate."""
    folder, arguments = tuned
    run = shutil.copytree(folder, tmp_path / "run")
    recorded = json.loads((run / "train_config.json").read_text())
    recorded["optimizer"] |= FROM_SCRATCH._asdict()
    run_files.replace(run, "train_config.json", json.dumps(recorded))
    at = arguments.index("--optimizer.learning-rate")
    return run, arguments[:at] + arguments[at + 4 :]


def test_a_run_of_version_0_1_continues_at_its_rate(by_version_0_1):
    run, arguments = by_version_0_1
    for _ in range(2):
        result = runs.train("--run", run, *arguments)
        assert result.code == 0, result.err
        assert "keeps the learning rate that it began with, version 0.1's default" in result.err
        assert read_options(RunFolder(run)).optimizer.rate == FROM_SCRATCH


@pytest.mark.parametrize(
    "option", [("learning-rate", "5e-5"), ("schedule", "linear"), ("warmup-steps", "7")]
)
def test_a_rate_that_is_given_is_never_replaced_by_the_run_s(by_version_0_1, option):
    run, arguments = by_version_0_1
    name, value = option
    result = runs.train("--run", run, *arguments, f"--optimizer.{name}", value)
    assert result.code == 2 and f"optimizer.{name.replace('-', '_')} (" in result.err


def test_a_run_of_another_rate_is_refused(by_version_0_1):
    run, arguments = by_version_0_1
    recorded = (run / "train_config.json").read_text().replace("0.003", "0.002")
    run_files.replace(run, "train_config.json", recorded)
    result = runs.train("--run", run, *arguments)
    assert result.code == 2 and "optimizer.learning_rate (0.002 -> 5e-05)" in result.err


def test_languages_without_init_are_refused():
    message = r"data\.target_lang: languages of a tokenizer that init brings"
    with pytest.raises(ConfigError, match=message):
        TrainOptions(data=DataOptions(target_lang="fr"))


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        (".", {"source_lang": "en"}, r"data\.source_lang: the tokenizer of .* knows no languages"),
        (".", {"tokenizer": "tokenizer.json"}, "its model was trained with; leave this out"),
        ("checkpoints/200", {}, "is a checkpoint; .* Hugging Face folder, hf:.* or a run folder"),
    ],
)
def test_what_a_run_cannot_begin_with_is_refused(
    trained, tmp_path, monkeypatch, file, data, message
):
    monkeypatch.chdir(trained.path)
    with pytest.raises(ConfigError, match=message):
        source_of(trained.path / file, tmp_path, data=DataOptions(**data))


def test_converted_weights_need_a_tokenizer_of_the_model(trained, tmp_path):
    bare, own = tmp_path / "bare", trained.path / "tokenizer.json"
    convert.save(registry.open(trained.path).model(), bare)
    with pytest.raises(ConfigError, match=r"bare has no tokenizer; give data\.tokenizer"):
        source_of(bare, tmp_path)
    source = source_of(bare, tmp_path, data=DataOptions(tokenizer=str(own)))
    assert source.tokenizer.hash == Tokenizer.load(own).hash
    other = tmp_path / "other.json"
    Tokenizer.train(["der Hund"], 400, pad_id=5, bos_id=1, eos_id=2).save(other)
    message = "the tokenizer does not belong to this model: source_pad_id is 5, the model's"
    with pytest.raises(ValueError, match=message):
        source_of(bare, tmp_path, data=DataOptions(tokenizer=str(other)))


@pytest.mark.parametrize("name", RATES)
def test_each_rate_of_dropout_is_the_option_s_if_it_is_given(name):
    """0 is a rate, of a new model too."""
    config = helpers.tiny(**dict.fromkeys(RATES, 0.25))
    for value in (None, 0.0, 0.5):
        options, own = ModelOptions(**{name: value}), {} if value is None else {name: value}
        changed = init_source._with_options(config, options)
        expected = dict.fromkeys(RATES, 0.25) | own
        assert {rate: getattr(changed, rate) for rate in RATES} == expected
        usual = {rate: getattr(ModelOptions().config(9, 9), rate) for rate in RATES}
        new = {rate: getattr(options.config(9, 9), rate) for rate in RATES}
        assert new == usual | own


def test_products_in_bfloat16_are_summed_in_float32():
    """New models and pretrained ones alike."""
    precisions = set()
    for options in (ModelOptions(), ModelOptions(precision=Precision.BFLOAT16)):
        fitted = init_source._with_options(helpers.tiny(), options)
        for config in (options.config(9, 9), options.executed(fitted)):
            precisions.add((config.compute_dtype, config.matmul_precision.value))
    assert precisions == {(None, "highest"), ("bfloat16", "medium")}


@pytest.mark.parametrize("own", [{}, {"max_length": 9}, {"max_new_tokens": 9}])
def test_a_run_s_generation_config_gets_the_length_of_the_longest_target(own, tmp_path):
    names = {name: tmp_path / name for name in ("config.json", "generation_config.json")}
    for path, content in zip(names.values(), ({"model_type": "t5"}, own), strict=True):
        path.write_text(json.dumps(content))
    opened = helpers.stand_in(Pretrained, extra_files=names)
    words = Tokenizer.train([], 300, pad_id=0, bos_id=1, eos_id=2)
    data = DataOptions(max_source_length=7, max_target_length=5)
    files = init_source._files(opened, helpers.tiny(max_length=20), words, data)
    assert json.loads(files["generation_config.json"]) == (own or {"max_length": 5 + 1})


def test_validations_search_greedily_for_what_a_folder_allows(tmp_path):
    tokens = {"decoder_start_token_id": 5, "eos_token_id": 6, "forced_bos_token_id": 7}
    others = {"num_beams": 4, "max_length": 9, "early_stopping": True, "suppress_tokens": [8]}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(tokens | others))
    words = Tokenizer.train([], 300, pad_id=0, bos_id=1, eos_id=2)
    greedy = init_source._greedy(tmp_path, helpers.tiny(), words)
    assert greedy == GenerationConfig(constraints=Constraints(suppress_tokens=(8,)), **tokens)


def test_two_tokenizers_fit_a_model_with_two_pad_ids():
    both = TokenizerPair(
        *(Tokenizer.train([], 300, pad_id=pad, bos_id=2, eos_id=3) for pad in (1, 0))
    )
    sizes = {f"{side}_vocab_size": 300 for side in ("source", "target")}
    config = helpers.tiny(**sizes, source_pad_id=1, target_pad_id=0, bos_id=2, eos_id=3)
    assert init_source._fitted(config, ModelOptions(), both, Path("model")).target_pad_id == 0
    for side in ("source", "target"):
        pads = {"source_pad_id": 1, "target_pad_id": 0} | {f"{side}_pad_id": 5}
        with pytest.raises(InputError, match=f"{side}_pad_id is [01], the model's is 5$"):
            init_source._fitted(config.with_sizes(**pads), ModelOptions(), both, Path("model"))
        smaller = config.with_sizes(**{f"{side}_vocab_size": 259})
        with pytest.raises(InputError, match=rf"the {side} tokenizer .* 260, model 259\)$"):
            init_source._fitted(smaller, ModelOptions(), both, Path("model"))


def test_a_model_of_two_vocabularies_is_trained_with_two_tokenizers(tmp_path):
    config = helpers.tiny(source_vocab_size=310, target_vocab_size=300, num_layers=1, max_length=40)
    pads = config.source_pad_id, config.target_pad_id
    convert.save(helpers.random_model(config, dtype="float32"), tmp_path / "bare")
    flags = ["--data.vocabularies", "separate"]
    for flag, size, pad in zip(("tokenizer", "target-tokenizer"), (310, 300), pads, strict=True):
        words, path = [*runs.ENGLISH.split(), *runs.GERMAN.split()], tmp_path / f"{flag}.json"
        ids = {"pad_id": pad, "bos_id": config.bos_id, "eos_id": config.eos_id}
        Tokenizer.train(words, size, **ids).save(path)
        flags += [f"--data.{flag}", str(path)]
    text = [*runs.write_text(tmp_path), "--data.buckets", "1", "--data.tokens-per-batch", "64"]
    few = "--steps 1 --eval-every 1 --eval-pairs 1".split()
    run = tmp_path / "run"
    with runs.as_a_user():
        done = runs.train("--init", tmp_path / "bare", "--run", run, *flags, *text, *few)
        one = runs.train("--init", tmp_path / "bare", "--run", run, *flags[:4], *text, *few)
    assert done.code == 0, done.err
    assert {path.name for path in run.glob("*.json")} >= set(run_files.SIDE_FILES)
    assert one.code == 2 and "not given: data.target_tokenizer" in one.err


def test_the_languages_of_the_options_are_those_of_a_run_s_tokenizer(tmp_path):
    tokenizer_models.write(tmp_path, tokenizer_models.fairseq("MBart", "mbart"))
    languages = {"source_lang": "de_DE", "target_lang": "ro_RO"}
    own = load_huggingface(tmp_path, source_lang="ro_RO", target_lang="de_DE")
    fields = dict(format=registry.get("run"), path=tmp_path, run=None, extra_files={})
    opened = mock.Mock(**fields, has_tokenizer=True, tokenizer=lambda *_: own)
    tokenizer = init_source._tokenizer(opened, DataOptions(**languages))
    assert tokenizer.hash == own.with_languages(**languages).hash != own.hash
