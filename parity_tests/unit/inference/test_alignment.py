"""The page of attention maps: the model's figures, the text's tokens, and escaped text."""

import base64
import hashlib
import html.parser
import json
import math
import os
import re
import zlib
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_transformer import transformer
from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
from jax_transformer.formats import registry
from jax_transformer.generate.generation_config import GenerationConfig
from jax_transformer.inference import attention_page, translation
from parity_tests.unit import helpers, runs

TEXT = ["the red house", "a small bird sees the house", "das rote Haus", "é 12"]
LINE = TEXT[0]
ROUNDED = 0.5 / attention_page.LEVELS + 1e-6


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXT, 280, pad_id=1, bos_id=2, eos_id=3)


def model(name: str = "lesson10_repaired", **sizes: Any) -> transformer.Transformer:
    return helpers.random_model(helpers.tiny(name, vocab_size=280, **sizes), dtype="float32")


def translated(tokenizer: Tokenizer, text: str = "das rote Haus") -> translation.Hypothesis:
    return translation.Hypothesis(text, np.array([*tokenizer.encode(text), tokenizer.eos_id]), None)


class Page(html.parser.HTMLParser):
    """A page as a browser parses it."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.inside: list[str] = []
        self.open = False
        self.feed(text)
        scripts = [i for i, (tag, _) in enumerate(self.tags) if tag == "script"]
        data = {"id": "data", "type": "application/json"}
        assert [self.tags[i][1] for i in scripts] == [data, {}]
        self.raw, self.script = (self.inside[i] for i in scripts)
        self.data = json.loads(self.raw)
        self.sentences = self.data["sentences"]

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append("")
        self.open = True

    def handle_endtag(self, tag):
        self.open = False

    def handle_data(self, data):
        if self.open:
            self.inside[-1] += data


def page(
    tmp_path, tokenizer, *, line: str = LINE, hypothesis=None, reads=None, title="a run", widths=()
) -> Page:
    path, hypothesis = tmp_path / "out.html", hypothesis or translated(tokenizer)
    translator = translation.Translator(reads or model(), tokenizer, widths=widths)
    attention_page.write(path, translator, [line], [[hypothesis]], title=title)
    return Page(path.read_text(encoding="utf-8"))


def maps_of(shown: Page) -> dict[str, Any]:
    return shown.sentences[0]["hypotheses"][0]["attention"]


def weights(shown: dict[str, Any]) -> np.ndarray:
    """The numbers that the page's script computes, (layer, head, row, column)."""
    levels = np.frombuffer(zlib.decompress(base64.b64decode(shown["weights"])), np.uint8)
    shape = shown["layers"], shown["heads"], len(shown["rows"]), len(shown["columns"])
    return levels.reshape(shape) / 255


# Figures


def test_the_decoder_begins_as_in_the_translation(tokenizer):
    """mBART and others begin with a token that is not the model's ``bos_id``."""
    maps, hypothesis = {}, translated(tokenizer)
    for start in (None, tokenizer.bos_id, 7):
        config = GenerationConfig(decoder_start_token_id=start)
        translator = translation.Translator(model(), tokenizer, config, widths=(12,))
        shown = attention_page.maps(translator, LINE, hypothesis)["decoder"]
        maps[start] = weights(shown)
    assert np.array_equal(maps[None], maps[tokenizer.bos_id])
    assert np.abs(maps[7] - maps[None]).max() > 0.01


def test_the_maps_are_the_models_weights(tmp_path, tokenizer):
    maps = maps_of(page(tmp_path, tokenizer, widths=(12,)))
    source = [*tokenizer.encode(LINE), tokenizer.eos_id]
    target = [tokenizer.bos_id, *translated(tokenizer).ids[:-1]]
    ids = jnp.array([source]), jnp.array([target])
    _, attention = nnx.jit(lambda model: model(*ids, return_attention=True))(model())
    for name in ("cross", "encoder", "decoder"):
        expected = np.stack([np.asarray(layer[0]) for layer in getattr(attention, name)])
        # far from uniform, so that swapped rows, columns or heads show
        assert expected.std() > 0.05
        assert helpers.furthest(weights(maps[name]), expected) < ROUNDED


