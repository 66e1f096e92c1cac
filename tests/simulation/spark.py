"""A Spark without a JVM: the query thread with its offset log, commit log and state.

It obeys the rules that the product depends on (`docs/internals.md`): a micro-batch's offsets are
logged before it runs; the newest logged one without a commit is run again over the same offsets;
commits/N names the state that the next one starts from; old entries and state files are purged by a
number of micro-batches, whatever lineage they belong to. What runs in the driver's Python is called
across the boundary between the processes, so either side may die while the other goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flinkish_spark.checkpoint.failures import QueryError
from flinkish_spark.checkpoint.statistics import PendingRecords
from flinkish_spark.contracts.calls import AsyncStatistics
from flinkish_spark.core.errors import FlinkishError, SparkGoneError
from flinkish_spark.core.store import CreateResult, ObjectMissing, Store
from flinkish_spark.protocol.bases import BASES
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS
from tests.simulation.faults import FaultKind as K
from tests.simulation.frames import SimFrame
from tests.simulation.input_topic import Row
from tests.simulation.reseeding import Beginning
from tests.simulation.scenario import StoreKind
from tests.simulation.scheduler import US_PER_MS, Process, ProcessDied
from tests.simulation.spark_files import (
    BatchOffsets,
    bases_in,
    commit_text,
    parse_state,
    state_bytes,
    state_key,
    state_version,
)
from tests.simulation.world import World

#: Records that a partition gives to one micro-batch at most.
_MOST_RECORDS = 4


class JobCancelled(Exception):
    """The query was stopped while a Spark job of it ran."""


class _DriverGone(Exception):
    """The Python process behind foreachBatch does not answer."""


class SimQuery:
    """A :class:`~flinkish_spark.job.engine.RunningQuery`.

    Parameters
    ----------
    driver, jvm
        The two processes that it runs in.
    store
        The job directory as the JVM reaches it.
    folder
        Spark's checkpoint.
    write
        The function given to foreachBatch; runs in the driver.
    offered
        Returns the checkpoint id in the control file.
    beginning
        What a query without a log begins with.
    on_stop
        Told when it has ended because somebody stopped it.
    tell
        Is told the bases that the tasks of a micro-batch have written.
    """

    #: Whether it stages again what is decided.
    is_replay = False

    def __init__(
        self,
        world: World,
        driver: Process,
        jvm: Process,
        store: Store,
        folder: str,
        write: Callable[[Any, int], None],
        offered: Callable[[], int],
        beginning: Beginning,
        on_stop: Callable[[], None],
        tell: Callable[[Sequence[str]], None],
    ) -> None:
        self._on_stop, self._beginning, self._tell = on_stop, beginning, tell
        self._bases: dict[int, str] = {}
        self._world, self._driver, self._jvm_process = world, driver, jvm
        self._store, self._folder = store, folder
        self._write, self._offered = write, offered
        self._is_active, self._is_stopped = True, False
        self._exception: BaseException | None = None
        self._highest_version = 0
        self._thread = world.scheduler.spawn(jvm, f"{jvm.name}/query", self._run)

    # -- what the supervisor asks, in the driver ------------------------------------------------
    @property
    def is_active(self) -> bool:
        """Whether it runs."""
        if not self._jvm_process.is_alive:
            raise _gone()
        return self._is_active

    def exception(self) -> BaseException | None:
        """Return why it ended."""
        return self._exception

    def stop(self) -> None:
        """End it; it has ended when this returns, or the JVM is gone."""
        self._is_stopped = True
        while self._jvm_process.is_alive and self._thread.is_alive():
            self._world.scheduler.pause(2 * US_PER_MS)
        self._on_stop()
        is_on_disk = self._world.scenario.store is StoreKind.DISK
        if is_on_disk and self._jvm_process.is_alive and self._world.struck(K.LATE_CLEANING):
            highest = self._highest_version
            self._world.later(self._world.chance.choice((10, 100, 500)), lambda: self._clean_late(highest))

    def async_calls(self) -> Mapping[str, AsyncStatistics]:
        """There are no async operators in the simulated world."""
        return {}

    def count_dropped(self) -> int:
        """Return none: no policy drops any."""
        return 0

    def pending_records(self) -> PendingRecords:
        """Return nothing: nobody looks how much input there is."""
        return PendingRecords()

    # -- the query thread, in the JVM -----------------------------------------------------------
    def _run(self) -> None:
        try:
            self._stream()
        except JobCancelled:
            pass
        except ProcessDied:
            raise
        except Exception as error:
            self._world.note("query fails", f"{type(error).__name__}: {error}")
            self._exception = error if isinstance(error, FlinkishError) else QueryError(str(error))
        finally:
            self._is_active = False

    def _step(self, what: str, subject: str) -> None:
        """Do something in a Spark job; a stopped query ends here, sooner or later."""
        self._world.step(what, subject)
        if self._is_stopped and self._world.chance.random() < 0.6:
            raise JobCancelled
        if self._world.struck(K.QUERY_FAILURE):
            raise QueryError("a simulated task failed for good")

    def _stream(self) -> None:
        batch, start, pending, counts = self._populate()
        while not self._is_stopped:
            end = pending or self._construct(batch, start)
            if end is None:
                self._world.scheduler.pause(self._world.scenario.trigger_ms * US_PER_MS)
                continue
            pending = None
            counts = self._execute(batch, start, end, counts)
            batch, start = batch + 1, end

    def _populate(self) -> tuple[int, BatchOffsets, BatchOffsets | None, dict[int, int]]:
        """Find out where to go on: micro-batch, its beginning, its end if it was logged, its state."""
        nothing = BatchOffsets(self._beginning.ends, (0,) * self._world.scenario.scans)
        offsets, commits = self._entries(OFFSETS), self._entries(COMMITS)
        if not offsets:
            return 0, nothing, None, dict(self._beginning.counts)
        newest = offsets[-1]
        end = self._read_offsets(newest)
        before = self._read_offsets(newest - 1) if newest > 0 else nothing
        if commits and commits[-1] == newest:
            return newest + 1, end, None, self._load_state(newest)
        # Spark only warns when commits/ lacks more than the newest one, and runs the newest.
        counts = self._load_state(newest - 1) if newest > 0 else dict(self._beginning.counts)
        return newest, before, end, counts

    def _entries(self, log: str) -> list[int]:
        keys = self._store.list(f"{self._folder}/{log}")
        return sorted(int(key.rpartition("/")[2]) for key in keys)

    def _read_offsets(self, batch: int) -> BatchOffsets:
        try:
            return BatchOffsets.parse(self._store.read(f"{self._folder}/{OFFSETS}/{batch}").decode())
        except ObjectMissing:
            raise QueryError(f"micro-batch {batch} does not exist in the simulated offset log") from None

    def _load_state(self, batch: int) -> dict[int, int]:
        try:
            text = self._store.read(f"{self._folder}/{COMMITS}/{batch}").decode()
            state = self._store.read(f"{self._folder}/state/{state_key(text, batch)}")
            self._bases = bases_in(state)
            return parse_state(state, self._store)
        except ObjectMissing as missing:
            raise QueryError(f"the simulated state behind micro-batch {batch} is gone: {missing}") from None

    # -- one micro-batch ------------------------------------------------------------------------
    def _construct(self, batch: int, start: BatchOffsets) -> BatchOffsets | None:
        """Ask the sources one after the other; log where the micro-batch ends, if there is anything."""
        world = self._world
        self._step("latest offsets", f"of {batch}")
        now_us = world.scheduler.now_us
        ends = {p: min(world.input.end(p, now_us), at + _MOST_RECORDS) for p, at in start.ends.items()}
        controls: list[int] = []
        for control in start.controls:
            if controls:
                self._step("latest control", f"of {batch}")
            controls.append(max(control, self._offered()))
        end = BatchOffsets(ends, tuple(controls))
        if end == start:
            return None
        self._add(OFFSETS, batch, end.text())
        self._purge(batch)
        return end

    def _execute(
        self, batch: int, start: BatchOffsets, end: BatchOffsets, counts: Mapping[int, int]
    ) -> dict[int, int]:
        world = self._world
        rows, after = self._rows(start, end, counts)
        branches = tuple(
            (now,) if now > before else () for before, now in zip(start.controls, end.controls, strict=True)
        )
        bases = self._written_bases(batch, counts, after)
        frame = SimFrame(rows, branches, self._step, is_replay=self.is_replay, ends=end.ends)
        world.call(self._driver, lambda: self._write(frame, batch), _DriverGone)
        self._step("state", f"version {batch + 1}")
        unique_id = f"{world.chance.getrandbits(48):012x}"
        kind = world.scenario.store
        text = commit_text(unique_id, kind)
        self._store.put(f"{self._folder}/state/{state_key(text, batch)}", state_bytes(after, bases, kind))
        self._bases = bases
        self._add(COMMITS, batch, text)
        return after

    def _written_bases(
        self, batch: int, counts: Mapping[int, int], after: Mapping[int, int]
    ) -> dict[int, str]:
        """Return the bases behind a micro-batch, by key; in a bucket some keys that have changed have one."""
        bases, told = dict(self._bases), list[str]()
        chance = self._world.chance
        for key, count in after.items():
            if count == counts.get(key):
                continue
            bases.pop(key, None)
            # A task that is lost, or whose word is, has written, too.
            while self._world.scenario.store is StoreKind.BUCKET and chance.random() < 0.5:
                name = f"sums/sums/{key}-{batch}-{chance.getrandbits(64):016x}"
                self._step("base", name)
                self._store.put(f"{BASES}/{name}", str(count).encode())
                if chance.random() < 0.8:
                    bases[key] = name
                    told += [name] if chance.random() < 0.95 else []
        self._tell(told)
        return bases

    def _rows(
        self, start: BatchOffsets, end: BatchOffsets, counts: Mapping[int, int]
    ) -> tuple[tuple[Row, ...], dict[int, int]]:
        """Return what the operator emits, and its state behind it."""
        lost = self._world.input.why_lost(start.ends)
        if lost:
            raise QueryError(f"simulated records are gone: {lost}")
        return self._counted(start, end, counts, list(start.ends))

    def _counted(
        self, start: BatchOffsets, end: BatchOffsets, counts: Mapping[int, int], partitions: Sequence[int]
    ) -> tuple[tuple[Row, ...], dict[int, int]]:
        after, rows = dict(counts), []
        for partition in partitions:
            for offset in range(start.ends[partition], end.ends[partition]):
                key = self._world.input.key(partition, offset)
                after[key] = after.get(key, 0) + 1
                rows.append(Row(partition, offset, key, after[key]))
        return tuple(rows), after

    def _add(self, log: str, batch: int, text: str) -> None:
        key = f"{self._folder}/{log}/{batch}"
        if self._store.create_if_absent(key, text.encode()) is CreateResult.EXISTS:
            raise QueryError(f"concurrent update of the simulated log: {log}/{batch} exists")

    # -- cleaning -------------------------------------------------------------------------------
    def _purge(self, batch: int) -> None:
        """Delete log entries and state files behind the retained number of micro-batches; on a disk."""
        if self._world.scenario.store is StoreKind.BUCKET:
            return
        oldest = batch - self._world.scenario.batches_to_retain
        for log in (OFFSETS, COMMITS):
            for old in self._entries(log):
                if old < oldest:
                    self._store.delete(f"{self._folder}/{log}/{old}")
        names = [key.rpartition("/")[2] for key in self._store.list(f"{self._folder}/state")]
        self._highest_version = max(map(state_version, names), default=0)
        for name in names:
            if self._is_old(name, self._highest_version):
                self._store.delete(f"{self._folder}/state/{name}")

    def _is_old(self, name: str, highest: int) -> bool:
        return state_version(name) < highest - self._world.scenario.versions_to_retain

    def _clean_late(self, highest: int) -> None:
        """Clean up once more, by the highest version that the query has seen, as Spark's maintenance does.

        It goes on for up to a minute after a query was stopped, and knows of no rewind.
        """
        disk = self._world.disk
        for key in disk.list(f"{self._folder}/state") if self._jvm_process.is_alive else ():
            if self._is_old(key.rpartition("/")[2], highest):
                self._world.note("cleaned late", key)
                disk.delete(key)


class SimReplayQuery(SimQuery):
    """A query that runs the newest logged micro-batch, and ends, as Spark's trigger(once) does."""

    is_replay = True
    #: Called if rows come out otherwise than at first.
    on_other_rows: Callable[[], None] = staticmethod(lambda: None)

    def _stream(self) -> None:
        batch, start, pending, counts = self._populate()
        end = pending or self._construct(batch, start)
        if end is not None:
            self._execute(batch, start, end, counts)

    def _rows(
        self, start: BatchOffsets, end: BatchOffsets, counts: Mapping[int, int]
    ) -> tuple[tuple[Row, ...], dict[int, int]]:
        rows, after = super()._rows(start, end, counts)
        if self._world.struck(K.OTHER_ORDER):
            others, after = self._counted(start, end, counts, list(reversed(start.ends)))
            if set(others) != set(rows):
                self.on_other_rows()
            return others, after
        return rows, after


def _gone() -> SparkGoneError:
    return SparkGoneError("the simulated JVM is gone")
