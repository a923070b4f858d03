"""Fine-tuning of Hugging Face folders: the batches and the step that transformers would make of the same text, and a run that is handed back."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from transformers.models.m2m_100 import modeling_m2m_100

import jax_transformer as jt
from jax_transformer import transformer, translation
from jax_transformer.data import batches
from jax_transformer.data.batches import Batch
from jax_transformer.training import corpus, mesh, optimizer, step, validation
from jax_transformer.training.data_options import DataOptions
from jax_transformer.training.options import OptimizerOptions, Schedule, TrainOptions
from jax_transformer.training.run_folder import RunFolder
from parity_tests import huggingface, tokenizer_models
from parity_tests.huggingface import in_float64  # noqa: F401
from parity_tests.levels import assert_close
from parity_tests.twins import without_dropout
from parity_tests.unit import runs

_BART_SIZES = {
    f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
SIZES: dict[str, dict[str, Any]] = {
    "bart": _BART_SIZES | {"d_model": 16, "max_position_embeddings": 64},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
}
# What a family's folder has, its classes of model and tokenizer, and languages
FAMILIES: dict[str, tuple[Any, str, str, tuple[str, str] | None]] = {
    "marian": (tokenizer_models.marian, "MarianMTModel", "MarianTokenizer", None),
    "bart": (tokenizer_models.bart, "BartForConditionalGeneration", "BartTokenizer", None),
    "t5": (tokenizer_models.t5, "T5ForConditionalGeneration", "T5Tokenizer", None),
    "mt5": (tokenizer_models.t5, "MT5ForConditionalGeneration", "T5Tokenizer", None),
    "umt5": (tokenizer_models.t5, "UMT5ForConditionalGeneration", "T5Tokenizer", None),
    "pegasus": (tokenizer_models.pegasus, "PegasusForConditionalGeneration", "PegasusTokenizer", None),
    "mbart": (lambda: tokenizer_models.fairseq("MBart", "mbart"), "MBartForConditionalGeneration", "MBartTokenizer", ("en_XX", "de_DE")),
    "mbart50": (
        lambda: tokenizer_models.fairseq("MBart50", "mbart"),
        "MBartForConditionalGeneration",
        "MBart50Tokenizer",
        ("en_XX", "de_DE"),
    ),
    "m2m_100": (tokenizer_models.m2m_100, "M2M100ForConditionalGeneration", "M2M100Tokenizer", ("en", "de")),
}


def made(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A folder with a random model of a family, as transformers saves it, and its tokenizer; the model."""
    files, model, _, _ = FAMILIES[name]
    tokenizer_models.write(folder, files())
    told = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, model)
    own = {key: value for key, value in told.items() if key != "model_type"}
    if name == "marian":
        own["decoder_start_token_id"] = own["pad_token_id"]
    torch.manual_seed(0)
    module = kind(kind.config_class(**own, **SIZES["t5" if name.endswith("t5") else "bart"])).to(dtype).eval()
    module.generation_config.bad_words_ids = [[module.config.pad_token_id]]
    module.save_pretrained(folder)
    return module


