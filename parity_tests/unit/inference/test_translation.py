"""Lines of text are translated in their order, batched by length, by each search."""

import itertools
import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_transformer as jt
from jax_transformer import convert, generate, transformer
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.formats import registry
from jax_transformer.generate import GenerationConfig, beam_search, decoding, prepare
from jax_transformer.inference import translation
from jax_transformer.inference.translation import Translator
from jax_transformer.nn.sharding import MESH_AXES
from jax_transformer.training import evaluation
from parity_tests.unit import runs
from parity_tests.unit.helpers import shapes, tiny
from parity_tests.unit.speakers import loud

PAD, BOS, EOS = 1, 2, 3
WORDS = "one two three four five six seven eight nine ten"
TOKENIZER = Tokenizer.train([WORDS] * 9, 300, pad_id=PAD, bos_id=BOS, eos_id=EOS)
SPEAKER = tiny("lesson10_repaired", vocab_size=TOKENIZER.vocab_size, max_length=16, num_layers=1)
LINES = ["one two three four five six", "seven", "", "ABCDEFGHIJKL", "eight nine"]
LINES += ["ten ten ten ten ten ten", "", "one"]


@pytest.fixture
def echo(monkeypatch) -> list[tuple]:
    """Replace decoding by a copy of the source, and record the calls."""
    calls = []

    def length(model, source, config):
        return prepare.max_new_tokens(model.config, source.shape[1], config.max_new_tokens)

    def token_by_token(model, source, config, forced, prompt, key=None, rows=None):
        call = (source.shape, length(model, source, config))
        if key is None:
            calls.append(("greedy", *call))
        else:
            limits = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
            calls.append(("sample", *call, rows.tolist(), limits, key))
        return source

    def search(model, source, config, forced, prompt):
        call = (source.shape, length(model, source, config))
        calls.append(("beam", *call, config.num_beams, config.length_penalty))
        count = config.num_return_sequences
        scores = np.arange(count)[None] + np.full((len(source), 1), 0.5)
        return np.stack([source] * count, axis=1), scores

    monkeypatch.setattr(decoding, "_token_by_token", token_by_token)
    monkeypatch.setattr(beam_search, "search", search)
    return calls


