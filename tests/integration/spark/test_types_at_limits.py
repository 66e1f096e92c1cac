"""Every type at its limits through a job: a Python source, state, a savepoint, sinks, sources again."""

from __future__ import annotations

import base64
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from flinkish_spark import (
    Avro,
    DeltaSink,
    FileFormat,
    FileSink,
    ForeachCheckpointSink,
    ForeachSink,
    Json,
    KafkaSink,
    KeyedProcessFunction,
    MemorySink,
    OverwritePartitions,
    PrintSink,
    Raw,
    TwoPhaseCommitSink,
    Upsert,
    ValueStateDescriptor,
)
from flinkish_spark.connectors.formats.avro_format import derive_schema
from flinkish_spark.connectors.kafka.record_encoder import check_columns
from flinkish_spark.connectors.kafka.records import Decoding
from flinkish_spark.connectors.splits import SplitSource
from flinkish_spark.contracts.source import NO_JOB
from flinkish_spark.core.errors import BadRecordError, SchemaError
from flinkish_spark.savepoints.files import RestoreSettings
from flinkish_spark.sources import (
    CsvFiles,
    DeltaSource,
    DeltaTableSource,
    FileSource,
    JsonLines,
    ParquetFiles,
    TextLines,
)
from flinkish_spark.testing.sink_contract import SinkUnderTest
from flinkish_spark.types.ddl import parse_ddl
from flinkish_spark.types.rows import arrow_schema
from flinkish_spark.types.to_python import to_values
from tests.support.databases import TestDatabase
from tests.support.encoded import encoded_records
from tests.support.jobs import await_that, environment
from tests.support.savepoint_support import started, stop, stop_with
from tests.support.types_at_limits import (
    CALLED,
    FORMS,
    OF_SPARK,
    PLAIN,
    Case,
    cases_of,
    columns_of,
    refused_types,
    same,
    sample_of,
)
from tests.support.types_databases import back, through
from tests.support.types_files import column, read_files

pytestmark = pytest.mark.timeout(900)

COLUMNS = columns_of("rows of SplitSource")
ROWS = max(len(case.given) for case in COLUMNS.values())
FILES = {"Parquet files": ParquetFiles(), "JSON files": JsonLines(), "CSV files": CsvFiles()}
#: Without it Spark refuses plans that convert to TIME, as those of operators do.
TIME_OF_DAY = "spark.sql.timeType.enabled"
PREFIX = "of types> "
DELTA_MODES: dict[str, dict[str, Any]] = {
    "Delta append": {},
    "Delta upsert": {"mode": Upsert(["n"])},
    "Delta overwrite": {"mode": OverwritePartitions(), "partition_by": ["p"]},
}


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

    def __init__(self, columns: dict[str, Case], rounds: int) -> None:
        self.columns, self.rounds, self.schema = columns, rounds, declared(columns)

    def splits(self) -> list[str]:
        return ["one"]

    def latest(self, split: str, start: int, limit: int | None) -> int:
        return self.rounds * ROWS

    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        for first in range(start, end, ROWS):
            yield batch_of(self.columns, first)


class Remembers(KeyedProcessFunction):
    """Keeps the first row of a key, and emits it for each of the key's."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    def open(self, context: Any) -> None:
        self.row = context.get_state(ValueStateDescriptor("row", self.schema))

    def process_element(self, element: Any, ctx: Any) -> Iterator[Any]:
        if self.row.value() is None:
            self.row.update(tuple(element[:-1]))
        yield self.row.value()


class Parts:
    """Streams of some of the columns; one for all ways that have the same, since a plan is as wide as all."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.known = stream, dict[tuple[str, ...], Any]()

    def of(self, columns: Iterable[str]) -> Any:
        names = tuple(columns)
        if names not in self.known:
            self.known[names] = self.stream.transform(lambda frame: frame.select("n", *names))
        return self.known[names]


