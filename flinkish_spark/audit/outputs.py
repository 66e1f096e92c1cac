"""Reads a job's outputs with the origins of their rows, without any code of sinks."""

from __future__ import annotations

import enum
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyarrow import parquet

from flinkish_spark.audit.counting import (
    BatchOrder,
    Bools,
    InputOffsets,
    Int64s,
    KeyOrder,
    NamedOffsets,
    Place,
)
from flinkish_spark.audit.decided import BatchName, JobDecisions, Visible
from flinkish_spark.connectors.delta.table import app_id
from flinkish_spark.connectors.kafka.checks import read_topic_retention
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, make_unknown_topic_error
from flinkish_spark.connectors.kafka.client.barriers import BARRIER_HEADER
from flinkish_spark.connectors.kafka.client.client import Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.reader import OffsetRange, RangeReader
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings
from flinkish_spark.core.errors import EnvironmentFault, SchemaError
from flinkish_spark.protocol.ids import JobUuid

#: Longer numbers do not fit into 64 bits.
_WHOLE = re.compile(r"-?[0-9]{1,18}")
#: A multiple of it changes about half of a hash's bits.
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class OriginNames:
    """Names of headers, fields or columns that hold a row's origin."""

    #: Empty if rows do not name the topic; then the input has one topic.
    topic: str = "_topic"
    partition: str = "_partition"
    offset: str = "_offset"

    @classmethod
    def of(cls, text: str) -> OriginNames:
        """Parse a list of three names, or of two without the topic; raise ValueError for others."""
        names = [name.strip() for name in text.split(",")]
        if len(names) not in (2, 3) or not all(names):
            raise ValueError(f"{text!r} is not TOPIC,PARTITION,OFFSET or PARTITION,OFFSET")
        return cls(names[0] if len(names) == 3 else "", *names[-2:])

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.topic, self.partition, self.offset)))


@dataclass(frozen=True, slots=True)
class Origins:
    #: -1 for rows without an origin in the input.
    places: Int64s
    offsets: Int64s
    is_named: Bools


class OriginReader:
    """Converts columns of text or numbers to input partitions and offsets."""

    def __init__(self, names: OriginNames, places: Sequence[Place]) -> None:
        self._names = names
        #: Index of each input partition, by topic and partition.
        self._numbers: dict[str, Int64s] = {}
        for number, (topic, partition) in enumerate(places):
            known = self._numbers.get(topic, np.zeros(0, np.int64))
            if partition >= len(known):
                known = np.concatenate((known, np.full(partition + 1 - len(known), -1, np.int64)))
            known[partition] = number
            self._numbers[topic] = known

    def read_records(self, batch: pa.RecordBatch) -> Origins:
        """Return the origins of Kafka records: by their headers, else by fields of their JSON values."""
        headers = batch.column("headers")
        found = self._origins([header_column(headers, name) for name in self._names.all])
        if found.is_named.all():
            return found
        rest = np.flatnonzero(~found.is_named)
        in_values = json_columns(batch.column("value").take(pa.array(rest)), self._names.all)
        if in_values is not None:
            said = self._origins(in_values)
            found.places[rest], found.offsets[rest] = said.places, said.offsets
            found.is_named[rest] = said.is_named
        return found

    def read_rows(self, batch: pa.RecordBatch) -> Origins:
        return self._origins([batch.column(name) for name in self._names.all])

    def _origins(self, columns: Sequence[Any]) -> Origins:
        partitions, offsets = (
            _numbers(column, name) for column, name in zip(columns[-2:], self._names.all[-2:], strict=True)
        )
        is_named = pc.and_(pc.is_valid(partitions), pc.is_valid(offsets))
        topics: Any = None
        if self._names.topic:
            topics = texts(columns[0]).dictionary_encode()
            is_named = pc.and_(is_named, pc.is_valid(topics))
        named: Bools = np.array(is_named.to_numpy(zero_copy_only=False), np.bool_)
        numbers = _fill_nulls(partitions)
        places = np.full(len(named), -1, np.int64)
        for topic, rows in self._group_by_topic(topics, named):
            known = self._numbers[topic]
            inside = rows[(numbers[rows] >= 0) & (numbers[rows] < len(known))]
            places[inside] = known[numbers[inside]]
        return Origins(places, np.array(_fill_nulls(offsets)), named)

    def _group_by_topic(self, topics: Any, named: Bools) -> list[tuple[str, npt.NDArray[np.intp]]]:
        if topics is None:
            return [(topic, np.flatnonzero(named)) for topic in self._numbers]
        codes = topics.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        words = topics.dictionary.to_pylist()
        return [
            (word, np.flatnonzero(named & (codes == code)))
            for code, word in enumerate(words)
            if word in self._numbers
        ]


