"""HTML pages that need nothing but a browser: data put into a page that is kept beside the code."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from jax_transformer.storage import atomic


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
    """Write a page, complete or not at all."""
    atomic.write_text(path, text)