class Pickled(TwoPhaseCommitSink):
    """Puts what `write` is given into files, which have another name once they are committed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, transaction: Any) -> Any:
        return self.folder / transaction.name, []

    def write(self, handle: Any, record: Any) -> None:
        handle[1].append(record)

    def flush(self, handle: Any) -> str:
        handle[0].write_bytes(pickle.dumps(handle[1]))
        return str(handle[0])

    def commit(self, committable: str, checkpoint: Any) -> None:
        if (staged := Path(committable)).exists():
            staged.rename(staged.with_suffix(".done"))

    def abort(self, committable: str) -> None:
        Path(committable).unlink(missing_ok=True)

    def rows(self) -> list[Any]:
        return [row for path in self.folder.glob("*.done") for row in pickle.loads(path.read_bytes())]


def printed(text: str, columns: dict[str, Case]) -> list[dict[str, Any]]:
    """Return what lines of a PrintSink stand for."""
    lines = [json.loads(line[len(PREFIX) :]) for line in text.split("\n") if line.startswith(PREFIX)]
    kinds = {name: parse_ddl(case.ddl) for name, case in columns.items()}
    return [
        {"n": line["n"], **{name: back(line[name], kind, in_json=True) for name, kind in kinds.items()}}
        for line in lines
    ]


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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(sample_of, id="a sample"),
        pytest.param(dict, id="all forms of all types"),
    ],
)
def test_a_job_hands_on_what_it_was_given_in_state_savepoint_sinks_and_sources(
    in_berlin: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: Callable[[Any], Any]
) -> None:
    spark, paths = in_berlin, {}
    everything = chosen(COLUMNS)

    def taken(way: str) -> dict[str, Case]:
        found: dict[str, Case] = chosen(columns_of(way))
        return found

    env = environment(spark, tmp_path / "job")
    stream = env.from_source(Everything(everything, 1), uid="in")
    memory, kept = MemorySink(f"{tmp_path}-memory"), MemorySink(f"{tmp_path}-kept")
    parts = Parts(stream)
    parts.of(taken("Memory")).sink_to(memory, uid="memory")
    stream.transform(lambda frame: frame.selectExpr("*", f"n % {ROWS} AS k")).key_by("k").process(
        Remembers(declared(everything)), output=declared(everything), uid="state"
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
            parts.of(taken(way)).sink_to(FileSink(str(paths[way]), form, options), uid=form.value)
    paths["TEXT files"], [text] = tmp_path / "text", columns_of("TEXT files")
    is_line = ~F.coalesce(F.col(text), F.lit("")).contains("\n")
    stream.transform(lambda frame: frame.where(is_line).select(text)).sink_to(
        FileSink(str(paths["TEXT files"]), FileFormat.TEXT), uid="text"
    )
    rows = parts.of(taken("Delta append")).transform(lambda frame: frame.withColumn("p", F.lit("all")))
    for way, settings in DELTA_MODES.items():
        paths[way] = tmp_path / way.replace(" ", "-")
        rows.sink_to(DeltaSink(str(paths[way]), **settings), uid=way.replace(" ", "-"))
    called: dict[str, list[Any]] = {"ForeachSink": [], "ForeachCheckpointSink": []}
    two_phase = Pickled(tmp_path / "two-phase")
    two_phase.folder.mkdir()
    for sink in (
        ForeachSink(lambda row, _: called["ForeachSink"].append(row)),
        ForeachCheckpointSink(lambda rows, _: called["ForeachCheckpointSink"].extend(rows)),
        PrintSink(PREFIX),
        two_phase,
    ):
        parts.of(taken("ForeachSink")).sink_to(sink, uid=type(sink).__name__)
    with started(env) as client:
        await_that(lambda: len(memory.rows()) == len(kept.rows()) == ROWS, client, timeout_s=420)
        stop_with(client, tmp_path / "savepoint")
    called["PrintSink"] = printed(capsys.readouterr().out, taken("PrintSink"))
    called["TwoPhaseCommitSink"] = two_phase.rows()
    for way in CALLED:
        check(by_column(called[way], taken(way)), taken(way), way)
    check(by_column(memory.rows(), taken("Memory")), taken("Memory"), "Memory")
    check(by_column(kept.rows(), everything), everything, "state")
    for way in DELTA_MODES:
        columns = taken(way)
        check(read(spark.read.format("delta").load(str(paths[way])), columns), columns, way)
    for way in ("Parquet files", "JSON files", "Avro files"):
        columns, reader = taken(way), spark.read.format(way.split()[0].lower())
        if way != "Avro files":
            reader = reader.schema(declared(columns))
        check(read(reader.load(str(paths[way])), columns), columns, f"{way} by Spark")

    case = columns_of("TEXT files")[text]
    lines = read_files(
        FileSource(str(paths["TEXT files"]), TextLines(), "v STRING", pattern="part-*"), tmp_path / "lines"
    )
    by_spark = [row.value for row in spark.read.text(str(paths["TEXT files"])).collect()]
    # Without the text that is several lines; rows below the values are null.
    wanted = sorted([*case.wanted, *[""] * (ROWS - 1 - len(case.wanted))])
    for found in (lines, by_spark):
        same(sorted(found), wanted, case.ddl)

    # What was written is read by sources of ours, beside the state out of the savepoint.
    env = environment(spark, tmp_path / "again")
    again, sinks = MemorySink(f"{tmp_path}-again"), {}
    env.from_source(Everything(everything, 2), uid="in").transform(
        lambda frame: frame.selectExpr("*", f"n % {ROWS} AS k")
    ).key_by("k").process(Remembers(declared(everything)), output=declared(everything), uid="state").sink_to(
        again, uid="kept"
    )
    sources: dict[str, tuple[Any, dict[str, Case]]] = {}
    for way, form in FILES.items():
        columns = {name: case for name, case in taken(way).items() if name in read_by(way)}
        sources[way] = FileSource(str(paths[way]), form, declared(columns), pattern="part-*"), columns
    table, columns = str(paths["Delta append"]), taken("DeltaSource")
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
    check(by_column(again.rows(), everything), everything, "state out of a savepoint")
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
    rows_of = Decoding(form).deserializer("in", NO_JOB, ["in"])
    return read(rows_of.rows(raw, ["in"], []), columns)


#: By `n`: what Spark makes, and what it says of a value that it reads again.
MONTHS = {
    1: ("INTERVAL '-178956970-8' YEAR TO MONTH", "INTERVAL '-178956970-8' YEAR TO MONTH"),
    2: ("INTERVAL '178956970-7' YEAR TO MONTH", "INTERVAL '178956970-7' YEAR TO MONTH"),
    3: ("CAST(NULL AS INTERVAL YEAR TO MONTH)", None),
}
VARIANTS = {
    1: (
        "to_variant_object(named_struct('b', X'00FF', 'd', DATE'0001-01-01', 'f', DOUBLE('NaN'),"
        " 't', TIMESTAMP'2026-10-25 00:30:00.123456Z'))",
        'OBJECT<b: BINARY, d: DATE, f: DOUBLE, t: TIMESTAMP> {"b":"AP8=","d":"0001-01-01","f":"NaN",'
        '"t":"2026-10-25 00:30:00.123456+00:00"}',
    ),
    2: ("CAST(9223372036854775807 AS VARIANT)", "BIGINT 9223372036854775807"),
    # A null of JSON is a value.
    3: ("parse_json('null')", "VOID null"),
    4: ("CAST(NULL AS VARIANT)", None),
}


@pytest.mark.nightly
def test_types_that_only_spark_has_are_exact_where_they_are_taken(spark: Any, tmp_path: Path) -> None:
    def made(values: dict[int, Any], name: str) -> str:
        return f"CASE {' '.join(f'WHEN n = {n} THEN {sql}' for n, (sql, _) in values.items())} END AS {name}"

    def in_forms(v: str) -> tuple[str, ...]:
        return f"{v}", f"ARRAY({v}, NULL) AS {v}_a", f"MAP('k', {v}) AS {v}_m", f"STRUCT({v} AS v) AS {v}_s"

    def prepared(frame: DataFrame) -> DataFrame:
        both = frame.selectExpr("n", made(MONTHS, "months"), made(VARIANTS, "variant"))
        return both.selectExpr("n", "'all' AS p", *in_forms("months"), *in_forms("variant"))

    env = environment(spark, tmp_path / "job")
    parts = Parts(env.from_collection([(n,) for n in VARIANTS], "n INT", uid="in").transform(prepared))
    ways = [(kind, way) for kind, exact in OF_SPARK.items() for way in exact if "Kafka" not in way]
    for number, (kind, way) in enumerate(ways):
        v, path = "variant" if kind == "VARIANT" else "months", str(tmp_path / str(number))
        columns = [v] if way == "CSV files" else [v, f"{v}_a", f"{v}_m", f"{v}_s"]
        if way in DELTA_MODES:
            parts.of([*columns, "p"]).sink_to(DeltaSink(path, **DELTA_MODES[way]), uid=f"sink-{number}")
        else:
            sink = FileSink(path, FileFormat(way.split()[0].lower()))
            parts.of(columns).sink_to(sink, uid=f"sink-{number}")
    env.execute()
    for number, (kind, way) in enumerate(ways):
        v, reader = "months", spark.read.format("delta" if way in DELTA_MODES else way.split()[0].lower())
        shown, wanted = "CAST({0} AS STRING)", [*(one for _, one in MONTHS.values()), None]
        if kind == "VARIANT":
            v, wanted = "variant", [one for _, one in VARIANTS.values()]
            shown = "schema_of_variant({0}) || ' ' || to_json({0})"
        if way in ("JSON files", "CSV files"):
            nested = f", {v}_a ARRAY<{kind}>, {v}_m MAP<STRING,{kind}>, {v}_s STRUCT<v:{kind}>"
            reader = reader.schema(f"n INT, {v} {kind}{nested if way == 'JSON files' else ''}")
        forms = [v] if way == "CSV files" else [v, f"{v}_a[0]", f"{v}_m['k']", f"{v}_s.v"]
        frame = reader.load(str(tmp_path / str(number))).orderBy("n")
        found = frame.selectExpr(*(shown.format(form) for form in forms)).collect()
        assert [tuple(row) for row in found] == [(one,) * len(forms) for one in wanted], (kind, way)


def test_values_of_kafka_are_exact_in_json_and_avro(in_berlin: Any) -> None:
    columns = columns_of("Kafka Json")
    schema, frame = parse_ddl(declared(columns)), frame_of(in_berlin, columns)
    sink = kafka_sink(Json())
    check_columns(sink, schema, "out")
    records = encoded_records(sink, frame)
    check(decoded_values(records, columns), columns, "Kafka Json")
    columns = columns_of("Kafka Avro")
    schema, frame = parse_ddl(declared(columns)), frame_of(in_berlin, columns)
    Avro().check_start(in_berlin, schema, "the value")
    records = encoded_records(kafka_sink(Avro()), frame)
    wanted = F.lit(json.dumps(derive_schema(schema)))
    read_back = records.select(F.call_function("from_avro", F.col("value"), wanted).alias("r")).select("r.*")
    check(read(read_back, columns), columns, "Kafka Avro")


@pytest.mark.nightly
def test_keys_and_raw_values_of_kafka_say_all_of_a_value(in_berlin: Any) -> None:
    """As text; what a text stands for is looked at by what reads JSON."""
    columns = columns_of("Kafka Raw")
    schema, frame = parse_ddl(declared(columns)), frame_of(in_berlin, columns)
    found, numbers = [], [row.n for row in frame.orderBy("n").select("n").collect()]
    for name in columns:
        sink = kafka_sink(Raw(name), key=name)
        check_columns(sink, schema, "out")
        found.append(encoded_records(sink, frame.orderBy("n")).collect())
    rows = [
        {
            f"{part}_{name}": row[part]
            for name, row in zip(columns, of_row, strict=True)
            for part in ("key", "value")
        }
        for of_row in zip(*found, strict=True)
    ]
    assert all(row[f"key_{name}"] == row[f"value_{name}"] for row in rows for name in columns)
    texts = [
        {"n": n, **{name: as_json(row[f"key_{name}"], case.ddl) for name, case in columns.items()}}
        for n, row in zip(numbers, rows, strict=True)
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
            Avro().check_start(spark, schema, "the value")


def read_by(way: str) -> set[str]:
    """Return which columns of a file sink's a source of ours reads without refusing one of their values."""
    source = {"Parquet files": "ParquetFiles", "JSON files": "JsonLines", "CSV files": "CsvFiles"}[way]
    return {name for name, case in columns_of(source).items() if "INTERVAL" not in case.ddl}


