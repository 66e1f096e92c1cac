"""A frame becomes files: tasks get its columns and write them, and of Avro the records that Spark encodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import avro_schema_of
from flinkish_spark.connectors.files.buckets import BucketAssigner
from flinkish_spark.connectors.files.line_texts import LineTexts
from flinkish_spark.connectors.files.output_formats import (
    CODECS,
    CODECS_OF_LINES,
    ENCODING,
    EXTENSIONS,
    OF_PARQUET,
    FileFormat,
    checked_option,
    codec_of,
    line_separator,
    lowered,
)
from flinkish_spark.connectors.files.task_files import FOLDER, RECORD, FileSettings, WriteFiles
from flinkish_spark.connectors.row_count import reports
from flinkish_spark.transport import columns as C
from flinkish_spark.types.ddl import quoted
from flinkish_spark.types.json_columns import without_intervals

AVRO_SCHEMA = "avro.schema"


@dataclass(frozen=True)
class WriteSettings:
    kind: FileFormat
    options: Mapping[str, str]
    assigners: tuple[BucketAssigner, ...] = ()
    #: Above which another file begins; None for no limit.
    part_bytes: int | None = None

    @property
    def bucket_names(self) -> tuple[str, ...]:
        return tuple(name for one in self.assigners for name in one.names)


@dataclass(frozen=True)
class FrameFiles:
    """Lets tasks write a frame, each record into the folder that columns of it say."""

    kind: FileFormat
    #: Columns that are folders, outermost first; they are in no file, and neither are those left out.
    folders: tuple[str, ...]
    settings: FileSettings
    fields: T.StructType

    @classmethod
    def of(
        cls, spark: SparkSession, settings: WriteSettings, fields: T.StructType, folders: tuple[str, ...]
    ) -> FrameFiles:
        """Return what writes such fields, those of the files alone."""
        told = file_settings(spark, settings.kind, settings.options, fields)
        told = replace(told, folders=folders, part_bytes=settings.part_bytes)
        return cls(settings.kind, folders, told, fields)

    def write(self, rows: DataFrame, folder: Path) -> Sequence[dict[str, Any]]:
        """Return each task's report; `rows` have a sink's control columns in front."""
        is_record = F.col(C.KIND) == int(C.Kind.RECORD)
        control = [F.col(name) for name in C.SINK_CONTROL]
        records = record_columns(self.kind, self.fields, self.settings.says)
        # Of a control row nothing is made: it has no values, and a format may have no nulls.
        made = [F.when(is_record, column).alias(name) for name, column in records.items()]
        # An empty text is null's folder, too.
        texts = [F.coalesce(F.col(quoted(name)).cast("string"), F.lit("")) for name in self.folders]
        places = [text.alias(f"{FOLDER}{at}") for at, text in enumerate(texts)]
        frame = rows.select(*control, *made, *places)
        if places:
            # One file at a time is open in a task, however many folders there are.
            frame = frame.sortWithinPartitions(*(f"{FOLDER}{at}" for at in range(len(places))))
        return reports(frame, WriteFiles(self.settings, str(folder)))


def record_columns(kind: FileFormat, fields: T.StructType, says: Mapping[str, str]) -> dict[str, Column]:
    """Return what tasks get of a record, by name: its columns, or the bytes that it is in a file."""
    columns = {one.name: F.col(quoted(one.name)) for one in fields}
    if kind is FileFormat.AVRO:
        struct = F.struct(*(column.alias(name) for name, column in columns.items()))
        return {RECORD: F.call_function("to_avro", struct, F.lit(says[AVRO_SCHEMA]))}
    # PySpark has no Arrow type for an interval of months, and a number is what Parquet has.
    return {one.name: without_intervals(columns[one.name], one.dataType) for one in fields}


def file_settings(
    spark: SparkSession, kind: FileFormat, options: Mapping[str, str], fields: T.StructType
) -> FileSettings:
    """Return what tasks are told of files with these fields; the session says what no option does."""
    found = lowered(options)
    said = codec_of(kind, found)
    says = {"org.apache.spark.version": spark.version}
    if kind.is_lines:
        extension = CODECS_OF_LINES[said or "none"]
        texts = LineTexts(kind, options, fields)
        encoding = next((found[name] for name in ENCODING if name in found), "utf-8").lower()
        return FileSettings(
            kind,
            _of_pyarrow(said),
            EXTENSIONS.get(kind, f".{kind.value}") + extension,
            (),
            texts=texts,
            separator=line_separator(options),
            header=texts.header(),
            encoding=re.sub(r"^utf-?(\d+)", r"utf-\1", encoding),
        )
    codec = said or session_codec(spark, kind) or "snappy"
    extension = f"{CODECS[kind][codec]}.{kind.value}"
    if kind is FileFormat.AVRO:
        name, namespace = found.get("recordname", "topLevelRecord"), found.get("recordnamespace", "")
        says[AVRO_SCHEMA] = avro_schema_of(spark, fields, name, namespace)
        return FileSettings(kind, _of_pyarrow(codec), extension, (), says=says)
    says["org.apache.spark.sql.parquet.row.metadata"] = fields.json()
    given = {OF_PARQUET[name][0]: checked_option(name, found[name]) for name in OF_PARQUET if name in found}
    more = {} if "" not in given else {"group_bytes": given.pop("")}
    arrows = {**given, "store_decimal_as_integer": True}
    return FileSettings(kind, _of_pyarrow(codec, "none"), extension, (), says=says, parquet=arrows, **more)


def session_codec(spark: SparkSession, kind: FileFormat) -> str | None:
    """Return what the session says of a format's codec; of lines it says nothing."""
    found = None if kind.is_lines else spark.conf.get(f"spark.sql.{kind.value}.compression.codec", None)
    return None if found is None else found.lower()


def _of_pyarrow(codec: str | None, none: str = "") -> str:
    return none if codec in (None, "none", "uncompressed") else str(codec).removesuffix("_raw")
