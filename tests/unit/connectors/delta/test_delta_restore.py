"""How a table's history says what has to be restored."""

import pytest

from flinkish_spark.connectors.delta.table import (
    NoRestore,
    NothingToRestore,
    RestoreVersion,
    TableCommit,
    app_id,
    checkpoint_note,
    note_of,
    plan_restore,
)
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.timeline import Mark

JOB, OTHER = JobUuid("a" * 32), JobUuid("b" * 32)


def noted(checkpoint, uid, job):
    return checkpoint_note(app_id(job, uid), Mark(CheckpointId(checkpoint), "0123456789abcdef"))


def ours(checkpoint, uid="table", job=JOB):
    return ("STREAMING UPDATE", noted(checkpoint, uid, job))


def merged(checkpoint, uid="table", job=JOB):
    return ("MERGE", f"{noted(checkpoint, uid, job)} 00c0ffee")


def others(operation):
    return (operation, "")


def restored(lineage, operation="RESTORE"):
    return (operation, note_of(JOB, Lineage(lineage)))


def plan(target, *commits, first_version=0, lineage=1):
    """Plan over commits given oldest first."""
    history = [TableCommit(first_version + n, *commit) for n, commit in enumerate(commits)]
    return plan_restore(reversed(history), JOB, CheckpointId(target), Lineage(lineage))


@pytest.mark.parametrize(
    "commits,expected",
    [
        ([], NothingToRestore()),
        ([ours(1), ours(2)], NothingToRestore()),
        ([ours(1), ours(2), ours(3), ours(4)], RestoreVersion(1)),
        ([others("CREATE TABLE"), ours(3)], RestoreVersion(0)),
        ([ours(3), ours(4)], RestoreVersion(None)),
        # Several sinks of the job in one table.
        ([ours(2), ours(2, "late"), ours(3), ours(3, "late")], RestoreVersion(1)),
        # Upserts, and what went in as rows: known by their notes.
        ([ours(1), merged(2), merged(3), merged(4)], RestoreVersion(1)),
        ([merged(3), merged(4)], RestoreVersion(None)),
        # What others did before does not matter, and what changes no rows does not either.
        ([ours(1), others("WRITE"), ours(3), others("OPTIMIZE"), others("VACUUM END")], RestoreVersion(1)),
        ([ours(2), others("WRITE")], NothingToRestore()),
        # This rewind, cut off behind its restore; and an earlier one.
        ([ours(2), ours(3), restored(1)], NothingToRestore()),
        ([ours(2), ours(3), restored(0), ours(4)], RestoreVersion(0)),
        ([ours(3), restored(1, "DELETE")], NothingToRestore()),
    ],
)
def test_what_is_to_be_done(commits, expected):
    assert plan(2, *commits) == expected


@pytest.mark.parametrize("operation", ["WRITE", "DELETE", "MERGE", "SET TBLPROPERTIES", "ADD COLUMNS"])
def test_commits_of_others_in_between_are_not_taken_back(operation):
    refused = plan(2, ours(2), ours(3), others(operation), ours(4))
    assert isinstance(refused, NoRestore) and f"version 2 ({operation})" in refused.why


def test_another_job_on_the_table_is_somebody_else():
    assert isinstance(plan(2, merged(2), merged(3), merged(1, job=OTHER)), NoRestore)
    assert isinstance(plan(2, ours(2), ours(3), ours(1, job=OTHER)), NoRestore)


def test_a_history_that_was_cleaned_cannot_be_restored_from():
    assert isinstance(plan(2, ours(3), ours(4), first_version=70), NoRestore)
    assert plan(2, others("OPTIMIZE"), ours(3), first_version=70) == RestoreVersion(70)


def test_an_entry_that_only_looks_like_ours():
    assert plan(2, ours(2), ("STREAMING UPDATE", "flinkish-commit x 9 0123456789abcdef"), ours(3)) == (
        RestoreVersion(1)
    )
