"""Tables of a script: the source or sink that the provider and options of a table stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyspark.sql import DataFrame, SparkSession

from flinkish_spark import (
    Append,
    ColumnBuckets,
    Csv,
    DeltaSink,
    FileFormat,
    FileSink,
    Json,
    KafkaSink,
    KafkaSource,
    Raw,
    StartingOffsets,
    String,
    Upsert,
)
from flinkish_spark.bridge.plans import APPEND, UPDATE
from flinkish_spark.bridge.session import FROM_THE_JVM
from flinkish_spark.bridge.sql_statements import CreateTable
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.contracts.source import Source
from flinkish_spark.core.changelogs import ROW_KIND
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.secrets import secret_of
from flinkish_spark.sinks import JdbcSink
from flinkish_spark.sources import (
    CsvFiles,
    DeltaSource,
    Discovery,
    FileSource,
    JsonLines,
    ParquetFiles,
    TextLines,
)
from flinkish_spark.types.ddl import ddl_of

Made = TypeVar("Made", Source, Sink)


class TableOptions:
    """The options of one table: each is asked for once, and one that nobody asks for is refused."""

    def __init__(self, table: CreateTable) -> None:
        self.table = table
        self._left = dict(table.options)

    def require(self, name: str) -> str:
        if name not in self._left:
            raise GraphError(
                f"{self.table.named} has no option '{name}'",
                what_to_do=f"add it: OPTIONS ({name} '...')",
            )
        return self._left.pop(name)

    def find(self, name: str, default: str = "") -> str:
        return self._left.pop(name, default)

    def find_count(self, name: str) -> int:
        value = self.find(name, "0")
        if not value.isdecimal():
            raise GraphError(
                f"{self.table.named} has the option {name} '{value}'",
                what_to_do="give a whole number",
            )
        return int(value)

    def check_columns(self, *names: str) -> None:
        """Refuse other columns than those that such a source has by itself."""
        if self.table.columns.fields and self.table.columns.names != [*names]:
            raise GraphError(
                f"{self.table.named} has columns",
                why=f"as a source it has {', '.join(names) or 'those of the table itself'}",
                what_to_do="leave the columns out",
            )

    def choose(self, name: str, choices: Mapping[str, Any], default: str) -> Any:
        value = self.find(name, default)
        if value.lower() not in choices:
            raise GraphError(
                f"{self.table.named} has the option {name} '{value}'",
                what_to_do=f"use one of {', '.join(choices)}",
            )
        return choices[value.lower()]

    def take(self, prefix: str) -> dict[str, str]:
        return {name: self._left.pop(name) for name in [*self._left] if name.startswith(prefix)}

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.find(name).split(",") if part.strip())

    def end(self) -> None:
        for name in self._left:
            raise GraphError(
                f"{self.table.named} has the option '{name}'",
                why=f"a table of {self.table.provider} has no such option, or not here",
                what_to_do="leave it out; docs/sql.md has the options",
            )

    def refuse_partitions(self) -> None:
        if self.table.partition_by:
            raise GraphError(
                f"{self.table.named} is PARTITIONED BY",
                why=f"a table of {self.table.provider} has no partitions of that kind, or not here",
                what_to_do="leave it out",
            )

    @property
    def schema(self) -> str:
        """The columns, which a source of records needs."""
        if not self.table.columns.fields:
            raise GraphError(
                f"{self.table.named} has no columns", what_to_do="write CREATE TABLE name (column TYPE, ...)"
            )
        return ddl_of(self.table.columns)


def _read_kafka(options: TableOptions) -> Source:
    values = {
        "json": lambda: Json(options.schema),
        "csv": lambda: Csv(options.schema),
        "string": lambda: _check_one_column(options, String()),
        "raw": lambda: _check_one_column(options, Raw()),
    }
    starts = {"earliest": StartingOffsets.EARLIEST, "latest": StartingOffsets.LATEST}
    options.refuse_partitions()
    return KafkaSource(
        options.require("kafka.bootstrap.servers"),
        options.names("topic") or (options.require("topic"),),
        value=options.choose("format", values, "json")(),
        group_id=options.find("group.id"),
        starting_offsets=options.choose("startingoffsets", starts, "earliest"),
        max_offsets_per_trigger=options.find_count("maxoffsetspertrigger"),
        options=options.take("kafka."),
    )


def _check_one_column(options: TableOptions, form: String | Raw) -> String | Raw:
    options.check_columns("value")
    return form


def _write_kafka(options: TableOptions, mode: str) -> Sink:
    values = {"json": Json, "csv": Csv, "string": String, "raw": Raw}
    options.refuse_partitions()
    return KafkaSink(
        options.require("kafka.bootstrap.servers"),
        options.require("topic"),
        key=options.find("key"),
        value=options.choose("format", values, "json")(),
        row_kind=ROW_KIND if mode == UPDATE else "",
        options=options.take("kafka."),
    )


def _read_files(options: TableOptions) -> Source:
    formats = {"json": JsonLines, "csv": CsvFiles, "parquet": ParquetFiles, "text": TextLines}
    discoveries = {"once": Discovery.ONCE, "continuous": Discovery.CONTINUOUS}
    options.refuse_partitions()
    return FileSource(
        options.require("path"),
        options.choose("format", formats, "parquet")(),
        options.schema,
        discovery=options.choose("discovery", discoveries, "continuous"),
        pattern=options.find("pattern", "*"),
    )


def _write_files(options: TableOptions, mode: str) -> Sink:
    formats = {one.name.lower(): one for one in FileFormat}
    _refuse_update(options, mode)
    return FileSink(
        options.require("path"),
        options.choose("format", formats, "parquet"),
        bucket_by=[ColumnBuckets(name) for name in options.table.partition_by] or None,
    )


def _read_delta(options: TableOptions) -> Source:
    options.refuse_partitions()
    options.check_columns()
    return DeltaSource(options.require("path"))


def _write_delta(options: TableOptions, mode: str) -> Sink:
    keys = options.names("keys")
    if not keys:
        _refuse_update(options, mode)
    written = Upsert(keys=keys, row_kind=ROW_KIND if mode == UPDATE else "") if keys else Append()
    return DeltaSink(options.require("path"), partition_by=options.table.partition_by, mode=written)


def _write_jdbc(options: TableOptions, mode: str) -> Sink:
    keys = options.names("keys")
    if not keys:
        _refuse_update(options, mode)
    options.refuse_partitions()
    return JdbcSink(
        options.require("url"),
        options.require("dbtable"),
        key=keys,
        mode="upsert" if keys else "insert",
        user=options.find("user"),
        password=options.find("password"),
        row_kind=ROW_KIND if mode == UPDATE else "",
    )


def _refuse_update(options: TableOptions, mode: str) -> None:
    if mode == UPDATE:
        table = options.table
        raise GraphError(
            f"{table.named} has outputMode 'update' and no keys",
            why="a changed row replaces the one with its keys",
            what_to_do="add keys 'column, ...', or use a sink that upserts",
        )


_SOURCES: Mapping[str, Callable[[TableOptions], Source]] = {
    "kafka": _read_kafka,
    "files": _read_files,
    "delta": _read_delta,
}
_SINKS: Mapping[str, Callable[[TableOptions, str], Sink]] = {
    "kafka": _write_kafka,
    "files": _write_files,
    "delta": _write_delta,
    "jdbc": _write_jdbc,
}


def make_source(table: CreateTable) -> Source:
    return _make(table, _SOURCES, "read")


def make_lookup_table(table: CreateTable) -> Callable[[SparkSession], DataFrame]:
    """Return the function that reads a table of a database by Spark, anew in each micro-batch."""
    options = TableOptions(table)
    options.refuse_partitions()
    options.check_columns()
    given = {"url": options.require("url"), "dbtable": options.require("dbtable")}
    given |= {name: value for name in ("user", "driver") if (value := options.find(name))}
    password = options.find("password")
    options.end()

    def load(spark: SparkSession) -> DataFrame:
        secret = {"password": secret_of(password).read()} if password else {}
        try:
            return spark.read.format("jdbc").options(**given, **secret).load()
        except FROM_THE_JVM as error:
            raise GraphError(
                f"Spark cannot read {table.named}",
                why=describe_error(error),
                what_to_do="correct its options, and give Spark the JDBC driver: its JAR by --packages, its "
                "class as the option driver",
            ) from None

    return load


def make_sink(table: CreateTable) -> tuple[Sink, str]:
    mode = str(TableOptions(table).choose("outputmode", {APPEND: APPEND, UPDATE: UPDATE}, APPEND))
    return _make(table, _SINKS, "written", mode), mode


def _make(table: CreateTable, known: Mapping[str, Callable[..., Made]], use: str, *settings: str) -> Made:
    if table.provider not in known:
        raise GraphError(
            f"{table.named} is USING {table.provider}",
            why=f"tables that are {use} are of {', '.join(known)}",
            what_to_do="use one of them",
        )
    options = TableOptions(table)
    options.find("outputmode")
    try:
        made = known[table.provider](options, *settings)
    except ConfigError as error:
        raise GraphError(
            f"{table.named} cannot be {use}",
            why=str(error),
            what_to_do="correct its options",
        ) from error
    options.end()
    return made
