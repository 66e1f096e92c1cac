"""Reading the outputs: topics as a read_committed reader sees them, Delta tables, Parquet files.

One chunk of rows at a time; nothing of a row is kept but what is counted.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from flinkish_spark.audit.counting import InputOffsets, NamedOffsets
from flinkish_spark.audit.decided import BatchName, Decided, Visible
from flinkish_spark.audit.delta_log import Table, UnreadableTable
from flinkish_spark.audit.key_order import KeyOrder
from flinkish_spark.audit.origins import OriginNames, OriginReader, Origins, header_column, key_hashes, texts
from flinkish_spark.errors import SchemaError
from flinkish_spark.kafka import Isolation, KafkaAdmin, KafkaConnection
from flinkish_spark.kafka.admin import unknown_topic
from flinkish_spark.kafka.barrier_records import BARRIER_HEADER
from flinkish_spark.kafka.range_reader import OffsetRange, RangeReader, ReaderSettings
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.sinks.delta_restore import app_id
from flinkish_spark.sources.kafka_retention import keeping_of

#: Header, or column, that names the micro-batch of a row.
BATCH_FIELD = "flinkish-batch"
_ROWS_AT_ONCE = 65_536
_NAME_THEM = "give the source metadata=[...] and keep its columns, or name others with --origin"


class OutputKind(enum.Enum):
    """What an output is."""

    KAFKA = "kafka"
    DELTA = "delta"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """An output that is audited.

    Parameters
    ----------
    sink
        Uid of the sink that writes it.
    kind
        What it is.
    place
        Topics, separated by commas, or a directory.
    """

    sink: str
    kind: OutputKind
    place: str


@dataclass
class OutputCounts:
    """What was seen in one output.

    Parameters
    ----------
    named
        Which offsets of the input it names.
    rows
        How many rows were looked at.
    superseded
        Rows of checkpoints that a rewind left behind: looked at no further.
    unnamed
        Rows that say nothing about where they come from.
    reordered
        Records that come behind one of their key from a higher offset; None where there is no order.
    by_batch, by_checkpoint
        Rows by what wrote them; None where the output does not tell.
    notes
        What a reader of the result has to know.
    """

    spec: OutputSpec
    named: NamedOffsets
    rows: int = 0
    superseded: int = 0
    unnamed: int = 0
    reordered: int | None = None
    by_batch: Counter[str] | None = None
    by_checkpoint: Counter[int] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def is_judged(self) -> bool:
        """Whether it tells what wrote its rows, so that they can be compared with decisions."""
        return self.by_batch is not None or self.by_checkpoint is not None

    @property
    def visible(self) -> Visible:
        """The rows by what wrote them."""
        return Visible(self.spec.sink, self.by_batch, self.by_checkpoint)

    def count(self, origins: Origins) -> Any:
        """Count rows by origin; return which are the first of theirs inside the audited offsets."""
        self.unnamed += int((~origins.is_named).sum())
        named = np.flatnonzero(origins.is_named)
        first = np.zeros(len(origins.offsets), np.bool_)
        first[named] = self.named.add(origins.places[named], origins.offsets[named])
        return first


@dataclass(frozen=True)
class OutputReader:
    """Reads outputs.

    Parameters
    ----------
    expected
        The input.
    names
        How rows say where they come from.
    job
        Whose marks a table's versions carry.
    decided
        The decisions before anything is read.
    connection
        Where topics are; asked for only if an output is one.
    """

    expected: InputOffsets
    names: OriginNames
    job: JobUuid
    decided: Decided
    connection: Callable[[], KafkaConnection]

    def read(self, spec: OutputSpec) -> OutputCounts:
        """Read an output as it is now.

        Raises
        ------
        GraphError
            There is no such topic.
        SchemaError
            The rows do not say where they come from.
        UnreadableTable, BrokerUnavailableError, AuthorizationError, InputLostError
            It cannot be read.
        """
        counts = OutputCounts(spec, NamedOffsets(self.expected))
        match spec.kind:
            case OutputKind.KAFKA:
                self._read_topic(counts)
            case OutputKind.DELTA:
                self._read_table(counts)
            case OutputKind.PARQUET:
                self._read_files(counts)
        if counts.unnamed and counts.unnamed == counts.rows - counts.superseded:
            raise SchemaError(
                f"none of the {counts.unnamed} rows of '{spec.sink}' says where it comes from",
                why=f"they have no headers or fields {', '.join(self.names.all)}",
                what_to_do=_NAME_THEM,
            )
        return counts

    # -- topics ---------------------------------------------------------------------------------
    def _read_topic(self, counts: OutputCounts) -> None:
        connection = self.connection()
        counts.by_batch, counts.reordered = Counter(), 0
        reader = RangeReader(connection, ReaderSettings(include_headers=True))
        origins = OriginReader(self.names, self.expected.places)
        topics = [topic.strip() for topic in counts.spec.place.split(",")]
        ranges = [list(ranges_of(connection, topic)) for topic in topics]
        for topic, keeping in keeping_of(connection, topics).items():
            if keeping is not None and keeping.is_compacted:
                counts.notes.append(f"{topic} is compacted")
        for wanted in chain.from_iterable(ranges):
            if wanted.start:
                counts.notes.append(f"{wanted.topic}-{wanted.partition} begins at offset {wanted.start}")
            order = KeyOrder()
            for batch in reader.read(wanted):
                self._count_records(counts, origins, order, batch)
        if counts.rows and not counts.by_batch and not counts.superseded:
            # Nobody asked the sink for it, which is the default.
            counts.by_batch = None
            counts.notes.append(f"no record has the header {BATCH_FIELD}, so checkpoints are not counted")

    def _count_records(
        self, counts: OutputCounts, origins: OriginReader, order: KeyOrder, batch: pa.RecordBatch
    ) -> None:
        batch = without_barriers(batch)
        labels = texts(header_column(batch.column("headers"), BATCH_FIELD))
        batch = self._live(counts, batch, labels)
        found = origins.of_records(batch)
        first = counts.count(found)
        keys = batch.column("key")
        # Duplicates are counted as such, and records without key have no order.
        ordered = np.flatnonzero(first & pc.is_valid(keys).to_numpy(zero_copy_only=False))
        hashes = key_hashes(keys.take(pa.array(ordered)), found.places[ordered])
        counts.reordered = (counts.reordered or 0) + order.add(hashes, found.offsets[ordered])

    def _live(self, counts: OutputCounts, batch: pa.RecordBatch, labels: Any) -> pa.RecordBatch:
        """Count rows by micro-batch; return those that no rewind left behind."""
        counts.rows += batch.num_rows
        assert counts.by_batch is not None
        dead = []
        for entry in labels.value_counts().to_pylist():
            label, rows = entry["values"], entry["counts"]
            if label is None or BatchName.of(label) is None:
                continue
            if self.decided.is_dead_batch(label):
                dead.append(label)
                counts.superseded += rows
            else:
                counts.by_batch[label] += rows
        if not dead:
            return batch
        is_dead = pc.fill_null(pc.is_in(labels, pa.array(dead, pa.string())), False)
        return batch.filter(pc.invert(is_dead))

    # -- files ----------------------------------------------------------------------------------
    def _read_table(self, counts: OutputCounts) -> None:
        table = Table.read(Path(counts.spec.place))
        if not table.versions:
            counts.notes.append(f"there is no table at {counts.spec.place}")
        mark = app_id(self.job, counts.spec.sink)
        counts.by_checkpoint = Counter()
        for version in table.versions:
            checkpoint = version.mark_of(mark)
            if checkpoint is not None and version.replaces_rows:
                raise UnreadableTable(
                    f"the sink '{counts.spec.sink}' replaces rows of the table {counts.spec.place}",
                    why=f"version {version.number} replaces some, and those would look lost",
                    what_to_do="compare the table by a query of Spark, and audit a sink that appends",
                )
            if checkpoint is not None:
                counts.by_checkpoint[checkpoint] += version.rows
        for path, version in table.added_in.items():
            decided = self.decided.checkpoints.get(version.mark_of(mark) or 0)
            if decided is not None and self.decided.is_dead(decided):
                rows = parquet.read_metadata(path).num_rows
                counts.rows += rows
                counts.superseded += rows
            else:
                self._count_file(counts, path)

    def _read_files(self, counts: OutputCounts) -> None:
        root = Path(counts.spec.place)
        if not root.is_dir():
            raise SchemaError(
                f"there is no directory {root}", what_to_do=f"correct the place of '{counts.spec.sink}'"
            )
        for path in sorted(root.rglob("*.parquet")):
            # As Spark reads a directory: what begins with these is not there.
            if not any(part[0] in "._" for part in path.relative_to(root).parts):
                self._count_file(counts, path)

    def _count_file(self, counts: OutputCounts, path: Path) -> None:
        file = parquet.ParquetFile(path)
        missing = [name for name in self.names.all if name not in file.schema_arrow.names]
        if missing:
            raise SchemaError(
                f"{path} has no column '{missing[0]}', so its rows do not say where they come from",
                what_to_do=_NAME_THEM,
            )
        columns = list(self.names.all)
        if counts.by_checkpoint is None and BATCH_FIELD in file.schema_arrow.names:
            counts.by_batch = counts.by_batch if counts.by_batch is not None else Counter()
            columns.append(BATCH_FIELD)
        origins = OriginReader(self.names, self.expected.places)
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=columns):
            if BATCH_FIELD in columns:
                batch = self._live(counts, batch, texts(batch.column(BATCH_FIELD)))
            else:
                counts.rows += batch.num_rows
            counts.count(origins.of_rows(batch))


def ranges_of(connection: KafkaConnection, topic: str) -> Iterator[OffsetRange]:
    """Yield all that a read_committed reader sees of a topic now, by partition.

    Raises
    ------
    GraphError
        There is no such topic.
    """
    with KafkaAdmin(connection) as admin:
        found = admin.topics([topic])
        if topic not in found:
            raise unknown_topic(topic, connection.servers)
        places = [(topic, partition) for partition in range(found[topic].partitions)]
        first, last = admin.beginning_offsets(places), admin.end_offsets(places, Isolation.READ_COMMITTED)
    for place in places:
        yield OffsetRange(*place, first[place], max(first[place], last[place]))


def without_barriers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the barrier records, which have no value."""
    if not batch.column("value").null_count:
        return batch
    return batch.filter(pc.is_null(header_column(batch.column("headers"), BARRIER_HEADER)))
