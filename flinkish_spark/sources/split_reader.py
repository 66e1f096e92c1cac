"""A source of splits as Spark sees it: a streaming DataSource whose offset is the position.

The reader lives in one Python process per scan that Spark keeps on the driver, and a copy of it in
every task. Spark logs what :meth:`SplitStreamReader.latestOffset` returns before it runs the micro-batch;
a micro-batch that is run again asks nobody where it begins or ends.

Spark does not log where the first micro-batch begins. A split begins at 0, or where the source says; what
it says is kept in the job directory, since after a crash it might say something else.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from flinkish_spark.errors import FlinkishError, may_pass
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.arrow_rows import OutputError, RowWriter
from flinkish_spark.runtime.held_channels import read_held
from flinkish_spark.runtime.required_values import first_missing, has_required
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.sources.batch_columns import as_declared
from flinkish_spark.sources.rates import Pace, shares
from flinkish_spark.sources.split_checks import (
    checked_count,
    checked_end,
    checked_offset,
    checked_splits,
    gone_through,
    moved,
)
from flinkish_spark.sources.split_positions import Offset, SplitPosition
from flinkish_spark.sources.splits import SourceFailed, SourceUnavailable, SplitSource, reaches
from flinkish_spark.store import LocalStore
from flinkish_spark.user_iterators import USER_ERRORS, elements_of

if TYPE_CHECKING:
    import pyarrow as pa

#: Spark asks every 10 ms while there is nothing to read; the source is asked this often.
_ASK_EVERY_S = 0.025
_T = TypeVar("_T")


class SplitPiece(InputPartition):
    """What one task reads of one split."""

    def __init__(self, number: int, split: str, start: Offset, end: Offset) -> None:
        super().__init__(None)
        self.number, self.split, self.start, self.end = number, split, start, end


class SplitStreamReader(DataSourceStreamReader):
    """Asks the source, and keeps to its limits.

    Parameters
    ----------
    source
        Bound to its uid.
    folder
        Where the beginnings of splits are kept: the job's, or of a lineage that begins at a savepoint.
        Empty for a stream outside of a job.
    control_path
        Beside which it is told what to hold back; empty as well.
    """

    def __init__(self, source: SplitSource, folder: str, control_path: str = "") -> None:
        self._source, self._folder, self._control_path = source, folder, control_path
        self._pace = Pace(source.rate, time.monotonic())
        self._turn, self._asked_at = 0, float("-inf")

    @property
    def _uid(self) -> str:
        return self._source._fs_uid

    # -- offsets --------------------------------------------------------------------------------
    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a log begins: in a savepoint, or with no split known."""
        if self._source._fs_start is None:
            return SplitPosition(self._uid, {}).to_json()
        return SplitPosition.from_json(self._source._fs_start.position).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return no limit of Spark's: the source has its own."""
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there is nothing new."""
        position = SplitPosition.from_json(start)
        if position.is_ended:
            return start
        self._wait_a_little()
        found = self._ask("splits", lambda: gone_through(self._source.splits_from(position)))
        names = checked_splits(self._uid, found, position)
        known = position.moved_to({name: self._first(name) for name in names if name not in position.offsets})
        held = read_held(self._control_path, self._uid)
        free = [name for name, number in known.numbers().items() if not held.holds(number)]
        wanting = [name for name in free if not self._is_at_end(name, known.offsets[name])]
        ends = self._latest(known, wanting)
        end = known.moved_to(ends)
        is_ended = self._ask("end", lambda: self._source.is_at_end(end))
        done = frozenset(name for name, offset in end.offsets.items() if self._is_at_end(name, offset))
        return SplitPosition(self._uid, end.offsets, is_ended, done).to_json()

    def _latest(self, position: SplitPosition, wanting: list[str]) -> dict[str, Offset]:
        """Ask the splits that have not ended how far they can be read, within the limits."""
        allowed = shares(self._pace.allowance(time.monotonic()), wanting, self._turn)
        self._turn += 1
        ends = {}
        for name, limit in allowed.items():
            if limit == 0:
                continue
            start = position.offsets[name]
            found = self._ask("latest", lambda: self._source.latest(name, start, limit))  # noqa: B023
            ends[name] = checked_offset(self._uid, name, start, found, "latest")
            if limit is not None and ends[name] != start:
                end = ends[name]
                taken = self._ask("records_between", lambda: self._source.records_between(name, start, end))  # noqa: B023
                count = checked_count(self._uid, name, taken)
                self._pace.took(limit if count is None else count)
        return ends

    def _is_at_end(self, split: str, offset: Offset) -> bool:
        end = self._ask("end", lambda: self._source.end(split))
        return reaches(offset, checked_end(self._uid, split, end))

    def _first(self, split: str) -> Offset:
        """Return where a split begins, asking the source once in the life of the job."""
        if type(self._source).first is SplitSource.first:
            return 0
        if not self._folder:
            return self._ask("first", lambda: self._source.first(split))
        store = LocalStore(Path(self._folder))
        objects = SealedObjects(store, str(store.root))
        digest = hashlib.sha256(split.encode()).hexdigest()[:24]
        key, kind = f"first-splits/{self._uid}/{digest}.json", "first-split"
        if objects.optional(key, kind, dict) is None:
            first = self._ask("first", lambda: self._source.first(split))
            checked_offset(self._uid, split, first, first, "first")
            store.create_if_absent(key, seal(kind, {"split": split, "offset": first}))
        return objects.read(key, kind, dict)["offset"]

    def _wait_a_little(self) -> None:
        left = self._asked_at + _ASK_EVERY_S - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._asked_at = time.monotonic()

    def _ask(self, method: str, question: Callable[[], _T]) -> _T:
        with named_failures(self._uid, method):
            return question()

    def stop(self) -> None:
        """Let the source close what it has opened."""
        self._source.close()

    # -- reading --------------------------------------------------------------------------------
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return a piece for every split of which there is something to read."""
        begins, ends = SplitPosition.from_json(start).offsets, SplitPosition.from_json(end)
        begins = {name: begins[name] if name in begins else self._first(name) for name in ends.offsets}
        numbers = ends.numbers()
        return [
            SplitPiece(numbers[name], name, begins[name], ends.offsets[name])
            for name in moved(begins, ends.offsets)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the records of one piece with channel and sequence. Called in a task."""
        assert isinstance(partition, SplitPiece)
        with named_failures(self._uid, "read"):
            found = iter(elements_of(self._source.read(partition.split, partition.start, partition.end)))
        place = partition.start if type(partition.start) is int else 0
        rows = _Rows(self._source.record_type, partition.number, place)
        while True:
            # Only the work of the source and its records is named: Spark's own goes on at the yields.
            with named_failures(self._uid, "read"):
                one = next(found, _NO_MORE)
                made = rows.of(one)
            yield from made
            if one is _NO_MORE:
                return


_PLACE = (T.StructField(C.CHANNEL, T.LongType()), T.StructField(C.SEQUENCE, T.LongType()))


#: Not None, which a source may have yielded by mistake: it would end the piece, and lose what follows.
_NO_MORE: Any = object()
#: Rows that become one batch.
_HELD_ROWS = 1024


class _Rows:
    """What a source yields in one piece, as Arrow with channel and sequence behind the fields.

    Spark would turn rows into Arrow itself: it cuts 1.5 to 1, makes a text of any value, and says of what it
    refuses neither the field nor the source.
    """

    def __init__(self, fields: T.StructType, channel: int, place: int) -> None:
        self._writer, self._types = RowWriter.of(fields), T.StructType([*fields, *_PLACE])
        self._required = [field for field in fields if not field.nullable or has_required(field.dataType)]
        self._channel, self._place = channel, place
        self._held: list[Any] = []

    def of(self, one: Any) -> list[pa.RecordBatch]:
        """Take a record, a batch of them, or the end; return what is complete by that."""
        import pyarrow as pa

        if isinstance(one, pa.RecordBatch):
            return [*self._written(), *self._complete(self._placed(one))]
        if one is _NO_MORE:
            return self._written()
        self._held.append(one)
        return self._written() if len(self._held) == _HELD_ROWS else []

    def _written(self) -> list[pa.RecordBatch]:
        import pyarrow as pa

        held, self._held = self._held, []
        if not held:
            return []
        try:
            columns = self._writer.write(held)
        except OutputError as error:
            raise ValueError(f"it {str(error).replace('emitted', 'yielded', 1)}") from None
        return self._placed(pa.RecordBatch.from_arrays(columns, names=self._types.names[: -len(_PLACE)]))

    def _complete(self, batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """Refuse nulls where the schema says that there are none; of rows their writer sees to it."""
        for batch in batches:
            for field in self._required:
                if missing := first_missing(field, batch.column(field.name)):
                    raise ValueError(f"it yielded a wrong value: {missing}, in row {missing.row} of a batch")
        return batches

    def _placed(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        first, self._place = self._place, self._place + batch.num_rows
        return [_with_place(batch, self._channel, first, self._types)] if batch.num_rows else []


def _with_place(batch: pa.RecordBatch, channel: int, place: int, types: T.StructType) -> pa.RecordBatch:
    """Return a batch as Spark wants it: types of the schema, and the control columns behind."""
    import numpy as np
    import pyarrow as pa
    from pyspark.sql.pandas.types import to_arrow_schema

    schema, rows = to_arrow_schema(types, timezone="UTC"), batch.num_rows
    own = [as_declared(batch.column(one.name), one) for one in list(schema)[: -len(_PLACE)]]
    control = [np.full(rows, channel, np.int64), np.arange(place, place + rows, dtype=np.int64)]
    return pa.RecordBatch.from_arrays([*own, *map(pa.array, control)], schema=schema)


@contextmanager
def named_failures(uid: str, method: str) -> Iterator[None]:
    """Say which method of which source failed: Spark passes on only text.

    An OSError means that the source cannot be asked now, or is refused what it asks for, which is counted.
    Any other error is one of its code.
    """
    try:
        yield
    except FlinkishError:
        raise
    except OSError as error:
        # Only the name of a class passes through Spark.
        raise (SourceUnavailable if may_pass(error) else SourceFailed)(
            f"{method}() of source '{uid}' failed", why=f"{type(error).__name__}: {error}"
        ) from error
    except USER_ERRORS as error:
        from flinkish_spark.runtime.keyed_operator import USER_FUNCTION_MARKER

        what = {
            "uid": uid,
            "what": f"{method}() of source '{uid}'",
            "error": f"{type(error).__name__}: {error}",
        }
        raise RuntimeError(f"{USER_FUNCTION_MARKER} {json.dumps(what)}") from error


class SplitDataSource(DataSource):
    """Base of the classes that :func:`data_source_of` makes."""

    _format: str
    _source: SplitSource
    _folder: str
    _control_path: str

    @classmethod
    def name(cls) -> str:
        """Return the format name."""
        return cls._format

    def schema(self) -> T.StructType:
        """Return the source's fields, channel and sequence."""
        return T.StructType([*self._source.record_type, *_PLACE])

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:
        """Return the reader."""
        return SplitStreamReader(self._source, self._folder, self._control_path)


def data_source_of(source: SplitSource, folder: str, control_path: str = "") -> type[SplitDataSource]:
    """Return the class that Spark is given for a source; see :class:`SplitStreamReader`.

    The source travels in it, and not in an option: options are part of plans that people look at.
    """
    own = {
        "_format": source._fs_format,
        "_source": source,
        "_folder": folder,
        "_control_path": control_path,
    }
    # Not importable, so that it is sent with what is in it.
    return type("SplitDataSourceOf", (SplitDataSource,), {**own, "__module__": "__main__"})
