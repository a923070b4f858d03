"""CTranslate2 computes what our models compute: its folders, and what it cannot express."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tokenizers

import jax_transformer as jt
from jax_transformer.config import Mask, TransformerConfig
from jax_transformer.convert import conversion
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.extras.deploy import deployed
from jax_transformer.extras.deploy.ctranslate2 import checks, engine, folder
from jax_transformer.formats import base, registry
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from jax_transformer.storage import run_files
from parity_tests import preset_names
from parity_tests.marks import quick_if
from parity_tests.unit import helpers, runs

ctranslate2 = pytest.importorskip("ctranslate2")

ONE_VOCABULARY = {"source_vocab_size": 13}
# Every field that decides what is computed has two values among these
CONFIGS = {
    "pre-norm, two vocabularies, wide heads": lambda: jt.preset(
        "small", **helpers.ODD, head_dim=5, tying="none", output_bias=True
    ),
    "post-norm, final norm, no biases": lambda: helpers.tiny(
        "lesson10_repaired", bias=False, norm_epsilon=0.1, compute_dtype="bfloat16",
        **{"decoder.layers": 1},
    ),
    "BART": lambda: helpers.tiny("bart", **ONE_VOCABULARY),
    "T5, gated": lambda: helpers.tiny(
        "t5", **ONE_VOCABULARY, **{"encoder.gated": True, "decoder.gated": True},
        **{"encoder.activation": "gelu_tanh", "decoder.activation": "silu"},
    ),
    "UMT5": lambda: helpers.tiny(
        "t5", **ONE_VOCABULARY,
        **{f"{stack}.positions": "relative_per_block" for stack in ("encoder", "decoder")},
    ),
    "two biases of the logits": lambda: helpers.tiny(
        "bart", **ONE_VOCABULARY, output_bias=True, logits_bias=True, **{"encoder.layers": 1}
    ),
    "no positions, heads of the decoder": lambda: helpers.tiny(
        "vaswani2017_base", score_scale="d_model",
        **{"encoder.positions": "none", "decoder.num_heads": 2, "decoder.d_ff": 8},
    ),
}  # fmt: skip


FLOAT32 = checks.Quantization.FLOAT32


def arrays_of(config: TransformerConfig) -> dict[str, np.ndarray]:
    return helpers.random_arrays(config, dtype="float32")


def write(path: Path, config: TransformerConfig, numbers=FLOAT32, **changed: np.ndarray) -> Path:
    folder.write(
        path, config, arrays_of(config) | changed, folder.vocabularies(config, None), numbers
    )
    return path


def difference(path: Path, config: TransformerConfig, numbers=FLOAT32) -> float:
    vocabularies = folder.vocabularies(config, None)
    return folder.check(path, config, arrays_of(config), vocabularies, numbers)


# that of two biases is a BART too, and the gated T5 has tables of distances too
@pytest.mark.parametrize("name", [quick_if(n not in ("BART", "UMT5"), n) for n in CONFIGS])
def test_log_probabilities_equal_ours(name, tmp_path):
    config = CONFIGS[name]()
    assert difference(write(tmp_path / "ct2", config), config) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["small", "bart", "t5"])
def test_every_field_is_computed_or_refused_by_name(preset, tmp_path):
    config = helpers.tiny(preset, **({} if preset == "small" else ONE_VOCABULARY))
    refused = set()
    for field, changed in helpers.with_one_field_changed(config):
        try:
            checks.check(changed)
        except ConfigError as error:
            assert field in str(error), error
            refused.add(field)
            continue
        path = write(tmp_path / field, changed)
        assert difference(path, changed) < 2e-5, field
        shutil.rmtree(path)
    assert "encoder.mixing" in refused and not refused & {"norm_epsilon", "decoder.layers"}


def test_a_swapped_matrix_is_noticed_and_nothing_is_written(tmp_path, monkeypatch):
    config = CONFIGS["T5, gated"]()
    arrays = arrays_of(config)
    up, gate = (f"encoder.blocks.0.feed_forward.{part}.kernel" for part in ("up", "gate"))
    write(tmp_path / "ct2", config, **{up: arrays[gate], gate: arrays[up]})
    with pytest.raises(DifferentError, match="log-probabilities differ"):
        difference(tmp_path / "ct2", config)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("numbers", ["float32", "float16"])
def test_a_number_that_is_not_finite_is_noticed_in_every_row(numbers, tmp_path):
    """A token that stands in one row of the self-check alone is NaN; float16 makes it infinite."""
    config = CONFIGS["pre-norm, two vocabularies, wide heads"]()
    numbers, name = checks.Quantization(numbers), "source_embedding.embedding"
    source, _ = conversion.random_batch(config, 0, 7)
    for row in (0, len(source) - 1):
        others = {i for other in range(len(source)) if other != row for i in source[other]}
        token = next(i for i in source[row] if i not in others)
        table = arrays_of(config)[name]
        table[token] = 1e5 if numbers == "float16" else np.nan
        path = write(tmp_path / str(row), config, numbers, **{name: table})
        with pytest.raises(DifferentError, match="differ by nan"):
            difference(path, config, numbers)


def test_a_quantized_folder_stores_smaller_numbers(tmp_path):
    """A number of a matrix takes two bytes in float16, and one in int8."""
    config = helpers.tiny("small", d_model=48, d_ff=96, num_heads=4)
    sizes = {
        each: (write(tmp_path / each, config, each) / "model.bin").stat().st_size
        for each in checks.Quantization
    }
    numbers = sum(array.size for array in arrays_of(config).values())
    tables = 2 * config.longest * config.d_model
    assert sizes["float32"] == pytest.approx(4 * (numbers + tables), rel=0.1)
    assert sizes["float16"] == pytest.approx(sizes["float32"] / 2, rel=0.1)
    assert sizes["int8"] < 0.75 * sizes["float16"]
    assert all(difference(tmp_path / each, config, each) < 0.5 for each in sizes)


REFUSED = {
    "key_bias=False": {"key_bias": False},
    "encoder.attention_span='local'": {
        "encoder.attention_span": "local",
        "encoder.local_radius": 3,
    },
    "norm='layer_unbiased'": {"norm": "layer_unbiased"},
    "encoder.mixing='summed'": {"encoder.mixing": "summed"},
    "decoder.head_merge='raw'": {"decoder.head_merge": "raw"},
    "encoder.embedding_norm_of='tokens'": {
        **{"encoder.embedding_norm": True, "encoder.embedding_norm_of": "tokens"}
    },
    "decoder.positions_at='feed_forward'": {"decoder.positions_at": "feed_forward"},
    "encoder.self_mask=()": {"encoder.self_mask": ()},
    "decoder.self_mask=()": {"decoder.self_mask": ()},
    "decoder.cross_mask=()": {"decoder.cross_mask": ()},
    "bos_id=target_pad_id=0": {"bos_id": 0, "source_pad_id": 5},
    "decoder.position_index='not_padding'": {
        **{"decoder.position_index": "not_padding", "decoder.self_mask": (Mask.CAUSAL,)},
        "bos_id": 0,
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_field_and_value(words):
    config = helpers.tiny("small", **REFUSED[words])
    with pytest.raises(ConfigError) as caught:
        checks.check(config)
    assert words in str(caught.value) and str(caught.value).count(";") == 0
    checks.check(helpers.tiny("small"))


def test_a_start_that_is_padding_only_of_the_source_can_be_expressed():
    config = helpers.tiny("small")
    checks.check(dataclasses.replace(config, source_pad_id=config.bos_id))


def test_all_faults_of_a_document_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        checks.check(helpers.tiny("blog2023"))
    named = "encoder.mixing decoder.mixing residual encoder.self_mask decoder.cross_mask".split()
    assert [word for word in named if word not in str(caught.value)] == []
    with pytest.raises(ConfigError, match="branches is self_attention of feed_forward, feed_"):
        checks.check(helpers.tiny("part2_encoder"))


def test_a_distance_that_rounds_to_another_bucket_is_refused(monkeypatch):
    config = helpers.tiny("t5", max_length=300, **ONE_VOCABULARY)
    checks.check(config)
    # Its sum in float32 rounds up to the next bucket, our sum of integers does not
    monkeypatch.setattr(checks.np, "log", lambda x: np.nextafter(np.log2(x), np.float32(0)) / 4)
    monkeypatch.setattr(checks.math, "log", lambda x: 1.0)
    with pytest.raises(ConfigError, match="to another bucket"):
        checks.check(config)


# The command


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory) -> Path:
    """The run as CTranslate2's folder in float32."""
    path = tmp_path_factory.mktemp("exported") / "ct2"
    with runs.as_a_user():
        assert runs.main("convert", run, path, "--to", "ct2") == 0
    return path


