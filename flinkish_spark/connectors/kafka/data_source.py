"""The Spark data source `format("flinkish-kafka")`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from pyspark.sql import types as T
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)

from flinkish_spark.bridge.refusals import say_refusals_last
from flinkish_spark.bridge.settings import SETTINGS
from flinkish_spark.connectors.kafka.stream_options import parse_any, parse_stream
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.steps import Observer, SilentObserver
from flinkish_spark.core.stream_readers import adapt_reader
from flinkish_spark.core.wings import load_part
from flinkish_spark.transport import columns as C

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FORMAT_NAME = "flinkish-kafka"
#: Session setting: pattern for names of options whose values Spark redacts.
_REDACTION = "spark.sql.redaction.options.regex"
_BY_DEFAULT = "(?i)url"
#: Names of secret options; a private key may be an option's value (KIP-651).
_SECRETS = r"(?i)ssl\.keystore\.key|sasl\.jaas\.config|password"


class KafkaDoor(Protocol):
    """The half of the format that no job uses: batches, and the sink of a plain query."""

    def make_batch_reader(self, options: Mapping[str, str]) -> DataSourceReader: ...

    def make_stream_writer(
        self, options: Mapping[str, str], schema: T.StructType, observer: Callable[[], Observer]
    ) -> DataSourceStreamArrowWriter: ...


def _load_door() -> KafkaDoor:
    door: KafkaDoor = load_part("Kafka door")
    return door


class FlinkishKafka(DataSource):
    """Kafka for Spark, exactly once, without a JAR.

    It has the options and columns of Spark's own ``format("kafka")``; `docs/drop-in.md` lists the
    differences. Spark creates it, in Python processes of its own.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    def schema(self) -> str:
        options = parse_any(self.options)
        if options.gives_pieces:
            return f"{C.PIECE} STRING"
        from flinkish_spark.connectors.kafka.stream_reader import make_schema

        return make_schema(options)

    def reader(self, schema: T.StructType) -> DataSourceReader:
        return _load_door().make_batch_reader(self.options)

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:
        from flinkish_spark.connectors.kafka.stream_reader import KafkaStreamReader

        options = parse_stream(self.options)
        reader: type[KafkaStreamReader] = KafkaStreamReader
        if options.upstream:
            reader = load_part("reader of chained streams")
        return adapt_reader(reader(options))

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _load_door().make_stream_writer(self.options, schema, self.observer)

    def writer(self, schema: T.StructType, overwrite: bool) -> DataSourceWriter:
        """Refuse: without a checkpoint the repetition of a batch query could not be recognised."""
        raise ConfigError(
            f"format('{FORMAT_NAME}') writes streams only",
            why="the repetition of a batch query cannot be distinguished from a new query",
            what_to_do="use writeStream with trigger(availableNow=True), or format('kafka')",
        )

    @staticmethod
    def observer() -> Observer:
        """Return the observer of the sink's steps; crash tests override it."""
        return SilentObserver()


def register(spark: SparkSession) -> None:
    """Make `format("flinkish-kafka")` and `format("flinkish")` known to a session. Call it once per session.

    Needs this package on the driver and on the executors, and no JAR. Adds the names of the first one's
    secret options to the session's ``spark.sql.redaction.options.regex``, so that no plan shows them. From
    then on an error of these formats stands at the end of Spark's message, after Spark's plan.
    Harmless if Spark has already found the first one by its name (`docs/drop-in.md`).

    Parameters
    ----------
    spark
        The session, a classic one or one of Spark Connect.

    Examples
    --------
    >>> register(spark)  # doctest: +SKIP
    >>> query = (  # doctest: +SKIP
    ...     df.writeStream.format("flinkish-kafka")
    ...     .option("kafka.bootstrap.servers", "broker:9092")
    ...     .option("topic", "totals")
    ...     .option("checkpointLocation", "/data/checkpoints/totals")
    ...     .start()
    ... )
    """

    def add_secrets(before: str) -> str:
        return before if _SECRETS in before else f"{before or _BY_DEFAULT}|{_SECRETS}"

    SETTINGS.change(spark, _REDACTION, add_secrets)
    say_refusals_last()
    spark.dataSource.register(FlinkishKafka)
    spark.dataSource.register(load_part("format of sinks"))
