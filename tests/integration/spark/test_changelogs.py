"""Changes of databases: a record of each kind and each database, and the rows that it says, by hand.

The Debezium records have the shape and the encodings that the pages of its connectors give: the customer of
MySQL, PostgreSQL, SQL Server, Oracle and Db2, and the literal types of each; the documents of MongoDB.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import io
import json
import uuid
from dataclasses import replace
from decimal import Decimal
from typing import Any

import fastavro
import pytest
from pyspark.sql import DataFrame

from flinkish_spark import (
    CanalJson,
    ChangelogMode,
    DebeziumAvro,
    DebeziumJson,
    DebeziumMongoJson,
    DecimalHandling,
    EpochUnit,
    Json,
    MaxwellJson,
    OnBadRecord,
)
from flinkish_spark.connectors.bad_records import REASON
from flinkish_spark.connectors.kafka.metadata import check_metadata
from flinkish_spark.connectors.kafka.records import Decoding
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.errors import UNREADABLE_MARKER, ConfigError, SchemaError
from flinkish_spark.core.formats import OnTombstone

CUSTOMER = "id INT, first_name STRING, last_name STRING, email STRING"
ANNE = {"id": 1004, "first_name": "Anne", "last_name": "Kretchmar", "email": "annek@noanswer.org"}
MARIE = {**ANNE, "first_name": "Anne Marie"}
UTC = dt.UTC
NOON = dt.datetime(2026, 1, 31, 12)


def records(spark: Any, values: list[Any], keys: list[Any] | None = None) -> DataFrame:
    def encoded(one: Any) -> bytes | None:
        return one if one is None or isinstance(one, bytes) else json.dumps(one).encode()

    keys = [None] * len(values) if keys is None else keys
    rows = [(encoded(k), encoded(v), "t", 0, at) for at, (k, v) in enumerate(zip(keys, values, strict=True))]
    return spark.createDataFrame(rows, "key BINARY, value BINARY, topic STRING, partition INT, offset LONG")


def decoded(spark: Any, form: Any, *values: Any, metadata: tuple[str, ...] = (), **more: Any) -> DataFrame:
    keys = more.pop("keys", None)
    told = {"tombstones": OnTombstone.DROP, **more}
    decoding = Decoding(form, check_metadata(metadata), **told)
    return decoding.deserializer("in", NO_JOB, ["t"]).rows(
        records(spark, list(values), keys), ["t"], ["offset"]
    )


def rows(spark: Any, form: Any, *values: Any, **more: Any) -> list[tuple[Any, ...]]:
    """The rows of values: kind, then fields."""
    frame = decoded(spark, form, *values, **more).drop("offset")
    found = [row.asDict() for row in frame.collect()]
    return [(row.pop("_row_kind"), *row.values()) for row in found]


def customer(*kinds: tuple[str, dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(kind, *row.values()) for kind, row in kinds]


def change(op: str, before: Any, after: Any, **source: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "source": source, "op": op, "ts_ms": 1465491411815}


SOURCES: dict[str, dict[str, Any]] = {
    "mysql": {
        "version": "3.3.1", "connector": "mysql", "name": "mysql-server-1", "ts_ms": 0,
        "snapshot": False, "db": "inventory", "table": "customers", "server_id": 0, "gtid": None,
        "file": "mysql-bin.000003", "pos": 154, "row": 0, "thread": 7, "query": None,
    },
    "postgresql": {
        "version": "3.3.1", "connector": "postgresql", "name": "server", "ts_ms": 1559033904863,
        "snapshot": True, "db": "postgres", "sequence": '["24023119","24023128"]', "schema": "public",
        "table": "customers", "txId": 555, "lsn": 24023128, "xmin": None,
    },
    "sqlserver": {
        "version": "3.3.1", "connector": "sqlserver", "name": "server1", "ts_ms": 1559729468470,
        "snapshot": False, "db": "testDB", "schema": "dbo", "table": "customers",
        "change_lsn": "00000027:00000758:0003", "commit_lsn": "00000027:00000758:0005",
    },
    "oracle": {
        "version": "3.3.1", "connector": "oracle", "name": "server1", "ts_ms": 1520085154000,
        "snapshot": False, "db": "ORCLPDB1", "schema": "DEBEZIUM", "table": "CUSTOMERS", "txId": "6.28.807",
        "scn": "2122185", "commit_scn": "2122185", "rs_id": "001234.00012345.0124", "ssn": 1,
    },
    "db2": {
        "version": "3.3.1", "connector": "db2", "name": "myconnector", "ts_ms": 1559729468470,
        "snapshot": False, "db": "mydatabase", "schema": "MYSCHEMA", "table": "MYTABLE",
        "change_lsn": "00000027:00000758:0003", "commit_lsn": "00000027:00000758:0005",
    },
}  # fmt: skip
WITH_SCHEMA = {"type": "struct", "optional": False, "name": "Envelope", "fields": [{"field": "before"}]}


@pytest.mark.parametrize("has_schema", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_customer_of_each_database(spark: Any, has_schema: bool) -> None:
    for source in SOURCES.values():
        changes: list[Any] = [
            change("r", None, ANNE, **source),
            change("u", ANNE, MARIE, **source),
            change("d", MARIE, None, **source),
            None,
            change("c", None, ANNE, **source),
        ]
        if has_schema:
            changes = [one and {"schema": WITH_SCHEMA, "payload": one} for one in changes]
        found = rows(spark, DebeziumJson(CUSTOMER), *changes)
        assert found == customer(("+I", ANNE), ("-U", ANNE), ("+U", MARIE), ("-D", MARIE), ("+I", ANNE))
        upserts = rows(spark, DebeziumJson(CUSTOMER, mode=ChangelogMode.UPSERT), *changes)
        assert upserts == customer(("+I", ANNE), ("+U", MARIE), ("-D", MARIE), ("+I", ANNE))


def test_both_rows_of_an_update_stand_where_their_record_stands(spark: Any) -> None:
    frame = decoded(spark, DebeziumJson(CUSTOMER), change("u", ANNE, MARIE), change("c", None, ANNE))
    assert [(row["_row_kind"], row.offset) for row in frame.collect()] == [("-U", 0), ("+U", 0), ("+I", 1)]


def base64_of(number: int) -> str:
    size = max(1, (number if number >= 0 else -number - 1).bit_length() // 8 + 1)
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


#: By database: DDL, settings, the row as Debezium writes it, the row by hand.
LITERALS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "mysql": (
        "b BOOLEAN, bits BINARY, tiny SMALLINT, i INT, big BIGINT, r FLOAT, d DOUBLE, price DECIMAL(10,2), "
        "big_unsigned DECIMAL(20,0), number DECIMAL(20,0), c STRING, blob BINARY, doc STRING, kind STRING, "
        "kinds STRING, y INT, "
        "day DATE, t BIGINT, at TIMESTAMP_NTZ, at_6 TIMESTAMP_NTZ, stamp TIMESTAMP, "
        "place STRUCT<wkb: BINARY, srid: INT>",
        {
            "epoch_units": {"at": EpochUnit.MILLISECONDS, "at_6": EpochUnit.MICROSECONDS},
            "decimals": {"big_unsigned": DecimalHandling.PRECISE, "number": DecimalHandling.DOUBLE},
        },
        {
            "b": True, "bits": "BQ==", "tiny": -5, "i": 2147483647, "big": 9223372036854775807, "r": 1.5,
            "d": 0.1, "price": "BNI=", "big_unsigned": base64_of(18446744073709551615),
            # bigint.unsigned.handling.mode=long
            "number": 1234, "c": "Größe",
            "blob": "AAH/", "doc": '{"a": 1}', "kind": "small", "kinds": "a,c", "y": 2018, "day": 17702,
            "t": 37023000000, "at": 1529507596000, "at_6": 1529507596945104,
            "stamp": "2018-06-20T15:13:16.945104Z", "place": {"wkb": "AQE=", "srid": 4326},
        },
        (
            True, b"\x05", -5, 2147483647, 9223372036854775807, 1.5, 0.1, Decimal("12.34"),
            Decimal("18446744073709551615"), Decimal(1234), "Größe",
            b"\x00\x01\xff", '{"a": 1}', "small", "a,c", 2018,
            dt.date(2018, 6, 20), 37023000000, dt.datetime(2018, 6, 20, 15, 13, 16),
            dt.datetime(2018, 6, 20, 15, 13, 16, 945104),
            dt.datetime(2018, 6, 20, 15, 13, 16, 945104, UTC), (bytearray(b"\x01\x01"), 4326),
        ),
    ),
    "postgresql": (
        "ok BOOLEAN, small SMALLINT, n BIGINT, r FLOAT, d DOUBLE, price DECIMAL(10,2), any DECIMAL(38,10), "
        "id STRING, doc STRING, net STRING, data BINARY, tags ARRAY<STRING>, attrs MAP<STRING, STRING>, "
        "day DATE, t BIGINT, tz STRING, at TIMESTAMP_NTZ, at_tz TIMESTAMP, span BIGINT",
        {"epoch_units": {"at": EpochUnit.MICROSECONDS}},
        {
            "ok": False, "small": 7, "n": -9223372036854775808, "r": "NaN", "d": 1e300, "price": "+y4=",
            "any": {"scale": 5, "value": base64_of(-314159)}, "id": "d1b4f2c0-0000-4000-8000-000000000001",
            "doc": "[1, 2]", "net": "192.168.1.0/24", "data": "aGVsbG8=", "tags": ["a", None, "b"],
            "attrs": {"k": "v"}, "day": -1, "t": 37023123456, "tz": "10:17:03.123456Z",
            "at": -1, "at_tz": "2019-12-31T23:59:59.999999Z", "span": 34128000000000,
        },
        (
            False, 7, -9223372036854775808, "NaN", 1e300, Decimal("-12.34"), Decimal("-3.1415900000"),
            "d1b4f2c0-0000-4000-8000-000000000001", "[1, 2]", "192.168.1.0/24", b"hello", ["a", None, "b"],
            {"k": "v"}, dt.date(1969, 12, 31), 37023123456, "10:17:03.123456Z",
            dt.datetime(1969, 12, 31, 23, 59, 59, 999999),
            dt.datetime(2019, 12, 31, 23, 59, 59, 999999, UTC), 34128000000000,
        ),
    ),
    "sqlserver": (
        "bit BOOLEAN, tiny SMALLINT, small SMALLINT, i INT, big BIGINT, r FLOAT, small_money DECIMAL(10,4), "
        "t_3 INT, t_6 BIGINT, small_dt TIMESTAMP_NTZ, dt2_3 TIMESTAMP_NTZ, dt2_6 TIMESTAMP_NTZ, "
        "money DECIMAL(19,4), num DECIMAL(38,0), f DOUBLE, name STRING, "
        "day DATE, t BIGINT, dt TIMESTAMP_NTZ, dt2 TIMESTAMP_NTZ, dto TIMESTAMP, uid STRING, bin BINARY, "
        "x STRING",
        {
            "epoch_units": {
                "small_dt": EpochUnit.MILLISECONDS, "dt2_3": EpochUnit.MILLISECONDS,
                "dt2_6": EpochUnit.MICROSECONDS, "dt": EpochUnit.MILLISECONDS, "dt2": EpochUnit.NANOSECONDS,
            },
            "decimals": {"num": DecimalHandling.PRECISE},
        },
        {
            "small": -32768, "i": -2147483648, "big": 9223372036854775807, "r": 3.5, "small_money": "BNI=",
            "t_3": 37023123, "t_6": 37023123456, "small_dt": 1529507580000, "dt2_3": 1529507596945,
            "dt2_6": 1529507596945104,
            "bit": True, "tiny": 255, "money": base64_of(-9223372036854775808),
            "num": base64_of(-(10**38 - 1)), "f": -0.0, "name": "x", "day": 17702, "t": 37023000000000,
            "dt": 1529507596003, "dt2": 1529507596945104000, "dto": "2018-06-20T15:13:16.9451040+02:00",
            "uid": "6F9619FF-8B86-D011-B42D-00C04FC964FF", "bin": "", "x": "<a/>",
        },
        (
            True, 255, -32768, -2147483648, 9223372036854775807, 3.5, Decimal("0.1234"), 37023123,
            37023123456,
            dt.datetime(2018, 6, 20, 15, 13), dt.datetime(2018, 6, 20, 15, 13, 16, 945000),
            dt.datetime(2018, 6, 20, 15, 13, 16, 945104),
            Decimal("-922337203685477.5808"), Decimal(-(10**38 - 1)), -0.0, "x",
            dt.date(2018, 6, 20), 37023000000000, dt.datetime(2018, 6, 20, 15, 13, 16, 3000),
            dt.datetime(2018, 6, 20, 15, 13, 16, 945104), dt.datetime(2018, 6, 20, 13, 13, 16, 945104, UTC),
            "6F9619FF-8B86-D011-B42D-00C04FC964FF", b"", "<a/>",
        ),
    ),
    "oracle": (
        "N2 TINYINT, N4 SMALLINT, N18 BIGINT, BIG DECIMAL(38,0), FLT DECIMAL(38,10), HUNDREDS DECIMAL(38,0), "
        "BF FLOAT, BD DOUBLE, TS_9 TIMESTAMP_NTZ, LTZ TIMESTAMP, YM BIGINT, C STRING, BL BINARY, X STRING, "
        "ROW_ STRING, ID DECIMAL(38,0), PRICE DECIMAL(10,2), N INT, F DOUBLE, NAME STRING, D TIMESTAMP_NTZ, "
        "TS TIMESTAMP_NTZ, TZ TIMESTAMP, RAW_ BINARY, SPAN BIGINT",
        {
            "epoch_units": {
                "TS_9": EpochUnit.NANOSECONDS, "D": EpochUnit.MILLISECONDS, "TS": EpochUnit.MICROSECONDS,
            },
            "decimals": dict.fromkeys(("BIG", "HUNDREDS", "ID"), DecimalHandling.PRECISE),
        },
        {
            "N2": -99, "N4": 9999, "N18": 999999999999999999, "BIG": base64_of(10**38 - 1),
            "FLT": {"scale": 3, "value": base64_of(-1001)}, "HUNDREDS": {"scale": -2, "value": base64_of(-7)},
            "BF": 0.5, "BD": -1e308, "TS_9": 1529507596945104000, "LTZ": "2018-06-20T15:13:16.945104Z",
            "YM": 31557600000000, "C": "a\nb", "BL": "AA==", "X": "<a/>", "ROW_": "AAAR3sAAEAAAACXAAA",
            "ID": {"scale": 0, "value": "A+w="}, "PRICE": "BNI=", "N": 12, "F": 3.25, "NAME": "Anne",
            "D": 1529507596000, "TS": 1529507596945104, "TZ": "2018-06-20T15:13:16.945104-05:00",
            "RAW_": "3q2+7w==", "SPAN": -3600000000,
        },
        (
            -99, 9999, 999999999999999999, Decimal(10**38 - 1), Decimal("-1.0010000000"), Decimal(-700), 0.5,
            -1e308, dt.datetime(2018, 6, 20, 15, 13, 16, 945104),
            dt.datetime(2018, 6, 20, 15, 13, 16, 945104, UTC), 31557600000000, "a\nb", b"\x00", "<a/>",
            "AAAR3sAAEAAAACXAAA",
            Decimal(1004), Decimal("12.34"), 12, 3.25, "Anne", dt.datetime(2018, 6, 20, 15, 13, 16),
            dt.datetime(2018, 6, 20, 15, 13, 16, 945104), dt.datetime(2018, 6, 20, 20, 13, 16, 945104, UTC),
            b"\xde\xad\xbe\xef", -3600000000,
        ),
    ),
    "db2": (
        "B BOOLEAN, S SMALLINT, I INT, L BIGINT, R FLOAT, D DOUBLE, P DECIMAL(31,3), C STRING, V STRING, "
        "DAY DATE, T BIGINT, TS TIMESTAMP_NTZ, X STRING",
        {"epoch_units": {"TS": EpochUnit.MICROSECONDS}},
        {
            "B": False, "S": -32768, "I": 0, "L": 1, "R": 0.5, "D": 2.5, "P": base64_of(10**30 + 1),
            "C": "c ", "V": "", "DAY": 0, "T": 0, "TS": 0, "X": None,
        },
        (
            False, -32768, 0, 1, 0.5, 2.5, Decimal("1000000000000000000000000000.001"), "c ", "",
            dt.date(1970, 1, 1), 0, dt.datetime(1970, 1, 1), None,
        ),
    ),
}  # fmt: skip


def comparable(value: Any) -> Any:
    """A time as it is everywhere; NaN, which is not equal to itself, as its name."""
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    return tuple(map(comparable, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    "database", [one if one == "mysql" else pytest.param(one, marks=pytest.mark.nightly) for one in LITERALS]
)
def test_the_types_of_each_database(spark: Any, database: str) -> None:
    ddl, settings, written, by_hand = LITERALS[database]
    frame = decoded(spark, DebeziumJson(ddl, **settings), change("c", None, written))
    instants = [one.name for one in frame.schema if one.dataType.simpleString() == "timestamp"]
    # Python's own view of an instant is the machine's wall clock.
    micros = [f"unix_micros({name}) AS {name}" if name in instants else name for name in frame.columns]
    row = frame.selectExpr(*micros).drop("offset", "_row_kind").first()
    found = [
        dt.datetime.fromtimestamp(0, UTC) + dt.timedelta(microseconds=value) if name in instants else value
        for name, value in row.asDict().items()
    ]
    wanted = tuple(map(comparable, by_hand))
    assert tuple(comparable(tuple(one) if hasattr(one, "asDict") else one) for one in found) == wanted


def of_mongo(op: str, before: Any, after: Any, **more: Any) -> dict[str, Any]:
    """A change of MongoDB's connector, in the encodings that its page gives: documents are texts."""
    source = {
        "version": "3.3.1", "connector": "mongodb", "name": "fulfillment", "ts_ms": 1558965508000,
        "snapshot": False, "db": "inventory", "rs": "rs0", "collection": "customers", "ord": 1, "h": None,
    }  # fmt: skip
    before, after = (
        one if one is None or isinstance(one, str) else json.dumps(one) for one in (before, after)
    )
    pre_image = {} if before is None else {"before": before}
    return {"op": op, "ts_ms": 1465491461815, "after": after, "source": source, **pre_image, **more}