def test_both_sides_are_padded_with_their_own_ids_as_in_the_translation(tokenizer):
    """The weights of lesson10 depend on the padding, which it attends to."""
    ids = dict(source_pad_id=1, target_pad_id=7)
    reads, hypothesis = model("lesson10", **ids), translated(tokenizer)
    translator = translation.Translator(reads, tokenizer, widths=(12,))
    source = [*tokenizer.encode(LINE), tokenizer.eos_id]
    target = [tokenizer.bos_id, *hypothesis.ids[:-1]]
    source += [1] * (12 - len(source))
    target += [7] * (reads.config.longest - len(target))
    run = nnx.jit(lambda model, *ids: model(*ids, return_attention=True)[1])
    attention = run(reads, jnp.array([source]), jnp.array([target]))
    maps = attention_page.maps(translator, LINE, hypothesis)
    rows = len(hypothesis.ids)
    for name in ("cross", "decoder"):
        expected = np.stack([np.asarray(layer[0]) for layer in getattr(attention, name)])
        shown = weights(maps[name])
        columns = shown.shape[3] - (maps[name]["columns"][-1] == "<pad>")
        assert helpers.furthest(shown[..., :columns], expected[:, :, :rows, :columns]) < ROUNDED


def test_each_weight_is_the_nearest_level():
    exact = np.linspace(-0.1, 1.1, 2400).reshape(2, 3, 20, 20)
    levels = np.frombuffer(zlib.decompress(base64.b64decode(attention_page.packed(exact))), "u1")
    assert helpers.furthest(levels.reshape(exact.shape) / 255, exact.clip(0, 1)) < ROUNDED


@pytest.mark.parametrize("score", [None, 1.5, -0.0, math.nan, math.inf, -math.inf])
def test_a_score_is_json(score):
    hypothesis = translation.Hypothesis("a", np.zeros(1, np.int32), score)
    data = json.loads(json.dumps(attention_page.hypothesis_data(hypothesis, None)))
    finite = score is not None and math.isfinite(score)
    assert data == {"text": "a", "score": score if finite else None}


def test_rows_are_target_tokens_and_columns_source_tokens(tmp_path, tokenizer):
    """Each by the vocabulary of its side."""
    other = Tokenizer.train(["Haus rote das Haus"], 280, pad_id=1, bos_id=2, eos_id=3)
    hypothesis = translated(other)
    maps = maps_of(page(tmp_path, TokenizerPair(tokenizer, other), hypothesis=hypothesis))
    source, target = (
        [*attention_page.pieces(words, words.encode(text)), "<eos>"]
        for words, text in ((tokenizer, LINE), (other, "das rote Haus"))
    )
    assert "".join(source[:-1]) == LINE
    assert attention_page.pieces(tokenizer, hypothesis.ids.tolist()) != target
    assert (maps["cross"]["rows"], maps["cross"]["columns"]) == (target, source)
    assert (maps["encoder"]["rows"], maps["encoder"]["columns"]) == (source, source)
    assert maps["decoder"]["rows"] == target
    assert maps["decoder"]["columns"] == ["<bos>", *target[:-1]]


@pytest.mark.parametrize("name", ["lesson10", "lesson10_repaired"])
def test_attention_to_padding_has_a_column(tmp_path, tokenizer, name):
    cross = maps_of(page(tmp_path, tokenizer, reads=model(name)))["cross"]
    assert (cross["columns"][-1] == "<pad>") == (name == "lesson10")
    sums = weights(cross).sum(axis=-1)
    assert helpers.furthest(sums, np.ones_like(sums)) < ROUNDED * len(cross["columns"])


