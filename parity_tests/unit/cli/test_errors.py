"""Every refusal has the exit code that docs/exit-codes.md names."""

import re

import pytest

from jax_transformer import cli, errors
from parity_tests.unit import runs

CODES = {
    errors.DifferentError: 1,
    errors.ConfigError: 2,
    errors.InputError: 3,
    errors.UnsafeFileError: 4,
    errors.CheckpointError: 5,
    errors.NonFiniteLossError: 6,
    errors.LockedError: 7,
    errors.LostProcessError: 8,
    errors.Preempted: 75,
}


def test_every_refusal_is_listed_and_documented():
    subclasses = {
        kind
        for kind in errors.Refusal.__subclasses__()
        if kind.__module__ == "jax_transformer.errors"
    }
    # ReportedError has the code of the error that another process reports
    assert subclasses - {errors.ReportedError} == CODES.keys()
    page = (runs.ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)}
    assert documented == {0, 130, *CODES.values()}


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_a_refusal_ends_the_command_with_its_code_and_one_line(kind, monkeypatch, capsys):
    def refuse(arguments):
        raise kind("what is wrong")

    monkeypatch.setattr(cli, "_run", refuse)
    assert cli.main(["translate"]) == CODES[kind]
    assert capsys.readouterr() == ("", "jax-transformer: what is wrong\n")


def test_a_count_has_its_noun_in_the_right_number():
    assert [errors.counted(n, "line") for n in (0, 1, 2000)] == ["0 lines", "1 line", "2,000 lines"]
