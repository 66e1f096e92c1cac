"""Kafka client for the driver and its tasks: connections, reading, producing, transactions, admin."""

import logging

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient

# kafka-python logs every refused connection as an error, dozens in one call; errors of this package report
# it once. Set a level of the logger "kafka" to see its log.
if logging.getLogger("kafka").level == logging.NOTSET:
    logging.getLogger("kafka").setLevel(logging.CRITICAL)

__all__ = ["KafkaAdmin", "KafkaCommittable", "KafkaConnection", "TransactionClient"]
