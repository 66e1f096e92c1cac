"""Whether the input that a job still needs is there, and is still the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flinkish_spark.clock import SystemClock
from flinkish_spark.errors import InputLostError
from flinkish_spark.kafka import KafkaAdmin
from flinkish_spark.kafka._pace import seen_to_stay

if TYPE_CHECKING:
    from flinkish_spark.job_dir import JobDir
    from flinkish_spark.runtime.spark_log import LoggedOffsets

_CLOCK = SystemClock()


class InputChecks:
    """Compares what the brokers have with what a job recorded and has read.

    Parameters
    ----------
    admin
        Belongs to the thread that asks.
    topics
        Of the source.
    """

    def __init__(self, admin: KafkaAdmin, topics: Sequence[str]) -> None:
        self._admin, self._topics = admin, tuple(topics)

    def replaced(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> InputLostError | None:
        """Return the error of a topic that is gone or another one than at the job's first start."""
        found = self._admin.topics(self._topics)
        for topic in self._topics:
            if topic not in found:
                return InputLostError(
                    f"the input topic '{topic}' was deleted" + _position_text(position, topic),
                    why="the job has not read all of it, or cannot know that it has",
                    what_to_do="restore the topic, or start a new job with a new job_dir",
                    topic=topic,
                )
        for topic in self._topics:
            now = {"topic_id": found[topic].topic_id or ""}
            if job_dir.recorded_once(f"topic-{uid}-{topic}", now) != now:
                return InputLostError(
                    f"the input topic '{topic}' was deleted and created again"
                    + _position_text(position, topic),
                    why="its id changed, so the offsets of the checkpoint mean other records",
                    what_to_do="start a new job with a new job_dir, or restore the old topic",
                    topic=topic,
                )
        return None

    def gone(self, uid: str, position: LoggedOffsets | None) -> InputLostError | None:
        """Return the error of records that the job has not read and that no longer exist."""
        gone = self._missing(position)
        if not gone:
            return None
        return InputLostError(
            f"input of source '{uid}' is gone: missing are the offsets {'; '.join(gone)}",
            why="Kafka's retention removed records that the job had not read, or a log was truncated",
            what_to_do="raise retention.ms; start a new job_dir to go on without these records",
            uid=uid,
            missing=gone,
        )

    def _missing(self, position: LoggedOffsets | None) -> tuple[str, ...]:
        """Return the ranges that the job needs and Kafka no longer has, as text."""
        if position is None:
            return ()
        wanted = {
            (t, p): o for t, ps in position.kafka(frozenset(self._topics)).items() for p, o in ps.items()
        }
        try:
            first, last = self._admin.beginning_offsets(wanted), self._admin.end_offsets(wanted)
        except InputLostError as error:
            return (error.why or error.what,)
        gone = [f"{t}-{p} from {o} to {first[t, p] - 1}" for (t, p), o in wanted.items() if o < first[t, p]]
        gone += [
            f"{t}-{p} from {last[t, p]} to {o - 1}, which the job had read"
            for (t, p), o in wanted.items()
            if o > last[t, p]
        ]
        return tuple(sorted(gone))


def raise_if_it_stays(loss: Callable[[], InputLostError | None]) -> None:
    """Raise what `loss` finds if it finds it again and again."""
    error = seen_to_stay(loss, lambda found: found is not None, _CLOCK)
    if error is not None:
        raise error


def _position_text(position: LoggedOffsets | None, topic: str) -> str:
    """Return from where on the job still needed `topic`."""
    if position is None:
        return ""
    offsets = position.kafka(frozenset({topic})).get(topic, {})
    places = "; ".join(f"{topic}-{p} from {o} on" for p, o in sorted(offsets.items()))
    return f": missing are the offsets {places}" if places else ""
