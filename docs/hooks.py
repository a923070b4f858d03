"""What the site needs besides Markdown; mkdocs.yml names this file as its hook.

Pages are written to be read on GitHub too, where a link may lead to any file of the repository;
docstrings have Sphinx's roles. A line that is a link to a file of data becomes its tables.
"""

import csv
import itertools
import posixpath
import re
from pathlib import Path

from mkdocs.plugins import get_plugin_logger

log = get_plugin_logger(__name__)
ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!\w+:|#)[^)\s#]+)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:meth|func|class|attr|data|mod):(?=<code>)")
TABLE = re.compile(r"^\[[^\]]+\]\((data/[\w-]+\.tsv)\)$", re.MULTILINE)
DIAGRAM = '<pre class="mermaid">'


def tables(path):
    """Yield the lines of a file of data, a table under a heading for each section of its rows."""
    with open(path, encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, "excel-tab")
    for section, group in itertools.groupby(rows, key=lambda row: row[0]):
        yield from (f"### {section}", "")
        for row in (header, ["", *["---"] * len(header[1:])], *group):
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row[1:]) + " |"
        yield ""


def on_page_markdown(markdown, page, config, files):
    """Write the tables of data, and links that leave the documentation as text with the file's
    name."""
    markdown = TABLE.sub(lambda match: "\n".join(tables(ROOT / "docs" / match[1])), markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match):
        text, target, _ = match.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        is_page = path.startswith("docs/") and files.get_file_from_path(path.removeprefix("docs/"))
        if is_page:
            return match[0]
        if not (ROOT / path).exists():
            log.warning(f"{page.file.src_uri} links to {path}, which does not exist")
        return (
            f"`{path}`"
            if text.strip("`") in (path, posixpath.basename(path))
            else (f"{text} (`{path}`)")
        )

    return LINK.sub(replaced, markdown)


def on_page_content(html, page, config, files):
    """Drop the roles of docstrings, whose names are shown as code."""
    return ROLE.sub("", html)


def on_post_page(output, page, config):
    """Load Mermaid on pages with a diagram, from the site itself."""
    if DIAGRAM not in output:
        return output
    script = posixpath.relpath("assets/mermaid.tiny.js", posixpath.dirname(page.file.dest_uri))
    output = re.sub(
        f"({DIAGRAM}.*?</pre>)", r'<div class="diagram">\1</div>', output, flags=re.DOTALL
    )
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)
