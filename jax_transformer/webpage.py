"""HTML pages that need only a browser: data put into a template that is shipped with the code."""

import base64
import hashlib
import json
import re
from typing import Any


def render(page: str, data: dict[str, Any]) -> str:
    """The template ``page`` with ``data`` in it.

    The data is JSON in which nothing can end its element, and the page's content security policy
    lets only its own script run. The template has one ``<script>``, and ``SCRIPT-HASH`` and
    ``PAGE-DATA`` once each.
    """
    text = re.sub(
        "[<>&\u2028\u2029]",
        lambda match: f"\\u{ord(match[0]):04x}",
        json.dumps(data, ensure_ascii=False),
    )
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return page.replace("SCRIPT-HASH", f"sha256-{digest}", 1).replace("PAGE-DATA", text, 1)
