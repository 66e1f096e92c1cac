"""Every type at its limits through a job: a Python source, state, a savepoint, sinks, sources again."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark import (
    DeltaSink,
    FileFormat,
    FileSink,
    KafkaSink,
    KeyedProcessFunction,
    MemorySink,
    Upsert,
    ValueStateDescriptor,
)
from flinkish_spark.errors import BadRecordError, SchemaError
from flinkish_spark.formats import Avro, Json, Raw
from flinkish_spark.runtime.ddl import parse_ddl
from flinkish_spark.runtime.python_values import to_values
from flinkish_spark.runtime.row_blocks import arrow_schema
from flinkish_spark.savepoints.settings import RestoreSettings
from flinkish_spark.sinks.kafka_avro import avro_schema, check_avro
from flinkish_spark.sinks.kafka_columns import check_columns, record_columns
from flinkish_spark.sources import (
    CsvFiles,
    DeltaSource,
    DeltaTableSource,
    FileSource,
    JsonLines,
    ParquetFiles,
)
from flinkish_spark.sources.json_records import decoded
from flinkish_spark.sources.splits import SplitSource
from flinkish_spark.testing.sinks import SinkUnderTest
from tests.databases import TestDatabase
from tests.savepoint_support import started, stop, stop_with
from tests.support import await_that, environment
from tests.types_at_limits import FORMS, Case, cases_of, columns_of, refused_types, same
from tests.types_databases import through
from tests.types_files import column

pytestmark = pytest.mark.timeout(600)

COLUMNS = columns_of("rows of SplitSource")
ROWS = max(len(case.given) for case in COLUMNS.values())
FILES = {"Parquet files": ParquetFiles(), "JSON files": JsonLines(), "CSV files": CsvFiles()}
#: Without it Spark refuses plans that convert to TIME, as those of operators do.
TIME_OF_DAY = "spark.sql.timeType.enabled"


def declared(columns: dict[str, Case]) -> str:
    return ", ".join(["n INT", *(f"{name} {case.ddl}" for name, case in columns.items())])


def batch_of(columns: dict[str, Case], first: int) -> pa.RecordBatch:
    """All values of all columns, with nulls below; `n` counts on from `first`."""
    schema = arrow_schema(parse_ddl(declared(columns)))
    values = [[*case.given, *[None] * (ROWS - len(case.given))] for case in columns.values()]
    made = [column(f"v {case.ddl}", one) for case, one in zip(columns.values(), values, strict=True)]
    return pa.RecordBatch.from_arrays(
        [pa.array(range(first, first + ROWS), pa.int32()), *made], schema=schema
    )


class Everything(SplitSource):
    """The rows, as often as it is told; it has no end."""

    schema = declared(COLUMNS)

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def splits(self) -> list[str]:
        return ["one"]

    def latest(self, split: str, start: int, limit: int | None) -> int:
        return self.rounds * ROWS

    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        for first in range(start, end, ROWS):
            yield batch_of(COLUMNS, first)


class Remembers(KeyedProcessFunction):
    """Keeps the first row of a key, and emits it for each of the key's."""

    def open(self, context: Any) -> None:
        self.row = context.get_state(ValueStateDescriptor("row", declared(COLUMNS)))

    def process_element(self, element: Any, ctx: Any) -> Iterator[Any]:
        if self.row.value() is None:
            self.row.update(tuple(element[:-1]))
        yield self.row.value()


def some(stream: Any, columns: dict[str, Case]) -> Any:
    """Return a stream of some columns only."""
    return stream.transform(lambda frame: frame.select("n", *columns))


def check(found: dict[str, list[Any]], columns: dict[str, Case], where: str) -> None:
    """Compare columns that came out, in order of `n`, with what they have to be."""
    wrong = []
    for name, case in columns.items():
        try:
            assert len(found[name]) == ROWS
            same(found[name][: len(case.wanted)], case.wanted, case.ddl)
        except AssertionError as error:
            wrong.append(f"{where}: {error}")
    assert not wrong, "\n".join(wrong)


def by_column(rows: list[Any], columns: dict[str, Case]) -> dict[str, list[Any]]:
    ordered = sorted(rows, key=lambda row: row["n"])
    return {name: [row[name] for row in ordered] for name in columns}


def read(frame: DataFrame, columns: dict[str, Case]) -> dict[str, list[Any]]:
    """What is in a frame, by Arrow."""
    table = frame.orderBy("n").select(*columns).toArrow()
    return {name: to_values(table.column(name).combine_chunks()) for name in columns}


@pytest.fixture
def in_berlin(spark: Any) -> Iterator[Any]:
    """A session in whose time zone hours come twice, and which takes times of day."""
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    spark.conf.set(TIME_OF_DAY, "true")
    yield spark
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.conf.unset(TIME_OF_DAY)


