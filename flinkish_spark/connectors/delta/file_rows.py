"""Reads the rows of one file of a Delta table, under the table's column names."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flinkish_spark.connectors.delta.files import TablePath
from flinkish_spark.connectors.delta.log import TableFile, find_deleted_rows, number_of, widths_of
from flinkish_spark.connectors.delta.table import TableInfo, physical_name
from flinkish_spark.connectors.files.input_formats import FilePart, is_large, parts_of_parquet
from flinkish_spark.connectors.files.source import FoundFile, naming
from flinkish_spark.connectors.parquet_calendar import open_parquet, read_batches
from flinkish_spark.core.errors import InputLostError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.parquet as pq


_ROWS_AT_ONCE = 10_000
_FIELD_ID = b"PARQUET:field_id"
#: A column of change files that no table's schema has; it keeps its name under any column mapping.
_CHANGE_TYPE = {"name": "_change_type", "type": "string", "metadata": {}}
#: Entries beside a listed file's partition values: the version in which its rows are not deleted, and the one
#: in which they are. For a task the versions are replaced by bitmaps of rows. No column has such a name.
THERE_IN, GONE_IN = "flinkish:there", "flinkish:gone-in"


@dataclass(frozen=True)
class FileRows:
    """Reads files of any version of a table with the schema of one version."""

    table: TablePath
    metadata: TableInfo

    def find_parts(
        self, file: TableFile, more: Mapping[str, str | None], stats: Mapping[str, Any] = MappingProxyType({})
    ) -> list[FoundFile]:
        """Return a file as a source lists it, split into parts; raise InputLostError if it is gone."""
        path = str(self.table / file.path)
        try:
            stat = stats.get(file.path) or (self.table / file.path).stat()
            parts: Sequence[FilePart] = [FilePart(rows=file.rows)]
            if is_large(stat.st_size):
                # Reading a footer is an extra request, and most files are small.
                with naming(path), self._open(file.path) as content:
                    parts = parts_of_parquet(content, stat.st_size)
        except FileNotFoundError:
            raise InputLostError(
                f"the file {path} of the Delta table is gone",
                why="VACUUM removed it before the job had come to read it",
                what_to_do="restore the file, or begin at a newer version in a new job_dir",
            ) from None
        # A value that the log lacks is null, whatever the file holds.
        values = file.partition or {}
        # An empty text is null for every type, as Delta's protocol says: deltalake has replaced it by null in
        # a version already. Spark returns the empty text, which cannot be restored here.
        said = {
            name: values.get(self.metadata.physical_name(name)) or None for name in self.metadata.partition_by
        }
        return FoundFile.parts_of(file.path, stat, parts, {**said, **more})

    def add_deleted_rows(self, file: FoundFile) -> FoundFile:
        """Return a listed file with bitmaps of deleted rows in place of versions: tasks read no vectors."""
        # The log has a vector of this file: if it is not found, this fails, so no deleted row comes back.
        deleted = {
            name: base64.b64encode(zlib.compress(_slice_bits(file, bits[file.path]).tobytes(), 1)).decode()
            for name in (THERE_IN, GONE_IN)
            if (version := file.partition.get(name)) is not None
            for bits in [find_deleted_rows(self.table, self.metadata.id, int(version))]
        }
        return replace(file, partition={**file.partition, **deleted}) if deleted else file

    def read(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield a file's rows, with its partition values and with null in columns that were added later."""
        import pyarrow as pa
        import pyarrow.compute as pc

        widths = widths_of(self.metadata)
        with self._open(file.path) as content:
            stored = content.schema_arrow
            known = {
                one.name: (own.name, one.type)
                for own, one in zip(stored, self._rename_columns(stored), strict=True)
            }
            # The log's partition value counts, also if the file has a column of that name.
            there = [name for name in schema.names if name in known and name not in file.partition]
            # Raise ValueError if a column that the file seems to lack is in it under another case.
            names = set(schema.names) - file.partition.keys()
            in_file = list(known)
            lowered = {name.lower(): name for name in in_file}
            for name in sorted(names.difference(in_file)):
                if name.lower() in lowered:
                    raise ValueError(f"the column {name!r} of the table is {lowered[name.lower()]!r} in it")
            footer, begin, end = content.metadata, file.part.begin, file.part.end
            groups = [footer.row_group(at).num_rows for at in range(footer.num_row_groups)]
            wanted, place = _select_rows(file, sum(groups[begin:end])), 0
            if wanted is not None and not wanted.any():
                return
            columns_in_file = [known[name][0] for name in there]
            for batch in read_batches(content, columns_in_file, _ROWS_AT_ONCE, begin, end):
                columns = [
                    _add_missing_fields(batch.column(known[one.name][0]), known[one.name][1], one.type)
                    if one.name in there
                    else _repeat_value(file, one, batch.num_rows)
                    for one in schema
                ]
                for at, one in enumerate(schema):
                    if width := widths.get(one.name):
                        columns[at] = pc.utf8_rpad(columns[at], width)
                rows = pa.RecordBatch.from_arrays(columns, names=schema.names)
                if wanted is not None:
                    rows = rows.filter(pa.array(wanted[place : place + batch.num_rows]))
                place += batch.num_rows
                yield rows

    def _open(self, name: str) -> pq.ParquetFile:
        place = self.table / name
        return open_parquet(str(place) if isinstance(place, Path) else place.table.open(place.name))

    def _rename_columns(self, stored: pa.Schema) -> Any:
        """Return a file's schema, as a struct type, with the table's column names."""
        import pyarrow as pa

        kind, is_by_id = pa.struct(list(stored)), self.metadata.mapping == "id"
        if is_by_id and not any(_FIELD_ID in (one.metadata or {}) for one in stored):
            raise ValueError("the table finds columns by their numbers, and it has none")
        if self.metadata.mapping != "none":
            fields = [*self.metadata.fields, _CHANGE_TYPE]
            return _rename_fields(kind, {"type": "struct", "fields": fields}, is_by_id=is_by_id)
        return kind


