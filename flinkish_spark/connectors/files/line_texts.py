"""Lines of files: the texts that tasks make of records, as sinks of Kafka make theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.connectors.files.output_formats import FileFormat, csv_form, has_header, lowered
from flinkish_spark.connectors.formats.csv import ReadAsNull, lines_of_files
from flinkish_spark.core.errors import BAD_RECORD_MARKER, BadRecordError
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
        """Return each record's text, without the end of a line; raise BadRecordError if it has none."""
        rows = as_schema(rows, self._given)
        match self.kind:
            case FileFormat.JSON:
                return self._json.write(rows.columns, rows.num_rows)
            case FileFormat.CSV:
                return self._csv(rows)
        return rows.column(0)

    def _csv(self, rows: pa.RecordBatch) -> pa.Array:
        form = csv_form(self.options)
        try:
            return lines_of_files(self.fields, rows.columns, form)
        except ReadAsNull as found:
            shown = rows.slice(found.row, 1).to_pylist()[0]
            what = (
                f"the text of {found.name} not being nullValue, {form.null!r}, which readers take for null,"
            )
            text = f"{BAD_RECORD_MARKER} {what} is violated by the record {str(shown)[:1_000]}"
            raise BadRecordError(
                " ".join(text.split()), what_to_do="give another nullValue, or write FileFormat.JSON"
            ) from None

    def header(self) -> bytes:
        """Return the line with the names of the columns; nothing if files have none."""
        if not has_header(self.kind, self.options):
            return b""
        names = [pa.array([name], pa.string()) for name in self.fields.names]
        texts = T.StructType([T.StructField(name, T.StringType()) for name in self.fields.names])
        # A name is no value: it may be the text of a null.
        line: str = lines_of_files(texts, names, replace(csv_form(self.options), null=""))[0].as_py()
        return line.encode()

    @cached_property
    def _given(self) -> pa.Schema:
        return arrow_schema(replace_months(self.fields, T.IntegerType()))

    @cached_property
    def _json(self) -> JsonWriter:
        ignores_nulls = lowered(self.options).get("ignorenullfields", "true").lower() == "true"
        return JsonWriter(self.fields, null_fields=not ignores_nulls)
