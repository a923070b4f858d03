"""README, the pages of docs/ and the workflows agree with the package."""

import csv
import json
import re
import shlex
import statistics
import tomllib
from pathlib import Path

import pytest

from benchmarks import config_fields, pages
from campaigns.mutants import faults
from parity_tests.unit import runs
from tools import excerpts, notebooks

PAGES = [
    *(runs.ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(runs.ROOT / name / "README.md" for name in ("benchmarks", "campaigns")),
    *sorted(path for path in (runs.ROOT / "docs").rglob("*") if path.suffix in (".md", ".yml")),
    *sorted((runs.ROOT / ".github").rglob("*.yml")),
]
UNPUBLISHED = re.compile(r"pip install[^`|&]*?\bjax[-_](transformer|seq2seq)\b")


def from_an_index(text: str) -> list[str]:
    """List the commands that install this package by its name; a wheel's file name is none."""
    matches = UNPUBLISHED.finditer(text)
    return [each[0] for each in matches if not re.match(r"-[\w*.]*\.whl", text[each.end() :])]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(runs.ROOT).as_posix())
def test_no_page_installs_the_package_by_its_name(page: Path):
    """It is not published, and `jax-transformer` on PyPI is another project."""
    assert not from_an_index(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(runs.ROOT).as_posix())
