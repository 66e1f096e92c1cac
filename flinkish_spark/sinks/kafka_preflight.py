"""What a Kafka sink is asked before anything starts, beside the types of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flinkish_spark.bridge.shim import refused_producer_setting
from flinkish_spark.config import CheckpointingMode
from flinkish_spark.errors import AuthorizationError, ConfigError, raise_translated
from flinkish_spark.formats import Avro
from flinkish_spark.kafka import PREFLIGHT_TIMEOUT_MS, KafkaAdmin
from flinkish_spark.kafka._wire import KafkaWire
from flinkish_spark.kafka._wire_produce import ProduceClient
from flinkish_spark.kafka.admin import unknown_topic
from flinkish_spark.kafka.barrier_records import BarrierRecords
from flinkish_spark.kafka.compression import require_codec
from flinkish_spark.kafka.delivery import DeliveryGuarantee
from flinkish_spark.kafka.staging_settings import DEFAULT_MAX_REQUEST_BYTES, ProducerSettings
from flinkish_spark.protocol.ids import OwnerEpoch, TransactionalId
from flinkish_spark.sinks.kafka_avro import check_avro
from flinkish_spark.sinks.kafka_columns import check_columns
from flinkish_spark.sinks.kafka_guard import with_advice
from flinkish_spark.sinks.kafka_sink_settings import KafkaSinkSettings
from flinkish_spark.sinks.kafka_writers import jvm_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flinkish_spark.sinks.base import SinkContext

#: What must fit into delivery.timeout.ms, with the writer's own defaults.
_DELIVERY_PARTS_MS = {"linger.ms": 20, "request.timeout.ms": 30_000}


def preflight(sink: KafkaSinkSettings, spark: SparkSession, context: SinkContext) -> None:
    """Refuse what cannot work; see :meth:`~flinkish_spark.KafkaSink.preflight`."""
    check_columns(sink, context.schema, context.uid)
    for part, form in (("key", sink.key_format), ("value", sink.value)):
        if isinstance(form, Avro):
            check_avro(spark, form, context.schema, f"the {part} of sink '{context.uid}'")
    _check_barriers(sink, context)
    _check_settings(sink, spark, context.uid)
    is_exact = sink.delivery is DeliveryGuarantee.EXACTLY_ONCE
    if is_exact:
        _check_timeout(sink, context)
    wire = KafkaWire(sink.connection, timeout_ms=PREFLIGHT_TIMEOUT_MS)
    with KafkaAdmin.over(wire) as admin:
        found = admin.topics(sink.topics)
        for topic in sink.topics:
            if topic not in found:
                raise unknown_topic(topic, sink.connection.servers, of=f"sink '{context.uid}'")
        _check_rights(sink, wire, context.uid)
        if is_exact:
            # Block 0 of owner 0 is never leased, and it has the prefix that ACLs are written for.
            probe = TransactionalId(context.job, OwnerEpoch(0), 0, 0, 0)
            needed_ms = context.checkpoint.interval_ms + context.checkpoint.restart_budget_ms
            try:
                admin.probe_transactional_id(str(probe), sink.transaction_timeout_ms)
            except ConfigError as refused:
                raise_translated(with_advice(refused, context.uid, needed_ms), refused)


def _check_barriers(sink: KafkaSinkSettings, context: SinkContext) -> None:
    if sink.barriers is BarrierRecords.NONE:
        return
    if context.checkpoint.mode is CheckpointingMode.AT_LEAST_ONCE:
        raise ConfigError(
            f"the sink '{context.uid}' writes barrier records, and the job's checkpoints have "
            "CheckpointingMode.AT_LEAST_ONCE",
            why="then a branch may stage records of a checkpoint behind the barrier record of it",
            what_to_do="use CheckpointingMode.EXACTLY_ONCE, or leave barriers out",
        )


def _check_settings(sink: KafkaSinkSettings, spark: SparkSession, uid: str) -> None:
    if not sink.needs_shim:
        require_codec(ProducerSettings.of(sink.producer, sink.delivery).codec)
        return
    refused = refused_producer_setting(spark, jvm_options(sink, DEFAULT_MAX_REQUEST_BYTES))
    if refused:
        raise ConfigError(
            f"the Kafka client refuses the producer's settings of sink '{uid}'{refused}",
            what_to_do="correct them; their values are not shown, they may be secret",
        )
    check_delivery_timeout({**sink.connection.for_java(), **sink.producer}, uid)


def check_delivery_timeout(settings: Mapping[str, str], uid: str) -> None:
    """Refuse a delivery timeout that the client refuses only when a task makes a producer.

    Parameters
    ----------
    settings
        Under Kafka's names, with or without ``kafka.`` before them; each is a value that the client takes.
    """
    known = {name.removeprefix("kafka."): value for name, value in settings.items()}
    if "delivery.timeout.ms" not in known:
        return
    parts = {name: int(known.get(name, default)) for name, default in _DELIVERY_PARTS_MS.items()}
    if int(known["delivery.timeout.ms"]) < sum(parts.values()):
        raise ConfigError(
            f"the Kafka client refuses the producer's settings of sink '{uid}': delivery.timeout.ms is less "
            f"than {sum(parts.values())} ms",
            why=" + ".join(f"{name} ({value} ms)" for name, value in parts.items()) + " must fit into it",
            what_to_do="raise delivery.timeout.ms, or lower the others",
            setting="delivery.timeout.ms",
        )


def _check_timeout(sink: KafkaSinkSettings, context: SinkContext) -> None:
    least = context.checkpoint.interval_ms + context.checkpoint.restart_budget_ms
    if sink.transaction_timeout_ms < least:
        raise ConfigError(
            f"the transaction timeout of sink '{context.uid}' is {sink.transaction_timeout_ms} ms, "
            f"shorter than checkpoint interval + restart budget = {least} ms",
            why="the broker would abort staged data while the job restarts",
            what_to_do=f"set transaction_timeout_ms to {least} or more, or lower restart_budget_ms",
        )


def _check_rights(sink: KafkaSinkSettings, wire: KafkaWire, uid: str) -> None:
    client = ProduceClient(wire)
    denied = wire.call("ask for rights on topics", lambda _admin: client.unwritable(sink.topics))
    if denied:
        raise AuthorizationError(
            f"Kafka refuses this principal WRITE on the topic '{denied[0]}' of sink '{uid}'",
            what_to_do="add an ACL that allows WRITE and DESCRIBE on it",
            topic=denied[0],
        )
