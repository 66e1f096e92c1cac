"""Whatever is in a directory: a line, a status, and nothing for the terminal.

A seal says that an object is as it was written, not who wrote it: here it is anybody.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.job import asking, rewind
from flinkish_spark.protocol.envelope import seal
from tests.support.cli_hostile_rig import COMMANDS, EVIL, READERS, assert_civil, full_job, sealed, words_of
from tests.support.cli_rig import JobOnDisk, flinkish
from tests.support.effort import seeds


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody runs here; and nothing has to survive a power cut."""
    monkeypatch.setattr(asking, "_POLL_MS", 2)
    monkeypatch.setattr(rewind, "_POLL_MS", 2)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return full_job(tmp_path / "job")


# -- the job directory ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "body",
    [
        {"job": "orders"},
        {"uuid": "0" * 32},
        {"job": "orders", "uuid": "not 32 hex digits"},
        {"job": "orders", "uuid": 7},
        {"job": "orders", "uuid": None},
        {"job": "orders", "uuid": ["0" * 32]},
        {"job": 7, "uuid": "0" * 32},
        {"job": EVIL, "uuid": "0" * 32},
        {"job": "", "uuid": EVIL},
        7,
        [],
        None,
        {},
    ],
    ids=repr,
)
@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[5], COMMANDS[9]], ids=" ".join)
def test_a_job_json_of_another_shape_is_a_damaged_directory(
    job: JobOnDisk, body: Any, command: tuple[str, ...]
) -> None:
    (job.root / "job.json").write_bytes(sealed("job", body))
    before = job.files()
    result = flinkish(*words_of(job, command))
    assert_civil(result)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "is no usable job directory: job.json in the job directory " in result.stderr
    assert "To do: restore the file from a backup" in result.stderr
    assert job.files() == before


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("what", ["file", "empty", "directory", "pipe", "dangling", "circle", "other kind"])
def test_what_is_no_job_directory_is_told(tmp_path: Path, what: str, command: tuple[str, ...]) -> None:
    place = tmp_path / "job"
    if what == "file":
        place.touch()
    else:
        place.mkdir()
    key = place / "job.json"
    if what == "directory":
        key.mkdir()
    elif what == "pipe":
        os.mkfifo(key)
    elif what in ("dangling", "circle"):
        key.symlink_to("job.json" if what == "circle" else "nowhere")
    elif what == "other kind":
        key.write_bytes(seal("savepoint", {}))
    words = [str(place) if word == "JOB" else word for word in command]
    result = flinkish(*words)
    assert_civil(result)
    if command[:2] != ("savepoint", "list") or what == "file":
        assert result.exit_code == 2


def test_a_job_json_of_a_newer_version_says_so(job: JobOnDisk) -> None:
    (job.root / "job.json").write_bytes(b'{"kind":"job","format":99,"sha256":""}\n{}\n')
    result = flinkish("checkpoints", "list", job.root)
    assert result.exit_code == 1 and "newer version" in result.stderr


