"""Async functions without a key, as mapInArrow runs them: the calls of a worker share one event loop."""

from __future__ import annotations

import asyncio
import atexit
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from flinkish_spark.core.errors import InternalError
from flinkish_spark.core.micro_batch import micro_batch_of_task
from flinkish_spark.core.store import Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.operators.async_wait import (
    Asked,
    AsyncSpec,
    AsyncStatistics,
    AsyncWait,
    DurableAnswers,
    Rows,
)
from flinkish_spark.operators.context import close_operator
from flinkish_spark.operators.process import ElementFailed
from flinkish_spark.operators.recorded_answers import (
    Answer,
    AskedAbout,
    Outputs,
    Readers,
    RecordedAnswers,
    Stream,
    digest_of,
)
from flinkish_spark.transport.columns import CHANNEL, SEQUENCE
from flinkish_spark.types.rows import OutputError
from flinkish_spark.worker.daemon import freeze_modules
from flinkish_spark.worker.functions import ExpandRows, StatelessContext, records_of

# PySpark unpickles a function anew for each task, and a task is one micro-batch. A client that was made in
# `open` is to outlive that, with its connections, as its limits do; so it is kept by its name.
_KEPT: OrderedDict[str, AsyncWait] = OrderedDict()
#: A worker may live longer than jobs.
_MOST_KEPT = 16


def _kept(name: str, make: Callable[[], AsyncWait]) -> AsyncWait:
    found = _KEPT.get(name)
    if found is None:
        found = _KEPT[name] = make()
    _KEPT.move_to_end(name)
    while len(_KEPT) > _MOST_KEPT:
        _, oldest = _KEPT.popitem(last=False)
        close_operator(oldest, name)
    return found


def close_kept(suffix: str = "") -> None:
    for name in [one for one in _KEPT if one.endswith(suffix)]:
        close_operator(_KEPT.pop(name), name)


atexit.register(close_kept)


class CallsInHarness(Protocol):
    """What a harness without Spark has in the place of a worker's clock and a job's directory."""

    @property
    def name(self) -> str: ...

    @property
    def store(self) -> Store: ...

    def make_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop whose time is the harness's."""

    def folder(self, uid: str, *, is_kept: bool) -> str:
        """Return where the answers of an operator are, which outlive a crash or do not."""


CALLS_IN_HARNESS: ContextVar[CallsInHarness | None] = ContextVar("CALLS_IN_HARNESS", default=None)


@dataclass(frozen=True)
class AnswerPlace:
    """Where a job's answers are, and who asks about the same elements; travels in the plan."""

    job_dir: StoreSpec
    #: Of the operator, below it.
    folder: str
    readers: Readers


@dataclass(frozen=True)
class AsyncRows(ExpandRows):
    """Makes rows of each row by calls to a system outside, those of one output."""

    spec: AsyncSpec
    outputs: Outputs
    #: By what name workers keep the opened function; that of all outputs is the same.
    kept_as: str
    #: Among how many the limits of the job are shared.
    workers: int = 1
    stream: Stream = Stream.OF_SOURCE
    #: Of idempotency keys: job, operator and way.
    key_prefix: str = ""
    #: Name of the side output; empty for the main output.
    side: str = ""
    #: Where answers are recorded; None where they are not.
    answers: AnswerPlace | None = None
    #: Takes what calls cost, to the driver.
    report: Callable[[AsyncStatistics], None] | None = None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        write = self.writer()
        harness = CALLS_IN_HARNESS.get()
        name = self.kept_as if harness is None else f"{self.kept_as}-{harness.name}"
        waiting = _kept(name, self._opened)
        freeze_modules()
        try:
            task = _Task(self, waiting)
            for batch in batches:
                yield write(batch, *task.made_of(batch))
        except GeneratorExit:
            raise
        except BaseException:
            # Nobody knows what a function is worth whose call was cut off: the next task has a new one.
            if _KEPT.pop(name, None) is not None:
                close_operator(waiting, self.function.name)
            raise
        finally:
            if self.report is not None:
                self.report(waiting.taken_statistics())

    def _opened(self) -> AsyncWait:
        harness = CALLS_IN_HARNESS.get()
        waiting = AsyncWait(self.spec, self.workers, None if harness is None else harness.make_loop())
        try:
            with self.function.called("open"):
                waiting.open(_AsyncContext(self.function.name, self.function.parallelism))
        except BaseException:
            close_operator(waiting, self.function.name)
            raise
        return waiting


class _AsyncContext(StatelessContext):
    """What `open` of an async function is given."""

    why_no_accumulators = (
        "an async function has none: a task that is repeated reads the answers and calls nothing; count in a "
        "function behind it"
    )