LINES = ["the cat", "a red dog sees the small bird", "house", "the cat and the dog", "a"]


def test_its_translator_reads_a_folder_with_the_tokenizer_next_to_it(run, exported):
    names = {path.name for path in exported.iterdir()}
    assert names == {"model.bin", "config.json", "shared_vocabulary.json", "tokenizer.json"}
    tokenizer = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    words = [tokenizer.encode(line, add_special_tokens=False).tokens for line in LINES]
    engine = ctranslate2.Translator(str(exported), device="cpu", intra_threads=1)
    results = engine.translate_batch(words, beam_size=1, max_decoding_length=20)
    with runs.as_a_user():
        ours = jt.Translator.load(run)(LINES, max_length=20)
    ids = [[tokenizer.token_to_id(x) for x in result.hypotheses[0]] for result in results]
    assert [tokenizer.decode(row) for row in ids] == ours and len(set(ours)) > 2


def test_the_command_quantizes_and_replaces(run, exported, tmp_path, capsys):
    sizes = [(exported / "model.bin").stat().st_size]
    with runs.as_a_user():
        arguments = ("convert", run, tmp_path / "ct2", "--to", "ct2", "--quantization")
        for more in (["float16"], ["int8", "--force"]):
            assert runs.main(*arguments, *more) == 0
            content = (tmp_path / "ct2" / "model.bin").read_bytes()
            out = capsys.readouterr().out
            assert f"sha256 {hashlib.sha256(content).hexdigest()}\n" in out
            assert f"\nchecked: ran CTranslate2 in {more[0]} next to the model in float32" in out
            sizes.append(len(content))
    assert sizes[0] > 1.8 * sizes[1] and sizes[1] > 1.2 * sizes[2]


