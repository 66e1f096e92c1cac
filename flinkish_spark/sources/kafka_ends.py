"""Where a Kafka source ends, if it does.

The end is fixed at the first start and kept in the job directory: records that come later are not read,
however often the job is started. Neither reader can be told to stop at an offset, so records from the end on
are left out of the stream; a partition has ended when its logged offset has reached the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pyspark.sql import functions as F

from flinkish_spark.arguments import instance_of, refused_as_config_errors, unusable
from flinkish_spark.errors import ConfigError, JobDirError
from flinkish_spark.job_dir import JobDir
from flinkish_spark.kafka import KafkaAdmin
from flinkish_spark.kafka.answers import Place
from flinkish_spark.protocol.codec import Form, Stored, stored
from flinkish_spark.protocol.limits import checked_whole
from flinkish_spark.sources.kafka_beginnings import first_at_least_as_late
from flinkish_spark.sources.kafka_starts import StartsAtOffsets
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flinkish_spark.chaining.upstream import UpstreamJob
    from flinkish_spark.runtime.spark_log import LoggedOffsets

#: Topic -> partition -> the first offset that is not read.
Ends = Mapping[str, Mapping[str, int]]


class KafkaEnd(Stored, ABC):
    """Says where each partition ends; one of the classes below."""

    @abstractmethod
    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the first offset of each partition that is not read. Called at the first start."""


