"""Where a Kafka source begins to read, in a job that has no checkpoint yet.

Offsets that have to be asked for are asked for once, at the first start, and kept in the job directory: a
group's offsets and the end of a topic are others a moment later.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.arguments import instance_of, refused_as_config_errors, unusable
from flinkish_spark.errors import ConfigError
from flinkish_spark.kafka import KafkaAdmin
from flinkish_spark.kafka.answers import Place
from flinkish_spark.protocol.limits import checked_choice, checked_whole


class StartingOffsets(enum.Enum):
    """Where a job that has no checkpoint yet begins to read."""

    EARLIEST = "earliest"
    LATEST = "latest"


class KafkaStart(ABC):
    """Says where each partition begins; one of the classes below."""

    @abstractmethod
    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is read. Called before the first start.

        Raises
        ------
        ConfigError
            It does not fit what the topics hold.
        """

    @property
    def needs_group(self) -> bool:
        """Whether it goes by the group of the source, and so cannot do without."""
        return False

    def of_group(self, group_id: str) -> KafkaStart:
        """Return it for a source with that group."""
        return self


@dataclass(frozen=True)
class StartAtTimestamp(KafkaStart):
    """Begins each partition at its first record that is at least as late; without one, with what comes.

    Parameters
    ----------
    timestamp_ms
        Milliseconds since 1970.
    """

    timestamp_ms: int

    def __post_init__(self) -> None:
        with refused_as_config_errors("give milliseconds since 1970"):
            checked_whole("timestamp_ms", self.timestamp_ms, least=0, most=(1 << 63) - 1)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the offsets of those records."""
        return first_at_least_as_late(
            dict.fromkeys(places, self.timestamp_ms), admin.offsets_at, admin.end_offsets
        )


@dataclass(frozen=True)
class StartAtOffsets(KafkaStart):
    """Begins partitions at offsets.

    Parameters
    ----------
    starts
        Topic -> partition -> the first offset that is read. It must be there, or be the end.
    otherwise
        Where the partitions begin that are not named.

    Examples
    --------
    >>> StartAtOffsets({"orders": {0: 1_000}}, otherwise=StartingOffsets.LATEST).starts["orders"][0]
    1000
    """

    starts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    otherwise: StartingOffsets = StartingOffsets.EARLIEST

    def __post_init__(self) -> None:
        to_do = 'give numbers by topic and partition: {"orders": {0: 1_000, 1: 1_200}}'
        if not isinstance(self.starts, Mapping):
            raise unusable("starts", self.starts, wanted="offsets by topic and partition", what_to_do=to_do)
        for topic, offsets in self.starts.items():
            if not isinstance(offsets, Mapping):
                raise unusable(f"starts[{topic!r}]", offsets, wanted="offsets by partition", what_to_do=to_do)
            with refused_as_config_errors(to_do):
                for partition, offset in offsets.items():
                    checked_whole("a partition", partition, least=0)
                    checked_whole(f"the start of {topic}-{partition}", offset, least=0)
        with refused_as_config_errors("give StartingOffsets.EARLIEST or StartingOffsets.LATEST"):
            checked_choice("otherwise", self.otherwise, StartingOffsets)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the offsets, if the topics hold them."""
        given = {(topic, number): at for topic, all_ in self.starts.items() for number, at in all_.items()}
        unknown = sorted(given.keys() - set(places))
        if unknown:
            topic, partition = unknown[0]
            raise ConfigError(
                f"the source begins at an offset of {topic}-{partition}, which it does not read",
                what_to_do="correct starting_offsets=StartAtOffsets(...)",
            )
        return _held(admin, places, given, self.otherwise, "StartAtOffsets names")


