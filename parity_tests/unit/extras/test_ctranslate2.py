"""CTranslate2 computes what our models compute: its folders, and what it cannot express."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import jax_transformer as jt
from jax_transformer.config import Mask, TransformerConfig
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.extras.deploy.ctranslate2 import checks, engine, folder
from jax_transformer.formats import registry
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from parity_tests import preset_names
from parity_tests.unit import helpers, runs

ctranslate2 = pytest.importorskip("ctranslate2")

ONE_VOCABULARY = {"source_vocab_size": 13}
# Every field that decides what is computed has two values among these
CONFIGS = {
    "pre-norm, two vocabularies, wide heads": lambda: jt.preset(
        "small", **helpers.ODD, head_dim=5, tying="none", output_bias=True
    ),
    "post-norm, final norm, no biases": lambda: helpers.tiny(
        "lesson10_repaired", bias=False, norm_epsilon=0.1, **{"decoder.layers": 1}
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
    "no positions, heads of the decoder": lambda: helpers.tiny(
        "vaswani2017_base", score_scale="d_model",
        **{"encoder.positions": "none", "decoder.num_heads": 2, "decoder.d_ff": 8},
    ),
}  # fmt: skip


def arrays_of(config: TransformerConfig) -> dict[str, np.ndarray]:
    return helpers.random_arrays(config, dtype="float32")


def write(path: Path, config: TransformerConfig, **changed: np.ndarray) -> Path:
    rest = folder.vocabularies(config, None), checks.Quantization.FLOAT32
    folder.write(path, config, arrays_of(config) | changed, *rest)
    return path


def difference(path: Path, config: TransformerConfig) -> float:
    rest = folder.vocabularies(config, None), checks.Quantization.FLOAT32
    return folder.check(path, config, arrays_of(config), *rest)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_equal_ours(name, tmp_path):
    config = CONFIGS[name]()
    assert difference(write(tmp_path / "ct2", config), config) < 2e-5


def test_a_swapped_matrix_is_noticed_and_nothing_is_written(tmp_path, monkeypatch):
    config = CONFIGS["T5, gated"]()
    arrays = arrays_of(config)
    up, gate = (f"encoder.blocks.0.feed_forward.{part}.kernel" for part in ("up", "gate"))
    write(tmp_path / "ct2", config, **{up: arrays[gate], gate: arrays[up]})
    with pytest.raises(DifferentError, match="log-probabilities differ"):
        difference(tmp_path / "ct2", config)


REFUSED = {
    "encoder.mixing='summed'": {"encoder.mixing": "summed"},
    "decoder.head_merge='raw'": {"decoder.head_merge": "raw"},
    "encoder.embedding_norm_of='tokens'": {
        "encoder.embedding_norm": True,
        "encoder.embedding_norm_of": "tokens",
    },
    "decoder.positions_at='feed_forward'": {"decoder.positions_at": "feed_forward"},
    "encoder.self_mask=()": {"encoder.self_mask": ()},
    "decoder.self_mask=()": {"decoder.self_mask": ()},
    "decoder.cross_mask=()": {"decoder.cross_mask": ()},
    "bos_id=target_pad_id=0": {"bos_id": 0},
    "decoder.position_index='not_padding'": {
        "decoder.position_index": "not_padding",
        "decoder.self_mask": (Mask.CAUSAL,),
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


def test_int8_is_smaller_and_close(run, exported, tmp_path):
    with runs.as_a_user():
        arguments = ("convert", run, tmp_path / "ct2", "--to", "ct2", "--quantization")
        assert runs.main(*arguments, "int8") == 0
        assert runs.main(*arguments, "float16", "--force") == 0
        assert runs.main(*arguments, "int8", "--force") == 0
    sizes = [(path / "model.bin").stat().st_size for path in (exported, tmp_path / "ct2")]
    assert sizes[1] < 0.5 * sizes[0]


def test_weights_without_a_tokenizer_have_ids_for_tokens(tmp_path, capsys):
    model = helpers.random_model(helpers.tiny("small"), dtype="float32")
    jt.convert.save(model, tmp_path / "run")
    with runs.as_a_user():
        code = runs.main("convert", tmp_path / "run", tmp_path / "ct2", "--to", "ct2", "--no-check")
    assert code == 0 and "tokens are ids in decimal" in capsys.readouterr().out
    assert json.loads((tmp_path / "ct2" / "shared_vocabulary.json").read_text()) == [
        str(i) for i in range(13)
    ]
    settings = json.loads((tmp_path / "ct2" / "config.json").read_text())
    assert (settings["decoder_start_token"], settings["eos_token"]) == ("1", "2")
    assert not settings["add_source_eos"]


def test_options_that_contradict_the_folder_are_refused(run, tmp_path, console):
    target = tmp_path / "ct2"
    console.refused(2, ["--quantization int4", "int8"],
                    "convert", run, target, "--to", "ct2", "--quantization", "int4")  # fmt: skip
    console.refused(2, ["--quantization int8", "--to ct2"],
                    "convert", run, target, "--quantization", "int8")  # fmt: skip
    console.refused(2, ["--dtype bfloat16", "--quantization"],
                    "convert", run, target, "--to", "ct2", "--dtype", "bfloat16")  # fmt: skip
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


@pytest.mark.parametrize("options", [[], ["--beam", "4", "--n-best", "2", *AVERAGE]])
def test_the_engine_translates_as_jax_does(console, copy, options):
    ours, theirs = (
        translated(console, copy, *options, *more).split("\n")
        for more in ([], ["--engine", "ctranslate2"])
    )
    assert [x.rpartition(" ||| ")[0] or x for x in theirs] == [
        x.rpartition(" ||| ")[0] or x for x in ours
    ]
    assert len(set(ours)) > 4
    scores = [
        [float(x.rpartition(" ||| ")[2]) for x in each if "|||" in x] for each in (ours, theirs)
    ]
    assert np.allclose(*scores, rtol=0, atol=1e-4)


def test_a_model_is_converted_once_for_each_quantization_and_weights(console, copy):
    converted = copy / "ctranslate2"
    engine = ("--engine", "ctranslate2")
    first = translated(console, copy, *engine)
    (path,) = converted.iterdir()
    stamp = (path / "model.bin").stat().st_mtime_ns
    assert translated(console, copy, *engine) == first
    assert (path / "model.bin").stat().st_mtime_ns == stamp
    translated(console, copy, *engine, "--quantization", "int8")
    translated(console, copy, *engine, "--weights", "100")
    assert len(list(converted.iterdir())) == 3
    content = (path / "model.bin").read_bytes()
    (path / "model.bin").write_bytes(content[:-1] + b"?")
    _, out, err = console.say("translate", "--run", copy, *engine, stdin=b"the cat\n")
    assert f"{path / 'model.bin'}: damaged" in err and "is converted again" in err and out
    assert (path / "model.bin").read_bytes() == content
    shutil.rmtree(path)


def test_the_engine_keeps_constraints_of_greedy_decoding(copy):
    options = dict(
        min_new_tokens=5,
        suppress_tokens=(40, 45),
        bad_words_ids=((50,), (2,)),
        forced_bos_token_id=100,
        forced_eos_token_ids=(7,),
        max_length=7,
        decoder_start_token_id=9,
    )
    opened = registry.open(copy)
    with runs.as_a_user():
        ours = jt.Translator.from_opened(opened, **options).hypotheses(LINES)
        theirs = engine.load(opened, **options).hypotheses(LINES)
    ids = [[[each.ids.tolist() for each in line] for line in side] for side in (ours, theirs)]
    assert ids[0] == ids[1]
    rows = [row for (row,) in ids[0]]
    assert {row[0] for row in rows} == {100} and {row[-1] for row in rows if len(row) == 7} == {7}
    assert min(map(len, rows)) > 5


SEARCH = dict(num_beams=4, beam_scorer="average", early_stopping="full", length_penalty=1.0)
DIFFERENT = {
    "beam_scorer=gnmt": dict(num_beams=4),
    "early_stopping=heuristic": dict(num_beams=4, beam_scorer="average", length_penalty=1.0),
    "length_penalty=0.0": dict(
        num_beams=4, beam_scorer="average", length_penalty=0.0, early_stopping="full"
    ),
    "do_sample=True": dict(do_sample=True),
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
    values = {
        name: {"beam_scorer": BeamScorer, "early_stopping": EarlyStopping}.get(name, lambda x: x)(x)
        for name, x in DIFFERENT[words].items()
    }
    with pytest.raises(ConfigError) as caught:
        engine.check_generation(GenerationConfig(**values))
    assert words in str(caught.value)


def test_a_search_without_length_penalty_ends_with_its_best(copy):
    search = dict(num_beams=4, beam_scorer=BeamScorer.AVERAGE, length_penalty=0.0)
    for stopping in (EarlyStopping.HEURISTIC, EarlyStopping.NEVER):
        engine.check_generation(GenerationConfig(**search, early_stopping=stopping))


def test_options_without_the_engine_are_refused(console, copy):
    engine = ["--engine", "ctranslate2"]
    for words, more in {
        "--quantization int8 is for --engine": ["--quantization", "int8"],
        "no ensembles": [*engine, "--ensemble", str(copy)],
        "--precision float64": [*engine, "--precision", "float64"],
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
    assert {name: ours[name] for name in ("bleu", "chrf")} == {
        name: theirs[name] for name in ("bleu", "chrf")
    }
    assert theirs["engine"] == "ctranslate2" and theirs["quantization"] == "float32"
    assert "loss" in ours and "loss" not in theirs


# More models, and a longer run


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
            cut = [
                row[: row.index(config.eos_id) + 1] if config.eos_id in row else row for row in rows
            ]
            assert [[int(x) for x in hypothesis] for hypothesis in result.hypotheses] == cut


@pytest.mark.slow
def test_500_lines_of_a_trained_run_are_equal(copy):
    choose = random.Random(1)
    lines = [
        " ".join(choose.choice(list(runs.WORDS)) for _ in range(choose.randint(1, 12)))
        for _ in range(500)
    ]
    opened = registry.open(copy)
    average = {"penalty": BeamScorer.AVERAGE, "early_stopping": EarlyStopping.FULL}
    with runs.as_a_user():
        for options in ({}, {"beam_size": 4, "length_penalty": 1.0, **average}):
            ours = jt.Translator.from_opened(opened, **options).hypotheses(lines)
            theirs = engine.load(opened, **options).hypotheses(lines)
            ids = [[line[0].ids.tolist() for line in side] for side in (ours, theirs)]
            assert ids[0] == ids[1]
            assert len(set(map(tuple, ids[0]))) > 100
