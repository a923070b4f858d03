"""The model card of an export: languages, data, scores, and the model that training began from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jax_transformer.config import codec
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import InputError
from jax_transformer.formats import model_card, registry
from jax_transformer.storage import run_files
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training.options import TrainOptions
from parity_tests.unit.conversions import convert
from parity_tests.unit.formats.test_huggingface import T5, theirs  # noqa: F401

BLEU = {"type": "bleu", "name": "BLEU", "value": 31.234}
OPUS = "Helsinki-NLP/opus-mt-en-de"
SIDES = {"train_source": ("x.en",), "train_target": ("x.fr",)}


def run(theirs: Path, path: Path, options: TrainOptions) -> Path:
    """Write the files of a run that was trained with these options."""
    convert(theirs, path)
    (path / "train_config.json").write_text(codec.to_json(options))
    return path


def front_of(text: str) -> dict:
    """Return the front matter as the hub reads it."""
    return yaml.safe_load(text.split("---\n")[1])


def exported(path: Path, out: Path) -> str:
    convert(path, out, to="hf")
    return (out / "README.md").read_text()


def test_the_figures_of_a_card_are_those_of_its_weights(theirs, tmp_path, monkeypatch):
    """A checkpoint that is an average records its own, and training those of its last weights."""
    path = run(theirs, tmp_path / "run", TrainOptions(init="marian"))
    validated = {"step": 0, "bleu": 31.234, "valid_loss": 1.0}
    (path / "metrics.jsonl").write_text(json.dumps(validated) + "\n")
    assert "| BLEU | 31.23 |" in exported(path, tmp_path / "of training")
    monkeypatch.setattr(RunFolder, "figures", lambda _: {0: {"bleu": 40.5, "valid_loss": 1}})
    text = exported(path, tmp_path / "recorded")
    assert "| BLEU | 40.50 |" in text and "31.23" not in text


def test_the_front_matter_of_a_new_card_is_yaml_that_the_hub_reads():
    figures = {"bleu": 31.234002, "chrf": 0.0, "signatures": {"bleu": "nrefs:1|case:mixed"}}
    sides = ("en_XX", "de_DE")
    training = model_card.Training(7, ("a.en",), {}, {}, figures, sides, sides)
    text = model_card.new("my model", "marian", 1234, training)
    front = front_of(text)
    assert front["language"] == ["en", "de"] and front["pipeline_tag"] == "translation"
    assert "license" not in front
    bleu, chrf = front["model-index"][0]["results"][0]["metrics"]
    assert bleu == BLEU and chrf["value"] == 0 and "| chrF | 0.00 |" in text
    assert 'src_lang="en_XX", tgt_lang="de_DE")' in text
    assert "(`nrefs:1|case:mixed`)" in text and "add `license:`" in text


def test_a_model_of_plain_text_is_not_called_a_translator():
    training = model_card.Training(7, ("a.en",), {}, {}, {"valid_loss": 1.25})
    text = model_card.new("my model", "t5", 1234, training)
    front = front_of(text)
    assert (front["pipeline_tag"], front["tags"][0]) == ("text2text-generation",) * 2
    assert "model-index" not in front
    assert "| loss, nats a token | 1.25 |" in text and "BLEU" not in text


@pytest.mark.parametrize(
    ("figures", "translates"),
    [(set(), True), ({"valid_loss"}, False), ({"valid_loss", "bleu"}, True), ({"bleu"}, True)],
)
def test_a_model_translates_unless_only_its_loss_is_known(figures, translates):
    training = model_card.Training(7, ("a",), {}, {}, dict.fromkeys(figures, 1.0))
    assert training.translates == translates


@pytest.mark.parametrize(
    ("init", "name_or_path", "base", "origin"),
    [
        (f"hf:{OPUS}@main", "another/model", OPUS, OPUS),
        ("/home/me/opus", OPUS, OPUS, "opus"),
        *(("/home/me/opus", n, None, "opus") for n in (f"/tmp/{OPUS}", "out/checkpoint-500", None)),
    ],
)
def test_a_card_names_the_base_model_and_no_local_path(
    theirs, tmp_path, init, name_or_path, base, origin
):
    options = TrainOptions(init=init, data=DataOptions(dataset="/home/me/text"))
    path = run(theirs, tmp_path / "run", options)
    named = T5 | ({} if name_or_path is None else {"_name_or_path": name_or_path})
    run_files.replace(path, "huggingface/config.json", json.dumps(named))
    for out in ("with the card that there was", "without one"):
        text = exported(path, tmp_path / out)
        assert front_of(text).get("base_model") == base and "datasets" not in front_of(text)
        assert f"on text, from {origin}.\n" in text and "/home" not in text
        (path / "huggingface/README.md").unlink(missing_ok=True)


DATASETS = {"owner/pairs": True}  # if it is on the hub
DATASETS |= dict.fromkeys(["local/pairs", "./x/pairs", "../pairs", "~/pairs", "/x/pairs"], False)


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_data_set_on_this_machine_is_named_without_its_path(
    theirs, tmp_path, monkeypatch, dataset
):
    (tmp_path / "local/pairs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    options = TrainOptions(init="opus", data=DataOptions(dataset=dataset))
    training = model_card.training_of(registry.open(run(theirs, tmp_path / "run", options)))
    name = dataset if DATASETS[dataset] else "pairs"
    assert (training.data, training.validated_on) == ((name,), (name,))
    assert training.datasets == ((name,) if DATASETS[dataset] else ())
    assert "seed" in training.options and "model.preset" not in training.options


def test_files_of_training_and_validation_are_named_apart(theirs, tmp_path):
    files = {"train_source": ("a/x.en",), "train_target": ("a/x.de.gz",)}
    files |= {"valid_source": ("b/v.en",), "valid_target": ("b/v.de",)}
    options = TrainOptions(data=DataOptions(**files))
    training = model_card.training_of(registry.open(run(theirs, tmp_path / "run", options)))
    assert training.data == ("x.en", "x.de.gz") and training.validated_on == ("v.en", "v.de")
    assert training.languages == ("en", "de") and training.datasets == ()
    assert "model.preset" in training.options and training.begun_from == ""


def test_a_run_from_a_run_names_the_model_of_the_first(theirs, tmp_path):
    first = run(theirs, tmp_path / "first", TrainOptions(init="hf:owner/name"))
    options = TrainOptions(init=str(first), data=DataOptions(dataset="owner/pairs"))
    second = run(theirs, tmp_path / "second", options)
    text = exported(second, tmp_path / "out")
    assert front_of(text)["base_model"] == "owner/name"
    assert front_of(text)["datasets"] == ["owner/pairs"]
    assert "on owner/pairs, from first.\n" in text
    (second / "train_config.json").write_text(codec.to_json(replace(options, init=str(second))))
    assert model_card._base_model(RunFolder(second), str(second)) == "", "it was moved there"


@pytest.mark.parametrize(
    ("data", "languages"),
    [
        ({}, ["en", "de", "fr", "es"]),
        ({"train_source": ("a/x.de.gz", "y.de"), "train_target": ("x.en", "y.en")}, ["de", "en"]),
        ({"train_source": ("x.source",), "train_target": ("x.txt",)}, None),
        ({"train_source": ("x.de", "y.fr"), "train_target": ("x.en", "y.en")}, ["en"]),
        (SIDES | {"source_lang": "eng_Latn", "target_lang": "deu_Latn"}, ["eng", "deu"]),
        (SIDES | {"source_lang": "zho_Hans", "target_lang": "zho_Hant"}, ["zho"]),
    ],
)
def test_languages_are_those_of_the_tokenizer_or_of_the_files_names(
    theirs, tmp_path, data, languages
):
    files = ("v",) * len(data.get("train_source", ()))
    data = DataOptions(**data, valid_source=files, valid_target=files)
    options = TrainOptions(init="opus" if data.source_lang else None, data=data)
    text = exported(run(theirs, tmp_path / "run", options), tmp_path / "out")
    assert front_of(text).get("language") == languages


@pytest.mark.parametrize("named", ["source_lang", "target_lang", "source_lang target_lang"])
def test_a_card_names_both_languages_of_the_tokenizer_or_none(theirs, tmp_path, named):
    codes = {name: {"source_lang": "en", "target_lang": "de"}[name] for name in named.split()}
    files = {"valid_source": ("v",), "valid_target": ("v",)}
    options = TrainOptions(init="opus", data=DataOptions(**SIDES, **files, **codes))
    training = model_card.training_of(registry.open(run(theirs, tmp_path / "run", options)))
    assert training.tokenizer_languages == (("en", "de") if len(codes) == 2 else None)


@pytest.mark.parametrize("content", ["", "{", "5", "[1]", "null", '"ab"', "\udcff"])
def test_a_damaged_file_of_counts_is_named(content, tmp_path):
    path = tmp_path / "data.json"
    assert model_card._json(path) == {}
    path.write_text(content, errors="surrogateescape")
    with pytest.raises(InputError, match=r"/data\.json: "):
        model_card._json(path)


BEFORE = """---
language:
- en
- fr
base_model: old/one
# a word of its author
model-index:
- name: old
  results:
    - metrics: [{value: 99}]
