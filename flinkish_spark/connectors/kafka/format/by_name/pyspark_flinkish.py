"""What Spark finds by name: `format("flinkish-kafka")` without a line of Python that registers it.

Spark imports every top-level module whose name begins with ``pyspark_`` and takes its `DefaultSource`. So
this one is installed beside `flinkish_spark` and not in it (``package_dir`` in `setup.cfg`). Spark looks once
in the life of a driver's JVM, when a format is first asked for that is none of its own, and one module that
fails takes all others with it: here is nothing but the name.
"""

from flinkish_spark.connectors.kafka.format.data_source import FlinkishKafka as DefaultSource

__all__ = ["DefaultSource"]
