"""Kafka for the driver: connection settings, ending transactions, topics and groups."""

from flinkish_spark.kafka.admin import GroupCommit, KafkaAdmin, OffsetDirection, TopicInfo
from flinkish_spark.kafka.answers import END_TXN_VERSION, Isolation
from flinkish_spark.kafka.evidence import Evidence
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.kafka.transactions import (
    KafkaCommittable,
    Liveness,
    OpenTransaction,
    TransactionClient,
)

__all__ = [
    "END_TXN_VERSION",
    "Evidence",
    "GroupCommit",
    "Isolation",
    "KafkaAdmin",
    "KafkaCommittable",
    "KafkaConnection",
    "Liveness",
    "OffsetDirection",
    "OpenTransaction",
    "TopicInfo",
    "TransactionClient",
]
