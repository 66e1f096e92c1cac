"""Adds routes to the rows of a stream: a record goes to its key group, a barrier to every partition.

    rows of the stream  --RouteRows-->  rows with hash and route  --InputPackers-->  blocks

If several inputs read one frame, a record has a route for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.protocol.latency import SUBTASK_MASK
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.branches import INPUT
from flinkish_spark.transport.key_hash import hash_keys
from flinkish_spark.transport.routing import Distribution, Routing

_Routes = npt.NDArray[np.int32]
_RECORD, _BARRIER, _WAKE, _MARKER = (
    int(kind) for kind in (C.Kind.RECORD, C.Kind.BARRIER, C.Kind.WAKE, C.Kind.MARKER)
)


@dataclass(frozen=True)
class InputRecords:
    #: The input's number in the column of :class:`~.branches.InputPaths`; None without that worker.
    number: int | None = None
    #: The upstream operator's output; None if it has only one.
    side: int | None = None
    #: Column that is null if the input's path has dropped the record; None to include these.
    place: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        by = ((INPUT, self.number), (C.SIDE, self.side))
        return (*(name for name, value in by if value is not None), *filter(None, [self.place]))

    def make_mask(self, records: pa.RecordBatch) -> npt.NDArray[np.bool_] | None:
        """Return the mask of own records; None if all records are own ones."""
        masks = [
            records.column(name).fill_null(-1).to_numpy() == value
            for name, value in ((INPUT, self.number), (C.SIDE, self.side))
            if value is not None
        ]
        if self.place is not None and records.column(self.place).null_count:
            masks.append(records.column(self.place).is_valid().to_numpy(zero_copy_only=False))
        return None if not masks else np.logical_and.reduce(masks)


@dataclass(frozen=True)
class RecordRoutes:
    routing: Routing
    distribution: Distribution
    #: Columns with the parts of the key; empty if all records have the same key.
    keys: tuple[str, ...]
    #: Names of the added columns with hash and route.
    hash_name: str
    route_name: str
    own: InputRecords = InputRecords()

    def of(self, records: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Return hashes and routes; the route is null for a record of another input."""
        hashes = hash_keys([records.column(name) for name in self.keys], records.num_rows)
        own = self.own.make_mask(records)
        mask = None if own is None or own.all() else ~own
        return pa.array(hashes), pa.array(self._routes(records, hashes), mask=mask)

    def _routes(self, records: pa.RecordBatch, hashes: npt.NDArray[np.int64]) -> _Routes:
        match self.distribution:
            case Distribution.BY_KEY:
                return self._of_group[hashes % len(self._of_group)]
            case Distribution.BY_CHANNEL | Distribution.PASSING:
                # On barrier routes the operator only passes rows on.
                passes = self.distribution is Distribution.PASSING
                routes = self.routing.of_barrier if passes else self.routing.of_broadcast
                channels = records.column(C.CHANNEL).fill_null(0).to_numpy()
                return np.array(routes, dtype=np.int32)[channels % len(routes)]  # type: ignore[no-any-return]
            case Distribution.BROADCAST:
                # To one route: the packer copies whole blocks for the others.
                return np.full(records.num_rows, self.routing.of_broadcast[0], dtype=np.int32)

    @cached_property
    def _of_group(self) -> _Routes:
        return np.array(self.routing.of_group, dtype=np.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_of_group"}


@dataclass(frozen=True)
class ControlRoutes:
    routing: Routing
    #: The operator's number among the reporters to the driver.
    operator: int
    has_broadcast: bool

    def of(self, kind: int, channel: int, sequence: int) -> tuple[int, ...]:
        """Return the routes of a control row: a barrier goes to all partitions, a call to its key group."""
        barriers = self.routing.of_barrier
        if kind == _BARRIER:
            return barriers
        if kind == _MARKER:
            return (barriers[channel & SUBTASK_MASK],)
        if kind == _WAKE and channel == self.operator:
            also = self.routing.of_broadcast if self.has_broadcast else ()
            return (self.routing.of_bundle[sequence], *also)
        # Reports to the driver and calls of downstream operators only pass through: one partition is enough.
        return barriers[:1]


@dataclass(frozen=True)
class RouteRows:
    """Adds hash and route for each input to records; emits control rows separately. For mapInArrow."""

    inputs: tuple[RecordRoutes, ...]
    #: Routes of control rows by operator; empty if there are only records.
    controls: tuple[ControlRoutes, ...]
    #: Input columns.
    given: T.StructType

    @property
    def columns(self) -> T.StructType:
        route = [T.StructField(C.ROUTE, T.IntegerType())] if self.controls else []
        columns = T.StructType([*route, *self.given])
        for one in self.inputs:
            columns = columns.add(one.hash_name, T.LongType()).add(one.route_name, T.IntegerType())
        return columns

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        names = self.columns.names
        for all_columns in batches:
            batch = all_columns.select(self.given.names)
            front: list[pa.Array] = []
            if self.controls:
                is_record = batch.column(C.KIND).to_numpy() == _RECORD
                if not is_record.all():
                    control = self._control_columns(batch.filter(pa.array(~is_record)))
                    yield pa.RecordBatch.from_arrays(control, names=names)
                    batch = batch.filter(pa.array(is_record))
                front = [pa.array(np.zeros(batch.num_rows, dtype=np.int32))]
            if batch.num_rows or not self.controls:
                added = [column for one in self.inputs for column in one.of(batch)]
                yield pa.RecordBatch.from_arrays([*front, *batch.columns, *added], names=names)

    def _control_columns(self, rows: pa.RecordBatch) -> list[pa.Array]:
        control = zip(
            *(rows.column(name).to_pylist() for name in (C.KIND, C.CHANNEL, C.SEQUENCE)), strict=True
        )
        places, routes = list[int](), list[int]()
        for place, (kind, channel, sequence) in enumerate(control):
            for one in self.controls:
                own = one.of(kind, channel, sequence)
                routes += own
                places += [place] * len(own)
        sent = rows.take(pa.array(places, pa.int64()))
        none = [pa.nulls(len(routes), pa.int64()), pa.nulls(len(routes), pa.int32())] * len(self.inputs)
        return [pa.array(routes, pa.int32()), *sent.columns, *none]
