"""Refused records: before the decision what they alone decide, at the commit what the database says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.formats import OnBadRecord
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.sinks.jdbc.control import ControlTable
from flinkish_spark.sinks.jdbc.dialect import ColumnInfo, Dialect, Session, Target, WriteMode
from flinkish_spark.sinks.jdbc.names import TableName
from flinkish_spark.sinks.jdbc.values import Unfit, has_zero_byte, may_be_unfit, parameters, record_json

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
    """A record on its way into the table.

    Parameters
    ----------
    batch, index
        Where it is.
    position
        Within its checkpoint, from 0.
    """

    batch: pa.RecordBatch
    index: int
    position: int

    @property
    def record(self) -> str:
        """All of it as a JSON object."""
        return record_json(self.batch, self.index)

    def key(self, columns: Sequence[str]) -> str:
        """Return its key as a JSON object."""
        return record_json(self.batch, self.index, columns)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A record that was refused, as JSON, and why."""

    position: int
    reason: str
    record: str


def why_no_key(column: str) -> str:
    """Return why a record without a value in a column of its key is refused."""
    return f"the key column {column} is null, so no row can be found by it"


@dataclass(frozen=True, slots=True)
class RecordCheck:
    """Refuses records that no commit could write, in the task that buffers them: nothing is decided yet.

    Parameters
    ----------
    uid
        Of the sink.
    dialect, target, delete_when
        Where records go; one that deletes needs its key only.
    columns
        Of the table, as far as they are known.
    """

    uid: str
    dialect: Dialect
    target: Target
    delete_when: str
    columns: tuple[ColumnInfo, ...] = ()

    def __call__(self, batch: pa.RecordBatch) -> None:
        """Raise BadRecordError for the first record of a column that is refused."""
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
        deletes = batch.column(batch.schema.get_field_index(self.delete_when))
        return batch.filter(pc.invert(pc.fill_null(deletes, False)))

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
        if not may_be_unfit(column):
            return ""
        found = parameters(_alone(name, column), [name], self.dialect)
        return next((f"{name}: {value}" for (value,) in found if isinstance(value, Unfit)), "")

    def _refuse(self, rows: pa.RecordBatch, name: str, column: pa.Array) -> None:
        from flinkish_spark.sinks.two_phase_tasks import refused_record

        first, size = 0, len(column)
        while size > 1:
            half = size // 2
            is_before = bool(self._why(name, column.slice(first, half)))
            first, size = (first, half) if is_before else (first + half, size - half)
        row = Row(rows, first, first)
        shown = (row.key(self.target.key) if self.target.key else row.record)[:MOST_SHOWN]
        # The driver looks for markers in the text: a record must not bring one.
        shown = shown.replace("[FLINKISH", "[ FLINKISH")
        raise refused_record(self.uid, f"{self._why(name, column.slice(first, 1))}: {shown}")


def _alone(name: str, column: pa.Array) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([column], names=[name])
