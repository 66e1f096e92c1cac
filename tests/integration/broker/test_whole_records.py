"""Whole Kafka records, in and out: keys, headers, times, tombstones; with every reader and both writers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from kafka import KafkaProducer

from flinkish_spark import (
    DeadLetter,
    JobStatus,
    Json,
    KafkaSink,
    KafkaSource,
    MemorySink,
    OnTombstone,
)
from flinkish_spark.sources import EndAtLatest, KafkaRecordsSource
from tests.support.jobs import environment, read_committed, running

pytestmark = pytest.mark.timeout(600)

READERS = ("jvm", "python", "records")
#: Of what a sink is given as all headers of a record -> the column.
FORMS = {"list": "_headers", "map": "_headers_map"}
METADATA = (
    *("topic", "partition", "offset", "timestamp", "timestamp-type", "key", "headers", "headers-map"),
    "leader-epoch",
)
HEADERS = [("a", b"1"), ("b", b""), ("a", b"2")]


def source_of(reader: str, servers: str, topic: str, **settings: Any) -> Any:
    settings = {"key": Json("id LONG"), "ending": EndAtLatest(), **settings}
    if reader == "records":
        return KafkaRecordsSource(servers, [topic], **settings)
    return KafkaSource(servers, [topic], reader=reader, **settings)


def send(servers: str, topic: str) -> None:
    """A row, a change of it, its end; and a row of another key without headers."""
    producer = KafkaProducer(bootstrap_servers=servers)
    for key, value, time_ms, headers in (
        (1, {"id": 1, "name": "ann"}, 1_000, HEADERS),
        (2, {"id": 2, "name": "bob"}, 2_000, None),
        (1, {"id": 1, "name": "eve"}, 3_000, [("c", b"3")]),
        (1, None, 4_000, [("gone", b"y")]),
    ):
        producer.send(
            topic,
            key=json.dumps({"id": key}).encode(),
            value=None if value is None else json.dumps(value).encode(),
            timestamp_ms=time_ms,
            headers=headers,
            partition=0,
        ).get(timeout=30)
    producer.send(topic, key=b"no key", value=None, partition=0).get(timeout=30)
    producer.close()


class Ended(NamedTuple):
    """One job of all branches."""

    servers: str
    topics: dict[str, str]
    rows: dict[str, list[Any]]


@pytest.fixture(scope="module")
def ended(spark: Any, broker: Any, topic: Any, tmp_path_factory: Any) -> Ended:
    servers, folder = broker.bootstrap_servers, tmp_path_factory.mktemp("whole")
    env, sinks = environment(spark, folder / "job"), {}
    topics = {f"{kind}-{reader}": topic(1) for kind in ("delete", "keep") for reader in READERS}
    topics |= {f"out-{form}": topic(1) for form in FORMS}
    topics |= {f"letters-{reader}": topic(1) for reader in READERS}
    for reader in READERS:
        for kind in ("delete", "keep"):
            send(servers, topics[f"{kind}-{reader}"])
        deleting = source_of(
            reader,
            servers,
            topics[f"delete-{reader}"],
            value=Json("id LONG, name STRING", DeadLetter(topics[f"letters-{reader}"])),
            metadata=[one for one in METADATA if reader != "jvm" or one != "leader-epoch"],
            tombstones=OnTombstone.DELETE,
        )
        keeping = source_of(
            reader,
            servers,
            topics[f"keep-{reader}"],
            value=Json("name STRING, id LONG", DeadLetter(topics[f"letters-{reader}"])),
            key_fields_prefix="key_",
            tombstones=OnTombstone.KEEP,
        )
        streams = {
            f"delete-{reader}": env.from_source(deleting, uid=f"delete-{reader}"),
            f"keep-{reader}": env.from_source(keeping, uid=f"keep-{reader}"),
        }
        for name, stream in streams.items():
            sinks[name] = MemorySink(str(folder / name))
            stream.sink_to(sinks[name], uid=f"{name}-out")
        for form, column in FORMS.items() if reader == "python" else ():
            out = KafkaSink(
                servers,
                topics[f"out-{form}"],
                key=Json("id LONG"),
                value=Json("id LONG, name STRING"),
                headers=column,
                timestamp="_timestamp",
                partition="_partition",
                topic_column="_topic_out",
                row_kind="_row_kind",
            )
            routed = streams[f"delete-{reader}"].transform(
                lambda df: df.selectExpr("*", "CAST(NULL AS STRING) AS _topic_out")
            )
            routed.sink_to(out, uid=f"kafka-{form}")
    with running(env) as client:
        assert client.wait(timeout_ms=550_000), f"the job did not end; {client.progress}"
        assert client.status is JobStatus.FINISHED
    return Ended(servers, topics, {uid: sink.rows() for uid, sink in sinks.items()})


def at(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)


@pytest.mark.parametrize("reader", READERS)
def test_a_tombstone_deletes_the_row_of_its_key(ended: Ended, reader: str) -> None:
    rows = ended.rows[f"delete-{reader}"]
    assert [(row.id, row.name, row["_row_kind"]) for row in rows] == [
        (1, "ann", "+U"),
        (2, "bob", "+U"),
        (1, "eve", "+U"),
        (1, None, "-D"),
    ]


@pytest.mark.parametrize("reader", READERS)
def test_all_of_a_record_stands_beside_its_fields(ended: Ended, reader: str) -> None:
    rows, source = ended.rows[f"delete-{reader}"], ended.topics[f"delete-{reader}"]
    assert [(row["_topic"], row["_partition"], row["_offset"]) for row in rows] == [
        (source, 0, offset) for offset in range(4)
    ]
    assert [row["_timestamp"].timestamp() for row in rows] == [1, 2, 3, 4]
    assert {row["_timestamp_type"] for row in rows} == {"CreateTime"}
    assert [bytes(row["_key"]) for row in rows] == [b'{"id": 1}', b'{"id": 2}', b'{"id": 1}', b'{"id": 1}']
    headers = [[(one["key"], bytes(one["value"])) for one in row["_headers"]] for row in rows]
    assert headers == [HEADERS, [], [("c", b"3")], [("gone", b"y")]]
    assert rows[0]["_headers_map"] == {"a": [b"1", b"2"], "b": [b""]} and rows[1]["_headers_map"] == {}
    if reader != "jvm":
        assert {row["_leader_epoch"] for row in rows} == {0}


@pytest.mark.parametrize("reader", READERS)
def test_a_tombstone_may_be_a_row_of_nulls_beside_its_key(ended: Ended, reader: str) -> None:
    rows = ended.rows[f"keep-{reader}"]
    assert [tuple(row) for row in rows] == [(1, "ann", 1), (2, "bob", 2), (1, "eve", 1), (1, None, None)]
    assert rows[0].asDict().keys() == {"key_id", "name", "id"}


@pytest.mark.parametrize("reader", READERS)
def test_a_record_with_a_bad_key_is_a_dead_letter_once(ended: Ended, reader: str) -> None:
    letters = read_committed(ended.servers, ended.topics[f"letters-{reader}"])
    assert [(one.key, one.value) for one in letters] == [(b"no key", None)] * 2
    told = [dict(one.headers) for one in letters]
    wanted = {ended.topics[f"{kind}-{reader}"].encode() for kind in ("delete", "keep")}
    assert {one["flinkish-topic"] for one in told} == wanted
    assert all(b"key" in one["flinkish-detail"] for one in told)


@pytest.mark.parametrize("form", FORMS)
def test_a_changelog_is_written_as_values_and_tombstones(ended: Ended, form: str) -> None:
    records = read_committed(ended.servers, ended.topics[f"out-{form}"])
    written = [(json.loads(one.key)["id"], one.value and json.loads(one.value)) for one in records]
    assert written == [
        (1, {"id": 1, "name": "ann"}),
        (2, {"id": 2, "name": "bob"}),
        (1, {"id": 1, "name": "eve"}),
        (1, None),
    ]
    assert [one.timestamp for one in records] == [1_000, 2_000, 3_000, 4_000]
    if form == "list":
        assert list(records[0].headers) == HEADERS
    else:
        # A map keeps the order within a name.
        assert sorted(records[0].headers) == sorted(HEADERS)
    assert not records[1].headers and records[3].headers == [("gone", b"y")]
