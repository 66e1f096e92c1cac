"""Group offsets are for lag tools: whatever becomes of them, no checkpoint waits for ever."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flinkish_spark import KafkaSource
from flinkish_spark.connectors.kafka.client.admin import GroupCommit
from flinkish_spark.connectors.kafka.offsets import GroupPatience
from flinkish_spark.core.errors import AuthorizationError, BrokerUnavailableError, EnvironmentFault
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.sources import KafkaRecordsSource
from tests.support.clocks import ManualClock

ACTIVE = GroupCommit.ACTIVE_MEMBERS
DENIED = AuthorizationError("Kafka refuses this principal the request to store the offsets of group shared")
GONE = EnvironmentFault("Kafka refused to store the offsets", why="[Error 69] GroupIdNotFoundError")
AWAY = BrokerUnavailableError("No Kafka broker answered")
POSITION = LoggedOffsets(({"orders": {"0": 7}},))
STORED = {"shared": {"orders": {"0": 7}}}


class Group:
    """In the place of KafkaAdmin: answers in their order, the last for ever."""

    def __init__(self, *answers: GroupCommit | Exception) -> None:
        self.answers, self.asked = list(answers), 0

    def commit_offsets(self, *_: Any, **__: Any) -> GroupCommit:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def source_of(group: Group, clock: ManualClock) -> KafkaSource:
    source = KafkaSource("nowhere:1", ["orders"], group_id="shared").bind("in")
    source.__dict__.update(_admin=group, _group_patience=GroupPatience(clock))
    return source


@pytest.mark.parametrize("refusal", [ACTIVE, DENIED, GONE])
def test_a_refusal_is_given_up_at_once_warned_of_once_and_counted(
    refusal: Any, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(refusal, refusal, refusal, GroupCommit.COMMITTED)
    source = source_of(group, ManualClock(0))
    with caplog.at_level(logging.WARNING):
        assert [source.commit_offsets(POSITION) for _ in range(3)] == [{}, {}, {}]
        assert source._group_patience.given_up == 3
        assert [one.levelname for one in caplog.records] == ["WARNING"]
        assert "consumer group 'shared' are not stored, 1 checkpoint(s) so far" in caplog.text
        # Each checkpoint tries again.
        assert source.commit_offsets(POSITION) == STORED and group.asked == 4
    assert "stored again, behind 3 checkpoint(s) without" in caplog.text


def test_what_may_come_back_is_waited_for_half_a_minute_and_not_with_each_checkpoint() -> None:
    clock = ManualClock(0)
    source = source_of(Group(AWAY), clock)
    for _ in range(3):
        with pytest.raises(BrokerUnavailableError):
            source.commit_offsets(POSITION)
        clock.sleep_ms(9_999)
    clock.sleep_ms(3)
    assert source.commit_offsets(POSITION) == {}
    # The next checkpoint does not begin the half minute anew.
    assert source.commit_offsets(POSITION) == {}
    source.__dict__["_admin"] = Group(GroupCommit.COMMITTED)
    assert source.commit_offsets(POSITION) == STORED
    source.__dict__["_admin"] = Group(AWAY)
    with pytest.raises(BrokerUnavailableError):
        source.commit_offsets(POSITION)


def test_a_rewind_and_a_source_of_records_are_not_held_either() -> None:
    source_of(Group(ACTIVE), ManualClock(0)).lower_offsets(POSITION)
    records = KafkaRecordsSource("nowhere:1", ["orders"], group_id="shared").bind("in")
    records.__dict__["_admin"] = Group(ACTIVE)
    records._tell({"orders:0": 7}, "")
    assert records._group_patience.given_up == 1
