"""Tokenizers of Hugging Face folders against transformers' classes: ids and text."""

import functools
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import regex
import transformers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from jax_transformer.architectures import huggingface, m2m_100, mbart, plbart
from jax_transformer.data import huggingface_tokenizer, piece_vocabulary
from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
from jax_transformer.data.piece_vocabulary import WordBpe
from parity_tests import huggingface_folders
from parity_tests import tokenizer_models as models

LINES = {
    "empty": "",
    "spaces": "   ",
    "plain": "the quick brown fox",
    "leading and trailing": "  leading, trailing  ",
    "double spaces": "two  spaces   three",
    "tabs and lines": "\t\ttabs\tand\nnew\n\nlines\r\n",
    "emoji": "👩‍👩‍👧 🏳️‍🌈 ends ☃",
    "combining": "e\u0301 a\u0308\u0323 \u0301",
    "right to left": "שלום עולם مرحبا بالعالم",
    "CJK": "素早い茶色 狐 漢字",
    "digits": "0123456789 12 345,67 ٣ ½",
    "control": "\x00\x01\x1f\x7f\x85 control",
    "other spaces": "non\u00a0breaking\u202fnarrow\u3000wide",
    "other line ends": "line\u2028paragraph\u2029next\x0bpage\x0c",
    "shrunk by NFKC": "ﬁ ﬀ ①② ｆｕｌｌ ™ Å \u0130 ß",
    "unknown": "\ue000 \U000e0001 \u200b\ufeff",
    "special tokens": "</s> and <pad> and <s> and <unk> and  <mask>  x",
    "special tokens in words": "a</s>b <pad>c</s",
    "nothing but a special token": "  </s>  ",
    "languages of M2M100": "__en__ __fr__ hello__de__ __ceb__ __ha__",
    "languages of mBART": "en_XX fr_XX hello de_DE",
    "languages of PLBART": "__java__ __go__x __en_XX__",
    "languages of NLLB": "eng_Latn fra_Latn hello deu_Latn",
    "languages of Marian": ">>fra<< hello >>xyz<< a",
    "languages of Marian, unknown": ">>xyz<<hello",
    "languages of Marian, open": ">>fra hello",
    "an end before a language": "</s> >>fra<< a",
    "a mask after nothing": "\u200b<mask>a",
    "special tokens of BlenderbotSmall": "hi__end__ __start__ Hi  __null__\n__newln__ it's (so).",
    "tokens that begin alike": "<new>er <newer> <new> <ctl>",
    "sentinels": "<extra_id_0> a<extra_id_99> <mask_1> <unk_5> <sym>b<sym>",
    "long words": "x" * 700 + " " + "supercalifragilistic" * 30,
    "underlines": "▁under ▁ ▁▁",
    "full width": "２０２４，１０：３０。 “Ａ”（ｂ）～ ５０％ … 「か」 ＡＢＣ",
    "apostrophes": "l'homme qu'il dit c'est ' a ' dogs' l’eau",
    "capitals and dashes": "STRASSE ÉCOLE – a—b ‐ it'S I'M O'Neil",
    "what is cleaned up": "do n't isn't . ? ! , it 's ' a '",
}
# More lines, random combinations of pieces of the above
_PIECES = [piece for line in LINES.values() for piece in (*line.split(" ")[:6], line[:3])]
_PIECES += [" ", "\n", "▁", "<", ">>", "<<", "_"]
_RANDOM = random.Random(0)
LINES |= {
    f"mixture {i}": "".join(_RANDOM.choices([piece[:40] for piece in _PIECES], k=1 + i % 9))
    for i in range(60)
}


PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
MASK = PLAIN | {"content": "<mask>", "lstrip": True, "normalized": True}
STRIPPED = PLAIN | {"content": "</s>", "lstrip": True, "rstrip": True, "special": True}
NEW = STRIPPED | {"content": "<new>", "normalized": True, "special": False}
ALIKE = {
    str(550 + i): STRIPPED | {"content": text, "lstrip": False}
    for i, text in enumerate(("<new>", "<new>er"))
}


def _nllb(**settings) -> dict:
    """NLLB's model with its languages and the mask after the pieces, as published."""
    files = models.fairseq(
        "Nllb", "m2m_100", additional_special_tokens=m2m_100.LANGUAGES_NLLB, **settings
    )
    count = len({"<s>", "<pad>", "</s>", "<unk>", *models.pieces(files["sentencepiece.bpe.model"])})
    plain = PLAIN | {"special": True}
    added = {
        str(count + i): plain | {"content": code} for i, code in enumerate(m2m_100.LANGUAGES_NLLB)
    }
    added[str(count + len(m2m_100.LANGUAGES_NLLB))] = plain | MASK
    files["tokenizer_config.json"]["added_tokens_decoder"] = added
    return files


