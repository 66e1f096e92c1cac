"""State of a savepoint or a retained checkpoint as a DataFrame.

Tasks read the files and check each value; no code of the job runs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import move_to_session
from flinkish_spark.bridge.settings import make_session
from flinkish_spark.bridge.stores import spark_stores
from flinkish_spark.checkpoint.pins import PINS, PinManifest
from flinkish_spark.checkpoint.state_files import checksum_names, correct_schema_paths
from flinkish_spark.core.errors import (
    ConfigError,
    CorruptObjectError,
    EnvironmentFault,
    StoreError,
    UserError,
)
from flinkish_spark.core.foreign_errors import describe_error
from flinkish_spark.core.forks import skip_in_children
from flinkish_spark.core.job_dir import JobDir, open_job_dir
from flinkish_spark.core.store import ObjectMissing, SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import instance_of
from flinkish_spark.planning.partitioning import shuffle_partitions
from flinkish_spark.protocol.bases import BASES
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.lineage import (
    FIRST_LINEAGE,
    LineageHistory,
    RetainedCheckpoint,
    RewindKind,
    why_not_rewindable,
)
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS, STATE
from flinkish_spark.protocol.plan_layout import PlanLayout, StateInstance, source_of
from flinkish_spark.protocol.savepoints import SavepointMetadata, StateFile
from flinkish_spark.savepoints.entries import (
    COPY,
    FOUND,
    CopyValues,
    FindSections,
    FirstCopy,
    ReadEntries,
    ReadSection,
    ReadTimers,
    SavepointValues,
    StoreValues,
    Values,
    common_columns,
    common_schema,
    reader_columns,
    sections_of,
    timer_columns,
)
from flinkish_spark.savepoints.export import filter_instance
from flinkish_spark.savepoints.files import (
    METADATA_KEY,
    CheckpointNotRetainedError,
    SavepointDamagedError,
    compare_places,
    place_of,
    savepoint_at,
    target_place,
)
from flinkish_spark.savepoints.seeds import layout_of, remove_below
from flinkish_spark.state.base_files import bases_of
from flinkish_spark.state.codec import FrameError
from flinkish_spark.state.evolution import StateMismatch
from flinkish_spark.state.group_values import BROADCAST, LISTS
from flinkish_spark.state.key_group import STATE_SECTION, TIMERS
from flinkish_spark.types.arrow_types import spark_type

_AT_ONCE = 16


@dataclass(frozen=True)
class RetainedState:
    """The state of one checkpoint, in its pin (:mod:`flinkish_spark.checkpoint.retention`).

    Spark's state data source needs files in the layout of a query's checkpoint, so a *view* is made outside
    of the job directory: a folder with the two log entries and links to the pinned files of one operator. If
    the job deletes the checkpoint meanwhile, hard links and copies stay valid; with symbolic links the read
    fails.
    """

    place: StoreSpec
    manifest: PinManifest
    #: The operators, and Spark's numbers for their state.
    layout: PlanLayout

    def operators(self, uid: str) -> Mapping[str, StateInstance]:
        return {one.chain: one for one in self.layout.states if one.uid == uid}

    def view(self, number: int, uid: str, scratch: StoreSpec) -> StoreSpec:
        """Make a folder in the layout of the query's checkpoint; it is deleted when this process ends."""
        made = scratch.to_child(f"flinkish-state-{uuid.uuid4().hex}")
        atexit.register(skip_in_children(_delete_view), made)
        if made.is_local:
            # Readable for this user only, as the job directory may be.
            made.folder.mkdir(mode=0o700, parents=True)
        view, batch = made.open(), self.manifest.batch
        for log in (OFFSETS, COMMITS):
            view.put(f"{log}/{batch}", self.manifest.log[f"{log}/{batch}"].encode())
        own = (f"{number}/", f"{BASES}/{uid}/")
        wanted = {name: size for name, size in self.manifest.files.items() if name.startswith(own)}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda name: self._bring(name, wanted[name], made), wanted):
                pass
        correct_schema_paths(view, STATE, f"{made.hadoop_url}/{STATE}")
        return made

    def _bring(self, name: str, size_bytes: int, view: StoreSpec) -> None:
        if self.place.is_local and view.is_local:
            self._link(name, size_bytes, view.folder / STATE / name)
            return
        try:
            content = self.place.open().read(f"{self.manifest.folder}/{name}")
        except ObjectMissing:
            raise self._to_loss_error(f"the kept state file {name} is gone") from None
        if len(content) != size_bytes:
            raise self._to_loss_error(
                f"the state file {name} has {len(content)} bytes instead of {size_bytes}"
            )
        view.open().put(f"{STATE}/{name}", content)

    def _link(self, name: str, size_bytes: int, target: Path) -> None:
        source = self.place.folder / self.manifest.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _link_to(source, target)
            found = target.stat().st_size
        except FileNotFoundError:
            raise self._to_loss_error(f"the kept state file {name} is gone") from None
        if found != size_bytes:
            raise self._to_loss_error(f"the kept state file {name} has {found} bytes instead of {size_bytes}")
        for checksum in checksum_names(target.name):
            # Not every file has a checksum.
            with contextlib.suppress(FileNotFoundError):
                _link_to(source.with_name(checksum), target.with_name(checksum))

    def _to_loss_error(self, why: str) -> CheckpointNotRetainedError:
        return to_not_retained_error(self.place, self.manifest.checkpoint, why)


