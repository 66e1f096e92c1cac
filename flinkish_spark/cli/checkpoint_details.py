"""Everything about one checkpoint: who took part, what it holds, what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from flinkish_spark.cli.checkpoint_views import CheckpointView
from flinkish_spark.cli.params import Job
from flinkish_spark.cli.tables import local_time, print_facts, print_line, print_table
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.late_records import late_of
from flinkish_spark.protocol.statistics_participants import ParticipantStatistics


def details_of(job: Job, view: CheckpointView) -> dict[str, Any]:
    """Return what `checkpoints show --json` says; see `docs/command-line.md`.

    Committables are counted and hooks are named: what is in them belongs to systems outside.
    """
    commit = None if view.stored is None else view.stored.commit
    why_not = view.why_not_rewindable or job.pins().why_not_restorable(view.checkpoint)
    participants = () if view.statistics is None else view.statistics.participants
    return {
        **view.to_json(),
        "can_be_rewound_to": not why_not,
        "why_not": why_not,
        "owner_epoch": None if view.decision is None else int(view.decision.owner_epoch),
        "participants": [_participant(one) for one in participants],
        "unlisted": None if view.statistics is None else view.statistics.unlisted,
        **({} if commit is None else _of_commit(commit)),
        **({} if view.receipt is None else _of_receipt(view)),
    }


def _participant(one: ParticipantStatistics) -> dict[str, Any]:
    """Return all fields: what was not measured is null, as everywhere on the command line."""
    return asdict(one) | {"kind": one.kind.value}


def _of_commit(commit: Decision) -> dict[str, Any]:
    staged = Counter(c.sink for batch in commit.batches for c in batch.committables)
    return {
        "batches": [
            {
                "lineage": int(batch.lineage),
                "batch": int(batch.batch),
                "owner_epoch": int(batch.owner_epoch),
                "attempt": batch.attempt,
                "rows": {ack.sink: ack.rows for ack in batch.acks},
                "committables": dict(Counter(c.sink for c in batch.committables)),
            }
            for batch in commit.batches
        ],
        "committables": dict(staged),
        "upstream": _upstream(commit.offsets_text),
        "hooks": sorted(commit.hook_states),
        "uids": list(commit.uids),
        "finished": list(commit.finished),
        "late_dropped": late_of(commit.batches),
    }


def _upstream(offsets_text: str) -> list[dict[str, Any]]:
    """Return the cuts of upstream jobs that the checkpoint is, by topic."""
    # Here and not above: with it comes the Kafka client, which other commands can do without.
    from flinkish_spark.chaining.cuts import upstream_cut

    return [
        {
            "topic": topic,
            "job_uuid": str(cut.job),
            "checkpoint": int(cut.checkpoint),
            "start_delay_ms": cut.start_delay_ms,
            "alignment_ms": cut.alignment_ms,
            "channel_state": [
                {"topic": name, "partition": partition, "start": start, "end": end}
                for (name, partition), (start, end) in sorted(cut.channel_state.items())
            ],
        }
        for topic, cut in sorted(upstream_cut(offsets_text).items())
    ]


def _of_receipt(view: CheckpointView) -> dict[str, Any]:
    receipt = view.receipt
    assert receipt is not None
    return {
        "answers": {sink: dict(Counter(answers)) for sink, answers in receipt.answers.items()},
        "group_offsets": {
            group: {topic: dict(partitions) for topic, partitions in topics.items()}
            for group, topics in receipt.group_offsets.items()
        },
    }


def print_details(view: CheckpointView, details: dict[str, Any]) -> None:
    """Print what :func:`details_of` returned, for people."""
    print_facts(_facts(view, details))
    for title, columns, rows in (
        ("participants", _PARTICIPANTS, _participant_rows(details)),
        ("channels", _CHANNELS, _channel_rows(details)),
        ("micro-batches", _BATCHES, _batch_rows(details)),
        ("sinks", ("sink", "committables", "answers"), _sink_rows(details)),
        ("upstream cuts", _UPSTREAM, _upstream_rows(details)),
        ("group offsets", ("group", "topic", "partition", "offset"), _offset_rows(details)),
    ):
        if rows:
            print_line()
            print_line(title)
            print_table(columns, rows)


_PARTICIPANTS = (
    *("uid", "kind", "acknowledged", "ack ms", "rows", "bytes", "sync ms", "commit ms", "barriers"),
    "late dropped",
)
_CHANNELS = ("uid", "channel", "barriers", "rows", "bytes", "align ms")
_UPSTREAM = ("topic", "job", "checkpoint", "start delay ms", "align ms", "ranges to replay")
_BATCHES = ("lineage", "batch", "owner", "attempt", "rows", "committables")


def _facts(view: CheckpointView, details: dict[str, Any]) -> list[tuple[str, object]]:
    durations = [
        f"{name.removesuffix('_ms')} {ms}" for name, ms in details["durations"].items() if ms is not None
    ]
    failure, late = details["failure"] or {}, details.get("late_dropped", {})
    return [
        ("checkpoint", details["id"]),
        ("purpose", details["purpose"]),
        ("status", details["status"]),
        ("reason", ", ".join(filter(None, (failure.get("reason"), failure.get("text"))))),
        ("triggered", local_time(view.triggered_at_ms)),
        ("decided", local_time(details["decided_at_ms"])),
        ("confirmed", local_time(details["confirmed_at_ms"])),
        ("durations, ms", ", ".join(durations)),
        ("rows", details["rows"]),
        ("bytes staged", details["bytes_staged"]),
        ("acknowledged", _acknowledged(details)),
        ("not listed", _unlisted(details)),
        ("owner epoch", details["owner_epoch"]),
        ("lineage", details["lineage"]),
        ("micro-batch", details["batch"]),
        ("left behind by lineage", details["superseded_by_lineage"]),
        ("can be gone back to", "yes" if details["can_be_rewound_to"] else f"no: {details['why_not']}"),
        ("hooks", ", ".join(details.get("hooks", ()))),
        ("late records dropped", ", ".join(f"{uid} {n}" for uid, n in late.items())),
        ("had finished", ", ".join(details.get("finished", ()))),
    ]


def _acknowledged(details: dict[str, Any]) -> str:
    asked = details["asked"]
    return "" if asked is None else f"{details['acknowledged']} of {asked}"


def _unlisted(details: dict[str, Any]) -> str:
    count = details["unlisted"]
    return f"{count} participants and channels" if count else ""


def _participant_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            p["uid"],
            p["kind"],
            p["is_acknowledged"],
            p["ack_ms"],
            p["rows"],
            p["bytes"],
            p["sync_ms"],
            p["commit_ms"],
            p["barriers"],
            p["late_dropped"],
        )
        for p in details["participants"]
    ]


def _channel_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (p["uid"], c["channel"], c["barriers"], c["rows"], c["bytes"], c["alignment_ms"])
        for p in details["participants"]
        for c in p["channels"]
    ]


def _batch_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            b["lineage"],
            b["batch"],
            b["owner_epoch"],
            b["attempt"],
            sum(b["rows"].values()),
            sum(b["committables"].values()),
        )
        for b in details.get("batches", ())
    ]


def _sink_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    staged, answers = details.get("committables", {}), details.get("answers", {})
    return [
        (sink, staged.get(sink, 0), ", ".join(f"{n} {name}" for name, n in answers.get(sink, {}).items()))
        for sink in sorted(staged.keys() | answers.keys())
    ]


def _upstream_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            cut["topic"],
            cut["job_uuid"],
            cut["checkpoint"],
            cut["start_delay_ms"],
            cut["alignment_ms"],
            len(cut["channel_state"]),
        )
        for cut in details.get("upstream", ())
    ]


def _offset_rows(details: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (group, topic, partition, offset)
        for group, topics in details.get("group_offsets", {}).items()
        for topic, partitions in topics.items()
        for partition, offset in partitions.items()
    ]
