"""`flinkish checkpoints`: what is shown is what the statistics and the job directory say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flinkish_spark.checkpoint.answers import CheckpointAnswer
from flinkish_spark.core.upstream_cut import UpstreamCut
from flinkish_spark.job import stored_job
from flinkish_spark.job.requests import RequestKind
from flinkish_spark.protocol.checkpoint import CheckpointRequest
from flinkish_spark.protocol.checkpoint import ParticipantKind as Kind
from flinkish_spark.protocol.coordination import Abort
from flinkish_spark.protocol.failures import CheckpointFailureReason as Reason
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose
from flinkish_spark.protocol.statistics import (
    ChannelStatistics,
    CheckpointDurations,
    CheckpointStatistics,
    ParticipantStatistics,
    RestoredCheckpoint,
    StatisticsHistory,
)
from tests.support.cli_rig import HOUR_MS, JobOnDisk, flinkish, said

DURATIONS = CheckpointDurations(
    trigger_ms=3, alignment_ms=0, sync_ms=40, async_ms=50, commit_ms=60, end_to_end_ms=153
)
PARTICIPANTS = (
    ParticipantStatistics(
        "out",
        Kind.SINK,
        ack_ms=93,
        rows=6,
        barriers=2,
        channels=(ChannelStatistics("0", 1), ChannelStatistics("1", 1)),
    ),
    ParticipantStatistics("sum", Kind.OPERATOR, ack_ms=93),
)


@pytest.fixture
def job(tmp_path: Path) -> JobOnDisk:
    return JobOnDisk(tmp_path / "job")


def begun(checkpoint: int, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC) -> CheckpointStatistics:
    return CheckpointStatistics.begin(CheckpointId(checkpoint), purpose, checkpoint * HOUR_MS)


def done(checkpoint: int) -> CheckpointStatistics:
    return begun(checkpoint).complete(DURATIONS, rows=6, bytes_staged=100, participants=PARTICIPANTS)


def measure(job: JobOnDisk, *statistics: CheckpointStatistics) -> StatisticsHistory:
    history = StatisticsHistory()
    for one in statistics:
        history = history.add_ended(one) if one.status.value != "IN_PROGRESS" else history.add_triggered(one)
    job.job_dir.put_statistics(history)
    return history


def listed(job: JobOnDisk) -> dict[int, dict]:
    result = flinkish("checkpoints", "list", job.root, "--json")
    assert result.exit_code == 0
    return {one["id"]: one for one in said(result)["checkpoints"]}


# -- list -------------------------------------------------------------------------------------------
def test_a_completed_checkpoint_is_listed_with_all_fields(job: JobOnDisk) -> None:
    job.complete(1)
    measure(job, done(1))
    assert listed(job)[1] == {
        "id": 1,
        "purpose": "PERIODIC",
        "status": "COMPLETED",
        "triggered_at_ms": HOUR_MS,
        "decided_at_ms": HOUR_MS + 500,
        "confirmed_at_ms": HOUR_MS + 900,
        "durations": {
            "trigger_ms": 3,
            "start_delay_ms": None,
            "alignment_ms": 0,
            "sync_ms": 40,
            "async_ms": 50,
            "commit_ms": 60,
            "end_to_end_ms": 153,
        },
        "rows": 6,
        "bytes_staged": 100,
        "asked": 2,
        "acknowledged": 2,
        "failure": None,
        "is_retained": True,
        "lineage": 0,
        "batch": 3,
        "superseded_by_lineage": None,
        "can_be_rewound_to": True,
        "why_not": "",
    }


def test_the_list_names_the_job_and_sums_up(job: JobOnDisk) -> None:
    history = measure(job, done(1), done(2), begun(3).fail(Reason.EXPIRED, "60 s"))
    job.job_dir.put_statistics(
        history.add_restored(RestoredCheckpoint(CheckpointId(2), 5, "/a")).count_refused()
    )
    told = said(flinkish("checkpoints", "list", job.root, "--json"))
    assert (told["job"], told["job_uuid"], told["job_dir"]) == ("orders", str(job.uuid), str(job.root))
    assert told["counts"] == {
        "triggered": 3,
        "completed": 2,
        "failed": 1,
        "refused": 1,
        "restored": 1,
        "in_progress": 0,
    }
    assert told["newest_restored"] == {"checkpoint": 2, "restored_at_ms": 5, "path": "/a"}
    assert told["summary"]["sync_ms"] == {"count": 2, "min": 40, "avg": 40.0, "p50": 40, "p99": 40, "max": 40}


def test_checkpoints_are_listed_by_id_with_those_that_only_one_side_knows(job: JobOnDisk) -> None:
    job.complete(10, 2)
    measure(job, done(1), done(2))
    assert list(listed(job)) == [1, 2, 10]


def test_a_checkpoint_whose_files_were_deleted_is_known_from_the_statistics(job: JobOnDisk) -> None:
    job.complete(2)
    measure(job, done(1), done(2))
    told = listed(job)[1]
    assert (told["status"], told["is_retained"], told["can_be_rewound_to"]) == ("COMPLETED", False, False)
    assert told["why_not"] == "it is not retained any more"


def test_a_checkpoint_without_statistics_is_known_from_its_files(job: JobOnDisk) -> None:
    job.complete(1, purpose=CheckpointPurpose.SAVEPOINT)
    told = listed(job)[1]
    assert (told["purpose"], told["status"], told["rows"]) == ("SAVEPOINT", "COMPLETED", 6)
    assert told["durations"]["sync_ms"] is None and told["bytes_staged"] is None
    assert told["triggered_at_ms"] == HOUR_MS


def test_an_id_that_was_given_out_is_in_progress(job: JobOnDisk) -> None:
    job.trigger(1, CheckpointPurpose.USER)
    told = listed(job)[1]
    assert (told["purpose"], told["status"], told["triggered_at_ms"]) == ("USER", "IN_PROGRESS", HOUR_MS)


def test_a_decided_checkpoint_without_receipt_is_in_progress(job: JobOnDisk) -> None:
    job.commit(1)
    measure(job, begun(1))
    told = listed(job)[1]
    assert told["status"] == "IN_PROGRESS"
    assert "not every sink has confirmed it" in told["why_not"]


def test_a_decision_is_believed_where_the_statistics_say_otherwise(job: JobOnDisk) -> None:
    """A killed process decided it, and the next one finished it without having measured it."""
    job.complete(1)
    measure(job, begun(1).fail(Reason.OWNER_LOST, "killed"))
    told = listed(job)[1]
    assert (told["status"], told["failure"], told["rows"]) == ("COMPLETED", None, 6)


@pytest.mark.parametrize(
    ("reason", "failure"),
    [
        ("EXPIRED: not within 60 s", {"reason": "EXPIRED", "text": "not within 60 s"}),
        ("sealed by owner 2", {"reason": None, "text": "sealed by owner 2"}),
        ("Traceback: this", {"reason": None, "text": "Traceback: this"}),
    ],
)
def test_an_aborted_checkpoint_says_why(job: JobOnDisk, reason: str, failure: dict) -> None:
    job.abort(1, reason)
    told = listed(job)[1]
    assert (told["status"], told["failure"], told["rows"]) == ("FAILED", failure, None)
    assert told["purpose"] == "PERIODIC"


def test_checkpoints_that_a_rewind_left_behind_say_so(job: JobOnDisk) -> None:
    job.complete(1, 2, 3)
    job.went_back(target=1, lineage=1)
    job.complete(4, lineage=1)
    told = listed(job)
    assert {n: one["superseded_by_lineage"] for n, one in told.items()} == {1: None, 2: 1, 3: 1, 4: None}
    assert [n for n, one in told.items() if one["can_be_rewound_to"]] == [1, 4]
    plain = flinkish("checkpoints", "list", job.root).stdout
    assert "left behind by the rewind that began lineage 1" in plain


def test_what_a_deletion_has_left_of_a_checkpoint_is_not_listed(job: JobOnDisk) -> None:
    job.complete(1, 2)
    (job.root / "checkpoints/1/decision.json").unlink()
    assert list(listed(job)) == [2]


def test_a_job_without_checkpoints_says_so(job: JobOnDisk) -> None:
    result = flinkish("checkpoints", "list", job.root)
    assert (result.exit_code, result.stdout) == (0, "the job 'orders' has no checkpoints\n")
    assert said(flinkish("checkpoints", "list", job.root, "--json")) == {
        "job_dir": str(job.root),
        "job": "orders",
        "job_uuid": str(job.uuid),
        "checkpoints": [],
        "counts": None,
        "newest_restored": None,
        "summary": {},
    }


def test_the_list_is_plain_lines_where_the_output_is_no_terminal(job: JobOnDisk) -> None:
    job.complete(1, 2)
    measure(job, done(1), begun(2).fail(Reason.EXPIRED, "60 s"), begun(3))
    history = job.job_dir.statistics()
    assert history is not None
    job.job_dir.put_statistics(history.add_restored(RestoredCheckpoint(CheckpointId(1), HOUR_MS)))
    lines = flinkish("checkpoints", "list", job.root).stdout.splitlines()
    assert lines[0].split()[:4] == ["id", "purpose", "status", "triggered"]
    assert lines[1].split()[:3] == ["1", "PERIODIC", "COMPLETED"]
    assert lines[1].split()[-1] == "-" and "153" in lines[1]
    assert "3 triggered: 1 completed, 1 failed, 1 in progress; 0 refused; 1 restored" in lines[5]
    assert "last checkpoint 1 at" in lines[5]
    assert "sync_ms" in "".join(lines[6:])
    assert all(line.isprintable() for line in lines)


def test_a_job_that_has_completed_nothing_has_no_summary(job: JobOnDisk) -> None:
    measure(job, begun(1))
    plain = flinkish("checkpoints", "list", job.root).stdout
    assert "1 in progress" in plain and "p99" not in plain


def test_texts_from_a_job_can_neither_paint_nor_move_the_cursor(job: JobOnDisk) -> None:
    job.abort(1, "sealed [bold]\x1b[2J\nby somebody")
    plain = flinkish("checkpoints", "list", job.root).stdout
    assert "sealed [bold]?[2J by somebody" in plain


def test_a_terminal_gets_a_drawn_table(job: JobOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    job.complete(1)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    drawn = flinkish("checkpoints", "list", job.root).stdout
    assert "─" in drawn or "-" * 20 in drawn


# -- damage -----------------------------------------------------------------------------------------
def test_a_torn_decision_is_one_line_and_no_traceback(job: JobOnDisk) -> None:
    job.complete(1, 2)
    job.damage("checkpoints/2/decision.json")
    result = flinkish("checkpoints", "list", job.root)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "checkpoints/2/decision.json" in result.stderr and "To do:" in result.stderr


def test_torn_statistics_are_done_without(job: JobOnDisk) -> None:
    job.complete(1)
    measure(job, done(1))
    job.damage("statistics.json")
    result = flinkish("checkpoints", "list", job.root, "--json")
    assert result.exit_code == 0
    assert said(result)["checkpoints"][0]["status"] == "COMPLETED" and said(result)["counts"] is None
    assert "without statistics" in result.stderr


def test_an_object_of_a_newer_version_is_refused(job: JobOnDisk) -> None:
    job.complete(1)
    path = job.root / "checkpoints/1/decision.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 99'))
    result = flinkish("checkpoints", "show", job.root, 1)
    assert result.exit_code == 1 and "newer version" in result.stderr


# -- show -------------------------------------------------------------------------------------------
def test_show_tells_everything_about_one(job: JobOnDisk) -> None:
    job.complete(1, hook_states={"catalog": {"token": "hidden"}}, finished=("in",))
    measure(job, done(1))
    result = flinkish("checkpoints", "show", job.root, 1, "--json")
    told = said(result)
    sink, operator = told["participants"]
    assert sink["channels"][1] == {
        "channel": "1",
        "barriers": 1,
        "rows": None,
        "bytes": None,
        "alignment_ms": None,
    }
    # What cannot be known is there, and null.
    assert operator == {
        "uid": "sum",
        "kind": "operator",
        "is_acknowledged": True,
        "ack_ms": 93,
        "rows": None,
        "bytes": None,
        "sync_ms": None,
        "commit_ms": None,
        "barriers": None,
        "late_dropped": None,
        "counts": {},
        "channels": [],
    }
    assert told["unlisted"] == 0
    assert told["batches"][0] == {
        "lineage": 0,
        "batch": 2,
        "owner_epoch": 1,
        "attempt": 7,
        "rows": {"out": 3},
        "committables": {"out": 1},
    }
    assert told["committables"] == {"out": 2}
    assert told["answers"] == {"out": {"COMMITTED": 1, "ALREADY_COMMITTED": 1}}
    assert told["group_offsets"] == {"readers": {"orders": {"0": 5}}}
    assert (told["hooks"], told["finished"], told["uids"]) == (["catalog"], ["in"], ["in", "out"])
    assert (told["upstream"], told["owner_epoch"], told["can_be_rewound_to"]) == ([], 1, True)
    # What belongs to systems outside is not shown.
    assert "hidden" not in result.stdout and "in the payload" not in result.stdout


def test_show_for_people_has_a_table_per_part(job: JobOnDisk) -> None:
    job.complete(1, hook_states={"catalog": {}}, finished=("in",))
    measure(job, done(1))
    plain = flinkish("checkpoints", "show", job.root, 1).stdout
    for part in ("participants", "channels", "micro-batches", "sinks", "group offsets"):
        assert f"\n{part}\n" in plain
    assert "upstream cuts" not in plain
    assert "1 COMMITTED, 1 ALREADY_COMMITTED" in plain
    assert "can be gone back to     yes" in plain and "catalog" in plain


def test_show_of_a_failed_one_says_whom_it_waited_for(job: JobOnDisk) -> None:
    late = ParticipantStatistics("sum", Kind.OPERATOR, is_acknowledged=False)
    measure(job, begun(1).fail(Reason.EXPIRED, "60 s", DURATIONS, (late, PARTICIPANTS[0])))
    told = said(flinkish("checkpoints", "show", job.root, 1, "--json"))
    assert (told["asked"], told["acknowledged"], told["failure"]["reason"]) == (2, 1, "EXPIRED")
    assert [(p["uid"], p["is_acknowledged"]) for p in told["participants"]] == [("sum", False), ("out", True)]
    lines = flinkish("checkpoints", "show", job.root, 1).stdout.splitlines()
    assert "acknowledged            1 of 2" in lines
    waited_for = lines[lines.index("participants") + 2]
    assert waited_for.split() == ["sum", "operator", "no", *"-------"]


def test_show_says_how_much_is_not_listed(job: JobOnDisk) -> None:
    measure(job, begun(1).complete(DURATIONS, rows=6, participants=PARTICIPANTS, unlisted=1_200))
    assert said(flinkish("checkpoints", "show", job.root, 1, "--json"))["unlisted"] == 1_200
    plain = flinkish("checkpoints", "show", job.root, 1).stdout
    assert "not listed              1200 participants and channels" in plain


def test_bytes_that_were_not_measured_are_not_zero(job: JobOnDisk) -> None:
    """And a quantity that was never measured is left out of the summary."""
    measure(job, begun(1).complete(DURATIONS, rows=6))
    told = said(flinkish("checkpoints", "list", job.root, "--json"))
    assert told["checkpoints"][0]["bytes_staged"] is None
    assert "bytes_staged" not in told["summary"] and told["summary"]["rows"]["max"] == 6
    assert "bytes staged            -" in flinkish("checkpoints", "show", job.root, 1).stdout


def test_show_of_an_aborted_one_says_why(job: JobOnDisk) -> None:
    job.abort(1, "EXPIRED: not within 60 s")
    plain = flinkish("checkpoints", "show", job.root, 1).stdout
    assert "EXPIRED, not within 60 s" in plain and "no: it was not completed" in plain


def test_show_looks_at_the_kept_state_files(job: JobOnDisk) -> None:
    job.complete(1)
    job.pin(1, {"0/0/1.zip": 10})
    told = said(flinkish("checkpoints", "show", job.root, 1, "--json"))
    assert told["can_be_rewound_to"] is False
    assert "0/0/1.zip is gone" in told["why_not"]


def test_show_names_the_upstream_cut(job: JobOnDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = UpstreamCut(job.uuid, CheckpointId(9), {("orders", 1): (4, 8)}, 12, 345)
    monkeypatch.setattr(stored_job, "upstream_cut", lambda text: {"orders": upstream})
    job.complete(1)
    told = said(flinkish("checkpoints", "show", job.root, 1, "--json"))
    assert told["upstream"] == [
        {
            "topic": "orders",
            "job_uuid": str(job.uuid),
            "checkpoint": 9,
            "start_delay_ms": 12,
            "alignment_ms": 345,
            "channel_state": [{"topic": "orders", "partition": 1, "start": 4, "end": 8}],
        }
    ]
    lines = flinkish("checkpoints", "show", job.root, 1).stdout.splitlines()
    assert lines[lines.index("upstream cuts") + 2].split() == ["orders", str(job.uuid), "9", "12", "345", "1"]


def test_show_of_an_unknown_id_says_which_are_known(job: JobOnDisk) -> None:
    assert "it has none" in flinkish("checkpoints", "show", job.root, 7).stderr
    job.complete(2, 3)
    result = flinkish("checkpoints", "show", job.root, 7)
    assert result.exit_code == 1 and "known are 2 to 3" in result.stderr


@pytest.mark.parametrize("checkpoint", ["0", "-1", "../1", "one"])
def test_ids_are_checked_before_they_become_paths(job: JobOnDisk, checkpoint: str) -> None:
    assert flinkish("checkpoints", "show", job.root, checkpoint).exit_code == 2


def test_looking_changes_nothing(job: JobOnDisk) -> None:
    job.complete(1)
    measure(job, done(1))
    before = job.files()
    flinkish("checkpoints", "list", job.root)
    flinkish("checkpoints", "show", job.root, 1)
    assert job.files() == before


# -- trigger ----------------------------------------------------------------------------------------
def test_a_running_job_is_asked_for_a_checkpoint(job: JobOnDisk) -> None:
    with job.running(lambda request: CheckpointAnswer.make_completed(CheckpointId(7))) as seen:
        result = flinkish("checkpoints", "trigger", job.root)
    assert (result.exit_code, result.stdout) == (0, "checkpoint 7 is confirmed\n")
    assert [request.kind for request in seen] == [RequestKind.CHECKPOINT]
    assert not [name for name in job.files() if name.startswith("requests/")]


def test_an_aborted_checkpoint_is_not_done(job: JobOnDisk) -> None:
    asked = CheckpointRequest(1, CheckpointPurpose.USER, 0)
    answer = CheckpointAnswer.make_aborted(Abort(CheckpointId(7), asked, Reason.EXPIRED, "60 s"))
    with job.running(lambda request: answer):
        result = flinkish("checkpoints", "trigger", job.root)
    assert result.exit_code == 1
    assert result.stderr == "flinkish: checkpoint 7 was aborted: EXPIRED, 60 s\n"


def test_a_refusal_says_its_reason_to_programs_too(job: JobOnDisk) -> None:
    with job.running(lambda request: CheckpointAnswer.make_refused(Reason.SHUT_DOWN)):
        result = flinkish("checkpoints", "trigger", job.root, "--json")
    assert result.exit_code == 1
    assert said(result)["outcome"] == "REFUSED" and said(result)["reason"] == "SHUT_DOWN"
    assert said(result)["text"] == Reason.SHUT_DOWN.text and said(result)["checkpoint"] is None