@dataclass(frozen=True)
class StartAtCommitted(KafkaStart):
    """Begins where a consumer group stands, to take its work over.

    Parameters
    ----------
    group_id
        Of the group; empty for the source's own.
    otherwise
        Where the partitions begin for which the group has no offset.
    """

    group_id: str = ""
    otherwise: StartingOffsets = StartingOffsets.EARLIEST

    def __post_init__(self) -> None:
        instance_of("group_id", self.group_id, str, what_to_do="give a name, or leave it out")
        with refused_as_config_errors("give StartingOffsets.EARLIEST or StartingOffsets.LATEST"):
            checked_choice("otherwise", self.otherwise, StartingOffsets)

    @property
    def needs_group(self) -> bool:
        """Whether none was named."""
        return not self.group_id

    def of_group(self, group_id: str) -> KafkaStart:
        """Return it with the group that it goes by."""
        return StartAtCommitted(self.group_id or group_id, self.otherwise)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the group's offsets, if the topics hold them."""
        wanted = set(places)
        known = {at: offset for at, offset in admin.committed_offsets(self.group_id).items() if at in wanted}
        return _held(admin, places, known, self.otherwise, f"the group '{self.group_id}' stands at")


def first_at_least_as_late(
    timestamps_ms: Mapping[Place, int],
    offsets_at: Callable[[Mapping[Place, int]], Mapping[Place, int | None]],
    end_offsets: Callable[[Iterable[Place]], Mapping[Place, int]],
) -> dict[Place, int]:
    """Return the offset of each partition's first record that is at least as late, or else its end.

    Kafka has no request for both. The topics move on between two: so the end of a partition without such a
    record is one at which there was none yet, and every such record that comes lies at it or behind it.
    """
    # This order matters: a record that comes in between is found, and not taken for the end.
    ends = end_offsets(timestamps_ms)
    found = offsets_at(timestamps_ms)
    return {place: ends[place] if at is None else at for place, at in found.items()}


def start_offsets(
    start: StartingOffsets | KafkaStart, admin: KafkaAdmin, places: Sequence[Place]
) -> dict[Place, int]:
    """Return where each partition begins now.

    Raises
    ------
    ConfigError
        Records from there on are gone, or a partition is none of the source.
    """
    return start.offsets(admin, places) if isinstance(start, KafkaStart) else _ends(admin, places, start)


def checked_start(start: Any, group_id: str) -> StartingOffsets | KafkaStart:
    """Return what a user gave as `starting_offsets`, or raise ConfigError."""
    what_to_do = (
        "give StartingOffsets.EARLIEST or LATEST, StartAtTimestamp(...), StartAtOffsets(...) "
        "or StartAtCommitted(...)"
    )
    if isinstance(start, KafkaStart):
        if start.needs_group and not group_id:
            raise ConfigError(
                "the source begins at the offsets of a consumer group, and no group is named",
                what_to_do='give the source a group_id, or name one: StartAtCommitted("orders-consumers")',
            )
        return start.of_group(group_id)
    try:
        return StartingOffsets(start)
    except ValueError:
        raise unusable(
            "starting_offsets", start, wanted="a place to begin at", what_to_do=what_to_do
        ) from None


def _ends(admin: KafkaAdmin, places: Iterable[Place], which: StartingOffsets) -> dict[Place, int]:
    return admin.beginning_offsets(places) if which is StartingOffsets.EARLIEST else admin.end_offsets(places)


def _held(
    admin: KafkaAdmin,
    places: Sequence[Place],
    given: Mapping[Place, int],
    otherwise: StartingOffsets,
    who: str,
) -> dict[Place, int]:
    """Return the offsets of all partitions, or raise ConfigError if one of the given ones is not there."""
    first, last = admin.beginning_offsets(given), admin.end_offsets(given)
    for (topic, partition), offset in sorted(given.items()):
        place = topic, partition
        if not first[place] <= offset <= last[place]:
            raise ConfigError(
                f"{who} the offset {offset} of {topic}-{partition}, "
                f"which holds {first[place]} to {last[place]}",
                why="records from there on are gone, or have not come yet",
                what_to_do="begin at an offset that is there, or at StartingOffsets.EARLIEST",
                topic=topic,
            )
    return {**_ends(admin, [place for place in places if place not in given], otherwise), **given}
