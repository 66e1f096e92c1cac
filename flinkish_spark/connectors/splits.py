"""Base class of sources that users write, and how Spark reads them.

The order of calls, which calls may be repeated, and examples are in `docs/sources.md`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import numbers
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from flinkish_spark.checkpoint.control import read_held
from flinkish_spark.connectors.rates import RateLimit, TokenBucket, divide_allowance
from flinkish_spark.connectors.split_positions import (
    Offset,
    SplitPosition,
    find_scan_positions,
    is_number,
    lowest_offsets,
    reaches,
    why_not_json,
)
from flinkish_spark.connectors.split_records import NO_MORE, PLACE, PieceRows
from flinkish_spark.contracts.source import Extent, JobPlace, Source, SourceStart
from flinkish_spark.core.errors import (
    USER_FUNCTION_MARKER,
    ConfigError,
    FlinkishError,
    InputLostError,
    RetriableError,
    UnavailableError,
    may_pass,
)
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.iterators import USER_ERRORS, elements_of
from flinkish_spark.core.job_dir import JobDir, open_job_dir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.stream_readers import ReadAllAvailable, ReadLimit, adapt_reader
from flinkish_spark.core.validation import check_methods, instance_of
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.transport import columns as C
from flinkish_spark.types.schemas import output_schema

#: The records of a piece, in their order.
Rows = Iterator[tuple[Any, ...]] | Iterator["pa.RecordBatch"]


class SourceUnavailable(UnavailableError):
    """A source cannot be reached now; the query is started again."""


class SplitSource(Source):
    """Base class of sources that users write.

    The input is divided into *splits*, which the source names. A split is a sequence of records with
    *offsets* between them: JSON values, in most sources a rising number. A micro-batch reads each split from
    one offset to another. Both are logged before it runs and are part of every checkpoint, so a record
    belongs to exactly one checkpoint, wherever a process dies.

    A subclass sets :attr:`schema` and defines :meth:`splits`, :meth:`latest` and :meth:`read`. An object
    holds settings only: it is serialised and sent to Spark's processes, as functions are. Each process has
    its own copy; attributes that a method sets are not visible in other processes.

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
    #: Name of the kind of offsets. A job refuses to go on with another kind under the same uid.
    kind: str = "splits"
    #: If the input ends: :meth:`splits` then names all splits, and :meth:`end` returns the end of each.
    is_bounded: bool = False
    #: Limits the records of a micro-batch; see :meth:`limit_rate`.
    rate: RateLimit = RateLimit()
    _fs_uid: str = ""
    _fs_format: str = ""
    _fs_start: SourceStart | None = None
    _fs_folder: str = ""
    #: In a task, the result of :meth:`piece_facts` for the piece that it reads.
    _fs_piece_facts: Any = None

    # In a process of Spark's on the driver, between micro-batches:
    @abstractmethod
    def splits(self) -> Sequence[str]:
        """Return the names of all splits that exist now.

        Called before every micro-batch, and every few milliseconds on an idle stream. Splits may be
        added; one that is no longer named counts as lost input. Splits are numbered in the order in which
        they were found; the number orders their records.
        """

    def first(self, split: str) -> Offset:
        """Return the offset at which reading of a split begins: by default 0.

        Called once per split and job; the answer is kept in the job directory.
        """
        return 0

    @abstractmethod
    def latest(self, split: str, start: Offset, limit: int | None) -> Offset:
        """Return the offset up to which `split` can be read now; `start` if there is nothing new.

        Records before it must stay readable and unchanged until a checkpoint after them is confirmed and no
        retained checkpoint needs them.

        Parameters
        ----------
        start
            Where the micro-batch begins in this split.
        limit
            Most records that the micro-batch may take from the split; None for any number. The source keeps
            to it as well as it can: only it knows how many records are between two offsets.
        """

    def end(self, split: str) -> Offset | None:
        """Return where a split ends; None if it never ends, or its end is not known yet.

        For bounded sources: the job takes a final checkpoint when all splits have been read to their end.
        """
        return None

    def records_between(self, split: str, start: Offset, end: Offset) -> int | None:
        """Return how many records are between two offsets; None if that is not known.

        By default the difference of whole numbers. Called only if there is a limit; None counts as the
        whole limit.
        """
        return end - start if type(start) is int and type(end) is int else None

    def piece_facts(self, split: str, start: Offset, end: Offset) -> Any:
        """Return what a task needs besides the offsets to read a piece, as a JSON value; None by default."""
        return None

    def close(self) -> None:
        """Close what the methods above have opened. Called in their process when the query ends."""

    # In a task:
    @abstractmethod
    def read(self, split: str, start: Offset, end: Offset) -> Rows:
        """Yield the records from `start` up to `end`: tuples, or Arrow RecordBatches.

        Called in a task, and again for the same piece after a failure, maybe in another process and days
        later. It must yield the same records in the same order every time.
        """

    # In the user's process:
    def on_commit(self, offsets: Mapping[str, Offset]) -> None:
        """Take note that every sink has committed all records before `offsets`.

        Called once per checkpoint on the driver, after the last sink's commit and before the receipt; again
        after a crash between the two. Offsets fall only after a rewind. Retained checkpoints still need input
        before `offsets`: :meth:`on_release` says what may be deleted.

        Raises
        ------
        OSError
            It cannot be done now; the method is called again until it can.
        """

    def on_release(self, offsets: Mapping[str, Offset]) -> None:
        """Take note that input before `offsets` will not be read again and may be deleted.

        Called after :meth:`on_commit`, with the offsets of the oldest checkpoint that a rewind can reach. The
        same rules hold.
        """

    def fingerprint(self) -> Mapping[str, Any]:
        """Return JSON values that must stay the same for the life of the job; empty by default.

        They are compared at every start, since the job's offsets have no meaning in another input.
        """
        return {}

    @check_arguments(rate="give RateLimit(records_per_second=..., records_per_batch=...)")
    def limit_rate(self, rate: RateLimit) -> Self:
        """Return this source with a rate limit, which may change with each start.

        Examples
        --------
        >>> CollectionSource([(1,)], "n LONG").limit_rate(RateLimit(records_per_batch=10))  # doctest: +SKIP
        """
        return self._replace("rate", rate)

    @property
    def job_folder(self) -> Path:
        """The source's directory in the job directory, for data that it must keep; it may not exist yet.

        The same in every process and at every start. Available after the start of the job.

        Raises
        ------
        ConfigError
            The job directory is in a bucket: use :attr:`job_store`.
        """
        return self.job_store.folder

    @property
    def job_store(self) -> StoreSpec:
        """The same as a store that any process can open: ``self.job_store.open()``."""
        if not self._fs_folder:
            raise ConfigError("a source has a folder after its job's start", what_to_do="use it in a job")
        return StoreSpec.from_text(self._fs_folder)

    def _replace(self, name: str, value: object) -> Self:
        moved = copy.copy(self)
        # Subclasses may be frozen dataclasses.
        object.__setattr__(moved, name, value)
        return moved

    @property
    def record_type(self) -> T.StructType:
        """The schema as Spark's type."""
        return output_schema(self.schema, self._fs_uid or type(self).__name__)

    def bind(self, uid: str) -> Self:
        """Return this source with its uid in a job, after checking the user's class."""
        if not hasattr(self, "schema"):
            what_to_do = 'write schema = "name TYPE, ..."'
            raise ConfigError(f"the source '{uid}' has no schema", what_to_do=what_to_do)
        instance_of("rate", self.rate, RateLimit, what_to_do="give RateLimit(...), or leave it alone")
        # Also an attribute of the class: only Kafka sources have topics.
        if self.topics:
            what = f"the source '{uid}' has an attribute 'topics', as only Kafka sources may"
            raise ConfigError(what, what_to_do="give the attribute another name")
        check_methods(self, SplitSource, f"{type(self).__name__}.")
        # The name of a format must have no dots: Spark would look for a class.
        name = f"flinkish-{uid.replace('.', '-')}-{uuid.uuid4().hex[:8]}"
        known = self._replace("_fs_uid", uid)._replace("_fs_format", name)
        _ = known.record_type  # Raises if they cannot be read.
        try:
            cloudpickle.dumps(known)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise ConfigError(
                f"the source '{uid}' cannot be sent to Spark's processes",
                why=str(error),
                what_to_do="keep settings in its attributes, and open connections and files in its methods",
            ) from error
        return known

    @property
    def plan_name(self) -> str:
        """The kind of source; a job refuses another kind under the same uid."""
        return self.kind

    @property
    def is_positionable(self) -> bool:
        return True

    def check_alignable(self, uid: str) -> None:
        """Accept watermark alignment: the reader can hold back single splits."""

    def starting_at(self, start: SourceStart) -> Self:
        return self._replace("_fs_start", start)._replace("_fs_format", f"{self._fs_format}-{start.label}")

    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        """Return the stream: fields, the split's number as channel, the record's place as sequence."""
        job_dir = place.job_dir
        own = self._replace("_fs_folder", "" if job_dir is None else _own_folder(job_dir, self._fs_uid))
        source = data_source_of(own, place.beginnings(self._fs_start), place.control_path)
        spark.dataSource.register(source)
        fields = T.StructType([*self.record_type, *PLACE])
        return C.read_records(spark.readStream.format(source.name()).load(), ReadSplits(own), fields)

    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        if job_dir.place is not None:
            object.__setattr__(self, "_fs_folder", _own_folder(job_dir.place, uid))

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        recorded = job_dir.find_fact(_fact(uid))
        return {} if recorded is None else {_fact(uid): recorded}

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        mend = "correct fingerprint(); the job goes on from the last checkpoint"
        with _failures_on_the_driver(uid, "was asked which input it reads", mend, is_counted=True):
            now = dict(self.fingerprint())
        if now and job_dir.record_fact(_fact(uid), now) != now:
            raise InputLostError(
                f"the input of source '{uid}' is another one than at the job's first start",
                why="the offsets of the checkpoint mean other records in it",
                what_to_do="give the source its input again, or start a new job with a new job_dir",
                uid=uid,
            )

    def commit_offsets(
        self, position: LoggedOffsets, note: str = ""
    ) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Call the source's `on_commit` and `on_release`; nothing goes into the receipt."""
        is_told, may_delete = self._overrides("on_commit"), self._overrides("on_release")
        offsets = lowest_offsets(find_scan_positions(position, self._fs_uid)) if is_told or may_delete else {}
        if not offsets:
            return {}
        mend = "correct on_commit() or on_release(); the checkpoint is finished by the next start"
        with _failures_on_the_driver(self._fs_uid, "was told of a checkpoint", mend, is_counted=False):
            if is_told:
                self._tell(offsets, note)
            if may_delete and (needed := self._find_needed_offsets()):
                self.on_release(needed)
        return {}

    def _tell(self, offsets: Mapping[str, Offset], note: str) -> None:
        # Subclasses whose system stores a note beside the offsets store the timeline's mark there.
        self.on_commit(offsets)

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(SplitSource, method)

    def _find_needed_offsets(self) -> dict[str, Offset]:
        """Return the offsets of the oldest checkpoint that a rewind can reach; {} if there are too few."""
        commits = open_job_dir(self.job_store.to_parent(2)).live_commits()
        # The newest has no receipt yet: it may be replayed, from the end of the one before it.
        if len(commits) < 2:
            return {}
        logged = [LoggedOffsets.parse(decision.offsets_text) for decision in commits]
        return lowest_offsets([scan for one in logged for scan in find_scan_positions(one, self._fs_uid)])

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        scans = find_scan_positions(position, self._fs_uid)
        return frozenset(number for scan in scans for number in scan.open_numbers())

    def available(self, split: str, start: Offset | None) -> Offset:
        """Return where `split` ends now, however little a micro-batch may take.

        Called in the user's process before a query starts that ends when the job has caught up.
        """
        return self.latest(split, self.first(split) if start is None else start, None)

    def newest(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> Mapping[str, Offset]:
        source = copy.copy(self)
        scans = [] if position is None else find_scan_positions(position, uid)
        known = scans[0] if scans else SplitPosition(uid, {})
        mend = "correct splits(), first() or latest()"
        with _failures_on_the_driver(uid, "was asked where its input ends", mend, is_counted=True):
            try:
                names = check_splits(uid, source.splits_from(known))
                begun = {name: at for name, at in known.offsets.items() if name in known.done}
                found = {
                    name: begun[name] if name in begun else source.available(name, known.offsets.get(name))
                    for name in names
                }
            finally:
                source.close()
        for name, end in found.items():
            if not is_number(end):
                raise ConfigError(
                    f"the source '{uid}' says that the split '{name}' ends at {end!r:.200}",
                    why="only of numbers it is known whether a job has come to an end or beyond it",
                    what_to_do="make the offsets numbers, or leave until= out",
                )
        return found

    def has_reached(self, end: Mapping[str, Offset], position: LoggedOffsets) -> bool:
        scans = find_scan_positions(position, self._fs_uid)
        return bool(scans) and all(
            reaches(scan.offsets.get(name), offset) for scan in scans for name, offset in end.items()
        )

    def has_ended(self, position: LoggedOffsets) -> bool:
        scans = find_scan_positions(position, self._fs_uid)
        return bool(scans) and all(scan.is_ended for scan in scans)

    def extent(self, position: LoggedOffsets | None) -> Extent | None:
        """Return how many records are before a position, if the source's offsets are numbers of records."""
        if position is None:
            # `first` may have to ask another system.
            return None if self._overrides("first") else Extent(0, self.record_count())
        offsets = lowest_offsets(find_scan_positions(position, self._fs_uid)).values()
        numbers = [offset for offset in offsets if type(offset) is int]
        if not numbers or len(numbers) < len(offsets):
            return None
        return Extent(sum(numbers), self.record_count())

    def record_count(self) -> int | None:
        """Return the total number of records; None if it is not known without asking another system."""
        return None

    # For sources made of others:
    def splits_from(self, position: SplitPosition) -> Sequence[str]:
        """Return the splits that may be read from `position` on, including all that `position` has."""
        return self.splits()

    def is_at_end(self, position: SplitPosition) -> bool:
        """Return if a bounded source has no records after `position`."""
        return self.is_bounded and all(
            reaches(offset, self.end(name)) for name, offset in position.offsets.items()
        )


@contextmanager
def _failures_on_the_driver(uid: str, when: str, mend: str, *, is_counted: bool) -> Iterator[None]:
    """Turn exceptions of a source's code into errors that name it; counted OSErrors may end the job."""
    from flinkish_spark.checkpoint.failures import RepeatableUserError

    what = f"the source '{uid}' failed when it {when}"
    try:
        yield
    except FlinkishError:
        raise
    except OSError as error:
        if is_counted:
            raise SourceUnavailable.from_os_error(error, what) from error
        raise SourceUnavailable(what, why=str(error)) from error
    except USER_ERRORS as error:
        why = f"{type(error).__name__}: {error}"
        raise RepeatableUserError(what, why=why, what_to_do=mend, uid=uid) from error


def ask_once(place: StoreSpec, key: str, kind: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer that was stored at the first call in the life of a job."""
    store = place.open()
    objects = SealedObjects(store, place.url)
    if objects.optional(key, kind, dict) is None:
        store.create_if_absent(key, seal(kind, ask()))
    return objects.read(key, kind, dict)


def _own_folder(job_dir: StoreSpec, uid: str) -> str:
    return job_dir.to_child(f"sources/{uid}").to_text()


def _fact(uid: str) -> str:
    return f"source-{uid}"


def check_splits(uid: str, found: Any) -> Sequence[str]:
    """Return the split names that a source returned, checked; iterating over them runs its code."""
    is_many = isinstance(found, Iterable) and not isinstance(found, str | bytes)
    names = tuple(elements_of(found)) if is_many else (None,)
    if not all(isinstance(name, str) and name for name in names):
        what = f"splits() of source '{uid}' returned {names if is_many else found!r}"
        raise ConfigError(what, what_to_do='return a list of names: ["all"]')
    if len(set(names)) != len(names):
        what = f"splits() of source '{uid}' names a split twice: {sorted(names)}"
        raise ConfigError(what, what_to_do="give each split a name of its own")
    return names


#: Spark asks every 10 ms while there is nothing to read; the source is asked this often.
_ASK_EVERY_S = 0.025
_T = TypeVar("_T")


class SplitPiece(InputPartition):
    def __init__(self, number: int, split: str, start: Offset, end: Offset, facts: Any) -> None:
        super().__init__(None)
        self.number, self.split, self.start, self.end, self.facts = number, split, start, end, facts

    def to_text(self) -> str:
        return json.dumps([self.number, self.split, self.start, self.end, self.facts])

    @classmethod
    def of(cls, text: str) -> SplitPiece:
        return cls(*json.loads(text))


class SplitStreamReader(DataSourceStreamReader):
    # Spark keeps one Python process per scan on the driver that has this object, and each task has a copy.
    # Spark logs what latestOffset() returns before it runs the micro-batch, so a micro-batch that runs again
    # does not ask the source for its offsets. Spark does not log where the first micro-batch begins: the
    # source's answer, which might change after a crash, is stored in `folder`. That is the job's folder, or
    # that of a lineage which begins at a savepoint; empty outside of a job.
    def __init__(self, source: SplitSource, folder: str, control_path: str = "") -> None:
        self.source, self._folder, self._control_path = source, folder, control_path
        self._uid = source._fs_uid
        self._pace = TokenBucket(source.rate, time.monotonic())
        self._turn, self._asked_at = 0, float("-inf")

    def initialOffset(self) -> dict[str, Any]:
        if self.source._fs_start is None:
            return SplitPosition(self._uid, {}).to_json()
        return SplitPosition.from_json(self.source._fs_start.position).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there is nothing new."""
        position = SplitPosition.from_json(start)
        if position.is_ended:
            return start
        time.sleep(max(0.0, self._asked_at + _ASK_EVERY_S - time.monotonic()))
        self._asked_at = time.monotonic()
        names = self._ask("splits", lambda: check_splits(self._uid, self.source.splits_from(position)))
        gone = [name for name in position.offsets if name not in set(names)]
        if gone:
            raise InputLostError(
                f"the split '{gone[0]}' of source '{self._uid}' is gone: it was read up to "
                f"{position.offsets[gone[0]]!r}",
                why="the job cannot know that it has read all of it",
                what_to_do="let splits() name every split that it has ever named",
            )
        known = position.move_to({name: self._first(name) for name in names if name not in position.offsets})
        held = read_held(self._control_path, self._uid)
        free = [name for name, number in known.numbers().items() if not held.holds(number)]
        wanting = [name for name in free if not self._is_at_end(name, known.offsets[name])]
        end = known.move_to(self._latest(known, wanting))
        is_ended = self._ask("end", lambda: self.source.is_at_end(end))
        done = frozenset(name for name, offset in end.offsets.items() if self._is_at_end(name, offset))
        return SplitPosition(self._uid, end.offsets, is_ended, done).to_json()

    def _latest(self, position: SplitPosition, wanting: list[str]) -> dict[str, Offset]:
        """Return new end offsets of splits that have not ended, within the rate limit."""
        allowed = divide_allowance(self._pace.allowance(time.monotonic()), wanting, self._turn)
        self._turn += 1
        ends = {}
        for name, limit in allowed.items():
            if limit == 0:
                continue
            start = position.offsets[name]
            found = self._ask("latest", lambda: self.source.latest(name, start, limit))  # noqa: B023
            end = ends[name] = self._check_offset(name, start, found, "latest")
            if limit is not None and end != start:
                count: Any = self._ask(
                    "records_between",
                    lambda: self.source.records_between(name, start, end),  # noqa: B023
                )
                is_count = isinstance(count, numbers.Real) and not isinstance(count, bool)
                if count is not None and not (is_count and 0 <= count < math.inf):
                    to_do = "return how many records lie between the offsets, or None if it is not known"
                    raise self._refusal("records_between", name, count, "it is no number of records", to_do)
                self._pace.spend(limit if count is None else int(count))
        return ends

    def _check_offset(self, split: str, start: Offset, found: Any, method: str) -> Offset:
        why = why_not_json(found)
        if why:
            what_to_do = "return a number, a text, or a list or dict of such with texts as keys"
            raise self._refusal(method, split, found, why, what_to_do)
        if is_number(found) and is_number(start) and found < start:
            raise InputLostError(
                f"the split '{split}' of source '{self._uid}' ends at {found}, and was read up to {start}",
                why="records that the job has read are gone, or the input is another one",
                what_to_do="restore the input, or start a new job with a new job_dir",
            )
        return found

    def _refusal(self, method: str, split: str, found: Any, why: str, what_to_do: str) -> ConfigError:
        what = f"{method}() of source '{self._uid}' returned {found!r:.200} for the split '{split}'"
        return ConfigError(what, why=why, what_to_do=what_to_do)

    def _is_at_end(self, split: str, offset: Offset) -> bool:
        end: Any = self._ask("end", lambda: self.source.end(split))
        if is_number(end) and not math.isfinite(end):
            why, to_do = "no offset comes to it", "return an offset; or None while the end is not known"
            raise self._refusal("end", split, end, why, to_do)
        return reaches(offset, end)

    def _first(self, split: str) -> Offset:
        """Return where a split begins; the source is asked once in the life of the job."""
        if not self.source._overrides("first"):
            return 0
        if not self._folder:
            return self._ask("first", lambda: self.source.first(split))

        def ask() -> dict[str, Any]:
            first = self._ask("first", lambda: self.source.first(split))
            return {"split": split, "offset": self._check_offset(split, first, first, "first")}

        key = f"first-splits/{self._uid}/{hashlib.sha256(split.encode()).hexdigest()[:24]}.json"
        return ask_once(StoreSpec.from_text(self._folder), key, "first-split", ask)["offset"]

    def _ask(self, method: str, question: Callable[[], _T]) -> _T:
        with name_failures(self._uid, method):
            return question()

    def stop(self) -> None:
        self.source.close()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begins, ends = SplitPosition.from_json(start).offsets, SplitPosition.from_json(end)
        begins = {name: begins[name] if name in begins else self._first(name) for name in ends.offsets}
        return [
            SplitPiece(number, name, begins[name], end, self._piece_facts(name, begins[name], end))
            for number, (name, end) in enumerate(ends.offsets.items())
            if begins[name] != end
        ]

    def _piece_facts(self, split: str, start: Offset, end: Offset) -> Any:
        found = self._ask("piece_facts", lambda: self.source.piece_facts(split, start, end))
        why = "" if found is None else why_not_json(found)
        if why:
            what_to_do = "return JSON values: lists, texts, numbers, and dicts with texts as keys"
            raise self._refusal("piece_facts", split, found, why, what_to_do)
        return found

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        """Yield one row with the piece as text: :class:`ReadSplits` reads its records in the same task."""
        assert isinstance(partition, SplitPiece)
        yield (partition.to_text(),)


@dataclass(frozen=True)
class ReadSplits:
    """Callable for mapInArrow: from pieces of splits to their records with channel and sequence."""

    source: SplitSource

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for piece in batch.column(C.PIECE).to_pylist():
                yield from read_piece(self.source, SplitPiece.of(piece))


def read_piece(source: SplitSource, piece: SplitPiece) -> Iterator[pa.RecordBatch]:
    """Yield the records of one piece with channel and sequence; every attempt yields the same."""
    source, uid = source._replace("_fs_piece_facts", piece.facts), source._fs_uid
    with name_failures(uid, "read"):
        found = iter(elements_of(source.read(piece.split, piece.start, piece.end)))
    place = piece.start if type(piece.start) is int else 0
    rows = PieceRows(source.record_type, piece.number, place)
    while True:
        # Only failures of the source are named; at the yields, other code runs.
        with name_failures(uid, "read"):
            one = next(found, NO_MORE)
            made = rows.of(one)
        yield from made
        if one is NO_MORE:
            return


@contextmanager
def name_failures(uid: str, method: str) -> Iterator[None]:
    """Raise errors that name the source and the method: Spark passes only their text to the driver."""
    try:
        yield
    except FlinkishError:
        raise
    except OSError as error:
        # Either the source cannot be reached now, or its request is refused, which is counted. Spark passes
        # on only the name of the error's class.
        raise (SourceUnavailable if may_pass(error) else RetriableError)(
            f"{method}() of source '{uid}' failed", why=f"{type(error).__name__}: {error}"
        ) from error
    except USER_ERRORS as error:
        what, says = f"{method}() of source '{uid}'", f"{type(error).__name__}: {error}"
        facts = json.dumps({"uid": uid, "what": what, "error": says})
        raise RuntimeError(f"{USER_FUNCTION_MARKER} {facts}") from error


def data_source_of(source: SplitSource, folder: str, control_path: str = "") -> type[DataSource]:
    # The class holds the source: an option would show it in query plans. It is local, and so not importable:
    # cloudpickle serialises it by value.
    class SplitDataSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return source._fs_format

        def schema(self) -> T.StructType:
            return T.StructType([T.StructField(C.PIECE, T.StringType())])

        def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:
            return adapt_reader(SplitStreamReader(source, folder, control_path))

    return SplitDataSource
