"""Tokenizers of Hugging Face folders without transformers: lines, runs, batches, refusals."""

import base64
import copy
import dataclasses
import itertools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_transformer import errors
from jax_transformer.architectures import huggingface
from jax_transformer.architectures import m2m_100 as m2m_100_family
from jax_transformer.architectures import mbart as mbart_family
from jax_transformer.data import (
    batches,
    encoding,
    huggingface_tokenizer,
    sentencepiece_vocabulary,
    tokenizer,
    vocabulary,
)
from jax_transformer.data.huggingface_tokenizer import load_huggingface
from jax_transformer.formats import registry
from jax_transformer.formats.huggingface_folders import HuggingFaceWeights
from jax_transformer.formats.runs import CheckpointWeights
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage.run_folder import RunFolder
from parity_tests import tokenizer_models

LINE, OTHER = "the quick dog", "le renard"


def folder(tmp_path: Path, files: dict, **changed) -> Path:
    """A folder with some of its files changed; None leaves a file out."""
    files = files | {name.replace("__", "."): content for name, content in changed.items()}
    left = {name: content for name, content in files.items() if content is not None}
    return tokenizer_models.write(tmp_path / "folder", left)


def loaded_from(tmp_path: Path, files: dict, **languages: str | None) -> Any:
    """The tokenizer of a folder with these files."""
    return load_huggingface(folder(tmp_path, files), **languages)


def around(side: tokenizer.Tokenizer) -> list[int]:
    return [*side.prefix, -1, *side.suffix]


def test_a_default_language_is_one_that_the_folder_has(tmp_path):
    loaded = loaded_from(tmp_path, tokenizer_models.m2m_100())
    assert (loaded.source_lang, loaded.files.default_source_language) == ("en", "en")
    others = tuple(code for code in loaded.languages if code != "en")
    files = dataclasses.replace(loaded.files, languages=others)
    assert files.default_source_language is None


@pytest.mark.parametrize(
    ("separate", "missing", "refused"),
    [
        (True, {"vocab_size": 0, "decoder_vocab_size": 0}, None),
        (True, {"vocab_size": 1, "decoder_vocab_size": 0}, "source"),
        (True, {"vocab_size": 0, "decoder_vocab_size": 1}, "target"),
        (False, {"src_vocab_size": 0, "tgt_vocab_size": 0}, None),
        (False, {"src_vocab_size": 1, "tgt_vocab_size": 0}, "source"),
        (False, {"src_vocab_size": 0, "tgt_vocab_size": 1}, "target"),
    ],
)
def test_each_side_of_a_model_has_room_for_its_vocabulary(separate, missing, refused, tmp_path):
    files = loaded_from(tmp_path, tokenizer_models.m2m_100()).files
    target, source = copy.copy(files.target), files.source.vocab_size
    target.vocab_size = source + 5
    sizes = {name: source + 5 * (name[0] in "dt") - less for name, less in missing.items()}
    values = files.settings.values | {"separate_vocabs": separate}
    settings = dataclasses.replace(files.settings, values=values, model=sizes)
    files = dataclasses.replace(files, settings=settings, target=target)
    expected = pytest.raises(errors.InputError, match=rf"is smaller .*\({refused}\)")
    with expected if refused else nullcontext():
        huggingface_tokenizer._check_model(files)


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_a_vocabulary_with_gaps_ends_with_its_largest_id(family, tmp_path):
    files = getattr(tokenizer_models, family)()
    count = len(files["vocab.json"])
    files["vocab.json"] |= {"<mask>": count + 8}
    path = folder(tmp_path, files, config__json=files["config.json"] | {"vocab_size": count + 9})
    assert load_huggingface(path).vocab_size == count + 9
    path = folder(tmp_path, files, config__json=files["config.json"] | {"vocab_size": count + 8})
    with pytest.raises(errors.InputError, match=rf"of {count + 8} is smaller .* {count + 9} \("):
        load_huggingface(path)


