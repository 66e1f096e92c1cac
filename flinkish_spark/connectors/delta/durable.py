"""Commits on a disk that outlive a power cut: neither delta-rs nor Spark syncs what it writes."""

from __future__ import annotations

import base64
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from flinkish_spark.core.store import sync_directory

LOG = "_delta_log"
_OF_VERSION = re.compile(r"(\d{20})\..+")
_ENTRY = re.compile(r"\d{20}\.json")


def make_durable(root: Path, whose: str, version: int | None = None) -> None:
    """Sync a commit and what readers find it by: that of an application's `version`, or else with a note.

    These are the files that it added, its entry in the log, newer entries, all that are not in a checkpoint
    of the log yet, that checkpoint, and their folders.
    """
    log = root / LOG
    names = sorted((name for name in os.listdir(log) if _OF_VERSION.fullmatch(name)), reverse=True)
    checkpoint = max((int(name[:20]) for name in names if ".checkpoint" in name), default=0)
    needed, files, own = [], [], None
    for name in names:
        at = int(name[:20])
        if own is not None and at < min(own, checkpoint):
            break
        needed.append(log / name)
        if own is None and _ENTRY.fullmatch(name):
            found = _added(root, log / name, whose, version)
            own, files = (None, []) if found is None else (at, found)
    # This order matters: a log never names files that are not there.
    for path in files:
        _sync(path)
    folders = {above for path in files for above in path.parents if above.is_relative_to(root)}
    for folder in sorted(folders - {root}, reverse=True):
        _sync(folder)
    _sync(root)
    sidecars = log / "_sidecars"
    if sidecars.is_dir():
        needed += [*sidecars.iterdir(), sidecars]
    # Oldest first: no entry without those before it.
    for path in reversed(needed):
        _sync(path)
    _sync(log / "_last_checkpoint")
    _sync(log)


def _sync(path: Path) -> None:
    # What somebody has cleaned up meanwhile is not needed any more. Hadoop keeps checksums beside files.
    for one in (path, path.with_name(f".{path.name}.crc")):
        with suppress(FileNotFoundError):
            sync_directory(one)


def _added(root: Path, entry: Path, whose: str, version: int | None) -> list[Path] | None:
    """Return the files that a commit added; None if it is another commit."""
    try:
        text = entry.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    if whose not in text:
        return None
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not any(_is_ours(action, whose, version) for action in actions):
        return None
    return [path for action in actions for path in _files(root, action)]


def _is_ours(action: Mapping[str, Any], whose: str, version: int | None) -> bool:
    if version is None:
        return "commitInfo" in action and action["commitInfo"].get("userMetadata") == whose
    return "txn" in action and (action["txn"]["appId"], action["txn"]["version"]) == (whose, version)


def _files(root: Path, action: Mapping[str, Any]) -> Iterator[Path]:
    for kind in ("add", "cdc"):
        if kind not in action:
            continue
        yield from _on_disk(root, action[kind]["path"])
        vector = action[kind].get("deletionVector") or {}
        if vector.get("storageType") == "u":
            yield root / vector_name(vector["pathOrInlineDv"])
        elif vector.get("storageType") == "p":
            yield from _on_disk(root, vector["pathOrInlineDv"])


def _on_disk(root: Path, given: str) -> Iterator[Path]:
    """Yield the file that a log names; none if it is in another store, where it is durable by itself."""
    given = re.sub("^file:/+", "/", given)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", given):
        yield root / unquote(given)


_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_UUID_LETTERS = 20


def vector_name(given: str) -> str:
    """Return the file of a deletion vector, below the table, by what a log says of it."""
    folder, letters = given[:-_UUID_LETTERS], given[-_UUID_LETTERS:]
    found = uuid.UUID(bytes=base64.b85decode(letters.translate(str.maketrans(_Z85, _B85))))
    return f"{folder}/deletion_vector_{found}.bin" if folder else f"deletion_vector_{found}.bin"