def _delete_view(view: StoreSpec) -> None:
    with contextlib.suppress(StoreError):
        remove_below(view)


def is_job_dir(place: StoreSpec) -> bool:
    return _has_object(place, "job.json")


def _has_object(place: StoreSpec, key: str) -> bool:
    if place.is_local:
        return (place.folder / key).is_file()
    try:
        return place.open().read(key) is not None
    except ObjectMissing:
        return False


def find_retained_state(place: StoreSpec, checkpoint: int | None) -> RetainedState:
    """Find the state of a retained checkpoint, None for the newest one; changes nothing."""
    job_dir = open_job_dir(place)
    objects = SealedObjects(job_dir.store, "the job directory")
    pinned = sorted(CheckpointId(number) for number in objects.numbers(PINS))
    history = job_dir.history()
    found = []
    for one in pinned:
        # A damaged checkpoint is reported only when it is requested.
        with contextlib.suppress(CorruptObjectError):
            found += [] if _why_not_readable(job_dir, one, pinned, history) else [one]
    wanted = max(found, default=None) if checkpoint is None else CheckpointId(checkpoint)
    if wanted is None:
        raise to_not_retained_error(place, None, "it has no completed checkpoints whose state is kept")
    why = _why_not_readable(job_dir, wanted, pinned, history)
    manifest = objects.optional(f"{PINS}/{wanted}.json", "pin", PinManifest.from_json)
    decision = job_dir.decision(wanted)
    if why or manifest is None or decision is None:
        others = [int(one) for one in found if one != wanted]
        raise to_not_retained_error(place, wanted, why or "the job has deleted it just now", others)
    # The layout of its lineage's plan, which may not be the live one.
    begun = [one.lineage for one in history.rewinds if one.kind is RewindKind.RESEED]
    origin = max((one for one in begun if one <= decision.lineage), default=FIRST_LINEAGE)
    return RetainedState(place, manifest, layout_of(job_dir, origin))


def to_not_retained_error(
    place: StoreSpec, checkpoint: CheckpointId | None, why: str, others: list[int] | None = None
) -> CheckpointNotRetainedError:
    what = f"the state of checkpoint {checkpoint} in {place.url} cannot be read"
    kept = ", ".join(map(str, others or ()))
    return CheckpointNotRetainedError(
        f"there is no checkpoint to read in {place.url}" if checkpoint is None else what,
        why=why,
        what_to_do=f"choose from: {kept}" if kept else "take a savepoint, or raise CheckpointConfig.retained",
        checkpoint=checkpoint,
    )


def _why_not_readable(
    job_dir: JobDir, checkpoint: CheckpointId, pinned: list[CheckpointId], history: LineageHistory
) -> str:
    """Return why the state of a checkpoint cannot be read; empty if it can."""
    known = job_dir.list_checkpoint_ids()
    decision = job_dir.decision(checkpoint) if checkpoint in known else None
    commits = []
    if decision is not None and decision.verdict is Verdict.COMMIT:
        # A decided checkpoint will be confirmed, and its state is final.
        commits = [RetainedCheckpoint(checkpoint, decision.lineage, True, checkpoint in pinned)]
    # A job cannot go back past a reseed, but a reader can.
    rewinds = [one for one in history.rewinds if one.kind is not RewindKind.RESEED]
    return why_not_rewindable(checkpoint, known, commits, LineageHistory.of(rewinds))


