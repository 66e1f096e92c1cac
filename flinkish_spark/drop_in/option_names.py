"""The options of `format("kafka")`, which of them mean what here, and what to say about others.

Spark hands a data source its options with lower-case names; the table below restores the spelling
of Spark's documentation for messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka.options import is_connection_option

_KAFKA = "kafka."

#: Of Spark's Kafka source.
READ = (
    "assign",
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
)
READ_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
#: Ours, for reading.
BARRIER_RECORDS = "flinkish.barrier.records"
PER_SECOND = "flinkish.max.offsets.per.second"
READ_OWN = ("flinkish.group.id", BARRIER_RECORDS, PER_SECOND)
#: Options about consumers that do not exist here: accepted, so that only one word has to change.
READ_WITHOUT_MEANING = (
    "groupIdPrefix",
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafka.group.id",
)
WRITE = ("topic", "checkpointLocation")
#: What Spark itself puts among the options of any sink or source.
_OF_SPARK = ("path", "checkpointLocation", "queryName", "numPartitions", "__python_data_source_user_schema")

#: Set by this package inside an environment's job; not for users.
CONTROL_PATH = "flinkish.control.path"
#: The same: folder in which a job keeps where its source began.
FIRST_OFFSETS = "flinkish.first.offsets"
#: The same: uid of the source, and the control file beside which it is told what to hold back.
HELD_SOURCE, HELD_PATH = "flinkish.held.source", "flinkish.held.path"
#: The same: the upstream job whose checkpoints the source follows, see `chaining/upstream.py`.
UPSTREAM = "flinkish.upstream"
#: The same: the position that a seeded job begins with, and between which cuts that is.
UPSTREAM_START = "flinkish.upstream.start"

_REFUSED = {
    "kafka.auto.offset.reset": "set startingOffsets instead",
    "kafka.key.deserializer": "keys are always bytes; cast the column",
    "kafka.value.deserializer": "values are always bytes; cast the column",
    "kafka.key.serializer": "keys are bytes or strings; cast the column",
    "kafka.value.serializer": "values are bytes or strings; cast the column",
    "kafka.enable.auto.commit": "set flinkish.group.id to have offsets committed after the sink",
    "kafka.interceptor.classes": "there is no Java client here; leave it out",
    "kafka.transactional.id": "the sink leases transactional ids itself; leave it out",
}
#: Of the Java producer; nothing here corresponds to them, and nothing is lost by that.
_PRODUCER_WITHOUT_MEANING = frozenset(
    {
        "buffer.memory",
        "max.block.ms",
        "max.in.flight.requests.per.connection",
        "metadata.max.idle.ms",
        "receive.buffer.bytes",
        "retries",
        "send.buffer.bytes",
    }
)


def check_names(options: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuse unknown options with the nearest known name.

    Names under ``kafka.`` are left to the client they are for.

    Parameters
    ----------
    options
        Names as given, in any case.
    known
        Names in Spark's spelling.
    what
        ``"source"`` or ``"sink"``, for the message.

    Raises
    ------
    ConfigError
        An option is unknown, or refused for a reason.
    """
    spelled = {name.lower(): name for name in (*known, *_OF_SPARK)}
    for name in sorted(options):
        refused = next((why for bad, why in _REFUSED.items() if bad == name.lower()), None)
        if refused is not None:
            raise ConfigError(f"the option '{name}' cannot be set", what_to_do=refused, option=name)
        if name.lower() in spelled or name.lower().startswith(_KAFKA):
            continue
        near = difflib.get_close_matches(name.lower(), spelled, n=1)
        meant = f"did you mean '{spelled[near[0]]}'?" if near else ""
        raise ConfigError(
            f"the Kafka {what} has no option '{name}'",
            what_to_do=meant or f"choose from {', '.join(sorted(set(known)))}, and kafka.<client option>",
            option=name,
        )


def split_kafka_options(options: Mapping[str, str]) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return bootstrap servers, connection options and client settings, without the prefix.

    Raises
    ------
    ConfigError
        ``kafka.bootstrap.servers`` is missing.
    """
    under = {
        name.lower().removeprefix(_KAFKA): value
        for name, value in options.items()
        if name.lower().startswith(_KAFKA)
    }
    servers = under.pop("bootstrap.servers", "").strip()
    if not servers:
        raise ConfigError(
            "the option 'kafka.bootstrap.servers' is missing",
            what_to_do='add .option("kafka.bootstrap.servers", "host:port,host:port")',
            option="kafka.bootstrap.servers",
        )
    connection = {name: value for name, value in under.items() if is_connection_option(name)}
    # Both the connection and the client have a say in how long an answer may take.
    client = {n: v for n, v in under.items() if n not in connection or n == "request.timeout.ms"}
    return servers, connection, client


def producer_settings(client: Mapping[str, str]) -> dict[str, str]:
    """Return a sink's client settings without those that say what is so anyway, or mean nothing here.

    Raises
    ------
    ConfigError
        One of them asks for less than exactly once needs.
    """
    left = dict(client)
    if left.pop("enable.idempotence", "true").strip().lower() != "true":
        raise ConfigError(
            "the option 'kafka.enable.idempotence' cannot be false",
            what_to_do="leave it out: every producer of the sink is idempotent",
        )
    return {name: value for name, value in left.items() if name not in _PRODUCER_WITHOUT_MEANING}


class Given:
    """The options as they were given, read by Spark's names in any case."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str) -> str | None:
        """Return the value without surrounding blanks, None if not given."""
        value = self._values.get(name.lower())
        return None if value is None else value.strip()

    def flag(self, name: str, otherwise: bool) -> bool:
        """Return a boolean option."""
        value = self.text(name)
        if value is None:
            return otherwise
        if value.lower() not in ("true", "false"):
            raise ConfigError(f"the option '{name}' is {value!r}", what_to_do="set it to true or false")
        return value.lower() == "true"

    def positive(self, name: str) -> int | None:
        """Return a whole number above 0, None if not given."""
        value = self.text(name)
        if value is None:
            return None
        if not value.isdecimal() or int(value) == 0:
            raise ConfigError(
                f"the option '{name}' is {value!r}",
                what_to_do="set it to a whole number above 0",
                option=name,
            )
        return int(value)
