"""Several sinks of a plain Spark query, which commit each micro-batch together, exactly once."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import functions as F

from flinkish_spark.bridge.session import QueryRun, find_query_run
from flinkish_spark.checkpoint.micro_batch_commits import (
    Lease,
    MicroBatchCommits,
    settle_micro_batch,
    to_checkpoint_place,
)
from flinkish_spark.checkpoint.ownership import new_token
from flinkish_spark.connectors.delta.sink import require_tables_apart
from flinkish_spark.connectors.query_sinks import QuerySinks
from flinkish_spark.connectors.task_staging import (
    JoiningWriter,
    name_sinks,
    plan_writers,
    stage_alone,
    stage_together,
)
from flinkish_spark.contracts.sink import (
    Sink,
    SinkWriter,
    StageResult,
)
from flinkish_spark.core.errors import (
    MAKE_DETERMINISTIC,
    ConfigError,
    JobDirError,
    RetriableError,
    SchemaError,
)
from flinkish_spark.core.steps import Observer, SilentObserver
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.core.validation import check_function, check_methods, to_ms, unusable
from flinkish_spark.planning.sink_rows import hashable
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.protocol.ids import BatchId, check_name
from flinkish_spark.protocol.records import SinkAck
from flinkish_spark.transport import columns as C
from flinkish_spark.transport.sink_rows import CONTROL
from flinkish_spark.types.ddl import quote_name
from flinkish_spark.types.schemas import check_field_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOG = logging.getLogger(__name__)
#: Returns the rows of one sink, from those of the micro-batch.
SelectRows = Callable[["DataFrame"], "DataFrame"]
_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})
_NO_ROWS: Mapping[str, SelectRows] = MappingProxyType({})
#: File in Spark's checkpoint with the id of the query.
_METADATA = "metadata"


class SinkGroup:
    """Writes each micro-batch of a plain Spark query into several sinks, which commit together.

    It is the function of a query's ``foreachBatch``. Trigger, state, checkpoint and restarts stay Spark's.
    Each micro-batch is a checkpoint: every sink stages its rows, one file in the query's checkpoint decides,
    then every sink commits. If the driver dies before the decision, no reader sees a row; if it dies after
    it, the next start of the query commits the rest.

    Parameters
    ----------
    sinks
        The sinks by uid. Keep the uids over restarts: staged data is found again by them. A sink may be added
        or removed between two starts.
    checkpoint_location
        The ``checkpointLocation`` of the query: an absolute path, or a folder in a bucket, as a job directory
        has it. The group keeps its decisions in the folder ``flinkish`` in it.
    rows
        For some of the sinks, a function that returns their rows from those of the micro-batch. It gets a
        batch DataFrame. The others get all rows.
    options
        Options of the bucket in which the checkpoint is, as ``job_dir_options`` of an environment.
    commit_timeout
        How long a decided commit is tried while a system does not answer. After it the query fails; its next
        start finishes the commit.

    Raises
    ------
    ConfigError
        If there is no sink, a uid or a path cannot be used, or a function does not fit.
    GraphError
        If two of the sinks write one Delta table.

    Notes
    -----
    The query need not be deterministic: rows that a repeated micro-batch gives are compared with none, since
    those of the decided attempt stand. If data is lost after the decision, such as a Kafka transaction that
    timed out while no driver ran, the micro-batch must give the same rows again to replace it.

    A crash between the decision and Spark's own commit makes Spark run the micro-batch again. Then its rows
    are computed for Spark's state, and written to no sink.

    Examples
    --------
    >>> from flinkish_spark import DeltaSink, KafkaSink
    >>> together = SinkGroup(
    ...     {"totals": KafkaSink("broker:9092", "totals"), "orders": DeltaSink("/lake/orders")},
    ...     checkpoint_location="/data/checkpoints/orders",
    ...     rows={"totals": lambda df: df.selectExpr("user", "amount")},
    ... )
    >>> query = (  # doctest: +SKIP
    ...     df.writeStream.foreachBatch(together)
    ...     .option("checkpointLocation", "/data/checkpoints/orders")
    ...     .start()
    ... )
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        *,
        checkpoint_location: str,
        rows: Mapping[str, SelectRows] = _NO_ROWS,
        options: Mapping[str, str] = _NO_OPTIONS,
        commit_timeout: Duration = 60_000,
    ) -> None:
        self._sinks, self._rows = check_sinks(sinks), dict(rows)
        for uid, function in self._rows.items():
            if uid not in self._sinks:
                raise ConfigError(
                    f"rows= has a function for '{uid}', which is no sink of the group",
                    what_to_do=f"name one of {', '.join(self._sinks)}",
                )
            check_function(function, f"the function of rows= for '{uid}'", 1)
        self._place = to_checkpoint_place(checkpoint_location, options)
        self._patience_ms = to_ms("commit_timeout", commit_timeout)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._driver: _Driver | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Spark Connect sends the group to the server's process, which is another driver.
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_driver")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def __call__(self, frame: DataFrame, batch: int) -> None:
        """Write one micro-batch; Spark calls this."""
        with self._lock:
            run = find_query_run(frame.sparkSession)
            if self._driver is None or self._driver.run_of_query != run:
                # Another run, of this query or another one: its checkpoint, session and fields may be others.
                self._close()
                self._driver = _Driver(self, frame, run)
            self._driver.run(frame, BatchId(batch))

    @staticmethod
    def observer() -> Observer:
        """Return the observer of the steps; crash tests override it."""
        return SilentObserver()

    def close(self) -> None:
        """Release the connections of the sinks; the next micro-batch opens them again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()


class _Driver:
    """A group in one run of a query."""

    def __init__(self, group: SinkGroup, frame: DataFrame, run: QueryRun | None) -> None:
        self.run_of_query = run
        self._place = group._place
        self._sinks, self._rows = group._sinks, group._rows
        self._require_location_of_query()
        self._schemas = {uid: self._select(uid, frame).schema for uid in self._sinks}
        for uid, schema in self._schemas.items():
            check_field_names(schema, f"the rows of the sink '{uid}'")
        self._open = QuerySinks(self._sinks, self._schemas, self._place, frame.sparkSession)
        self._commits = MicroBatchCommits(
            self._place, self._open.committers, group.observer(), new_token(), group._patience_ms
        )
        self._open.preflight()

    def run(self, frame: DataFrame, batch: BatchId) -> None:
        commits = self._commits
        lease = None if commits.is_confirmed(batch) else commits.plan()
        # This order matters: the plan may have finished the commit of an earlier driver.
        if lease is None or commits.is_confirmed(batch):
            # Readers have its rows; Spark's state after it has yet to be computed.
            frame.write.format("noop").mode("overwrite").save()
            return
        try:
            results = self._stage(frame, batch, lease)
        except BaseException:
            try:
                commits.abort(None)
            except Exception as error:
                # The next start aborts it; what ended the micro-batch is what a person has to read.
                LOG.warning("batch %s is not aborted: %s", batch, error)
            raise
        commits.commit(lease.to_staged_batch(batch, results))

    def close(self) -> None:
        self._open.close()

    def _require_location_of_query(self) -> None:
        if self.run_of_query is None:
            # A server of Spark Connect does not tell which query calls.
            return
        try:
            found = json.loads(self._place.open().read(_METADATA)).get("id")
        except (ObjectMissing, ValueError):
            found = None
        if found != self.run_of_query.query:
            raise JobDirError(
                f"{self._place.url} is not the checkpointLocation of the query that calls this SinkGroup",
                why="its decisions belong to one query, and lie in the checkpoint of that query"
                if found is not None
                else "no query has its checkpoint there",
                what_to_do="give both the same path: SinkGroup(..., checkpoint_location=path) and "
                '.option("checkpointLocation", path); where Spark\'s default file system is no disk '
                "(fs.defaultFS), both with file:// in front",
            )

    def _select(self, uid: str, frame: DataFrame) -> DataFrame:
        function = self._rows.get(uid)
        rows: object = frame if function is None else function(frame)
        if not hasattr(rows, "sparkSession"):
            raise unusable(
                f"what the function of rows= for '{uid}' returned",
                rows,
                wanted="a DataFrame",
                what_to_do="return one, made from the DataFrame that it gets",
            )
        return cast("DataFrame", rows)

    def _select_staged(self, uid: str, frame: DataFrame) -> DataFrame:
        rows = self._select(uid, frame)
        # A writer knows the fields of the first micro-batch, and would leave out a new one.
        if rows.schema.simpleString() != self._schemas[uid].simpleString():
            raise SchemaError(
                f"the rows of sink '{uid}' have other columns than in the first micro-batch of this run",
                why=f"they have {rows.schema.simpleString()}, and had {self._schemas[uid].simpleString()}",
                what_to_do="let the function of rows= return the same columns for each micro-batch",
                uid=uid,
            )
        return rows

    def _stage(self, frame: DataFrame, batch: BatchId, lease: Lease) -> dict[str, StageResult]:
        writers, requests = self._open.writers(lease.owner), self._open.make_requests(batch, lease)
        plans = plan_writers(self._select_joining(writers), requests)
        able = {uid: plan for uid, plan in plans.items() if plan.select is None}
        joining = able if len(able) > 1 else {}
        apart = {uid: writer for uid, writer in writers.items() if uid not in joining}
        is_read_again = bool(joining) + sum(writer.passes for writer in apart.values()) > 1
        # Otherwise each sink would compute the micro-batch anew, and might get other rows.
        kept = frame.persist() if is_read_again else frame
        try:
            found = dict[str, StageResult]()
            if joining:
                sharing = self._select_joining(writers)
                columns = [{name: name for name in sharing[uid].columns} for uid in joining]
                names = [*dict.fromkeys(name for one in columns for name in one)]
                rows = _to_sink_rows(self._select_staged(next(iter(joining)), kept))
                rows = rows.select(*C.SINK_CONTROL, *map(quote_name, names))
                with name_sinks([*joining], batch):
                    staged = stage_together(rows, [*joining.values()], columns)
                found.update(zip(joining, staged, strict=True))
            for uid, writer in apart.items():
                request = replace(requests[uid], source=_to_sink_rows(self._select_staged(uid, kept)))
                with name_sinks([uid], batch):
                    found[uid] = stage_alone(writer, request, plans.get(uid))
        finally:
            if is_read_again:
                kept.unpersist()
        results = {uid: found[uid] for uid in writers}
        whole = [(uid, one) for uid, one in results.items() if uid not in self._rows]
        for (left, one), (right, other) in itertools.pairwise(whole):
            if _summarize(one) != _summarize(other):
                raise RetriableError(
                    f"in micro-batch {batch} the sinks '{left}' and '{right}' saw other rows",
                    why="the micro-batch was evaluated twice with different results",
                    what_to_do=MAKE_DETERMINISTIC,
                    kind="evaluation",
                )
        return results

    def _select_joining(self, writers: Mapping[str, SinkWriter]) -> dict[str, JoiningWriter]:
        """Return the writers of sinks that get the whole micro-batch and may share a pass over it."""
        return {
            uid: writer
            for uid, writer in writers.items()
            if isinstance(writer, JoiningWriter) and writer.reads_fields_alone and uid not in self._rows
        }


def _to_sink_rows(rows: DataFrame) -> DataFrame:
    """Put the control columns of records in front of the fields."""
    fields = [(F.col(quote_name(one.name)), one.dataType) for one in rows.schema]
    hashed = F.xxhash64(*[hashable(column, kind) for column, kind in fields])
    control = [F.lit(int(C.Kind.RECORD)), F.lit(0), F.lit(0), hashed]
    given = [one.cast(field.dataType).alias(field.name) for one, field in zip(control, CONTROL, strict=True)]
    return rows.select(*given, *(column for column, _ in fields))


def _summarize(staged: StageResult) -> tuple[int, int]:
    ack = SinkAck("", staged.tasks)
    return ack.rows, ack.digest


def check_sinks(given: object) -> dict[str, Sink]:
    if not isinstance(given, Mapping) or not given:
        example = 'give the sinks by uid: {"totals": KafkaSink(...), "orders": DeltaSink(...)}'
        raise unusable("sinks", given, wanted="a mapping with at least one sink", what_to_do=example)
    for uid, sink in given.items():
        try:
            check_name(uid, "uid")
        except ValueError as error:
            raise ConfigError(str(error), what_to_do="give such a uid") from None
        if not isinstance(sink, Sink):
            raise unusable(f"sinks['{uid}']", sink, wanted="a sink", what_to_do="give a KafkaSink(...)")
        check_methods(sink, Sink, f"the sink '{uid}'")
    parts = [part for uid, sink in given.items() for part in sink.parts(uid)]
    require_tables_apart(parts)
    for uid, times in Counter(uid for uid, _ in parts).items():
        if times > 1:
            raise ConfigError(
                f"the uid '{uid}' is used twice: the dead letters of a sink have it, too",
                what_to_do="choose another uid",
            )
    return dict(given)


def settle(checkpoint_location: str, batch: int, *, options: Mapping[str, str] = _NO_OPTIONS) -> None:
    """Declare a micro-batch done, after you have written its lost rows yourself or given them up.

    Call it by hand while the query is stopped, after it ended with CommittableLostError. The query then
    continues after that micro-batch, and aborts what a repetition of it stages.

    Parameters
    ----------
    checkpoint_location
        The ``checkpointLocation`` of the query: one with a :class:`SinkGroup`, or with
        ``format("flinkish-kafka")``.
    batch
        The number of the micro-batch in the error.
    options
        Options of the bucket in which the checkpoint is, if it is in one.
    """
    settle_micro_batch(to_checkpoint_place(checkpoint_location, options), batch)