def _marian_with_control() -> dict:
    """Pieces of a target are joined by the source's model, for which this piece is plain text."""
    files = models.marian()
    return files | {
        "target.spm": models.model("marian", control_symbols="<ctl>"),
        "vocab.json": files["vocab.json"] | {"<ctl>": len(files["vocab.json"])},
        "config.json": files["config.json"] | {"vocab_size": 500},
    }


def _published_mbart50() -> dict:
    more = {"additional_special_tokens": mbart.LANGUAGES_50}
    settings = {"src_lang": None, "tgt_lang": None, "language_codes": "mbart50"}
    settings |= {"sp_model_kwargs": {}, "mask_token": MASK | {"__type": "AddedToken"}}
    files = models.fairseq("MBart50", "mbart", **more, **settings)
    return files | {"special_tokens_map.json": {"mask_token": MASK} | more}


def _published_m2m_100() -> dict:
    files = models.m2m_100()
    codes = enumerate(m2m_100.LANGUAGES, len(files["vocab.json"]))
    return files | {"added_tokens.json": {f"__{code}__": i for i, code in codes}}


def _published_bart() -> dict:
    return models.bart() | {
        "special_tokens_map.json": {"mask_token": MASK},
        "tokenizer_config.json": {"add_prefix_space": True, "clean_up_tokenization_spaces": True},
    }


class Case(NamedTuple):
    """A folder's files, the beginning of transformers' class, and the two languages."""

    files: Callable[[], dict]
    of: str
    languages: dict[str, str]


def case(files: Callable[..., dict], of: str, *codes: str | None, **settings: Any) -> Case:
    sides = zip(("source_lang", "target_lang"), codes, strict=False)
    languages = {side: code for side, code in sides if code is not None}
    return Case(functools.partial(files, **settings), of, languages)


def fairseq(name: str, *codes: str | None, **settings: Any) -> Case:
    return case(functools.partial(models.fairseq, name, "mbart"), name, *codes, **settings)


CASES = {
    "marian": case(models.marian, "Marian"),
    "marian, cleaned up": case(models.marian, "Marian", clean_up_tokenization_spaces=True),
    "marian, special tokens split": case(models.marian, "Marian", split_special_tokens=True),
    "marian, two vocabularies": case(models.marian_separate, "Marian"),
    "marian, an end that strips": case(
        models.marian, "Marian", added_tokens_decoder={"0": STRIPPED}
    ),
    "marian, tokens that begin alike": case(models.marian, "Marian", added_tokens_decoder=ALIKE),
    "marian, ids after a gap": case(
        *(models.marian, "Marian"),
        added_tokens_decoder={"550": NEW},
        additional_special_tokens=["<ctl>", "</s>"],
    ),
    "marian, a control piece of the target's": case(_marian_with_control, "Marian"),
    "m2m_100": case(models.m2m_100, "M2M100", "de", "fr"),
    "m2m_100, languages not special": case(models.m2m_100, "M2M100", "de", "fr", listed=False),
    "m2m_100, languages told with ids": case(_published_m2m_100, "M2M100", "de", "fr"),
    "mbart": fairseq("MBart", "de_DE", "fr_XX"),
    "mbart50": fairseq("MBart50", "de_DE", "xh_ZA"),
    "mbart, two languages listed": fairseq(
        "MBart", "de_DE", "ro_RO", additional_special_tokens=["de_DE", "fr_XX"]
    ),
    "mbart50, as published": case(_published_mbart50, "MBart50", "de_DE", "xh_ZA"),
    "plbart": case(models.plbart, "PLBart", "java", "en_XX"),
    "plbart, seven languages": case(
        *(models.plbart, "PLBart", "go", "php"),
        language_codes="multi",
        clean_up_tokenization_spaces=False,
    ),
    "plbart, seven languages and no source": case(
        models.plbart, "PLBart", None, "php", language_codes="multi"
    ),
    "fsmt": case(models.fsmt, "FSMT"),
    "fsmt, Russian to French": case(models.fsmt, "FSMT", langs=["ru", "fr"]),
    "fsmt, lower case": case(models.fsmt, "FSMT", do_lower_case=True),
    "fsmt, two vocabularies": case(models.fsmt_separate, "FSMT"),
    "nllb": case(_nllb, "Nllb", "deu_Latn", "fra_Latn"),
    "nllb, legacy": case(_nllb, "Nllb", "deu_Latn", "fra_Latn", legacy_behaviour=True),
    "whisper": case(models.whisper, "Whisper"),
    "t5": case(models.t5, "T5"),
    "t5, cleaned up": case(models.t5, "T5", clean_up_tokenization_spaces=True),
    "t5, seven sentinels": case(models.t5, "T5", extra_ids=7),
    "mt5, as published": case(models.t5, "T5", extra_ids=0, additional_special_tokens=None),
    "umt5, as published": case(models.t5, "T5", extra_ids=300),
    "longt5, by its model's type": case(models.t5_of, "T5", model_type="longt5"),
    "t5, a token more": case(models.t5, "T5", added_tokens_decoder={"233": NEW}),
    "t5, tokens not said to be special": case(
        *(models.t5, "T5"),
        added_tokens_decoder={
            "1": PLAIN | {"content": "</s>"},
            "233": PLAIN | {"content": "<new>"},
        },
    ),
    "pegasus": case(models.pegasus, "Pegasus"),
    "bart": case(models.bart, "Bart"),
    "bart, a space before": case(_published_bart, "Bart"),
    "mvp": case(models.bart, "Mvp"),
    "blenderbot": case(models.blenderbot, "Blenderbot"),
    "blenderbot, two files": case(models.blenderbot_files, "Blenderbot"),
    "blenderbot-small": case(models.blenderbot_small, "BlenderbotSmall"),
    "blenderbot-small, special tokens split": case(
        models.blenderbot_small, "BlenderbotSmall", split_special_tokens=True
    ),
}