def _link_to(source: Path, target: Path) -> None:
    if not source.exists():
        raise FileNotFoundError(source)
    try:
        os.link(source, target)
    except OSError:
        os.symlink(source, target)


#: The reader of states without keys, by the prefix of their sections.
_WITHOUT_KEYS = {BROADCAST: "read_broadcast_state", LISTS: "read_list_state"}
#: Names of errors, in Spark's text, that mean damaged state.
_DAMAGE = (SavepointDamagedError.__name__, FrameError.__name__, StateMismatch.__name__)


@dataclass(frozen=True)
class StoredState:
    """The stored state of one operator in one chain, of a savepoint or a checkpoint."""

    #: The savepoint or checkpoint, for messages.
    place: str
    uid: str
    #: The input of `values` in tasks.
    rows: DataFrame
    values: Values
    #: Names of its states, if they are known without reading.
    known: frozenset[str] | None = None

    def sections(self) -> Mapping[str, list[pa.Schema]]:
        """Return the stored schemas by section; runs a Spark job over all values."""
        try:
            found = self.rows.mapInArrow(FindSections(self.values), FOUND).collect()
        except Exception as error:
            is_damaged = any(name in str(error) for name in _DAMAGE)
            raise (SavepointDamagedError if is_damaged else EnvironmentFault)(
                f"the state of '{self.uid}' in {self.place} cannot be read",
                why=describe_error(error),
                what_to_do="read another savepoint or checkpoint; nothing was changed",
            ) from error
        return sections_of((row["section"], bytes(row["schema"])) for row in found)

    def schema(self, name: str) -> pa.Schema:
        """Return common columns of a keyed state for all key groups."""
        if self.known is not None and name not in self.known:
            raise _to_missing_error(self.place, f"state of '{self.uid}'", name, self.known)
        sections = self.sections()
        for prefix, reader in _WITHOUT_KEYS.items():
            if prefix + name in sections and STATE_SECTION + name not in sections:
                raise UserError(
                    f"the state '{name}' of '{self.uid}' in {self.place} belongs to no key",
                    what_to_do=f"use {reader}()",
                )
        if STATE_SECTION + name not in sections:
            there = _names_of(sections, STATE_SECTION)
            raise _to_missing_error(self.place, f"entry of the state of '{self.uid}'", name, there)
        try:
            return common_schema(name, sections[STATE_SECTION + name])
        except StateMismatch as error:
            raise self._to_no_common_error(name, "keys", error) from error

    def find_unkeyed_state(self, prefix: str, name: str) -> tuple[str, pa.Schema, T.StructType]:
        """Return the section of a state without keys, and its columns."""
        sections = self.sections()
        found = sections.get(prefix + name, [])
        if not found:
            there = _names_of(sections, prefix)
            raise _to_missing_error(self.place, f"state without keys of '{self.uid}'", name, there)
        try:
            schema = common_columns(name, found)
        except StateMismatch as error:
            raise self._to_no_common_error(name, "partitions", error) from error
        columns = [T.StructField(one.name, spark_type(one.type)) for one in schema]
        return prefix + name, schema, T.StructType(columns)

    def _to_no_common_error(self, name: str, who: str, error: StateMismatch) -> UserError:
        return UserError(
            f"the state '{name}' of '{self.uid}' in {self.place} has no common columns",
            why=str(error),
            what_to_do=f"let the job write the state of all {who} with its present declaration, then read it",
        )


def _names_of(sections: Iterable[str], prefix: str) -> list[str]:
    return [one.removeprefix(prefix) for one in sections if one.startswith(prefix)]


def open_stored_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    checkpoint: int | None,
    chain: str | None,
    scratch: str | Path | None,
    store_options: Mapping[str, str] | None,
) -> StoredState:
    """Find the state of an operator; see :func:`read_state` for the parameters."""
    place, checkpoint = _resolve_place(place_of(path, store_options), checkpoint)
    if checkpoint is None and (_has_object(place, METADATA_KEY) or not is_job_dir(place)):
        return _open_in_savepoint(spark, place, uid, chain)
    return _open_in_checkpoint(spark, place, checkpoint, uid, chain, scratch)