def test_each_family_adds_its_special_tokens_to_a_line(tmp_path):
    files = tokenizer_models.m2m_100()
    m2m_100 = loaded_from(tmp_path / "a", files, source_lang="en", target_lang="fr")
    count = m2m_100.files.settings.model["vocab_size"] - 108
    codes = {code: count + i for i, code in enumerate(m2m_100_family.LANGUAGES)}
    assert around(m2m_100.source) == [codes["en"], -1, 2]
    assert around(m2m_100.target) == [codes["fr"], -1, 2]
    assert m2m_100.forced_bos_id() == codes["fr"]
    assert m2m_100.bos_id == 2

    files = tokenizer_models.fairseq("MBart", "mbart")
    mbart = loaded_from(tmp_path / "b", files, source_lang="de_DE", target_lang="ro_RO")
    codes = {code: mbart.files.source.id_of(code) for code in mbart_family.LANGUAGES}
    assert around(mbart.source) == [-1, 2, codes["de_DE"]]
    assert around(mbart.target) == [-1, 2, codes["ro_RO"]]
    # its decoder starts with the language
    assert (mbart.bos_id, mbart.forced_bos_id()) == (codes["ro_RO"], None)
    turned = mbart.with_languages("ro_RO", "de_DE")
    assert (around(turned.source), turned.bos_id) == (around(mbart.target), codes["de_DE"])
    assert turned.hash != mbart.hash == turned.with_languages("de_DE", "ro_RO").hash
    assert turned.hash == mbart.with_languages("ro_RO").with_languages(target_lang="de_DE").hash

    for name, files, expected in (
        ("c", tokenizer_models.t5, [-1, 1]),
        ("d", tokenizer_models.pegasus, [-1, 1]),
        ("e", tokenizer_models.bart, [0, -1, 2]),
    ):
        loaded = loaded_from(tmp_path / name, files())
        assert around(loaded.source) == around(loaded.target) == expected
        assert loaded.languages == ()


def test_a_marian_target_language_is_prepended_to_the_source(tmp_path):
    path = folder(tmp_path, tokenizer_models.marian())
    vocab = json.loads((path / "vocab.json").read_text())
    plain, french = load_huggingface(path), load_huggingface(path, target_lang="fra")
    assert plain.languages == ("fra", "zlm_Latn")
    assert around(plain.source) == [-1, 0]
    assert around(french.source) == [vocab[">>fra<<"], -1, 0]
    assert around(french.target) == [-1, 0]
    assert plain.encode(f">>fra<< {LINE}") == [*french.source.prefix, *french.encode(LINE)]
    assert (french.forced_bos_id(), french.bos_id) == (None, vocab["<pad>"])


@pytest.mark.parametrize("listed", [False, True])
def test_nllb_languages_precede_the_mask_without_listed_ids(listed, tmp_path):
    more = {"additional_special_tokens": m2m_100_family.LANGUAGES_NLLB} if listed else {}
    files = tokenizer_models.fairseq("Nllb", "m2m_100", **more)
    loaded = loaded_from(tmp_path, files, source_lang="eng_Latn")
    pieces = tokenizer_models.pieces(tokenizer_models.model(algorithm="bpe"))
    count = len({"<s>", "<pad>", "</s>", "<unk>", *pieces})
    ids = [loaded.files.source.id_of(token) for token in (*m2m_100_family.LANGUAGES_NLLB, "<mask>")]
    assert ids == list(range(count, count + 203))
    assert loaded.languages == tuple(m2m_100_family.LANGUAGES_NLLB)
    assert loaded.encode("fox  <mask>") == loaded.encode("fox<mask>")  # it takes spaces before it


def test_pegasus_counts_its_pieces_from_105(tmp_path):
    loaded = loaded_from(tmp_path, tokenizer_models.pegasus()).files.source
    order = ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk_102>", "<unk>"]
    assert [loaded.id_of(token) for token in order] == [0, 1, 2, 3, 4, 104, 105]


def test_ids_without_a_token_decode_to_nothing(tmp_path):
    for name, files in (
        ("t5", tokenizer_models.t5()),
        ("marian", tokenizer_models.marian()),
        ("bart", tokenizer_models.bart()),
    ):
        loaded, lines = loaded_from(tmp_path / name, files), [LINE, "", OTHER]
        assert loaded.decode([*loaded.encode(LINE), 5000, loaded.pad_id]) == LINE
        assert loaded.decode(np.array([], np.int32)) == ""
        assert loaded.encode_batch(lines) == [loaded.encode(line) for line in lines]


