"""The runner of campaigns: results go on where they ended, and nothing that went wrong is lost."""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns import __main__ as command
from campaigns import runner
from campaigns.case import Campaign, Case

NAME = "campaigns.tests.test_runner:TOY"
REFUSED, RAISES, DIES = 3, 4, 5


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    (scratch / "file").write_text(str(number))
    if number == DIES:
        os._exit(9)
    if number == RAISES:
        raise ValueError("no such number")
    assert (shared / "prepared").exists()
    wrong = ("not noticed",) if number == REFUSED else ()
    yield Case("even" if number % 2 == 0 else "odd", "equal", f"case {number}", wrong, 10)
    yield Case("drawn", str(random.Random(f"{seed} {number}").randrange(2)))


TOY = Campaign("a toy", lambda shared: (shared / "prepared").touch(), cases, small=3, nightly=4)


def run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    common = ("--keep", str(folder / "kept"), "--results", str(folder / "results.jsonl"))
    code = command.main([NAME, *common, *arguments])
    return code, capsys.readouterr().out


def numbers(folder: Path) -> list[int]:
    """The numbers of the recorded cases, in their order."""
    lines = (folder / "results.jsonl").read_text().splitlines()
    return [json.loads(line)["number"] for line in lines]


def test_a_campaign_goes_on_after_its_results_and_counts_what_they_stand_for(tmp_path, capsys):
    code, _ = run(tmp_path, capsys)
    assert code == 0 and numbers(tmp_path) == [0, 0, 1, 1, 2, 2]
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text() + '{"campaign": "cut o')  # it was killed while it wrote
    code, out = run(tmp_path, capsys, "--count", "3")
    assert code == 0 and numbers(tmp_path) == [0, 0, 1, 1, 2, 2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
    header = next(row for row in rows if "equal" in row)
    even = next(row for row in rows if row[:1] == ["even"])
    assert even[header.index("equal")] == "20" and even[header.index("not as promised")] == "–"
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- python -m campaigns --page -->\n<!-- end -->\nAfter.\n")
    for _ in range(2):  # the row is replaced
        run(tmp_path, capsys, "--count", "3", "--page", str(page))
    before, *rows, after = page.read_text().splitlines()
    assert (before, after) == ("Before.", "After.") and len([x for x in rows if x[:1] == "|"]) == 3
    assert any(row.startswith(f"| {NAME} | 0 | 3 | 33 | 0 | ") for row in rows)


def test_what_breaks_a_promise_is_named_kept_and_repeated(tmp_path, capsys):
    code, out = run(tmp_path, capsys, "--count", "7", "--jobs", "2")
    assert code == 1 and set(numbers(tmp_path)) == set(range(7))
    for number, reason in (
        (REFUSED, "not noticed"),
        (RAISES, "ValueError: no such number"),
        (DIES, "the process died (exit code 9)"),
    ):
        assert reason in out and f"--seed 0 --only {number}\n" in f"{out}\n"
        assert (tmp_path / "kept" / f"{NAME}-0-{number}" / "file").read_text() == str(number)
    assert len(list((tmp_path / "kept").iterdir())) == 3
    (tmp_path / "again").mkdir()
    code, out = run(tmp_path / "again", capsys, "--only", str(REFUSED))
    assert code == 1 and out.count("not noticed") == 1


def test_a_campaign_that_cannot_be_prepared_ends_with_the_reason(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="no_such_module"):
        command.main(["campaigns.no_such_module:TOY", "--count", "1"])
    with pytest.raises(SystemExit):
        command.main(["no-such-campaign"])
    assert "no-such-campaign: is not one of" in capsys.readouterr().err


def test_the_readme_lists_every_campaign_once():
    text = (Path(runner.__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(runner.CAMPAIGNS)
    assert all(isinstance(runner.find(name), Campaign) for name in rows if name != "fuzz")
