"""Writing savepoints without a job: state from DataFrames, and edited state of other savepoints.

Follows Flink's State Processor API. A writer is immutable: each method returns another writer, and nothing is
written before :meth:`SavepointWriter.write`, which writes an ordinary savepoint.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import instance_of, raise_config_errors
from flinkish_spark.planning.declare import KEY_GROUPS_ADVICE, KeyGroups
from flinkish_spark.planning.partitioning import shuffle_partitions
from flinkish_spark.protocol.ids import check_name
from flinkish_spark.protocol.savepoints import OperatorState, SavepointMetadata
from flinkish_spark.savepoints.bootstrap import (
    KeyedRows,
    KeyedStateBootstrapFunction,
    StateColumns,
    bootstrap_function,
)
from flinkish_spark.savepoints.export import make_durable
from flinkish_spark.savepoints.files import BootstrapError, check_apart, check_target, place_of, savepoint_at
from flinkish_spark.savepoints.writer_jobs import WriteTarget, check_key_types, write_operator
from flinkish_spark.savepoints.writer_plan import (
    EditRows,
    OperatorBootstrap,
    PlannedOperator,
    WriterPlan,
    add_operator,
    drop_operator,
    drop_times,
    find_stored_columns,
    partition_rows,
    rename_operator,
    rename_times,
    replace_due_timers,
    state_rows,
    timer_rows,
)
from flinkish_spark.state.operator_state import BROADCAST_KIND, LIST_KIND


class SavepointWriter:
    """A writer of a new savepoint; made by :meth:`new` or :meth:`from_existing`.

    Immutable: each method returns another writer and leaves this one unchanged.

    Examples
    --------
    >>> from flinkish_spark import ValueStateDescriptor
    >>> states = [(ValueStateDescriptor("total", "LONG"), "balance")]
    >>> rows = key_by(spark.read.parquet("/data/balances"), "account")  # doctest: +SKIP
    >>> writer = SavepointWriter.new(spark).with_operator("totals", rows, states)  # doctest: +SKIP
    >>> writer.write("/data/savepoints/first")  # doctest: +SKIP
    """

    def __init__(self, spark: SparkSession, plan: WriterPlan) -> None:
        self._spark, self._plan = spark, plan

    @classmethod
    @check_arguments("spark", max_parallelism=KEY_GROUPS_ADVICE)
    def new(
        cls, spark: SparkSession, *, max_parallelism: KeyGroups = 128, job: str = "bootstrap"
    ) -> SavepointWriter:
        """Return a writer of an empty savepoint.

        It has no sources, so the sources of a job that is restored from it begin at their own start
        positions.

        Parameters
        ----------
        max_parallelism
            Number of key groups of its operators; must be that of the job, which can never change.
        job
            A job name, for display only.
        """
        with raise_config_errors("choose another name"):
            check_name(job, "job")
        partitions = shuffle_partitions(spark)
        return cls(spark, WriterPlan.create_empty(job, partitions, max_parallelism))

    @classmethod
    @check_arguments("spark", max_parallelism=KEY_GROUPS_ADVICE)
    def from_existing(
        cls,
        spark: SparkSession,
        path: str | Path,
        *,
        max_parallelism: KeyGroups = 128,
        store_options: Mapping[str, str] | None = None,
    ) -> SavepointWriter:
        """Return a writer of a savepoint that begins as a copy of another.

        The other savepoint is only read. The new one gets its source positions, hook states and event times.

        Parameters
        ----------
        path
            Path or URL of the other savepoint, which must exist until the new one is written.
        max_parallelism
            Number of key groups of added operators.
        store_options
            Options of its bucket; see `StreamExecutionEnvironment`.

        Raises
        ------
        SavepointNotFoundError, SavepointDamagedError
            The other savepoint does not exist, or is damaged.
        ConfigError
            The number is invalid.
        """
        place = savepoint_at(place_of(path, store_options))
        return cls(spark, WriterPlan.from_savepoint(place, max_parallelism))

    @property
    def operators(self) -> tuple[str, ...]:
        """Return the uids of the new savepoint's operators."""
        return tuple(self._plan.operators)

    def with_operator(
        self,
        uid: str,
        rows: KeyedRows,
        states: KeyedStateBootstrapFunction | Sequence[StateColumns],
        *,
        beside: str | None = None,
    ) -> SavepointWriter:
        """Return a writer with one more operator.

        Parameters
        ----------
        uid
            Uid of the operator in the job.
        rows
            The rows that fill its state; keys must have the types of the job's `key_by`.
        states
            A function; or pairs of a descriptor and the column or columns that fill that state. A value state
            takes one row per key; a list state one element per row, or one ARRAY per key; a map state one
            entry per row (key and value), or one MAP per key. A null leaves a state unchanged.
        beside
            Required if the chains of the savepoint have different source positions: the chain whose position
            the operator shares.

        Raises
        ------
        BootstrapError
            The operator exists already, or `beside` is missing or unknown.
        ConfigError, SchemaError, UserFunctionError
            An argument is wrong, columns do not fit the states, or the function cannot be serialised.
        """
        plan = self._plan
        plan.check_new(uid)
        instance_of("rows", rows, KeyedRows, what_to_do='give key_by(rows, "user")')
        function = bootstrap_function(states, rows.frame.schema, uid)
        key_types = tuple(kind.simpleString() for kind in check_key_types(rows.frame, rows.keys))
        chains, chain = add_operator(plan.chains, uid, beside)
        added = PlannedOperator(
            OperatorState(plan.max_parallelism, key_types), bootstrap=OperatorBootstrap(chain, rows, function)
        )
        return self._change(operators={**plan.operators, uid: added}, chains=chains)

    def replace_state(
        self, uid: str, name: str, frame: DataFrame, *, chain: str | None = None
    ) -> SavepointWriter:
        """Return a writer with new entries for one state of an operator; other states stay.

        Keys that are not in `frame` lose the state. Its types may differ from the stored ones, if the job
        declares them so. A state that the operator has not stored yet is added. Timers do not change.

        Parameters
        ----------
        uid, name
            Uid of the operator, and name of its state.
        frame
            The columns of :func:`~flinkish_spark.read_state`: `key` (or `key_0`, ...), `window_start` and
            `window_end`, `touched_at`, then `value` or the fields of the value. One row per key (and window);
            a row with a null `value` is left out. Without `each_touched_at`, all elements of a list or a map
            have the time `touched_at`.
        chain
            Which chain's, where several chains have the operator.

        Raises
        ------
        BootstrapError
            The operator or chain does not exist, or the operator is new in this writer.
        ConfigError, SchemaError
            The DataFrame is a streaming one, or its columns do not fit.
        """
        planned = self._plan.find_keyed_operator(uid)
        own = self._plan.chain_of(uid, chain)
        stored = find_stored_columns(self._plan.origin, planned.origin.get(own, ()), name)
        return self._edit(uid, own, state_rows(frame, uid, name, planned.state.key_types, stored))

    def replace_timers(self, uid: str, frame: DataFrame, *, chain: str | None = None) -> SavepointWriter:
        """Return a writer with new timers of both clocks for an operator; its states stay.

        Parameters
        ----------
        frame
            The columns of :func:`~flinkish_spark.state_processor.read_timers`; timers of functions need no
            window. The order of timers with the same time is undefined.
        chain
            Which chain's, where several chains have the operator.

        Raises
        ------
        BootstrapError, ConfigError, SchemaError
            As from :meth:`replace_state`.
        """
        key_types = self._plan.find_keyed_operator(uid).state.key_types
        return self._edit(uid, chain, timer_rows(frame, uid, key_types))

    def replace_broadcast_state(
        self, uid: str, name: str, frame: DataFrame, *, chain: str | None = None
    ) -> SavepointWriter:
        """Return a writer with new entries for a broadcast state of an operator; other states stay.

        Parameters
        ----------
        uid, name
            Uid of the operator, which may be new in this writer, and name of its broadcast state.
        frame
            Columns `key` and `value` of the map, each key once, of the declared types; no nulls.
        chain
            Which chain's, where several chains have the operator.

        Raises
        ------
        BootstrapError, ConfigError, SchemaError
            As from :meth:`replace_state`.
        """
        return self._edit(uid, chain, partition_rows(frame, uid, name, BROADCAST_KIND))

    def replace_list_state(
        self, uid: str, name: str, frame: DataFrame, *, chain: str | None = None
    ) -> SavepointWriter:
        """Return a writer with new items for an operator list state of an operator; other states stay.

        All items are written to one partition; a job with several distributes them. Parameters and errors are
        those of :meth:`replace_broadcast_state`, with a single column `item`.
        """
        return self._edit(uid, chain, partition_rows(frame, uid, name, LIST_KIND))

    def add_unkeyed_operator(self, uid: str, *, beside: str | None = None) -> SavepointWriter:
        """Return a writer with one more operator, which has no keys and no state yet.

        Add its broadcast or operator list states with :meth:`replace_broadcast_state` and
        :meth:`replace_list_state`. Parameters and errors are those of :meth:`with_operator`.
        """
        plan = self._plan
        plan.check_new(uid)
        chains, _ = add_operator(plan.chains, uid, beside)
        added = PlannedOperator(OperatorState(plan.max_parallelism, ()))
        return self._change(operators={**plan.operators, uid: added}, chains=chains)

    def remove_operator(self, uid: str) -> SavepointWriter:
        """Return a writer without the state and the timers of an operator."""
        plan = self._plan
        plan.find_operator(uid)
        return self._change(
            operators={other: one for other, one in plan.operators.items() if other != uid},
            chains=drop_operator(plan.chains, uid),
            times=drop_times(plan.times, uid, plan.operators),
        )

    def change_uid(self, old: str, new: str) -> SavepointWriter:
        """Return a writer with another uid for an operator; its state and timers stay."""
        planned, plan = self._plan.find_operator(old), self._plan
        with raise_config_errors("choose another uid"):
            check_name(new, "uid")
        if new in (*plan.operators, *plan.metadata.sources, *plan.metadata.sinks):
            raise BootstrapError(f"there is a '{new}' already", what_to_do="choose another uid")
        chains, names = rename_operator(plan.chains, old, new)
        finished = tuple(new if uid == old else uid for uid in plan.metadata.finished)
        operators = {new if uid == old else uid: one for uid, one in plan.operators.items()}
        operators[new] = planned
        return self._change(
            metadata=replace(plan.metadata, finished=finished),
            operators={uid: one.rename_chains(names) for uid, one in operators.items()},
            chains=chains,
            times=rename_times(plan.times, old, new, plan.operators, names),
        )

    def write(self, path: str | Path, *, store_options: Mapping[str, str] | None = None) -> SavepointMetadata:
        """Write the savepoint with Spark jobs; return its metadata.

        The savepoint exists when this returns and not before: its metadata is created last. A directory with
        files of an earlier call that crashed can be used again. No existing savepoint is overwritten.

        Parameters
        ----------
        path
            An absolute path of a new or empty directory, on a file system that driver and executors share,
            not inside or around the savepoint of :meth:`from_existing`; or the URL of such a folder in a
            bucket.
        store_options
            Options of the bucket; see `StreamExecutionEnvironment`.

        Raises
        ------
        EnvironmentFault
            The place cannot be used, or Spark failed.
        BootstrapError, UserFunctionError
            The rows do not fit together, or the function failed.
        SavepointDamagedError
            The savepoint of :meth:`from_existing` is damaged.
        StoreError
            The disk or bucket cannot be written.
        """
        plan, text = self._plan, str(path).removeprefix("file://")
        # `check_target` refuses a relative path, which is not made absolute here.
        place = place_of(text, store_options) if "://" in text or store_options else StoreSpec(text)
        check_target(place, self._check_place)
        target = WriteTarget(self._spark, place, plan.origin, uuid.uuid4().hex[:8], wall_ms())
        written = {uid: write_operator(target, uid, one) for uid, one in plan.operators.items()}
        times = plan.times
        for uid, one in written.items():
            chains = {file.chain for file in one.files} | one.due.keys()
            for chain, due in one.due.items():
                times = replace_due_timers(times, uid, chain, chains, due)
        files = tuple(file for one in written.values() for file in one.files)
        make_durable(place, files)
        metadata = replace(
            plan.metadata,
            savepoint=uuid.uuid4().hex,
            operators={uid: one.state for uid, one in written.items()},
            chains=plan.chains,
            files=files,
            times=times,
        )
        # The savepoint exists from here on.
        found = savepoint_at(place).finish(metadata)
        if found.savepoint != metadata.savepoint:
            raise EnvironmentFault(
                f"another savepoint was written to {place.url} meanwhile",
                what_to_do="give another directory",
            )
        return found

    def _edit(self, uid: str, chain: str | None, rows: EditRows) -> SavepointWriter:
        planned, own = self._plan.find_operator(uid), self._plan.chain_of(uid, chain)
        return self._change(operators={**self._plan.operators, uid: planned.add_edit(own, rows)})

    def _check_place(self, target: StoreSpec) -> None:
        if self._plan.origin is not None:
            check_apart(target, self._plan.origin.place)

    def _change(self, **changes: object) -> SavepointWriter:
        return SavepointWriter(self._spark, replace(self._plan, **changes))  # type: ignore[arg-type]
