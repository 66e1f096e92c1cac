"""The parts that core uses by a protocol, and where each lies; imported with the package, also by workers.

Besides the public names this is the one module that knows core and its wings. A part is imported when core
first needs it, and with it libraries that may be missing: obstore, a web server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flinkish_spark.core.wings import register_part

if TYPE_CHECKING:
    from flinkish_spark.bridge.stores import SparkStores
    from flinkish_spark.connectors.kafka.data_source import KafkaDoor
    from flinkish_spark.connectors.kafka.stream_reader import KafkaStreamReader
    from flinkish_spark.core.store_spec import StoreOpener
    from flinkish_spark.datastream.row_patterns import RowPatternPart
    from flinkish_spark.foreach_batch.sinks_format import Flinkish
    from flinkish_spark.job.face import JobFace


def _object_stores() -> StoreOpener:
    from flinkish_spark.core.object_store import open_object_store

    return open_object_store


def _hdfs_stores() -> StoreOpener:
    from flinkish_spark.core.hdfs_store import open_hdfs_store

    return open_hdfs_store


def _stores_in_spark() -> SparkStores:
    from flinkish_spark.bridge import buckets

    return buckets


def _kafka_door() -> KafkaDoor:
    from flinkish_spark.connectors.kafka.format import door

    return door


def _sinks_format() -> type[Flinkish]:
    from flinkish_spark.foreach_batch.sinks_format import Flinkish

    return Flinkish


def _reader_of_chained_streams() -> type[KafkaStreamReader]:
    from flinkish_spark.connectors.kafka.chaining.reader import AlignedStreamReader

    return AlignedStreamReader


def _row_patterns() -> RowPatternPart:
    from flinkish_spark.datastream import match_queries

    return match_queries


def _job_face() -> JobFace:
    from flinkish_spark.rest import job_face

    return job_face


def register_parts() -> None:
    for scheme in ("s3", "gs", "az", "abfss", "memory"):
        register_part(f"store {scheme}", _object_stores)
    register_part("store hdfs", _hdfs_stores)
    register_part("stores in Spark", _stores_in_spark)
    register_part("Kafka door", _kafka_door)
    register_part("format of sinks", _sinks_format)
    register_part("reader of chained streams", _reader_of_chained_streams)
    register_part("row patterns", _row_patterns)
    register_part("job face", _job_face)
