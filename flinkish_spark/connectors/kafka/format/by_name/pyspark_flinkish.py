"""Makes `format("flinkish-kafka")` known to Spark without a call of `register`.

Spark imports every top-level module whose name begins with ``pyspark_`` and registers its `DefaultSource`, so
this module is installed next to `flinkish_spark` (``package_dir`` in `setup.cfg`). Spark does so once in the
life of a driver's JVM, at the first format that is not its own, and every job waits for it. A module that
fails makes Spark ignore all others. So this one imports the format when Spark creates it.
"""

from pyspark.sql.datasource import DataSource


class DefaultSource(DataSource):
    """Creates the data source of `flinkish_spark.connectors.kafka.data_source`."""

    @classmethod
    def name(cls) -> str:
        return "flinkish-kafka"

    def __new__(cls, options: dict[str, str]) -> DataSource:  # type: ignore[misc]  # not one of this class
        from flinkish_spark.connectors.kafka.data_source import FlinkishKafka

        return FlinkishKafka(options)


__all__ = ["DefaultSource"]
