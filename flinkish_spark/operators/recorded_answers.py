"""Answers of an async operator that are part of the checkpoint: durable before anything downstream uses them.

What a system outside answers is not the same twice. So an answer is written down as soon as it is there, and
whoever comes to the same element again (a repeated task, a micro-batch that runs anew, another sink, a
replay) reads it. The driver deletes it when its checkpoint is confirmed.

    answers/<uid>/<lineage>-<micro-batch>-<log>-<number>

An object holds some answers and is created once. Of the attempts that work on the same elements at the same
time each goes through the objects of a *log* in their order and puts its own behind the last one; so they all
see the same answer of an element: that which was there first.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import types as T

from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.store import CreateResult, ObjectMissing, Store
from flinkish_spark.functions.async_io import side_of
from flinkish_spark.operators.process import ElementFailed
from flinkish_spark.state.codec import FrameError, pack_frame, read_table, table_bytes, unpack_frame
from flinkish_spark.types.rows import OutputError, RowReader, RowWriter, arrow_schema

#: How many logs there are for all channels, and how many micro-batches two ways may be apart.
_LOGS_OF_CHANNELS, _MOST_APART = 8, 16
#: Checkpoints behind which what a left lineage has is given up, whoever has not come past it.
_LEFT_FOR = 20
#: Section with the places of the answers.
_PLACES = "places"
_PLACE_COLUMNS = ("channel", "sequence", "number", "digest")


class AskedAbout(NamedTuple):
    """Which element an answer is about: where it stands in its stream, and what it was."""

    channel: int
    sequence: int
    #: Among elements with the same place and content, which are the same to everybody.
    number: int
    #: Of its content. A program that asks about something else, at the same place, finds no answer.
    digest: bytes


def digest_of(element: Sequence[Any]) -> bytes:
    return hashlib.blake2b(repr(tuple(element)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


#: What came of an element: the rows of each output, in the order in which the outputs were declared.
Answer = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Outputs:
    """The outputs of an operator: names and fields, the main one first, whose name is empty."""

    names: tuple[str, ...]
    fields: tuple[T.StructType, ...]

    def answer_of(self, rows: Iterable[Any]) -> Answer:
        """Return the rows of an element by output; what is for an output that nobody reads is left out."""
        found: dict[str, list[Any]] = {name: [] for name in self.names}
        for row in rows:
            side = side_of(row)
            if side is None:
                found[""].append(row)
            elif side in found:
                found[side].append(row.row)
        return tuple(tuple(found[name]) for name in self.names)


class Stream(enum.Enum):
    """What the place of an element means."""

    #: Counted by a source: no other element of the job ever has it.
    OF_SOURCE = "OF_SOURCE"
    #: Counted anew in each micro-batch: by an operator, or by their number in a task.
    OF_MICRO_BATCH = "OF_MICRO_BATCH"


class Readers(enum.Enum):
    """Who may ask about the same elements at the same time."""

    #: Attempts of one task.
    ONE_WAY = "ONE_WAY"
    #: Tasks on several ways of a plan, which may even see an element in different micro-batches.
    SEVERAL_WAYS = "SEVERAL_WAYS"


@dataclass(frozen=True)
class _Object:
    key: str
    lineage: int
    batch: int
    log: str
    number: int

    @classmethod
    def of(cls, key: str) -> _Object:
        try:
            lineage, batch, log, number = key.rsplit("/", 1)[1].split("-")
            return cls(key, int(lineage), int(batch), log, int(number))
        except (IndexError, ValueError):
            raise CorruptObjectError(
                f"{key} is no object of answers", what_to_do="take it out of the job directory"
            ) from None


def objects_in(store: Store, folder: str) -> list[_Object]:
    found = map(_Object.of, store.list(folder))
    return sorted(found, key=lambda one: (one.lineage, one.batch, one.log, one.number))


class RecordedAnswers:
    """Answers that elements of one task have, and the log where it puts new ones."""

    def __init__(
        self,
        store: Store,
        folder: str,
        outputs: Outputs,
        stream: Stream,
        readers: Readers,
        place: tuple[int, int, int],
    ) -> None:
        self._store, self._folder, self._outputs = store, folder, outputs
        self._stream, self._readers = stream, readers
        self._lineage, self._batch, self._task = place
        self._known: dict[AskedAbout, Answer] = {}
        self._earlier: dict[AskedAbout, Answer] = {}
        #: Of lineages that were left: in their order, by what an operator's elements have in common.
        self._left: dict[tuple[int, bytes], list[Answer]] = defaultdict(list)
        self._ends: Counter[str] = Counter()
        self._load()

    def find(self, asked: AskedAbout) -> Answer | None:
        return self._known.get(asked)

    def find_earlier(self, asked: AskedAbout) -> Answer | None:
        """Return one of another micro-batch, or of a left lineage; it is to be appended before it is used."""
        if self._stream is Stream.OF_SOURCE:
            return self._earlier.get(asked)
        # Equal elements are the same to everybody, so whichever comes first has the first answer.
        left = self._left.get((asked.channel, asked.digest))
        return left.pop(0) if left else None

    def append(self, answers: Sequence[tuple[AskedAbout, Answer, int]]) -> list[Answer]:
        """Make answers durable; return those that count, in the same order."""
        by_log: dict[str, list[tuple[AskedAbout, Answer, int]]] = defaultdict(list)
        for one in answers:
            # Tasks on several ways have other numbers, and the same channels.
            is_shared = self._readers is Readers.SEVERAL_WAYS
            log = f"c{one[0].channel % _LOGS_OF_CHANNELS}" if is_shared else f"t{self._task}"
            by_log[log].append(one)
        for log, own in by_log.items():
            self._append_to(log, own)
        return [self._known[asked] for asked, _, _ in answers]

    def _append_to(self, log: str, answers: list[tuple[AskedAbout, Answer, int]]) -> None:
        answers = [one for one in answers if one[0] not in self._known]
        while answers:
            key = f"{self._folder}/{self._lineage}-{self._batch}-{log}-{self._ends[log]}"
            try:
                data = encode(self._outputs, answers)
            except ElementFailed:
                # What was answered cost a call: only the bad ones are not kept.
                self._append_to(log, [one for one in answers if _fits(self._outputs, one)])
                raise
            # With this create the answers count. Before it, another attempt's may; after it, never.
            created = self._store.create_if_absent(key, data)
            if created is CreateResult.EXISTS:
                self._take(key)
            else:
                self._known |= {asked: answer for asked, answer, _ in answers}
            self._ends[log] += 1
            answers = [one for one in answers if one[0] not in self._known]

    def _take(self, key: str) -> None:
        for asked, answer in self._read(key):
            # What was there first counts.
            self._known.setdefault(asked, answer)

    def _read(self, key: str) -> list[tuple[AskedAbout, Answer]]:
        try:
            return decode(self._outputs, self._store.read(key))
        except ObjectMissing:
            # Its checkpoint has been confirmed since it was listed.
            return []
        except FrameError as error:
            raise CorruptObjectError(
                f"{key} cannot be read",
                why=str(error),
                what_to_do="see to the job directory's disk; delete the object if what it answers may be "
                "asked again",
            ) from error

    def _load(self) -> None:
        others: list[_Object] = []
        for one in objects_in(self._store, self._folder):
            if (one.lineage, one.batch) == (self._lineage, self._batch):
                self._take(one.key)
                self._ends[one.log] = one.number + 1
            elif one.lineage <= self._lineage:
                others.append(one)
        has_left = any(one.lineage < self._lineage for one in others)
        if self._stream is Stream.OF_SOURCE:
            for one in others:
                is_near = self._readers is Readers.SEVERAL_WAYS and one.batch >= self._batch - _MOST_APART
                if one.lineage < self._lineage or is_near:
                    self._earlier |= dict(self._read(one.key))
        elif has_left:
            self._load_left(others)

    def _load_left(self, others: Iterable[_Object]) -> None:
        """Take over what left lineages have, but for what this one has taken over before."""
        used = Counter((asked.channel, asked.digest) for asked in self._known)
        left: dict[int, dict[tuple[int, bytes], list[Answer]]] = defaultdict(lambda: defaultdict(list))
        for one in others:
            for asked, answer in self._read(one.key):
                alike = asked.channel, asked.digest
                if one.lineage < self._lineage:
                    left[one.lineage][alike].append(answer)
                else:
                    used[alike] += 1
        for lineage in sorted(left):
            for alike, answers in left[lineage].items():
                # What a lineage took over from those before it is among its own.
                self._left[alike] = answers + self._left[alike][len(answers) :]
        for alike, count in used.items():
            del self._left[alike][:count]


def _fits(outputs: Outputs, answer: tuple[AskedAbout, Answer, int]) -> bool:
    try:
        encode(outputs, [answer])
    except ElementFailed:
        return False
    return True


def encode(outputs: Outputs, answers: Sequence[tuple[AskedAbout, Answer, int]]) -> bytes:
    places = list(zip(*(asked for asked, _, _ in answers), strict=True))
    kinds = (pa.int64(), pa.int64(), pa.int64(), pa.binary())
    columns = {
        name: pa.array(column, kind) for name, column, kind in zip(_PLACE_COLUMNS, places, kinds, strict=True)
    }
    sections: dict[str, memoryview] = {}
    for at, (name, fields) in enumerate(zip(outputs.names, outputs.fields, strict=True)):
        columns[f"rows:{name}"] = pa.array([len(answer[at]) for _, answer, _ in answers], pa.int64())
        of_row = [place for _, answer, place in answers for _ in answer[at]]
        rows = [row for _, answer, _ in answers for row in answer[at]]
        try:
            arrays = RowWriter.of(fields).write(rows)
        except OutputError as error:
            raise ElementFailed(of_row[error.row or 0], False, error) from error
        table = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(fields))
        sections[f"output:{name}"] = table_bytes(table)
    sections[_PLACES] = table_bytes(pa.RecordBatch.from_pydict(columns))
    return pack_frame(sections)


def decode(outputs: Outputs, data: bytes) -> list[tuple[AskedAbout, Answer]]:
    """Return the answers of an object; none if they are those of a program with other outputs."""
    sections = unpack_frame(data)
    if _PLACES not in sections:
        raise FrameError("it has no places")
    places = read_table(_PLACES, sections[_PLACES])
    rows: list[list[tuple[Any, ...]]] = []
    for name, fields in zip(outputs.names, outputs.fields, strict=True):
        section = f"output:{name}"
        if section not in sections or f"rows:{name}" not in places.schema.names:
            return []
        table = read_table(section, sections[section])
        if not table.schema.equals(arrow_schema(fields)):
            return []
        counts, own = places.column(f"rows:{name}").to_pylist(), table.schema.names
        made = list(RowReader(own, own, ()).read(table)[1])
        if sum(counts) != len(made) or any(count < 0 for count in counts):
            raise FrameError("its places and its rows are not those of each other")
        left = iter(made)
        rows.append([tuple(islice(left, count)) for count in counts])
    asked = map(AskedAbout, *(places.column(name).to_pylist() for name in _PLACE_COLUMNS))
    return [(one, tuple(answer)) for one, *answer in zip(asked, *rows, strict=True)]


@dataclass(frozen=True)
class Recording:
    """How the answers of an operator on a way are recorded."""

    #: Where they are, in the job directory.
    folder: str
    stream: Stream
    readers: Readers


class AnswerRetention:
    """Says which answers nobody asks for any more; lives as long as a process owns the job."""

    def __init__(self, store: Store, recording: Recording) -> None:
        self._store, self._recording = store, recording
        #: How far the live lineage has come in each channel, as long as there is a left one.
        self._reached: dict[int, int] = {}
        self._checkpoints = 0

    def unneeded(self, lineage: int, batches: Collection[int]) -> list[str]:
        """Return the keys that go with a confirmed checkpoint."""
        first, last = min(batches), max(batches)
        upto = first - 1 if self._recording.readers is Readers.SEVERAL_WAYS else last
        objects = objects_in(self._store, self._recording.folder)
        done = [one for one in objects if one.lineage == lineage and one.batch <= upto]
        left = [one for one in objects if one.lineage < lineage]
        if left and self._recording.stream is Stream.OF_SOURCE:
            left = self._passed(left, [one for one in objects if one.lineage == lineage])
        return [one.key for one in (*done, *left)]

    def _passed(self, left: list[_Object], live: list[_Object]) -> list[_Object]:
        self._checkpoints += 1
        for channel, sequence in _greatest(self._store, [one.key for one in live]).items():
            self._reached[channel] = max(sequence, self._reached.get(channel, sequence))
        if self._checkpoints >= _LEFT_FOR:
            # A channel has fallen silent, or the program asks about other elements now.
            return left
        passed = []
        for one in left:
            ends = _greatest(self._store, [one.key])
            if all(at in self._reached and self._reached[at] >= end for at, end in ends.items()):
                passed.append(one)
        return passed


def _greatest(store: Store, keys: Iterable[str]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key in keys:
        try:
            places = read_table(_PLACES, unpack_frame(store.read(key))[_PLACES])
        except (ObjectMissing, FrameError, KeyError):
            continue
        pairs = zip(places.column("channel").to_pylist(), places.column("sequence").to_pylist(), strict=True)
        for channel, sequence in pairs:
            found[channel] = max(sequence, found.get(channel, sequence))
    return found