def test_a_job_hands_on_what_it_was_given_in_state_savepoint_sinks_and_sources(
    in_berlin: Any, tmp_path: Path
) -> None:
    spark, paths = in_berlin, {}
    env = environment(spark, tmp_path / "job")
    stream = env.from_source(Everything(1), uid="in")
    memory, kept = MemorySink(f"{tmp_path}-memory"), MemorySink(f"{tmp_path}-kept")
    some(stream, columns_of("Memory")).sink_to(memory, uid="memory")
    stream.transform(lambda frame: frame.selectExpr("*", f"n % {ROWS} AS k")).key_by("k").process(
        Remembers(), output=declared(COLUMNS), uid="state"
    ).sink_to(kept, uid="kept")
    for form in FileFormat:
        way = {
            "parquet": "Parquet files",
            "json": "JSON files",
            "csv": "CSV files",
            "avro": "Avro files",
        }.get(form.value)
        if way is not None:
            paths[way] = tmp_path / form.value
            options = {"header": "true"} if form is FileFormat.CSV else {}
            some(stream, columns_of(way)).sink_to(FileSink(str(paths[way]), form, options), uid=form.value)
    for way, mode in (("Delta append", None), ("Delta upsert", Upsert(["n"]))):
        paths[way] = tmp_path / way.replace(" ", "-")
        sink = DeltaSink(str(paths[way])) if mode is None else DeltaSink(str(paths[way]), mode=mode)
        some(stream, columns_of(way)).sink_to(sink, uid=way.replace(" ", "-"))
    with started(env) as client:
        await_that(lambda: len(memory.rows()) == len(kept.rows()) == ROWS, client)
        stop_with(client, tmp_path / "savepoint")
    check(by_column(memory.rows(), columns_of("Memory")), columns_of("Memory"), "Memory")
    check(by_column(kept.rows(), COLUMNS), COLUMNS, "state")
    for way in ("Delta append", "Delta upsert"):
        columns = columns_of(way)
        check(read(spark.read.format("delta").load(str(paths[way])), columns), columns, way)
    for way in ("Parquet files", "JSON files", "Avro files"):
        columns, reader = columns_of(way), spark.read.format(way.split()[0].lower())
        if way != "Avro files":
            reader = reader.schema(declared(columns))
        check(read(reader.load(str(paths[way])), columns), columns, f"{way} by Spark")

    # What was written is read by sources of ours, beside the state out of the savepoint.
    env = environment(spark, tmp_path / "again")
    again, sinks = MemorySink(f"{tmp_path}-again"), {}
    env.from_source(Everything(2), uid="in").transform(
        lambda frame: frame.selectExpr("*", f"n % {ROWS} AS k")
    ).key_by("k").process(Remembers(), output=declared(COLUMNS), uid="state").sink_to(again, uid="kept")
    sources: dict[str, tuple[Any, dict[str, Case]]] = {}
    for way, form in FILES.items():
        columns = {name: case for name, case in columns_of(way).items() if name in read_by(way)}
        sources[way] = FileSource(str(paths[way]), form, declared(columns), pattern="part-*"), columns
    table, columns = str(paths["Delta append"]), columns_of("DeltaSource")
    sources["DeltaSource"] = DeltaSource(table), columns
    sources["DeltaTableSource"] = DeltaTableSource(table), columns
    streams = {
        way: env.from_source(source, uid=way.replace(" ", "-")) for way, (source, _) in sources.items()
    }
    frame = spark.readStream.format("delta").load(table)
    streams["from_dataframe"] = env.from_dataframe(frame, uid="frame")
    for way, read_in in streams.items():
        sinks[way] = MemorySink(f"{tmp_path}-{way}"), sources.get(way, (None, columns))[1]
        read_in.sink_to(sinks[way][0], uid=f"{way.replace(' ', '-')}-out")
    with started(env, RestoreSettings(str(tmp_path / "savepoint"))) as client:
        await_that(lambda: len(again.rows()) == ROWS, client)
        await_that(lambda: all(len(sink.rows()) == ROWS for sink, _ in sinks.values()), client)
        stop(client)
    check(by_column(again.rows(), COLUMNS), COLUMNS, "state out of a savepoint")
    for way, (sink, columns) in sinks.items():
        check(by_column(sink.rows(), columns), columns, f"{way} by a source")


def frame_of(spark: Any, columns: dict[str, Case]) -> DataFrame:
    """All values as Spark has them."""
    table = pa.Table.from_batches([batch_of(columns, 0)])
    return spark.createDataFrame(table, parse_ddl(declared(columns)))


def kafka_sink(form: Any, **settings: Any) -> KafkaSink:
    return KafkaSink("localhost:1", "out", value=form, **settings)


def decoded_values(values: DataFrame, columns: dict[str, Case]) -> dict[str, list[Any]]:
    """What the source makes of JSON values."""
    raw = values.selectExpr("key", "value", "'in' AS topic", "0 AS partition", "0L AS offset")
    form = Json(declared(columns))
    return read(decoded(raw, form, ["in"], []), columns)


