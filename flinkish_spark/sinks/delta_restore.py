"""What has to be done to a Delta table so that a job's later checkpoints are taken back.

The table's own history decides: every commit of ours names its sink and checkpoint, and every
restore of ours carries a note with the lineage of its rewind. Pure; `sinks/delta.py` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.timeline import Mark, token_in

#: Begins the note of a commit that holds a checkpoint.
_NOTE = "flinkish-commit "
#: Operations that change no rows, so that restoring an older version loses nothing of them.
_HARMLESS = frozenset({"OPTIMIZE", "VACUUM START", "VACUUM END"})


def app_id(job: JobUuid, uid: str) -> str:
    """Return the name under which a sink's commits are recorded in the table."""
    return f"{_prefix(job)}{uid}"


def note_of(job: JobUuid, lineage: Lineage) -> str:
    """Return the note of a restore: the same rewind, repeated after a crash, finds it."""
    return f"flinkish-rewind {job} {lineage}"


def checkpoint_note(app: str, mark: Mark) -> str:
    """Return the note of the commit that holds a checkpoint of a sink; `app` is its :func:`app_id`."""
    return " ".join([f"{_NOTE}{app}", str(mark.checkpoint), *([mark.token] if mark.token else [])])


def mark_in(parameters: Mapping[str, str], note: str, app: str) -> Mark | None:
    """Return which checkpoint of a sink a commit holds; None if it is none of that sink's."""
    found = _marked(parameters, note)
    if found is None or found[0] != app:
        return None
    return Mark(CheckpointId(found[1]), token_in(note.split(" ")))


def _marked(parameters: Mapping[str, str], note: str) -> tuple[str, int] | None:
    """Return sink and checkpoint from the note, or from the parameters of a streaming update."""
    if note.startswith(_NOTE):
        # Behind the checkpoint are the timeline's token, and maybe a word that tells attempts apart.
        app, epoch, *_ = [*note.removeprefix(_NOTE).split(" "), ""]
    else:
        app, epoch = parameters.get("queryId", ""), parameters.get("epochId", "")
    return (app, int(epoch)) if epoch.isdecimal() else None


@dataclass(frozen=True, slots=True)
class TableCommit:
    """One version of a table, as its history tells it."""

    version: int
    operation: str
    parameters: Mapping[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class NothingToRestore:
    """The table holds nothing newer than the target, or this rewind has restored it."""


@dataclass(frozen=True, slots=True)
class RestoreVersion:
    """Restore the table to a version."""

    version: int


@dataclass(frozen=True, slots=True)
class DeleteRows:
    """Delete all rows: the job's first commit, after the target, made the table."""


@dataclass(frozen=True, slots=True)
class NoRestore:
    """It cannot be done."""

    why: str


RestorePlan = NothingToRestore | RestoreVersion | DeleteRows | NoRestore


def plan_restore(
    history: Iterable[TableCommit], job: JobUuid, target: CheckpointId, lineage: Lineage
) -> RestorePlan:
    """Return how the table is set back to what checkpoint `target` of `job` left.

    Parameters
    ----------
    history
        The table's commits, newest first; read no further than needed.
    lineage
        The one that the rewind starts.
    """
    first: TableCommit | None = None
    stranger: TableCommit | None = None
    blocking: TableCommit | None = None
    oldest: TableCommit | None = None
    for commit in history:
        oldest = commit
        checkpoint = _checkpoint_of(commit, job)
        if commit.note == note_of(job, lineage):
            return NothingToRestore()
        if checkpoint is not None and checkpoint <= int(target):
            break
        if checkpoint is not None:
            first, blocking = commit, stranger
        elif commit.operation not in _HARMLESS and not commit.note.startswith(f"flinkish-rewind {job} "):
            stranger = commit
    if first is None or oldest is None:
        return NothingToRestore()
    if blocking is not None:
        return NoRestore(
            f"version {blocking.version} ({blocking.operation}) was committed by somebody else after "
            f"checkpoint {target}, and restoring the table would take that back, too"
        )
    if first.version == 0:
        return DeleteRows()
    if oldest is first:
        return NoRestore(f"its history does not go back to checkpoint {target} any more")
    return RestoreVersion(first.version - 1)


def _prefix(job: JobUuid) -> str:
    return f"flinkish-{job}-"


def _checkpoint_of(commit: TableCommit, job: JobUuid) -> int | None:
    """Return the checkpoint that a commit of this job's sinks belongs to; None for others'."""
    found = _marked(commit.parameters, commit.note)
    return found[1] if found is not None and found[0].startswith(_prefix(job)) else None