def _theirs(name: str, folder: Path, languages: dict[str, str]):
    sides = {"source_lang": "src_lang", "target_lang": "tgt_lang"}
    options = {sides[side]: code for side, code in languages.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return getattr(transformers, f"{name}Tokenizer").from_pretrained(folder, **options)


def _of_targets(theirs):
    """Return a tokenizer that reads targets: FSMT's class reads them as sources, with their ids."""
    if not isinstance(theirs, transformers.FSMTTokenizer):
        return lambda line: theirs(text_target=line)
    files = dict.fromkeys(("src_vocab_file", "tgt_vocab_file"), theirs.tgt_vocab_file)
    files |= {"merges_file": theirs.merges_file}
    lower = theirs.do_lower_case
    return transformers.FSMTTokenizer([theirs.tgt_lang] * 2, do_lower_case=lower, **files)


def _differing(theirs, ours: HuggingFaceTokenizer, some: str = "") -> list[str]:
    """List the differences, line by line, in the lines whose names have ``some`` in them."""
    differences, targets = [], _of_targets(theirs)
    for name, line in LINES.items():
        if some not in name:
            continue
        sides = {
            "source": (theirs(line)["input_ids"], ours.source),
            "target": (targets(line)["input_ids"], ours.target),
        }
        for side, (expected, words) in sides.items():
            if not theirs.num_special_tokens_to_add():
                # It ends no line. Ours ends targets at least, or a model would learn never to stop
                assert (words.prefix, words.suffix) in (((), ()), ((), (words.eos_id,)))
                assert side == "source" or words.suffix
                expected = [*expected, *words.suffix]
            if [*words.prefix, *words.encode(line), *words.suffix] != expected:
                differences.append(f"{name}: ids of a {side}")
        expected = sides["target"][0]
        size = ours.target.vocab_size
        # a case has a gap in its ids, at which Marian's class raises
        everything = range(size if size < 500 else 100)
        if name == "plain" and ours.decode(everything) != theirs.decode(
            list(everything), skip_special_tokens=True
        ):
            differences.append("text of every id")
        if ours.decode(expected) != theirs.decode(expected, skip_special_tokens=True):
            differences.append(f"{name}: text")
    return differences


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory) -> tuple[Path, str, dict[str, str]]:
    files, name, languages = CASES[request.param]
    return models.write(tmp_path_factory.mktemp("case") / "folder", files()), name, languages


@pytest.mark.proves("tokenizer")
def test_ids_and_text_are_those_of_transformers(folder):
    path, name, languages = folder
    theirs = _theirs(name, path, languages)
    ours = huggingface_tokenizer.load_huggingface(path, **languages)
    assert _differing(theirs, ours) == []
    end = theirs.sep_token_id if theirs.eos_token_id is None else theirs.eos_token_id
    assert (ours.pad_id, ours.source.eos_id) == (theirs.pad_token_id, end)


