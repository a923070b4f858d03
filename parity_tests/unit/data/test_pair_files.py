"""Pairs in a .tsv, .jsonl or .parquet file and in Hugging Face data sets; errors name the line."""

import gzip
import json
import sys
import types
from pathlib import Path

import pytest

from jax_transformer import errors
from jax_transformer.data import parallel_text
from jax_transformer.data.options import DataOptions, Task
from jax_transformer.data.parallel_text import Pairs


def written(path: Path, content: bytes | str) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def refusal(path: str, *fields: str) -> str:
    with pytest.raises(errors.InputError) as caught:
        parallel_text.read_pair_file(path, *(fields or ("source", "target")))
    message = str(caught.value)
    assert "\n" not in message and message.startswith(path)
    return message.removeprefix(path)


def lines(*values) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a.tsv", ".tsv"), ("b/A.TSV.gz", ".tsv"), ("a.jsonl", ".jsonl"), ("a.tsv.jsonl.gz", ".jsonl")]
    + [("a.tsv.zst", ".tsv"), ("a.tsv.PARQUET", ".parquet"), ("a.parquet.gz", None)]
    + [(path, None) for path in ("a.txt", "a.json", "tsv", "a.tsv.xz", "a.gz", "a.tsv.zst.gz")],
)
def test_the_suffix_decides_the_format(path, expected):
    assert parallel_text.suffix(path) == expected


PACKINGS = [bytes, gzip.compress, b"\xef\xbb\xbf".__add__, lambda x: x.replace(b"\n", b"\r\n")]