@pytest.mark.parametrize("names", [[run_files.SHARED_FILE], run_files.SIDE_FILES])
def test_the_tokenizers_of_a_run_go_along_unchanged(names, tmp_path):
    """Those of each side too, and before those of the folder that the run was made from."""
    for name in names:
        (tmp_path / name).write_text(name)
    other = {"tokenizer_config.json": tmp_path / "absent"}
    source = mock.Mock(registry.Pretrained, path=tmp_path, extra_files=other)
    for form in (deployed.CTRANSLATE2, deployed.STABLEHLO):
        expected = {name: name.encode() for name in names}
        assert form.files(base.Destination(form, tmp_path / "out", source)) == expected


def test_weights_without_a_tokenizer_have_ids_for_tokens(tmp_path, capsys):
    model = helpers.random_model(helpers.tiny("small"), dtype="float32")
    jt.convert.save(model, tmp_path / "run")
    with runs.as_a_user():
        code = runs.main("convert", tmp_path / "run", tmp_path / "ct2", "--to", "ct2", "--no-check")
    assert code == 0 and "tokens are ids in decimal" in capsys.readouterr().out
    words = json.loads((tmp_path / "ct2" / "shared_vocabulary.json").read_text())
    assert words == [str(i) for i in range(13)]
    settings = json.loads((tmp_path / "ct2" / "config.json").read_text())
    assert (settings["decoder_start_token"], settings["eos_token"]) == ("1", "2")
    assert not settings["add_source_eos"]


