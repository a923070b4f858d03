"""The parts of pages that commands write.

    python benchmarks/pages.py docs/convert.md              # lists the page's commands
    python benchmarks/pages.py docs/convert.md repeats 5    # runs those with one of these words

A comment in a page names the command. What it prints, without its progress on stderr, replaces the
text up to ``<!-- end -->``, after a line with the command, the machine and the date. The command
runs as in the page, from the repository's root.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
END = "<!-- end -->\n"
PRINTED = re.compile(r"^<!-- (python benchmarks/.*) -->$", re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The commands whose output is part of a page."""
    return PRINTED.findall(page.read_text(encoding="utf-8"))


def machine() -> str:
    """This machine, and the versions of the frameworks."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "torch"))
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores, {versions}"


def run(page: Path, command: str) -> None:
    """Run a command of a page, and write what it prints. Exits if it fails."""
    program = [sys.executable, *shlex.split(command)[1:]]
    printed = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if printed.returncode:
        sys.exit(f"{printed.stdout}{command} failed with exit code {printed.returncode}")
    today = f"{datetime.date.today():%-d %B %Y}"
    write(page, command, f"`{command}`\n({machine()}, {today}):\n\n{printed.stdout}")


def write(page: Path, command: str, text: str) -> None:
    """Replace the text between the comment that names a command and the next ``<!-- end -->``."""
    begin = f"<!-- {command} -->\n"
    head, _, rest = page.read_text(encoding="utf-8").partition(begin)
    new = f"{head}{begin}\n{text.rstrip()}\n\n{END}{rest.partition(END)[2]}"
    page.write_text(new, encoding="utf-8")


def write_rows(
    page: Path, command: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Replace the rows of a command's table that begin with the same cells, and add the others."""
    text = page.read_text(encoding="utf-8").partition(f"<!-- {command} -->\n")[2].partition(END)[0]
    old = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")[3:])
    table = {row[0]: row for row in (*filter(None, old), *rows)}
    lines = columns, ["---"] * len(columns), *table.values()
    write(page, command, "".join(f"| {' | '.join(line)} |\n" for line in lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("words", nargs="*", metavar="word")
    options = parser.parse_args(arguments)
    for command in commands(options.page):
        if not options.words:
            print(command)
        elif any(word in command for word in options.words):
            print(f"{command} ...", file=sys.stderr)
            run(options.page, command)


if __name__ == "__main__":
    main()
