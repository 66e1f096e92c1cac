"""`format("flinkish-kafka")` as Spark sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, DataSourceWriter

from flinkish_spark.bridge.refusals import say_refusals_last
from flinkish_spark.bridge.settings import SETTINGS
from flinkish_spark.connectors.kafka.format.options import parse_any, parse_batch, parse_sink, parse_stream
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.steps import Observer, SilentObserver
from flinkish_spark.core.stream_readers import adapt_reader
from flinkish_spark.transport import columns as C

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.connectors.kafka.format.writer import KafkaStreamWriter


FORMAT_NAME = "flinkish-kafka"
#: Spark's pattern for the names of options whose values it does not print; one of the session's.
_REDACTION = "spark.sql.redaction.options.regex"
#: Its value in Spark, where it is not set.
_BY_DEFAULT = "(?i)url"
#: A private key may be given as it stands (KIP-651), and a login is more than its password.
_SECRETS = r"(?i)ssl\.keystore\.key|sasl\.jaas\.config|password"


class FlinkishKafka(DataSource):
    """Kafka for Spark, exactly once, without a JAR.

    Takes the options of Spark's own ``format("kafka")`` and has its columns; what differs is in
    `docs/drop-in.md`. Made by Spark, in Python processes of its own.
    """

    @classmethod
    def name(cls) -> str:
        return FORMAT_NAME

    def schema(self) -> str:
        from flinkish_spark.connectors.kafka.format.reader import schema_of

        options = parse_any(self.options)
        return f"{C.PIECE} STRING" if options.gives_pieces else schema_of(options)

    def reader(self, schema: T.StructType) -> DataSourceReader:
        from flinkish_spark.connectors.kafka.format.reader import KafkaBatchReader

        return KafkaBatchReader(parse_batch(self.options))

    def streamReader(self, schema: T.StructType) -> DataSourceStreamReader:
        from flinkish_spark.connectors.kafka.format.reader import AlignedStreamReader, KafkaStreamReader

        options = parse_stream(self.options)
        reader = KafkaStreamReader if options.upstream is None else AlignedStreamReader
        return adapt_reader(reader(options))

    def streamWriter(self, schema: T.StructType, overwrite: bool) -> KafkaStreamWriter:
        from flinkish_spark.connectors.kafka.format.writer import KafkaStreamWriter

        return KafkaStreamWriter(parse_sink(self.options, schema), self.observer)

    def writer(self, schema: T.StructType, overwrite: bool) -> DataSourceWriter:
        """Refuse: a batch query has no checkpoint that a repetition could be recognised by."""
        raise ConfigError(
            f"format('{FORMAT_NAME}') writes streams only",
            why="a batch query that is run again cannot be told from a new one",
            what_to_do="use writeStream with trigger(availableNow=True), or format('kafka')",
        )

    @staticmethod
    def observer() -> Observer:
        """Return who watches the steps of the sink; crash tests override it."""
        return SilentObserver()


def register(spark: SparkSession) -> None:
    """Make `format("flinkish-kafka")` known to a session. Call it once per session.

    Needs this package on the driver and on the executors, and no JAR. Adds the names of this format's
    secret options to the session's ``spark.sql.redaction.options.regex``, so that no plan shows them. What
    this format refuses stands at the end of Spark's errors from then on, behind Spark's plan.
    Harmless where Spark has found the format by its name (`docs/drop-in.md`).

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

    def with_ours(before: str) -> str:
        return before if _SECRETS in before else f"{before or _BY_DEFAULT}|{_SECRETS}"

    SETTINGS.change(spark, _REDACTION, with_ours)
    say_refusals_last()
    spark.dataSource.register(FlinkishKafka)