ANNE_S_DOCUMENT = (
    '{"_id" : {"$numberLong" : "1004"},"first_name" : "Anne","last_name" : "Kretchmar",'
    '"email" : "annek@noanswer.org"}'
)
MARIE_S_DOCUMENT = ANNE_S_DOCUMENT.replace("Anne", "Anne Marie")
DOCUMENT = "_id LONG, first_name STRING, last_name STRING, email STRING"


@pytest.mark.parametrize("has_schema", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_document_of_mongodb(spark: Any, has_schema: bool) -> None:
    """With pre-images, and as the connector is by default: an update says what is, a deletion nothing."""
    updated = {"updateDescription": {"removedFields": None, "updatedFields": '{"first_name": "Anne Marie"}'}}
    whole: list[Any] = [
        of_mongo("r", None, ANNE_S_DOCUMENT),
        of_mongo("u", ANNE_S_DOCUMENT, MARIE_S_DOCUMENT, **updated),
        of_mongo("d", MARIE_S_DOCUMENT, None),
        None,
    ]
    usual: list[Any] = [
        of_mongo("c", None, ANNE_S_DOCUMENT),
        of_mongo("u", None, MARIE_S_DOCUMENT, **updated),
        of_mongo("d", None, None),
        None,
    ]
    if has_schema:
        whole, usual = (
            [one and {"schema": WITH_SCHEMA, "payload": one} for one in v] for v in (whole, usual)
        )
    found = rows(spark, DebeziumMongoJson(DOCUMENT), *whole)
    assert found == customer(("+I", ANNE), ("-U", ANNE), ("+U", MARIE), ("-D", MARIE))
    upsert = DebeziumMongoJson(DOCUMENT, mode=ChangelogMode.UPSERT)
    keys = {"keys": [{"id": "1004"}] * 4, "key": Json("id STRING")}
    assert [(kind, key, *row) for kind, key, *row in rows(spark, upsert, *usual, **keys)] == [
        ("+I", "1004", *ANNE.values()),
        ("+U", "1004", *MARIE.values()),
        ("-D", "1004", None, None, None, None),
    ]
    told = rows(spark, upsert, *whole, **keys)
    assert told[2] == ("-D", "1004", *MARIE.values())
    # What an update was is known with pre-images only, and no other format has such records.
    for form, bad in (
        (DebeziumMongoJson(DOCUMENT), usual[1]),
        (DebeziumMongoJson(DOCUMENT), usual[2]),
        (DebeziumMongoJson(DOCUMENT), of_mongo("c", None, "[]")),
        (DebeziumMongoJson(DOCUMENT), of_mongo("c", None, '{"_id" : ')),
        (DebeziumJson(CUSTOMER), usual[0]),
    ):
        with pytest.raises(Exception, match=r"FLINKISH_UNREADABLE"):
            rows(spark, form, bad)
    with pytest.raises(Exception, match=r"FLINKISH_UNREADABLE"):
        rows(
            spark, upsert, of_mongo("u", None, None, **updated), keys=[{"id": "1004"}], key=Json("id STRING")
        )
    with pytest.raises(ConfigError, match="no key"):
        Decoding(upsert, tombstones=OnTombstone.DROP)
    asked = ("value.source.collection", "value.source.database", "value.ingestion-timestamp")
    (row,) = decoded(spark, DebeziumMongoJson("_id INT"), whole[0], metadata=asked).collect()
    assert (row["_source_collection"], row["_source_database"]) == ("customers", "inventory")


#: A document in MongoDB's extended JSON: a field, the type it is declared with, its text, its value by hand.
EXTENDED_JSON: tuple[tuple[str, str, Any, Any], ...] = (
    ("_id", "STRING", {"$oid": "596e275826f08b2730779e1f"}, "596e275826f08b2730779e1f"),
    ("name", "STRING", "{ no object", "{ no object"),
    ("i", "INT", -2147483648, -2147483648),
    ("i_canonical", "INT", {"$numberInt": "7"}, 7),
    ("long", "BIGINT", {"$numberLong": "-9223372036854775808"}, -9223372036854775808),
    ("ratio", "DOUBLE", 0.1, 0.1),
    ("whole_ratio", "DOUBLE", {"$numberLong": "3"}, 3.0),
    ("infinite", "DOUBLE", {"$numberDouble": "-Infinity"}, float("-inf")),
    ("price", "DECIMAL(20,4)", {"$numberDecimal": "1234567890123456.7891"}, Decimal("1234567890123456.7891")),
    ("few", "DECIMAL(20,4)", {"$numberDecimal": "1E+3"}, Decimal("1000.0000")),
    ("ok", "BOOLEAN", True, True),
    ("data", "BINARY", {"$binary": "a2Fma2E=", "$type": "00"}, b"kafka"),
    ("data_v2", "BINARY", {"$binary": {"base64": "AAH/", "subType": "00"}}, b"\x00\x01\xff"),
    ("at", "TIMESTAMP", {"$date": 1529507596945}, 1529507596945000),
    ("at_canonical", "TIMESTAMP", {"$date": {"$numberLong": "-1"}}, -1000),
    ("at_relaxed", "TIMESTAMP", {"$date": "2018-06-20T15:13:16.945Z"}, 1529507596945000),
    ("tags", "ARRAY<STRING>", ["a", None], ["a", None]),
    ("place", "STRUCT<city: STRING, zip: INT>", {"city": "Bern", "zip": 3000}, ("Bern", 3000)),
    ("doc", "STRING", {"a": 1}, '{"a":1}'),
    ("nothing", "BIGINT", None, None),
)


def test_the_types_of_mongodb(spark: Any) -> None:
    ddl = ", ".join(f"{name} {kind}" for name, kind, _, _ in EXTENDED_JSON) + ", missing INT"
    document = {name: text for name, _, text, _ in EXTENDED_JSON}
    frame = decoded(spark, DebeziumMongoJson(ddl), of_mongo("c", None, document))
    instants = [name for name, kind, _, _ in EXTENDED_JSON if kind == "TIMESTAMP"]
    row = frame.selectExpr(
        *(f"unix_micros({name}) AS {name}" if name in instants else name for name in frame.columns)
    ).first()
    assert row["missing"] is None
    for name, _, _, value in EXTENDED_JSON:
        found = comparable(row[name])
        if name == "doc":
            found = json.dumps(json.loads(found), separators=(",", ":"))
        assert (tuple(found) if hasattr(found, "asDict") else found) == value, name


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("INT", [{"$numberLong": "2147483648"}, {"$numberDouble": "1"}, {"$date": 1}, 1.5, "x", {"a": 1}]),
        ("DOUBLE", [{"$numberDecimal": "1"}, {"$numberDouble": "x"}]),
        ("DECIMAL(4,2)", [{"$numberDecimal": "12.345"}, {"$numberDecimal": "NaN"}, {"$oid": "1"}]),
        ("TIMESTAMP", [1529507596945, "2018-06-20T15:13:16Z", {"$date": "x"}, {"$numberDouble": "1"}]),
        ("BINARY", ["AAH/", {"$binary": "no base64!"}, {"$oid": "00"}]),
    ],
)
def test_what_is_no_value_of_a_document_s_field(spark: Any, kind: str, bad: list[Any]) -> None:
    form = DebeziumMongoJson(f"v {kind}", OnBadRecord.DROP)
    values = [of_mongo("c", None, {"v": one}) for one in [*bad, None]]
    assert rows(spark, form, *values) == [("+I", None)]


