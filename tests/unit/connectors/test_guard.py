"""What is refused before a start because time would run out, in input topics and at the brokers."""

from __future__ import annotations

import pytest
from pyspark.sql import types as T

from flinkish_spark import Json, KafkaSource, Raw
from flinkish_spark.connectors.kafka import checks
from flinkish_spark.connectors.kafka.checks import TopicRetention
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.records import check_names
from flinkish_spark.connectors.kafka.sink import add_advice
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import ConfigError, SchemaError

NEEDED_MS = 130_000


def keeping(policy: str, retention_ms: int = 604_800_000, lag_ms: int = 0) -> TopicRetention:
    settings = {"cleanup.policy": policy, "retention.ms": retention_ms, "min.compaction.lag.ms": lag_ms}
    return TopicRetention.of({name: str(value) for name, value in settings.items()})


def test_what_a_job_may_have_to_decide_and_read_again_is_interval_and_budget() -> None:
    assert CheckpointConfig(interval_ms=10_000, restart_budget_ms=120_000).replay_ms == NEEDED_MS


@pytest.mark.parametrize(
    ("one", "deletes", "compacts"),
    [
        (keeping("delete"), False, False),
        (keeping("delete", NEEDED_MS), False, False),
        (keeping("delete", NEEDED_MS - 1), True, False),
        (keeping("delete", -1), False, False),
        (keeping("compact", 1), False, True),
        (keeping("compact", 1, NEEDED_MS), False, False),
        (keeping("compact,delete", 1, NEEDED_MS), True, False),
        (keeping("compact, delete", -1), False, True),
        (keeping("", 1), False, False),
    ],
)
def test_a_topic_gives_up_records_by_its_policies(one: TopicRetention, deletes: bool, compacts: bool) -> None:
    assert (one.deletes_before(NEEDED_MS), one.compacts_before(NEEDED_MS)) == (deletes, compacts)


def test_the_refusal_of_a_topic_names_it_and_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "read_topic_retention", lambda *_: {"in": keeping("delete", 60_000)})
    with pytest.raises(ConfigError) as refused:
        checks.check_topic_retention(KafkaConnection("h:1"), ["in"], "orders", NEEDED_MS)
    text = str(refused.value)
    for part in ("'in'", "'orders'", "retention.ms = 60000", "130000 ms", "interval_ms", "restart_budget_ms"):
        assert part in text


@pytest.mark.parametrize(
    ("maximum_ms", "advice"),
    [
        (200_000, "raise transaction.max.timeout.ms of the brokers to 900000 or more, or lower "
         "transaction_timeout_ms to 200000"),
        (60_000, "raise transaction.max.timeout.ms of the brokers to 130000 or more, or lower interval_ms + "
         "restart_budget_ms to 60000 or less"),
        (None, "or lower transaction_timeout_ms, to 130000 at the lowest"),
    ],
)  # fmt: skip
def test_a_broker_s_refusal_says_what_helps(maximum_ms: int | None, advice: str) -> None:
    """To lower the timeout is no help where the job needs more than the brokers allow."""
    refused = ConfigError("no", why="it exceeds", timeout_ms=900_000, maximum_ms=maximum_ms)
    text = str(add_advice(refused, "out", NEEDED_MS))
    assert "sink 'out' is 900000 ms" in text and "It exceeds" in text and advice in text
    other = ConfigError("something else")
    assert add_advice(other, "out", NEEDED_MS) is other


def test_metadata_is_asked_for_by_name() -> None:
    source = KafkaSource("b:9092", ["in"], value=Raw(), metadata=["offset", "topic", "offset"])
    assert source.metadata == ("offset", "topic") and KafkaSource("b:9092", ["in"]).metadata == ()
    for wrong in ("offset", ["offsets"], [None], None, 5, {"offset"}):
        with pytest.raises(ConfigError, match="metadata is"):
            KafkaSource("b:9092", ["in"], metadata=wrong)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="'_offset'"):
        KafkaSource("b:9092", ["in"], value=Json("_Offset LONG"), metadata=["offset"])
    check_names(["offset"], T.StructType([T.StructField("offset", T.LongType())]))
