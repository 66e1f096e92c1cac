"""What a source is told about the parts of records: refused where it contradicts itself."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark import (
    DeadLetter,
    DebeziumJson,
    JdbcSink,
    Json,
    KafkaSink,
    KafkaSource,
    OnBadRecord,
    OnTombstone,
    Raw,
    RowKind,
    String,
    Upsert,
)
from flinkish_spark.connectors.jdbc.settings import deletions
from flinkish_spark.connectors.kafka.client.reader import record_schema
from flinkish_spark.connectors.kafka.metadata import names_of
from flinkish_spark.connectors.kafka.stream_options import parse_stream
from flinkish_spark.connectors.kafka.stream_reader import make_schema
from flinkish_spark.connectors.write_modes import list_stored_names, mode_from_json
from flinkish_spark.core import changelogs
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.sources import KafkaRecordsSource

VALUE = Json("id LONG, name STRING")
KEY = Json("id LONG")


@pytest.mark.parametrize("source", [KafkaSource, KafkaRecordsSource])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"value": VALUE, "tombstones": OnTombstone.DELETE}, "no key"),
        ({"value": VALUE, "tombstones": "drop"}, "tombstones"),
        ({"value": VALUE, "key": "id"}, "key is 'id'"),
        ({"value": VALUE, "key_fields_prefix": "key_"}, "key_fields_prefix is given"),
        ({"value": VALUE, "key": Json("id LONG", OnBadRecord.DROP)}, "policy"),
        ({"value": VALUE, "key": Json("id LONG", DeadLetter("bad"))}, "policy"),
        ({"value": Json("id LONG", OnBadRecord.DROP), "key": String("k", DeadLetter("bad"))}, "policy"),
        ({"value": Raw(), "key": KEY, "tombstones": "keep"}, "tombstones"),
    ],
)
def test_what_contradicts_itself_is_refused(source: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        source("b:9092", ["in"], **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"key": Json("id STRING")}, "'id' and 'id'"),
        ({"key": Json("ID LONG")}, "'ID' and 'id'"),
        ({"key": Json("_topic LONG"), "metadata": ["topic"]}, "'_topic'"),
        ({"value": Json("_row_kind STRING"), "key": KEY, "tombstones": OnTombstone.DELETE}, "_row_kind"),
        ({"value": DebeziumJson("_schema STRING"), "metadata": ["value.schema"]}, "'_schema'"),
        # They were read, and left out with the columns of ours.
        ({"value": Json("_fs_sequence LONG, x INT")}, "value .* '_fs_sequence'"),
        ({"value": DebeziumJson("_FS_kind INT")}, "value .* '_FS_kind'"),
        ({"key": Json("kind INT"), "key_fields_prefix": "_fs_"}, "key .* '_fs_kind'"),
        ({"key": Json("a INT, A INT")}, "the field 'A' twice. For Spark"),
    ],
)
def test_names_that_would_be_those_of_two_columns_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SchemaError, match=says):
        KafkaSource("b:9092", ["in"], **{"value": VALUE, **settings})


def test_parts_of_records_that_are_not_decoded_are_not_told_about() -> None:
    for settings in ({"key": KEY}, {"tombstones": OnTombstone.DROP}, {"key_fields_prefix": "k"}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} is given"):
            KafkaRecordsSource("b:9092", ["in"], **settings)
    for settings in ({"tombstones": OnTombstone.DROP}, {"key_fields_prefix": "k"}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} is given"):
            KafkaSource("b:9092", ["in"], **settings)


@pytest.mark.parametrize("source", [KafkaSource, KafkaRecordsSource])
def test_what_is_done_with_bad_records_says_the_value(source: Any) -> None:
    def policy(**settings: Any) -> Any:
        made = source("b:9092", ["in"], **settings)
        return made.decoding.policy

    letters = DeadLetter("bad")
    assert policy(value=String("v", letters), key=KEY) == letters
    assert policy(value=String("v", letters), key=String("k", letters)) == letters
    assert policy(value=VALUE, key=KEY) is OnBadRecord.FAIL
    # Bytes as they are cannot be bad: the key alone can.
    assert policy(value=Raw(), key=String("k", letters)) == letters
    assert policy(value=DebeziumJson("id LONG", OnBadRecord.DROP), key=Raw("k")) is OnBadRecord.DROP


def test_what_a_tombstone_is_unless_somebody_says() -> None:
    for value, usual in (
        (VALUE, OnTombstone.REFUSE),
        (String(), OnTombstone.REFUSE),
        (Raw(), OnTombstone.KEEP),
        (DebeziumJson("name STRING"), OnTombstone.DROP),
    ):
        decoding = KafkaSource("b:9092", ["in"], value=value, key=KEY).decoding
        assert decoding is not None and decoding.tombstones is usual


def test_the_epoch_of_a_leader_is_a_column() -> None:
    source = KafkaSource("b:9092", ["in"], value=Raw(), metadata=["leader-epoch"])
    assert names_of(source.metadata) == ("_leader_epoch",)


def test_the_columns_of_the_reader_are_those_of_the_format() -> None:
    options = {
        "kafka.bootstrap.servers": "b:9092",
        "subscribe": "in",
        "includeHeaders": "true",
        "flinkish.include.leader.epoch": "true",
    }
    columns = [one.split()[0] for one in make_schema(parse_stream(options)).replace("key: ", "").split(", ")]
    assert columns[-1] == "leaderEpoch"
    schema = record_schema(include_headers=True, include_leader_epoch=True)
    assert schema.field("leaderEpoch").type == pa.int32()


def test_sinks_are_told_the_column_with_the_kinds_of_rows() -> None:
    upsert = Upsert(keys=("id",), row_kind="_row_kind", not_stored=("at",))
    assert list_stored_names(upsert, ["id", "at", "name", "_row_kind"]) == ("id", "name")
    assert mode_from_json(upsert.to_json()) == upsert and "row_kind" not in Upsert(("id",)).to_json()
    for wrong in ({"row_kind": "id"}, {"row_kind": "_row_kind", "delete_when": "op = 'D'"}):
        with pytest.raises(ConfigError, match="row_kind of Upsert"):
            Upsert(keys=("id",), **wrong)
    with pytest.raises(ConfigError, match="no key"):
        KafkaSink("b:9092", "out", row_kind="_row_kind")
    with pytest.raises(ConfigError, match="row_kind and delete_when"):
        JdbcSink("jdbc:sqlite:/t.db", "t", ("id",), "upsert", row_kind="_row_kind", delete_when="gone")
    with pytest.raises(ConfigError, match="mode='upsert'"):
        JdbcSink("jdbc:sqlite:/t.db", "t", row_kind="_row_kind")


def test_a_database_is_told_which_records_delete() -> None:
    kinds = pa.record_batch({"k": pa.array(["+I", "-U", "+U", "-D", "d", None])})
    assert deletions(kinds, "k").to_pylist() == [False, True, False, True, None, None]
    flags = pa.record_batch({"k": pa.array([True, False, None])})
    assert deletions(flags, "k").to_pylist() == [True, False, False]


def test_kinds_that_take_a_row_back() -> None:
    assert changelogs.RETRACTIONS == ("-U", "-D")
    assert [kind.value for kind in RowKind] == ["+I", "-U", "+U", "-D"]