def test_a_column_more_makes_the_plan_longer_by_one_column(spark: Any) -> None:
    """Spark plans each micro-batch anew: an expression that holds another twice doubles with each step."""

    def size(columns: int) -> int:
        ddl = ", ".join(f"d{number} DECIMAL(10,2)" for number in range(columns))
        frame = decoded(spark, DebeziumJson(ddl, OnBadRecord.DROP), change("c", None, {"d0": "BNI="}))
        return len(frame._jdf.queryExecution().analyzed().toString())

    assert size(2) - size(1) < 30_000


def test_no_decimal_is_rounded(spark: Any) -> None:
    """Of any precision: a cast to the most digits that there are rounds, too."""
    much = "9" * 36
    texts = {
        "DECIMAL(38,2)": [("12.34", "12.34"), ("12.340000000", "12.34"), ("1e2", "100"), ("-.5E+1", "-5"),
                          ("100E-3", "0.1"), ("0E-10", "0"), (f"{much}.99", f"{much}.99"),
                          ("12.349", None), ("1E-3", None), (f"{much}9", None), ("1e99999999999", None)],
        "DECIMAL(30,2)": [("1.00000000004", None), ("1.00000000005", None), (" 7 ", "7")],
        "DECIMAL(4,0)": [("1200E-2", "12"), ("12.0", "12"), ("12.5", None), ("1E+4", None)],
    }  # fmt: skip
    for kind, cases in texts.items():
        forms = [
            (DebeziumJson(f"v {kind}", OnBadRecord.DROP, decimals=DecimalHandling.STRING), "Debezium"),
            (CanalJson(f"v {kind}", OnBadRecord.DROP), "Canal"),
            (MaxwellJson(f"v {kind}", OnBadRecord.DROP), "Maxwell"),
        ]
        wanted = [("+I", Decimal(value)) for _, value in cases if value is not None]
        for form, name in forms:
            values: dict[str, Any] = {
                "Debezium": [change("c", None, {"v": text}) for text, _ in cases],
                "Canal": [{"type": "INSERT", "data": [{"v": text}]} for text, _ in cases],
                "Maxwell": [{"type": "insert", "data": {"v": text}} for text, _ in cases],
            }
            assert rows(spark, form, *values[name]) == wanted, (kind, name)
    of_its_own = {"scale": 3, "value": base64_of(1001)}, {"scale": 14, "value": base64_of(314159265358979)}
    precise = DebeziumJson("v DECIMAL(38,10)", OnBadRecord.DROP)
    found = rows(spark, precise, *(change("c", None, {"v": one}) for one in of_its_own))
    assert found == [("+I", Decimal("1.001"))]