@dataclass(frozen=True)
class EndAtLatest(KafkaEnd):
    """Reads what there is when the job starts for the first time."""

    TAG: ClassVar = ("end", "latest")

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return where the partitions end now, for readers of committed records."""
        return admin.end_offsets(places)


@dataclass(frozen=True)
class EndAtTimestamp(KafkaEnd):
    """Reads each partition up to its first record that is at least as late.

    Where there is none when the job starts for the first time, up to what there is then.

    Parameters
    ----------
    timestamp_ms
        Milliseconds since 1970.
    """

    TAG: ClassVar = ("end", "timestamp")

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
class EndAtOffsets(KafkaEnd):
    """Reads each partition up to an offset, which may lie in the future.

    Parameters
    ----------
    ends
        Topic -> partition -> the first offset that is not read. Every partition is named.

    Examples
    --------
    >>> EndAtOffsets({"orders": {0: 1_000, 1: 1_200}}).to_json()["offsets"]
    {'orders': {'0': 1000, '1': 1200}}
    """

    TAG: ClassVar = ("end", "offsets")

    ends: Mapping[str, Mapping[Annotated[int, Form(str, int)], int]] = field(
        default_factory=dict, metadata=stored("offsets")
    )

    def __post_init__(self) -> None:
        to_do = 'give a number for every partition: {"orders": {0: 1_000, 1: 1_200}}'
        if not isinstance(self.ends, Mapping):
            raise unusable("ends", self.ends, wanted="offsets by topic and partition", what_to_do=to_do)
        for topic, offsets in self.ends.items():
            if not isinstance(offsets, Mapping):
                raise unusable(f"ends[{topic!r}]", offsets, wanted="offsets by partition", what_to_do=to_do)
            with refused_as_config_errors(to_do):
                for partition, offset in offsets.items():
                    checked_whole("a partition", partition, least=0)
                    checked_whole(f"the end of {topic}-{partition}", offset, least=0)

    def offsets(self, admin: KafkaAdmin, places: Sequence[Place]) -> dict[Place, int]:
        """Return the offsets, if they are those of all partitions."""
        given = {
            (topic, partition): at for topic, ends in self.ends.items() for partition, at in ends.items()
        }
        different = sorted(set(given) ^ set(places))
        if different:
            topic, partition = different[0]
            raise ConfigError(
                f"the ends of the source do not fit its topics at partition {partition} of '{topic}'",
                why="an end is needed for every partition, and for no other",
                what_to_do="name all partitions of all topics in ending=EndAtOffsets(...)",
            )
        return given


class EndsAtOffsets(StartsAtOffsets):
    """A source of Kafka topics that may have an end."""

    topics: tuple[str, ...]
    ending: KafkaEnd | None

    @property
    def is_bounded(self) -> bool:
        """Whether it was given an end."""
        return self.ending is not None

    def has_ended(self, position: LoggedOffsets) -> bool:
        """Whether every partition was read up to its end."""
        ends, read = self._known_ends, self.offsets_in(position)
        return ends is not None and all(
            read.get(topic, {}).get(int(partition), -1) >= end
            for topic, partitions in ends.items()
            for partition, end in partitions.items()
        )

    def channels_in(self, position: LoggedOffsets) -> frozenset[int]:
        """Return the partitions that are not at their end: the others bring nothing any more."""
        ends, read = self._known_ends, self.offsets_in(position)
        if ends is None:
            return self.channels_of(read)
        return self.channels_of(
            {
                topic: [p for p, at in found.items() if at < ends.get(topic, {}).get(str(p), 0)]
                for topic, found in read.items()
            }
        )

    def check_end(self, admin: KafkaAdmin) -> None:
        """Raise ConfigError if the end does not fit the topics. Called before anything starts."""
        if self.ending is not None:
            self.ending.offsets(admin, self.places(admin))

    def fix_end(self, admin: KafkaAdmin, job_dir: JobDir) -> None:
        """Record the end at the first start. Called before each start of the query.

        Raises
        ------
        JobDirError
            The job began with another end.
        """
        if self.ending is None or self._known_ends is not None:
            return
        wanted, name = self.ending.to_json(), self.fact("end")
        recorded = job_dir.recorded(name)
        if recorded is None:
            offsets: dict[str, dict[str, int]] = {topic: {} for topic in self.topics}
            for (topic, partition), offset in self.ending.offsets(admin, self.places(admin)).items():
                offsets.setdefault(topic, {})[str(partition)] = offset
            recorded = job_dir.recorded_once(name, {"ending": wanted, "offsets": offsets})
        if recorded["ending"] != wanted:
            read = ", ".join(self.topics) or self.pattern
            raise JobDirError(
                f"the source of {read} has the end {recorded['ending']}, not {wanted}",
                why="the end is fixed at the first start",
                what_to_do="give that end again, or start a new job with a new job_dir",
            )
        self.__dict__["_ends"] = recorded["offsets"]

    def ends_in(self, control_path: str) -> Ends | None:
        """Return the ends as they were recorded; None without any, and before the first start."""
        if self.ending is None or self._known_ends is not None:
            return self._known_ends
        recorded = JobDir(LocalStore(Path(control_path).parent.parent)).recorded(self.fact("end"))
        return None if recorded is None else recorded["offsets"]

    @property
    def _known_ends(self) -> Ends | None:
        ends: Ends | None = self.__dict__.get("_ends")
        return ends

    def before_end(self, offsets: Mapping[str, Mapping[int, int]]) -> dict[str, dict[int, int]]:
        """Return offsets, not beyond the ends; topics and partitions that were added later are left out."""
        ends = self._known_ends
        if ends is None:
            return {topic: dict(found) for topic, found in offsets.items()}
        return {
            topic: {p: min(at, ends[topic][str(p)]) for p, at in found.items() if str(p) in ends[topic]}
            for topic, found in offsets.items()
            if topic in ends
        }


def checked_end(ending: KafkaEnd | None, aligned_with: UpstreamJob | None) -> KafkaEnd | None:
    """Return the end that a user gave a source, or raise ConfigError."""
    if ending is None:
        return None
    if aligned_with is not None:
        raise ConfigError(
            "a source with an end cannot be aligned with an upstream job",
            why="its last checkpoint would wait for a barrier of that job's, which may lie behind the end",
            what_to_do="leave out ending or aligned_with",
        )
    what_to_do = "give EndAtLatest(), EndAtOffsets({...}) or EndAtTimestamp(...), or leave it out"
    return instance_of("ending", ending, KafkaEnd, what_to_do=what_to_do)  # type: ignore[type-abstract]


def cut_at(raw: DataFrame, ends: Ends | None, is_barrier: Column | None = None) -> DataFrame:
    """Leave out the records of a raw stream from the ends on; a partition without an end has none."""
    if ends is None:
        return raw
    is_before = F.lit(False)
    for topic, partitions in ends.items():
        for partition, end in partitions.items():
            is_there = (F.col("topic") == topic) & (F.col("partition") == int(partition))
            is_before = is_before | (is_there & (F.col("offset") < end))
    return raw.where(is_before if is_barrier is None else is_barrier | is_before)