def test_a_run_folder_keeps_the_files_and_the_languages(tmp_path):
    """Two, one or none."""
    original = tokenizer_models.write(tmp_path / "original", tokenizer_models.m2m_100())
    for i, languages in enumerate(itertools.product(("de", None), ("fr", None))):
        loaded = load_huggingface(original, source_lang=languages[0], target_lang=languages[1])
        run = tmp_path / f"run {i}"
        run.mkdir()
        assert not encoding.has_tokenizer(run)
        opened = HuggingFaceWeights(registry.get("hf"), original, "", {}, dict)
        assert opened.tokenizer(*languages).hash == loaded.hash
        encoding.save_tokenizer(loaded, run)
        files = {path.name: path.read_bytes() for path in (run / folders.IN_RUN).iterdir()}
        assert files == {path.name: path.read_bytes() for path in original.iterdir()}
        assert encoding.has_tokenizer(run)
        again = encoding.load_tokenizer(run)
        assert isinstance(again, huggingface_tokenizer.HuggingFaceTokenizer)
        assert (again.source_lang, again.target_lang) == (loaded.source_lang, languages[1])
        assert again.forced_bos_id() == loaded.forced_bos_id()
        if i == 0:
            assert again.hash == loaded.hash
            opened = CheckpointWeights(registry.get("run"), run, "", {}, dict, run=RunFolder(run))
            assert opened.tokenizer().hash == loaded.hash
            for side in ("source_lang", "target_lang"):
                assert getattr(opened.tokenizer(**{side: "es"}), side) == "es"
            assert around(again.source) == around(loaded.source)
            assert around(again.target) == around(loaded.target)
    message = r"languages\.json: .* is not an object of source_lang and"
    for wrong in ('{"source": "de"}', '["source_lang"]', '{"source_lang": 1}'):
        (run / "languages.json").write_text(wrong)
        with pytest.raises(errors.InputError, match=message):
            encoding.load_tokenizer(run)
    (run / "tokenizer.json").write_text("{}")  # a run with its own tokenizer reads that
    with pytest.raises(errors.InputError, match=r"run 3/tokenizer\.json"):
        encoding.load_tokenizer(run)


def test_the_model_s_config_wins_over_its_generation_config_and_the_tokenizer_s_over_both(tmp_path):
    files = tokenizer_models.bart() | {"generation_config.json": {"decoder_start_token_id": 0}}
    for start, expected in ((2, 2), (None, 0)):
        config = files["config.json"] | {"decoder_start_token_id": start}
        config = {name: value for name, value in config.items() if value is not None}
        assert load_huggingface(folder(tmp_path, files, config__json=config)).bos_id == expected
    config = files["config.json"] | {"tokenizer_class": "T5Tokenizer"}
    for own, expected in (("BartTokenizer", "BartTokenizer"), (None, "T5Tokenizer")):
        named = {"config__json": config, "tokenizer_config__json": {"tokenizer_class": own}}
        read = vocabulary.read_settings(folder(tmp_path, files, **named))
        assert read.recipe.class_name == expected


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_extra_special_tokens_are_a_list_or_have_names(key, tmp_path):
    for value in (["<a>", {"content": "<b>"}], {"first_token": "<a>", "second_token": "<b>"}):
        named = {"tokenizer_config__json": {key: value}}
        read = vocabulary.read_settings(folder(tmp_path, tokenizer_models.bart(), **named))
        assert [token.content for token in read.extra_tokens] == ["<a>", "<b>"]
        assert read.lists_extra_tokens


def test_merges_may_have_line_ends_of_windows(tmp_path):
    files = tokenizer_models.bart()
    merges = files["merges.txt"].replace(b"\n", b"\r\n")
    ids = loaded_from(tmp_path / "plain", files).source.encode(LINE)
    assert len(ids) < len(LINE)  # some are merged
    assert load_huggingface(folder(tmp_path, files, merges__txt=merges)).source.encode(LINE) == ids


def test_only_files_that_decide_ids_change_the_hash(tmp_path):
    files = tokenizer_models.bart()
    changes: list[dict[str, Any]] = [{}, {"config__json": files["config.json"] | {"d_model": 4}}]
    changes += [{"generation_config__json": {}}, {"merges__txt": files["merges.txt"] + b"\n"}]
    folders = (folder(tmp_path / str(i), files, **each) for i, each in enumerate(changes))
    usual, *others = (load_huggingface(path).hash for path in folders)
    assert [each == usual for each in others] == [True, True, False]


