"""What happens to a record that the database refuses when its checkpoint is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.formats import OnBadRecord
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.sinks.jdbc.control import ControlTable
from flinkish_spark.sinks.jdbc.dialect import Dialect, Session
from flinkish_spark.sinks.jdbc.names import TableName
from flinkish_spark.sinks.jdbc.values import record_json

if TYPE_CHECKING:
    import pyarrow as pa

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
