"""URLs of object stores in a configuration: which there are and what is wrong with the text of one. Pure.

Whether the store answers is found out by `checkpoint/destination.py`.
"""

from __future__ import annotations

import re

URL_MARK = "://"
PACKAGES = {"s3": "s3fs"}
"""Scheme -> package that speaks it."""
_ONE_SLASH = re.compile(r"([a-z][a-z0-9+.-]+):/(?!/)")


def is_url(text: str) -> bool:
    """Whether a value means something in an object store rather than on a file system."""
    return URL_MARK in text


def url_problem(text: str) -> tuple[str, str] | None:
    """(what is wrong with a path or URL, what to change) as far as its text shows it; None: nothing."""
    if (match := _ONE_SLASH.match(text)) is not None:
        return "a URL has two slashes after the colon", f"Write {match.group(1)}://{text[match.end() :].lstrip('/')}."
    if not is_url(text):
        return None
    scheme, _, rest = text.partition(URL_MARK)
    if scheme not in PACKAGES:
        instead = f"the path {rest}" if scheme == "file" else " or ".join(f"{name}://" for name in PACKAGES)
        return f"storage of the kind {scheme}:// is not known", f"Use {instead}, or a folder that all nodes share."
    bucket, _, prefix = rest.partition("/")
    if not bucket or not prefix.strip("/"):
        return "it names no bucket with a prefix in it", f"Write {scheme}://BUCKET/PREFIX."
    return None
