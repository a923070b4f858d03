"""The parts of pages that commands write."""

from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end -->\n"


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