def test_no_sentence_becomes_an_item_of_a_list(page: Path):
    """A line that begins with "75. " is one, and its number is lost."""
    last, text = 0, re.sub("```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for number in map(int, re.findall(r"^ *(\d+)\. ", text, re.MULTILINE)):
        assert number in (1, last + 1)
        last = number


SITE = (runs.ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
TABS = dict(re.findall(r"^  - (\w+):\n((?:   .*\n)+)", SITE, re.MULTILINE))
PAGES_OF = {tab: re.findall(r"[\w/-]+\.md", TABS[tab]) for tab in ("Guides", "Evidence")}


def sentences(text: str) -> list[str]:
    """List the sentences of the paragraphs and lists of a page."""
    text = re.sub(
        r"^ *```.*?^ *```$|<!--.*?-->|^[|#!][^\n]*", "", text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    paragraphs = re.split(r"\n\s*\n|^\s*(?:-|\d+\.) ", text, flags=re.MULTILINE)
    split = [re.split(r"(?<=[.!?])\W*\s+(?=\W*[A-Z0-9]|\W*code)", each) for each in paragraphs]
    return [sentence for part in split for sentence in part if len(sentence.split()) > 1]


@pytest.mark.parametrize("name", PAGES_OF["Guides"])
def test_the_median_sentence_of_a_guide_is_short(name: str):
    text = (runs.ROOT / "docs" / name).read_text(encoding="utf-8")
    lengths = [len(sentence.split()) for sentence in sentences(text)]
    assert lengths and statistics.median(lengths) <= 15


def test_sentences_are_counted():
    text = (
        "# Title\n\nOne of `x. Y`. Two\n(of it).\n\n- Three is. *Four* is\n\n```\nA b. C d.\n```\n"
    )
    assert list(map(len, map(str.split, sentences(text)))) == [3, 3, 2, 2]


@pytest.mark.parametrize("name", PAGES_OF["Evidence"])
def test_a_page_of_evidence_begins_with_its_claim_and_a_plot(name: str):
    text = (runs.ROOT / "docs" / name).read_text(encoding="utf-8")
    _, first, plot = text.split("\n\n")[:3]
    assert len(sentences(first)) == 2 and plot.startswith(("<!-- dots\n", "![")), first


def test_the_commands_of_a_page_s_tables_are_known():
    """`python benchmarks/pages.py` can run each of them again, and knows where its output ends."""
    for page in (page for page in PAGES if page.suffix == ".md"):
        text = page.read_text(encoding="utf-8")
        for command in pages.commands(page):
            table = text.partition(f"<!-- {command} -->\n")[2].partition("<!-- python")[0]
            assert pages.END in table and text.count(f"<!-- {command} -->") == 1, command
            _, script, *flags = shlex.split(command)
            source = (runs.ROOT / script).read_text(encoding="utf-8")
            assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--")), command


def test_what_a_command_prints_replaces_its_part_of_a_page(tmp_path, capfd):
    page, command = tmp_path / "page.md", "python benchmarks/input_pipeline.py --help"
    text = "before\n\n<!-- {} -->\n\nold\n\n<!-- end -->\n\nafter\n"
    page.write_text(text.format(command) + text.format("python benchmarks/no_such.py"))
    pages.main([str(page)])
    assert capfd.readouterr().out == f"{command}\npython benchmarks/no_such.py\n"
    pages.main([str(page), "pipeline"])
    new, rest = page.read_text().split("<!-- end -->\n", 1)
    assert rest == "\nafter\n" + text.format("python benchmarks/no_such.py")
    assert "--rounds" in new and "old" not in new and f"`{command}`" in new
    with pytest.raises(SystemExit, match="failed with exit code 2"):
        pages.main([str(page), "no_such"])
    assert page.read_text() == f"{new}<!-- end -->\n{rest}"


def test_an_installation_by_name_is_detected():
    for line in ("pip install jax-transformer", "pip install\n'jax-seq2seq[hub]'"):
        assert from_an_index(f"`{line}` and more")
    assert not from_an_index("pip install wheels/jax_seq2seq-*.whl pytest")
    assert not from_an_index("`pip install .` installs the command `jax-transformer`")


def test_the_distribution_has_a_name_that_is_free_and_the_command_keeps_its_own():
    project = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "jax-seq2seq" and list(project["scripts"]) == ["jax-transformer"]


def test_the_page_of_installation_lists_every_extra_once():
    project = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
    page = (runs.ROOT / "docs/install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\[.*?) \|", page, re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`\[([\w-]+)\]`", row)]
    assert sorted(listed) == sorted(project["optional-dependencies"])


def test_the_page_of_fields_is_that_of_the_code():
    """Every field has a docstring, and `python benchmarks/config_fields.py --write` was run."""
    assert config_fields.PAGE.read_text(encoding="utf-8") == config_fields.page()


def test_every_member_of_an_enum_is_found():
    for kind in config_fields.enums():
        assert list(config_fields.members(kind)) == [member.value for member in kind]


NOTEBOOKS = sorted((runs.ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_as_they_ran(path: Path):
    """In order, without an error. `.ci/run` executes them again."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and "error" not in {output["output_type"] for output in outputs}


def test_there_is_a_notebook_for_each_of_the_first_three_guides():
    assert {"huggingface", "your_model", "your_text"} < {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("preset", notebooks.DOCUMENTS)
def test_the_documents_have_the_notebooks_of_one_source(preset: str):
    """`python tools/notebooks.py --write` was run."""
    sources = [
        [cell["source"] for cell in cells(preset)] for cells in (notebooks.stored, notebooks.cells)
    ]
    assert sources[0] == sources[1]


def test_the_repository_has_one_address(monkeypatch):
    """`tools/notebooks.py --write` writes it into all files that have it."""
    old = notebooks.REPOSITORY
    files = [page for page in (*PAGES, *NOTEBOOKS) if old in page.read_text(encoding="utf-8")]
    documents = {notebooks.path(preset) for preset in notebooks.DOCUMENTS}
    assert set(files) == documents | set(notebooks.WITH_ADDRESS)
    monkeypatch.setattr(notebooks, "REPOSITORY", "someone/something")
    for file in notebooks.WITH_ADDRESS:
        text = file.read_text(encoding="utf-8")
        assert notebooks.addressed(text) == text.replace(old, "someone/something")
    for preset in notebooks.DOCUMENTS:
        assert old not in str(notebooks.cells(preset))


def test_the_page_on_the_core_has_the_lines_of_the_code():
    """`python tools/excerpts.py --write` was run."""
    text = excerpts.PAGE.read_text(encoding="utf-8")
    assert len(excerpts.BLOCK.findall(text)) == text.count("```py\n") >= 12
    assert excerpts.page() == text


def test_an_excerpt_has_no_docstring_and_no_other_definition():
    excerpt = excerpts.source("jax_transformer/weights/rules.py", "Rule.joined")
    assert excerpt.startswith("def joined(self, ") and excerpt.endswith("if own else tensor")
    assert '"""' not in excerpt and excerpt.count("def ") == 1


# docs/traps.md: each trap has three parts, and each test and fault that it names exists

TRAPS_PAGE = (runs.ROOT / "docs/traps.md").read_text(encoding="utf-8")
TRAPS = [
    " ".join(block.split()).replace("<br> ", "<br>\n").split("\n")
    for block in TRAPS_PAGE.split("\n\n")
    if block.strip().startswith("**")
]


def test_each_trap_has_a_description_a_figure_and_a_test():
    assert len(TRAPS) >= 50
    for trap in TRAPS:
        assert len(trap) == 3, trap
        description, number, guard = trap
        assert re.fullmatch(r"\*\*[^*]+\.\*\* .+<br>", description), description
        assert number.startswith("Shows as: ") and number.endswith(".<br>"), number
        assert re.fullmatch(r"Guarded by: `[^`]+`\.", guard), guard


def test_each_named_test_exists(request):
    named = tuple(re.fullmatch(r"Guarded by: `(.+)`\.", trap[2])[1] for trap in TRAPS)
    assert faults.missing_tests(named) == []
    assert not faults.uncollected(named, request.session), "not in the default suite"
    nothing = ("parity_tests/test_forward.py::test_of_nothing",)  # negative control
    assert faults.missing_tests(nothing) != []


def test_each_named_fault_is_in_the_campaign():
    listed = {mutant.name for mutant in faults.listed()}
    named = set(re.findall(r"fault “([^”]+)”", " ".join(TRAPS_PAGE.split())))
    assert len(named) >= 30 and named <= listed, named - listed


def test_the_figure_of_a_trap_is_that_of_its_fault():
    with open(runs.ROOT / "docs/data/mutants.tsv", encoding="utf-8", newline="") as file:
        measured = {row["fault"]: row for row in csv.DictReader(file, dialect="excel-tab")}
    shown = re.compile(r"Shows as: ([\d.e-]+) at (.+) in float64 \(fault “(.+)”\)")
    matches = [match for trap in TRAPS if (match := shown.match(trap[1]))]
    assert len(matches) >= 20
    for number, module, fault in map(re.Match.groups, matches):
        assert f"{float(number):.1e}" == measured[fault]["off by"], fault
        assert module in (measured[fault]["named first"], "the logits"), fault


# a figure in a sentence is computed from the table that the sentence summarises

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def tables(page: str) -> list[list[list[str]]]:
    """Return the cells of each row of each table of a page, without the headings."""
    text = (runs.ROOT / "docs" / page).read_text(encoding="utf-8").replace("*", "")
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[line.split("|")[1:-1] for line in block.splitlines()[2:]] for block in blocks]
    return [[[cell.strip() for cell in row] for row in table] for table in rows]


def figures(page: str, number: int, row: str, columns: slice) -> list[float]:
    """List the first number of each cell in rows of a page's n-th table."""
    cells = [
        x for each in tables(page)[number - 1] if each[0].startswith(row) for x in each[columns]
    ]
    return [float(match[0].replace(",", "")) for cell in cells if (match := NUMBER.search(cell))]


def of_steps(precision: str, row: str) -> tuple[float, float]:
    """Return the least and the largest speed of a step, best torch = 1, on both processors."""
    values = figures("speed.md", 2, f"speed of {precision}, best", slice(1, None))
    printed = [line for number in (3, 4) for line in tables("speed.md")[number - 1]]
    values += [float(line[4]) for line in printed if line[0] == row]
    return min(values), max(values)


def of_decoding(library: str, end: int | None = None) -> tuple[float, float]:
    """The same of decoding, over the columns up to ``end``."""
    rows = f"speed of ours, {library}", f"speed of ours, the best {library}"
    count = len(tables("speed.md")) + 1
    values = [
        x for n in range(1, count) for r in rows for x in figures("speed.md", n, r, slice(1, end))
    ]
    return min(values), max(values)


def totals(page: str, table: int, *columns: int) -> list[float]:
    return [sum(figures(page, table, "", slice(n, n + 1))) for n in columns]


SUMMARIES = [
    ("speed.md", "32 pairs runs at {:.2f} to {:.2f} times", of_steps("medium", "JAX, medium")),
    ("../README.md", "32 pairs has {:.2f} to {:.2f} times", of_steps("highest", "JAX")),
    ("../README.md", "and {:.2f} to {:.2f} times with", of_steps("medium", "JAX, medium")),
    ("../README.md", "Decoding has {:.2f} to {:.1f} times", of_decoding("transformers")),
    ("../README.md", "in batches {:.2f} to {:.2f} times", of_decoding("CTranslate2", end=3)),
    (
        "ports.md",
        "{:.0f} faults, {:.0f} named in float32, {:.0f} in bfloat16, and {:.0f} pairs",
        totals("ports.md", 2, 1, 2, 3, 7),
    ),
    ("ports.md", "{:,.0f} runs, {:.0f} false alarms", totals("ports.md", 3, 1, 2)),
]


@pytest.mark.parametrize(("page", "sentence", "values"), SUMMARIES)
def test_a_summary_follows_from_its_table(page: str, sentence: str, values):
    text = " ".join((runs.ROOT / "docs" / page).read_text(encoding="utf-8").split())
    assert sentence.format(*values) in text


@pytest.mark.parametrize(("page", "count"), [("reliability.md", 6), ("untrusted-files.md", 1)])
def test_a_row_of_totals_has_the_sums_of_the_rows_above(page: str, count: int):
    summed = [table for table in tables(page) if table[-1][0] == "all"]
    assert len(summed) == count
    for table in summed:
        for *above, total in [column for column in zip(*table, strict=True) if column[-1]][1:]:
            numbers = [int(cell.replace(",", "").replace("–", "0")) for cell in above]
            assert total == (f"{sum(numbers):,}" if any(numbers) else "–")