UNKNOWN = "__debezium_unavailable_value"


def test_what_the_connector_did_not_get_overwrites_nothing(spark: Any) -> None:
    """A long value that an update of PostgreSQL's or Oracle's left as it was."""
    named = str(uuid.UUID(bytes=hashlib.md5(UNKNOWN.encode()).digest(), version=3))
    in_bytes = base64.b64encode(UNKNOWN.encode()).decode()
    unknown: dict[str, list[Any]] = {
        "STRING": [UNKNOWN, json.dumps({UNKNOWN: UNKNOWN}, separators=(",", ":"))],
        "BINARY": [in_bytes],
        "ARRAY<STRING>": [[UNKNOWN], [named]],
        "ARRAY<BINARY>": [[in_bytes]],
        "ARRAY<BIGINT>": [list(UNKNOWN.encode())],
        "ARRAY<DOUBLE>": [[float(one) for one in UNKNOWN.encode()]],
        "MAP<STRING, STRING>": [{UNKNOWN: UNKNOWN}],
    }
    known: dict[str, Any] = {"STRING": f"{UNKNOWN}s", "BINARY": "AA==", "ARRAY<BIGINT>": [95]}
    for kind, values in unknown.items():
        form = DebeziumJson(f"id INT, v {kind}", OnBadRecord.DROP, ChangelogMode.UPSERT)
        updates = [change("u", None, {"id": 1, "v": one}) for one in (*values, known.get(kind))]
        (row,) = rows(spark, form, *updates)
        assert row[:2] == ("+U", 1) and (row[2] is None) is (kind not in known)
        found = rows(spark, replace(form, unavailable=""), *updates)
        assert len(found) == len(updates), "none is looked for"
    mine = DebeziumJson("v STRING", OnBadRecord.DROP, unavailable="?")
    found = rows(spark, mine, change("c", None, {"v": "?"}), change("c", None, {"v": UNKNOWN}))
    assert found == [("+I", UNKNOWN)]