def _resolve_place(place: StoreSpec, checkpoint: int | None) -> tuple[StoreSpec, int | None]:
    """Return the directory of a savepoint or job, and the id of the checkpoint in it, if any."""
    *_, above, name = ("", *place.url.split("/"))
    if above == "checkpoints" and name.isdecimal() and is_job_dir(place.to_parent(2)):
        own = int(name)
        if checkpoint not in (None, own):
            raise ConfigError(
                f"the path {place.url} names checkpoint {own}, but checkpoint={checkpoint} was given",
                what_to_do="give one of them",
            )
        return place.to_parent(2), own
    if checkpoint is not None:
        instance_of("checkpoint", checkpoint, int, what_to_do="give the id of a checkpoint, such as 41")
        if not is_job_dir(place):
            raise ConfigError(
                f"checkpoint={checkpoint} was given, and {place.url} is no job directory",
                what_to_do="give the job directory, or leave the checkpoint out to read a savepoint",
            )
    return place, checkpoint


# -- savepoints -------------------------------------------------------------------------------------
def _open_in_savepoint(spark: SparkSession, place: StoreSpec, uid: str, chain: str | None) -> StoredState:
    directory = savepoint_at(place)
    metadata = directory.metadata()
    files = files_of(metadata, uid, chain)
    directory.check_files(files)
    described = [(json.dumps(file.to_json()),) for file in files]
    listed = spark.createDataFrame(described, "file STRING").repartition(max(len(files), 1))
    known = frozenset(metadata.operators[uid].states)
    return StoredState(f"the savepoint {place.url}", uid, listed, SavepointValues(place), known)


def files_of(metadata: SavepointMetadata, uid: str, chain: str | None) -> list[StateFile]:
    if uid not in metadata.operators:
        raise _to_missing_error("the savepoint", "operator", uid, metadata.operators)
    files = [file for file in metadata.files if file.operator == uid]
    wanted = _choose_chain(uid, chain, {file.chain for file in files})
    return [file for file in files if file.chain == wanted]


def _choose_chain(uid: str, chain: str | None, there: Iterable[str]) -> str | None:
    """Return the chain to read; None if the operator has no state."""
    known = sorted(there)
    if chain is not None and chain not in known:
        raise _to_missing_error("the savepoint", f"chain of '{uid}'", chain, known)
    if chain is None and len(known) > 1:
        raise UserError(
            f"operator '{uid}' has state in several chains",
            what_to_do=f"say which: chain={' or '.join(repr(one) for one in known)}",
        )
    return chain or next(iter(known), None)


def _to_missing_error(place: str, what: str, name: str, there: Iterable[str]) -> UserError:
    known = ", ".join(sorted(there)) or "none"
    return UserError(f"{place} has no {what} '{name}'", what_to_do=f"choose from: {known}")


# -- checkpoints ------------------------------------------------------------------------------------
def _open_in_checkpoint(
    spark: SparkSession,
    root: StoreSpec,
    checkpoint: int | None,
    uid: str,
    chain: str | None,
    scratch: str | Path | None,
) -> StoredState:
    views = _check_scratch(spark, root, scratch)
    retained = find_retained_state(root, checkpoint)
    number = retained.manifest.checkpoint
    place = f"checkpoint {number} of {root.url}"
    numbers = retained.operators(uid)
    if not numbers:
        raise _to_missing_error(place, "operator", uid, {one.uid for one in retained.layout.operators})
    operator = numbers[str(_choose_chain(uid, chain, numbers))]
    view = retained.view(operator.number, uid, views)
    frame = filter_instance(_load_with_spark(spark, retained, operator.number, view), operator)
    values = frame.select(F.col("value.groupState.value").alias("value"))
    # Bases of a job on a disk are linked into the view; in a bucket they stay where they are.
    bases = view.to_child(f"{STATE}/{BASES}/{uid}")
    if not root.is_local:
        bases = bases_of(root.to_child(BASES), uid, operator.chain)
    return StoredState(place, uid, values, StoreValues(bases, uid))