def header_column(headers: Any, name: str) -> Any:
    """Return the first value of a header for each record; null if it is missing."""
    flat, rows = pc.list_flatten(headers), pc.list_parent_indices(headers)
    is_it = pc.equal(pc.struct_field(flat, "key"), name)
    values = pc.struct_field(flat, "value").filter(is_it)
    found, first = np.unique(rows.filter(is_it).to_numpy(zero_copy_only=False), return_index=True)
    at = np.full(len(headers), -1, np.int64)
    at[found] = first
    return values.take(pa.array(at, mask=at < 0))


def json_columns(values: Any, names: Sequence[str]) -> list[Any] | None:
    """Return fields of JSON values, one column per name; None if no value is an object."""
    is_there = pc.is_valid(values)
    lines = values.filter(is_there).to_pylist()
    if not lines:
        return [pa.nulls(len(values), pa.string()) for _ in names]
    # Each column has one type, that of the first value, but later values may have strings for numbers.
    schema = pa.schema([(name, pa.string()) for name in names])
    found = _parse(lines, schema) or _parse(lines, _make_schema(schema))
    if found is None or found.num_rows != len(lines):
        found = _parse_one_by_one(lines, names)
    if found is None:
        return None
    at = np.full(len(values), -1, np.int64)
    at[np.flatnonzero(is_there.to_numpy(zero_copy_only=False))] = np.arange(len(lines))
    places = pa.array(at, mask=at < 0)
    return [found.column(name).combine_chunks().take(places) for name in names]


def _make_schema(schema: pa.Schema) -> pa.Schema:
    names = schema.names
    return pa.schema([(n, pa.int64() if n in names[-2:] else pa.string()) for n in names])


def _parse(lines: list[bytes], schema: pa.Schema) -> pa.Table | None:
    parsing = pj.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="ignore", newlines_in_values=True
    )
    text = b"\n".join(lines)
    reading = pj.ReadOptions(block_size=max(len(text) + 1, 1 << 20))
    try:
        return pj.read_json(io.BytesIO(text), reading, parsing)
    except pa.ArrowInvalid:
        return None


def _parse_one_by_one(lines: list[bytes], names: Sequence[str]) -> pa.Table | None:
    """Parse like :func:`_parse` if some values are no objects; None if all are none."""
    objects = [_object(line) for line in lines]
    if not any(objects):
        return None
    texts = [[_text_of(one.get(name)) for one in objects] for name in names]
    whole = [[_WHOLE.fullmatch(text or "") and text for text in column] for column in texts[-2:]]
    return pa.table([pa.array(column, pa.string()) for column in (*texts[:-2], *whole)], names=list(names))


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text_of(value: object) -> str | None:
    is_told = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value) if is_told else None


def hash_keys(keys: Any, places: Int64s) -> npt.NDArray[np.uint64]:
    """Return a hash of key and input partition for each record; records must have keys."""
    from pandas.util import hash_array

    encoded = keys.dictionary_encode()
    words = np.array([*encoded.dictionary.to_pylist(), None], object)[:-1]
    hashed = np.asarray(hash_array(words, categorize=False), np.uint64)
    codes = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), np.int64)
    mixed: npt.NDArray[np.uint64] = hashed[codes] ^ (places.astype(np.uint64) * _MIX)
    return mixed