def test_a_huge_file_of_a_tokenizer_is_refused(tmp_path, monkeypatch):
    path = folder(tmp_path, tokenizer_models.bart())
    largest = max(file.stat().st_size for file in path.iterdir())
    for most, refused in ((largest, False), (largest - 1, True)):
        monkeypatch.setattr(huggingface_tokenizer, "MAX_FILE_SIZE", most)
        message = rf": {largest:,} bytes, over the {most:,} that"
        with pytest.raises(errors.InputError, match=message) if refused else nullcontext():
            load_huggingface(path)


def test_padding_and_truncation_of_a_tokenizer_json_are_off(tmp_path):
    files, lines = tokenizer_models.bart(), [LINE, f"{LINE} {LINE}", ""]
    model = loaded_from(tmp_path / "merges", files).source._model
    expected = [model.encode(line, add_special_tokens=False).ids for line in lines]
    model.enable_padding()
    model.enable_truncation(3)
    saved = folder(tmp_path, files, tokenizer__json=model.to_str().encode())
    assert load_huggingface(saved).source.encode_batch(lines) == expected


def test_a_token_that_has_a_role_is_special_unless_it_says_otherwise(tmp_path):
    for more, special in (({}, True), ({"special": True}, True), ({"special": False}, False)):
        named = {"tokenizer_config__json": {"eos_token": {"content": "<end>"} | more}}
        read = vocabulary.read_settings(folder(tmp_path, tokenizer_models.bart(), **named))
        token = read.special_tokens["eos_token"]
        assert (token.content, token.special, token.normalized) == ("<end>", special, not special)


def test_an_added_token_takes_the_space_on_its_sides_anywhere_in_a_line(tmp_path):
    files = tokenizer_models.blenderbot_small()
    for left, right in itertools.product((False, True), repeat=2):
        more = {"content": "<x>", "lstrip": left, "rstrip": right}
        own = files["tokenizer_config.json"] | {"added_tokens_decoder": {"900": more}}
        named = {"tokenizer_config__json": own, "config__json": {"model_type": "blenderbot-small"}}
        side = load_huggingface(folder(tmp_path, files, **named)).source
        before, after = " " * (not left), " " * (not right)
        parts = [f"a{before}", "<x>", f"{after}b{before}", "<x>", f"{after}c"]
        assert side._parts("a <x> b <x> c") == parts


def test_a_run_folder_has_a_tokenizer_with_the_files_of_any_family(tmp_path):
    files = {"config.json": {}, "generation_config.json": {}}
    tokenizer_models.write(tmp_path / folders.IN_RUN, files)
    assert not encoding.has_tokenizer(tmp_path)
    recipes = huggingface.tokenizer_recipes().values()
    for names in {("tokenizer.json",), *(recipe.files for recipe in recipes)}:
        run = tmp_path / names[0]
        tokenizer_models.write(run / folders.IN_RUN, files | dict.fromkeys(names, b""))
        assert encoding.has_tokenizer(run)


def test_one_side_of_a_tokenizer_pair_cannot_be_saved(tmp_path):
    loaded = loaded_from(tmp_path, tokenizer_models.t5())
    with pytest.raises(errors.ConfigError, match=r"use HuggingFaceTokenizer\.save"):
        loaded.source.save(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("family", "languages"),
    [("mbart", ("en_XX", "fr_XX")), ("bart", (None, None)), ("m2m_100", ("en", "fr"))],
)
def test_batches_have_the_special_tokens_of_a_line(family, languages, tmp_path):
    mbart = {"mbart": lambda: tokenizer_models.fairseq("MBart", "mbart")}
    files = mbart.get(family) or getattr(tokenizer_models, family)
    own = dict(zip(("source_lang", "target_lang"), languages, strict=True))
    loaded = loaded_from(tmp_path, files(), **own)
    pairs = [(LINE, OTHER), ("the", "le </s> brun")]  # an end token within the text stays one
    encoded = encoding.encode_pairs(pairs, loaded.source, loaded.target, 40)
    sources, targets = (
        [[*side.prefix, *side.encode(pair[i]), *side.suffix] for pair in pairs]
        for i, side in enumerate((loaded.source, loaded.target))
    )
    lengths = [*zip(map(len, sources), map(len, targets), strict=True)]
    assert [*map(tuple, encoded.lengths.tolist())] == lengths
    batch = batches.make_batch(encoded, 40, 3)
    sources.append([*loaded.source.prefix, *loaded.source.suffix])
    begun = [[loaded.bos_id, *target[:-1]] for target in targets] + [[loaded.bos_id]]
    for ids, expected in zip(batch, (sources, begun, [*targets, []]), strict=True):
        assert ids.tolist() == [row + [loaded.pad_id] * (40 - len(row)) for row in expected]
    rows = batches.pad_rows(
        encoding.encode_sources([LINE, "the"], loaded, 40),
        *(40, 2, loaded.pad_id),
        encoding.special_tokens(loaded),
    )
    assert rows.tolist() == batch.source[:2].tolist()