#: As in `test_json_values`; by its own name a zone is read as well as by the session's.
IN_BERLIN = {
    "2026-03-29T01:59:59": 1774745999,
    "2026-03-29T02:30:00": None,
    "2026-03-29 02:30:00.5 Europe/Berlin": None,
    "2026-03-29T02:30:00 Asia/Tokyo": 1774719000,
    "2026-03-29T03:00:00": 1774746000,
    "2026-03-29T02:30:00Z": 1774751400,
    "2026-03-29T02:30:00+01:00": 1774747800,
    "2026-10-25T02:30:00": 1792888200,
}


def test_a_time_that_no_clock_has_shown_is_no_value(spark: Any) -> None:
    own = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        changes = [change("c", None, {"v": text}) for text in IN_BERLIN]
        found = decoded(spark, DebeziumJson("v TIMESTAMP", OnBadRecord.DROP), *changes)
        seconds = [row[0] for row in found.selectExpr("unix_seconds(v)").collect()]
    finally:
        spark.conf.set("spark.sql.session.timeZone", own)
    assert seconds == [second for second in IN_BERLIN.values() if second is not None]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ddl", "settings", "bad"),
    [
        ("v INT", {}, [1.5, "1e3", 2147483648, True]),
        ("v DECIMAL(4,2)", {}, [base64_of(123456), "no base64!", {"scale": 3, "value": base64_of(1)}, ""]),
        ("v DECIMAL(4,2)", {"decimals": DecimalHandling.STRING}, ["12.345", "123.45", "x"]),
        ("v DECIMAL(4,2)", {"decimals": DecimalHandling.DOUBLE}, [12.345, 1000]),
        ("v DOUBLE", {}, [1e999 if False else "1e999", "x"]),
        ("v BOOLEAN", {}, ["x", 2]),
        ("v BINARY", {}, ["no base64!"]),
        ("v DATE", {}, ["10:00", 4000000000, "2018-06-20 23:00:00", "2018-02-30", "99999-01-01", 9999999]),
        ("v TIMESTAMP", {}, [1529507596945104, "10:00", "99999-01-01T00:00:00Z"]),
        ("v TIMESTAMP", {}, ["2018-06-20T15:13:16.9451041+02:00"]),
        ("v TIMESTAMP_NTZ", {}, ["2018-06-20T15:13:16.1234567"]),
        ("v STRUCT<a: INT, b: INT>", {}, [{"a": "x"}, {"a": 1, "b": "y"}, {"a": 1.5}, "x"]),
        ("v ARRAY<STRUCT<a: INT>>", {}, [[{"a": 1}, {"a": "x"}], [{"a": 2147483648}], 1]),
        ("v ARRAY<INT>", {}, [[1, "x", 3], [1.5]]),
        ("v MAP<STRING, INT>", {}, [{"a": 1, "b": "x"}]),
        ("v TIMESTAMP", {"epoch_units": {"v": EpochUnit.MILLISECONDS}}, [1529507596945104000]),
        ("v TIMESTAMP_NTZ", {"epoch_units": {"v": EpochUnit.NANOSECONDS}}, [1]),
    ],
)
def test_what_is_no_value_of_its_column_is_a_bad_record(
    spark: Any, ddl: str, settings: dict[str, Any], bad: list[Any]
) -> None:
    changes = [change("c", None, {"v": one}) for one in bad]
    good = change("c", None, {"v": None})
    assert rows(spark, DebeziumJson(ddl, OnBadRecord.DROP, **settings), *changes, good) == [("+I", None)]
    decoding = Decoding(DebeziumJson(ddl, **settings), tombstones=OnTombstone.DROP)
    frame = records(spark, [*changes, good])
    found = decoding.deserializer("in", NO_JOB, ["t"]).bad(frame).collect()
    assert [row.offset for row in found] == list(range(len(bad)))
    assert all("no change in DebeziumJson" in row[REASON] for row in found)
    for one in changes[:1]:
        with pytest.raises(Exception, match=UNREADABLE_MARKER.replace("[", r"\[").replace("]", r"\]")):
            rows(spark, DebeziumJson(ddl, **settings), good, one)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "value",
    [
        change("t", None, None),
        change("x", ANNE, ANNE),
        change("u", None, ANNE),
        change("u", {"id": 1004}, ANNE),
        change("c", ANNE, None),
        change("d", None, ANNE),
        {"before": None, "after": ANNE},
        {"schema": WITH_SCHEMA, "payload": None},
        {},
        b"",
        b"[]",
    ],
    ids=str,
)
def test_what_says_nothing_of_rows_is_a_bad_record(spark: Any, value: Any) -> None:
    assert rows(spark, DebeziumJson(CUSTOMER, OnBadRecord.DROP), value, change("c", None, ANNE)) == customer(
        ("+I", ANNE)
    )
    with pytest.raises(Exception, match=r"FLINKISH_UNREADABLE"):
        rows(spark, DebeziumJson(CUSTOMER), value)


