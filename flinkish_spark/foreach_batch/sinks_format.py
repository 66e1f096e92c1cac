"""The Spark data source `format("flinkish")`: several sinks of a query that commit together."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter

from flinkish_spark.connectors.delta.sink import DeltaSink
from flinkish_spark.connectors.stream_writer import (
    STORE,
    QueryOutput,
    SinkRows,
    StreamWriter,
    find_checkpoint_place,
)
from flinkish_spark.contracts.sink import Sink
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.steps import Observer, SilentObserver
from flinkish_spark.core.validation import to_ms, unusable
from flinkish_spark.foreach_batch.sink_group import check_sinks
from flinkish_spark.protocol.durations import Duration
from flinkish_spark.types.schemas import check_field_names

FORMAT_NAME = "flinkish"
#: The option with the sinks. They may hold secrets: it is a data: URL, and Spark shows no option with url in
#: its name (``spark.sql.redaction.options.regex``), whether or not `register` was called.
SINKS_OPTION = "flinkish.sinks.url"
_DATA = "data:application/octet-stream;base64,"
#: Options that are read here, or that Spark adds.
_KNOWN = {SINKS_OPTION, "checkpointlocation", "queryname", "path", "numpartitions"}
_GROUP = "write with foreachBatch(SinkGroup({...})), which takes every sink and every output mode"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class _Settings:
    """The content of the option."""

    sinks: Mapping[str, Sink]
    columns: Mapping[str, tuple[str, ...]]
    where: Mapping[str, str]
    patience_ms: int


def commit_together(
    sinks: Mapping[str, Sink],
    *,
    columns: Mapping[str, Sequence[str]] = _NOTHING,
    where: Mapping[str, str] = _NOTHING,
    commit_timeout: Duration = 60_000,
) -> dict[str, str]:
    """Return the options by which `format("flinkish")` writes into several sinks, each micro-batch once.

    The query stays Spark's: trigger, state, checkpoint, listeners. Each micro-batch is a checkpoint: every
    sink stages its rows in the tasks, one file in the query's checkpoint decides, then every sink commits.

    Parameters
    ----------
    sinks
        The sinks by uid. Keep the uids over restarts: staged data is found again by them.
    columns
        For some of the sinks, the names of the columns that they get; the others get all.
    where
        For some of the sinks, a BOOLEAN column: they get the rows in which it is true.
    commit_timeout
        How long a decided commit is tried while a system does not answer. After it the query fails; its next
        start finishes the commit.

    Raises
    ------
    ConfigError
        If a sink cannot stage in tasks, or a uid is used twice or not known.

    Notes
    -----
    The sinks travel as a pickle, which only the driver's and the executors' Python opens; Spark shows and
    stores it nowhere, but for the text of requests that a server of Spark Connect shows and logs. So give
    secrets by name (``"env:NAME"``).

    Examples
    --------
    >>> from flinkish_spark import DeltaSink, KafkaSink
    >>> options = commit_together(
    ...     {"totals": KafkaSink("broker:9092", "totals"), "orders": DeltaSink("/lake/orders")},
    ...     columns={"totals": ["user", "amount"]},
    ... )
    >>> query = (  # doctest: +SKIP
    ...     df.writeStream.format("flinkish")
    ...     .options(**options)
    ...     .option("checkpointLocation", "/data/checkpoints/orders")
    ...     .start()
    ... )
    """
    found = check_sinks(sinks)
    for uid, sink in found.items():
        if why := sink.why_needs_session():
            raise ConfigError(f"the sink '{uid}' cannot stage in tasks: {why}", what_to_do=_GROUP)
    for role, given, example in (("columns", columns, '["user", "amount"]'), ("where", where, '"is_large"')):
        to_do = f'give it by uid: {role}={{"totals": {example}}}'
        if not isinstance(given, Mapping):
            raise unusable(role, given, wanted="a mapping", what_to_do=to_do)
        for uid, named in given.items():
            if uid not in found:
                what = f"{role}= names '{uid}', which is no sink"
                raise ConfigError(what, what_to_do=f"name one of {', '.join(found)}")
            names = [named] if role == "where" else named
            if (
                not isinstance(names, list | tuple)
                or not names
                or not all(name and isinstance(name, str) for name in names)
            ):
                raise unusable(f"{role}['{uid}']", named, wanted="names of columns", what_to_do=to_do)
            if len(set(names)) < len(names):
                what = f"{role}['{uid}'] names a column twice"
                raise ConfigError(what, what_to_do="name each column once")
    chosen = {uid: tuple(names) for uid, names in columns.items()}
    settings = _Settings(found, chosen, dict(where), to_ms("commit_timeout", commit_timeout))
    pickled: bytes = cloudpickle.dumps(settings)  # type: ignore[no-untyped-call]
    return {SINKS_OPTION: _DATA + base64.b64encode(pickled).decode()}


class Flinkish(DataSource):
    """Writes a query into several sinks; Spark creates it, in Python processes of its own."""

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        if overwrite:
            raise ConfigError(
                f"format('{FORMAT_NAME}') has no outputMode('complete')",
                why="each micro-batch would add the whole result to every sink",
                what_to_do="use append, or foreachBatch(SinkGroup({...})) with sinks that upsert",
            )
        return StreamWriter(_parse(self.options, schema), self.observer)

    @staticmethod
    def observer() -> Observer:
        """Return the observer of the sinks' steps; crash tests override it."""
        return SilentObserver()