def test_a_pattern_names_its_files_in_the_order_of_names(tmp_path):
    """A file of the pattern's own name is that file; a pattern without files stays, as missing."""
    for name in ("b.tsv", "a.tsv", "[ab].tsv", "c.txt", "in/d.tsv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path / name, "x\ty\n")
    root = f"{tmp_path}/"
    options = dict(train=(f"{root}in/*", f"{root}?.tsv"), valid=(f"{root}[ab].tsv",))
    data = DataOptions(**options, train_weights=(1.0, 2.0, 0.5))
    assert data.train == (f"{root}in/d.tsv", f"{root}a.tsv", f"{root}b.tsv")
    assert data.valid == options["valid"]
    sources = DataOptions(
        task=Task.PREFIX_LM, train_source=(f"{root}**/*.tsv",), valid_source=(f"{root}x*",)
    )
    names = ("[ab].tsv", "a.tsv", "b.tsv", "in/d.tsv")
    assert sources.train_source == tuple(f"{root}{name}" for name in names)
    assert sources.valid_source == (f"{root}x*",)


@pytest.mark.parametrize("pack", PACKINGS)
@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.jsonl", "pairs.tsv.gz", "pairs.jsonl.gz"])
def test_pairs_come_in_order_and_empty_sides_are_counted(tmp_path, name, pack):
    pairs = [("one two", "eins zwei"), ("", "leer"), ("a\u2028b", "ü\x85")]
    pairs += [("empty", " \u3000"), ("last", "letzte")]
    tables = "".join(f"{source}\t{target}\n" for source, target in pairs)
    objects = ""
    for i, (s, t) in enumerate(pairs):
        row = {"target": t, "id": 1, "source": s}
        objects += json.dumps(row, ensure_ascii=i == 0) + "\n"
    content = pack((tables if "tsv" in name else objects).encode() + b" \n")  # and a blank line
    loaded = parallel_text.read_pair_file(written(tmp_path / name, content), "source", "target")
    assert loaded == Pairs([pairs[0], pairs[2], pairs[4]], dropped_empty=3)


@pytest.mark.parametrize(
    ("line", "tabs"), [("c", 0), ("c\tC\t", 2), ("a\tb\tc\td", 3), ("\t\t", 2)]
)
def test_a_line_with_other_than_one_tab_is_named(tmp_path, line, tabs):
    path = written(tmp_path / "pairs.tsv", f"a\tA\n{line}\nd\tD\n")
    assert f": line 2 has {tabs} tabs" in refusal(path)


def test_a_dotted_key_selects_a_nested_field(tmp_path):
    rows = ({"translation": {"de": "Haus", "en": "house"}}, {"translation": {"en": "a", "de": "b"}})
    path = written(tmp_path / "pairs.jsonl", lines(*rows))
    loaded = parallel_text.read_pair_file(path, "translation.de", "translation.en")
    assert loaded.pairs == [("Haus", "house"), ("b", "a")]
    assert "line 1 has no 'translation.fr'" in refusal(path, "translation.fr", "translation.en")
    assert "line 1 has no 'text'; known: translation" in refusal(path, "text.de", "text.en")
    message = "line 1 has no 'translation.en.x': expected an object, not text"
    assert message in refusal(path, "translation.de", "translation.en.x")


GOOD = {"source": "a", "target": "A"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON: "),
        ('{"source": NaN1}', "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ("[1]", "has no 'source': expected an object, not a list"),
        (
            '{"sources": "a", "target": "b"}',
            "has no 'source' (did you mean 'sources'?); known: sources, target",
        ),
        ('{"source": "a"}', "has no 'target'"),
        ('{"source": 5, "target": "b"}', ": 'source' is a number, not text"),
        ('{"source": "a", "target": null}', ": 'target' is null, not text"),
        ('{"source": "a", "target": ["b"]}', ": 'target' is a list, not text"),
        ('{"source": "a", "target": "\\ud83d"}', ": 'target' has half of a surrogate pair"),
    ],
)
def test_an_invalid_pair_is_named_with_its_line(tmp_path, line, message):
    path = written(tmp_path / "pairs.jsonl", lines(GOOD, GOOD) + line + "\n" + lines(GOOD))
    assert refusal(path).startswith(f": line 3{'' if message.startswith(':') else ' '}{message}")


def test_characters_outside_the_basic_plane_may_be_escaped(tmp_path):
    path = written(tmp_path / "pairs.jsonl", '{"source": "\\ud83d\\ude00", "target": "x"}\n')
    assert parallel_text.read_pair_file(path, "source", "target").pairs == [("😀", "x")]


def test_text_rules_apply_to_pair_files(tmp_path):
    assert "empty" in refusal(written(tmp_path / "a.tsv", ""))
    assert "line 2 is not valid UTF-8" in refusal(written(tmp_path / "a.tsv", b"a\tb\n\xff\tb\n"))
    assert "same content" in refusal(written(tmp_path / "a.tsv", "a\ta\n\tb\nc\tc\n"))
    empty = written(tmp_path / "a.tsv", "a\t\n\tb\n\n")
    assert "each of the 3 pairs has an empty side" in refusal(empty)
    assert "No such file" in refusal(str(tmp_path / "absent.tsv"))


# Parquet


@pytest.fixture
def pa():
    """Return pyarrow."""
    pytest.importorskip("pyarrow.parquet")
    return sys.modules["pyarrow"]


def parquet_file(path: Path, columns: dict, **options) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **options)
    return str(path)


SIDES = {"source": ["a", "", "c\nd"], "n": [1, 2, 3], "target": ["A", "B", "C"]}


def test_pairs_of_parquet_come_in_order_of_row_groups(tmp_path, pa, monkeypatch):
    monkeypatch.setattr(parallel_text, "_ROWS", 2)
    path = parquet_file(tmp_path / "a.parquet", SIDES, row_group_size=2)
    assert parallel_text.read_pair_file(path, "source", "target") == Pairs(
        [("a", "A"), ("c\nd", "C")], dropped_empty=1
    )
    nested = {"translation": [{"de": "Haus", "en": "house", "n": b"x"}]}
    path = parquet_file(tmp_path / "b.parquet", nested)
    loaded = parallel_text.read_pair_file(path, "translation.de", "translation.en")
    assert loaded.pairs == [("Haus", "house")]
    assert ": row 1 has no 'translation.fr'" in refusal(path, "translation.fr", "translation.en")
    assert "row 1: 'translation.n' is bytes" in refusal(path, "translation.de", "translation.n")


def test_only_some_rows_of_parquet_are_in_memory(tmp_path, pa, monkeypatch):
    monkeypatch.setattr(parallel_text, "_ROWS", 500)
    sides = {"source": [f"{i} " * 20 for i in range(20_000)], "target": ["B"] * 20_000}
    path = parquet_file(tmp_path / "a.parquet", sides, row_group_size=500)
    before = pa.total_allocated_bytes()
    rows = parallel_text.read_rows(path, "source", "target")
    next(rows)
    assert 0 < pa.total_allocated_bytes() - before < 500_000  # all of them: 2.6 MB
    rows.close()