@pytest.mark.parametrize(("weight", "shown"), [(np.float32(1 / 255), True), (0.0039, False)])
def test_padding_has_a_column_if_a_weight_rounds_to_a_level(weight, shown):
    layer = jnp.asarray([[[[0.5, 0.5 - weight, weight]]]], jnp.float32)
    columns = attention_page._map((layer,), ["a"], ["x", "y"])["columns"]
    assert columns == ["x", "y", *["<pad>"] * shown]


def test_a_source_that_is_cut_has_room_for_its_first_token(tokenizer, monkeypatch):
    monkeypatch.setattr(Tokenizer, "prefix", (5,))
    translator = translation.Translator(model(), tokenizer)
    maps = attention_page.maps(translator, "a small bird " * 9, translated(tokenizer))
    assert len(maps["cross"]["columns"]) == translator.model.config.longest


def test_a_short_source_may_have_the_longest_target(tokenizer):
    translator = translation.Translator(model(), tokenizer, widths=(4,))
    longest = translator.model.config.longest
    hypothesis = translation.Hypothesis("", np.full(longest, 9), None)
    assert len(attention_page.maps(translator, "a", hypothesis)["cross"]["rows"]) == longest


def test_a_line_that_was_skipped_is_not_on_the_page(tmp_path, tokenizer):
    path, skipped = tmp_path / "out.html", translation.Hypothesis("", np.zeros(0, np.int32), None)
    translator = translation.Translator(model(), tokenizer)
    several = [[skipped], [translated(tokenizer)]]
    attention_page.write(path, translator, ["too long", LINE], several, title="")
    assert [each["number"] for each in Page(path.read_text("utf-8")).sentences] == [2]


def test_a_page_shows_some_lines_and_the_total(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(attention_page, "SENTENCES", 2)
    lines, hypotheses = [LINE, "", LINE, LINE], [[translated(tokenizer)]] * 4
    path, translator = tmp_path / "out.html", translation.Translator(model(), tokenizer)
    cases = (4, [1, 3], "The first 2 of 3 lines."), (3, [1, 3], ""), (0, [], "")
    for count, numbers, note in cases:
        some = lines[:count], hypotheses[:count]
        attention_page.write(path, translator, *some, title="a run")
        shown = Page((tmp_path / "out.html").read_text(encoding="utf-8"))
        assert ([one["number"] for one in shown.sentences], shown.data["note"]) == (numbers, note)


# Tokens


def test_pieces_are_readable(tokenizer):
    ids = tokenizer.encode("é 漢a")
    expected = ["é·1/2", "é·2/2", " ", "漢·1/3", "漢·2/3", "漢·3/3", "a"]
    assert attention_page.pieces(tokenizer, ids) == expected
    widest = [*(f"😀·{i}/4" for i in range(1, 5)), "a"]
    assert attention_page.pieces(tokenizer, tokenizer.encode("😀a")) == widest
    special = [tokenizer.bos_id, ids[2], tokenizer.pad_id, tokenizer.eos_id]
    assert attention_page.pieces(tokenizer, special) == ["<bos>", " ", "<pad>", "<eos>"]
    # a character that starts four times and never ends
    broken = attention_page.pieces(tokenizer, [ids[3], ids[3], ids[3], ids[3], *ids])
    assert (len(broken), broken[4:]) == (4 + len(ids), expected)


# The page


HOSTILE = "</script ><img src=x onerror=alert(1)><!-- <script> PAGE-DATA SCRIPT-HASH"
HOSTILE += " & \u2028 \" ' \\ é"


def test_text_is_escaped(tmp_path, tokenizer):
    innocent = page(tmp_path, tokenizer)
    text = dict(line=HOSTILE, title=HOSTILE, hypothesis=translated(tokenizer, HOSTILE))
    hostile = page(tmp_path, tokenizer, **text, reads=model(max_length=120))
    assert hostile.tags == innocent.tags
    assert hostile.script == innocent.script
    # stricter than this parser: browsers end a script in more cases
    assert not set("<>&\u2028") & set(hostile.raw)
    assert hostile.data["title"] == HOSTILE
    assert hostile.sentences[0]["source"] == HOSTILE
    assert hostile.sentences[0]["hypotheses"][0]["text"] == HOSTILE


def test_the_page_needs_no_network_and_runs_no_other_script(tmp_path, tokenizer):
    shown = page(tmp_path, tokenizer)
    attributes, kind = [each for _, each in shown.tags], "Content-Security-Policy"
    (policy,) = (each["content"] for each in attributes if each.get("http-equiv") == kind)
    style = shown.inside[[tag for tag, _ in shown.tags].index("style")]
    digest, style_digest = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (shown.script, style)
    )
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{style_digest}'; script-src 'sha256-{digest}'; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    names = {name for each in attributes for name in each}
    assert not names & {"src", "href", "style", "onclick", "onload"}
    forbidden = r"https?:|url\(|@import|innerHTML|insertAdjacentHTML|document\.write|eval\("
    assert not re.findall(forbidden, "".join(shown.inside))


