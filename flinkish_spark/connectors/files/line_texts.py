"""Lines of files: the texts that tasks make of records, as sinks of Kafka make theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.files.output_formats import FileFormat, csv_form, has_header, lowered
from flinkish_spark.connectors.formats.csv import lines_of_files
from flinkish_spark.types.arrow_types import arrow_schema, as_schema
from flinkish_spark.types.exact_text import JsonWriter
from flinkish_spark.types.json_columns import replace_months


@dataclass(frozen=True)
class LineTexts:
    """Makes lines of columns, which are in the order of the fields. It is pickled into tasks."""

    kind: FileFormat
    options: Mapping[str, str]
    fields: T.StructType

    def of(self, rows: pa.RecordBatch) -> pa.Array:
        """Return the text of each record, without the end of a line."""
        rows = as_schema(rows, self._given)
        match self.kind:
            case FileFormat.JSON:
                return self._json.write(rows.columns, rows.num_rows)
            case FileFormat.CSV:
                return lines_of_files(self.fields, rows.columns, csv_form(self.options))
        return rows.column(0)

    def header(self) -> bytes:
        """Return the line with the names of the columns; nothing if files have none."""
        if not has_header(self.kind, self.options):
            return b""
        names = [pa.array([name], pa.string()) for name in self.fields.names]
        texts = T.StructType([T.StructField(name, T.StringType()) for name in self.fields.names])
        line: str = lines_of_files(texts, names, csv_form(self.options))[0].as_py()
        return line.encode()

    @cached_property
    def _given(self) -> pa.Schema:
        return arrow_schema(replace_months(self.fields, T.IntegerType()))

    @cached_property
    def _json(self) -> JsonWriter:
        ignores_nulls = lowered(self.options).get("ignorenullfields", "true").lower() == "true"
        return JsonWriter(self.fields, null_fields=not ignores_nulls)