tags: [x]
---
# Old
---
text
"""


def test_scores_of_the_base_model_are_replaced():
    of = {"base_model": "new/one", "datasets": ("d",)}
    languages = ("en_XX", "deu_Latn")
    training = model_card.Training(7, ("a",), {}, {}, {"bleu": 31.234}, languages, **of)
    text = model_card.appended(BEFORE, "mine", training)
    front = front_of(text)
    assert front.pop("model-index")[0]["name"] == "mine" and "99" not in text
    expected = {"language": ["en", "fr"], "base_model": "new/one", "datasets": ["d"]}
    assert front == expected | {"tags": ["x"]}
    assert text.count("base_model") == 1 == text.count("language")
    for other in (BEFORE.replace("\n", "\r\n"), f"\ufeff{BEFORE}"):  # as from Windows
        assert model_card.appended(other, "mine", training) == text
    assert text.split("---\n", 2)[2].startswith("# Old\n---\ntext\n\n## Fine-tuning\n")
    unscored = model_card.appended(BEFORE, "mine", model_card.Training(7, ("a",), {}, {}))
    assert front_of(unscored) == {"language": ["en", "fr"], "base_model": "old/one", "tags": ["x"]}


@pytest.mark.parametrize(
    "text", ["", "none\n---\n", "none\n---\na: 1\n---\nb\n", "---\nnever closed\n"]
)
def test_a_card_without_front_matter_is_kept(text):
    extended = model_card.appended(text, "mine", model_card.Training(7, ("a",), {}, {}))
    assert extended.startswith(text.rstrip("\n") + "\n\n## Fine-tuning\n")