def test_languages_are_refused_by_name(tmp_path):
    path = folder(tmp_path, tokenizer_models.fairseq("MBart", "mbart"))
    with pytest.raises(errors.ConfigError, match=r"no language 'de_De' \(did you mean 'de_DE'\?\)"):
        load_huggingface(path, source_lang="de_De")
    loaded = load_huggingface(path)
    assert loaded.source_lang == "en_XX"  # transformers' default
    assert loaded.forced_bos_id() is None
    with pytest.raises(errors.ConfigError, match=r"give target_lang, one of ar_AR, cs_CZ, "):
        encoding.encode_pairs([("a", "b")], loaded.source, loaded.target, 9)


@pytest.mark.parametrize(
    "family, side, expected",
    [
        *(
            ("t5", side, "has no languages; leave out 'fr'")
            for side in ("source_lang", "target_lang")
        ),
        ("marian", "source_lang", "a Marian model reads one language; leave out source_lang='fr'"),
    ],
)
def test_a_language_without_effect_is_refused(tmp_path, family, side, expected):
    """Both when the folder is opened and when its languages are changed."""
    path = tokenizer_models.write(tmp_path / family, getattr(tokenizer_models, family)())
    with pytest.raises(errors.ConfigError, match=expected):
        load_huggingface(path, **{side: "fr"})
    with pytest.raises(errors.ConfigError, match=expected):
        load_huggingface(path).with_languages(**{side: "fr"})


@pytest.mark.parametrize("separate", [False, True])
def test_targets_of_marian_are_joined_by_the_model_of_the_vocabulary(
    separate, tmp_path, monkeypatch
):
    class Model:
        """A stand-in for SentencePiece's, whose pieces and text have its name."""

        def __init__(self, path: Path, content: bytes):
            self.name = path.stem

        def encode(self, text: str, out_type: type) -> list[str]:
            return [f"{self.name}'s"]

        def decode_pieces(self, pieces: list[str]) -> str:
            return f"{' '.join(pieces)}, joined by {self.name}'s"

    ids = {token: i for i, token in enumerate(("</s>", "<unk>", "<pad>", "source's", "target's"))}
    settings = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    files = {"tokenizer_config.json": settings, "vocab.json": ids, "target_vocab.json": ids}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    for side in ("source", "target"):
        (tmp_path / f"{side}.spm").touch()
    monkeypatch.setattr(sentencepiece_vocabulary, "load", Model)
    loaded = load_huggingface(tmp_path)
    joined = ["source's, joined by source's", "target's, joined by source's"]
    joined[1] = "target's, joined by target's" if separate else joined[1]
    assert [side.decode(side.encode("a")) for side in (loaded.source, loaded.target)] == joined


@pytest.mark.parametrize(
    ("family", "library", "named"),
    [(name, "sentencepiece", "SentencePiece") for name in ("t5", "marian", "m2m_100")]
    + [("fsmt_files", "sacremoses", r"merges\.txt: needs sacremoses"), ("bart", "", "")],
)
def test_without_its_library_a_folder_says_what_to_install(
    family, library, named, tmp_path, monkeypatch
):
    for module in ("sentencepiece", "sacremoses"):
        monkeypatch.setitem(sys.modules, module, None)
    path = tokenizer_models.write(tmp_path / family, getattr(tokenizer_models, family)())
    message = rf"{named}: pip install 'jax-seq2seq\[{library}\]'"
    with pytest.raises(errors.ConfigError, match=message) if library else nullcontext():
        load_huggingface(path)


