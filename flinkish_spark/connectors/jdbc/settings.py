"""Settings of a JDBC sink, its secrets, and its policies for refused records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.control import ControlTable
from flinkish_spark.connectors.jdbc.dialect import (
    ColumnInfo,
    Dialect,
    Login,
    Session,
    Target,
    UnfitValue,
    WriteMode,
    has_zero_byte,
    may_be_unfit,
    parameters,
    record_json,
)
from flinkish_spark.connectors.jdbc.mysql import MySql
from flinkish_spark.connectors.jdbc.names import JdbcUrl, TableName
from flinkish_spark.connectors.jdbc.postgres import Postgres
from flinkish_spark.connectors.jdbc.sqlite import Sqlite
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.changelogs import RETRACTIONS, RowKind
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.core.secrets import secret_of
from flinkish_spark.protocol.ids import CheckpointId

#: Longest part of a record that an error message shows.
_MOST_SHOWN = 300
_COLUMNS = ("job_uuid", "sink_uid", "checkpoint_id", "position", "reason", "record")


@dataclass(frozen=True, slots=True)
class DeadLetterTable:
    """Write refused records to this table, in the transaction of their checkpoint.

    Its columns: job_uuid, sink_uid, checkpoint_id, position (of the record within the checkpoint), reason,
    and record, all of its fields as a JSON object. Created if it is missing.

    Parameters
    ----------
    table
        ``table`` or ``schema.table``, in the database of the sink.
    """

    table: str

    def __post_init__(self) -> None:
        TableName.parse(self.table)

    @property
    def name(self) -> TableName:
        """The table's name."""
        return TableName.parse(self.table)

    def create(self, session: Session, dialect: Dialect) -> None:
        """Create the table if it is missing."""
        types = (dialect.name_text, dialect.name_text, dialect.number, dialect.number)
        columns = list(zip(_COLUMNS, (*types, dialect.text, dialect.text), strict=True))
        session.run(dialect.create_table(self.name, columns))

    def write(
        self,
        session: Session,
        control: ControlTable,
        checkpoint: CheckpointId,
        refusals: Sequence[tuple[int, str, str]],
    ) -> None:
        """Write position, reason and JSON of refused records, within the transaction of their checkpoint."""
        session.run_many(
            control.dialect.insert(self.name, _COLUMNS),
            [(str(control.job), control.uid, int(checkpoint), *one) for one in refusals],
        )


RefusedPolicy = OnBadRecord | DeadLetterTable


def show_record(batch: pa.RecordBatch, row: int, key: Sequence[str]) -> str:
    """Return a record's key for a message, or the whole record if it has no key."""
    return record_json(batch, row, key or None)[:_MOST_SHOWN]


def why_no_key(column: str) -> str:
    return f"the key column {column} is null, so it identifies no row"


@dataclass(frozen=True)
class RecordCheck:
    """Refuses records that no commit could write; runs in the tasks, before the checkpoint is decided."""

    uid: str
    dialect: Dialect
    target: Target
    #: The column that says which records delete; of those only the key is checked.
    delete_when: str
    columns: tuple[ColumnInfo, ...] = ()

    @cached_property
    def _checks(self) -> dict[str, Callable[[str], str]]:
        return self.dialect.checks(self.columns)

    def __call__(self, batch: pa.RecordBatch) -> None:
        written = batch
        if self.delete_when:
            without = deletions(batch, self.delete_when)
            if without.null_count:
                place = without.is_null().index(True).as_py()
                self._refuse_row(batch, place, why_no_kind(self.delete_when))
            written = batch.filter(pc.invert(pc.fill_null(without, False)))
        for name in self.target.columns:
            rows = batch if self._is_key(name) else written
            column = rows.column(rows.schema.get_field_index(name))
            if self._why(name, column):
                # Bisect the column to find the record.
                first, size = 0, len(column)
                while size > 1:
                    half = size // 2
                    is_before = bool(self._why(name, column.slice(first, half)))
                    first, size = (first, half) if is_before else (first + half, size - half)
                self._refuse_row(rows, first, self._why(name, column.slice(first, 1)))

    def _is_key(self, name: str) -> bool:
        return self.target.mode is WriteMode.UPSERT and name in self.target.key

    def _why(self, name: str, column: pa.Array) -> str:
        """Return why a value of a column is refused; checks whole columns, since every record passes here."""
        info = next((one for one in self.columns if one.name == name), ColumnInfo(name, "", False))
        if column.null_count and self._is_key(name):
            return why_no_key(name)
        if column.null_count and info.refuses_null:
            return f"the column {name} of {self.target.table} is NOT NULL, and the value is null"
        if not self.dialect.has_zero_bytes(column.type, info.type) and has_zero_byte(column):
            return f"{name}: {self.dialect.name} has no text with a zero byte"
        if not may_be_unfit(column) and name not in self._checks:
            return ""
        alone = pa.RecordBatch.from_arrays([column], names=[name])
        found = parameters(alone, [name], self.dialect, self._checks)
        return next((f"{name}: {value}" for (value,) in found if isinstance(value, UnfitValue)), "")

    def _refuse_row(self, rows: pa.RecordBatch, place: int, why: str) -> None:
        from flinkish_spark.connectors.two_phase import to_bad_record_error

        # The driver searches the message for markers, so a record must not contain one.
        shown = show_record(rows, place, self.target.key).replace("[FLINKISH", "[ FLINKISH")
        raise to_bad_record_error(self.uid, f"{why}: {shown}")


