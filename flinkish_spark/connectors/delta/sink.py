"""The Delta sink, and its checks before the job starts.

One table version per checkpoint, however many micro-batches it has, marked with SetTransaction(appId = job
uuid and sink uid, version = checkpoint id): a repeated commit, by this process or any other, changes nothing.
See docs/delta-sink.md.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from pyspark.sql import functions as F
from pyspark.sql import types as T

from flinkish_spark.bridge.session import default_file_system, has_delta_format
from flinkish_spark.connectors.delta.committing import DeltaCommits, DeltaCommitter
from flinkish_spark.connectors.delta.rows import DeltaRows, rule_conditions
from flinkish_spark.connectors.delta.sink_settings import DeltaSinkSettings, check_creates, plain_url
from flinkish_spark.connectors.delta.staging import DeltaStaging, table_defaults, why_staged_as_rows
from flinkish_spark.connectors.delta.table import DeltaTableError, TableInfo, why_no_table, why_unfit
from flinkish_spark.connectors.delta.tables import DeltaTables
from flinkish_spark.connectors.partition_values import why_no_partition
from flinkish_spark.connectors.upserts import check_columns, check_upsert, select_stored
from flinkish_spark.connectors.write_modes import Append, OverwritePartitions, Upsert
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.sink import Committer, Sink, SinkContext, SinkWriter
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, GraphError, SchemaError
from flinkish_spark.jars import how_to_get_delta
from flinkish_spark.protocol.versions import SparkMinor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


FILES = "deletedFileRetentionDuration"
MARKERS = "setTransactionRetentionDuration"
#: Delta's own defaults, if neither the table nor the session has any.
_DEFAULT = {FILES: "interval 1 week"}
_UNIT_MS = {
    "week": 604_800_000.0,
    "day": 86_400_000.0,
    "hour": 3_600_000.0,
    "minute": 60_000.0,
    "second": 1_000.0,
    "millisecond": 1.0,
    "microsecond": 0.001,
}
_PART = re.compile(rf"(\d+(?:\.\d+)?)\s+({'|'.join(_UNIT_MS)})s?(?=\s|$)")


def duration_ms(text: str) -> int | None:
    """Return an interval of a table property in milliseconds; None if it cannot be parsed."""
    rest = text.strip().lower().removeprefix("interval").strip()
    if not rest or _PART.sub("", rest).strip():
        return None
    return int(sum(float(count) * _UNIT_MS[unit] for count, unit in _PART.findall(rest)))


def check_retention(
    name: str, properties: Mapping[str, str], defaults: Mapping[str, str], path: str, context: SinkContext
) -> None:
    """Refuse a table that forgets staged files or markers while the job may still be down."""
    text = properties.get(f"delta.{name}") if properties else defaults.get(name)
    text = text or _DEFAULT.get(name)
    kept_ms = None if text is None else duration_ms(text)
    least_ms = context.checkpoint.replay_ms
    if kept_ms is None or kept_ms >= least_ms:
        return
    what = "staged files" if name == FILES else "which checkpoints it has"
    raise ConfigError(
        f"delta.{name} of the table {path} is '{text}' = {kept_ms} ms, shorter than checkpoint interval + "
        f"restart budget = {least_ms} ms of sink '{context.uid}'",
        why=f"the table could forget {what} while the job restarts",
        what_to_do=f"ALTER TABLE ... SET TBLPROPERTIES ('delta.{name}' = 'interval 7 days'), "
        "or lower restart_budget_ms",
    )


def check_sink(sink: DeltaSinkSettings, spark: SparkSession, context: SinkContext) -> None:
    check_columns(sink.mode, context, sink.partition_by)
    default = default_file_system(spark) if sink.path.startswith("/") else "file:///"
    if not default.startswith("file:"):
        raise ConfigError(
            f"the path {sink.path} of sink '{context.uid}' has no scheme, and the cluster's default file "
            f"system is {default}",
            why="Spark looks for the table there, and the sink on the disks of driver and executors",
            what_to_do=f"write {default.rstrip('/')}{sink.path}, or file://{sink.path}",
        )
    if isinstance(sink.mode, Upsert):
        check_upsert(sink.mode, spark, context)
    try:
        table = DeltaTables(sink.store_options).info(sink.path)
    except DeltaTableError as error:
        raise _make_refusal(sink, context, str(error)) from error
    defaults = table_defaults(spark)
    stream = json.loads(context.schema.json())["fields"]
    by_spark = why_staged_as_rows(sink, table, stream, defaults)
    for why, to_do in _find_misfits(sink, context.schema, table):
        if why:
            raise _make_refusal(sink, context, why, to_do)
    if by_spark and not has_delta_format(spark):
        why, what_to_do = how_to_get_delta(str(SparkMinor.of(spark.version)))
        raise EnvironmentFault(
            f"the Delta table {sink.path} of sink '{context.uid}' needs Delta's own writer, whose JAR this "
            "session has not",
            why=f"delta-rs does not know {by_spark}" + (f"; {why}" if why else ""),
            what_to_do=what_to_do,
        )
    stages_rows = bool(by_spark) or isinstance(sink.mode, Upsert)
    if table is not None and stages_rows and (by_spark or any(table.rules().values())):
        _check_constraints(sink, spark, context, table, by_spark=bool(by_spark))
    properties = {} if table is None else table.properties
    for name in (MARKERS,) if stages_rows else (FILES, MARKERS):
        # A table without properties has Delta's defaults, not the session's.
        known = {name: defaults[f"delta.{name}"]} if table is None and f"delta.{name}" in defaults else {}
        check_retention(name, properties, known, sink.path, context)


def _find_misfits(
    sink: DeltaSinkSettings, schema: T.StructType, table: TableInfo | None
) -> Iterator[tuple[str, str]]:
    """Yield why a table, also one that the first commit creates, cannot take a stream, and what to do."""
    mode, partition_by = sink.mode, sink.partition_by if table is None else table.partition_by
    if table is not None and table.is_append_only and not isinstance(mode, Append):
        to_do = "use Append(), or ALTER TABLE ... UNSET TBLPROPERTIES ('delta.appendOnly')"
        yield "it has delta.appendOnly, and takes Append() only", to_do
    for field in schema.fields:
        if field.name.lower() in map(str.lower, partition_by) and (why := why_no_partition(field.dataType)):
            to_do = f"partition {sink.path} by another column, such as hex({field.name})"
            yield f"its partition column '{field.name}' is {field.dataType.simpleString()}: {why}", to_do
    if isinstance(mode, OverwritePartitions) and not partition_by:
        to_do = "give DeltaSink partition_by, or use a partitioned table"
        yield "it has no partitions that are overwritten, and the sink no partition_by", to_do
    if table is None:
        yield why_no_table(select_stored(mode, schema).fields, partition_by), ""
        return
    if sink.partition_by and tuple(sink.partition_by) != partition_by:
        yield f"it is partitioned by {', '.join(partition_by) or 'nothing'}", ""
    yield why_unfit(table, mode, schema.jsonValue()["fields"], sink.schema_evolution), ""
    # Delta cannot MERGE into a table with a CHAR column, whatever its role. In a partition column a text with
    # padding and one without would be two partitions.
    for name in table.padded:
        if isinstance(mode, Upsert) or (isinstance(mode, OverwritePartitions) and name in partition_by):
            to_do = "make the column a VARCHAR or STRING: CREATE OR REPLACE TABLE ... AS SELECT ..."
            yield f"its column {name} is a CHAR, which Delta pads", to_do
    for key in mode.keys if isinstance(mode, Upsert) else ():
        if table.is_collated(key):
            yield f"the collation of its column {key} takes different keys for one", ""


def _check_constraints(
    sink: DeltaSinkSettings, spark: SparkSession, context: SinkContext, table: TableInfo, *, by_spark: bool
) -> None:
    """Refuse rules on columns that the stream lacks, since they cannot be checked when rows are staged."""
    empty, given = spark.createDataFrame([], context.schema), {n.lower() for n in context.schema.names}
    rules = [("constraint", name, sql) for name, sql in table.checks.items()]
    rules += [("generated column", n, sql) for n, sql in table.generated.items() if n.lower() in given]
    for kind, name, sql in rules:
        try:
            empty.select(F.expr(sql))
        except Exception as error:
            raise _make_refusal(
                sink, context, f"its {kind} {name} ({sql}) is about columns that the stream lacks"
            ) from error
    try:
        empty.select(*(is_kept for _, is_kept in rule_conditions(empty, table.rules())))
    except Exception as error:
        why = f"a rule of it cannot be checked when rows are staged: {str(error).splitlines()[0]}"
        raise _make_refusal(sink, context, why) from error
    if isinstance(sink.mode, Upsert) and by_spark:
        asked = table, context.schema, sink.mode, sink.schema_evolution
        if why := DeltaRows(spark).why_no_merge(sink.path, *asked):
            raise _make_refusal(sink, context, f"Delta has no MERGE for it: {why}")


def _make_refusal(
    sink: DeltaSinkSettings, context: SinkContext, why: str, what_to_do: str = ""
) -> SchemaError:
    evolves = "" if sink.schema_evolution.value != "NONE" else ", or allow it with schema_evolution"
    return SchemaError(
        f"the Delta table {sink.path} refuses the stream of sink '{context.uid}'",
        why=why,
        what_to_do=what_to_do or f"change the stream's fields, or the table with ALTER TABLE{evolves}",
    )


@dataclass(frozen=True)
class DeltaSink(DeltaSinkSettings, Sink):
    """Write to a Delta table, exactly once.

    Parameters
    ----------
    path
        Absolute path or URI of the table; created with the first checkpoint if it is missing.
    partition_by
        Partition columns.
    options
        Options of Delta's writer, such as ``{"maxRecordsPerFile": "100000"}``. Options that have a parameter
        here, and those of Delta's transaction marker, are refused.
    mode
        ``Append()``, ``Upsert(keys=...)`` or ``OverwritePartitions()``.
    schema_evolution
        Whether the stream may have columns or types that the table does not have yet. The table gets them
        with the first checkpoint that has rows.
    writer
        ``"python"``, the only one: tasks write Parquet by pyarrow, delta-rs commits.
    store_options
        Options of the table's store, by delta-rs' names, such as ``{"aws_region": "eu-west-1"}``. A secret is
        given as ``"env:NAME"``: the environment variable that holds it in driver and executors.

    Raises
    ------
    ConfigError
        A path that is relative, an option that is refused, a value of another type.

    Examples
    --------
    >>> DeltaSink("/lake/totals", partition_by=("day",)).path
    '/lake/totals'
    >>> DeltaSink("/lake/users", mode=Upsert(keys=("id",), delete_when="op = 'D'")).mode.keys
    ('id',)
    """

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the table."""
        return (Dataset.from_path(self.path),)

    def why_needs_session(self) -> str:
        """Return why for partitions and for a condition in SQL."""
        if self.partition_by or isinstance(self.mode, OverwritePartitions):
            return "Spark sorts the rows of its partitions"
        has_sql = isinstance(self.mode, Upsert) and self.mode.delete_when is not None
        return "its delete_when is SQL" if has_sql else ""

    def preflight(self, spark: SparkSession, context: SinkContext) -> None:
        """Compare stream and table, mode and retention; try the table's store."""
        check_sink(self, spark, context)
        check_creates(self.path, self.store_options, f"sink '{context.uid}'")

    def create_writer(self, spark: SparkSession, context: SinkContext) -> SinkWriter:
        """Return the staging half."""
        return DeltaStaging(self, context, spark)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        return DeltaCommitter(self, DeltaCommits(self.store_options, spark), context)


def require_tables_apart(sinks: Iterable[tuple[str, Sink]]) -> None:
    """Raise GraphError if two sinks that commit together write one table."""
    seen: dict[str, str] = {}
    for uid, sink in sinks:
        if not isinstance(sink, DeltaSink):
            continue
        path = _canonical(sink.path)
        if path in seen:
            raise GraphError(
                f"the sinks '{seen[path]}' and '{uid}' write the same Delta table {path}",
                why="their commits of one checkpoint would conflict with each other",
                what_to_do="union the streams, or use two tables",
            )
        seen[path] = uid


def _canonical(path: str) -> str:
    if "://" in path and not path.startswith("file:"):
        scheme, _, rest = plain_url(path).partition("://")
        return f"{scheme.lower()}://{posixpath.normpath(rest)}"
    local = unquote(urlparse(path).path) if path.startswith("file:") else path
    return posixpath.realpath(local)
