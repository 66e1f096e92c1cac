"""Makes `format("flinkish-kafka")` known to Spark without a call of `register`.

Spark imports every top-level module whose name begins with ``pyspark_`` and registers its `DefaultSource`, so
this module is installed next to `flinkish_spark` (``package_dir`` in `setup.cfg`). Spark does so once in the
life of a driver's JVM, at the first format that is not its own. A module that fails makes Spark ignore all
others, so this one holds nothing but the name.
"""

from flinkish_spark.connectors.kafka.data_source import FlinkishKafka as DefaultSource

__all__ = ["DefaultSource"]
