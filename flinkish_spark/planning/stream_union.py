"""The tagged union of all streams that sinks read, and the pass that can make the rows of all sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.plans import name_chain, name_scan
from flinkish_spark.core.arrow_pass import ComposedWorker, find_pass
from flinkish_spark.planning.sink_rows import (
    DeferredPass,
    PlannedSink,
    SinkPart,
    SinkWorkers,
    TaggedStream,
    hashable,
    plan_functions_before_sink,
)
from flinkish_spark.planning.transforms import WorkerPass
from flinkish_spark.protocol.plan_layout import Chain, ScanRole
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.key_hash import can_hash
from flinkish_spark.transport.sink_rows import ToSinkRows
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import PREFIX, check_field_names

#: A deferred pass is sent with each micro-batch, so it may not be larger than this; larger functions, such
#: as models, are sent once with the streaming query. From this size on Spark broadcasts a function.
_MOST_PICKLED = 1 << 20


class StreamUnion:
    """The streams that sinks read, in order, as one tagged DataFrame."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._ends: dict[Chain, TaggedStream] = {}
        #: By chain: the plan of an operator that shares tasks with others.
        self.shared: dict[str, TaggedStream] = {}

    @property
    def chains(self) -> tuple[Chain, ...]:
        return tuple(self._ends)

    def add(self, chain: Chain, tagged: TaggedStream) -> tuple[SinkPart, T.StructType]:
        frame = self._ends.setdefault(chain, replace(tagged, transforms=())).frame
        fields, places = tuple(tagged.schema.names), find_fields(tagged)
        own = tagged.outputs[tagged.side] if tagged.outputs else fields
        named_by = next(i for i, end in enumerate(self._ends.values()) if end.frame is frame)
        columns = tuple(f"s{named_by}_{places.index(name)}" for name in own)
        side = tagged.side if tagged.outputs else None
        index = list(self._ends).index(chain)
        part = SinkPart(index, columns, fields, tagged.channels, tagged.transforms, side)
        if not tagged.transforms:
            return part, tagged.schema
        schema, one_pass = plan_functions_before_sink(self._spark, tagged.transforms, tagged.schema, columns)
        check_field_names(schema, "the result of a transform")
        return replace(part, one_pass=one_pass), schema

    def unite(self, asked: set[int]) -> DataFrame:
        """Return the union of the ends of all chains; records of the streams `asked` keep their sequence."""
        ends, frames = list(self._ends.items()), []
        for index, (chain, stream) in enumerate(ends):
            shown = [at for at, (_, other) in enumerate(ends) if other.frame is stream.frame]
            if index != shown[0]:
                continue
            beside = [C.SEQUENCE] if asked.intersection(shown) else []
            frames.append(name_chain(tag(stream, index, beside, self._find_streams(shown)), chain))
        return reduce(partial(DataFrame.unionByName, allowMissingColumns=True), frames)

    def _find_streams(self, shown: Sequence[int]) -> list[int]:
        """Return the stream of each output, if several operators share one frame."""
        ends = list(self._ends.items())
        chain, stream = ends[shown[0]]
        if chain.name not in self.shared:
            return []
        first = {self.shared[ends[at][0].name].side: at for at in shown}
        found: list[int] = []
        for output in range(len(stream.outputs)):
            # An output without a reader may belong to any stream.
            found.append(first[output] if output in first else found[-1])
        return found

    def plan_deferred_pass(self, sinks: Sequence[PlannedSink]) -> DeferredPass | None:
        """Return the last pass of the plan, if it makes the rows of all sinks."""
        (chain, first), *others = self._ends.items()
        made = None if first.by_workers is None else find_pass(first.by_workers)
        if made is None or any(other.by_workers is not first.by_workers for _, other in others):
            return None
        given, worker = made.given, ComposedWorker(made.workers)
        streams, by_side = list(self._ends.values()), self._find_streams(range(len(self._ends)))
        workers = {sink.uid: make_sink_workers(sink, streams, by_side) for sink in sinks}
        of_sinks = {uid: own for uid, own in workers.items() if own is not None}
        size = len(cloudpickle.dumps((worker, of_sinks)))  # type: ignore[no-untyped-call]
        if len(of_sinks) < len(workers) or size > _MOST_PICKLED:
            return None
        named = name_scan(given, ScanRole.RECORDS, first.source) if first.source else given
        return DeferredPass(name_chain(named, chain), worker, of_sinks)


def make_sink_workers(
    sink: PlannedSink, streams: Sequence[TaggedStream], by_side: Sequence[int]
) -> SinkWorkers | None:
    """Return the workers that make a sink's rows from its stream; None if Spark computes some of them.

    `by_side` is the stream of each output, if there are several streams.
    """
    part, fields = sink.parts[0], sink.schema
    stream = streams[part.stream]
    # Spark hashes the columns of all outputs; a null does not change a hash, except of types without a hash.
    hashed = (*fields, *(one for one in stream.frame.schema if not one.name.startswith(PREFIX)))
    if len(sink.parts) > 1 or not all(can_hash(one.dataType) for one in hashed):
        return None
    # A sink of a side output reads a part of the main output's stream.
    in_stream = find_fields(stream)
    names = tuple(in_stream[int(column.rpartition("_")[2])] for column in part.columns)
    sides = frozenset(side for side, own in enumerate(by_side) if own == part.stream) if by_side else None
    if not part.transforms:
        rows = ToSinkRows(fields, names, part.side, sides)
        return SinkWorkers((rows,), rows.columns)
    function = part.function
    found = None if function is None else function.find_workers()
    if found is None:
        return None
    # Named as in the union, since the function expects these names.
    kinds = stream.frame.schema
    in_union = [T.StructField(n, kinds[own].dataType) for n, own in zip(part.columns, names, strict=True)]
    given = ToSinkRows(T.StructType(in_union), names, part.side, sides, has_hash=False)
    workers, outputs = found
    rows = ToSinkRows(fields, tuple(outputs), second=C.HASH)
    return SinkWorkers((given, *workers, rows), rows.columns, isinstance(function, WorkerPass))


def find_fields(stream: TaggedStream) -> list[str]:
    control = {*C.CONTROL, C.SIDE, C.TIME}
    return [name for name in stream.frame.columns if name not in control]


def tag(
    stream: TaggedStream, index: int, beside: Sequence[str] = (), by_side: Sequence[int] = ()
) -> DataFrame:
    """Give a stream's columns names of their own in the union, and each record its hash."""
    names = find_fields(stream)
    columns = [F.col(quote_name(name)) for name in names]
    types = stream.frame.schema
    hashed = F.xxhash64(*[hashable(c, types[n].dataType) for c, n in zip(columns, names, strict=True)])
    is_record = F.col(C.KIND) == int(C.Kind.RECORD)
    return stream.frame.select(
        C.KIND,
        C.CHECKPOINT,
        C.CHANNEL,
        # The second number of a report; for a barrier it has no meaning.
        F.when(is_record, hashed).otherwise(F.col(C.SEQUENCE)).alias(C.HASH),
        (F.get(F.array(*map(F.lit, by_side)), F.col(C.SIDE)) if by_side else F.lit(index)).alias(C.STREAM),
        *([C.SIDE] if stream.outputs else []),
        *beside,
        *[column.alias(f"s{index}_{i}") for i, column in enumerate(columns)],
    )
