"""Kafka for the driver: connection settings, ending transactions, topics and groups."""

import logging

from flinkish_spark.connectors.kafka.client.admin import (
    PREFLIGHT_TIMEOUT_MS,
    GroupCommit,
    KafkaAdmin,
    OffsetDirection,
    TopicInfo,
)
from flinkish_spark.connectors.kafka.client.client import END_TXN_VERSION, Isolation
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import (
    Evidence,
    KafkaCommittable,
    Liveness,
    OpenTransaction,
    TransactionClient,
)

# kafka-python logs every refused connection as an error of its own, dozens in one call; ours say it
# once. Whoever wants its log sets a level of the logger "kafka".
if logging.getLogger("kafka").level == logging.NOTSET:
    logging.getLogger("kafka").setLevel(logging.CRITICAL)

__all__ = [
    "END_TXN_VERSION",
    "PREFLIGHT_TIMEOUT_MS",
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