@pytest.mark.proves("tokenizer")
def test_a_tokenizer_saved_by_transformers_gives_the_same_ids(folder, tmp_path):
    path, name, languages = folder
    _theirs(name, path, languages).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    again = huggingface_tokenizer.load_huggingface(tmp_path, **languages)
    assert _differing(_theirs(name, tmp_path, languages), again) == []
    # tokenizer_config.json has the languages
    alone = huggingface_tokenizer.load_huggingface(tmp_path)
    assert alone.source.prefix == again.source.prefix
    assert (alone.source_lang, alone.target_lang) == (again.source_lang, again.target_lang)


def test_the_comparison_detects_other_ids(tmp_path):
    files = models.t5()
    theirs = _theirs("T5", models.write(tmp_path / "t5", files), {})
    other = models.write(
        tmp_path / "other",
        files | {"spiece.model": models.model("t5", user_defined_symbols="<sym>", part=1)},
    )
    differences = _differing(theirs, huggingface_tokenizer.load_huggingface(other))
    assert "plain: ids of a source" in differences and "plain: text" in differences


def test_languages_are_forced_as_in_transformers(tmp_path):
    for name in ("m2m_100", "mbart50", "nllb"):
        files, of, languages = CASES[name]
        path = models.write(tmp_path / name, files())
        theirs = _theirs(of, path, languages)
        ours = huggingface_tokenizer.load_huggingface(path, **languages)
        options = {"return_tensors": None} if name == "mbart50" or name == "nllb" else {}
        for code in (languages["target_lang"], languages["source_lang"]):
            inputs = theirs._build_translation_inputs(
                "a", src_lang=languages["source_lang"], tgt_lang=code, **options
            )
            to_code = ours.with_languages(target_lang=code)
            assert to_code.forced_bos_id() == inputs["forced_bos_token_id"], name


def test_the_sizes_and_the_spelling_are_those_of_transformers(tmp_path):
    for name in ("marian", "m2m_100", "mbart", "mbart50", "nllb", "t5", "pegasus", "bart"):
        files, of, languages = CASES[name]
        path = models.write(tmp_path / name, files())
        ours, theirs = huggingface_tokenizer.load_huggingface(path), _theirs(of, path, languages)
        assert ours.source.vocab_size == len(theirs), name
        assert ours.source.tokens() == {i: text for text, i in theirs.get_vocab().items()}, name


def test_the_languages_are_those_of_transformers():
    from transformers.models.m2m_100 import tokenization_m2m_100
    from transformers.models.mbart import tokenization_mbart
    from transformers.models.mbart50 import tokenization_mbart50
    from transformers.models.nllb import tokenization_nllb
    from transformers.models.plbart import tokenization_plbart

    for theirs, ours in (
        (tokenization_mbart, mbart.LANGUAGES),
        (tokenization_mbart50, mbart.LANGUAGES_50),
        (tokenization_nllb, m2m_100.LANGUAGES_NLLB),
        (tokenization_m2m_100, {"m2m100": m2m_100.LANGUAGES, "wmt21": m2m_100.LANGUAGES_WMT21}),
    ):
        assert ours == theirs.FAIRSEQ_LANGUAGE_CODES
    plbarts = {"base": plbart.LANGUAGES, "multi": plbart.LANGUAGES_MULTI}
    assert {
        name: [f"__{code}__" for code in codes] for name, codes in plbarts.items()
    } == tokenization_plbart.FAIRSEQ_LANGUAGE_CODES


