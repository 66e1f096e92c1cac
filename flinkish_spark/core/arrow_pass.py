"""Workers that Spark runs over a frame's Arrow batches, several in one pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame

if TYPE_CHECKING:
    from pyspark.resource import ResourceProfile
    from pyspark.sql import types as T

#: A function for mapInArrow, called once per task.
Worker = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: Names that PySpark does not parse: "a.b" would be a field of a STRUCT, "*" all columns.
_WORD = re.compile(r"\w+")
#: Attribute of a frame that workers make.
_PASS = "_fs_pass"


@dataclass(frozen=True, eq=False)
class ArrowPass:
    """Workers that run one after another over a frame, in one pass; Spark's frame is made when it is used.

    Spark takes 17 ms to make a frame, and a micro-batch needs only that of the last worker.
    """

    given: DataFrame
    workers: tuple[Worker, ...]
    columns: T.StructType | str

    @cached_property
    def frame(self) -> DataFrame:
        made = self.make_frame(None)
        if isinstance(made, DataFrame):
            # A copy without the frame: in a cycle the frame would live until Python collects garbage.
            setattr(made, _PASS, replace(self))
        return made

    def make_frame(self, resources: ResourceProfile | None) -> DataFrame:
        """Return the frame; column names may be arbitrary.

        `DataFrame.mapInArrow` parses each column's name as an expression.
        """
        run: Worker = self.workers[0] if len(self.workers) == 1 else ComposedWorker(self.workers)
        plain, names = self.given, self.given.columns
        if not all(map(_WORD.fullmatch, names)):
            plain = plain.toDF(*(f"_fs_column_{at}" for at in range(len(names))))
            run = _ColumnRenamer(run, tuple(names))
        said: dict[str, Any] = {} if resources is None else {"profile": resources}
        return plain.mapInArrow(run, self.columns, **said)


def map_in_pass(rows: DataFrame | ArrowPass, worker: Worker, columns: T.StructType | str) -> ArrowPass:
    """Apply a worker in Arrow batches, in the pass that makes the rows unless Spark makes or keeps them."""
    before = find_pass(rows) or ArrowPass(frame_of(rows), (), columns)
    return ArrowPass(before.given, (*before.workers, worker), columns)


def map_in_arrow(
    rows: DataFrame | ArrowPass,
    worker: Worker,
    columns: T.StructType | str,
    resources: ResourceProfile | None = None,
) -> DataFrame:
    """Apply a worker as :func:`map_in_pass` does; with resources of its own it has a pass of its own."""
    if resources is None:
        return map_in_pass(rows, worker, columns).frame
    return ArrowPass(frame_of(rows), (worker,), columns).make_frame(resources)


def frame_of(rows: DataFrame | ArrowPass) -> DataFrame:
    return rows.frame if isinstance(rows, ArrowPass) else rows


def find_pass(rows: DataFrame | ArrowPass) -> ArrowPass | None:
    """Return the pass that makes rows, which a further worker can join; None if Spark makes or keeps them."""
    if isinstance(rows, ArrowPass):
        return rows
    made = getattr(rows, _PASS, None)
    return made if isinstance(made, ArrowPass) and not rows.is_cached else None


def copy_pass(frame: DataFrame, named: DataFrame) -> None:
    """Make the pass of a frame that of another, which has the same rows under other names in the plan."""
    if (made := getattr(frame, _PASS, None)) is not None:
        setattr(named, _PASS, made)


def is_made_by_workers(rows: DataFrame | ArrowPass) -> bool:
    """Return whether workers make rows, so that a further one can run in the same pass."""
    return find_pass(rows) is not None


@dataclass(frozen=True)
class ComposedWorker:
    """Several workers composed into one, each on the output of the one before."""

    workers: tuple[Worker, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        made = iter(batches)
        for worker in self.workers:
            made = worker(made)
        return made


@dataclass(frozen=True)
class _ColumnRenamer:
    worker: Worker
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.worker(batch.rename_columns(list(self.names)) for batch in batches)
