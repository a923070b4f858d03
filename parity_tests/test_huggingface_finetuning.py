"""Fine-tuning of Hugging Face folders: batches and steps equal transformers' own."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.m2m_100 import modeling_m2m_100

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.data import batches
from jax_transformer.data.batches import Batch
from jax_transformer.data.options import DataOptions, Task
from jax_transformer.inference import translation
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.training import corpus, devices, evaluation, init_source, optimizer, step
from jax_transformer.training.optimizer import OptimizerOptions, Schedule
from jax_transformer.training.options import TrainOptions
from parity_tests import huggingface
from parity_tests import huggingface_folders as folders
from parity_tests.levels import assert_close
from parity_tests.marks import quick_if
from parity_tests.test_gradients import RATES
from parity_tests.twins import without_dropout
from parity_tests.unit import runs


def decoder_input(module: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the decoder's input that a model makes of labels when it is trained."""
    if hasattr(module, "prepare_decoder_input_ids_from_labels"):
        return module.prepare_decoder_input_ids_from_labels(labels)
    return modeling_m2m_100.shift_tokens_right(
        labels, module.config.pad_token_id, module.config.decoder_start_token_id
    )


def assert_begins_as_transformers(
    prepared_corpus: corpus.Corpus, folder: Path, words: Any, language: int | None
) -> None:
    """Validations and exports begin with the target's language if the family says so."""
    exported = json.loads((folder / "huggingface/generation_config.json").read_text())
    own = prepared_corpus.init_source.generation_config
    starts = isinstance(words, transformers.MBartTokenizer | transformers.PLBartTokenizer)
    assert exported["bad_words_ids"] == [[words.pad_token_id]]
    assert own.constraints.bad_words_ids == ((words.pad_token_id,),)
    forced = exported.get("forced_bos_token_id")
    assert own.forced_bos_token_id == forced == (None if starts else language)
    if starts:
        start = exported["decoder_start_token_id"]
        assert prepared_corpus.config.bos_id == own.decoder_start_token_id == start == language


@pytest.mark.proves("fine-tuning")
# LongT5 has T5's tokenizer and shift
@pytest.mark.parametrize("name", [quick_if(name != "longt5", name) for name in folders.FOLDERS])
def test_batches_are_those_of_transformers(tmp_path, name):
    """Sources, labels, and the decoder input, which each family derives from labels."""
    module = folders.save_model(name, tmp_path / "model")
    languages = folders.FOLDERS[name].languages
    language_options = dict(zip(("source_lang", "target_lang"), languages or (), strict=False))
    prepared_corpus = prepared(tmp_path, runs.write_text(tmp_path), **language_options)
    words = folders.tokenizer(name, tmp_path / "model")
    rows, plan = 0, prepared_corpus.plan
    for indices, batch in batches.eval_batches(prepared_corpus.valid, plan.widths, plan.rows):
        rows += len(indices)
        for row, index in enumerate(indices):
            source, target = prepared_corpus.valid_pairs[index]
            encoded = words(source, text_target=target)
            labels = torch.tensor([folders.ended(words, encoded["labels"])])
            shifted = decoder_input(module, labels)
            count = labels.shape[1]
            assert batch.target_out[row, :count].tolist() == labels[0].tolist()
            assert batch.target_in[row, :count].tolist() == shifted[0].tolist()
            assert (batch.target_out[row, count:] == words.pad_token_id).all()
            assert batch.source[row, : len(encoded["input_ids"])].tolist() == encoded["input_ids"]
    (tmp_path / "run").mkdir()
    corpus.record(prepared_corpus, RunFolder(tmp_path / "run"))
    language = folders.language_id(name, words)
    assert_begins_as_transformers(prepared_corpus, tmp_path / "run", words, language)
    assert rows == 8


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_denoised_texts_have_the_mask_of_the_folder(tmp_path, name):
    folders.save_model(name, tmp_path / "model")
    lines = tmp_path / "lines.txt"
    lines.write_text("the house sees. the house is old.\n" * 60)
    languages = dict.fromkeys(("source_lang", "target_lang"), "en_XX") if name == "mbart" else {}
    files = ["--data.train-source", str(lines), "--data.valid-source", str(lines)]
    data = prepared(tmp_path, files, task=Task.DENOISING, **languages)
    words = folders.tokenizer(name, tmp_path / "model")
    text = words("the house sees. the house is old.", add_special_tokens=False)["input_ids"]
    assert [each.tolist() for each in data.valid.targets] == [text] * 60
    for source in data.valid.sources:
        assert words.mask_token_id in source and len(source) <= len(text)
    (task,) = data.drawn.tasks
    assert len(np.flatnonzero(np.isin(text, task.ends))) == 2


