"""A source of your own: one class that says which splits there are, how far each goes, and reads a piece.

The order of calls, what may happen twice and whole examples are in `docs/sources.md`.
"""

from __future__ import annotations

import copy
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pyspark.sql import types as T

from flinkish_spark.arguments import instance_of, refuse_if_never_run
from flinkish_spark.errors import ConfigError, EnvironmentFault, FlinkishError, InputLostError
from flinkish_spark.sources.base import Source, SourceStart
from flinkish_spark.sources.rates import RateLimit
from flinkish_spark.sources.split_positions import (
    Offset,
    SplitPosition,
    is_number,
    logged_positions,
    lowest_offsets,
)
from flinkish_spark.store import LocalStore
from flinkish_spark.user_iterators import USER_ERRORS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.runtime.spark_log import LoggedOffsets

#: What this package calls, and nobody awaits.
_METHODS = ("splits", "first", "latest", "end", "committed", "released", "fingerprint", "close")
#: The records of a piece, in their order.
Rows = Iterator[tuple[Any, ...]] | Iterator["pa.RecordBatch"]


class SourceUnavailable(EnvironmentFault):
    """A source cannot be asked now; the query is started again."""

    restartable = True


class SourceFailed(SourceUnavailable):
    """The system refuses what a source asks for, as a file that is not there: such failures are counted."""

    ends_when_repeated = True


