"""Hugging Face folders in CTranslate2: their vocabularies, special tokens and languages."""

import json

import pytest

import jax_transformer as jt
from jax_transformer.extras.deploy.ctranslate2 import engine
from jax_transformer.formats import registry
from parity_tests import huggingface_folders
from parity_tests.marks import quick_if
from parity_tests.unit import helpers, runs

ctranslate2 = pytest.importorskip("ctranslate2")

LINES = ["the quick dog", "a red house", "the"]
NAMES = "mbart m2m_100 mbart50 marian bart t5 pegasus"


@pytest.mark.parametrize(
    "name", [quick_if(name in ("mbart", "m2m_100"), name) for name in NAMES.split()]
)
def test_tokens_of_a_folder_translate_as_here(name, tmp_path):
    source, out = tmp_path / "folder", tmp_path / "out"
    huggingface_folders.save_model(name, source)
    languages = huggingface_folders.FOLDERS[name].languages or (None, None)
    options = dict(source_lang=languages[0], target_lang=languages[1], beam_size=1, max_length=8)
    with runs.as_a_user(), helpers.unchecked():
        assert runs.main("convert", source, out, "--to", "ct2", "--no-check") == 0
        opened = registry.open(source)
        ours = jt.Translator.from_opened(opened, **options).hypotheses(LINES)
        theirs = engine.load(opened, **options).hypotheses(LINES)
    ids = [[line[0].ids.tolist() for line in side] for side in (ours, theirs)]
    assert ids[0] == ids[1]
    settings = json.loads((out / "config.json").read_text())
    assert not settings["add_source_eos"]
    assert (settings["decoder_start_token"] is None) == (name == "mbart")
    # Its own translator, called with tokens and the target's language
    words = opened.tokenizer(*languages)
    texts = json.loads((out / "shared_vocabulary.json").read_text())
    assert [texts[i] for i in words.suffix] == [words.source.tokens()[i] for i in words.suffix]
    end, unknown = settings["eos_token"], words.files.settings.special_tokens["unk_token"].content
    assert settings["unk_token"] == unknown != end
    lines = [[*words.prefix, *words.encode(line), *words.suffix] for line in LINES]
    forced = opened.generation_config(words).forced_bos_token_id
    prefix = [words.bos_id] if name == "mbart" else [] if forced is None else [forced]
    results = ctranslate2.Translator(str(out), intra_threads=1).translate_batch(
        [[texts[i] for i in line] for line in lines],
        target_prefix=[[texts[i] for i in prefix]] * len(lines),
        beam_size=1,
        max_decoding_length=7,
        min_decoding_length=0,
        return_end_token=True,
        # What generation_config.json forbids, its own translator does not know
        suppress_sequences=[[texts[words.pad_id]]],
    )
    translated = [result.hypotheses[0][-7:] for result in results]
    expected = [[texts[i] for i in row[:7]] for row in ids[0]]
    assert translated == [row[: row.index(end) + 1] if end in row else row for row in expected]
