"""The results of campaigns: a line of JSON for each outcome, and a table of them."""

import dataclasses
import datetime
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaigns.case import Case


@dataclass(frozen=True)
class Record:
    """A line of the results."""

    campaign: str
    seed: int
    number: int
    seconds: float
    case: Case

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Record":
        fields = json.loads(line)
        case = fields.pop("case")
        return cls(**fields, case=Case(**case | {"wrong": tuple(case["wrong"])}))


def recorded(path: Path) -> list[Record]:
    """The lines of a results file; a last one that was cut off is removed."""
    if not path.exists():
        return []
    complete, _, rest = path.read_text().rpartition("\n")
    if rest:
        path.write_text(f"{complete}\n" if complete else "")
    return [Record.from_json(line) for line in complete.splitlines()]


def table(records: Sequence[Record]) -> Iterator[str]:
    """Yield the outcomes by group, and the number of those that broke a promise."""
    counts: Counter[tuple[str, str]] = Counter()
    for record in records:
        for group in (record.case.group, "all"):
            counts[group, record.case.outcome] += record.case.count
            counts[group, "not as promised"] += bool(record.case.wrong)
    groups = dict.fromkeys(record.case.group for record in records)
    columns = [*dict.fromkeys(record.case.outcome for record in records), "not as promised"]
    yield "| | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for group in (*groups, "all") if len(groups) > 1 else groups:
        cells = [
            f"{counts[group, column]:,}" if counts[group, column] else "–" for column in columns
        ]
        yield f"| {group} | {' | '.join(cells)} |"


def summary(records: Sequence[Record]) -> Iterator[str]:
    """Yield the cells of a row: cases, outcomes, those that broke a promise, and today."""
    yield f"{len({record.number for record in records}):,}"
    yield f"{sum(record.case.count for record in records):,}"
    yield f"{sum(bool(record.case.wrong) for record in records):,}"
    yield f"{datetime.date.today():%-d %B %Y}"


def findings(records: Sequence[Record]) -> Iterator[str]:
    """Yield each broken promise, and the command that repeats its case."""
    for record in records:
        if record.case.wrong:
            yield f"\n{record.campaign} {record.number}: {record.case.what}"
            yield from (f"  {line}" for text in record.case.wrong for line in text.splitlines())
            yield (
                f"  again: python -m campaigns {record.campaign}"
                f" --seed {record.seed} --only {record.number}"
            )
