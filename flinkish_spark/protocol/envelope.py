"""Format of the objects in the job directory: JSON with a kind, a format and a checksum.

Reading checks all three before it uses the content, and never runs code: no pickle, no class name
from a file. A torn or altered object raises ValueError; the caller decides how to go on, and never
falls back to an older object silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

#: Format of everything below the job directory. Until 0.1.0 is tagged a change only writes tests/golden anew.
FORMAT = 1


class NewerFormatError(ValueError):
    """The object was written by a newer version of this package."""


def _canonical(body: Mapping[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def seal(kind: str, body: Mapping[str, Any]) -> bytes:
    text = _canonical(body)
    digest = hashlib.sha256(f"{kind}\n{FORMAT}\n{text}".encode()).hexdigest()
    head = json.dumps({"kind": kind, "format": FORMAT, "sha256": digest})
    return f"{head}\n{text}\n".encode()


def unseal(kind: str, data: bytes) -> dict[str, Any]:
    try:
        head_line, text, rest = data.decode("utf-8").split("\n", 2)
        head = json.loads(head_line)
        found_format, found_kind, digest = head["format"], head["kind"], head["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a sealed {kind}: {error}") from error
    if not isinstance(found_format, int) or found_format > FORMAT:
        raise NewerFormatError(f"written in format {found_format!r}, but this version reads up to {FORMAT}")
    if found_kind != kind:
        raise ValueError(f"expected a {kind}, found a {found_kind!r}")
    if rest or hashlib.sha256(f"{kind}\n{found_format}\n{text}".encode()).hexdigest() != digest:
        raise ValueError(f"the checksum of this {kind} does not match: torn or altered")
    body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError(f"the body of this {kind} is not an object")
    return body
