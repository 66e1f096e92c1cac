"""Writing the rows of one checkpoint, within its transaction.

What stands in the table in the end is as if the records had come one by one: by micro-batch, task, and the
order in which the task saw them. How far that may be shortened depends on what ties rows together, see
:class:`~flinkish_spark.sinks.jdbc.dialect.Ties`. Where something does, all of it or nothing is tried first:

1. Of each key the last record.
2. The same, behind a removal of all rows that are written: so rows can change places.
3. Each record in its order.

If none of that is taken, or rows stand alone, records may be refused. Again the last one of each key is sent,
and of keys that do not get in, all. One that is refused waits, and with it what comes later with its key,
until the others have had their turn, since records of different tasks have no order among each other. Refused
for good is the first record of a key that still waits when nobody gets in any more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flinkish_spark.errors import BadRecordError
from flinkish_spark.formats import OnBadRecord
from flinkish_spark.sinks.buffer import BufferedRows
from flinkish_spark.sinks.jdbc.dialect import Dialect, Params, Session, Target, Ties, Trouble, WriteMode
from flinkish_spark.sinks.jdbc.refused import MOST_SHOWN, Refusal, RefusedPolicy, Row, why_no_key
from flinkish_spark.sinks.jdbc.values import Unfit, parameters, python_values

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
    """What became of the rows of a checkpoint: how many, and those that were refused."""

    written: int = 0
    deleted: int = 0
    superseded: int = 0
    refusals: list[Refusal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Change:
    """What one record asks for.

    Parameters
    ----------
    row
        The record.
    key
        Equal for records whose order among each other counts.
    params
        Of the columns of the table.
    deletes
        Whether the row with its key goes.
    """

    row: Row
    key: Params
    params: Params
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
    """Writes the rows of a checkpoint; see the module.

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
    ties
        What ties rows of the table together.
    scrubbed
        Takes secrets out of what the database says.
    """

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
    ) -> None:
        self._session, self._dialect, self._target = session, dialect, target
        self._delete_when, self._policy, self._uid, self._ties = delete_when, policy, uid, ties
        self._scrubbed = scrubbed
        self._done = Written()
        #: By position: a record that is tried again is refused again.
        self._refusals: dict[int, Refusal] = {}
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
        if self._ties is Ties.NONE or not any(map(self._all_or_nothing, self._ways(rows))):
            self._write_one_by_one(rows)
        done = self._done
        done.refusals = [self._refusals[position] for position in sorted(self._refusals)]
        done.superseded = rows.count - done.written - done.deleted - len(done.refusals)
        return done

    # -- all or nothing -------------------------------------------------------------------------
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
        """Take the rows of all keys away, then yield the last record of each."""
        for changes in self._parts(rows, last):
            if changes:
                self._delete(changes)
        self._begin_again()
        yield from self._folded(rows, last)

    def _lasts(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[Sequence[Change]]:
        """Yield the last record of each key; of inserts all."""
        for changes in self._parts(rows, last):
            # Rows that go make room for others.
            yield sorted(changes, key=lambda one: not one.deletes) if self._ties.is_blind else changes

    def _begin_again(self) -> None:
        self._done, self._refusals, self._refused_keys = Written(), {}, set()

    # -- one by one -----------------------------------------------------------------------------
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
        waiting.sort(key=_position)
        # Where rows stand alone nobody makes room for another.
        while waiting and self._ties is not Ties.NONE:
            left = sorted(self._sent([one.change for one in waiting], set()), key=_position)
            if len(left) == len(waiting):
                break
            waiting = left
        return waiting

    # -- sending --------------------------------------------------------------------------------
    def _sent(self, changes: Sequence[Change], held: set[Params]) -> list[_Refused]:
        """Hand changes to the database in their order; return those that it did not take, or did not get.

        Parameters
        ----------
        held
            Keys of which nothing is sent, so that no record overtakes another one with its key; those of
            refused records are added.
        """
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
        """Send changes in their order; count them if the database takes all of them."""
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

    # -- from rows to changes -------------------------------------------------------------------
    def _parts(self, rows: BufferedRows, last: Mapping[Params, int]) -> Iterator[list[Change]]:
        for batch, position in _parts(rows):
            yield self._changes(batch, position, last)

    def _changes(self, batch: pa.RecordBatch, first: int, last: Mapping[Params, int]) -> list[Change]:
        """Return what the records of a batch ask for; refuse those that no database can hold.

        Parameters
        ----------
        last
            The position of the record that counts, by key; of keys that are not in it all do.
        """
        names, deletes, changes = self._columns(batch), self._deletes(batch), []
        rows = zip(self._keys(batch, first), parameters(batch, names, self._dialect), deletes, strict=True)
        for index, (key, params, is_delete) in enumerate(rows):
            row = Row(batch, index, first + index)
            if last.get(key, row.position) != row.position:
                continue
            why = self._why_unfit(params, names, is_delete)
            if why:
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

    def _deletes(self, batch: pa.RecordBatch) -> list[bool]:
        if not self._delete_when:
            return [False] * batch.num_rows
        return [bool(v) for v in batch.column(batch.schema.get_field_index(self._delete_when)).to_pylist()]

    def _why_unfit(self, params: Params, names: Sequence[str], is_delete: bool) -> str:
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


def _position(refused: _Refused) -> int:
    return refused.position


def _comparable(value: Any) -> Any:
    """Return a key's value so that it is equal to itself."""
    return "NaN" if isinstance(value, float) and math.isnan(value) else value
