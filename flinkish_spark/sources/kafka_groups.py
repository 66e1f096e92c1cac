"""The consumer group of a Kafka source: told where the job is, behind the sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flinkish_spark.errors import EnvironmentFault, InputLostError
from flinkish_spark.kafka import GroupCommit, KafkaAdmin
from flinkish_spark.kafka.admin import OffsetDirection
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.marks import newest_of
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.timeline import Mark


class GroupIsActive(EnvironmentFault):
    """Consumers are members of the job's group; committing its offsets has to wait."""

    restartable = True


def store_offsets(
    admin: KafkaAdmin,
    group: str,
    offsets: Mapping[str, Mapping[int, int]],
    direction: OffsetDirection,
    note: str = "",
) -> dict[str, Mapping[str, Mapping[str, int]]]:
    """Set a group's offsets; return them as a receipt has them. May be repeated.

    Parameters
    ----------
    group
        Empty: nothing is set.
    offsets
        By topic and partition. Those of topics that are gone are left as they are.
    note
        Stands beside them.

    Raises
    ------
    GroupIsActive
        The group has members, and Kafka takes offsets from them alone.
    """
    if not group:
        return {}
    flat = {(t, p): o for t, ps in offsets.items() for p, o in ps.items()}
    try:
        answer = admin.commit_offsets(group, flat, direction, note)
    except InputLostError:
        answer = GroupCommit.UNCHANGED
    check_committed(answer, group)
    return {group: {t: {str(p): o for p, o in ps.items()} for t, ps in offsets.items()}}


def group_marks(admin: KafkaAdmin, group: str, job: JobUuid) -> Sequence[Mark]:
    """Return the newest mark of a job beside a group's offsets; none without a group."""
    mark = newest_of(admin.committed_notes(group).values(), job) if group else None
    return () if mark is None else (mark,)


def commit_places(admin: KafkaAdmin, group: str, offsets: Mapping[Place, int], note: str) -> None:
    """Commit a group's offsets, forward only, with a note beside them; of a source of splits.

    Raises
    ------
    GroupIsActive
        As for :func:`store_offsets`.
    """
    check_committed(admin.commit_offsets(group, offsets, note=note), group)


def check_committed(answer: GroupCommit, group: str) -> None:
    """Raise GroupIsActive if Kafka did not take the offsets for that reason."""
    if answer is GroupCommit.ACTIVE_MEMBERS:
        raise GroupIsActive(
            f"the consumer group '{group}' has active members",
            why="Kafka then takes offsets from those members only",
            what_to_do="stop the consumers, or give the job a group of its own; "
            "the receipt stays open until then",
            group=group,
        )
