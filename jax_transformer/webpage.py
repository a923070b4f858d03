"""HTML pages that need nothing but a browser: data put into a page that is kept beside the code."""

import base64
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any


def render(page: str, data: dict[str, Any]) -> str:
    """``page`` with ``data`` in it: JSON in which nothing can end its element, and a policy that lets no script run but the page's own.

    In the page stand ``SCRIPT-HASH`` and ``PAGE-DATA`` once, and one ``<script>``.
    """
    text = re.sub(
        "[<>&\u2028\u2029]",
        lambda match: f"\\u{ord(match[0]):04x}",
        json.dumps(data, ensure_ascii=False),
    )
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.replace("SCRIPT-HASH", f"sha256-{digest}", 1).replace("PAGE-DATA", text, 1)


def write(path: str | Path, text: str) -> None:
    """Write a page, whole or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