# A source's language may have a default
SETTINGS = {
    "mbart": fairseq("MBart", None, "fr_XX"),
    "mbart50": fairseq("MBart50", None, "fr_XX"),
    "m2m_100": case(models.m2m_100, "M2M100", None, "ceb"),
    "m2m_100, WMT 2021": case(
        models.m2m_100, "M2M100", None, "ha", listed=False, language_codes="wmt21"
    ),
    "nllb": case(_nllb, "Nllb", "fra_Latn", "deu_Latn"),
    "pegasus, few ids before": case(models.pegasus, "Pegasus", offset=7),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_defaults_and_settings_are_those_of_transformers(name, tmp_path):
    files, of, languages = SETTINGS[name]
    theirs = _theirs(of, models.write(tmp_path, files()), languages)
    ours = huggingface_tokenizer.load_huggingface(tmp_path, **languages)
    for line in ("plain", "a mask after nothing", "languages of M2M100", "special tokens"):
        assert _differing(theirs, ours, line) == []
    assert {*getattr(theirs, "lang_code_to_token", ())} <= {*ours.languages}
    assert "WMT" not in name or len(ours.languages) == 8


def test_every_class_and_folder_of_a_family_has_its_recipe():
    """Under the names of old, slow and fast classes too, and without one by the folder's files."""
    names = transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES
    old = {"mt5": "MT5Tokenizer", "mbart": "MBart50Tokenizer", "m2m_100": "NllbTokenizer"}
    for model_type, family in huggingface.families().items():
        for recipe in family.tokenizers:
            assert family.recipe(recipe.files).files == recipe.files
            for name in (recipe.class_name, *recipe.other_classes):
                for class_name in (name, f"{name}Fast"):
                    recipe_of_any = huggingface.find_recipe(class_name)
                    assert huggingface.find_recipe(class_name, family) is recipe
                    assert recipe_of_any is not None and recipe_of_any.files == recipe.files
        for name in {names.get(model_type), old.get(model_type)} - {None, "TokenizersBackend"}:
            assert huggingface.find_recipe(name, family) in family.tokenizers, name


@pytest.mark.parametrize("name", huggingface_folders.FOLDERS)
def test_a_folder_that_names_no_start_has_the_start_of_its_class(name, tmp_path):
    case = huggingface_folders.FOLDERS[name]
    files = case.files()
    config = files["config.json"]
    config.pop("decoder_start_token_id", None)
    words = huggingface_tokenizer.load_huggingface(models.write(tmp_path, files))
    own = {key: value for key, value in config.items() if key != "model_type"}
    theirs = case.model_class.config_class(**own)
    start = getattr(theirs, "decoder_start_token_id", theirs.pad_token_id)
    if name == "marian":  # whose default is the id of padding in a published vocabulary
        start = config["pad_token_id"]
    if case.family.recipe(files).languages is None or name == "m2m_100":
        assert words.bos_id == start


def test_every_recipe_has_a_case():
    recipes = huggingface.tokenizer_recipes().values()
    tried = {f"{each.of}Tokenizer" for each in CASES.values()}
    assert {recipe.class_name for recipe in recipes} == tried


def test_a_tokenizer_json_of_a_generic_class_is_followed(tmp_path):
    """UMT5's folders name no family's class: transformers uses the file as it is, and so do we."""
    source = models.write(tmp_path / "t5", models.t5())
    _theirs("T5", source, {}).save_pretrained(tmp_path / "umt5")
    config = json.loads((tmp_path / "umt5" / "tokenizer_config.json").read_text())
    files = {"tokenizer_config.json": config | {"tokenizer_class": "TokenizersBackend"}}
    ids = {"pad_token_id": 0, "eos_token_id": 1}
    files["config.json"] = {"model_type": "umt5", "vocab_size": 1000} | ids
    models.write(tmp_path / "umt5", files)
    theirs = TokenizersBackend.from_pretrained(tmp_path / "umt5")  # AutoTokenizer's choice
    assert _differing(theirs, huggingface_tokenizer.load_huggingface(tmp_path / "umt5")) == []


# Byte-pair encoding of words

LETTERS = "abcdeœ'.,!?() \n\t\r\x0b\x1c\x85\xa0\u2028\u3000ABÀİßΣ_<>/w@1"
SPECIAL = ("__null__", "__start__", "__end__", "__unk__", "__newln__")


def their_tokenizer(folder: Path, merges: list[tuple[str, str]]):
    lines = "".join(f"{first} {second}\n" for first, second in merges)
    vocabulary = {token: i for i, token in enumerate(SPECIAL)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    return transformers.BlenderbotSmallTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt")
    )


def test_pieces_and_text_are_those_of_transformers(tmp_path):
    merges = models.word_merges()
    theirs, ours = their_tokenizer(tmp_path, merges), WordBpe(merges)
    draw = random.Random(0)
    lines = [*LINES.values(), *("".join(draw.choices(LETTERS, k=1 + i % 40)) for i in range(3000))]
    for line in lines:
        pieces = theirs._tokenize(line)
        assert ours.cut(line) == pieces, repr(line)
        assert ours.join(pieces).strip() == theirs.convert_tokens_to_string(pieces)
    assert len({piece for line in lines for piece in ours.cut(line)}) > 100


def test_white_space_is_that_of_the_regex_library():
    every = "x".join(chr(code) * 2 for code in range(0x110000))
    ours, theirs = piece_vocabulary._SPACES.findall(every), regex.findall(r"\s{2,}", every)
    assert ours == theirs and len(theirs) > 20