FOLDERS = (
    "checkpoints",
    "checkpoints/2",
    "pins",
    "rewinds",
    "rewinding",
    "owners",
    "orders",
    "orders/refused",
    "requests",
    "spark",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_strangers_in_a_folder_are_no_trouble(job: JobOnDisk, folder: str) -> None:
    place = job.root / folder
    place.mkdir(parents=True, exist_ok=True)
    names = (EVIL.replace("\0", ""), "\u0663.json", "1e3.json", "-1.json", "9" * 200 + ".json.json", "\udcff")
    for name in names:
        (place / name).write_bytes(b"stray")
        (place / f"{name}.d").mkdir()
    (place / "circle").symlink_to("circle")
    (place / "outside").symlink_to("/")
    for command in COMMANDS:
        assert_civil(flinkish(*words_of(job, command)))


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("what", ["a file", "a circle", "nowhere"])
def test_something_else_in_the_place_of_a_folder_is_a_line(job: JobOnDisk, folder: str, what: str) -> None:
    place = job.root / folder
    if place.exists():
        place.rename(job.root / "away")
    place.parent.mkdir(parents=True, exist_ok=True)
    if what == "a file":
        place.touch()
    else:
        place.symlink_to(place.name if what == "a circle" else "nowhere")
    for command in COMMANDS:
        assert_civil(flinkish(*words_of(job, command)))


@pytest.mark.parametrize("name", ["007.json", "0.json", "99999999999999999999999.json", "9" * 200 + ".json"])
@pytest.mark.parametrize("folder", ["rewinds", "rewinding", "owners", "pins", "checkpoints"])
@pytest.mark.parametrize("is_link", [True, False])
def test_numbers_that_nobody_counted_to_are_a_line(
    job: JobOnDisk, folder: str, name: str, is_link: bool
) -> None:
    place = job.root / folder / (name if folder != "checkpoints" else name.removesuffix(".json"))
    place.parent.mkdir(exist_ok=True)
    if is_link:
        place.symlink_to("/nowhere")
    else:
        place.mkdir()
    for command in READERS:
        assert_civil(flinkish(*words_of(job, command)))


STRANGE: tuple[Any, ...] = (
    10**30,
    int("9" * 4_000),
    -1,
    0.5,
    float("inf"),
    float("nan"),
    True,
    None,
    "",
    EVIL,
    "\ud800",
    [],
    {},
    [[]],
    ["a", EVIL],
    {EVIL: EVIL},
    253_402_300_800_000,
)


@pytest.mark.parametrize("seed", seeds(60))
def test_sealed_objects_of_any_shape_are_a_line(job: JobOnDisk, seed: int) -> None:
    """A value somewhere in one object is another one, is gone, or has another name."""
    chance = random.Random(seed)
    path = chance.choice(sorted(one for one in job.root.rglob("*.json") if one.name != "job.json"))
    head, text, _ = path.read_bytes().split(b"\n", 2)
    body = json.loads(text)
    path.write_bytes(sealed(json.loads(head)["kind"], _spoiled(body, chance)))
    for command in READERS:
        assert_civil(flinkish(*words_of(job, command)))


def _spoiled(body: dict[str, Any], chance: random.Random) -> Any:
    at: Any = body
    key: Any = chance.choice(sorted(at))
    while chance.random() < 0.7 and at[key] and isinstance(at[key], dict | list):
        at = at[key]
        key = chance.choice(sorted(at) if isinstance(at, dict) else range(len(at)))
    match chance.randrange(4):
        case 0 if isinstance(at, dict):
            del at[key]
        case 1 if isinstance(at, dict):
            at[EVIL] = at.pop(key)
        case _:
            at[key] = chance.choice(STRANGE)
    return body


TORN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-5],
    "no text": lambda data: b"\xff\xfe\x00",
    "deep": lambda data: b"[" * 100_000 + b"\n{}\n",
    "no head": lambda data: b"[]\n1\n",
    "another kind": lambda data: sealed(EVIL, {}),
    "megabytes": lambda data: sealed("x" * 2_000_000, {}),
    "newer": lambda data: b'{"kind":"a","format":"\\u001b[2J","sha256":2}\n{}\n',
}


@pytest.mark.parametrize("how", TORN)
@pytest.mark.parametrize(
    "key",
    [
        "checkpoints/2/decision.json",
        "checkpoints/2/receipt.json",
        "checkpoints/4/trigger.json",
        "pins/2.json",
        "rewinds/1.json",
        "orders/rewind.json",
        "rewinding/9.json",
        "statistics.json",
        "series.json",
        "saved/savepoint.json",
        "saved/claimed.json",
    ],
)
def test_torn_objects_are_a_line(job: JobOnDisk, key: str, how: str) -> None:
    path = job.root / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(TORN[how](path.read_bytes() if path.exists() else b""))
    for command in READERS:
        result = flinkish(*words_of(job, command))
        assert_civil(result)
        assert len(result.stderr) < 10_000