def _parse(options: Mapping[str, str], schema: T.StructType) -> QueryOutput:
    for name in options:
        if name.lower() not in _KNOWN and not name.lower().startswith((STORE, "__")):
            raise ConfigError(
                f"format('{FORMAT_NAME}') has no option '{name}'",
                what_to_do=f"leave it out; sinks have parameters, and a bucket of the checkpoint {STORE}*",
            )
    text = next((value for name, value in options.items() if name.lower() == SINKS_OPTION), "")
    if not text.startswith(_DATA):
        what_to_do = 'add .options(**flinkish_spark.commit_together({"orders": KafkaSink(...)}))'
        raise ConfigError(f"format('{FORMAT_NAME}') has no sinks", what_to_do=what_to_do)
    # By whoever starts the query, as a user's function is.
    settings: _Settings = pickle.loads(base64.b64decode(text.removeprefix(_DATA)))
    check_field_names(schema, "the query")
    place = find_checkpoint_place(options)
    if not place.is_local:
        _require_paths_with_scheme(settings.sinks)
    rows = {uid: _select(uid, settings, schema) for uid in settings.sinks}
    key = text + schema.json()
    return QueryOutput(settings.sinks, rows, place, key, settings.patience_ms)


def _require_paths_with_scheme(sinks: Mapping[str, Sink]) -> None:
    # Without a session nobody here knows what Spark's default file system is.
    for uid, sink in sinks.items():
        if isinstance(sink, DeltaSink) and "://" not in sink.path:
            raise ConfigError(
                f"the path '{sink.path}' of the sink '{uid}' has no scheme, and the checkpoint is in a store",
                what_to_do="write the table's whole URL, such as s3://bucket/table or file:///lake/table",
                uid=uid,
            )


def _select(uid: str, settings: _Settings, schema: T.StructType) -> SinkRows:
    where, names = settings.where.get(uid, ""), settings.columns.get(uid, ())
    for name in (*names, *([where] if where else [])):
        if name not in schema.names:
            raise SchemaError(
                f"the query has no column '{name}' for the sink '{uid}'",
                what_to_do=f"name one of {', '.join(schema.names)}",
            )
    if where and not isinstance(schema[where].dataType, T.BooleanType):
        kind = schema[where].dataType.simpleString()
        raise SchemaError(
            f"the column '{where}' of where= for '{uid}' is {kind}", what_to_do="make it a BOOLEAN"
        )
    # A column that chooses rows is no field, unless it is named.
    others = [name for name in schema.names if name not in settings.where.values()]
    return SinkRows(T.StructType([schema[name] for name in names or others]), where)