def test_values_of_kafka_are_exact_in_json_and_avro(in_berlin: Any) -> None:
    columns = columns_of("Kafka Json")
    schema, frame = parse_ddl(declared(columns)), frame_of(in_berlin, columns)
    sink = kafka_sink(Json())
    check_columns(sink, schema, "out")
    records = frame.select(*record_columns(sink, schema).values())
    check(decoded_values(records, columns), columns, "Kafka Json")
    columns = columns_of("Kafka Avro")
    schema, frame = parse_ddl(declared(columns)), frame_of(in_berlin, columns)
    check_avro(in_berlin, Avro(), schema, "the value")
    records = frame.select(*record_columns(kafka_sink(Avro()), schema).values())
    wanted = F.lit(json.dumps(avro_schema(Avro(), schema)))
    read_back = records.select(F.call_function("from_avro", F.col("value"), wanted).alias("r")).select("r.*")
    check(read(read_back, columns), columns, "Kafka Avro")


def test_keys_and_raw_values_of_kafka_say_all_of_a_value(in_berlin: Any) -> None:
    """As text; what a text stands for is looked at by what reads JSON."""
    columns = columns_of("Kafka Raw")
    schema, frame = parse_ddl(declared(columns)), frame_of(in_berlin, columns)
    found = []
    for name in columns:
        sink = kafka_sink(Raw(name), key=name)
        check_columns(sink, schema, "out")
        found += [record_columns(sink, schema)[part].alias(f"{part}_{name}") for part in ("key", "value")]
    rows = frame.orderBy("n").select("n", *found).collect()
    assert all(row[f"key_{name}"] == row[f"value_{name}"] for row in rows for name in columns)
    texts = [
        {"n": row["n"], **{name: as_json(row[f"key_{name}"], case.ddl) for name, case in columns.items()}}
        for row in rows
    ]
    made = [(None, "{" + ",".join(f'"{k}":{v}' for k, v in one.items()) + "}") for one in texts]
    values = in_berlin.createDataFrame(made, "key BINARY, value STRING")
    check(decoded_values(values.selectExpr("key", "CAST(value AS BINARY) AS value"), columns), columns, "Raw")


def as_json(raw: bytearray | None, ddl: str) -> str:
    """Return the bytes of one value as what stands for it in JSON."""
    if raw is None:
        return "null"
    if ddl == "BINARY":
        return json.dumps(base64.b64encode(raw).decode())
    text = raw.decode()
    is_number = re.match(r"FLOAT|DOUBLE", ddl) and re.fullmatch(r"[-+0-9.eE]+", text)
    is_bare = is_number or re.match(r"ARRAY|MAP|STRUCT|BOOLEAN|BYTE|SHORT|INT$|LONG|DECIMAL", ddl)
    return text if is_bare else json.dumps(text)


@pytest.mark.parametrize("way", ["Kafka Json", "Kafka Avro", "Kafka Raw"])
def test_what_a_record_of_kafka_cannot_say_is_refused_before_the_start(spark: Any, way: str) -> None:
    form = {"Kafka Json": Json(), "Kafka Avro": Avro(), "Kafka Raw": Raw("v")}[way]
    for case in refused_types(way):
        schema = parse_ddl(f"v {case.ddl}")
        with pytest.raises(SchemaError, match=case.refusal):
            check_columns(kafka_sink(form), schema, "out")
            check_avro(spark, Avro(), schema, "the value")


def read_by(way: str) -> set[str]:
    """Return which columns of a file sink's a source of ours reads without refusing one of their values."""
    source = {"Parquet files": "ParquetFiles", "JSON files": "JsonLines", "CSV files": "CsvFiles"}[way]
    return {name for name, case in columns_of(source).items() if "INTERVAL" not in case.ddl}


@pytest.mark.parametrize("way", ["Delta append", "Delta upsert"])
def test_what_a_table_cannot_hold_is_refused_before_the_start(spark: Any, tmp_path: Path, way: str) -> None:
    mode = {"mode": Upsert(["n"])} if way == "Delta upsert" else {}
    for number, case in enumerate(refused_types(way)):
        sink = DeltaSink(str(tmp_path / f"table-{number}"), **mode)
        subject = SinkUnderTest(lambda sink=sink: sink, lambda: (), spark, tmp_path, f"n INT, v {case.ddl}")
        with pytest.raises(SchemaError, match=case.refusal):
            subject.start()


def test_postgresql_has_what_was_written(postgres_database: TestDatabase, tmp_path: Path) -> None:
    columns = columns_of("PostgreSQL")
    given = {name: (case.ddl, case.given) for name, case in columns.items()}
    found = through(postgres_database, given, tmp_path)
    for name, case in columns.items():
        same(found[name], case.wanted, case.ddl)
    refused = [case for form in FORMS for case in cases_of("PostgreSQL", form, "STRING") if case.refusal]
    assert len(refused) == len(FORMS)
    for number, case in enumerate([*refused, *refused_types("PostgreSQL")], start=2):
        with pytest.raises((BadRecordError, SchemaError), match=case.refusal):
            through(postgres_database, {"v": (case.ddl, case.given)}, tmp_path, number)