def _load_with_spark(
    spark: SparkSession,
    retained: RetainedState,
    number: int,
    view: StoreSpec,
    options: Mapping[str, str] = MappingProxyType({}),
) -> DataFrame:
    """Read the state of one of Spark's operators, which a view has, by Spark's own reader of state."""
    if not view.is_local:
        spark_stores().pass_on(spark, view)
    try:
        # Spark decides about the store's format while it loads.
        own = make_session(spark, shuffle_partitions(spark))
        # Accessing `streams` creates the coordinator to which state stores report; without it RocksDB
        # snapshots cannot be read in a session that has had no query.
        _ = own.streams.active
        state = own.read.format("statestore").options(**options)
        state = state.option("batchId", str(retained.manifest.batch)).option("operatorId", str(number))
        return move_to_session(state.load(view.hadoop_url), spark)
    except Exception as error:
        checkpoint = retained.manifest.checkpoint
        raise EnvironmentFault(
            f"Spark cannot read the state of checkpoint {checkpoint} of {retained.place.url}",
            why=describe_error(error),
            what_to_do="run the Spark version that wrote it; the job is not affected",
        ) from error


def _check_scratch(spark: SparkSession, root: StoreSpec, scratch: str | Path | None) -> StoreSpec:
    if scratch is None:
        if not (spark.sparkContext.master or "").startswith("local"):
            raise ConfigError(
                "to read a checkpoint on a cluster a scratch directory is needed",
                why="executors have to see links to the checkpoint's files, or copies, which are made there",
                what_to_do="give scratch=, on a file system that driver and executors share, or in the "
                "bucket of the job directory; or read a savepoint",
            )
        return StoreSpec(tempfile.gettempdir())
    place = target_place(str(scratch).removeprefix("file://"), root)
    is_relative = place.is_local and not Path(place.url).is_absolute()
    if is_relative or compare_places(place, root)[0]:
        raise ConfigError(
            f"scratch={str(scratch)!r} cannot be used",
            why="executors have other working directories, and the job directory is never changed",
            what_to_do="give an absolute path outside of the job directory",
        )
    return place


def read_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    name: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
    store_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a keyed state of a savepoint or a retained checkpoint: one row per key, or per key and window.

    Nothing is changed. A savepoint may be in use; the job of a checkpoint may run or not.

    Parameters
    ----------
    spark
        Any session; its tasks read the state.
    path
        The savepoint's directory; or a job directory, or ``<job directory>/checkpoints/<id>``. A path, or
        the URL of a bucket.
    uid, name
        Uid of the operator, and name of its state.
    checkpoint
        Id of a checkpoint of the job directory; None for the newest retained one.
    chain
        Name of the chain, if several chains have the operator; see `SavepointMetadata.chains`.
    scratch
        Folder for links to a checkpoint's files: outside of the job directory, on a file system that driver
        and executors share. They are deleted when this process ends. Local sessions use the system's folder
        of temporary files by default. From and to a bucket files are copied; it may be the URL of a folder
        there.
    store_options
        Of the bucket of `path`, and of `scratch` if it is in the same one; see `StreamExecutionEnvironment`.

    Returns
    -------
    DataFrame
        Columns: `key` (or `key_0`, `key_1`, ... for several key columns); `window_start` and `window_end`
        for states of windows; `touched_at`, the time of the last access, for states with a time to live (rows
        include expired entries that were not cleaned up yet), and for lists and maps `each_touched_at`, the
        times of their elements, of which `touched_at` is the latest; then `value`, or the declared fields of
        the value. A field with the name of one of these columns is called `value_key`, `value_touched_at` or
        the like. If the declaration has changed, all fields that are still stored for any key.

    Raises
    ------
    SavepointNotFoundError, SavepointDamagedError
        The savepoint is not there, or not whole.
    CheckpointNotRetainedError
        The job directory does not have the checkpoint any more; lists those that it has.
    UserError
        There is no such operator, state or chain; lists those that exist.

    Examples
    --------
    >>> read_state(spark, "/data/savepoints/7", "totals", "total").where("key = 'anna'")  # doctest: +SKIP
    >>> read_state(spark, "/data/jobs/orders", "totals", "total", checkpoint=41)  # doctest: +SKIP
    """
    stored = open_stored_state(spark, path, uid, checkpoint, chain, scratch, store_options)
    schema = stored.schema(name)
    read = ReadEntries(stored.values, STATE_SECTION + name, schema)
    return stored.rows.mapInArrow(read, reader_columns(schema))


def read_native_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    *,
    operator: int = 0,
    options: Mapping[str, str] | None = None,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
    store_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the state that Spark itself keeps for a DataFrame or transform, in a retained checkpoint.

    Parameters
    ----------
    spark, path, checkpoint, chain, scratch, store_options
        As of :func:`read_state`; the path is that of a job directory.
    uid
        Uid of the source whose records the DataFrame or transform computes.
    operator
        Which of its operators with state, from the end of the query; 0 is the last one.
    options
        Further options of Spark's reader, such as ``{"joinSide": "left"}`` for a join of two streams, or
        ``{"stateVarName": "count"}`` for `transformWithState`.

    Returns
    -------
    DataFrame
        The columns of Spark's state data source: `key`, `value`, `partition_id`.

    Raises
    ------
    CheckpointNotRetainedError
        The job directory does not have the checkpoint any more; lists those that it has.
    UserError
        There is no such operator; lists those that exist.

    Examples
    --------
    >>> read_native_state(spark, "/data/jobs/orders", "totals").select("key.*", "value.*")  # doctest: +SKIP
    """
    root, checkpoint = _resolve_place(place_of(path, store_options), checkpoint)
    views = _check_scratch(spark, root, scratch)
    retained = find_retained_state(root, checkpoint)
    natives = [one for one in retained.layout.natives if source_of(one.uid) == uid]
    chosen = _choose_chain(uid, chain, dict.fromkeys(one.chain for one in natives))
    numbers = [one.number for one in natives if one.chain == chosen]
    if operator not in range(len(numbers)):
        there = (f"{one.uid} ({one.what})" for one in retained.layout.natives)
        raise _to_missing_error(root.url, "operator of Spark's own", f"{uid}' number '{operator}", there)
    view = retained.view(numbers[operator], uid, views)
    return _load_with_spark(spark, retained, numbers[operator], view, options or {})


