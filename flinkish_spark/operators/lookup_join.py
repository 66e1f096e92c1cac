"""The lookup join: looks up the keys of a batch of elements together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flinkish_spark.core.elements import OutputTag, tag_name
from flinkish_spark.core.iterators import USER_ERRORS, elements_of, guard_call, refuse_not_run
from flinkish_spark.joins.lookup import LookupJoin
from flinkish_spark.operators.context import NoKeyedState, close_operator
from flinkish_spark.operators.joins import PairContext
from flinkish_spark.operators.process import ElementError, OperatorOutput
from flinkish_spark.types.row_form import NoRowError, RowError, RowForm
from flinkish_spark.types.rows import ElementType
from flinkish_spark.types.to_python import as_it_is, copy_if_mutable

# PySpark unpickles a function anew for each task, so its attributes last for one micro-batch. Variables of a
# module last as long as the Python worker.

#: Rows per key with the time when they were read; least recently used keys first.
CachedAnswers = OrderedDict[Any, tuple[Sequence[Any], int]]

#: Caches by join. A worker may outlive jobs, so least recently used caches are dropped.
_OF_JOINS: OrderedDict[str, CachedAnswers] = OrderedDict()
_MOST_JOINS = 64


def find_cached_answers(join: str) -> CachedAnswers:
    kept = _OF_JOINS.setdefault(join, OrderedDict())
    _OF_JOINS.move_to_end(join)
    while len(_OF_JOINS) > _MOST_JOINS:
        _OF_JOINS.popitem(last=False)
    return kept


def forget_answers() -> None:
    _OF_JOINS.clear()


Rows = Sequence[Any]


class LookupJoinRun:
    def __init__(
        self, join: LookupJoin, uid: str, kept: CachedAnswers | None = None, counts_as: str = ""
    ) -> None:
        self._join, self._function = join, join.actual_function
        self._answers = _Answers(join, uid, OrderedDict() if kept is None else kept)
        self._context = PairContext(self._to_side)
        self._emitted = OperatorOutput()
        #: Copies an element for `key_of` and for each of its pairs; and a row for each element of its key,
        #: since the table or the cache may keep it.
        self._take = ElementType(join.left_type).take or as_it_is
        self._take_row = as_it_is if join.function is None else copy_if_mutable
        #: Position of the element of each row of the last batch; for side outputs by name.
        self.of_row: list[int] = []
        self.of_side_row: dict[str, list[int]] = {}
        try:
            join.table.open()
            self._function.open(NoKeyedState(uid, 1, counts_as))
        except BaseException:
            # Report the first error.
            close_operator(self, uid)
            raise

    def run(
        self, values: Sequence[Any], times_ms: Sequence[int | None] | None, processing_time_ms: int
    ) -> OperatorOutput:
        """Join the elements of a batch; rows have the order and the times of the elements."""
        self._emitted = emitted = OperatorOutput()
        keys = self._compute_keys(values)
        rows_of = self._answers.find(keys, processing_time_ms)
        self.of_row, self.of_side_row = [], {}
        stamps: Iterable[int | None] = times_ms or [None] * len(values)
        for at, (value, key, time_ms) in enumerate(zip(values, keys, stamps, strict=True)):
            # Rows of a table have no time.
            self._context.left_ms = self._context.result_ms = time_ms
            try:
                self._join_one(value, rows_of.get(key, ()) if _is_known(key) else ())
            except USER_ERRORS as error:
                raise ElementError(at, False, error) from error
            made = len(emitted.rows) - len(emitted.times_ms)
            emitted.times_ms.extend([time_ms] * made)
            self.of_row.extend([at] * made)
            for name, rows in emitted.side.items():
                of_rows = self.of_side_row.setdefault(name, [])
                of_rows.extend([at] * (len(rows) - len(of_rows)))
        return emitted

    def close(self) -> None:
        try:
            self._function.close()
        finally:
            self._join.table.close()

    def _compute_keys(self, values: Sequence[Any]) -> list[Any]:
        keys: list[Any] = []
        try:
            for value in values:
                key = refuse_not_run(self._join.key_of(self._take(value)), "key_of()")
                hash(key)
                keys.append(key)
        except USER_ERRORS as error:
            raise ElementError(len(keys), False, error) from error
        return keys

    def _join_one(self, value: Any, rows: Rows) -> None:
        join, context, emitted = self._function.process_element, self._context, self._emitted
        if not rows and self._join.join_type.keeps_left:
            rows = (None,)
        take, take_row = self._take, self._take_row
        for row in rows:
            made = join(take(value), take_row(row), context)
            emitted.rows.extend(map(copy_if_mutable, elements_of(made or ())))

    def _to_side(self, tag: OutputTag, value: Any, time_ms: int | None) -> None:
        self._emitted.side.setdefault(tag_name(tag), []).append((copy_if_mutable(value), time_ms))


class _Answers:
    """Reads rows from the cache, or else from the table."""

    def __init__(self, join: LookupJoin, uid: str, kept: CachedAnswers) -> None:
        self._table, self._cache, self._keys_per_call = join.table, join.cache, join.keys_per_call
        self._says = f"operator '{uid}': {type(join.table).__name__}.lookup() returned"
        # A join function knows the rows of its table; check them only without a function.
        row = ElementType(join.right_type)
        self._has_form = join.function is None and row.has_fields
        self._names = [field.name for field in row.fields]
        self._tuple_of = RowForm(self._names).tuple_of
        self._kept = kept

    def find(self, keys: Iterable[Any], now_ms: int) -> Mapping[Any, Rows]:
        found: dict[Any, Rows] = {}
        missing = []
        for key in dict.fromkeys(key for key in keys if _is_known(key)):
            kept = self._kept.get(key)
            # After the clock was set back, the age of an answer is unknown.
            if kept is not None and self._cache is not None and 0 <= now_ms - kept[1] < self._cache.ttl_ms:
                self._kept.move_to_end(key)
                found[key] = kept[0]
            else:
                missing.append(key)
        for begin in range(0, len(missing), self._keys_per_call):
            asked = missing[begin : begin + self._keys_per_call]
            answer = self._ask(asked)
            found.update(answer)
            self._keep(answer, now_ms)
        return found

    def _ask(self, keys: list[Any]) -> dict[Any, Rows]:
        answer = guard_call(self._table.lookup)(keys)
        if not isinstance(answer, Mapping):
            raise TypeError(
                f"{self._says} {type(answer).__name__}; it must be a mapping from keys to lists of rows"
            )
        rows_of = {key: answer.get(key, ()) for key in keys}
        for key, rows in rows_of.items():
            if not isinstance(rows, list | tuple) or hasattr(rows, "_fields"):
                raise TypeError(f"{self._says} {rows!r} for the key {key!r}; it must be a list of rows")
            if rows and self._has_form:
                try:
                    rows_of[key] = list(map(self._as_tuple, rows))
                except RowError as error:
                    says = f"{self._says} a wrong row for the key {key!r}: {error}"
                    raise TypeError(says) from error
        return rows_of

    def _keep(self, answer: Mapping[Any, Rows], now_ms: int) -> None:
        if self._cache is None:
            return
        for key, rows in answer.items():
            self._kept[key] = rows, now_ms
            self._kept.move_to_end(key)
        while len(self._kept) > self._cache.max_keys:
            self._kept.popitem(last=False)

    def _as_tuple(self, row: Any) -> Any:
        """Return a table's row as a tuple; a row with names is matched by name."""
        if row is None:
            return None
        try:
            found = self._tuple_of(row)
        except NoRowError:
            if len(self._names) > 1:
                raise
            # A table with one column may return the bare value.
            found = (row,)
        if len(found) != len(self._names):
            raise RowError(
                f"{len(found)} fields, but {len(self._names)} are declared: {', '.join(self._names)}"
            )
        return found


def _is_known(key: Any) -> bool:
    return key is not None and not (isinstance(key, tuple) and None in key)