class _Task:
    def __init__(self, rows: AsyncRows, waiting: AsyncWait) -> None:
        self._rows, self._waiting = rows, waiting
        self._places = _Places()
        self._micro_batch = micro_batch_of_task()
        self._recorded: RecordedAnswers | None = None
        self._is_opened = False

    def _opened(self) -> RecordedAnswers | None:
        """Return the answers that are recorded; in a harness they always are, for its side outputs."""
        rows, harness, task = self._rows, CALLS_IN_HARNESS.get(), TaskContext.get()
        index = 0 if task is None else task.partitionId()
        here = self._micro_batch.lineage, self._micro_batch.number, index
        if harness is not None:
            stream, readers = Stream.OF_MICRO_BATCH, Readers.ONE_WAY
            folder = harness.folder(rows.function.name, is_kept=rows.spec.is_recorded)
            return RecordedAnswers(harness.store, folder, rows.outputs, stream, readers, here)
        place = rows.answers
        if place is None:
            return None
        store = place.job_dir.open()
        return RecordedAnswers(store, place.folder, rows.outputs, rows.stream, place.readers, here)

    def made_of(self, batch: pa.RecordBatch) -> tuple[list[Any], np.ndarray[Any, Any]]:
        values = list(records_of(batch))
        if values and not self._is_opened:
            # Where nothing is asked nothing is looked up.
            self._recorded, self._is_opened = self._opened(), True
        asked = self._places.of(batch, values)
        found: dict[int, Answer] = {}
        try:
            if self._recorded is None:
                self._waiting.run_until_complete(self._answered(values, asked, found))
            else:
                work = self._recorded_answers(values, asked, found, self._recorded)
                self._waiting.run_until_complete(work)
        except ElementFailed as failed:
            error = failed.error
            says = f"the function {error}" if isinstance(error, OutputError) else ""
            raise self._rows.function.blamed(batch, failed.at, error, says) from error
        if len(found) != len(values):
            raise InternalError(f"of {len(values)} elements {len(found)} have an answer")
        output = self._rows.outputs.names.index(self._rows.side)
        rows = [found[at][output] for at in range(len(values))]
        counts = [len(one) for one in rows]
        return [row for one in rows for row in one], np.repeat(np.arange(len(values)), counts)

    def _asked(
        self, values: Sequence[Any], asked: Sequence[AskedAbout], found: dict[int, Answer]
    ) -> list[Asked]:
        return [
            Asked(at, value, self._key(one))
            for at, (value, one) in enumerate(zip(values, asked, strict=True))
            if at not in found
        ]

    def _key(self, asked: AskedAbout) -> str:
        # Several elements may be made of one record: their content tells them apart.
        place = f"{asked.channel}/{asked.sequence}/{asked.digest.hex()}/{asked.number}"
        if self._rows.stream is Stream.OF_MICRO_BATCH:
            # Sequences begin anew in each micro-batch.
            place = f"{self._micro_batch.lineage}-{self._micro_batch.number}/{place}"
        return f"{self._rows.key_prefix}/{place}"

    async def _answered(
        self, values: Sequence[Any], asked: Sequence[AskedAbout], found: dict[int, Answer]
    ) -> None:
        async def take(answers: Sequence[tuple[int, Rows]]) -> None:
            for at, rows in answers:
                found[at] = self._rows.outputs.answer_of(rows)

        await self._waiting.answer(self._asked(values, asked, found), take)

    async def _recorded_answers(
        self,
        values: Sequence[Any],
        asked: Sequence[AskedAbout],
        found: dict[int, Answer],
        recorded: RecordedAnswers,
    ) -> None:
        earlier: list[tuple[AskedAbout, Answer, int]] = []
        for at, one in enumerate(asked):
            own = recorded.find(one)
            if own is not None:
                found[at] = own
            elif (left := recorded.find_earlier(one)) is not None:
                earlier.append((one, left, at))
        for (_, _, at), answer in zip(earlier, recorded.append(earlier), strict=True):
            found[at] = answer
        missing = self._asked(values, asked, found)
        if not missing:
            return

        def append(answers: list[tuple[int, Rows]]) -> list[tuple[int, Answer]]:
            given = [(asked[at], self._rows.outputs.answer_of(rows), at) for at, rows in answers]
            return list(zip([at for at, _ in answers], recorded.append(given), strict=True))

        durable = DurableAnswers[list[tuple[int, Answer]]](append, found.update, self._rows.spec.capacity)
        async with durable.written():
            await self._waiting.answer(missing, durable.put)


class _Places:
    """What elements are about, by where they stand, and which of those that are the same each one is."""

    def __init__(self) -> None:
        self._before: Counter[tuple[int, int, bytes]] = Counter()
        self._rows = 0

    def of(self, batch: pa.RecordBatch, values: Sequence[Any]) -> list[AskedAbout]:
        names = batch.schema.names
        if CHANNEL in names and SEQUENCE in names:
            channels, sequences = batch.column(CHANNEL).to_pylist(), batch.column(SEQUENCE).to_pylist()
        else:
            # A plan that belongs to no job.
            channels, sequences = [0] * len(values), range(self._rows, self._rows + len(values))
        self._rows += len(values)
        # What was made of one record is next to each other, so at most the batch before has some of it.
        seen, own = self._before, Counter[tuple[int, int, bytes]]()
        found = []
        for channel, sequence, value in zip(channels, sequences, values, strict=True):
            place = channel, sequence, digest_of(value)
            found.append(AskedAbout(channel, sequence, seen[place] + own[place], place[2]))
            own[place] += 1
        self._before = own
        return found