def test_special_tokens_are_named_by_the_target_s_vocabulary():
    ids = dict(target_pad_id=3, bos_id=4, eos_id=5, tying="none")
    config = helpers.tiny("small", source_vocab_size=300, target_vocab_size=310, **ids)
    text = ["the cat"] * 9
    pair = TokenizerPair(
        Tokenizer.train(text, 300, pad_id=0, bos_id=1, eos_id=2),
        Tokenizer.train(text, 310, pad_id=3, bos_id=4, eos_id=5),
    )
    settings = folder.vocabularies(config, pair).settings
    names = ("bos_token", "decoder_start_token", "eos_token", "unk_token")
    assert [settings[name] for name in names] == ["<bos>", "<bos>", "<eos>", "<eos>"]
    assert settings["add_source_eos"]


def test_a_missing_package_is_named_with_the_flag_that_needs_it(monkeypatch):
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    opened, to = mock.Mock(registry.Pretrained), base.Destination(deployed.STABLEHLO, Path("out"))
    for words, needs in (
        ("--engine ctranslate2 needs CTranslate2", lambda: engine.load(opened)),
        ("--to ct2 needs CTranslate2", lambda: deployed.CTRANSLATE2.check_options(to)),
        ("--to stablehlo needs flatbuffers", lambda: deployed.STABLEHLO.check_options(to)),
    ):
        with pytest.raises(ConfigError, match=f"^{words}.*: pip install 'jax-seq2seq"):
            needs()


def test_options_that_contradict_the_folder_are_refused(run, tmp_path, console):
    target = tmp_path / "ct2"
    for words, more in (
        (["--quantization int4", "int8"], ["--to", "ct2", "--quantization", "int4"]),
        (["--quantization int8", "--to ct2"], ["--quantization", "int8"]),
        (["--dtype bfloat16", "--quantization"], ["--to", "ct2", "--dtype", "bfloat16"]),
    ):
        console.refused(2, words, "convert", run, target, *more)
    target.mkdir()
    (target / "thesis.tex").touch()
    console.refused(3, [target, "thesis.tex"], "convert", run, target, "--to", "ct2", "--force")
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


def test_a_model_that_cannot_be_expressed_is_refused_before_anything_is_read(tmp_path, console):
    model = helpers.random_model(helpers.tiny("lesson10"), dtype="float32")
    jt.convert.save(model, tmp_path / "run")
    for more in ([], ["--dry-run"]):
        command = ("convert", tmp_path / "run", tmp_path / "ct2", "--to", "ct2", *more)
        console.refused(2, ["decoder.cross_mask=()"], *command)
    assert not (tmp_path / "ct2").exists()


# The engine


AVERAGE = ["--penalty", "average", "--early-stopping", "full"]


def translated(console: runs.Console, run: Path, *more: str | Path) -> str:
    with runs.as_a_user():
        lines = "".join(f"{line}\n" for line in [*LINES, ""]).encode()
        code, out, err = console.say("translate", "--run", run, *more, stdin=lines)
    assert code == 0, err
    return out


@pytest.fixture(scope="module")
def copy(run, tmp_path_factory) -> Path:
    """A copy of the run, in which the engine's models are kept."""
    path = tmp_path_factory.mktemp("copied") / "run"
    return Path(shutil.copytree(run, path))


def test_the_engine_translates_as_jax_does(console, copy):
    sides = []
    for more in ([], ["--engine", "ctranslate2"]):
        out = translated(console, copy, "--beam", "4", "--n-best", "2", *AVERAGE, *more)
        sides.append([line.rpartition(" ||| ") for line in out.splitlines()])
    texts, scores = ([[row[i] for row in side] for side in sides] for i in (0, 2))
    assert texts[0] == texts[1] and len(set(texts[0])) > 4
    np.testing.assert_allclose(*np.array(scores, float), rtol=0, atol=1e-4)


