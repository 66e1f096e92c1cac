"""Commit of a checkpoint into a table: compare-and-set, rows and refused records in one transaction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from flinkish_spark.connectors.buffer import ApplyStatus, BufferedCommitter, BufferedRows
from flinkish_spark.connectors.jdbc.checks import Checks
from flinkish_spark.connectors.jdbc.control import TIMELINE
from flinkish_spark.connectors.jdbc.database import Database
from flinkish_spark.connectors.jdbc.dialect import (
    ColumnInfo,
    Params,
    Session,
    Trouble,
    UnfitValue,
    WriteMode,
    parameters,
    python_values,
    record_json,
)
from flinkish_spark.connectors.jdbc.settings import (
    DeadLetterTable,
    JdbcSettings,
    deletions,
    show_record,
    why_no_key,
    why_no_kind,
)
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.errors import BadRecordError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark

#: Rows that are sent to the database at once, and so are in memory as Python values.
_ROWS_AT_ONCE = 50_000
#: Reason of a record that was not sent. It is never shown, since the earlier record is refused first.
_BEHIND = "an earlier record with its key waits"
#: Longest part of the database's reason that is shown.
_MOST_REASON = 1_000


@dataclass(frozen=True, slots=True)
class Change:
    batch: pa.RecordBatch
    index: int
    #: Number of the record in its checkpoint, from 0.
    position: int
    #: Records with equal keys must keep their order.
    key: Params
    params: Params
    deletes: bool


#: A change that the database refused, and the reason.
_Waiting = tuple[Change, str]


class _EarlierRecordCounts(Exception):
    """The last record of a key was refused, so an earlier record of the key must be written."""


class CheckpointWrite:
    # The result is the same as if the records had been written one by one, ordered by micro-batch, task, and
    # the task's own order. First the whole checkpoint is tried, all or nothing:
    #
    # - In an ordered table, where something such as a trigger sees each step: every record, in order.
    # - In any other table: the last record of each key. If another row is in the way, for example under a
    #   second unique constraint, all rows that will be written are deleted first, so that rows can swap
    #   values. If rows have columns that the sink does not write, they must not be deleted: then every
    #   record, in order.
    #
    # If the database refuses that, single records may be refused. Again the last record of each key is sent,
    # and all records of keys that were refused. A refused record waits, with later records of its key, until
    # the others were sent, since records of different tasks have no order. When a pass inserts nothing, the
    # first waiting record of each key is rejected.

    def __init__(
        self, session: Session, settings: JdbcSettings, context: SinkContext, columns: Sequence[ColumnInfo]
    ) -> None:
        self._session, self._settings, self._uid = session, settings, context.uid
        self._dialect, self._target = settings.dialect, settings.target(context.schema)
        self._is_ordered = self._dialect.is_ordered(session, settings.table_name)
        self._writes_all = {column.name for column in columns} <= set(self._target.columns)
        self._checks = self._dialect.checks(columns)
        self._begin_again()

    def run(self, rows: BufferedRows) -> None:
        last = {} if self._is_ordered else self._last_of_each_key(rows)
        stuck = [] if self._write_all(rows, last) else self._send_repeatedly(self._lasts(rows, last))
        # A rejected record does not replace an earlier one of its key, so all records of such keys are sent.
        keys = {change.key for change, _ in stuck} | self._refused_keys
        if last and keys:
            parts = self._parts(rows, {})
            stuck = self._send_repeatedly([one for one in changes if one.key in keys] for changes in parts)
        while stuck:
            # The last pass wrote nothing: reject the first waiting record of each key.
            firsts = {change.key: change for change, _ in reversed(stuck)}
            for change, reason in stuck:
                if firsts[change.key] is change:
                    self._refuse(change, reason)
            stuck = self._send_repeatedly(
                [[change for change, _ in stuck if firsts[change.key] is not change]]
            )

    def facts(self, rows: BufferedRows) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": self._written}
        if self._target.key:
            superseded = rows.count - self._written - self._deleted - len(self._refusals)
            found |= {"deleted": self._deleted, "superseded": superseded}
        return found | ({"refused": len(self._refusals)} if self._refusals else {})

    @property
    def refusals(self) -> list[tuple[int, str, str]]:
        """Position, reason and JSON of each rejected record."""
        return [(position, *self._refusals[position]) for position in sorted(self._refusals)]

    def _begin_again(self) -> None:
        self._written = self._deleted = 0
        #: Reasons and records by position: a record that is sent twice is refused twice.
        self._refusals: dict[int, tuple[str, str]] = {}
        self._refused_keys: set[Params] = set()

    def _write_all(self, rows: BufferedRows, last: Mapping[Params, int]) -> bool:
        """Write the whole checkpoint or nothing, checking constraints at the end; return if it is written."""
        error = self._try(self._lasts(rows, last))
        if error is not None and last and self._dialect.is_taken(error):
            error = self._try(
                self._yield_after_delete(rows, last) if self._writes_all else self._parts(rows, {})
            )
            if error is None and not self._writes_all:
                # Earlier records of refused keys were written, too.
                self._refused_keys.clear()
        return error is None

    def _try(self, parts: Iterator[Sequence[Change]]) -> Exception | None:
        """Write changes, all or nothing; return the error if the database refuses one."""
        self._begin_again()
        try:
            with self._session.savepoint(), self._dialect.defer_constraints(self._session):
                for changes in parts:
                    self._hand_over(changes)
            return None
        except Exception as error:
            if (
                not isinstance(error, _EarlierRecordCounts)
                and self._dialect.trouble(error) is not Trouble.REFUSED
            ):
                raise
            self._begin_again()
            return error

    def _yield_after_delete(
        self, rows: BufferedRows, last: Mapping[Params, int]
    ) -> Iterator[Sequence[Change]]:
        for changes in self._parts(rows, last):
            if changes:
                self._delete(changes)
        if self._refused_keys & last.keys():
            raise _EarlierRecordCounts
        self._begin_again()
        yield from self._lasts(rows, last)

    def _lasts(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[Sequence[Change]]:
        for changes in self._parts(rows, last):
            # Deletions first: they make room for other rows.
            yield changes if self._is_ordered else sorted(changes, key=lambda one: not one.deletes)

    def _send_repeatedly(self, parts: Iterable[Sequence[Change]]) -> list[_Waiting]:
        """Send changes, and refused ones again until a pass writes nothing; return those still refused."""
        waiting: list[_Waiting] = []
        for changes in parts:
            waiting += self._send(changes, {change.key for change, _ in waiting})
        while True:
            waiting.sort(key=lambda one: one[0].position)
            left = self._send([change for change, _ in waiting], set())
            if len(left) == len(waiting):
                return waiting
            waiting = left

    def _send(self, changes: Sequence[Change], held: set[Params]) -> list[_Waiting]:
        """Send changes to the database in order; return those that were refused or held back."""
        # Changes of held keys are not sent, so that no record overtakes an earlier one of its key. Keys of
        # refused records are added to `held`.
        kept = [(one, _BEHIND) for one in changes if one.key in held] if held else []
        if kept:
            changes = [one for one in changes if one.key not in held]
        if not changes:
            return kept
        try:
            with self._session.savepoint():
                self._hand_over(changes)
            return kept
        except Exception as error:
            if self._dialect.trouble(error) is not Trouble.REFUSED:
                raise
            if len(changes) == 1:
                held.add(changes[0].key)
                reason = self._settings.scrub(self._dialect.reason(error))[:_MOST_REASON]
                return [*kept, (changes[0], reason)]
        # Bisect to find the refused change; the earlier half first.
        half = len(changes) // 2
        return [*kept, *self._send(changes[:half], held), *self._send(changes[half:], held)]

    def _hand_over(self, changes: Sequence[Change]) -> None:
        written = deleted = 0
        for deletes, run in itertools.groupby(changes, key=lambda one: one.deletes):
            same = list(run)
            if deletes:
                self._delete(same)
                deleted += len(same)
            else:
                is_quick = not self._is_ordered and len({one.key for one in same}) == len(same)
                target = replace(self._target, columns=self._columns(same[0].batch))
                params = [one.params for one in same]
                self._dialect.write(self._session, target, params, in_order=not is_quick)
                written += len(same)
        self._deleted += deleted
        self._written += written

    def _delete(self, changes: Sequence[Change]) -> None:
        columns = self._columns(changes[0].batch)
        at = [columns.index(name) for name in self._target.key]
        keys = [tuple(one.params[place] for place in at) for one in changes]
        self._dialect.delete(self._session, self._target, keys)

    def _columns(self, batch: pa.RecordBatch) -> tuple[str, ...]:
        return tuple(name for name in batch.schema.names if name != self._settings.deletes_by)

    def _parts(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[list[Change]]:
        """Yield the changes of all records, or of the last of each key, in parts that fit into memory."""
        position = 0
        for batch in rows.batches():
            for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
                part = batch.slice(begin, _ROWS_AT_ONCE)
                yield self._changes(part, position, last)
                position += part.num_rows

    def _changes(self, batch: pa.RecordBatch, first: int, last: Mapping[Params, int]) -> list[Change]:
        """Return the changes of a batch's records; refuse records that no database can hold."""
        names, delete_when, changes = self._columns(batch), self._settings.deletes_by, []
        deletes = deletions(batch, delete_when).to_pylist() if delete_when else [False] * batch.num_rows
        params_of_rows = parameters(batch, names, self._dialect, self._checks)
        rows = zip(self._keys(batch, first), params_of_rows, deletes, strict=True)
        for index, (key, params, is_delete) in enumerate(rows):
            position = first + index
            if last.get(key, position) != position:
                continue
            change = Change(batch, index, position, key, params, is_delete)
            if why := self._why_unfit(params, names, is_delete):
                self._refuse(change, why)
            else:
                changes.append(change)
        return changes

    def _last_of_each_key(self, rows: BufferedRows) -> dict[Params, int]:
        last: dict[Params, int] = {}
        if self._target.mode is WriteMode.INSERT:
            return last
        position = 0
        for batch in rows.batches():
            for key in self._keys(batch, position):
                # A value that cannot be a key is refused; a later record does not replace it.
                if not any(value is None or isinstance(value, UnfitValue) for value in key):
                    last[key] = position
                position += 1
        return last

    def _keys(self, batch: pa.RecordBatch, first: int) -> Iterator[Params]:
        """Return the keys of records: equal for records of one row. Each insert has its own key."""
        if self._target.mode is WriteMode.INSERT:
            return ((first + index,) for index in range(batch.num_rows))
        columns = []
        for name in self._target.key:
            values = python_values(batch.column(batch.schema.get_field_index(name)))
            # NaN differs from itself, but must be one key.
            columns.append(["NaN" if isinstance(v, float) and math.isnan(v) else v for v in values])
        return zip(*columns, strict=True)

    def _why_unfit(self, params: Params, names: Sequence[str], is_delete: bool | None) -> str:
        if is_delete is None:
            return why_no_kind(self._settings.deletes_by)
        for name, value in zip(names, params, strict=True):
            is_key = self._target.mode is WriteMode.UPSERT and name in self._target.key
            if isinstance(value, UnfitValue) and (is_key or not is_delete):
                return f"{name}: {value}"
            if value is None and is_key:
                return why_no_key(name)
        return ""

    def _refuse(self, change: Change, reason: str) -> None:
        if self._settings.on_refused is OnBadRecord.FAIL:
            shown = show_record(change.batch, change.index, self._target.key)
            raise BadRecordError(
                f"the table {self._target.table} refuses a record of sink '{self._uid}': {shown}",
                why=reason,
                what_to_do="nothing of its checkpoint is visible, and the checkpoint stays decided: change "
                "the table so that it accepts the record, or set on_refused, and start the job again",
                sink=self._uid,
            )
        self._refusals[change.position] = reason, record_json(change.batch, change.index)
        self._refused_keys.add(change.key)