def test_a_row_of_parquet_is_named_by_its_number_in_the_file(tmp_path, pa, monkeypatch):
    monkeypatch.setattr(parallel_text, "_ROWS", 1)
    path = parquet_file(tmp_path / "a.parquet", SIDES | {"target": ["A", "B", None]})
    rows = parallel_text.read_rows(path, "source", "target")
    assert [next(rows), next(rows)] == [("a", "A"), ("", "B")]
    with pytest.raises(errors.InputError, match=r"a\.parquet: row 3: 'target' is null, not text"):
        next(rows)


def test_unusable_parquet_is_named(tmp_path, pa, monkeypatch):
    path = parquet_file(tmp_path / "a.parquet", SIDES)
    message = ": no column 'sources' (did you mean 'source'?); known: source, n, target"
    assert refusal(path, "sources", "target") == message
    assert refusal(path, "n", "target") == ": row 1: 'n' is a number, not text"
    content = Path(path).read_bytes()
    for damaged in (content[:-9], content[:20], b"", content.replace(b"PAR1", b"XXXX")):
        broken = written(tmp_path / "cut.parquet", damaged)
        assert refusal(broken).startswith(": the Parquet data are truncated or damaged: ")
    page = parquet_file(tmp_path / "b.parquet", {"source": ["ab" * 99] * 99, "target": ["B"] * 99})
    content = Path(page).read_bytes()
    assert "damaged" in refusal(
        written(tmp_path / "b.parquet", content[:9] + b"!" * 40 + content[49:])
    )
    assert "cannot be read: No such file" in refusal(str(tmp_path / "absent.parquet"))
    assert "no rows" in refusal(parquet_file(tmp_path / "a.parquet", {"source": [], "target": []}))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'jax-seq2seq\[parquet\]'"):
        parallel_text.read_pair_file(path, "source", "target")


# Hugging Face data sets


class Rows(list):
    """The part of a ``datasets.Dataset`` that the code uses."""

    column_names = ("translation", "id")

    def select_columns(self, columns):
        return [{name: row[name] for name in columns} for row in self]


@pytest.fixture
def library(monkeypatch):
    """Return a fake library that has one data set."""

    def load_dataset(path, name=None, *, split):
        if path != "house/words":
            raise ConnectionError("Couldn't reach the hub\n  (offline)")
        rows = {
            "train": [("Haus", "house"), ("", "empty"), ("Maus", "mouse")],
            "nulls": [("a", "b"), (None, "b")],
            "none": [],
        }[split]
        target = name.removeprefix("de-")
        return Rows({"translation": {"de": de, target: other}, "id": 1} for de, other in rows)

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)


def from_hub(**changes: str) -> Pairs:
    usual = {"name": "house/words", "config": "de-en", "split": "train"}
    usual |= {"source": "translation.de", "target": "translation.en"}
    return parallel_text.read_dataset(*(usual | changes).values())


def test_a_data_set_gives_pairs(library):
    assert from_hub() == Pairs([("Haus", "house"), ("Maus", "mouse")], dropped_empty=1)
    both = parallel_text.columns_of("a", ["id", "translation"], "translation.de", "translation.en")
    assert both == ["translation"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "no/such"}, "data set no/such, split train: Couldn't reach the hub (offline)"),
        (
            {"source": "translations.de"},
            "split train: no column 'translations' (did you mean 'translation'?); known: "
            "translation, id",
        ),
        ({"target": "translation.fr"}, "split train: row 1 has no 'translation.fr'"),
        ({"split": "nulls"}, "split nulls: row 2: 'translation.de' is null, not text"),
        ({"split": "none"}, "split none: the split is empty"),
    ],
)
def test_an_unusable_data_set_is_named(library, changes, message):
    with pytest.raises(errors.InputError) as caught:
        from_hub(**changes)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(errors.ConfigError, match=r"pip install 'jax-seq2seq\[hub\]'"):
        from_hub()