def test_translations_come_in_the_order_of_the_lines(echo):
    model = transformer.abstract(SPEAKER)
    assert Translator(model, TOKENIZER, widths=(4, 8, 99), tokens_per_batch=32)(LINES) == LINES
    assert len(echo) > 2 and all(
        kind == "greedy" and width in (4, 8, 16) and length == min(16, 2 * width)
        for kind, (_, width), length in echo
    )
    assert len({shape for _, shape, _ in echo}) <= 3  # one program for each width
    assert all(rows in (1, 4, 16, 32 // width) for _, (rows, width), _ in echo)
    echo.clear()
    search = GenerationConfig(num_beams=2, length_penalty=0.2)
    assert Translator(model, TOKENIZER, search, tokens_per_batch=64)(LINES) == LINES
    assert echo and all((*call[:1], *call[2:]) == ("beam", 16, 2, 0.2) for call in echo)
    assert {shape for _, shape, *_ in echo} == {(2, 16)}  # a beam of two takes twice the memory
    echo.clear()
    assert Translator(model, TOKENIZER)(["", ""]) == ["", ""]
    assert Translator(model, TOKENIZER)([]) == []
    assert not echo


def test_a_blank_line_is_not_translated(echo):
    translator = Translator(transformer.abstract(SPEAKER), TOKENIZER)
    assert translator(["\t", " " * 99, "\u3000"]) == ["", "", ""] and not echo
    assert translator(["\t", "one", " "]) == ["", "one", ""]
    assert [shape for _, shape, _ in echo] == [(1, 16)]


@pytest.mark.parametrize(
    ("tokens", "size", "ready"),
    [
        (8, 3, [2, 2, 2, 1]),  # batches of two rows: c waits for d
        (8, 4, [2, 2, 2, 1]),
        (32, 2, [4, 3]),  # of eight rows: a and b wait for one window, no longer
        (32, 7, [7]),
    ],
)
def test_a_full_window_leaves_incomplete_batches_to_the_next(echo, tokens, size, ready):
    model, lines = transformer.abstract(SPEAKER), list("abcdefg")
    translator = Translator(model, TOKENIZER, widths=(4,), tokens_per_batch=tokens)
    windows = [lines[i : i + size] for i in range(0, len(lines), size)]
    batches = [batch for batch in translator.stream(windows, size) if batch]
    assert [line.hypotheses[0].text for batch in batches for line in batch] == lines
    assert [len(batch) for batch in batches] == ready and len(echo) == len(ready)
    assert [line.number for batch in batches for line in batch] == list(range(7))


def test_a_window_that_is_not_full_is_translated_at_once(echo):
    translator = Translator(transformer.abstract(SPEAKER), TOKENIZER, widths=(4,))
    batches = translator.stream([["a"], ["b", "c"]], 3)
    lines = [[(line.number, line.source) for line in batch] for batch in batches if batch]
    assert lines == [[(0, "a")], [(1, "b"), (2, "c")]]


def test_a_few_lines_have_few_rows(echo):
    """The rows that are left over repeat the lines: a loop lasts until all have ended."""
    translator = Translator(transformer.abstract(SPEAKER), TOKENIZER, widths=(4,))
    for count, rows in ((1, 1), (2, 4), (5, 16), (1024, 1024), (1030, 1024)):
        assert translator(["one"] * count) == ["one"] * count
        assert {shape for _, shape, _ in echo} == {(rows, 4)}  # a full batch decides for its width
        echo.clear()


def test_long_translations_have_few_rows(echo):
    """The cache has room for the longest output: at most eight times 8 positions."""
    model, lines = transformer.abstract(SPEAKER), ["one"] * 9
    for beams, tokens, rows in ((1, 8, 4), (2, 8, 2), (2, 2, 1), (3, 2, 1)):
        config = GenerationConfig(num_beams=beams, max_new_tokens=16)
        translator = Translator(model, TOKENIZER, config, widths=(2,), tokens_per_batch=tokens)
        assert translator(lines) == lines
        assert {shape for _, shape, *_ in echo} == {(rows, 2)}
        echo.clear()


@pytest.mark.parametrize(("models", "rows"), [(1, 4), (2, 2), (3, 1)])
def test_the_models_of_an_ensemble_share_the_room_for_caches(models, rows):
    config = GenerationConfig(max_new_tokens=16)
    several = [transformer.abstract(SPEAKER)] * models
    translator = Translator(several, TOKENIZER, config, widths=(2,), tokens_per_batch=8)
    assert translator.rows_per_batch(config)[0] == rows


def test_rows_are_a_multiple_of_the_parts_of_a_mesh():
    translator = Translator(
        transformer.abstract(SPEAKER), TOKENIZER, widths=(4,), tokens_per_batch=30
    )
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 3, 1), MESH_AXES)):
        assert translator.rows_per_batch(GenerationConfig()) == (6, 6)  # without: 7 and 1


def test_the_shortest_model_of_an_ensemble_decides_which_lines_fit():
    models = [transformer.abstract(SPEAKER.with_sizes(max_length=length)) for length in (16, 8, 12)]
    translator = Translator(models, TOKENIZER, widths=(4, 10))
    assert (translator.model.config.longest, translator.widths) == (8, (4, 8))
    with pytest.raises(InputError, match="over the model's max_length=8"):
        translator(["123456789"])


def test_samples_depend_on_the_line_number(echo):
    model = transformer.abstract(SPEAKER)
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.9, seed=7)
    assert Translator(model, TOKENIZER, config, widths=(8,), tokens_per_batch=64)(LINES) == LINES
    expected = {"temperature": 0.5, "top_k": 3, "top_p": 0.9}, jax.random.key(7)
    assert all(call[-2:] == expected for call in echo)
    numbers = {number for _, _, _, rows, *_ in echo for number in rows}
    assert numbers == {i for i, line in enumerate(LINES) if line}


def test_n_best_lists_have_the_moses_format(echo):
    config = GenerationConfig(num_beams=3, num_return_sequences=2)
    translator = Translator(transformer.abstract(SPEAKER), TOKENIZER, config)
    hypotheses = translator.hypotheses(["one", "", "two"])
    expected = ["0 ||| one ||| 0.500000", "0 ||| one ||| 1.500000", "1 |||  ||| 0.000000"]
    expected += ["2 ||| two ||| 0.500000", "2 ||| two ||| 1.500000"]
    lines = [translation.Line(i, "", [], False, each) for i, each in enumerate(hypotheses)]
    assert [text for line in lines for text in translation.n_best_lines(line)] == expected


