"""The driver's side of the streaming source: which offsets the next micro-batch reads.

Lives in one Python process per query that Spark keeps on the driver. Spark logs what
:meth:`KafkaStreamReader.latestOffset` returns before it runs the micro-batch, so everything a
re-run must repeat is in that offset: the end of every partition and, inside an environment's job,
what its driver has said: the checkpoint whose barriers the micro-batch carries, and where time stands.

Spark does not log where the first micro-batch begins; it asks again after a crash, when the answer
may be another one. So the first micro-batch of a plain query is empty and ends where the query
begins, and an environment's job keeps its first offsets in its job directory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from flinkish_spark.drop_in import offset_plan as plan
from flinkish_spark.drop_in.finder import OffsetFinder
from flinkish_spark.drop_in.group_offsets import GroupOffsets
from flinkish_spark.drop_in.offset_plan import Range
from flinkish_spark.drop_in.rows import KafkaPiece, WakePiece, read_piece, read_wakes
from flinkish_spark.drop_in.source_options import SourceOptions
from flinkish_spark.drop_in.topic_watch import TopicWatch
from flinkish_spark.kafka.answers import Place
from flinkish_spark.kafka.channels import channel_of
from flinkish_spark.kafka.positions import Positions
from flinkish_spark.protocol.alignment import announced_channel
from flinkish_spark.protocol.control_offset import ControlOffset, TimeOffer
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.records import Barrier
from flinkish_spark.protocol.scans import OWN_KEYS
from flinkish_spark.protocol.watermark_alignment import NONE_HELD
from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.control_source import offered_by, read_control, wake_rows
from flinkish_spark.runtime.held_channels import read_held
from flinkish_spark.runtime.spark_log import OFFSET_KEY
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.sources.rates import Pace
from flinkish_spark.store import LocalStore

if TYPE_CHECKING:
    import pyarrow as pa

#: What a plain query goes by, and a job's before its driver has said anything.
NOTHING_SAID = ControlOffset()
#: In the offset that a plain query begins with, and in no offset that Spark logs.
START_KEY = "flinkish:start"
#: Spark asks every 10 ms while there is nothing to read; the brokers are asked this often.
_ASK_EVERY_S = 0.025


class KafkaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source; see the module's head and `docs/drop-in.md`.

    Parameters
    ----------
    options
        Of the source.
    finder
        Asks the brokers; None to connect as the options say.
    """

    def __init__(self, options: SourceOptions, finder: OffsetFinder | None = None) -> None:
        self._options = options
        self._finder = finder or OffsetFinder(Positions(options.connection), options)
        self._watch = TopicWatch(self._finder, options.reader.fail_on_data_loss)
        self._group = GroupOffsets(options)
        self._pace = Pace(options.pace, time.monotonic())
        self._target: dict[Place, int] | None = None
        self._newest: dict[Place, int] = {}
        self._asked_at = self._last_batch_at = float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        # A reader is sent to every task; there it needs its options only.
        return {"_options": self._options}

    # -- offsets --------------------------------------------------------------------------------
    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins; Spark may ask several times."""
        if not self._options.first_offsets:
            return {**self._logged(self._finder.starting(), NOTHING_SAID), START_KEY: True}
        return self._logged(plan.from_json(self._first()["offsets"]), NOTHING_SAID)

    def _first(self) -> dict[str, Any]:
        """Return where the job began, recording it at the first start.

        A rewind to before the first micro-batch must begin there, not where the topic ends by then.
        """
        store, key = LocalStore(Path(self._options.first_offsets)), self._first_offsets_key()
        objects = SealedObjects(store, str(store.root))
        if objects.optional(key, "first-offsets", dict) is None:
            first = {"offsets": plan.to_json(self._finder.starting())}
            store.create_if_absent(key, seal("first-offsets", first))
        return objects.read(key, "first-offsets", dict)

    def _first_offsets_key(self) -> str:
        # A job may have several sources; no two read one topic.
        digest = hashlib.sha256(repr(self._options.subscription).encode()).hexdigest()
        return f"first-offsets/{digest[:16]}.json"

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return `maxOffsetsPerTrigger`."""
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query: what is there now."""
        self._target = self._watch.ends({})

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the topics, for the lag in Spark's progress."""
        return self._logged(self._newest, NOTHING_SAID) if self._newest else None

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there is nothing new.

        Raises
        ------
        InputLostError
            Records that the query has not read are gone, and failOnDataLoss is true.
        """
        begin, checkpoint = parsed_offset(start)
        if START_KEY in start:
            return self._logged(begin, ControlOffset(checkpoint))
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._group.commit(begin)
        offered = ControlOffset.from_json(start).raised_to(self._offered())
        self._wait_a_little()
        self._newest = self._watch.ends(begin)
        end = self._capped(begin, self._newest)
        begin = self._watch.with_new(begin, end)
        begin = {place: min(begin[place], offset) for place, offset in end.items()}
        end = self._held_back(begin, end)
        if self._should_wait(begin, end):
            end = begin
        if isinstance(limit, ReadMaxRows):
            end = plan.limited(begin, end, limit.max_rows)
        end = self._paced(begin, end)
        if plan.available(begin, end):
            self._last_batch_at = time.monotonic()
        return self._logged(end, offered)

    def _wait_a_little(self) -> None:
        left = self._asked_at + _ASK_EVERY_S - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._asked_at = time.monotonic()

    def _capped(self, begin: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        """Return the ends, not beyond what availableNow fixed."""
        target = self._target
        if target is None:
            return dict(ends)
        return {
            place: max(begin.get(place, 0), min(end, target.get(place, 0)))
            for place, end in ends.items()
            if place in begin or place in target
        }

    def _held_back(self, begin: Mapping[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        """Return the ends, at the beginning where a partition is too far ahead of others in event time."""
        held = read_held(self._options.held_path, self._options.held_source)
        if held == NONE_HELD:
            return end
        wanted = self._options.subscription
        number = partial(channel_of, wanted.topics or sorted({topic for topic, _ in wanted.assigned}))
        return {place: begin[place] if held.holds(number(*place)) else at for place, at in end.items()}

    def _paced(self, begin: Mapping[Place, int], end: dict[Place, int]) -> dict[Place, int]:
        """Return the ends, not beyond what may be taken by now."""
        allowed = self._pace.allowance(time.monotonic())
        # A query that is to read what there is, and end, takes nothing new for the end.
        if allowed is None or self._target is not None:
            return end
        paced = plan.limited(begin, end, allowed) if allowed else dict(begin)
        self._pace.took(plan.available(begin, paced))
        return paced

    def _should_wait(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> bool:
        least = self._options.min_per_trigger
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_batch_at) * 1000
        return plan.available(begin, end) < least and waited_ms < self._options.max_trigger_delay_ms

    def _offered(self) -> ControlOffset:
        path = self._options.control_path
        return offered_by(read_control(path)) if path else NOTHING_SAID

    def _logged(self, offsets: Mapping[Place, int], control: ControlOffset) -> dict[str, Any]:
        said = control.to_json() if self._options.control_path else {}
        return {**plan.to_json(offsets), **said}

    # -- reading --------------------------------------------------------------------------------
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the pieces of a micro-batch; with a barrier behind the last one of each partition."""
        if START_KEY in start:
            return []
        (begin, before), (finish, checkpoint) = parsed_offset(start), parsed_offset(end)
        begin = self._watch.with_new(begin, finish)
        whole = [Range(t, p, min(begin[t, p], o), o) for (t, p), o in sorted(finish.items())]
        carries_barrier = checkpoint > before
        if not carries_barrier:
            whole = [r for r in whole if r.size]
        options = self._options
        cut = plan.pieces(
            whole, min_partitions=options.min_partitions, max_per_partition=options.max_per_partition
        )
        barriers = {
            (r.topic, r.partition): Barrier(CheckpointId(checkpoint), announced_channel(i, len(whole)))
            for i, r in enumerate(whole)
        }
        pieces: list[InputPartition] = [
            KafkaPiece(p, barriers[p.topic, p.partition] if carries_barrier and p.is_last else None)
            for p in cut
        ]
        wakes = list(wake_rows(TimeOffer.from_json(start), TimeOffer.from_json(end)))
        if carries_barrier and not whole:
            # No topic matches the pattern yet.
            wakes.append((int(C.Kind.BARRIER), checkpoint, announced_channel(0, 1), 0))
        return [*pieces, WakePiece(wakes)] if wakes else pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one piece, and its barrier. Called in a task."""
        if isinstance(partition, WakePiece):
            return read_wakes(self._options, partition)
        assert isinstance(partition, KafkaPiece)
        return read_piece(self._options, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Commit the group's offsets: Spark has finished everything before `end`."""
        self._group.commit(parsed_offset(end)[0])


def parsed_offset(offset: Mapping[str, Any]) -> tuple[dict[Place, int], int]:
    """Return positions and checkpoint of an offset, without what else is in it."""
    topics = {topic: value for topic, value in offset.items() if not topic.startswith(OWN_KEYS)}
    return plan.from_json(topics), int(offset.get(OFFSET_KEY, 0))