def read_timers(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
    store_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return the pending timers of an operator in a savepoint or a retained checkpoint.

    Parameters are those of :func:`read_state`, and so are errors.

    Returns
    -------
    DataFrame
        Columns: `key` (or `key_0`, ...); `clock`, ``EVENT_TIME`` or ``PROCESSING_TIME``; `time_ms` LONG, the
        due time; `window_start` and `window_end` of its window, null for a timer of a function.

    Examples
    --------
    >>> read_timers(spark, "/data/savepoints/7", "totals").groupBy("clock").count()  # doctest: +SKIP
    """
    stored = open_stored_state(spark, path, uid, checkpoint, chain, scratch, store_options)
    sections = stored.sections()
    keyed = {one: schemas for one, schemas in sections.items() if one.startswith((STATE_SECTION, TIMERS))}
    if not keyed:
        raise UserError(
            f"operator '{uid}' of {stored.place} has no keyed state",
            what_to_do="choose another operator",
        )
    columns = timer_columns(next(iter(keyed.values()))[0])
    return stored.rows.mapInArrow(ReadTimers(stored.values, columns), columns)


def read_broadcast_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    name: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
    store_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return a broadcast state of a savepoint or a retained checkpoint: one of its copies, which are equal.

    Parameters are those of :func:`read_state`, and so are errors.

    Returns
    -------
    DataFrame
        Columns: `key` and `value` of the map.

    Examples
    --------
    >>> read_broadcast_state(spark, "/data/savepoints/7", "limited", "limits").show()  # doctest: +SKIP
    """
    stored = open_stored_state(spark, path, uid, checkpoint, chain, scratch, store_options)
    section, schema, columns = stored.find_unkeyed_state(BROADCAST, name)
    copies = stored.rows.mapInArrow(FirstCopy(stored.values, section), COPY)
    return copies.limit(1).mapInArrow(ReadSection(CopyValues(), section, schema), columns)


def read_list_state(
    spark: SparkSession,
    path: str | Path,
    uid: str,
    name: str,
    *,
    checkpoint: int | None = None,
    chain: str | None = None,
    scratch: str | Path | None = None,
    store_options: Mapping[str, str] | None = None,
) -> DataFrame:
    """Return an operator list state of a savepoint or a retained checkpoint: the items of all partitions.

    Parameters are those of :func:`read_state`, and so are errors.

    Returns
    -------
    DataFrame
        Column: `item`. The items of a partition are in their order, partitions in none.

    Examples
    --------
    >>> read_list_state(spark, "/data/savepoints/7", "merged", "open").count()  # doctest: +SKIP
    """
    stored = open_stored_state(spark, path, uid, checkpoint, chain, scratch, store_options)
    section, schema, columns = stored.find_unkeyed_state(LISTS, name)
    return stored.rows.mapInArrow(ReadSection(stored.values, section, schema), columns)