def test_a_line_that_is_too_long_is_named_by_its_number(echo):
    model = transformer.abstract(SPEAKER)
    longest = "ABCDEFGHIJKLMNO"  # 15 tokens and the end token are the model's maximum
    assert Translator(model, TOKENIZER)(["", longest]) == ["", longest]
    message = r"^line 3 is 17 tokens long, over the model's max_length=16$"
    with pytest.raises(InputError, match=message):
        Translator(model, TOKENIZER)(["", "one", longest + "P"])
    with pytest.raises(InputError, match=message):
        list(Translator(model, TOKENIZER).stream([["", "one"], [longest + "P"]], 2))


def test_a_length_that_the_model_does_not_have_is_refused_before_weights_are_read():
    opened = mock.Mock(registry.Pretrained, config=SPEAKER)
    opened.tokenizer.return_value = TOKENIZER
    opened.generation_config.return_value = GenerationConfig()
    opened.model.side_effect = AssertionError("weights were read")
    with pytest.raises(ConfigError, match="max_length=17 must be between 1 and the model's 16"):
        Translator.from_opened(opened, max_length=17)


def test_a_translation_is_the_decoded_tokens_of_its_line():
    model = loud(SPEAKER, 0)
    ids = TOKENIZER.encode("one two")
    source = np.full((1, 16), PAD)
    source[0, : len(ids) + 1] = [*ids, EOS]
    tokens = np.asarray(generate.greedy(model, source, max_length=16))[0]
    hypotheses = Translator(model, TOKENIZER, tokens_per_batch=16).hypotheses(["one two", " "])
    assert TOKENIZER.decode(tokens)
    assert [h.text for h in hypotheses[0]] == [TOKENIZER.decode(tokens)]
    assert [each.score for (each,) in hypotheses] == [None, None]
    length = tokens.tolist().index(EOS) + 1 if EOS in tokens else len(tokens)
    assert hypotheses[0][0].ids.tolist() == tokens[:length].tolist()
    assert shapes(SPEAKER)["output.kernel"][1] == TOKENIZER.vocab_size


def test_ids_end_with_their_end_token(monkeypatch):
    rows = np.array([[5, PAD, EOS, PAD], [5, 6, PAD, 7]])
    monkeypatch.setattr(
        decoding, "_token_by_token", lambda model, source, *_: jnp.asarray(rows)[: len(source)]
    )
    translator = Translator(transformer.abstract(SPEAKER), TOKENIZER, tokens_per_batch=32)
    hypotheses = translator.hypotheses(["one", "two"])
    assert [h[0].ids.tolist() for h in hypotheses] == [[5, PAD, EOS], [5, 6, PAD, 7]]


def test_the_model_is_split_once(monkeypatch):
    """The check runs once, not in every call, as it takes milliseconds."""
    model, split, calls = loud(SPEAKER, 0), nnx.split, []
    monkeypatch.setattr(nnx, "split", lambda *args: calls.append(args) or split(*args))
    translator = Translator(model, TOKENIZER, widths=(8,), tokens_per_batch=32)
    first = translator(LINES)
    assert translator(LINES) == first and translator(LINES[:2], sample=True) and len(calls) == 1