def test_a_page_is_written_completely_or_not_at_all(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "out.html"
    path.write_text("the page before")
    monkeypatch.setattr(os, "fsync", lambda *names: (_ for _ in ()).throw(OSError("no space left")))
    translator = translation.Translator(model(), tokenizer)
    with pytest.raises(OSError, match="no space left"):
        attention_page.write(path, translator, [LINE], [[translated(tokenizer)]], title="a run")
    entries = [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()]
    assert entries == [("out.html", "the page before")]


# The command


@pytest.fixture
def console(capsys, monkeypatch, tmp_path, tokenizer):
    """Commands that read an untrained model from any run folder."""
    translator = translation.Translator(model(max_length=32), tokenizer, widths=(8, 16))
    opened = mock.Mock(registry.Pretrained, step=7)
    monkeypatch.setattr(registry, "open", lambda path, weights: opened)
    monkeypatch.setattr(translation.Translator, "from_opened", lambda *_, **languages: translator)
    with runs.as_a_user():
        yield runs.Console(capsys, monkeypatch)


def test_translate_writes_the_page_next_to_its_lines(console, tmp_path, tokenizer):
    path, lines = tmp_path / "out.html", ["the red house", "\t", "é 12"]
    stdin = "\n".join([*lines, ""]).encode()
    code, out, err = console.say("translate", "--run", "a/run", "--attention", path, stdin=stdin)
    assert (code, err) == (0, "")
    shown = Page(path.read_text(encoding="utf-8"))
    assert shown.data["title"] == "a/run, step 7"
    written = out.split("\n")
    for one, i in zip(shown.sentences, (0, 2), strict=True):
        (best,) = one["hypotheses"]
        assert (one["number"], one["source"]) == (i + 1, lines[i])
        assert best["text"].replace("\n", " ") == written[i]
        source = attention_page.pieces(tokenizer, tokenizer.encode(lines[i]))
        assert best["attention"]["cross"]["columns"] == [*source, "<eos>"]


def test_a_page_without_a_folder_is_refused_before_anything_is_translated(console, tmp_path):
    path = tmp_path / "nowhere" / "out.html"
    console.refused(2, [path], "translate", "--run", "a/run", "--attention", path, stdin=b"a\n")


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("blog2023", [(8, 8), (16, 16), (64, 64)]),
        ("small", [(8, 16), (8, 64), (16, 32), (16, 64), (64, 64)]),
    ],
)
def test_programs_are_for_two_lengths_of_targets_unless_lengths_are_equal(
    tokenizer, preset, expected
):
    translator = translation.Translator(model(preset, max_length=64), tokenizer, widths=(8, 16))
    assert [*attention_page.shapes(translator)] == expected