def test_a_model_is_converted_once_for_each_quantization_and_weights(console, copy):
    converted = copy / "ctranslate2"
    flags = ("--engine", "ctranslate2")
    first = translated(console, copy, *flags)
    (path,) = converted.iterdir()
    stamp = (path / "model.bin").stat().st_mtime_ns
    assert translated(console, copy, *flags) == first
    assert (path / "model.bin").stat().st_mtime_ns == stamp
    translated(console, copy, *flags, "--quantization", "int8")
    translated(console, copy, *flags, "--weights", "100")
    assert len(list(converted.iterdir())) == 3
    content = (path / "model.bin").read_bytes()
    (path / "model.bin").write_bytes(content[:-1] + b"?")
    _, out, err = console.say("translate", "--run", copy, *flags, stdin=b"the cat\n")
    assert f"{path / 'model.bin'}: damaged" in err and "is converted again" in err and out
    assert (path / "model.bin").read_bytes() == content
    sums = (path / "SHA256SUMS").read_text().splitlines(keepends=True)
    (path / "SHA256SUMS").write_text("".join(x for x in sums if "model.bin" not in x))
    _, _, err = console.say("translate", "--run", copy, *flags, stdin=b"the cat\n")
    assert "does not list model.bin" in err
    opened = registry.open(copy)
    with pytest.raises(ConfigError, match="max_length=9999 must be between 1 and"):
        engine.load(opened, max_length=9999)
    other = dataclasses.replace(opened, config=opened.config.with_sizes(norm_epsilon=0.1))
    more = dataclasses.replace(opened, files=(*opened.files, copy / "config.json"))
    with runs.as_a_user():
        paths = [engine.converted(each, FLOAT32) for each in (opened, other, more)]
    assert paths[0] == path and len({*paths}) == 3
    shutil.rmtree(path)


SEARCH = dict(num_beams=4, beam_scorer=BeamScorer.AVERAGE, length_penalty=1.0)
SEARCH["early_stopping"] = EarlyStopping.FULL
CONSTRAINED = {
    "greedy": dict(
        **dict(min_new_tokens=5, suppress_tokens=(40, 45), bad_words_ids=((50,), (2,))),
        **dict(forced_bos_token_id=100, forced_eos_token_ids=(7,), decoder_start_token_id=9),
        max_length=7,
    ),
    "a search that normalises again": dict(
        **SEARCH | {"num_return_sequences": 3, "max_length": 9, "renormalize_logits": True},
        **{"min_new_tokens": 4, "suppress_tokens": (40, 45), "bad_words_ids": ((50,),)},
    ),
}


@pytest.mark.parametrize("name", CONSTRAINED)
def test_the_engine_keeps_constraints(name, copy):
    opened, options = registry.open(copy), CONSTRAINED[name]
    with runs.as_a_user():
        ours = jt.Translator.from_opened(opened, **options).hypotheses(LINES)
        theirs = engine.load(opened, **options).hypotheses(LINES)
    ids = [[[each.ids.tolist() for each in line] for line in side] for side in (ours, theirs)]
    assert ids[0] == ids[1]
    scores = [[each.score for line in side for each in line] for side in (ours, theirs)]
    if name != "greedy":
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-4)
        return
    rows = [row for (row,) in ids[0]]
    assert {row[0] for row in rows} == {100} and {row[-1] for row in rows if len(row) == 7} == {7}
    assert min(map(len, rows)) > 5 and {*scores[0], *scores[1]} == {None}


NO_PENALTY = SEARCH | {"length_penalty": 0.0}
DIFFERENT = {
    "beam_scorer=gnmt": dict(num_beams=2),
    "early_stopping=heuristic": SEARCH | dict(early_stopping=EarlyStopping.HEURISTIC),
    "length_penalty=0.0": NO_PENALTY,
    "length_penalty=0.0 ": NO_PENALTY
    | dict(early_stopping=EarlyStopping.NEVER, num_return_sequences=2),
    "do_sample=True": dict(do_sample=True),
    "forced_eos_token_id=(1, 2)": dict(constraints=Constraints(forced_eos_token_ids=(1, 2))),
    "repetition_penalty=2.0": dict(constraints=Constraints(repetition_penalty=2.0)),
    "no_repeat_ngram_size=2": dict(constraints=Constraints(no_repeat_ngram_size=2)),
    "bad_words_ids=((1, 2),)": dict(constraints=Constraints(bad_words_ids=((1, 2),))),
    "begin_suppress_tokens=(1,)": dict(constraints=Constraints(begin_suppress_tokens=(1,))),
    "forced_eos_token_id=(1,)": SEARCH | dict(constraints=Constraints(forced_eos_token_ids=(1,))),
    "min_new_tokens=3": SEARCH | dict(constraints=Constraints(min_new_tokens=3)),
    "forced_bos_token_id=5": SEARCH | dict(forced_bos_token_id=5),
}