def test_options_of_a_call_win_over_the_generation_config(echo):
    config = GenerationConfig(num_beams=2, length_penalty=0.2, max_new_tokens=5)
    translator = Translator(transformer.abstract(SPEAKER), TOKENIZER, config)
    for options in ({"beam_size": 3, "max_length": 4}, {"num_beams": 3, "max_new_tokens": 4}):
        assert translator(["one"], **options) == ["one"]
    assert {call[2:] for call in echo} == {(4, 3, 0.2)}
    for name, count in itertools.product(("num_return_sequences", "num_hypotheses"), (1, 2)):
        several = translator(["one", ""], **{name: count})
        assert [[each.text for each in row] for row in several] == [["one"] * count, [""]]
    assert translator.hypotheses(["one", ""], num_return_sequences=2)[0][1].score == 1.5
    for options, message in (
        ({"beem": 2}, r"unknown generation option 'beem' \(did you mean 'beam'\?\)"),
        ({"beam_size": 2, "num_beams": 3}, "num_beams is given twice"),
        ({"num_beams": 2, "beam_size": 3}, "num_beams is given twice"),
        ({"num_hypotheses": 3}, "num_return_sequences=3 needs num_beams of at least 3, not 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            translator(["one"], **options)
    with pytest.raises(ConfigError, match="one string"):
        translator("one")


def save(path: Path, seed: int) -> transformer.Transformer:
    """Save a run of a random model, and return the model."""
    config = tiny("lesson10", vocab_size=TOKENIZER.vocab_size, max_length=16, num_layers=1)
    arrays = transformer.flatten(loud(config, seed)).items()
    arrays = {name: jnp.asarray(array, jnp.float32) for name, array in arrays}
    model = transformer.unflatten(config, arrays)
    convert.save(model, path)
    TOKENIZER.save(path / "tokenizer.json")
    (path / "data.json").write_text(json.dumps({"widths": [4, 8]}))
    return model


def test_python_translates_as_the_command(tmp_path, capsys, monkeypatch):
    """Batches are padded as in training, which matters here: the decoder attends to padding."""
    with runs.as_a_user():
        model = save(tmp_path / "run", seed=0)
        translator = jt.Translator.load(tmp_path / "run")
        command = ("translate", "--run", tmp_path / "run")
        stdin = "".join(line + "\n" for line in LINES).encode()
        for flags, options in (
            ((), {}),
            (("--beam", "2"), {"beam_size": 2}),
            (("--sample", "--seed", "3"), {"do_sample": True, "seed": 3}),
        ):
            code, out, _ = runs.Console(capsys, monkeypatch).say(*command, *flags, stdin=stdin)
            lines = [text.replace("\n", " ") for text in translator(LINES, **options)]
            assert (code, out) == (0, "".join(line + "\n" for line in lines))
        assert translator.widths == (4, 8, 16)
        assert Translator(model, TOKENIZER)(LINES) != translator(LINES)


def test_an_ensemble_of_runs(tmp_path, capsys, monkeypatch):
    lines = LINES[:3]
    stdin = "".join(line + "\n" for line in lines).encode()
    with runs.as_a_user():
        a, b = tmp_path / "a", tmp_path / "b"
        models = [save(a, 0), save(b, 1)]
        console = runs.Console(capsys, monkeypatch)
        command = ("translate", "--run", a, "--ensemble", b)
        together = jt.Translator.load([a, b], beam_size=2)(lines)
        alone = [Translator(m, TOKENIZER, widths=(4, 8))(lines, beam_size=2) for m in models]
        assert together == Translator(models, TOKENIZER, widths=(4, 8))(lines, beam_size=2)
        assert together not in alone
        code, out, _ = console.say(*command, "--beam", "2", stdin=stdin)
        expected = [text.replace("\n", " ") + "\n" for text in together]
        assert (code, out) == (0, "".join(expected))
        console.refused(2, ["--ensemble"], *command, "--attention", tmp_path / "x.html")
        wide = jt.Translator.load([a, b], precision="bfloat16").split_model.arrays
        assert {str(array.dtype) for array in wide} == {"bfloat16"}
        c = tmp_path / "c"
        save(c, 2)
        other = Tokenizer.train(["none"] * 9, 262, pad_id=PAD, bos_id=BOS, eos_id=EOS)
        other.save(c / "tokenizer.json")
        for more in ([c], [b, c]):
            flags = [word for path in more for word in ("--ensemble", path)]
            message = f"{c}: its tokenizer is not the one of {a}"
            console.refused(2, [message], "translate", "--run", a, *flags, stdin=stdin)


def test_no_path_is_no_ensemble():
    with pytest.raises(ConfigError, match="no path: give one, or several for an ensemble"):
        Translator.load([])


def test_every_model_of_an_ensemble_has_the_requested_weights(monkeypatch):
    asked = []

    def noted(path, weights="auto"):
        asked.append((path, weights))
        if len(asked) == 3:
            raise InputError("enough")
        return mock.Mock(registry.Pretrained)

    monkeypatch.setattr(registry, "open", noted)
    with pytest.raises(InputError, match="enough"):
        Translator.load(["a", "b", "c"], "9")
    assert asked == [("a", "9"), ("b", "9"), ("c", "9")]


def test_tokenizers_of_an_ensemble_are_compared_between_the_requested_languages():
    def opened() -> mock.Mock:
        one = mock.Mock(registry.Pretrained, config=None)
        one.tokenizer.side_effect = lambda *languages: mock.Mock(hash=languages)
        one.model.side_effect = InputError("enough")
        return one

    with pytest.raises(InputError, match="enough"):
        Translator.from_opened(opened(), opened(), source_lang="en", target_lang="de")


def test_the_loss_of_an_ensemble_is_that_of_its_mean_probabilities(tmp_path):
    pairs = [("one two", "seven"), ("three", "eight nine")]
    with runs.as_a_user():
        models = [save(tmp_path / name, seed) for seed, name in enumerate("ab")]
        total = 0.0
        for source, target in pairs:
            ids = [np.array([[*TOKENIZER.encode(text), EOS]]) for text in (source, target)]
            padded = np.full((1, 8), PAD)
            padded[:, : ids[0].shape[1]] = ids[0]
            shifted = np.array([[BOS, *ids[1][0, :-1]]])
            mean = np.mean([jax.nn.softmax(m(padded, shifted)) for m in models], axis=0)
            total -= np.log(mean[0, np.arange(ids[1].shape[1]), ids[1][0]]).sum()
        translator = Translator(models, TOKENIZER, widths=(8,))
        assert evaluation.loss(translator, pairs)[0] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    "precision", ["bfloat16", "medium", pytest.param("float64", marks=pytest.mark.slow)]
)
def test_another_precision(precision, tmp_path, capsys, monkeypatch):
    lines, stdin = ["one", "two"], b"one\ntwo\n"
    with runs.as_a_user():
        save(tmp_path / "run", 0)
        console = runs.Console(capsys, monkeypatch)
        flags = ("--run", tmp_path / "run", "--beam", "2", "--n-best", "2")
        _, usual, _ = console.say("translate", *flags, stdin=stdin)
        code, out, _ = console.say("translate", *flags, "--precision", precision, stdin=stdin)
        with jax.enable_x64(precision == "float64"):
            translator = jt.Translator.load(tmp_path / "run", precision=precision)
            ids = np.ones((1, 4), int)
            logits = jax.eval_shape(lambda: translator.model(ids, ids))
            dtype = "float32" if precision == "medium" else precision
            assert str(logits.dtype) == dtype
            assert {str(x.dtype) for x in translator.split_model.arrays} == {dtype}
            products = "highest" if precision == "float64" else "medium"
            assert translator.model.config.matmul_precision == products
            stream = translator.stream([lines], 9, beam_size=2, num_hypotheses=2)
            (ready,) = (batch for batch in stream if batch)
    expected = [text for line in ready for text in translation.n_best_lines(line)]
    expected = [text.replace("\n", " ") for text in expected]
    assert code == 0 and out.split("\n") == [*expected, ""] and out != usual


def test_tokens_per_batch_decides_the_rows_of_a_batch(tmp_path):
    with runs.as_a_user():
        save(tmp_path / "run", 0)
        few = jt.Translator.load(tmp_path / "run", tokens_per_batch=16)
        usual = jt.Translator.load(tmp_path / "run")
        rows = [max(each.rows_per_batch(each.generation_config)) for each in (few, usual)]
        assert rows[0] * 16 <= rows[1] and few(["one", "two"]) == usual(["one", "two"])
        with pytest.raises(ConfigError, match="tokens_per_batch=0 must be at least 1"):
            Translator(few.model, TOKENIZER, tokens_per_batch=0)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (dict(do_sample=True, num_beams=4), "do_sample and num_beams=4 exclude"),
        (dict(num_return_sequences=3, num_beams=2), ".*=3 needs num_beams of at least 3, not 2"),
        (dict(num_beams=0), "num_beams=0 must be at least 1"),
        (dict(num_return_sequences=-1, num_beams=2), "num_return_sequences=-1 must be at least 1"),
        (dict(num_return_sequences=2, do_sample=True), "num_return_sequences=2 needs num_beams"),
        (dict(temperature=0.5), "temperature=0.5 has no effect without do_sample"),
        (dict(top_k=5), "top_k=5 has no effect"),
        (dict(top_p=0.5, num_beams=4), "top_p=0.5 has no effect"),
        (dict(seed=1), "seed=1 has no effect"),
    ],
)
def test_conflicting_options_are_refused(wish, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        GenerationConfig(**wish)
