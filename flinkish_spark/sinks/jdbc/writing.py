"""Writing the rows of one checkpoint, within its transaction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flinkish_spark.errors import BadRecordError
from flinkish_spark.formats import OnBadRecord
from flinkish_spark.sinks.buffer import BufferedRows
from flinkish_spark.sinks.jdbc.dialect import Dialect, Params, Session, Target, Trouble, WriteMode
from flinkish_spark.sinks.jdbc.refused import Refusal, RefusedPolicy, Row
from flinkish_spark.sinks.jdbc.values import Unfit, parameters, python_values

if TYPE_CHECKING:
    import pyarrow as pa

#: Rows that are handed to the database at once, and so are in memory as Python values.
_ROWS_AT_ONCE = 50_000
#: Longest part of a record that an error message shows.
_SHOWN = 300

Send = Callable[[Session, Target, Sequence[Params]], None]


@dataclass
class Written:
    """What became of the rows of a checkpoint: how many, and those that were refused."""

    written: int = 0
    deleted: int = 0
    superseded: int = 0
    refusals: list[Refusal] = field(default_factory=list)


class CheckpointWrite:
    """Writes the rows of a checkpoint in their order; of several with one key only the last that is taken.

    Parameters
    ----------
    session
        Within a transaction.
    target
        The table; the columns are those of the rows.
    delete_when
        Boolean column by which a record deletes the row with its key; empty for none. It is not written.
    policy
        For records that the database refuses.
    uid
        Of the sink, for messages.
    """

    def __init__(
        self,
        session: Session,
        dialect: Dialect,
        target: Target,
        delete_when: str,
        policy: RefusedPolicy,
        uid: str,
    ) -> None:
        self._session, self._dialect, self._target = session, dialect, target
        self._delete_when, self._policy, self._uid = delete_when, policy, uid
        self._done = Written()
        self._refused_keys: set[Params] = set()

    def run(self, rows: BufferedRows) -> Written:
        """Write everything.

        Raises
        ------
        BadRecordError
            A record is refused, and the policy is to fail.
        Exception
            Of the driver, about anything but values.
        """
        last = self._last_of_each_key(rows)
        for part, position in _parts(rows):
            self._write(part, position, last)
        # A record that is not taken does not take the place of an earlier one either.
        again = {key: last[key] for key in self._refused_keys if last is not None and key in last}
        if again:
            self._write_earlier(rows, again)
        return self._done

    def _write_earlier(self, rows: BufferedRows, until: dict[Params, int]) -> None:
        """Write what was left out for the sake of records that were refused, one after the other.

        Parameters
        ----------
        until
            Keys, and the positions of the refused records.
        """
        for batch, position in _parts(rows):
            for index, key in enumerate(self._keys(batch)):
                if position + index < until.get(key, 0):
                    self._done.superseded -= 1
                    self._write(batch.slice(index, 1), position + index, None)

    # -- which rows count -----------------------------------------------------------------------
    def _last_of_each_key(self, rows: BufferedRows) -> dict[Params, int] | None:
        if self._target.mode is WriteMode.INSERT:
            return None
        last: dict[Params, int] = {}
        position = 0
        for batch in rows.batches():
            for key in self._keys(batch):
                # What can be no key is refused; another such record does not take its place.
                if not any(value is None or isinstance(value, Unfit) for value in key):
                    last[key] = position
                position += 1
        return last

    def _keys(self, batch: pa.RecordBatch) -> Iterator[Params]:
        columns = [
            python_values(batch.column(batch.schema.get_field_index(name))) for name in self._target.key
        ]
        return ((*map(_comparable, key),) for key in zip(*columns, strict=True))

    # -- sending --------------------------------------------------------------------------------
    def _write(self, batch: pa.RecordBatch, first: int, last: dict[Params, int] | None) -> None:
        names = [name for name in batch.schema.names if name != self._delete_when]
        target, key_at = self._target.with_columns(names), [names.index(c) for c in self._target.key]
        deletes = self._deletes(batch)
        keys = self._keys(batch) if last is not None else iter(())
        upserts: list[tuple[Row, Params]] = []
        removals: list[tuple[Row, Params]] = []
        for index, params in enumerate(parameters(batch, names, self._dialect)):
            row = Row(batch, index, first + index)
            if last is not None and last.get(next(keys), row.position) != row.position:
                self._done.superseded += 1
                continue
            why = self._why_unfit(params, key_at, names)
            if why:
                self._refuse(row, why)
            elif deletes[index]:
                removals.append((row, tuple(params[at] for at in key_at)))
            else:
                upserts.append((row, params))
        self._done.deleted += self._send(removals, target, self._dialect.delete)
        self._done.written += self._send(upserts, target, self._dialect.write)

    def _deletes(self, batch: pa.RecordBatch) -> list[bool]:
        if not self._delete_when:
            return [False] * batch.num_rows
        return [bool(v) for v in batch.column(batch.schema.get_field_index(self._delete_when)).to_pylist()]

    def _why_unfit(self, params: Params, key_at: Sequence[int], names: Sequence[str]) -> str:
        for name, value in zip(names, params, strict=True):
            if isinstance(value, Unfit):
                return f"{name}: {value}"
        if self._target.mode is WriteMode.UPSERT:
            for at in key_at:
                if params[at] is None:
                    return f"the key column {names[at]} is null, so no row can be found by it"
        return ""

    def _send(self, rows: Sequence[tuple[Row, Params]], target: Target, send: Send) -> int:
        """Hand rows to the database; of those it refuses as a whole, find out which are meant."""
        if not rows:
            return 0
        try:
            with self._session.savepoint():
                send(self._session, target, [params for _, params in rows])
            return len(rows)
        except Exception as error:
            if self._dialect.trouble(error) is not Trouble.REFUSED:
                raise
            if len(rows) == 1:
                self._refuse(rows[0][0], self._dialect.reason(error))
                return 0
        # The earlier half first: the database sees the rows in their order.
        half = len(rows) // 2
        return self._send(rows[:half], target, send) + self._send(rows[half:], target, send)

    def _refuse(self, row: Row, reason: str) -> None:
        if self._policy is OnBadRecord.FAIL:
            shown = row.key(self._target.key) if self._target.key else row.record
            raise BadRecordError(
                f"the table {self._target.table} refuses a record of sink '{self._uid}': {shown[:_SHOWN]}",
                why=reason,
                what_to_do="nothing of its checkpoint is visible, and the checkpoint stays decided: mend the "
                "table so that it takes the record, or set on_refused, and start the job again",
                sink=self._uid,
            )
        self._done.refusals.append(Refusal(row.position, reason, row.record))
        self._refused_keys.update(self._keys(row.batch.slice(row.index, 1)))


def _parts(rows: BufferedRows) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield all rows in parts that fit into memory, with the position of the first."""
    position = 0
    for batch in rows.batches():
        for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
            part = batch.slice(begin, _ROWS_AT_ONCE)
            yield part, position
            position += part.num_rows


def _comparable(value: Any) -> Any:
    """Return a key's value so that it is equal to itself."""
    return "NaN" if isinstance(value, float) and math.isnan(value) else value
