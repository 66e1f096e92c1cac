"""The drop-in door: Spark's own `format("kafka")`, exactly once, by changing one word."""

from flinkish_spark.connectors.kafka.format.data_source import FORMAT_NAME, FlinkishKafka, register
from flinkish_spark.connectors.kafka.format.writer import settle

__all__ = ["FORMAT_NAME", "FlinkishKafka", "register", "settle"]