def test_an_update_without_before_is_enough_for_upserts(spark: Any) -> None:
    """PostgreSQL's REPLICA IDENTITY DEFAULT: an update says what is, a deletion the key of what was."""
    form = DebeziumJson(CUSTOMER, mode=ChangelogMode.UPSERT)
    found = rows(spark, form, change("u", None, MARIE), change("d", {"id": 1004}, None))
    assert found == [("+U", *MARIE.values()), ("-D", 1004, None, None, None)]


def test_what_a_change_knows_beside_the_row(spark: Any) -> None:
    one = change("c", None, ANNE, **SOURCES["postgresql"])
    one["transaction"] = {"id": "571:53195832", "total_order": 1, "data_collection_order": 2}
    metadata = (
        *("value.ingestion-timestamp", "value.source.timestamp", "value.source.database", "value.schema"),
        *("value.source.schema", "value.source.table", "value.source.properties"),
        *("value.transaction.id", "value.transaction.total-order"),
        "value.transaction.data-collection-order",
    )
    frame = decoded(
        spark, DebeziumJson("id INT"), {"schema": WITH_SCHEMA, "payload": one}, one, metadata=metadata
    )
    with_schema, without = frame.selectExpr("*", "unix_millis(_ingestion_timestamp) AS ms").collect()
    assert frame.columns == [
        *("id", "_row_kind", "_ingestion_timestamp", "_source_timestamp", "_source_database", "_schema"),
        *("_source_schema", "_source_table", "_source_properties", "_transaction_id"),
        *("_transaction_total_order", "_transaction_data_collection_order", "offset"),
    ]
    assert json.loads(with_schema["_schema"]) == WITH_SCHEMA and without["_schema"] is None
    for row in (with_schema, without):
        assert row.ms == 1465491411815
        assert (row["_source_database"], row["_source_schema"]) == ("postgres", "public")
        assert row["_source_table"] == "customers" and row["_source_properties"]["lsn"] == "24023128"
        assert row["_source_properties"]["snapshot"] == "true"
        assert (row["_transaction_id"], row["_transaction_total_order"]) == ("571:53195832", 1)


PRODUCT = "id INT, name STRING, weight DECIMAL(6,3)"


def canal(kind: str, data: Any, old: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "data": data, "old": old, "type": kind, "database": "inventory", "table": "products",
        "es": 1589373515000, "ts": 1589373515477, "isDdl": False, "pkNames": ["id"], "sqlType": {"id": 4},
        "mysqlType": {"id": "INTEGER"}, "sql": "", "id": 3, **more,
    }  # fmt: skip


def test_canal(spark: Any) -> None:
    one = {"id": "101", "name": "scooter", "weight": "3.14"}
    two = {"id": "102", "name": None, "weight": "8.1"}
    changed = [{**one, "name": "bike"}, {**two, "id": "103"}]
    values = [
        canal("CREATE", None, isDdl=True),
        canal("INSERT", [one, two]),
        canal("UPDATE", changed, [{"name": "scooter"}, {"id": "102"}]),
        canal("UPDATE", [{**one, "name": None}], [{"name": "bike"}]),
        canal("UPDATE", [{**one, "name": "bike"}], [{"name": None}]),
        canal("DELETE", [changed[1]]),
        canal("INSERT", [one], table="orders"),
    ]
    scooter, nameless = (101, "scooter", Decimal("3.140")), (102, None, Decimal("8.100"))
    bike, moved, no_name = (101, "bike", scooter[2]), (103, None, nameless[2]), (101, None, scooter[2])
    found = rows(spark, CanalJson(PRODUCT, table="products"), *values)
    assert found == [
        *(("+I", *scooter), ("+I", *nameless)),
        *(("-U", *scooter), ("+U", *bike), ("-U", *nameless), ("+U", *moved)),
        *(("-U", *bike), ("+U", *no_name), ("-U", *no_name), ("+U", *bike)),
        ("-D", *moved),
    ]
    upserts = rows(spark, CanalJson(PRODUCT, mode=ChangelogMode.UPSERT, table="products"), *values)
    assert upserts == [
        *(("+I", *scooter), ("+I", *nameless)),
        # The key of the second row has changed: what was there is gone.
        *(("+U", *bike), ("-D", *nameless), ("+U", *moved)),
        *(("+U", *no_name), ("+U", *bike)),
        ("-D", *moved),
    ]
    metadata = ("value.database", "value.table", "value.pk-names", "value.sql-type")
    (row,) = decoded(spark, CanalJson("id INT"), canal("INSERT", [one]), metadata=metadata).collect()
    assert (row["_database"], row["_table"], row["_pk_names"]) == ("inventory", "products", ["id"])
    assert row["_sql_type"] == {"id": 4}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "value",
    [
        canal("TRUNCATE", None, isDdl=True),
        canal("ERASE", None, isDdl=True),
        canal("INSERT", None),
        canal("UPDATE", [{"id": "1"}], None),
        canal("UPDATE", [{"id": "1"}, {"id": "2"}], [{"id": "3"}]),
        canal("INSERT", [{"id": "1.5"}]),
        canal("INSERT", [None]),
        canal("?", [{"id": "1"}]),
    ],
    ids=str,
)
def test_what_is_no_change_of_canal_s(spark: Any, value: Any) -> None:
    good = canal("INSERT", [{"id": "1"}])
    assert rows(spark, CanalJson("id INT", OnBadRecord.DROP), value, good) == [("+I", 1)]
    with pytest.raises(Exception, match="FLINKISH_UNREADABLE"):
        rows(spark, CanalJson("id INT"), value)