def texts(column: Any) -> Any:
    """Decode bytes, such as header values, as text; invalid bytes are escaped."""
    try:
        return pc.cast(column, pa.string())
    except pa.ArrowInvalid:
        found = (None if value is None else value.decode(errors="replace") for value in column.to_pylist())
        return pa.array(found, pa.string())


def _numbers(column: Any, name: str) -> Any:
    try:
        return pc.cast(texts(column) if pa.types.is_binary(column.type) else column, pa.int64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as wrong:
        raise SchemaError(
            f"'{name}' of an output is not a whole number",
            why=str(wrong).split("\n")[0],
            what_to_do="name the headers or columns that hold the origin with --origin",
        ) from wrong


def _fill_nulls(column: Any) -> Int64s:
    return np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)


LOG_FOLDER = "_delta_log"


@dataclass(frozen=True, slots=True)
class TableVersion:
    number: int
    #: The version's SetTransaction actions: (app id, version).
    marks: tuple[tuple[str, int], ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    #: Row counts of the version's new files; a compaction's files have no new rows.
    rows: int
    #: True if it removes rows (a MERGE with updates, an overwrite; not a compaction).
    replaces_rows: bool = False

    def mark_of(self, app_id: str) -> int | None:
        return next((number for name, number in self.marks if name == app_id), None)


class DeltaLog:
    def __init__(self, table: Path) -> None:
        self._table = table
        self._next = 0

    def new_versions(self) -> Iterator[TableVersion]:
        """Yield the versions written since the last call."""
        while True:
            try:
                text = (self._table / LOG_FOLDER / f"{self._next:020}.json").read_text(encoding="utf-8")
            except FileNotFoundError:
                if self._next == 0 and any((self._table / LOG_FOLDER).glob("*.json")):
                    raise EnvironmentFault(
                        f"the log of the table {self._table} does not begin at version 0 any more",
                        why="Delta has cleaned it up (delta.logRetentionDuration)",
                        what_to_do="audit earlier, or raise delta.logRetentionDuration",
                    ) from None
                return
            yield self._version(text)
            self._next += 1

    def _version(self, text: str) -> TableVersion:
        actions = [json.loads(line) for line in text.split("\n") if line]
        for action in actions:
            mode = action.get("metaData", {}).get("configuration", {}).get("delta.columnMapping.mode", "none")
            unreadable = "column mapping" if mode != "none" else ""
            if action.get("add", {}).get("deletionVector"):
                unreadable = "deletion vectors"
            if unreadable:
                raise EnvironmentFault(
                    f"the table {self._table} has {unreadable}",
                    why="its rows are not just the contents of its files",
                    what_to_do="compare it by a query of Spark",
                )
        adds = [action["add"] for action in actions if "add" in action]
        marks = [action["txn"] for action in actions if "txn" in action]
        return TableVersion(
            self._next,
            tuple((mark["appId"], int(mark["version"])) for mark in marks),
            tuple(unquote(add["path"]) for add in adds),
            tuple(unquote(action["remove"]["path"]) for action in actions if "remove" in action),
            sum(self._rows(add) for add in adds if add.get("dataChange", True)),
            any(action["remove"].get("dataChange", True) for action in actions if "remove" in action),
        )

    def _rows(self, add: Mapping[str, Any]) -> int:
        if add.get("stats"):
            stats = json.loads(add["stats"])
            if "numRecords" in stats:
                return int(stats["numRecords"])
        return int(parquet.read_metadata(self._table / unquote(add["path"])).num_rows)


@dataclass(frozen=True)
class Table:
    """The current state of a table."""

    versions: tuple[TableVersion, ...]
    #: Data files, each with the version that added it.
    added_in: Mapping[Path, TableVersion]

    @classmethod
    def read(cls, table: Path) -> Self:
        versions = tuple(DeltaLog(table).new_versions())
        active: dict[str, TableVersion] = {}
        for version in versions:
            for path in version.removed:
                active.pop(path, None)
            active.update(dict.fromkeys(version.added, version))
        return cls(versions, {table / path: version for path, version in active.items()})


#: Header or column with the micro-batch of a row.
BATCH_FIELD = "flinkish-batch"
#: Headers that a sink also writes with `RecordHeaders.FULL`.
_JOB_FIELD, _UID_FIELD = "flinkish-job", "flinkish-uid"
_ROWS_AT_ONCE = 65_536
_NAME_THEM = "give the source metadata=[...] and keep its columns, or name others with --origin"


class OutputKind(enum.Enum):
    KAFKA = "kafka"
    DELTA = "delta"
    PARQUET = "parquet"


@dataclass(frozen=True, slots=True)
class OutputSpec:
    #: Uid of the sink that writes the output.
    sink: str
    kind: OutputKind
    #: Topics, separated by commas, or a directory.
    place: str


@dataclass
class OutputCounts:
    spec: OutputSpec
    named: NamedOffsets
    rows: int = 0
    #: Rows of dead checkpoints, which are not checked further.
    superseded: int = 0
    #: Rows without an origin.
    unnamed: int = 0
    #: Records that come after one of their key with a higher offset, or after one of a later micro-batch;
    #: None if the output has no order.
    reordered: int | None = None
    #: Rows by micro-batch or checkpoint; None if the output does not name them.
    by_batch: Counter[str] | None = None
    by_checkpoint: Counter[int] | None = None
    #: The last input offset that each micro-batch (in a table: checkpoint) names, by input partition.
    newest: dict[tuple[str, Place], int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def is_judged(self) -> bool:
        return self.by_batch is not None or self.by_checkpoint is not None

    @property
    def visible(self) -> Visible:
        return Visible(self.spec.sink, self.by_batch, self.by_checkpoint, self.newest)

    def count(self, origins: Origins) -> Any:
        """Count rows by origin; return which are the first of their origin inside the audited offsets."""
        self.unnamed += int((~origins.is_named).sum())
        named = np.flatnonzero(origins.is_named)
        first = np.zeros(len(origins.offsets), np.bool_)
        first[named] = self.named.add(origins.places[named], origins.offsets[named])
        return first


@dataclass(frozen=True)
class OutputReader:
    expected: InputOffsets
    names: OriginNames
    #: The job whose marks are in a table's versions.
    job: JobUuid
    #: The decisions before the outputs are read.
    decided: JobDecisions
    #: Kafka servers of topics; called only if an output is a topic.
    connection: Callable[[], KafkaConnection]

    def read(self, spec: OutputSpec) -> OutputCounts:
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

    def _read_topic(self, counts: OutputCounts) -> None:
        connection = self.connection()
        counts.by_batch, counts.reordered = Counter(), 0
        reader = RangeReader(connection, ReaderSettings(include_headers=True))
        origins = OriginReader(self.names, self.expected.places)
        topics = list(dict.fromkeys(topic.strip() for topic in counts.spec.place.split(",")))
        ranges = []
        for topic in topics:
            found = list(ranges_of(connection, topic))
            ranges += [wanted for wanted, _ in found]
            if waiting := sum(behind for _, behind in found):
                counts.notes.append(
                    f"{waiting} offsets of {topic} are behind open transactions, and not visible"
                )
        for topic, keeping in read_topic_retention(connection, topics).items():
            if keeping is not None and keeping.is_compacted:
                counts.notes.append(f"{topic} is compacted; deleted records count as lost")
        for wanted in ranges:
            if wanted.start:
                begins = f"{wanted.topic}-{wanted.partition} begins at offset {wanted.start}"
                counts.notes.append(f"{begins}; deleted records count as lost")
            orders = KeyOrder(), BatchOrder()
            for batch in reader.read(wanted):
                self._count_records(counts, origins, orders, batch)
        if counts.rows and not counts.by_batch and not counts.superseded:
            # By default sinks do not write the header.
            counts.by_batch = None
            counts.notes.append(f"no record has the header {BATCH_FIELD}, so checkpoints are not counted")

    def _count_records(
        self,
        counts: OutputCounts,
        origins: OriginReader,
        orders: tuple[KeyOrder, BatchOrder],
        batch: pa.RecordBatch,
    ) -> None:
        batch = self._filter_sink(counts.spec.sink, drop_barriers(batch))
        batch = self._live(counts, batch, self._labels(batch))
        found = origins.read_records(batch)
        first = counts.count(found)
        written_by = self._labels(batch).dictionary_encode()
        self._note_newest(counts, found, written_by)
        by_key, by_batch = orders
        # A duplicate counts only as a duplicate, not for order as well.
        late = by_batch.add(_batch_places(written_by)) & first
        keys = batch.column("key")
        # Records without a key have no order.
        ordered = np.flatnonzero(first & ~late & pc.is_valid(keys).to_numpy(zero_copy_only=False))
        hashes = hash_keys(keys.take(pa.array(ordered)), found.places[ordered])
        behind = by_key.add(hashes, found.offsets[ordered])
        counts.reordered = (counts.reordered or 0) + behind + int(late.sum())

    def _filter_sink(self, sink: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        headers = batch.column("headers")
        is_ours = pc.equal(texts(header_column(headers, _JOB_FIELD)), str(self.job))
        is_other = pc.and_(is_ours, pc.not_equal(texts(header_column(headers, _UID_FIELD)), sink))
        return batch.filter(pc.invert(pc.fill_null(is_other, False)))

    def _labels(self, batch: pa.RecordBatch) -> Any:
        """Return the micro-batch that each record names; null if it is another job's."""
        headers = batch.column("headers")
        names = texts(header_column(headers, BATCH_FIELD))
        is_other = pc.not_equal(texts(header_column(headers, _JOB_FIELD)), str(self.job))
        return pc.if_else(pc.fill_null(is_other, False), pa.scalar(None, pa.string()), names)

    def _note_newest(self, counts: OutputCounts, found: Origins, written_by: Any) -> None:
        """Record the last input record that each micro-batch names."""
        codes = written_by.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero((codes >= 0) & (found.places >= 0) & found.is_named)
        if not len(rows):
            return
        names, places = written_by.dictionary.to_pylist(), self.expected.places
        pairs, of_pair = np.unique(codes[rows] * len(places) + found.places[rows], return_inverse=True)
        highest = np.full(len(pairs), -1, np.int64)
        np.maximum.at(highest, of_pair, found.offsets[rows])
        for pair, newest in zip(pairs.tolist(), highest.tolist(), strict=True):
            key = (names[pair // len(places)], places[pair % len(places)])
            counts.newest[key] = max(counts.newest.get(key, -1), newest)

    def _live(self, counts: OutputCounts, batch: pa.RecordBatch, labels: Any) -> pa.RecordBatch:
        """Count rows by micro-batch; return those of live checkpoints."""
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

    def _read_table(self, counts: OutputCounts) -> None:
        table = Table.read(Path(counts.spec.place))
        if not table.versions:
            counts.notes.append(f"there is no table at {counts.spec.place}")
        mark = app_id(self.job, counts.spec.sink)
        counts.by_checkpoint = Counter()
        for version in table.versions:
            checkpoint = version.mark_of(mark)
            if checkpoint is not None and version.replaces_rows:
                raise EnvironmentFault(
                    f"the sink '{counts.spec.sink}' replaces rows of the table {counts.spec.place}",
                    why=f"version {version.number} replaces some rows, which would look lost",
                    what_to_do="compare the table by a query of Spark, and audit a sink that appends",
                )
            if checkpoint is not None:
                counts.by_checkpoint[checkpoint] += version.rows
        unsure = []
        for path, version in table.added_in.items():
            checkpoint = version.mark_of(mark) or 0
            decided = self.decided.checkpoints.get(checkpoint)
            if self.decided.may_be_dead(checkpoint):
                unsure.append(path)
                continue
            if decided is not None and self.decided.is_dead(decided):
                rows = parquet.read_metadata(path).num_rows
                counts.rows += rows
                counts.superseded += rows
            else:
                self._count_file(counts, path, "" if decided is None else str(decided.checkpoint))

        for path in unsure:
            self._count_maybe_dead(counts, path)

    def _count_maybe_dead(self, counts: OutputCounts, path: Path) -> None:
        """Count a file after all others: rows that the job has written again are dead here."""
        named = counts.named
        duplicated, told = named.duplicated, len(named.examples)
        self._count_file(counts, path)
        counts.superseded += named.duplicated - duplicated
        named.duplicated = duplicated
        del named.examples[told:]

    def _read_files(self, counts: OutputCounts) -> None:
        root = Path(counts.spec.place)
        if not root.is_dir():
            raise SchemaError(f"there is no directory {root}", what_to_do=f"correct '{counts.spec.sink}'")
        for path in sorted(root.rglob("*.parquet")):
            # As in Spark, files with these prefixes are hidden.
            if not any(part[0] in "._" for part in path.relative_to(root).parts):
                self._count_file(counts, path)

    def _count_file(self, counts: OutputCounts, path: Path, written_by: str = "") -> None:
        """Count the rows of a file; `written_by` is the default writer for rows that name none."""
        try:
            file = parquet.ParquetFile(path)
        except (pa.ArrowInvalid, FileNotFoundError) as wrong:
            raise EnvironmentFault(
                f"{path} cannot be read as Parquet",
                why=str(wrong).split("\n")[0],
                what_to_do="if it is being written, or somebody has just deleted it, audit once more",
            ) from wrong
        missing = [name for name in self.names.all if name not in file.schema_arrow.names]
        if missing:
            raise SchemaError(
                f"{path} has no column '{missing[0]}', so its rows do not name their origins",
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
                names = texts(batch.column(BATCH_FIELD))
            else:
                counts.rows += batch.num_rows
                names = pa.repeat(pa.scalar(written_by or None, pa.string()), batch.num_rows)
            found = origins.read_rows(batch)
            counts.count(found)
            self._note_newest(counts, found, names.dictionary_encode())


def _batch_places(written_by: Any) -> list[tuple[int, int] | None]:
    names = [BatchName.of(word) for word in written_by.dictionary.to_pylist()]
    known = [None if name is None else (int(name.lineage), int(name.batch)) for name in names]
    return [None if code is None else known[code] for code in written_by.indices.to_pylist()]


def ranges_of(connection: KafkaConnection, topic: str) -> Iterator[tuple[OffsetRange, int]]:
    """Yield the readable range of a topic for read_committed, by partition, and the waiting offsets."""
    with KafkaAdmin(connection) as admin:
        found = admin.topics([topic])
        if topic not in found:
            raise make_unknown_topic_error(topic, connection.servers)
        places = [(topic, partition) for partition in range(found[topic].partitions)]
        # This order matters: records appended in between are not held back by a transaction.
        ends = admin.end_offsets(places, Isolation.READ_UNCOMMITTED)
        first, last = admin.beginning_offsets(places), admin.end_offsets(places, Isolation.READ_COMMITTED)
    for place in places:
        seen = OffsetRange(*place, first[place], max(first[place], last[place]))
        yield seen, max(0, ends[place] - seen.end)


def drop_barriers(batch: pa.RecordBatch) -> pa.RecordBatch:
    if not batch.column("value").null_count:
        return batch
    return batch.filter(pc.is_null(header_column(batch.column("headers"), BARRIER_HEADER)))
