"""How a range of a partition is read: Kafka's consumer settings, as far as they mean something here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka._wire_fetch import MAX_FRAME_BYTES, FetchLimits
from flinkish_spark.kafka.answers import Isolation

_PREFIX = "kafka."
#: Room for the rest of an answer beside its records.
_FRAME_RESERVE_BYTES = 1_000_000
#: How long a loss must show before it is believed; see ``range_fetches``.
DOUBT_MS = 2_000

#: Settings of the Java consumer about polling, groups and sockets. There is no poll, no member and
#: no topic creation here, so that they change nothing and a job that has them may keep them.
HARMLESS_OPTIONS = frozenset(
    {
        "allow.auto.create.topics",
        "auto.commit.interval.ms",
        "heartbeat.interval.ms",
        "max.poll.interval.ms",
        "max.poll.records",
        "metric.reporters",
        "metrics.num.samples",
        "metrics.recording.level",
        "metrics.sample.window.ms",
        "receive.buffer.bytes",
        "send.buffer.bytes",
        "session.timeout.ms",
    }
)


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Settings of a :class:`~flinkish_spark.kafka.range_reader.RangeReader`, checked on construction.

    The names are those of Kafka's consumer and of Spark's Kafka source. The defaults too, but for
    read_committed and for ``max.partition.fetch.bytes``: Kafka's 1 MiB is meant for a share of an
    answer for many partitions, and takes half as long again here.

    Parameters
    ----------
    isolation
        Which records are seen.
    fail_on_data_loss
        Whether a range that is no longer there is an error; otherwise it is skipped and noted.
    include_headers
        Whether the column ``headers`` is read.
    fetch_max_bytes, max_partition_fetch_bytes
        How much one answer may hold; the smaller one counts, since a Fetch is for one partition.
        A single larger batch is read nevertheless. A reader has two answers in memory.
    fetch_max_wait_ms, fetch_min_bytes
        How long a broker may wait for how much. They count only while a broker does not show
        yet what the planner has already seen; a range that is there is read without waiting.
    check_crcs
        Whether the checksum of every batch is verified.
    request_timeout_ms
        How long one request may take before its connection is given up.
    default_api_timeout_ms
        How long reading may make no progress before it fails; at least four seconds, since less
        would report a loss as a broker that is down.

    Raises
    ------
    ConfigError
        If a number is out of range; the message has Kafka's name of it.
    """

    isolation: Isolation = Isolation.READ_COMMITTED
    fail_on_data_loss: bool = True
    include_headers: bool = False
    fetch_max_bytes: int = 52_428_800
    max_partition_fetch_bytes: int = 4_194_304
    fetch_max_wait_ms: int = 500
    fetch_min_bytes: int = 1
    check_crcs: bool = True
    request_timeout_ms: int = 30_000
    default_api_timeout_ms: int = 60_000

    def __post_init__(self) -> None:
        for option, (name, least) in _NUMBERS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                raise ConfigError(
                    f"Kafka option {option!r} cannot be {value!r}",
                    what_to_do=f"give a whole number of at least {least}",
                    option=option,
                )

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, str],
        *,
        fail_on_data_loss: bool = True,
        include_headers: bool = False,
    ) -> ReaderSettings:
        """Translate consumer settings, by Kafka's names with or without the prefix ``kafka.``.

        Called by the source on the driver, with what is left of the user's options when those of
        the connection are taken out. A harmless option is accepted and changes nothing.

        Raises
        ------
        ConfigError
            If an option is not known here or its value cannot be used.

        Examples
        --------
        >>> ReaderSettings.from_options({"kafka.fetch.max.bytes": "1000000"}).fetch_max_bytes
        1000000
        """
        given: dict[str, Any] = {}
        for option, text in options.items():
            bare = option.removeprefix(_PREFIX)
            if bare in HARMLESS_OPTIONS:
                continue
            if bare not in READER_OPTIONS:
                raise ConfigError(
                    f"Kafka option {option!r} cannot be used",
                    why="the reader of the source does not know it",
                    what_to_do=f"remove it; known are {', '.join(sorted(READER_OPTIONS))}",
                    option=bare,
                )
            if bare in _NUMBERS:
                given[_NUMBERS[bare][0]] = _number(option, text)
            else:
                name, values = _WORDS[bare]
                given[name] = _word(option, text, values)
        return cls(fail_on_data_loss=fail_on_data_loss, include_headers=include_headers, **given)

    @property
    def patience_ms(self) -> int:
        """How long reading may make no progress."""
        return max(self.default_api_timeout_ms, 2 * DOUBT_MS)

    def fetch_limits(self) -> FetchLimits:
        """Return the limits of a Fetch that takes what is there and does not wait."""
        largest = MAX_FRAME_BYTES - _FRAME_RESERVE_BYTES
        return FetchLimits(
            self.isolation,
            min(self.fetch_max_bytes, largest),
            min(self.max_partition_fetch_bytes, largest),
            min(self.request_timeout_ms, self.patience_ms),
        )

    def waiting_limits(self) -> FetchLimits:
        """Return the limits of a Fetch that waits for what the broker does not show yet."""
        limits = self.fetch_limits()
        # An answer that is held back longer than the request may take costs the connection.
        max_wait_ms = min(self.fetch_max_wait_ms, limits.request_timeout_ms // 2)
        return replace(limits, max_wait_ms=max_wait_ms, min_bytes=self.fetch_min_bytes)


#: Kafka's name -> (field, least value).
_NUMBERS: dict[str, tuple[str, int]] = {
    "fetch.max.bytes": ("fetch_max_bytes", 1),
    "max.partition.fetch.bytes": ("max_partition_fetch_bytes", 1),
    "fetch.max.wait.ms": ("fetch_max_wait_ms", 0),
    "fetch.min.bytes": ("fetch_min_bytes", 0),
    "request.timeout.ms": ("request_timeout_ms", 1),
    "default.api.timeout.ms": ("default_api_timeout_ms", 1),
}
#: Kafka's name -> (field, values).
_WORDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "check.crcs": ("check_crcs", {"true": True, "false": False}),
    "isolation.level": (
        "isolation",
        {"read_committed": Isolation.READ_COMMITTED, "read_uncommitted": Isolation.READ_UNCOMMITTED},
    ),
}
#: The consumer settings that mean something here, without the prefix ``kafka.``.
READER_OPTIONS = frozenset(_NUMBERS) | frozenset(_WORDS)


def _number(option: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ConfigError(f"Kafka option {option!r} must be a whole number, not {text!r}", option=option)
    return int(text)


def _word(option: str, text: str, values: Mapping[str, Any]) -> Any:
    if text.strip().lower() not in values:
        raise ConfigError(
            f"Kafka option {option!r} cannot be {text!r}",
            what_to_do=f"use one of {', '.join(values)}",
            option=option,
        )
    return values[text.strip().lower()]
