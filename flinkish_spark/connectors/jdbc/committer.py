"""Committing checkpoints into a table: compare-and-set, rows, refused records, in one transaction."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flinkish_spark.connectors.buffer import Applied, BufferedCommitter, BufferedRows
from flinkish_spark.connectors.jdbc.checks import TableCheck
from flinkish_spark.connectors.jdbc.control import TIMELINE, ControlTable, Turn
from flinkish_spark.connectors.jdbc.database import Database
from flinkish_spark.connectors.jdbc.dialect import (
    Dialect,
    Params,
    Session,
    Target,
    Ties,
    Trouble,
    Unfit,
    WriteMode,
    parameters,
    python_values,
)
from flinkish_spark.connectors.jdbc.settings import (
    MOST_SHOWN,
    DeadLetterTable,
    JdbcSettings,
    Refusal,
    RefusedPolicy,
    Row,
    deletions,
    why_no_key,
    why_no_kind,
)
from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.errors import BadRecordError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from flinkish_spark.protocol.timeline import Mark

if TYPE_CHECKING:
    import pyarrow as pa


#: Rows that are handed to the database at once, and so are in memory as Python values.
_ROWS_AT_ONCE = 50_000
#: Why a record was not tried: it is never shown, for the record before it is refused first.
_BEHIND = "a record with its key waits"
#: Longest part of what the database says about a record.
_MOST_REASON = 1_000


@dataclass
class Written:
    written: int = 0
    deleted: int = 0
    superseded: int = 0
    refusals: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Change:
    row: Row
    #: Equal for records whose order among each other counts.
    key: Params
    #: Of the columns of the table.
    params: Params
    #: Whether the row with its key goes.
    deletes: bool


@dataclass(frozen=True, slots=True)
class _Refused:
    change: Change
    reason: str

    @property
    def position(self) -> int:
        return self.change.row.position


class _EarlierCounts(Exception):
    """The last record of a key can never be taken, so one before it stands in the end."""


class CheckpointWrite:
    """Writes the rows of one checkpoint, within its transaction."""

    # What stands in the table in the end is as if the records had come one by one: by micro-batch, task, and
    # the order in which the task saw them. How far that may be shortened depends on what ties rows together,
    # see `Ties`. Where something does, all of it or nothing is tried first:
    #
    # 1. Of each key the last record.
    # 2. The same, behind a removal of all rows that are written: so rows can change places.
    # 3. Each record in its order.
    #
    # If none of that is taken, or rows stand alone, records may be refused. Again the last one of each key is
    # sent, and of keys that do not get in, all. One that is refused waits, and with it what comes later with
    # its key, until the others have had their turn, since records of different tasks have no order among each
    # other. When a pass inserts nothing any more, the first waiting record of each key is refused for good.

    def __init__(
        self,
        session: Session,
        dialect: Dialect,
        target: Target,
        delete_when: str,
        policy: RefusedPolicy,
        uid: str,
        ties: Ties,
        scrubbed: Callable[[str], str],
        checks: Mapping[str, Callable[[str], str]],
    ) -> None:
        self._session, self._dialect, self._target, self._checks = session, dialect, target, checks
        self._delete_when, self._policy, self._uid, self._ties = delete_when, policy, uid, ties
        self._scrubbed = scrubbed
        self._done = Written()
        #: By position: a record that is tried again is refused again.
        self._refusals: dict[int, Refusal] = {}
        self._refused_keys: set[Params] = set()

    def run(self, rows: BufferedRows) -> Written:
        if self._ties is Ties.NONE or not any(map(self._all_or_nothing, self._ways(rows))):
            self._write_one_by_one(rows)
        done = self._done
        done.refusals = [self._refusals[position] for position in sorted(self._refusals)]
        done.superseded = rows.count - done.written - done.deleted - len(done.refusals)
        return done

    def _ways(self, rows: BufferedRows) -> Iterator[Iterator[Sequence[Change]]]:
        """Yield ways to the end state, the cheapest first."""
        if self._ties is not Ties.EVERY_STEP:
            last = self._last_of_each_key(rows)
            yield self._folded(rows, last)
            if self._ties is Ties.END_STATE:
                yield self._cleared(rows, last)
        yield self._parts(rows, {})

    def _all_or_nothing(self, parts: Iterator[Sequence[Change]]) -> bool:
        """Send everything, judged by what it comes to in the end; return whether the database took it."""
        self._begin_again()
        try:
            with self._session.savepoint(), self._dialect.deferred(self._session):
                for changes in parts:
                    self._hand_over(changes)
            return True
        except _EarlierCounts:
            pass
        except Exception as error:
            if self._dialect.trouble(error) is not Trouble.REFUSED:
                raise
        self._begin_again()
        return False

    def _folded(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[Sequence[Change]]:
        yield from self._lasts(rows, last)
        if self._refused_keys & last.keys():
            raise _EarlierCounts

    def _cleared(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[Sequence[Change]]:
        for changes in self._parts(rows, last):
            if changes:
                self._delete(changes)
        self._begin_again()
        yield from self._folded(rows, last)

    def _lasts(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[Sequence[Change]]:
        for changes in self._parts(rows, last):
            # Rows that go make room for others.
            yield sorted(changes, key=lambda one: not one.deletes) if self._ties.is_blind else changes

    def _begin_again(self) -> None:
        self._done, self._refusals, self._refused_keys = Written(), {}, set()

    def _write_one_by_one(self, rows: BufferedRows) -> None:
        last = {} if self._ties is Ties.EVERY_STEP else self._last_of_each_key(rows)
        stuck = self._in_turns(self._lasts(rows, last))
        # A record that is not taken does not take the place of an earlier one either.
        keys = {one.change.key for one in stuck} | self._refused_keys
        if last and keys:
            parts = self._parts(rows, {})
            stuck = self._in_turns([one for one in changes if one.key in keys] for changes in parts)
        while stuck:
            # Nobody gets in as things are: the first of each key never will.
            firsts = {one.change.key: one for one in reversed(stuck)}
            for one in stuck:
                if firsts[one.change.key] is one:
                    self._refuse(one.change.row, one.reason)
            stuck = self._in_turns([[one.change for one in stuck if firsts[one.change.key] is not one]])

    def _in_turns(self, parts: Iterable[Sequence[Change]]) -> list[_Refused]:
        """Send changes, again and again those that did not get in; return whom that does not help."""
        waiting: list[_Refused] = []
        for changes in parts:
            waiting += self._sent(changes, {one.change.key for one in waiting})
        waiting.sort(key=attrgetter("position"))
        # Where rows stand alone nobody makes room for another.
        while waiting and self._ties is not Ties.NONE:
            left = sorted(self._sent([one.change for one in waiting], set()), key=attrgetter("position"))
            if len(left) == len(waiting):
                break
            waiting = left
        return waiting

    def _sent(self, changes: Sequence[Change], held: set[Params]) -> list[_Refused]:
        """Hand changes to the database in their order; return those that it did not take, or did not get."""
        # Of keys that are held nothing is sent, so that no record overtakes another one with its key; those
        # of refused records are added.
        kept = [_Refused(one, _BEHIND) for one in changes if one.key in held] if held else []
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
                reason = self._scrubbed(self._dialect.reason(error))[:_MOST_REASON]
                return [*kept, _Refused(changes[0], reason)]
        # Of what is refused as a whole, find out who is meant; the earlier half first.
        half = len(changes) // 2
        return [*kept, *self._sent(changes[:half], held), *self._sent(changes[half:], held)]

    def _hand_over(self, changes: Sequence[Change]) -> None:
        written = deleted = 0
        for deletes, run in itertools.groupby(changes, key=lambda one: one.deletes):
            same = list(run)
            if deletes:
                self._delete(same)
                deleted += len(same)
            else:
                self._write(same)
                written += len(same)
        self._done.deleted += deleted
        self._done.written += written

    def _write(self, changes: Sequence[Change]) -> None:
        is_quick = self._ties.is_blind and len({one.key for one in changes}) == len(changes)
        write = self._dialect.write if is_quick else self._dialect.write_in_order
        write(self._session, self._target_of(changes), [one.params for one in changes])

    def _delete(self, changes: Sequence[Change]) -> None:
        target = self._target_of(changes)
        at = [target.columns.index(name) for name in target.key]
        keys = [tuple(one.params[place] for place in at) for one in changes]
        self._dialect.delete(self._session, target, keys)

    def _target_of(self, changes: Sequence[Change]) -> Target:
        return self._target.with_columns(self._columns(changes[0].row.batch))

    def _columns(self, batch: pa.RecordBatch) -> list[str]:
        return [name for name in batch.schema.names if name != self._delete_when]

    def _parts(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[list[Change]]:
        for batch, position in _parts(rows):
            yield self._changes(batch, position, last)

    def _changes(self, batch: pa.RecordBatch, first: int, last: Mapping[Params, int]) -> list[Change]:
        """Return what the records of a batch ask for; refuse those that no database can hold."""
        names, deletes, changes = self._columns(batch), self._deletes(batch), []
        params_of_rows = parameters(batch, names, self._dialect, self._checks)
        rows = zip(self._keys(batch, first), params_of_rows, deletes, strict=True)
        for index, (key, params, is_delete) in enumerate(rows):
            row = Row(batch, index, first + index)
            if last.get(key, row.position) != row.position:
                continue
            why = self._why_unfit(params, names, is_delete)
            if why or is_delete is None:
                self._refuse(row, why)
            else:
                changes.append(Change(row, key, params, is_delete))
        return changes

    def _last_of_each_key(self, rows: BufferedRows) -> dict[Params, int]:
        last: dict[Params, int] = {}
        if self._target.mode is WriteMode.INSERT:
            return last
        position = 0
        for batch in rows.batches():
            for key in self._keys(batch, position):
                # What can be no key is refused; another such record does not take its place.
                if not any(value is None or isinstance(value, Unfit) for value in key):
                    last[key] = position
                position += 1
        return last

    def _keys(self, batch: pa.RecordBatch, first: int) -> Iterator[Params]:
        """Return what is equal for records that are about one row; of inserts each is about its own."""
        if self._target.mode is WriteMode.INSERT:
            return ((first + index,) for index in range(batch.num_rows))
        columns = [
            python_values(batch.column(batch.schema.get_field_index(name))) for name in self._target.key
        ]
        return ((*map(_comparable, key),) for key in zip(*columns, strict=True))

    def _deletes(self, batch: pa.RecordBatch) -> list[bool | None]:
        if not self._delete_when:
            return [False] * batch.num_rows
        found: list[bool | None] = deletions(batch, self._delete_when).to_pylist()
        return found

    def _why_unfit(self, params: Params, names: Sequence[str], is_delete: bool | None) -> str:
        if is_delete is None:
            return why_no_kind(self._delete_when)
        for name, value in zip(names, params, strict=True):
            is_key = self._target.mode is WriteMode.UPSERT and name in self._target.key
            if isinstance(value, Unfit) and (is_key or not is_delete):
                return f"{name}: {value}"
            if value is None and is_key:
                return why_no_key(name)
        return ""

    def _refuse(self, row: Row, reason: str) -> None:
        if self._policy is OnBadRecord.FAIL:
            shown = (row.key(self._target.key) if self._target.key else row.record)[:MOST_SHOWN]
            raise BadRecordError(
                f"the table {self._target.table} refuses a record of sink '{self._uid}': {shown}",
                why=reason,
                what_to_do="nothing of its checkpoint is visible, and the checkpoint stays decided: mend the "
                "table so that it takes the record, or set on_refused, and start the job again",
                sink=self._uid,
            )
        self._refusals[row.position] = Refusal(row.position, reason, row.record)
        if self._target.mode is WriteMode.UPSERT:
            self._refused_keys.update(self._keys(row.batch.slice(row.index, 1), row.position))


def _parts(rows: BufferedRows) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yield all rows in parts that fit into memory, with the position of the first."""
    position = 0
    for batch in rows.batches():
        for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
            part = batch.slice(begin, _ROWS_AT_ONCE)
            yield part, position
            position += part.num_rows