@pytest.mark.parametrize("way", DELTA_MODES)
def test_what_a_table_cannot_hold_is_refused_before_the_start(spark: Any, tmp_path: Path, way: str) -> None:
    for number, case in enumerate(refused_types(way)):
        sink = DeltaSink(str(tmp_path / f"table-{number}"), **DELTA_MODES[way])
        ddl = f"n INT, p STRING, v {case.ddl}"
        subject = SinkUnderTest(lambda sink=sink: sink, lambda: (), spark, tmp_path, ddl)
        with pytest.raises(SchemaError, match=case.refusal):
            subject.start()


@pytest.mark.parametrize("way", ["PostgreSQL", "MariaDB"])
def test_databases_have_what_was_written(request: pytest.FixtureRequest, tmp_path: Path, way: str) -> None:
    fixture = {"PostgreSQL": "postgres_database", "MariaDB": "mariadb_database"}[way]
    database: TestDatabase = request.getfixturevalue(fixture)
    columns = columns_of(way)
    given = {name: (case.ddl, case.given) for name, case in columns.items()}
    found = through(database, given, tmp_path)
    for name, case in columns.items():
        same(found[name], case.wanted, case.ddl)
    sent = [case for form in FORMS for kind in PLAIN for case in cases_of(way, form, kind)]
    # The interval that no row can have, and types that are refused with all of their values.
    refused = [case for case in sent if case.refusal and case.given]
    for number, case in enumerate(refused, start=2):
        with pytest.raises((BadRecordError, SchemaError), match=case.refusal):
            through(database, {"v": (case.ddl, case.given)}, tmp_path, number)