def prepared(folder: Path, flags: list[str], **more: Any) -> corpus.Corpus:
    data = DataOptions(**runs.fields_of(flags), **more)
    options = TrainOptions(init=str(folder / "model"), data=data)
    return corpus.prepare(options, RunFolder(folder / "run"))


def test_t5_has_a_maximum_length_although_its_positions_have_none(tmp_path):
    """Otherwise one page-long line in a thousand would set the width of batches."""
    folders.save_model("t5", tmp_path / "model")
    flags = runs.write_text(tmp_path)
    for side in ("source", "target"):
        with open(tmp_path / f"train.{side}", "a", encoding="utf-8") as file:
            file.write(" ".join(["the house"] * 300) + f" {side}\n")
    prepared_corpus = prepared(tmp_path, flags)
    assert prepared_corpus.about["dropped_long"] == 1 and prepared_corpus.plan.widths[-1] < 100
    asked = prepared(tmp_path, flags, max_source_length=5000, max_target_length=5000)
    assert asked.about["dropped_long"] == 0 and asked.plan.widths[-1] > 512


def test_a_missing_max_length_is_that_of_the_targets(tmp_path):
    """Otherwise transformers, and translate, would stop after twenty tokens."""
    module, flags = folders.save_model("t5", tmp_path / "model"), runs.write_text(tmp_path)
    path, file = tmp_path / "model/generation_config.json", "generation_config.json"
    for more, length in (({}, 513), ({"max_target_length": 40}, 41)):
        settings = json.loads(prepared(tmp_path, flags, **more).init_source.files[file])
        assert settings == json.loads(path.read_text()) | {"max_length": length}
    path.unlink()  # as in old folders, without this file
    settings = json.loads(prepared(tmp_path, flags).init_source.files[file])
    expected = {"max_length": 513, "pad_token_id": 0, "eos_token_id": 1}
    assert (expected | {"decoder_start_token_id": 0}).items() <= settings.items()
    module.generation_config.max_new_tokens = 30
    module.save_pretrained(tmp_path / "model")
    assert prepared(tmp_path, flags).init_source.files[file] == path.read_bytes()