class JdbcCommitter(BufferedCommitter):
    def __init__(
        self, settings: JdbcSettings, context: SinkContext, connect: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(context)
        self._settings = settings
        self._database = Database(settings, context.uid, connect)
        self._control = settings.control(context)

    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        """Write all rows with the checkpoint's id, unless that was done before."""
        dialect, settings = self._settings.dialect, self._settings
        with self._database.use(self._prepare) as session, session.transaction(dialect.begin):
            # This order matters: after the claim no other process can change the row until this transaction
            # ends.
            if self._claim(session, checkpoint) is None:
                return CommitAnswer(Outcome.FENCED, "a newer owner has written to the control table")
            if not self._control.take_turn(session, checkpoint):
                newest, _, facts = self._control.read(session)
                facts.pop(TIMELINE, None)
                is_newest = newest == int(checkpoint)
                return CommitAnswer(Outcome.ALREADY_COMMITTED, facts=facts if is_newest else {})
            # Checked in each commit, since a table may have been altered. This order matters: `hold` keeps it
            # from being altered between the check and the end.
            for table in settings.tables:
                dialect.hold(session, table)
            columns = Checks(settings, self._context).check_table(session)
            write = CheckpointWrite(session, settings, self._context, columns)
            write.run(rows)
            if write.refusals and isinstance(settings.on_refused, DeadLetterTable):
                settings.on_refused.write(session, self._control, checkpoint, write.refusals)
            facts = write.facts(rows)
            self._control.note(session, facts, self._context.timeline.mark_of(checkpoint).token)
        return CommitAnswer(Outcome.COMMITTED, facts=facts)

    def newest_marks(self) -> Sequence[Mark]:
        with self._database.use(self._prepare) as session:
            mark = self._control.mark(session)
        return (mark,) if mark.checkpoint > CheckpointId(0) else ()

    def _claim(self, session: Session, checkpoint: CheckpointId) -> Mark | None:
        mark = self._control.claim(session)
        if mark is not None and mark.checkpoint > CheckpointId(0):
            self._context.require_ours(mark, checkpoint)
        return mark

    def has_applied(self, checkpoint: CheckpointId) -> ApplyStatus:
        with self._database.use(self._prepare) as session, session.transaction(self._settings.dialect.begin):
            mark = self._claim(session, checkpoint)
        if mark is None:
            return ApplyStatus.UNKNOWN
        return ApplyStatus.YES if mark.checkpoint >= checkpoint else ApplyStatus.NO

    def why_not_superseded(self, target: CheckpointId) -> str:
        with self._database.use(self._prepare) as session:
            newest, _, _ = self._control.read(session)
        if newest <= int(target):
            return ""
        return (
            f"the table {self._settings.table_name} of sink '{self._context.uid}' holds rows of checkpoint "
            f"{newest}, and a database keeps no older versions that could be taken back"
        )

    def interrupt(self) -> None:
        self._database.interrupt()

    def close(self) -> None:
        self._database.close()

    def _prepare(self, session: Session) -> None:
        self._settings.create_tables(session, self._context.schema)
        self._control.require_row(session, self._context.place, str(self._settings.url))
