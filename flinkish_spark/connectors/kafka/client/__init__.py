"""Kafka for the driver and its tasks: connections, reading, writing, transactions, topics and groups."""

import logging

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import KafkaCommittable, TransactionClient

# kafka-python logs every refused connection as an error of its own, dozens in one call; ours say it
# once. Whoever wants its log sets a level of the logger "kafka".
if logging.getLogger("kafka").level == logging.NOTSET:
    logging.getLogger("kafka").setLevel(logging.CRITICAL)

__all__ = ["KafkaAdmin", "KafkaCommittable", "KafkaConnection", "TransactionClient"]