def _comparable(value: Any) -> Any:
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


class JdbcCommitter(BufferedCommitter):
    def __init__(
        self, settings: JdbcSettings, context: SinkContext, connect: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(context)
        self._settings = settings
        self._database = Database(settings, context.uid, connect)
        self._control = ControlTable(
            settings.dialect, settings.control_table, context.job, context.uid, context.owner_epoch
        )

    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        """Write all rows with the checkpoint's id, or find that it was done."""
        dialect, settings = self._settings.dialect, self._settings
        with self._database.use(self._prepare) as session, session.transaction(dialect.begin):
            # This order matters: behind the claim nobody else changes the row until this transaction ends.
            if self._control.claim(session) is not None:
                self._require_ours(self._control.mark(session), checkpoint)
            turn = self._control.take_turn(session, checkpoint)
            if turn is Turn.FENCED:
                return CommitAnswer(Outcome.FENCED, "a newer owner has written to the control table")
            if turn is Turn.DONE:
                return self._repeated(session, checkpoint)
            # Looked at each time: somebody may have changed a table since. This order matters: nobody does
            # between the look and the end.
            for table in settings.tables:
                dialect.hold(session, table)
            columns = TableCheck(settings, self._context).run(session)
            write = CheckpointWrite(
                session,
                dialect,
                settings.target(self._context.schema),
                settings.deletes_by,
                settings.on_refused,
                self._context.uid,
                settings.ties(session, self._context.schema),
                settings.scrubbed,
                dialect.checks(columns),
            )
            done = write.run(rows)
            if done.refusals and isinstance(settings.on_refused, DeadLetterTable):
                settings.on_refused.write(session, self._control, checkpoint, done.refusals)
            facts = _facts(done, settings)
            self._control.note(session, facts, self._context.timeline.mark_of(checkpoint).token)
        return CommitAnswer(Outcome.COMMITTED, facts=facts)

    def newest_marks(self) -> Sequence[Mark]:
        with self._database.use(self._prepare) as session:
            mark = self._control.mark(session)
        return (mark,) if mark.checkpoint > CheckpointId(0) else ()

    def _require_ours(self, mark: Mark, checkpoint: CheckpointId) -> None:
        if mark.checkpoint > CheckpointId(0):
            self._context.require_ours(mark, checkpoint)

    def _repeated(self, session: Session, checkpoint: CheckpointId) -> CommitAnswer:
        newest, _, facts = self._control.read(session)
        facts.pop(TIMELINE, None)
        return CommitAnswer(Outcome.ALREADY_COMMITTED, facts=facts if newest == int(checkpoint) else {})

    def has_applied(self, checkpoint: CheckpointId) -> Applied:
        with self._database.use(self._prepare) as session, session.transaction(self._settings.dialect.begin):
            newest = self._control.claim(session)
            if newest is not None:
                self._require_ours(self._control.mark(session), checkpoint)
        if newest is None:
            return Applied.UNKNOWN
        return Applied.YES if newest >= checkpoint else Applied.NO

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
        settings = self._settings
        settings.create_tables(session, self._context.schema)
        self._control.require_row(session, self._control.note_in(self._context.place, str(settings.url)))


def _facts(done: Written, settings: JdbcSettings) -> dict[str, Any]:
    facts: dict[str, Any] = {"rows": done.written}
    if settings.key:
        facts |= {"deleted": done.deleted, "superseded": done.superseded}
    if done.refusals:
        facts["refused"] = len(done.refusals)
    return facts