@pytest.mark.proves("fine-tuning")
@pytest.mark.parametrize("name", ["marian", "t5 v1.1"])
def test_a_step_equals_adamw_of_torch_on_the_loss(in_float64, monkeypatch, name):
    """Weights after a step in float64; what transformers does not train is unchanged."""
    case = huggingface.CASES[name]
    # this halves the compile time
    shallow = dict.fromkeys((key for key in case.values if key.endswith("_layers")), 1)
    small = dataclasses.replace(case, values=case.values | shallow)
    monkeypatch.setitem(huggingface.CASES, name, small)
    both = huggingface.pair(name)
    source, target = (ids.astype(np.int32) for ids in huggingface.batch(both.config))
    labels = np.roll(target, -1, axis=1)
    labels[:, -1] = both.config.target_pad_id
    options = OptimizerOptions(**RATES, schedule=Schedule.CONSTANT, warmup_steps=0)
    settings = dict(lr=1e-2, betas=(options.beta1, options.beta2), eps=1e-8, weight_decay=0.1)
    adam = torch.optim.AdamW(both.theirs.parameters(), **settings)
    inputs = huggingface.inputs(both.config, source.astype(np.int64))
    inputs["decoder_input_ids"] = torch.from_numpy(target.astype(np.int64))
    ignored = np.where(labels == both.config.target_pad_id, -100, labels).astype(np.int64)
    loss = both.theirs(**inputs, labels=torch.from_numpy(ignored)).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(both.theirs.parameters(), options.clip_norm)
    adam.step()
    rule = optimizer.make(options, 1)
    before = jt.convert.to_torch(both.ours)
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        train_step = step.make_step(without_dropout(both.config), rule, 0.0)
        batch = [Batch(source, target, labels)]
        state = step.initial_state(both.ours, rule)
        state, measured = train_step(state, batch, jax.random.key(0))
    assert_close((np.asarray(measured["loss"]), loss.detach().numpy()), 1e-12, "loss")
    ours = jt.convert.to_torch(transformer.unflatten(both.config, state.params | state.frozen))
    trained = {
        key
        for key, parameter in both.theirs.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    for key, value in both.theirs.state_dict().items():
        if key in trained:
            assert_close((ours[key], value.numpy()), 1e-10, key)
            assert not np.array_equal(ours[key], before[key]), key
        else:
            assert ours[key].tobytes() == before[key].tobytes(), key


# A run from a folder, and its export


ARGUMENTS = [
    *"--model.dropout 0 --model.embedding-dropout 0".split(),
    *"--data.buckets 1 --data.tokens-per-batch 256".split(),
    *"--optimizer.learning-rate 2e-2 --optimizer.warmup-steps 5".split(),
    *"--optimizer.label-smoothing 0".split(),
    *"--steps 80 --eval-every 40 --log-every 10 --eval-pairs 2 --best-by valid_loss".split(),
]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[Path, runs.CommandResult, list[str]]:
    """A folder with a Marian model in bfloat16, the run from it, and the run's arguments."""
    folder = tmp_path_factory.mktemp("tuned")
    module = folders.save_model("marian", folder / "model", torch.bfloat16)
    # after little training it would end at once, or repeat one token
    module.generation_config.update(min_length=8, no_repeat_ngram_size=1)
    module.save_pretrained(folder / "model")
    (folder / "model" / "LICENSE").write_text("as the model's\n")
    arguments = ["--init", str(folder / "model"), *runs.write_text(folder), *ARGUMENTS]
    with runs.as_a_user():
        result = runs.train("--run", folder / "run", *arguments)
        assert result.code == 0, result.err
        yield folder, result, arguments


@pytest.fixture(scope="module")
def exported(tuned) -> Path:
    """The folder that the run becomes."""
    folder, _, _ = tuned
    assert runs.main("convert", folder / "run", folder / "new", "--to", "hf") == 0
    return folder / "new"


def test_weights_of_64_bits_train_as_float32(tmp_path):
    folders.save_model("marian", tmp_path / "model", torch.float64)
    source = init_source.find(TrainOptions(init=str(tmp_path / "model")), RunFolder(tmp_path))
    with jax.enable_x64(False):
        assert {array.dtype.name for array in source.arrays().values()} == {"float32"}


@pytest.mark.proves("fine-tuning", "marian")
def test_the_fine_tuned_model_is_exported_and_beats_its_base(tuned, exported):
    folder, result, _ = tuned
    actual = f"{folder / 'model'}: its weights are bfloat16, and train as float32"
    assert actual in result.err.splitlines()
    paths, lines = (folder / "model", exported), folder / "valid"
    before, after = (folders.mean_loss("marian", place, lines) for place in paths)
    assert after < 0.6 * before
    recorded = [line["valid_loss"] for line in runs.metrics(folder / "run") if "valid_loss" in line]
    assert after == pytest.approx(min(recorded), rel=1e-4)


def test_an_export_has_the_run_s_weights_and_the_folder_s_files(tuned, exported):
    folder, _, _ = tuned
    loaded = transformers.MarianMTModel.from_pretrained(exported).state_dict()
    ours = jt.convert.to_torch(jt.load(folder / "run")[0])
    assert [name for name in loaded if not np.array_equal(loaded[name].numpy(), ours[name])] == []
    for name in ("vocab.json", "source.spm", "target.spm", "LICENSE"):
        assert (exported / name).read_bytes() == (folder / "model" / name).read_bytes(), name
    before, after = (
        json.loads((place / "generation_config.json").read_text())
        for place in (folder / "model", exported)
    )
    assert after == before | {"max_length": 65}  # which the folder does not set


def test_evaluate_scores_the_run_and_its_export_as_transformers_does(
    tuned, exported, tmp_path, capsys
):
    folder, _, _ = tuned
    capsys.readouterr()
    lines = folder / "valid"
    expected = folders.generated("marian", exported, folders.read(lines, "source"))
    for place in (folder / "run", exported):
        files = ["--source", f"{lines}.source", "--target", f"{lines}.target"]
        command = ["evaluate", "--run", place, *files, "--bootstrap", "0", "--json"]
        assert runs.main(*command, "--hypotheses", tmp_path / "hypotheses") == 0
        assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(
            folders.mean_loss("marian", exported, lines), rel=1e-4
        )
        assert (tmp_path / "hypotheses").read_text(encoding="utf-8").splitlines() == expected
    assert all(expected)


def test_the_run_resumes_bit_for_bit_without_the_folder(tuned, tmp_path):
    folder, _, arguments = tuned
    again = shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(again / "checkpoints" / "80")
    (folder / "model").rename(folder / "elsewhere")
    try:
        result = runs.train("--run", again, *arguments)
    finally:
        (folder / "elsewhere").rename(folder / "model")
    assert result.code == 0 and "continuing at step 40" in result.err, result.err
    assert not runs.differing(runs.arrays(folder / "run", 80), runs.arrays(again, 80))
    assert runs.metrics(folder / "run") == runs.metrics(again)


def test_positions_and_the_logits_bias_are_frozen(tuned):
    folder, _, _ = tuned
    arrays = runs.arrays(folder / "run", 80)
    frozen = {name for name in arrays if name.startswith("frozen/")}
    names = ("logits_bias", "encoder.positions.table", "decoder.positions.table")
    assert frozen == {f"frozen/{name}" for name in names}
    weights = [name for name in arrays if name.startswith(("params/", "frozen/"))]
    assert {arrays[name].dtype.name for name in weights} == {"float32"}


def test_validations_translate_under_the_folders_rules(tuned, tmp_path, monkeypatch):
    folder, _, arguments = tuned
    data = DataOptions(**runs.fields_of(arguments[2:10]))
    options = TrainOptions(init=str(folder / "model"), data=data)
    prepared_corpus = corpus.prepare(options, RunFolder(tmp_path))
    check, used = evaluation.Validation(options, prepared_corpus, devices.Devices.take(1)), []
    monkeypatch.setattr(check, "loss_sum", lambda weights, batch: np.ones(2))
    record = lambda self, lines: used.append(self.generation_config) or list(lines)  # noqa: E731
    monkeypatch.setattr(translation.Translator, "__call__", record)
    check(jax.tree.map(jnp.asarray, prepared_corpus.init_source.arrays()))
    assert used == [prepared_corpus.init_source.generation_config]
    assert used[0].constraints.bad_words_ids


# ``jax-transformer evaluate``: loss and hypotheses of the same lines


@pytest.mark.parametrize(
    "name", [quick_if(name == "marian", name) for name in ("marian", "mbart50", "t5")]
)
def test_evaluate_gives_the_scores_of_transformers(name, tmp_path, capsys):
    folder, lines = tmp_path / "model", tmp_path / "valid"
    module = folders.save_model(name, folder)
    words = folders.tokenizer(name, folder)
    # these ids are no text
    silent = [words.unk_token_id, *range(len(words), module.config.vocab_size)]
    settings = dict(num_beams=3, max_length=14, min_length=5, suppress_tokens=silent)
    module.generation_config.update(**settings)
    with torch.no_grad():  # with small new weights all lines would get the same translation
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    module.save_pretrained(folder)
    runs.write_text(tmp_path)
    files = ["--source", f"{lines}.source", "--target", f"{lines}.target"]
    files += ["--hypotheses", tmp_path / "hypotheses"]
    languages = folders.FOLDERS[name].languages or ()
    pairs = zip(("--source-lang", "--target-lang"), languages, strict=False)
    flags = [word for pair in pairs for word in pair]
    command = ["evaluate", "--run", folder, *files, *flags, "--bootstrap", "0", "--json"]
    with runs.as_a_user():
        assert runs.main(*command) == 0
    report = json.loads(capsys.readouterr().out)
    known = {"pairs": 8, "left_out_of_loss": 0, "step": 0, "weights": "model.safetensors"}
    assert {key: report[key] for key in known} == known
    assert report["loss"] == pytest.approx(folders.mean_loss(name, folder, lines), rel=1e-5)
    forced = folders.language_id(name, words)
    more = {} if forced is None else {"forced_bos_token_id": forced}
    expected = folders.generated(name, folder, folders.read(lines, "source"), **more)
    assert (tmp_path / "hypotheses").read_text(encoding="utf-8").splitlines() == expected
    assert len(set(expected)) > 1