@pytest.mark.parametrize("words", DIFFERENT)
def test_settings_with_other_tokens_are_refused_by_name(words):
    with pytest.raises(ConfigError) as caught:
        engine.check_generation(GenerationConfig(**DIFFERENT[words]))
    assert words in str(caught.value)
    for stopping in (EarlyStopping.HEURISTIC, EarlyStopping.NEVER):  # it ends with its best
        search = SEARCH | dict(length_penalty=0.0, early_stopping=stopping)
        engine.check_generation(GenerationConfig(**search))


def test_options_without_the_engine_are_refused(console, copy):
    engine = ["--engine", "ctranslate2"]
    for words, more in {
        "--quantization int8 is for --engine ctranslate2": ["--quantization", "int8"],
        "no ensembles": [*engine, "--ensemble", str(copy)],
        "--precision float64": [*engine, "--precision", "float64", "--quantization", "int8"],
        "--precision float32": [*engine, "--precision", "float32"],
        "no attention": [*engine, "--attention", "page.html"],
        "beam_scorer=gnmt": [*engine, "--beam", "4"],
        "--quantization int4": [*engine, "--quantization", "int4"],
        "no_repeat_ngram_size=2": [*engine, "--no-repeat-ngram-size", "2"],
    }.items():
        console.refused(2, [words], "translate", "--run", copy, *more, stdin=b"a\n")


def test_evaluate_gives_the_scores_of_the_engine(console, copy, tmp_path):
    for name, lines in (("s", LINES), ("t", LINES[::-1])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    command = ["evaluate", "--run", copy, "--source", tmp_path / "s", "--target", tmp_path / "t"]
    with runs.as_a_user():
        ours, theirs = (
            json.loads(console.say(*command, "--json", "--bootstrap", "0", *more)[1])
            for more in ([], ["--engine", "ctranslate2"])
        )
    assert (ours["bleu"], ours["chrf"]) == (theirs["bleu"], theirs["chrf"])
    assert theirs["engine"] == "ctranslate2" and theirs["quantization"] == "float32"
    assert "loss" in ours and "loss" not in theirs


# More models


@pytest.mark.slow
@pytest.mark.parametrize("preset", preset_names.TEXT)
def test_searches_of_random_models_equal_ours(preset, tmp_path):
    # Random models write padding, which ours hides if decoder.self_mask says so (docs/convert.md)
    config = helpers.tiny(preset, source_vocab_size=13, **{"decoder.self_mask": (Mask.CAUSAL,)})
    if list(checks.problems(config)):
        pytest.skip("it cannot be expressed")
    model = helpers.random_model(config, dtype="float32")
    engine = ctranslate2.Translator(str(write(tmp_path / "ct2", config)), intra_threads=1)
    source, _ = helpers.batch(config, rows=5, source=15)
    words = [[str(i) for i in row if i != config.source_pad_id] for row in source]
    shared = dict(max_decoding_length=12, min_decoding_length=0, return_end_token=True)
    searches = {(1, 0.0): jt.generate.greedy(model, source, max_length=12)[:, None]}
    average = dict(beam_size=4, max_length=12, scorer=BeamScorer.AVERAGE)
    stoppings = (1.0, EarlyStopping.FULL, 4), (0.0, EarlyStopping.HEURISTIC, 1)
    for penalty, stopping, count in stoppings:
        search = average | dict(length_penalty=penalty, early_stopping=stopping)
        searches[4, penalty] = jt.generate.beam_search.n_best(model, source, count, **search)[0]
    for (beams, penalty), tokens in searches.items():
        results = engine.translate_batch(
            words, beam_size=beams, length_penalty=penalty, num_hypotheses=tokens.shape[1], **shared
        )
        for rows, result in zip(np.asarray(tokens).tolist(), results, strict=True):
            lengths = [
                row.index(config.eos_id) + 1 if config.eos_id in row else None for row in rows
            ]
            cut = [row[:length] for row, length in zip(rows, lengths, strict=True)]
            assert [[int(x) for x in hypothesis] for hypothesis in result.hypotheses] == cut