class SplitSource(Source):
    """Base class of sources that a user writes.

    The input is divided into *splits*, named by the source, each an order of records with *offsets* in
    between: JSON values, of most sources a number that rises. A micro-batch reads each split from one
    offset to another. Both are logged before it runs and are part of every checkpoint, so a record takes
    part in exactly one checkpoint, wherever a process dies.

    A subclass gives :attr:`schema` and writes :meth:`splits`, :meth:`latest` and :meth:`read`. An object
    holds settings only: it is serialised and sent to Spark's processes, as functions are. Every process
    has a copy of its own; what a method keeps in attributes is seen by nobody else.

    Examples
    --------
    >>> class Squares(SplitSource):
    ...     schema = "n LONG, square LONG"
    ...
    ...     def splits(self):
    ...         return ["all"]
    ...
    ...     def latest(self, split, start, limit):
    ...         return start + (100 if limit is None else min(limit, 100))
    ...
    ...     def read(self, split, start, end):
    ...         return ((n, n * n) for n in range(start, end))
    >>> list(Squares().read("all", 2, 4))
    [(2, 4), (3, 9)]
    """

    #: Fields of a record: ``"name TYPE, ..."`` or a StructType.
    schema: str | T.StructType
    #: What its offsets are offsets in. A job refuses to go on with another kind under the same uid.
    kind: str = "splits"
    #: Whether it comes to an end: :meth:`splits` names all there will ever be, and :meth:`end` knows each.
    is_bounded: bool = False
    #: What micro-batches may take; see :meth:`limited`.
    rate: RateLimit = RateLimit()
    _fs_uid: str = ""
    _fs_format: str = ""
    _fs_start: SourceStart | None = None
    _fs_folder: str = ""

    # -- in a process of Spark's on the driver, between micro-batches -------------------------------
    @abstractmethod
    def splits(self) -> Sequence[str]:
        """Return the names of all splits that there are now.

        Called before every micro-batch, and every few milliseconds on an idle stream. Splits may be
        added; one that is no longer named counts as lost input. The number of a split, by which its
        records are ordered among others, is its place in the order of finding.
        """

    def first(self, split: str) -> Offset:
        """Return where a split begins to be read: by default 0.

        Called once per split and job; the answer is kept in the job directory.
        """
        return 0

    @abstractmethod
    def latest(self, split: str, start: Offset, limit: int | None) -> Offset:
        """Return up to where `split` can be read now; `start` if there is nothing new.

        What lies before it must be readable again, the same, until a checkpoint behind it is confirmed
        and retained checkpoints are gone.

        Parameters
        ----------
        start
            Where the micro-batch begins in this split.
        limit
            How many records the micro-batch may take from it; None for any number. The source sees to
            it as well as it can: only it knows how many records lie between two offsets.
        """

    def end(self, split: str) -> Offset | None:
        """Return where a split ends for good; None for never, or if that is not known yet.

        Of a bounded source; the job takes a last checkpoint when all splits have come to their end.
        """
        return None

    def records_between(self, split: str, start: Offset, end: Offset) -> int | None:
        """Return how many records lie between two offsets; None if that is not known.

        By default the difference of numbers. Only asked if there is a limit; what is not known counts as
        all that the limit allowed.
        """
        return end - start if type(start) is int and type(end) is int else None

    def close(self) -> None:
        """Let go of what the methods above have opened. Called when the query ends, in their process."""

    # -- in a task ----------------------------------------------------------------------------------
    @abstractmethod
    def read(self, split: str, start: Offset, end: Offset) -> Rows:
        """Yield the records from `start` up to `end`: tuples, or Arrow RecordBatches.

        Called in a task, again for the same piece after a failure, and then maybe in another process,
        days later. It must yield the same records in the same order every time.
        """

    # -- in the user's process ----------------------------------------------------------------------
    def committed(self, offsets: Mapping[str, Offset]) -> None:
        """Take note that everything before `offsets` is committed in every sink.

        Called once per checkpoint, by the driver, behind the last sink and before the receipt; so again
        after a crash between the two. Never lower than before, but for a rewind. Retained checkpoints need
        input before it: what may be deleted says :meth:`released`.

        Raises
        ------
        OSError
            It cannot be done now; it is called again until it can.
        """

    def released(self, offsets: Mapping[str, Offset]) -> None:
        """Take note that nothing before `offsets` will be read again: it may be deleted.

        Called behind :meth:`committed`, with where the oldest checkpoint stands that can be gone back
        to. The same rules hold.
        """

    def fingerprint(self) -> Mapping[str, Any]:
        """Return what must stay the same for the life of the job, as JSON values; empty by default.

        Compared at every start: offsets mean nothing in another input.
        """
        return {}

    # -- settings -----------------------------------------------------------------------------------
    def limited(self, rate: RateLimit) -> Self:
        """Return this source with a limit. May differ from start to start.

        Examples
        --------
        >>> CollectionSource([(1,)], "n LONG").limited(RateLimit(records_per_batch=10))  # doctest: +SKIP
        """
        what_to_do = "give RateLimit(records_per_second=..., records_per_batch=...)"
        return self._with("rate", instance_of("rate", rate, RateLimit, what_to_do=what_to_do))

    @property
    def job_folder(self) -> Path:
        """A directory of the source's own in the job directory, for what it must keep; not made yet.

        The same in every process and at every start. Known from the start of the job on.
        """
        if not self._fs_folder:
            raise ConfigError(
                "a source has a folder from the start of its job on", what_to_do="use it in a job"
            )
        return Path(self._fs_folder)

    def _with(self, name: str, value: object) -> Self:
        moved = copy.copy(self)
        # Subclasses may be frozen dataclasses.
        object.__setattr__(moved, name, value)
        return moved

    # -- the contract of sources ---------------------------------------------------------------------
    @property
    def record_type(self) -> T.StructType:
        """The schema as Spark's type."""
        from flinkish_spark.graph.declared import output_schema

        return output_schema(self.schema, self._fs_uid or type(self).__name__)

    def bound(self, uid: str) -> Self:
        """Return this source under its uid in a job, after a look at what the user wrote.

        Raises
        ------
        ConfigError, SchemaError
            The class cannot be used: its schema, a method, or something in it that cannot travel.
        """
        from flinkish_spark.sources.split_checks import check_travels

        if not hasattr(self, "schema"):
            raise ConfigError(
                f"the source '{uid}' has no schema", what_to_do='write schema = "name TYPE, ..." in its class'
            )
        instance_of(
            "rate", self.rate, RateLimit, what_to_do="give RateLimit(...), or leave the attribute alone"
        )
        # Of its class, too: no source of splits has any.
        if self.topics:
            raise ConfigError(
                f"the source '{uid}' has an attribute 'topics'",
                why="that name has a meaning of its own: records would be taken for those of Kafka topics",
                what_to_do="call the attribute otherwise",
            )
        for name in _METHODS:
            refuse_if_never_run(getattr(self, name), f"{type(self).__name__}.{name}()")
        # A name of a format has no dots: Spark would look for a class.
        name = f"flinkish-{uid.replace('.', '-')}-{uuid.uuid4().hex[:8]}"
        known = self._with("_fs_uid", uid)._with("_fs_format", name)
        _ = known.record_type  # Raises if they cannot be read.
        check_travels(known, uid)
        return known

    @property
    def plan_name(self) -> str:
        """Tell kinds of sources apart: the job directory refuses another kind under a uid."""
        return self.kind

    @property
    def is_positionable(self) -> bool:
        """Whether it can begin anywhere."""
        return True

    def check_alignable(self, uid: str) -> None:
        """Do nothing: its reader holds back single splits."""

    def starting_at(self, start: SourceStart) -> Self:
        """Return this source with another beginning."""
        return self._with("_fs_start", start)._with("_fs_format", f"{self._fs_format}-{start.label}")

    def load(self, spark: SparkSession, control_path: str) -> DataFrame:
        """Return the stream: fields, the split's number as channel, the place in the split as sequence."""
        from flinkish_spark.sources.split_reader import data_source_of

        folder = str(Path(control_path).parent) if self._fs_start is None else self._fs_start.folder
        job_root = Path(control_path).parents[1]
        # A stream outside of a job has no job directory.
        own = self._with("_fs_folder", str(_own_folder(job_root, self._fs_uid)) if job_root.name else "")
        is_in_job = bool(job_root.name)
        source = data_source_of(own, folder if is_in_job else "", control_path if is_in_job else "")
        spark.dataSource.register(source)
        return spark.readStream.format(source.name()).load()

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Take note of where the job is."""
        if isinstance(job_dir.store, LocalStore):
            object.__setattr__(self, "_fs_folder", str(_own_folder(job_dir.store.root, uid)))

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return the fingerprint as the job recorded it at its first start."""
        recorded = job_dir.recorded(_fact(uid))
        return {} if recorded is None else {_fact(uid): recorded}

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Compare the fingerprint with that of the first start."""
        try:
            now = dict(self.fingerprint())
        except OSError as error:
            what = f"the source '{uid}' cannot say which input it reads"
            raise SourceUnavailable.of_system(error, what) from error
        except FlinkishError:
            raise
        except USER_ERRORS as error:
            mend = "correct fingerprint(); the job goes on from the last checkpoint"
            raise _failed(uid, "was asked which input it reads", error, mend) from error
        if now and job_dir.recorded_once(_fact(uid), now) != now:
            raise InputLostError(
                f"the input of source '{uid}' is another one than at the job's first start",
                why="the offsets of the checkpoint mean other records in it",
                what_to_do="give the source its input again, or start a new job with a new job_dir",
                uid=uid,
            )

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Tell the user's source; it is no consumer group, so the receipt names nothing."""
        is_told, may_delete = self._overrides("committed"), self._overrides("released")
        offsets = lowest_offsets(logged_positions(position, self._fs_uid)) if is_told or may_delete else {}
        if not offsets:
            return {}
        try:
            if is_told:
                self._tell(offsets, note)
            if may_delete:
                self._release()
        except OSError as error:
            raise SourceUnavailable(
                f"the source '{self._fs_uid}' cannot take note of a checkpoint now", why=str(error)
            ) from error
        except FlinkishError:
            raise
        except USER_ERRORS as error:
            mend = "correct committed() or released(); the checkpoint is finished by the next start"
            raise _failed(self._fs_uid, "was told of a checkpoint", error, mend) from error
        return {}

    def _tell(self, offsets: Mapping[str, Offset], note: str) -> None:
        """Call :meth:`committed`; where the system keeps a note beside the offsets, the mark goes with it."""
        self.committed(offsets)

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(SplitSource, method)

    def _release(self) -> None:
        """Say what no checkpoint needs, of those that can be gone back to.

        The newest has no receipt yet: it may have to be replayed, from where the one before it ends.
        """
        from flinkish_spark.job_dir import JobDir
        from flinkish_spark.runtime.spark_log import LoggedOffsets

        commits = JobDir(LocalStore(self.job_folder.parents[1])).live_commits()
        if len(commits) < 2:
            return
        logged = [LoggedOffsets.parse(decision.offsets_text) for decision in commits]
        needed = lowest_offsets([scan for one in logged for scan in logged_positions(one, self._fs_uid)])
        if needed:
            self.released(needed)

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        """Return the numbers of the splits that have not come to their end."""
        scans = logged_positions(position, self._fs_uid)
        return frozenset(number for scan in scans for number in scan.open_numbers())

    def has_ended(self, position: LoggedOffsets) -> bool:
        """Whether every scan has logged the end."""
        scans = logged_positions(position, self._fs_uid)
        return bool(scans) and all(scan.is_ended for scan in scans)

    # -- for sources made of others ------------------------------------------------------------------
    def splits_from(self, position: SplitPosition) -> Sequence[str]:
        """Return the splits that may be read from `position` on, among them all that are in it."""
        return self.splits()

    def is_at_end(self, position: SplitPosition) -> bool:
        """Whether a bounded source has nothing behind `position`, now and for ever."""
        return self.is_bounded and all(
            reaches(offset, self.end(name)) for name, offset in position.offsets.items()
        )


def _failed(uid: str, when: str, error: BaseException, mend: str) -> FlinkishError:
    from flinkish_spark.runtime.failures import RepeatableUserError

    return RepeatableUserError(
        f"the source '{uid}' failed when it {when}",
        why=f"{type(error).__name__}: {error}",
        what_to_do=mend,
        uid=uid,
    )


def reaches(offset: Offset, end: Offset | None) -> bool:
    """Whether a split that was read up to `offset` has come to `end`."""
    if is_number(offset) and is_number(end):
        return bool(offset >= end)
    return end is not None and bool(offset == end)


def _own_folder(job_root: Path, uid: str) -> Path:
    return job_root / "sources" / uid


def _fact(uid: str) -> str:
    return f"source-{uid}"


__all__ = ["Rows", "SourceUnavailable", "SplitSource", "reaches"]