def test_plbart_s_languages_are_given_by_code_or_token(tmp_path):
    path = tokenizer_models.write(tmp_path / "plbart", tokenizer_models.plbart())
    loaded = load_huggingface(path, source_lang="java", target_lang="en_XX")
    assert loaded.languages == ("java", "python", "en_XX")
    assert loaded.bos_id == loaded.target.suffix[-1] == loaded.source.suffix[-1] + 2
    for ends in ("prefix", "suffix"):
        with pytest.raises(errors.ConfigError, match="give source_lang, one of java, python, en"):
            getattr(load_huggingface(path).source, ends)
    # transformers gives it the id of a language
    more = tokenizer_models.plbart(additional_special_tokens=["<new>"])
    more_loaded = loaded_from(tmp_path / "more", more).source
    assert more_loaded.encode("<new>") == [loaded.vocab_size] == [more_loaded.vocab_size - 1]
    with pytest.raises(errors.ConfigError, match="has no language 'go'; it has java, python"):
        load_huggingface(path, source_lang="go")


T5, MARIAN, BART = tokenizer_models.t5(), tokenizer_models.marian(), tokenizer_models.bart()
FSMT, PLBART = tokenizer_models.fsmt_files(), tokenizer_models.plbart()
DEEP = b"[" * 100_000


def settings(name: str, **own: Any) -> dict[str, Any]:
    return {"tokenizer_config__json": {"tokenizer_class": f"{name}Tokenizer"} | own}


# What is changed in the files of each tokenizer, and the message

OF_T5 = {
    "another class": (settings("Bert"), "a tokenizer of the class 'BertTokenizer' is not"),
    "no class": (
        {"tokenizer_config__json": {}, "config__json": {}},
        "names no tokenizer_class and no model_type; set tokenizer_class",
    ),
    "another model": (
        {"tokenizer_config__json": {}, "config__json": {"model_type": "gpt2"}},
        "names the model_type 'gpt2'",
    ),
    "no model": (
        {"spiece__model": None},
        r"no spiece\.model, nor tokenizer\.json, for T5's tokenizer \(there: 'config\.json",
    ),
    "no pieces": ({"spiece__model": b"garbage" * 9}, r"spiece\.model: not a SentencePiece model: "),
    "half a model": (
        {"spiece__model": T5["spiece.model"][:-3000]},
        r"spiece\.model: not a SentencePiece model: ",
    ),
    "BPE for T5": (
        {"spiece__model": tokenizer_models.model("t5", "bpe")},
        r"spiece\.model: not a unigram model, which T5's is",
    ),
    "tokenizer.json": ({"tokenizer__json": b"{}"}, r"tokenizer\.json: not a tokenizer file: "),
    "tokenizer.json, not text": (
        {"tokenizer__json": b"\xff"},
        r"tokenizer\.json: not a tokenizer file: not valid UTF-8",
    ),
    "tokenizer.json, deep": ({"tokenizer__json": DEEP}, r"tokenizer\.json: not a tokenizer file: "),
    "config, deep": ({"config__json": DEEP}, r"config\.json: refused: JSON within JSON"),
    "config, a list": ({"config__json": []}, r"config\.json: \[\] is not an object"),
    "a smaller model": (
        {"config__json": {"vocab_size": 200}},
        r"config\.json: a vocabulary of 200 is smaller than the tokenizer's of 233 ",
    ),
    "another padding": (
        {"config__json": {"pad_token_id": 3}},
        r"config\.json: pad_token_id is 3, and the tokenizer's 0",
    ),
    "another end": (
        {"config__json": {"eos_token_id": 3}},
        r"config\.json: eos_token_id is 3, and the tokenizer's 1",
    ),
    "a flag": (settings("T5", split_special_tokens=1), "split_special_tokens is 1, not true"),
    "a number": (settings("T5", extra_ids=-1), "extra_ids is -1, not a number up to"),
    "a token": (settings("T5", eos_token=1), "a special token is 1, not text"),
    "half a token": (settings("T5", eos_token="\ud800"), "a special token is .*, not text"),
    "tokens": (settings("T5", extra_special_tokens="a"), "tokens are 'a', not a list"),
    "an id": ({"added_tokens__json": {"<new>": "x"}}, "the id of an added token is 'x'"),
    "a huge id": (
        settings("T5", added_tokens_decoder={"9" * 10: "a"}),
        "the id of .* '9999999999'",
    ),
    "an id with a gap": (
        {"added_tokens__json": {"<new>": 900}},
        "the added token '<new>' has the id 900, and becomes 233",
    ),
}

