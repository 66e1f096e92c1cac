"""What a JDBC sink works with: settings, secrets, and what becomes of refused records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T

from flinkish_spark.connectors.jdbc.control import ControlTable
from flinkish_spark.connectors.jdbc.dialect import (
    ColumnInfo,
    Dialect,
    Login,
    Session,
    Target,
    Ties,
    Unfit,
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
from flinkish_spark.core.changelogs import RETRACTIONS, RowKind
from flinkish_spark.core.errors import SchemaError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.core.secrets import Secret
from flinkish_spark.protocol.ids import CheckpointId

if TYPE_CHECKING:
    import pyarrow as pa


#: Longest part of a record that an error message shows.
MOST_SHOWN = 300
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
        self, session: Session, control: ControlTable, checkpoint: CheckpointId, refusals: Sequence[Refusal]
    ) -> None:
        """Write refused records, within the transaction of their checkpoint."""
        session.run_many(
            control.dialect.insert(self.name, _COLUMNS),
            [
                (str(control.job), control.uid, int(checkpoint), one.position, one.reason, one.record)
                for one in refusals
            ],
        )


RefusedPolicy = OnBadRecord | DeadLetterTable


@dataclass(frozen=True, slots=True)
class Row:
    """A record on its way into the table."""

    batch: pa.RecordBatch
    index: int
    #: Within its checkpoint, from 0.
    position: int

    @property
    def record(self) -> str:
        return record_json(self.batch, self.index)

    def key(self, columns: Sequence[str]) -> str:
        return record_json(self.batch, self.index, columns)


@dataclass(frozen=True, slots=True)
class Refusal:
    position: int
    reason: str
    record: str


def why_no_key(column: str) -> str:
    return f"the key column {column} is null, so no row can be found by it"


@dataclass(frozen=True)
class RecordCheck:
    """Refuses records that no commit could write, in the task that buffers them: nothing is decided yet."""

    uid: str
    dialect: Dialect
    target: Target
    #: A record that deletes needs its key only.
    delete_when: str
    #: Of the table, as far as they are known.
    columns: tuple[ColumnInfo, ...] = ()

    @cached_property
    def _checks(self) -> dict[str, Callable[[str], str]]:
        return self.dialect.checks(self.columns)

    def __call__(self, batch: pa.RecordBatch) -> None:
        if self.delete_when:
            without = deletions(batch, self.delete_when)
            if without.null_count:
                place = without.is_null().index(True).as_py()
                self._refuse_row(batch, place, why_no_kind(self.delete_when))
        written = self._written(batch)
        for name in self.target.columns:
            rows = batch if self._is_key(name) else written
            column = rows.column(rows.schema.get_field_index(name))
            if self._why(name, column):
                self._refuse(rows, name, column)

    def _written(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow.compute as pc

        if not self.delete_when:
            return batch
        return batch.filter(pc.invert(pc.fill_null(deletions(batch, self.delete_when), False)))

    def _is_key(self, name: str) -> bool:
        return self.target.mode is WriteMode.UPSERT and name in self.target.key

    def _why(self, name: str, column: pa.Array) -> str:
        """Return why a value of a column is refused; whole columns at once, since all records come by."""
        info = next((one for one in self.columns if one.name == name), ColumnInfo(name, "", False))
        if column.null_count and self._is_key(name):
            return why_no_key(name)
        if column.null_count and info.refuses_null:
            return f"the column {name} of {self.target.table} is NOT NULL, and the value is null"
        if not self.dialect.has_zero_bytes(column.type, info.type) and has_zero_byte(column):
            return f"{name}: {self.dialect.name} has no text with a zero byte"
        if not may_be_unfit(column) and name not in self._checks:
            return ""
        found = parameters(_alone(name, column), [name], self.dialect, self._checks)
        return next((f"{name}: {value}" for (value,) in found if isinstance(value, Unfit)), "")

    def _refuse(self, rows: pa.RecordBatch, name: str, column: pa.Array) -> None:
        first, size = 0, len(column)
        while size > 1:
            half = size // 2
            is_before = bool(self._why(name, column.slice(first, half)))
            first, size = (first, half) if is_before else (first + half, size - half)
        self._refuse_row(rows, first, self._why(name, column.slice(first, 1)))

    def _refuse_row(self, rows: pa.RecordBatch, place: int, why: str) -> None:
        from flinkish_spark.connectors.two_phase import refused_record

        row = Row(rows, place, place)
        shown = (row.key(self.target.key) if self.target.key else row.record)[:MOST_SHOWN]
        # The driver looks for markers in the text: a record must not bring one.
        shown = shown.replace("[FLINKISH", "[ FLINKISH")
        raise refused_record(self.uid, f"{why}: {shown}")


def deletions(batch: pa.RecordBatch, column: str) -> pa.BooleanArray:
    """Return which records delete, by a BOOLEAN column or one of row kinds; null for what is no kind."""
    import pyarrow as pa
    import pyarrow.compute as pc

    said = batch.column(batch.schema.get_field_index(column))
    if pa.types.is_boolean(said.type):
        return pc.fill_null(said, False)
    is_kind = pc.is_in(said, pa.array([kind.value for kind in RowKind], said.type))
    return pc.if_else(is_kind, pc.is_in(said, pa.array(RETRACTIONS, said.type)), None)


def why_no_kind(column: str) -> str:
    return f"{column}: {', '.join(kind.value for kind in RowKind)} are row kinds, and this is none"


def _alone(name: str, column: pa.Array) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([column], names=[name])


DIALECTS: dict[str, Dialect] = {one.name: one for one in (Postgres(), Sqlite(), MySql())}


@dataclass(frozen=True, slots=True)
class JdbcSettings:
    """Settings of a :class:`~flinkish_spark.connectors.jdbc.sink.JdbcSink`, in types that cannot be wrong."""

    url: JdbcUrl
    user: str
    secret: Secret = field(repr=False)
    timeout_ms: int
    table_name: TableName
    key: tuple[str, ...]
    mode: WriteMode
    delete_when: str
    creates_table: bool
    control_table: TableName
    on_refused: RefusedPolicy
    row_kind: str = ""

    @property
    def deletes_by(self) -> str:
        """The column that says which records delete; empty for none. It is not stored."""
        return self.delete_when or self.row_kind

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.url.system]

    @property
    def tables(self) -> tuple[TableName, ...]:
        letters = (self.on_refused.name,) if isinstance(self.on_refused, DeadLetterTable) else ()
        return (self.table_name, self.control_table, *letters)

    def connect(self) -> Any:
        login = Login(self.url, self.user, self.secret.read(), self.timeout_ms)
        return self.dialect.connect(login)

    def scrubbed(self, text: str) -> str:
        try:
            secret = self.secret.read()
            return text.replace(secret, "***") if secret else text
        except Exception:
            return "its reason is not shown, since the password cannot be read to take it out"

    def target(self, schema: T.StructType) -> Target:
        columns = tuple(name for name in schema.names if name != self.deletes_by)
        return Target(self.table_name, columns, self.key, self.mode)

    def ties(self, session: Session, schema: T.StructType) -> Ties:
        target = self.target(schema)
        found = self.dialect.ties(session, target, deletes=bool(self.deletes_by))
        columns = {column.name for column in self.dialect.columns_of(session, self.table_name)}
        # A row that goes and comes again has lost what the sink does not write.
        return Ties.IN_PLACE if found is Ties.END_STATE and columns - set(target.columns) else found

    def require_upsert(self, session: Session, schema: T.StructType, uid: str) -> None:
        """Raise SchemaError if an upsert could replace another row than that with its key."""
        if self.mode is not WriteMode.UPSERT:
            return
        why = self.dialect.why_not_upserted(session, self.target(schema))
        if why:
            raise SchemaError(
                f"{self.table_name} of sink '{uid}' has more than one unique index",
                why=why,
                what_to_do="keep one unique index, the key's",
                uid=uid,
            )

    def create_tables(self, session: Session, schema: T.StructType) -> None:
        """Create what is missing and may be created; what is there stays as it is."""
        wanted: list[tuple[TableName, Callable[[], Any]]] = [
            (self.control_table, lambda: ControlTable.create(session, self.dialect, self.control_table))
        ]
        dead_letters = self.on_refused
        if isinstance(dead_letters, DeadLetterTable):
            wanted.append((dead_letters.name, lambda: dead_letters.create(session, self.dialect)))
        if self.creates_table:
            wanted.append((self.table_name, lambda: session.run(self._create_statement(schema))))
        for name, create in wanted:
            # Some databases ask for the right to create tables even if there is nothing to create.
            if not self.dialect.columns_of(session, name):
                create()

    def _create_statement(self, schema: T.StructType) -> str:
        columns = []
        for one in schema.fields:
            if one.name == self.deletes_by:
                continue
            type_ = self.dialect.type_for(one.dataType, in_key=one.name in self.key)
            if type_ is None:
                raise SchemaError(
                    f"there is no column type in {self.dialect.name} for the field '{one.name}' of type "
                    f"{one.dataType.simpleString()}",
                    what_to_do="cast it to another type with transform(...)",
                )
            columns.append((one.name, type_ + (" NOT NULL" if one.name in self.key else "")))
        return self.dialect.create_table(self.table_name, columns, self.key)