def maxwell(kind: str, data: Any, old: Any = None, **more: Any) -> dict[str, Any]:
    first = {"database": "inventory", "table": "products", "type": kind, "ts": 1596684904, "xid": 7201}
    return {**first, "data": data, **({} if old is None else {"old": old}), **more}


def test_maxwell(spark: Any) -> None:
    one = {"id": 101, "name": "scooter", "weight": 3.14}
    bike, no_name = {**one, "name": "bike"}, {**one, "name": None}
    moved = {**one, "id": 110}
    key = {"primary_key_columns": ["id"]}
    values = [
        maxwell("bootstrap-start", {}),
        maxwell("bootstrap-insert", one),
        maxwell("bootstrap-complete", {}),
        maxwell("update", bike, {"name": "scooter"}, **key),
        maxwell("update", no_name, {"name": "bike"}),
        maxwell("update", one, {"name": None}),
        maxwell("update", moved, {"id": 101}, **key),
        maxwell("delete", moved),
        maxwell("table-create", None),
        maxwell("insert", one, database="other"),
    ]
    row, was_bike, was_none = (101, "scooter", Decimal("3.140")), (101, "bike", Decimal("3.140")), (101, None)
    was_none = (*was_none, Decimal("3.140"))
    now_110 = (110, *row[1:])
    assert rows(spark, MaxwellJson(PRODUCT, database="inventory"), *values) == [
        ("+I", *row),
        *(("-U", *row), ("+U", *was_bike), ("-U", *was_bike), ("+U", *was_none)),
        *(("-U", *was_none), ("+U", *row), ("-U", *row), ("+U", *now_110)),
        ("-D", *now_110),
    ]
    upsert = MaxwellJson(PRODUCT, mode=ChangelogMode.UPSERT, database="inventory")
    assert rows(spark, upsert, *values) == [
        *(("+I", *row), ("+U", *was_bike), ("+U", *was_none), ("+U", *row)),
        *(("-D", *row), ("+U", *now_110), ("-D", *now_110)),
    ]
    for bad in (maxwell("table-drop", None), maxwell("update", one), maxwell("insert", {"id": "x"})):
        with pytest.raises(Exception, match="FLINKISH_UNREADABLE"):
            rows(spark, MaxwellJson(PRODUCT), bad)
    values = [maxwell("insert", {"id": 1, "data": {"a": [1, 2.50]}, "at": "2020-08-06 03:35:04"})]
    ddl = "id INT, data STRING, at TIMESTAMP_NTZ"
    ((_, _, data, at),) = rows(spark, MaxwellJson(ddl), *values)
    assert json.loads(data) == {"a": [1, 2.5]} and at == dt.datetime(2020, 8, 6, 3, 35, 4)


def test_keys_stand_beside_changes(spark: Any) -> None:
    found = rows(
        spark,
        DebeziumJson("name STRING"),
        change("u", {"name": "a"}, {"name": "b"}),
        None,
        keys=[{"id": 1}, {"id": 1}],
        key=Json("id INT"),
    )
    assert found == [("-U", 1, "a"), ("+U", 1, "b")]


@pytest.mark.parametrize(
    ("ddl", "good", "value", "bad"),
    [
        ("ARRAY<DECIMAL(4,2)>", [1.5, None], [Decimal("1.50"), None], [1.255]),
        ("STRUCT<x: TINYINT>", {"x": -128}, (-128,), {"x": 128}),
        ("STRUCT<x: DATE>", {"x": "2026-01-31"}, (dt.date(2026, 1, 31),), {"x": "2026-01-31T12:00:00"}),
        (
            "STRUCT<x: TIMESTAMP>",
            {"x": "2026-01-31T12:00:00Z"},
            (dt.datetime(2026, 1, 31, 12),),
            {"x": "12:00"},
        ),
        ("MAP<STRING, FLOAT>", {"k": 0.5}, {"k": 0.5}, {"k": 1e39}),
    ],
)
def test_what_is_within_json_is_exact(spark: Any, ddl: str, good: Any, value: Any, bad: Any) -> None:
    records = [change("c", None, {"v": one}) for one in (good, bad, None)]
    found = rows(spark, DebeziumJson(f"v {ddl}", OnBadRecord.DROP), *records)
    assert found == [("+I", value), ("+I", None)]


def test_what_formats_of_changes_refuse() -> None:
    with pytest.raises(SchemaError, match="_row_kind"):
        Decoding(DebeziumJson("_row_kind STRING"), tombstones=OnTombstone.DROP)
    with pytest.raises(SchemaError, match="'data' of CanalJson is binary"):
        Decoding(CanalJson("data BINARY"), tombstones=OnTombstone.DROP)
    with pytest.raises(SchemaError, match="the column 'a' of CanalJson is array<decimal"):
        Decoding(CanalJson("a ARRAY<DECIMAL(4,2)>"), tombstones=OnTombstone.DROP)
    with pytest.raises(SchemaError, match="interval"):
        Decoding(DebeziumJson("i INTERVAL DAY TO SECOND"), tombstones=OnTombstone.DROP)
    with pytest.raises(ConfigError, match="no TIMESTAMP"):
        form = DebeziumJson("i INT", epoch_units={"i": EpochUnit.MILLISECONDS})
        Decoding(form, tombstones=OnTombstone.DROP)
    for wrong in ({"i": DecimalHandling.STRING}, {"no": DecimalHandling.STRING}):
        with pytest.raises(ConfigError, match="no DECIMAL"):
            Decoding(DebeziumJson("i INT, d DECIMAL(4,2)", decimals=wrong), tombstones=OnTombstone.DROP)
    for told in (DecimalHandling.PRECISE, {"e": DecimalHandling.DOUBLE}):
        with pytest.raises(ConfigError, match=r"'d' of DebeziumJson is decimal\(4,0\), and decimals"):
            form = DebeziumJson("d DECIMAL(4,0), e DECIMAL(4,0)", decimals=told)
            Decoding(form, tombstones=OnTombstone.DROP)
    with pytest.raises(ConfigError, match="decimals"):
        DebeziumJson("d DECIMAL(4,2)", decimals={"d": "string"})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="unavailable"):
        DebeziumJson("i INT", unavailable=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"value\.source\.table"):
        Decoding(CanalJson("i INT"), ("value.source.table",), tombstones=OnTombstone.DROP)
    with pytest.raises(ConfigError, match="no format of changes"):
        Decoding(Json("i INT"), ("value.table",))
    for policy in (OnTombstone.KEEP, OnTombstone.DELETE):
        with pytest.raises(ConfigError, match="format of changes"):
            Decoding(DebeziumJson("i INT"), key=Json("i INT"), tombstones=policy)
    with pytest.raises(ConfigError, match="epoch_units"):
        DebeziumJson("at TIMESTAMP", epoch_units={"at": "ms"})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="mode"):
        MaxwellJson("i INT", mode="upsert")  # type: ignore[arg-type]