OF_MARIAN = {
    "no target model": ({"target__spm": None}, r"no target\.spm, for Marian's tokenizer"),
    "no target vocabulary": (
        {"tokenizer_config__json": {"separate_vocabs": True}},
        r"no target_vocab\.json, for Marian's",
    ),
    "empty model": ({"source__spm": b""}, r"source\.spm: not a SentencePiece model: "),
    "vocabulary, deep": ({"vocab__json": DEEP}, r"vocab\.json: refused: JSON within JSON"),
    "vocabulary of text": ({"vocab__json": {"</s>": "0"}}, r"vocab\.json: not a vocabulary: "),
    "vocabulary below 0": ({"vocab__json": {"</s>": -1}}, r"vocab\.json: not a vocabulary: "),
    "huge vocabulary": ({"vocab__json": {"</s>": 2**31}}, r"vocab\.json: not a vocabulary: "),
    "vocabulary without unknown": (
        {"vocab__json": {"</s>": 0, "<pad>": 1}},
        r"vocab\.json: has no '<unk>'",
    ),
    "a token of whole words": (
        settings("Marian", added_tokens_decoder={"0": {"content": "</s>", "single_word": True}}),
        "the added token '</s>' is single_word, which is not supported",
    ),
    "sampling": (
        settings("Marian", sp_model_kwargs={"enable_sampling": True}),
        "sp_model_kwargs is .*; remove it",
    ),
}

OF_FSMT = {
    "no languages": (
        settings("FSMT", langs=["en", "../x"]),
        r"langs is \['en', '\.\./x'\], not the codes of a source's and a target's language",
    ),
    "a merge of four tokens": (
        {"merges__txt": b"a b 3\na b c d\n"},
        r"merges\.txt: line 2 is 'a b c d', not two tokens",
    ),
    "a merge that transformers skips": (
        {"merges__txt": b"a b 3\na c 2"},
        r"merges\.txt: its last line has no end",
    ),
    "a target vocabulary without ids": (
        {"vocab-tgt__json": b"[]"},
        r"vocab-tgt\.json: not a vocabulary",
    ),
}

OF_PLBART = {
    "another set of languages": (
        settings("PLBart", language_codes="most"),
        "language_codes is 'most', not base or multi",
    )
}

OF_BART = {
    "no merges": (
        {"merges__txt": None},
        r"no merges\.txt, nor tokenizer\.json, for Bart's tokenizer",
    ),
    "merges of three": (
        {"merges__txt": b"#version: 0.2\na b c\n"},
        r"merges\.txt: line 2 is 'a b c', not two tokens",
    ),
    "merges unknown": ({"merges__txt": "☃ ☃\n".encode()}, r"merges\.txt: not a tokenizer file: "),
    "merges, not text": ({"merges__txt": b"\xff"}, r"merges\.txt: not valid UTF-8"),
}

TABLES = (T5, OF_T5), (MARIAN, OF_MARIAN), (FSMT, OF_FSMT), (PLBART, OF_PLBART), (BART, OF_BART)
REFUSED = {name: (files, *row) for files, rows in TABLES for name, row in rows.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_tokenizers_are_refused_in_one_line(name, tmp_path):
    files, changed, message = REFUSED[name]
    with pytest.raises((errors.InputError, errors.UnsafeFileError), match=message) as caught:
        load_huggingface(folder(tmp_path, files, **changed))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(errors.InputError, match="nowhere: no such folder"):
        load_huggingface(tmp_path / "nowhere")


def test_a_panic_of_the_library_is_a_refusal(tmp_path):
    """An index out of range makes its Rust code panic, which is not an Exception."""
    vocabulary = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["a", -1.0]]
    parts = dict.fromkeys(("truncation", "padding", "pre_tokenizer", "post_processor", "decoder"))
    for table, loads in ((b"", False), ((8).to_bytes(4, "little") + b"\xff" * 8, True)):
        charsmap = {"precompiled_charsmap": base64.b64encode(table).decode()}
        normalizer = {"type": "Precompiled"} | charsmap
        model = {"type": "Unigram", "unk_id": 2, "vocab": vocabulary}
        content = parts | {"version": "1.0", "added_tokens": []}
        content |= {"normalizer": normalizer, "model": model}
        path = folder(tmp_path / str(loads), T5, tokenizer__json=content, config__json={})
        message = r"tokenizer\.json: not a tokenizer file: "
        with pytest.raises(errors.InputError, match=message) as caught:
            load_huggingface(path).encode_batch(["a", "b"] if loads else [])
        assert "\n" not in str(caught.value)
        with pytest.raises(errors.InputError, match=r"tokenizer\.json: "):
            tokenizer.Tokenizer.load(path / "tokenizer.json")
