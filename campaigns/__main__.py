"""Run campaigns: numbered cases, each of which must end as the documentation promises.

``python -m campaigns damages fuzz --count 1000 --jobs 2 --results results.jsonl``

Every case is decided by the seed and its number, and can be repeated with ``--only NUMBER``. A
results file has a line of JSON for each outcome; a campaign that was stopped goes on after them.
Without names all campaigns run. The exit code is 1 if a promise was broken.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import pages
from campaigns import report, runner
from campaigns.runner import CAMPAIGNS

COLUMNS = ["campaign", "seed", "cases", "outcomes", "not as promised", "day"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="campaigns: " + ", ".join(CAMPAIGNS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="campaigns (default: all)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--count", type=int, help="numbered cases of each campaign")
    size.add_argument("--minutes", type=float, help="minutes of each campaign, instead of a count")
    size.add_argument("--nightly", action="store_true", help="as many cases as a night allows")
    size.add_argument("--only", type=int, metavar="NUMBER", help="one case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--results", type=Path, help="file of results, a line of JSON for each")
    parser.add_argument("--work", type=Path, help="folder to work in, which is kept")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("runs/campaigns"),
        help="folder for findings (%(default)s)",
    )
    parser.add_argument("--page", type=Path, help="page with a table of campaigns")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CAMPAIGNS and ":" not in name]
    if unknown:
        parser.error(f"{unknown[0]}: is not one of {', '.join(CAMPAIGNS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    broken = False
    with contextlib.ExitStack() as stack:
        work = options.work
        if work is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="campaign-")))
        for name in options.names or CAMPAIGNS:
            began = time.monotonic()
            records = runner.Run(name, options, work.absolute())()
            minutes = (time.monotonic() - began) / 60
            about = runner.find(name).about
            print(f"\n{name}, seed {options.seed}: {about} ({minutes:.1f} minutes)\n")
            print("\n".join([*report.table(records), *report.findings(records)]), flush=True)
            if options.page is not None:
                row = [name, str(options.seed), *report.summary(records)]
                pages.write_rows(options.page, "python -m campaigns --page", COLUMNS, [row])
            broken = broken or any(record.case.wrong for record in records)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
