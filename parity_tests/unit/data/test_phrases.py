"""The built-in task's data: its generator, rules for every pair, and known pairs."""

import lzma
import re
import unicodedata
from importlib import resources

import pytest

from jax_transformer.data import phrases

FILES = resources.files("jax_transformer.data")


@pytest.fixture(scope="module")
def splits() -> dict[str, list[phrases.Pair]]:
    return phrases.load()


@pytest.fixture(scope="module")
def pairs(splits) -> list[phrases.Pair]:
    return [pair for part in splits.values() for pair in part]


@pytest.mark.slow
def test_the_generator_makes_the_shipped_file():
    babel = pytest.importorskip("babel")
    from tools import make_phrases

    made_with = re.search(
        r"Babel version (\S+?)\.?$", "\n".join(phrases.header()), flags=re.MULTILINE
    ).group(1)
    remedy = "run `python -m tools.make_phrases` and ship the new file"
    assert made_with == babel.__version__, (
        f"phrases.tsv.xz is of Babel {made_with}, installed is {babel.__version__}: {remedy}"
    )
    shipped = lzma.decompress((FILES / "phrases.tsv.xz").read_bytes()).decode()
    assert make_phrases.make_text() == shipped, remedy


def test_split_sizes(splits):
    assert list(splits) == ["train", "valid", "test"]
    assert (len(splits["valid"]), len(splits["test"])) == (1_000, 1_000)
    assert 58_000 <= len(splits["train"]) <= 62_000


def test_every_source_is_unique_over_all_splits(pairs):
    sources = [source for source, _ in pairs]
    assert len(set(sources)) == len(sources)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_third_of_each_split_is_in_each_language(splits, split):
    for language in ("de", "fr", "es"):
        share = sum(source.startswith(f"<2{language}> ") for source, _ in splits[split]) / len(
            splits[split]
        )
        assert 0.30 < share < 0.37, language


def test_every_line_is_clean(pairs):
    for source, target in pairs:
        assert re.fullmatch(r"<2(de|fr|es)> \S.*", source)
        for text in (source, target):
            assert text and text == text.strip() and unicodedata.is_normalized("NFC", text)
            assert all(character == " " or not character.isspace() for character in text), (
                f"a space of another kind in {text!r}"
            )
            assert all(unicodedata.category(character) not in ("Cc", "Cf") for character in text), (
                f"an invisible character in {text!r}"
            )
            assert len(text) <= 64


@pytest.mark.parametrize("language", ["de", "fr", "es"])
def test_training_has_every_word_of_the_other_splits(splits, language):
    """A word that only the test split has could not be learned."""
    words = {
        split: {
            word
            for pair in pairs
            if pair[0][2:4] == language
            for text in pair
            for word in re.findall(r"[^\W\d_]+", text)
        }
        for split, pairs in splits.items()
    }
    assert len(words["test"]) > 100
    assert not (words["valid"] | words["test"]) - words["train"]


# Written from the languages' own rules, not with Babel
KNOWN = {
    "<2de> March 2, 2039": "2. März 2039",
    "<2fr> March 8, 2024": "8 mars 2024",
    "<2es> March 4, 1998": "4 de marzo de 1998",
    "<2de> 1,116.5": "1.116,5",
    "<2fr> 5,914.62": "5 914,62",
    "<2es> 4,929.8": "4929,8",
    "<2de> Mon, Mar 12": "Mo., 12. März",
    "<2fr> Mon, Aug 31": "lun. 31 août",
    "<2es> Mon, Apr 20": "lun, 20 abr",
    "<2de> Aug 7, 2015": "07.08.2015",
    "<2fr> Aug 6, 2013": "6 août 2013",
    "<2es> Aug 3, 2007": "3 ago 2007",
    "<2de> 2/7/08": "07.02.08",
    "<2fr> 9/2/08": "02/09/2008",
    "<2es> 2/3/08": "3/2/08",
    "<2de> Mar 3 – 8, 1997": "3.–8. März 1997",
    "<2fr> Feb 2 – Mar 12, 2023": "2 févr. – 12 mars 2023",
    "<2es> 4:24 AM – 6:05 PM": "4:24–18:05",
    "<2de> Fri 12:14 AM": "Fr., 00:14",
    "<2de> 1 kilogram": "1 Kilogramm",
    "<2fr> 0.9 liters": "0,9 litre",  # French counts up to 1.99 as singular
    "<2es> 0.2 liters": "0,2 litros",
    "<2de> 4 hr": "4 Std.",
    "<2es> 78,492 kilometers": "78.492 kilómetros",
    "<2de> 14.3°C": "14,3 °C",
    "<2de> €7,064.51": "7.064,51 €",
    "<2fr> €2,739.00": "2 739,00 €",
    "<2es> €2,239.62": "2239,62 €",
    "<2es> CHF 0.03": "0,03 CHF",
    "<2de> 1 British pound": "1 Britisches Pfund",
    "<2fr> 86 Swiss francs": "86 francs suisses",
    "<2es> 1 US dollar": "1 dólar estadounidense",
    "<2de> 2.6%": "2,6 %",
    "<2fr> 4.6 million": "4,6 millions",
    "<2es> 7.7 million": "7,7 millones",
    "<2de> Portugal and Iceland": "Portugal und Island",
    "<2fr> March, May, or October": "mars, mai ou octobre",
    "<2es> April, May, or October": "abril, mayo u octubre",
    "<2es> Dutch and Italian": "neerlandés e italiano",
    "<2fr> German (Sweden)": "allemand (Suède)",
    "<2de> 1 year ago": "vor 1 Jahr",
    "<2fr> 1 week ago": "il y a 1 semaine",
    "<2es> in 1 year": "dentro de 1 año",
    "<2fr> 2nd quarter 2030": "2e trimestre 2030",
    "<2de> 2 hours and 2 minutes": "2 Stunden und 2 Minuten",
}


def test_known_pairs(pairs):
    target_of = dict(pairs)
    assert {source: target_of.get(source, "not in the data") for source in KNOWN} == KNOWN


def test_the_licence_goes_with_the_data():
    text = (FILES / "PHRASES_LICENSE").read_text(encoding="utf-8")
    assert text.startswith("UNICODE LICENSE V3") and "SPDX-License-Identifier: Unicode-3.0" in text
    assert any("PHRASES_LICENSE" in line for line in phrases.header())