def theirs(name: str, folder: Path) -> Any:
    """transformers' tokenizer of a folder."""
    _, _, kind, languages = FAMILIES[name]
    told = dict(zip(("src_lang", "tgt_lang"), languages or (), strict=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return getattr(transformers, kind).from_pretrained(folder, **told)


def files(flags: list[str]) -> dict[str, Any]:
    """The options of :func:`runs.write_text`'s flags."""
    return {flag.removeprefix("--data.").replace("-", "_"): (path,) for flag, path in zip(flags[::2], flags[1::2], strict=True)}


def decoder_input(module: Any, labels: torch.Tensor) -> torch.Tensor:
    """What a model makes of labels when it is trained."""
    if hasattr(module, "prepare_decoder_input_ids_from_labels"):
        return module.prepare_decoder_input_ids_from_labels(labels)
    return modeling_m2m_100.shift_tokens_right(labels, module.config.pad_token_id, module.config.decoder_start_token_id)


def assert_begins_as_transformers(found: corpus.Corpus, words: Any, languages: tuple[str, str] | None) -> None:
    """Validations, and what is handed back, begin with the target's language where the family says it so, and keep the folder's rules."""
    kept = json.loads(found.initial.files["generation_config.json"])
    language = (
        None
        if languages is None
        else words.convert_tokens_to_ids(words.lang_code_to_token[languages[1]] if "en" in languages else languages[1])
    )
    starts = isinstance(words, transformers.MBartTokenizer)
    assert found.initial.decoding.rules.bad_words_ids == ((words.pad_token_id,),) == tuple(map(tuple, kept["bad_words_ids"]))
    assert found.initial.decoding.forced_bos_token_id == kept.get("forced_bos_token_id") == (None if starts else language)
    if starts:
        assert found.config.bos_id == found.initial.decoding.bos_id == kept["decoder_start_token_id"] == language


@pytest.mark.proves("fine-tuning")
@pytest.mark.parametrize("name", FAMILIES)
def test_batches_are_those_of_transformers(tmp_path, name):
    """Sources, labels, and what the decoder is given for them, which each family's model makes in its own way."""
    module, languages = made(name, tmp_path / "model"), FAMILIES[name][3]
    told = dict(zip(("source_lang", "target_lang"), languages or (), strict=False))
    data = DataOptions(**files(runs.write_text(tmp_path)), **told)
    found = corpus.prepare(TrainOptions(init=str(tmp_path / "model"), data=data), RunFolder(tmp_path / "run"))
    words = theirs(name, tmp_path / "model")
    for indices, batch in batches.eval_batches(found.valid, found.plan.widths, found.plan.rows):
        for row, index in enumerate(indices):
            source, target = found.valid_pairs[index]
            encoded = words(source, text_target=target)
            labels = torch.tensor([encoded["labels"]])
            shifted = decoder_input(module, labels)
            count = labels.shape[1]
            assert batch.target_out[row, :count].tolist() == labels[0].tolist()
            assert batch.target_in[row, :count].tolist() == shifted[0].tolist()
            assert (batch.target_out[row, count:] == words.pad_token_id).all()
            assert batch.source[row, : len(encoded["input_ids"])].tolist() == encoded["input_ids"]
    assert_begins_as_transformers(found, words, FAMILIES[name][3])
    assert sum(len(indices) for indices, _ in batches.eval_batches(found.valid, found.plan.widths, found.plan.rows)) == 8


@pytest.mark.proves("fine-tuning")
@pytest.mark.parametrize("name", ["marian", "t5 v1.1"])
def test_a_step_is_that_of_torchs_adamw_on_transformers_loss(in_float64, monkeypatch, name):  # noqa: F811
    """Weights after a step in float64; what transformers does not train stays bit for bit."""
    case = huggingface.CASES[name]
    shallow = dict.fromkeys((key for key in case.values if key.endswith("_layers")), 1)  # half the time to compile
    monkeypatch.setitem(huggingface.CASES, name, dataclasses.replace(case, values=case.values | shallow))
    both = huggingface.pair(name)
    source, target = (ids.astype(np.int32) for ids in huggingface.batch(both.config))
    labels = np.roll(target, -1, axis=1)
    labels[:, -1] = both.config.target_pad_id
    options = OptimizerOptions(
        learning_rate=1e-2, schedule=Schedule.CONSTANT, warmup_steps=0, epsilon=1e-8, weight_decay=0.1, clip_norm=0.5
    )
    adam = torch.optim.AdamW(both.theirs.parameters(), lr=1e-2, betas=(options.beta1, options.beta2), eps=options.epsilon, weight_decay=0.1)
    ignored = torch.from_numpy(np.where(labels == both.config.target_pad_id, -100, labels).astype(np.int64))
    given = huggingface.inputs(both.config, source.astype(np.int64))
    loss = both.theirs(**given, decoder_input_ids=torch.from_numpy(target.astype(np.int64)), labels=ignored).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(both.theirs.parameters(), options.clip_norm)
    adam.step()
    rule = optimizer.make(options, 1)
    before = jt.convert.to_torch(both.ours)
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        train_step = step.make_step(without_dropout(both.config), rule, 0.0)
        state, measured = train_step(step.initial_state(both.ours, rule), [Batch(source, target, labels)], jax.random.key(0))
    assert_close((np.asarray(measured["loss"]), loss.detach().numpy()), 1e-12, "loss")
    ours = jt.convert.to_torch(transformer.unflatten(both.config, state.params | state.carried))
    trained = {key for key, parameter in both.theirs.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    for key, value in both.theirs.state_dict().items():
        if key in trained:
            assert_close((ours[key], value.numpy()), 1e-10, key)
            assert not np.array_equal(ours[key], before[key]), key
        else:
            assert ours[key].tobytes() == before[key].tobytes(), key


# A run from a folder, and back


ARGUMENTS = [
    *"--model.dropout 0 --model.embedding-dropout 0 --data.buckets 1 --data.tokens-per-batch 256".split(),
    *"--optimizer.learning-rate 2e-2 --optimizer.warmup-steps 5 --optimizer.label-smoothing 0".split(),
    *"--steps 80 --eval-every 40 --log-every 10 --eval-pairs 2 --best-by valid_loss".split(),
]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[Path, runs.Told, list[str]]:
    """A folder with a Marian model in bfloat16 in ``model``, the run from it in ``run``, and what it was told to do."""
    folder = tmp_path_factory.mktemp("tuned")
    made("marian", folder / "model", torch.bfloat16)
    (folder / "model" / "LICENSE").write_text("as the model's\n")
    arguments = ["--init", str(folder / "model"), *runs.write_text(folder), *ARGUMENTS]
    with runs.as_a_user(tmp_path_factory.getbasetemp()):
        told = runs.train("--run", folder / "run", *arguments)
        assert told.code == 0, told.err
        yield folder, told, arguments


def torch_loss(folder: Path, lines: Path) -> float:
    """The mean loss of a folder's model on validation text, all of it transformers' own."""
    module, words = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32), theirs("marian", folder)
    sources, targets = (Path(f"{lines}.{side}").read_text(encoding="utf-8").splitlines() for side in ("source", "target"))
    found = words(sources, text_target=targets, padding=True, return_tensors="pt")
    found["labels"][found["labels"] == words.pad_token_id] = -100
    with torch.no_grad():
        return module(**found).loss.item()


@pytest.mark.proves("fine-tuning", "marian")
def test_the_result_is_handed_back_and_beats_what_it_began_from(tuned, tmp_path):
    folder, told, _ = tuned
    assert f"{folder / 'model'}: its weights are bfloat16, and train as float32" in told.err.splitlines()
    assert runs.main("convert", folder / "run", tmp_path / "new", "--to", "hf") == 0
    before, after = torch_loss(folder / "model", folder / "valid"), torch_loss(tmp_path / "new", folder / "valid")
    assert after < 0.6 * before
    recorded = [line["valid_loss"] for line in runs.metrics(folder / "run") if "valid_loss" in line]
    assert after == pytest.approx(min(recorded), rel=1e-4)


def test_the_exported_weights_are_the_runs_bit_for_bit_and_the_files_those_of_the_folder(tuned, tmp_path):
    folder, _, _ = tuned
    assert runs.main("convert", folder / "run", tmp_path / "new", "--to", "hf") == 0
    loaded = transformers.MarianMTModel.from_pretrained(tmp_path / "new").state_dict()
    ours = jt.convert.to_torch(jt.load(folder / "run")[0])
    assert [name for name, value in loaded.items() if not np.array_equal(value.numpy(), ours[name])] == []
    for name in ("vocab.json", "source.spm", "target.spm", "LICENSE", "generation_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (folder / "model" / name).read_bytes(), name


def test_it_goes_on_bit_for_bit_without_the_folder(tuned, tmp_path):
    folder, _, arguments = tuned
    again = shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(again / "checkpoints" / "80")
    (folder / "model").rename(folder / "elsewhere")
    try:
        told = runs.train("--run", again, *arguments)
    finally:
        (folder / "elsewhere").rename(folder / "model")
    assert told.code == 0 and "continuing at step 40" in told.err, told.err
    assert not runs.differing(runs.arrays(folder / "run", 80), runs.arrays(again, 80))
    assert runs.metrics(folder / "run") == runs.metrics(again)


def test_positions_and_the_logits_bias_are_carried(tuned):
    folder, _, _ = tuned
    arrays = runs.arrays(folder / "run", 80)
    carried = {name for name in arrays if name.startswith("carried/")}
    assert carried == {"carried/logits_bias", "carried/encoder.positions.table", "carried/decoder.positions.table"}
    assert {array.dtype.name for name, array in arrays.items() if name.startswith(("params/", "carried/"))} == {"float32"}


def test_validations_translate_under_the_folders_rules(tuned, tmp_path, monkeypatch):
    folder, _, arguments = tuned
    options = TrainOptions(init=str(folder / "model"), data=DataOptions(**files(arguments[2:10])))
    found = corpus.prepare(options, RunFolder(tmp_path))
    check, asked = validation.Validation(options, found, mesh.Devices.take(1)), []
    monkeypatch.setattr(check, "loss_sum", lambda weights, batch: np.ones(2))
    monkeypatch.setattr(translation, "translate", lambda model, words, lines, how, **more: asked.append(how) or list(lines))
    check(transformer.flatten(found.initial.model()))
    assert asked == [found.initial.decoding] and asked[0].rules.bad_words_ids
