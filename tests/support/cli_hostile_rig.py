"""What the tests of hostile directories and hostile words share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from click.testing import Result

from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.savepoints import SavepointMetadata
from flinkish_spark.savepoints.files import SavepointDir
from tests.support.cli_rig import JobOnDisk

#: Clears a screen, sets a title, turns the text around; eight-bit and seven-bit, and a new line.
EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\nnew line\x00"
QUICK = ("--timeout-s", "0.005")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("checkpoints", "list", "JOB"),
    ("checkpoints", "list", "JOB", "--json"),
    ("checkpoints", "show", "JOB", "2"),
    ("checkpoints", "show", "JOB", "2", "--json"),
    ("checkpoints", "trigger", "JOB", *QUICK),
    ("savepoint", "trigger", "JOB", "TARGET", *QUICK),
    ("savepoint", "stop", "JOB", "TARGET", *QUICK),
    ("savepoint", "list", "JOB"),
    ("savepoint", "list", "JOB", "--json"),
    ("rewind", "JOB", "2", "--yes", *QUICK),
    ("rewind", "JOB", "1", "--yes", "--json", "--tables", "restore", *QUICK),
    ("cancel", "JOB", "--yes", *QUICK),
)

#: Between them they read every object.
READERS = tuple(COMMANDS[place] for place in (0, 3, 7, 9))


def full_job(root: Path) -> JobOnDisk:
    job = JobOnDisk(root)
    job.complete(1, 2, 3)
    job.trigger(4)
    job.abort(5, "the reason")
    job.went_back(2, 1, "order-1")
    job.complete(6, lineage=1)
    write_savepoint(root / "saved")
    return job


def write_savepoint(path: Path) -> None:
    metadata = SavepointMetadata(
        savepoint="5" * 32,
        job="orders",
        job_uuid=JobUuid("0" * 32),
        checkpoint=CheckpointId(3),
        lineage=Lineage(0),
        batch=BatchId(9),
        decided_at_ms=1,
        shuffle_partitions=2,
        operators={},
        sources={},
        chains=(),
        sinks=("out",),
        hooks={},
        files=(),
    )
    path.mkdir(parents=True)
    SavepointDir(path).finish(metadata)


def sealed(kind: str, body: Any) -> bytes:
    """Seal anything, also what `seal` refuses."""
    text = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(f"{kind}\n1\n{text}".encode()).hexdigest()
    return f"{json.dumps({'kind': kind, 'format': 1, 'sha256': digest})}\n{text}\n".encode()


def words_of(job: JobOnDisk, command: tuple[str, ...]) -> list[str]:
    named = {"JOB": str(job.root), "TARGET": str(job.root.parent / "target")}
    return [named.get(word, word) for word in command]


def assert_civil(result: Result) -> None:
    """No traceback (`flinkish` raises it), a status of ours, and nothing for the terminal."""
    assert result.exit_code in (0, 1, 2, 3)
    shown = result.stdout + result.stderr
    assert all(letter == "\n" or letter.isprintable() for letter in shown)
