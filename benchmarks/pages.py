"""The parts of pages that commands write."""

from pathlib import Path

END = "<!-- end -->\n"


def write(page: Path, command: str, text: str) -> None:
    """Replace the text between the comment that names a command and the next ``<!-- end -->``."""
    begin = f"<!-- {command} -->\n"
    head, _, rest = page.read_text(encoding="utf-8").partition(begin)
    new = f"{head}{begin}\n{text.rstrip()}\n\n{END}{rest.partition(END)[2]}"
    page.write_text(new, encoding="utf-8")
