"""The consumer group of a Kafka source: told where the job is, behind the sinks."""

from __future__ import annotations

from collections.abc import Mapping

from flinkish_spark.errors import EnvironmentFault, InputLostError
from flinkish_spark.kafka import GroupCommit, KafkaAdmin
from flinkish_spark.kafka.admin import OffsetDirection
from flinkish_spark.kafka.answers import Place


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


def commit_places(admin: KafkaAdmin, group: str, offsets: Mapping[Place, int]) -> None:
    """Commit a group's offsets, forward only; of a source of splits.

    Raises
    ------
    GroupIsActive
        As for :func:`store_offsets`.
    """
    check_committed(admin.commit_offsets(group, offsets), group)


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