def an_envelope() -> dict[str, Any]:
    """The schema of a connector's values as Confluent's converter has it, with the attributes it adds."""
    long_time = {"type": "long", "connect.version": 1, "connect.name": "io.debezium.time.MicroTimestamp"}
    number = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    day = {"type": "int", "connect.name": "io.debezium.time.Date", "logicalType": "date"}
    row = {
        "type": "record",
        "name": "Value",
        "fields": [
            {"name": "id", "type": "int"},
            *({"name": n, "type": ["null", k], "default": None} for n, k in (("n", number), ("day", day))),
            {"name": "at", "type": long_time},
        ],
        "connect.name": "server.public.things.Value",
    }
    texts = [
        {"name": name, "type": ["null", "string"], "default": None} for name in ("db", "schema", "table")
    ]
    source = {"type": "record", "name": "Source", "namespace": "io.debezium.connector", "fields": [
        {"name": "ts_ms", "type": "long"}, *texts, {"name": "lsn", "type": ["null", "long"], "default": None},
    ]}  # fmt: skip
    block = {"type": "record", "name": "block", "namespace": "event", "fields": [
        {"name": "id", "type": "string"},
        *({"name": n, "type": "long"} for n in ("total_order", "data_collection_order")),
    ]}  # fmt: skip
    return {
        "type": "record",
        "name": "Envelope",
        "namespace": "server.public.things",
        "fields": [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "source", "type": source},
            {"name": "op", "type": "string"},
            {"name": "ts_ms", "type": ["null", "long"], "default": None},
            {"name": "transaction", "type": ["null", block], "default": None},
        ],
    }


def in_avro(op: str, before: Any, after: Any) -> bytes:
    made = io.BytesIO()
    fields = ("id", "n", "day", "at")
    rows = [None if row is None else dict(zip(fields, row, strict=True)) for row in (before, after)]
    source = {"ts_ms": 1559033904863, "db": "postgres", "schema": "public", "table": "things", "lsn": None}
    block = {"id": "571", "total_order": 1, "data_collection_order": 2}
    envelope = {"before": rows[0], "after": rows[1], "source": source, "op": op, "ts_ms": 7}
    fastavro.schemaless_writer(made, fastavro.parse_schema(an_envelope()), {**envelope, "transaction": block})
    return made.getvalue()


def test_debezium_in_avro(spark: Any) -> None:
    one = (1, Decimal("-12.34"), dt.date(1969, 12, 31), 1529507596945104)
    two = (1, None, None, 0)
    form = DebeziumAvro(json.dumps(an_envelope()))
    values = [in_avro("r", None, one), in_avro("u", one, two), in_avro("d", two, None), None]
    assert rows(spark, form, *values) == [("+I", *one), ("-U", *one), ("+U", *two), ("-D", *two)]
    upsert = replace(form, mode=ChangelogMode.UPSERT)
    assert rows(spark, upsert, *values) == [("+I", *one), ("+U", *two), ("-D", *two)]
    bad = [in_avro("u", None, two), in_avro("t", None, None), in_avro("c", None, one)[:-1], b""]
    dropping = replace(form, on_bad_record=OnBadRecord.DROP)
    assert rows(spark, dropping, *bad, values[0]) == [("+I", *one)]
    made = Decoding(form, tombstones=OnTombstone.DROP).deserializer("in", NO_JOB, ["t"])
    told = [row[REASON] for row in made.bad(records(spark, [*bad, *values])).collect()]
    assert len(told) == 4 and all(
        why.startswith("the value is no change in DebeziumAvro") for why in told[:2]
    )
    assert all(why.startswith("the bytes") for why in told[2:])
    with pytest.raises(Exception, match="FLINKISH_UNREADABLE"):
        rows(spark, form, bad[0])
    known = (
        *("value.ingestion-timestamp", "value.source.timestamp", "value.source.database"),
        *("value.source.schema", "value.source.table", "value.source.properties", "value.transaction.id"),
        *("value.transaction.total-order", "value.transaction.data-collection-order"),
    )
    keys = [{"key": 9}]
    frame = decoded(spark, form, values[0], metadata=known, keys=keys, key=Json("key INT"))
    (row,) = frame.selectExpr("*", "unix_millis(_source_timestamp) AS ms").collect()
    assert (row.key, row["_row_kind"], row.ms, row["_source_table"]) == (9, "+I", 1559033904863, "things")
    assert row["_source_properties"]["db"] == "postgres" and row["_source_properties"]["lsn"] is None
    assert (row["_transaction_id"], row["_transaction_total_order"]) == ("571", 1)


def test_what_the_connector_did_not_get_is_no_value_in_avro(spark: Any) -> None:
    kinds = {"s": "string", "b": "bytes", "a": {"type": "array", "items": "string"}}
    fields = [{"name": n, "type": ["null", kind], "default": None} for n, kind in kinds.items()]
    row = {"type": "record", "name": "Value", "fields": fields}
    schema = {
        "type": "record",
        "name": "Envelope",
        "fields": [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "op", "type": "string"},
        ],
    }

    def updated(**after: Any) -> bytes:
        made = io.BytesIO()
        record = {"before": None, "after": {**dict.fromkeys(kinds), **after}, "op": "u"}
        fastavro.schemaless_writer(made, fastavro.parse_schema(schema), record)
        return made.getvalue()

    told = [updated(s=UNKNOWN), updated(b=UNKNOWN.encode()), updated(a=[UNKNOWN]), updated(s="s", a=["a"])]
    form = DebeziumAvro(json.dumps(schema), on_bad_record=OnBadRecord.DROP, mode=ChangelogMode.UPSERT)
    assert rows(spark, form, *told) == [("+U", "s", None, ["a"])]
    assert len(rows(spark, replace(form, unavailable=""), *told)) == 4


def test_what_is_no_envelope_in_avro_is_refused() -> None:
    for wrong in ("before", "op"):
        schema = an_envelope()
        schema["fields"] = [one for one in schema["fields"] if one["name"] != wrong]
        if wrong == "before":
            schema["fields"][0]["type"] = ["null", an_envelope()["fields"][0]["type"][1]]
        with pytest.raises(SchemaError, match="no envelope"):
            Decoding(DebeziumAvro(json.dumps(schema)), tombstones=OnTombstone.DROP)
    with pytest.raises(ConfigError, match=r"value\.schema"):
        form = DebeziumAvro(json.dumps(an_envelope()))
        Decoding(form, ("value.schema",), tombstones=OnTombstone.DROP)
    with pytest.raises(ConfigError, match="neither a schema nor a registry"):
        Decoding(DebeziumAvro(), tombstones=OnTombstone.DROP)
    with pytest.raises(ConfigError, match="mode"):
        DebeziumAvro(mode="upsert")  # type: ignore[arg-type]
