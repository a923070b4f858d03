"""HTML pages that need only a browser: data put into a template that is shipped with the code."""

import base64
import hashlib
import json
import re
from typing import Any


def render(page: str, data: dict[str, Any]) -> str:
    """Return the template ``page`` with ``data`` in it.

    The data is JSON in which nothing can end its element, and the page's content security policy
    lets only its own script run. The template has one ``<script>``, and ``SCRIPT-HASH`` and
    ``PAGE-DATA`` once each; a ``STYLE-HASH`` is that of its ``<style>``.
    """
    plain = json.dumps(data, ensure_ascii=False)
    text = re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", plain)
    for element, placeholder in (("script", "SCRIPT-HASH"), ("style", "STYLE-HASH")):
        page = page.replace(placeholder, _digest(page, element), 1)
    return page.replace("PAGE-DATA", text, 1)


def content_policy(page: str) -> str:
    """Return the content security policy in a page's ``<meta>``, for a server's header."""
    meta = '<meta http-equiv="Content-Security-Policy" content="'
    return page.partition(meta)[2].partition('">')[0]


def _digest(page: str, element: str) -> str:
    """Return the hash of the text of a page's element, as a content security policy names it."""
    content = page.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