def deletions(batch: pa.RecordBatch, column: str) -> pa.BooleanArray:
    """Return which records delete, by a BOOLEAN column or row kinds; null for an invalid row kind."""
    said = batch.column(batch.schema.get_field_index(column))
    if pa.types.is_boolean(said.type):
        return pc.fill_null(said, False)
    is_kind = pc.is_in(said, pa.array([kind.value for kind in RowKind], said.type))
    return pc.if_else(is_kind, pc.is_in(said, pa.array(RETRACTIONS, said.type)), None)


def why_no_kind(column: str) -> str:
    return f"{column}: {', '.join(kind.value for kind in RowKind)} are row kinds, and this is none"


DIALECTS: dict[str, Dialect] = {one.name: one for one in (Postgres(), Sqlite(), MySql())}


class JdbcSettings:
    """The settings of a sink, whose module is above this one, with its URL and names parsed."""

    def __init__(self, sink: Any) -> None:
        self.url, self.secret = JdbcUrl.parse(sink.url), secret_of(sink.password)
        self.dialect = DIALECTS[self.url.system]
        self.user: str = sink.user
        self.timeout_ms: int = sink.timeout_ms
        self.table_name, self.control_table = TableName.parse(sink.table), TableName.parse(sink.control_table)
        self.key: tuple[str, ...] = sink.key
        self.mode = WriteMode(sink.mode)
        self.on_refused: RefusedPolicy = sink.on_refused
        letters = (sink.on_refused.name,) if isinstance(sink.on_refused, DeadLetterTable) else ()
        self.tables = (self.table_name, self.control_table, *letters)
        self.creates_table: bool = sink.create_table
        self.delete_when: str = sink.delete_when
        self.row_kind: str = sink.row_kind
        #: The column that says which records delete; empty for none. It is not written to the table.
        self.deletes_by = self.delete_when or self.row_kind

    def connect(self) -> Any:
        return self.dialect.connect(Login(self.url, self.user, self.secret.read(), self.timeout_ms))

    def control(self, context: SinkContext) -> ControlTable:
        return ControlTable(self.dialect, self.control_table, context.job, context.uid, context.owner_epoch)

    def scrub(self, text: str) -> str:
        try:
            secret = self.secret.read()
            return text.replace(secret, "***") if secret else text
        except Exception:
            return "the reason is not shown, since the password cannot be read and removed from it"

    def target(self, schema: T.StructType) -> Target:
        columns = tuple(name for name in schema.names if name != self.deletes_by)
        return Target(self.table_name, columns, self.key, self.mode)

    def create_tables(self, session: Session, schema: T.StructType) -> None:
        # The target is last: MySQL commits each CREATE TABLE, and the right to create another may be missing.
        for name in (*self.tables[1:], self.table_name):
            # Some databases require the right to create tables even if the table exists.
            if self.dialect.columns_of(session, name):
                continue
            if name == self.control_table:
                ControlTable.create(session, self.dialect, name)
            elif isinstance(self.on_refused, DeadLetterTable) and name == self.on_refused.name:
                self.on_refused.create(session, self.dialect)
            elif self.creates_table:
                columns = []
                for one in (field for field in schema.fields if field.name != self.deletes_by):
                    is_key = one.name in self.key
                    kind = self.dialect.type_for(one.dataType, in_key=is_key)
                    columns.append((one.name, kind + (" NOT NULL" if is_key else "")))
                session.run(self.dialect.create_table(self.table_name, columns, self.key))
