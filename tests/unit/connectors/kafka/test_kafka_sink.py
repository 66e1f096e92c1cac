"""What a Kafka sink is told and refuses, how records are judged, and the Avro schema of a stream."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    Avro,
    BarrierRecords,
    DeadLetter,
    DeliveryGuarantee,
    Json,
    KafkaSink,
    OnBadRecord,
    Raw,
)
from flinkish_spark.connectors.formats.avro_format import derive_schema
from flinkish_spark.connectors.kafka.client import admin
from flinkish_spark.connectors.kafka.client.admission import Admission, OutgoingRecords, prepend_headers
from flinkish_spark.connectors.kafka.client.batch_decoder import batches, decode
from flinkish_spark.connectors.kafka.client.batches import HEADERS_TYPE, encode_batches
from flinkish_spark.connectors.kafka.client.codecs import Codec, require_codec
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.settings import Acks, OnRefusal, ProducerSettings, StagingSettings
from flinkish_spark.connectors.kafka.input import letters_timeout_ms
from flinkish_spark.core.errors import BadRecordError, ConfigError, SchemaError
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.record_time import LAST_MS, TimeLimits
from tests.support.clocks import ManualClock

COMMON = (("flinkish-batch", b"0/1"),)
NONE = DeliveryGuarantee.NONE


def sink(**settings: Any) -> KafkaSink:
    return KafkaSink("broker:9092", "out", **settings)


# -- what a sink is told ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delivery": "none"}, "delivery is 'none'"),
        ({"record_headers": "FULL"}, "record_headers is 'FULL'"),
        ({"other_topics": "late"}, "other_topics is 'late'"),
        ({"other_topics": [""], "topic_column": "t"}, "other_topics"),
        ({"other_topics": ["late"]}, "topic_column is not"),
        ({"headers": {"flinkish-mine": "a"}}, "the sink's own"),
        ({"headers": {"": "a"}}, "headers has the entry"),
        ({"headers": {"h": ""}}, "headers has the entry"),
        ({"value": "json"}, "value is 'json'"),
        ({"key": 5}, "key is 5"),
        ({"barriers": BarrierRecords.EACH_CHECKPOINT, "delivery": NONE}, "DeliveryGuarantee.NONE"),
        ({"barriers": BarrierRecords.EACH_CHECKPOINT, "topic_column": "t"}, "topic_column"),
    ],
)
def test_a_sink_that_cannot_be_is_refused_where_it_is_made(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sink(**settings)


@pytest.mark.parametrize("guarantee", [DeliveryGuarantee.EXACTLY_ONCE, DeliveryGuarantee.AT_LEAST_ONCE])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "1"),
        ("kafka.acks", "0"),
        ("enable.idempotence", "false"),
        ("retries", "0"),
        ("max.in.flight.requests.per.connection", "6"),
    ],
)
def test_producer_settings_that_break_the_guarantee_are_refused(
    guarantee: DeliveryGuarantee, name: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"DeliveryGuarantee.{guarantee.name} depends on it"):
        sink(delivery=guarantee, producer={name: value})
    sink(delivery=NONE, producer={name: value})


@pytest.mark.parametrize("guarantee", list(DeliveryGuarantee))
@pytest.mark.parametrize("name", ["transactional.id", "kafka.value.serializer", "transaction.timeout.ms"])
def test_producer_settings_that_are_the_sinks_own_are_refused(
    guarantee: DeliveryGuarantee, name: str
) -> None:
    with pytest.raises(ConfigError, match="cannot be set") as refused:
        sink(delivery=guarantee, producer={name: "s3cret"})
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize("name", ["retries", "buffer.memory", "linger.ms"])
@pytest.mark.parametrize("value", [5, True, None, {}])
def test_a_producer_setting_is_text_also_one_that_changes_nothing(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be text"):
        sink(producer={name: value})


def test_what_changes_nothing_may_be_set() -> None:
    harmless = {"acks": "all", "kafka.enable.idempotence": "TRUE", "retries": "5", "linger.ms": "5"}
    assert sink(producer=harmless).producer_option("enable.idempotence") == "TRUE"


def test_topics_are_those_of_records_and_of_dead_letters() -> None:
    one = sink(
        topic_column="t",
        other_topics=["b", "out", "a"],
        on_bad_record=DeadLetter("bad"),
        on_oversize=DeadLetter("large"),
    )
    assert (one.data_topics, one.topics) == (("out", "b", "a"), ("out", "b", "a", "large", "bad"))
    assert sink(on_bad_record=DeadLetter("bad")).oversize_policy == DeadLetter("bad")
    assert sink(on_bad_record=DeadLetter("bad"), on_oversize=OnBadRecord.DROP).topics == ("out", "bad")


def test_a_key_may_be_a_column_or_a_format() -> None:
    assert sink().key_format is None
    assert sink(key="a").key_format == Raw("a")
    assert sink(key=Json("a INT")).key_format == Json("a INT")


def test_a_guarantee_has_its_acknowledgements() -> None:
    assert ProducerSettings.of({"acks": "0"}, NONE).acks is Acks.NOBODY
    assert ProducerSettings.of({"acks": "1", "enable.idempotence": "false"}, NONE).acks is Acks.LEADER
    assert ProducerSettings.of({}, NONE).acks is Acks.ALL
    with pytest.raises(ConfigError, match="must be all"):
        ProducerSettings.of({"acks": "1"}, DeliveryGuarantee.AT_LEAST_ONCE)


def test_only_a_transaction_has_a_transactional_id() -> None:
    for guarantee, name in ((DeliveryGuarantee.EXACTLY_ONCE, None), (NONE, "id")):
        with pytest.raises(AssertionError):
            settings(guarantee=guarantee, transactional_id=name)


def test_every_codec_is_in_the_pyarrow_that_the_tests_use() -> None:
    for codec in Codec:
        require_codec(codec)


# -- Avro -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"schema": "{"}, "no JSON"),
        ({"schema": '"string"'}, "not that of a record"),
        ({"schema": '{"type": "record", "name": "R", "fields": []}'}, "not that of a record"),
        ({"schema": '{"type": "record", "name": "R", "fields": [{"name": "a"}]}'}, "not that of a record"),
        ({"schema_id": 1}, "a schema_id and no schema"),
        ({"schema_id": -1}, "schema_id is -1"),
        ({"schema_id": True}, "schema_id is True"),
        ({"schema_id": 2**31}, "schema_id is"),
    ],
)
def test_an_avro_format_that_cannot_be(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Avro(**settings)


def test_the_derived_schema_takes_nulls_everywhere_and_names_records_by_their_path() -> None:
    schema = parse_ddl("a INT, d DECIMAL(9,2), at TIMESTAMP, l ARRAY<STRUCT<x: DATE>>, m MAP<STRING, DOUBLE>")
    assert isinstance(schema, T.StructType)
    inner = {
        "type": "record",
        "name": "Record_l",
        "fields": [{"name": "x", "type": ["null", {"type": "int", "logicalType": "date"}]}],
    }
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    assert json.loads(json.dumps(derive_schema(schema))) == {
        "type": "record",
        "name": "Record",
        "fields": [
            {"name": "a", "type": ["null", "int"]},
            {"name": "d", "type": ["null", decimal]},
            {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
            {"name": "l", "type": ["null", {"type": "array", "items": ["null", inner]}]},
            {"name": "m", "type": ["null", {"type": "map", "values": ["null", "double"]}]},
        ],
    }


@pytest.mark.parametrize(
    "fields",
    [
        T.StructType().add("a b", T.IntegerType()),
        T.StructType().add("a", T.NullType()),
        T.StructType().add("m", T.MapType(T.IntegerType(), T.IntegerType())),
    ],
)
def test_fields_that_avro_does_not_have(fields: T.StructType) -> None:
    with pytest.raises(SchemaError, match="cannot be written as Avro"):
        derive_schema(fields)


# -- headers and batches ----------------------------------------------------------------------------


def headers_of(*rows: list[tuple[str, bytes | None]] | None) -> Any:
    entries = [None if row is None else [{"key": k, "value": v} for k, v in row] for row in rows]
    return pa.array(entries, HEADERS_TYPE)


def test_common_headers_come_before_a_records_own() -> None:
    own = headers_of([("a", b"1"), ("b", None)], None, [], [("c", b"")])
    found = prepend_headers(COMMON, own.slice(0, 4))
    first = {"key": "flinkish-batch", "value": b"0/1"}
    assert found.to_pylist() == [
        [first, {"key": "a", "value": b"1"}, {"key": "b", "value": None}],
        [first],
        [first],
        [first, {"key": "c", "value": b""}],
    ]
    assert prepend_headers(COMMON, own.slice(2, 2)).to_pylist() == found.to_pylist()[2:]
    assert prepend_headers(COMMON, own.slice(0, 0)).to_pylist() == []
    assert prepend_headers(COMMON, pa.chunked_array([own, own])).to_pylist() == found.to_pylist() * 2


@pytest.mark.parametrize(("producer", "attributes"), [(7, 0), (-1, 0), (7, 0x10)])
def test_batches_say_who_wrote_them_and_whether_in_a_transaction(producer: int, attributes: int) -> None:
    values = pa.array([b"x" * 100] * 10)
    keys = pa.nulls(10, pa.binary())
    encoded = encode_batches(
        keys,
        values,
        None,
        5,
        producer_id=producer,
        producer_epoch=min(producer, 0),
        base_sequence=3,
        codec=Codec.GZIP,
        max_batch_bytes=700,
        attributes=attributes,
    )
    found = [next(iter(batches(one.data))) for one in encoded]
    assert len(found) > 1
    heads = [one.header for one in found]
    assert {(one.producer_id, one.is_transactional) for one in heads} == {(producer, bool(attributes))}
    sequences = [one.base_sequence for one in heads]
    assert sequences == ([-1] * len(found) if producer < 0 else [3, 3 + heads[0].records])[: len(found)]
    assert sum(len(decode(one, with_headers=False).values) for one in found) == 10


# -- admission --------------------------------------------------------------------------------------


def settings(**changes: Any) -> StagingSettings:
    given = {"transactional_id": "t", "transaction_timeout_ms": 1, "default_topic": "a", **changes}
    return StagingSettings(connection=KafkaConnection("b:9092"), **given)


LETTERS = {"bad_record": OnRefusal.DEAD_LETTER, "bad_record_topic": "bad"}


def judged(changes: dict[str, Any], count: int = 1, topic: str = "a", **columns: Any) -> Any:
    admission = Admission(settings(**changes), COMMON, ManualClock(9_000))
    values = columns.pop("values", pa.array([b"v%d" % n for n in range(count)], pa.binary()))
    at_ms = np.asarray(columns.pop("timestamps_ms", 5), np.int64)
    given = [columns.get(name) for name in ("keys", "headers", "topics", "partitions", "misfits")]
    keys, headers, topics, partitions, misfits = given
    headers = admission.add_common_headers(headers)
    records = OutgoingRecords.of(keys, values, headers, topics, partitions, at_ms, misfits)
    return admission.admit(topic, records)


def told(letters: Any) -> list[dict[str, bytes]]:
    return [{e["key"]: e["value"] for e in row} for row in letters.headers.to_pylist()]


def test_what_can_be_written_is_admitted_as_it_is() -> None:
    found = judged({"topics": frozenset("a"), "partitions": {"a": 2}}, 3, partitions=pa.array([0, 1, None]))
    assert (len(found.admitted), found.letters, found.dropped) == (3, (), 0)


def test_a_letter_says_first_what_comes_first() -> None:
    """A record with every fault is told of by its format."""
    limits = {"topics": frozenset("b"), "partitions": {"a": 1}, "max_record_bytes": 10, **LETTERS}
    limits["compacted"] = frozenset("a")
    faults: dict[str, Any] = {"partitions": pa.array([1]), "timestamps_ms": [-1]}
    order = []
    for change in (
        {"misfits": pa.array(["the field 'n' is null"])},
        {},
        {"topics": frozenset("a")},
        {"partitions": None},
        {"timestamps_ms": [1]},
        {"keys": pa.array([b"k"])},
    ):
        faults |= {name: value for name, value in change.items() if name != "topics"}
        limits |= {name: value for name, value in change.items() if name == "topics"}
        if "misfits" not in change:
            faults.pop("misfits", None)
        found = judged({**limits, "oversize": OnRefusal.DEAD_LETTER, "dead_letter_topic": "bad"}, **faults)
        ((_, letters),) = found.letters
        order.append(told(letters)[0]["flinkish-error"])
    assert order == [
        b"does-not-fit",
        b"undeclared-topic",
        b"no-such-partition",
        b"bad-timestamp",
        b"no-key",
        b"oversize",
    ]


def test_policies_are_one_for_size_and_one_for_the_rest() -> None:
    changes = {"max_record_bytes": 1_000, "oversize": OnRefusal.DROP, **LETTERS}
    values = pa.array([b"x" * 2_000, b"fine", b"old"])
    found = judged(changes, values=values, timestamps_ms=[1, 2, -3])
    assert found.admitted.values.to_pylist() == [b"fine"]
    assert found.dropped == 1
    ((name, letters),) = found.letters
    assert (name, letters.values.to_pylist()) == ("bad", [b"old"])
    assert letters.timestamps_ms.tolist() == [9_000], "its own is impossible"
    assert told(letters) == [
        {
            "flinkish-error": b"bad-timestamp",
            "flinkish-topic": b"a",
            "flinkish-detail": b"a record for topic a has a timestamp of -3 ms, before 1970",
            "flinkish-batch": b"0/1",
        }
    ]


def test_a_time_that_no_source_of_ours_reads_is_not_written() -> None:
    found = judged(LETTERS, values=pa.array([b"last", b"far"]), timestamps_ms=[LAST_MS, LAST_MS + 1])
    assert found.admitted.values.to_pylist() == [b"last"]
    ((_, letters),) = found.letters
    detail = told(letters)[0]["flinkish-detail"]
    assert detail == b"a record for topic a has a timestamp of 253402300800000 ms, after 9999"
    assert letters.timestamps_ms.tolist() == [9_000]


def test_a_letter_is_cut_only_where_its_topic_does_not_take_it() -> None:
    columns: dict[str, Any] = {
        "values": pa.array([b"x" * 5_000]),
        "keys": pa.array([b"k" * 2_000]),
        "misfits": pa.array(["because"]),
    }
    ((_, whole),) = judged({**LETTERS, "max_record_bytes": 10_000}, **columns).letters
    assert [len(whole.values[0].as_py()), len(whole.keys[0].as_py())] == [5_000, 2_000]
    limits = {"max_record_bytes": 10_000, "max_dead_letter_bytes": 3_000}
    ((_, cut),) = judged({**LETTERS, **limits}, **columns).letters
    assert [len(cut.values[0].as_py()), cut.keys[0].as_py()] == [1_024, None]
    assert "flinkish-size" not in told(whole)[0] and int(told(cut)[0]["flinkish-size"]) > 7_000


def test_a_topic_says_how_far_from_now_times_may_be() -> None:
    before, after, both = (f"message.timestamp.{one}.max.ms" for one in ("before", "after", "difference"))
    any_ms = str(2**63 - 1)
    assert TimeLimits.from_settings({}) == TimeLimits()
    assert TimeLimits.from_settings({before: any_ms, after: "3600000"}).after_ms == 3_590_000
    assert TimeLimits.from_settings({before: "1000", after: any_ms, both: any_ms}) == TimeLimits(
        before_ms=500
    )
    # Before Kafka 3.6 one setting was both limits; it is still there in 3.9, where the others win.
    assert TimeLimits.from_settings({both: "30000"}) == TimeLimits(20_000, 20_000)
    assert TimeLimits.from_settings({before: "60000", after: any_ms, both: "30000"}) == TimeLimits(
        50_000, 20_000
    )
    assert (
        TimeLimits.from_settings({"message.timestamp.type": "LogAppendTime", after: "1000"}) == TimeLimits()
    )
    assert TimeLimits.merge([TimeLimits(5, 9), TimeLimits(7, 3)]) == TimeLimits(5, 3)
    assert TimeLimits.merge([]) == TimeLimits() and TimeLimits().range_at(9_000) == (0, LAST_MS)


def test_a_time_that_a_topic_does_not_allow_is_a_bad_record() -> None:
    limits = {**LETTERS, "times": TimeLimits(1_000, 2_000)}
    values = pa.array([b"old", b"first", b"last", b"new"])
    found = judged(limits, values=values, timestamps_ms=[7_999, 8_000, 11_000, 11_001])
    assert found.admitted.values.to_pylist() == [b"first", b"last"]
    ((_, letters),) = found.letters
    details = [one["flinkish-detail"].partition(b"ms, ")[2] for one in told(letters)]
    assert details == [
        b"which message.timestamp.before.max.ms of a topic does not allow",
        b"which message.timestamp.after.max.ms of a topic does not allow",
    ]
    assert letters.timestamps_ms.tolist() == [9_000, 9_000]
    # What was wrong does not go back into a topic.
    assert all("flinkish-timestamp" not in one for one in told(letters))


def test_a_letter_is_written_now_and_says_its_record_s_time() -> None:
    """With the time of an old record the retention of its topic would delete it within minutes."""
    columns = {"misfits": pa.array(["why"] * 2), "timestamps_ms": [1_234, 9_006]}
    ((_, letters),) = judged(LETTERS, 2, **columns).letters
    assert letters.timestamps_ms.tolist() == [9_000, 9_000]
    assert [one["flinkish-timestamp"] for one in told(letters)] == [b"1234", b"9006"]


def test_failing_names_the_first_record() -> None:
    with pytest.raises(
        BadRecordError, match=r"^\[FLINKISH_BAD_RECORD\] a record names partition 7 of topic a"
    ):
        judged({"partitions": {"a": 2}}, 3, partitions=pa.array([0, 7, 9]))
    with pytest.raises(BadRecordError, match="names the topic other, which the sink does not declare"):
        judged({"topics": frozenset("a")}, topic="other")


# -- what a dead letter keeps and says --------------------------------------------------------------

OWN = [("trace", b"1"), ("", b""), ("trace", b"2"), ("empty", None), ("trace", b"1")]


def listed(letters: Any, row: int = 0) -> list[tuple[str, Any]]:
    return [(entry["key"], entry["value"]) for entry in letters.headers[row].as_py()]


def test_a_letter_keeps_headers_in_their_order_and_ours_stand_behind() -> None:
    columns = {"values": pa.array([b"v"] * 2), "partitions": pa.array([7, 3])}
    given = {**LETTERS, "uid": "out", "partitions": {"a": 2}}
    ((_, letters),) = judged(given, headers=headers_of(OWN, None), **columns).letters
    behind = [
        ("flinkish-error", b"no-such-partition"),
        ("flinkish-sink", b"out"),
        ("flinkish-topic", b"a"),
        ("flinkish-partition", b"7"),
        ("flinkish-timestamp", b"5"),
        ("flinkish-detail", b"a record names partition 7 of topic a, which has the partitions 0 to 1"),
        ("flinkish-batch", b"0/1"),
    ]
    assert listed(letters) == [*OWN, *behind]
    assert listed(letters, 1)[:3] == [behind[0], behind[1], behind[2]]


def test_what_a_record_says_does_not_make_a_header_long() -> None:
    """A topic out of a column, of 3,000 bytes in letters of three: 341 of them are 1,023 bytes."""
    name = "表" * 1_000
    ((_, letters),) = judged({**LETTERS, "topics": frozenset("a")}, topic=name).letters
    found = told(letters)[0]
    assert found["flinkish-topic"].decode() == "表" * 341
    assert len(found["flinkish-detail"]) <= 1_024 and found["flinkish-detail"].decode()


def test_headers_go_last_from_a_letter_that_is_too_large() -> None:
    changes = {"max_record_bytes": 500, "max_dead_letter_bytes": 3_000}
    changes |= {"oversize": OnRefusal.DEAD_LETTER, "dead_letter_topic": "bad"}
    values = pa.array([b"x" * 2_000] * 2)
    few, many = [("trace", b"1" * 100)], [("trace", b"1" * 900)] * 3
    ((_, letters),) = judged(changes, values=values, headers=headers_of(few, many)).letters
    assert [len(value) for value in letters.values.to_pylist()] == [1_024, 1_024]
    assert listed(letters)[0] == few[0]
    assert listed(letters, 1)[0] == ("flinkish-error", b"oversize")
    assert told(letters)[1]["flinkish-headers-left-out"] == b"3"


def test_a_dead_letter_that_is_cut_still_says_where_it_was_read() -> None:
    """Those of a source come with headers of ours; only the size is added."""
    changes = {"max_record_bytes": 500, "max_dead_letter_bytes": 3_000}
    changes |= {"oversize": OnRefusal.DEAD_LETTER, "dead_letter_topic": "a"}
    ours = [("flinkish-error", b"unreadable"), ("flinkish-topic", b"orders")]
    ((_, letters),) = judged(changes, values=pa.array([b"x" * 2_000]), headers=headers_of(ours)).letters
    assert [name for name, _ in listed(letters)] == [
        "flinkish-error",
        "flinkish-topic",
        "flinkish-size",
        "flinkish-batch",
    ]
    assert told(letters)[0]["flinkish-topic"] == b"orders"


# -- one place decides how long a dead letter may wait ----------------------------------------------


def test_letters_of_a_source_wait_as_long_as_what_the_job_stages() -> None:
    def timeout_ms(*peers: Any, **of_letters: Any) -> int:
        return letters_timeout_ms(DeadLetter("bad", **of_letters), peers)

    short, long = sink(transaction_timeout_ms=240_000), sink(transaction_timeout_ms=600_000)
    loose = sink(transaction_timeout_ms=1, delivery=DeliveryGuarantee.AT_LEAST_ONCE)
    assert timeout_ms(long, short) == 240_000
    assert timeout_ms(long, loose) == 600_000, "nothing waits in it"
    assert timeout_ms(short, transaction_timeout_ms=120_000) == 120_000
    assert timeout_ms() == timeout_ms(loose) == 900_000


def test_letters_of_a_sink_are_part_of_its_transactions() -> None:
    with pytest.raises(ConfigError, match="written in the transactions of its sink"):
        sink(on_oversize=DeadLetter("bad", transaction_timeout_ms=1_000))
    with pytest.raises(ConfigError, match="transaction_timeout_ms"):
        DeadLetter("bad", transaction_timeout_ms=0)


# -- times of records, and the retention of their topic ---------------------------------------------


@pytest.mark.parametrize(
    ("settings", "keeps_ms"),
    [
        ({"cleanup.policy": "delete", "retention.ms": "604800000"}, 604_800_000),
        (
            {"cleanup.policy": "compact,delete", "retention.ms": "9", "message.timestamp.type": "CreateTime"},
            9,
        ),
        ({"cleanup.policy": "delete", "retention.ms": "-1"}, None),
        ({"cleanup.policy": "compact", "retention.ms": "9"}, None),
        ({"cleanup.policy": "delete", "retention.ms": "9", "message.timestamp.type": "LogAppendTime"}, None),
        ({}, None),
    ],
)
def test_a_topic_that_deletes_by_the_times_of_records_is_warned_of(
    settings: dict[str, str], keeps_ms: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    known = admin._keeps_ms(settings)
    assert known == keeps_ms
    admin.warn_of_old_times({"out": admin.TopicInfo(1, None, 1, keeps_ms=known)}, ["out"], "sink 'copies'")
    said = (
        f"sink 'copies' gives records of the topic 'out' times of their own, and its retention.ms is {known}"
    )
    assert (said in caplog.text) is (keeps_ms is not None)
    assert ("retention.ms=-1" in caplog.text) is (keeps_ms is not None)
