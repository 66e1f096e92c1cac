"""The lookup join as mapInArrow runs it: the keys of a batch are asked for together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.clock import SystemClock
from flinkish_spark.joins.lookup import LookupJoin
from flinkish_spark.operators.group_run import ElementFailed
from flinkish_spark.operators.lookup_answers import kept_answers
from flinkish_spark.operators.lookup_join import LookupJoinRun
from flinkish_spark.runtime.arrow_rows import OutputError, RowReader, RowWriter
from flinkish_spark.runtime.columns import PREFIX, TIME
from flinkish_spark.runtime.keyed_operator import Origins
from flinkish_spark.runtime.row_blocks import arrow_schema, as_schema
from flinkish_spark.runtime.row_functions import RowFunction
from flinkish_spark.runtime.worker_gc import freeze_modules


@dataclass(frozen=True)
class LookupRows:
    """Called by mapInArrow, once per task; pickled into the plan.

    Parameters
    ----------
    name
        What errors call it.
    output
        Fields of the rows that are made.
    carried
        Control columns that go along with what is made of a row.
    side
        Name of the side output that is read; None for the main output.
    kept_as
        By what name a worker keeps answers from one micro-batch to the next.
    """

    join: LookupJoin
    name: str
    output: T.StructType
    carried: tuple[T.StructField, ...]
    origins: Origins = field(default_factory=Origins)
    side: str | None = None
    kept_as: str = field(kw_only=True)

    @property
    def columns(self) -> T.StructType:
        """Columns that come out."""
        return T.StructType([*self.output, *self.carried])

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Work through the batches of a task."""
        writer, schema = RowWriter.of(self.output), arrow_schema(self.columns)
        with self._opened() as run:
            for batch in batches:
                made, of_row = self._made(run, batch)
                try:
                    arrays = writer.write(made)
                except OutputError as error:
                    at = of_row[error.row] if error.row is not None else 0
                    raise self._blame.blamed(batch, at, error, f"the function {error}") from error
                taken = pa.array(np.array(of_row, dtype=np.int64))
                carried = [batch.column(one.name).take(taken) for one in self.carried]
                rows = pa.RecordBatch.from_arrays([*arrays, *carried], names=schema.names)
                yield as_schema(rows, schema)

    @contextmanager
    def _opened(self) -> Iterator[LookupJoinRun]:
        """Open table and function for as long as a task lasts; both are closed, too, if something fails."""
        kept = None if self.join.cache is None else kept_answers(self.kept_as)
        with self._blame.called("open"):
            run = LookupJoinRun(self.join, self.name, 1, kept)
        freeze_modules()
        with self._blame.closing(run):
            yield run

    def _made(self, run: LookupJoinRun, batch: pa.RecordBatch) -> tuple[list[object], list[int]]:
        """Return the rows of the output that is read, and of which record each is."""
        names = [name for name in batch.schema.names if not name.startswith(PREFIX)]
        values = list(RowReader(names, names, ()).read(batch)[1])
        times = batch.column(TIME).to_pylist() if TIME in batch.schema.names else None
        try:
            # How old a cached answer is, is nobody's business but the cache's: no result depends on it
            # that the table itself does not change under the job's feet.
            emitted = run.run(values, times, SystemClock().wall_ms())
        except ElementFailed as failure:
            raise self._blame.blamed(batch, max(failure.at, 0), failure.error) from failure.error
        if self.side is None:
            return emitted.rows, run.of_row
        return [row for row, _ in emitted.side.get(self.side, ())], run.of_side_row.get(self.side, [])

    @property
    def _blame(self) -> RowFunction:
        return RowFunction(self.name, lambda record: record, origins=self.origins)