def _slice_bits(file: FoundFile, bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the bits of a part's rows: those of the whole file would be too many for each part."""
    import numpy as np

    if file.part.end is None:
        return bits
    assert file.rows is not None, "only parts of Parquet have bits"
    byte, bit = divmod(file.part.first, 8)
    end = bit + file.rows
    return np.packbits(np.unpackbits(bits[byte : byte + -(-end // 8)], count=end)[bit:])


def _select_rows(file: FoundFile, rows: int) -> npt.NDArray[np.bool_] | None:
    import numpy as np

    there, gone = (
        None
        if (text := file.partition.get(name)) is None
        else np.unpackbits(np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8), count=rows) > 0
        for name in (THERE_IN, GONE_IN)
    )
    if there is None:
        return gone
    return ~there if gone is None else ~there & gone


def _rename_fields(kind: pa.DataType, wanted: Any, *, is_by_id: bool) -> pa.DataType:
    import pyarrow as pa

    def inner(field: pa.Field, part: str) -> pa.Field:
        return field.with_type(_rename_fields(field.type, wanted[part], is_by_id=is_by_id))

    if isinstance(wanted, str):
        return kind
    if wanted["type"] == "array":
        return pa.list_(inner(kind.value_field, "elementType"))
    if wanted["type"] == "map":
        return pa.map_(inner(kind.key_field, "keyType"), inner(kind.item_field, "valueType"))
    known = {(number_of(one) if is_by_id else None) or physical_name(one): one for one in wanted["fields"]}
    fields = []
    for own in kind:
        number = (own.metadata or {}).get(_FIELD_ID) if is_by_id else None
        one = known.get(int(number) if number else own.name)
        # A dropped column may have the name of one that was added later.
        named = "flinkish:dropped" if one is None else one["name"]
        type_of = own.type if one is None else _rename_fields(own.type, one["type"], is_by_id=is_by_id)
        fields.append(pa.field(named, type_of, own.nullable))
    return pa.struct(fields)


def _add_missing_fields(column: pa.Array, named: pa.DataType, kind: pa.DataType) -> pa.Array:
    """Return a column in the wanted type, with null in struct fields that were added later."""
    import pyarrow as pa

    from flinkish_spark.types.exact_columns import exact_cast, is_of_kind

    own = column if column.type == named else column.view(named)
    if pa.types.is_date(named) and pa.types.is_timestamp(kind):
        # All other types are widened as for any source.
        return own.cast(kind)
    is_lacking = is_of_kind(named, kind, may_have_more=True, may_lack=True)
    return exact_cast(own, kind) if is_lacking else own


def _repeat_value(file: FoundFile, field: pa.Field, rows: int) -> pa.Array:
    """Return a column that the file lacks: the partition's value in each row, or null."""
    import pyarrow as pa

    value = file.partition.get(field.name)
    # The time of a commit is empty if the log no longer has it.
    if not value:
        return pa.nulls(rows, field.type)
    return pa.array([value] * rows, pa.string()).cast(field.type)
