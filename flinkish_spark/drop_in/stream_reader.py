"""The driver's side of the streaming source: which offsets the next micro-batch reads.

Lives in one Python process per query that Spark keeps on the driver. Spark logs what
:meth:`KafkaStreamReader.latestOffset` returns before it runs the micro-batch, so everything a
re-run must repeat is in that offset: the end of every partition and, inside an environment's job,
the checkpoint whose barriers the micro-batch carries.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
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
from flinkish_spark.drop_in.offset_plan import Place, Range
from flinkish_spark.drop_in.rows import KafkaPiece, read_piece
from flinkish_spark.drop_in.source_options import SourceOptions
from flinkish_spark.errors import FlinkishError, GraphError, InputLostError
from flinkish_spark.kafka import GroupCommit, KafkaAdmin
from flinkish_spark.kafka.positions import Positions
from flinkish_spark.protocol.alignment import announced_channel
from flinkish_spark.runtime.control_source import OFFSET_KEY

if TYPE_CHECKING:
    import pyarrow as pa

LOG = logging.getLogger(__name__)
#: Spark asks every 10 ms while there is nothing to read; the brokers are asked this often.
_ASK_EVERY_S = 0.025
#: How often partitions that were added, or topics that match a pattern, are looked for.
_LOOK_FOR_PARTITIONS_S = 5.0
#: Once a loss is seen it must be seen again: a broker that just started may not know its topics.
_LOSSES_BELIEVED, _LOSS_PAUSE_S = 4, 0.5


class KafkaStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source; see the module's head and `docs/drop-in.md`.

    Parameters
    ----------
    options
        Of the source.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._finder_or_none: OffsetFinder | None = None
        self._places: frozenset[Place] = frozenset()
        self._looked_at = self._asked_at = float("-inf")
        self._target: dict[Place, int] | None = None
        self._newest: dict[Place, int] = {}
        self._last_batch_at = time.monotonic()
        self._group_offsets: dict[Place, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A reader is sent to every task; there it needs its options only.
        return {"_options": self._options}

    @property
    def _finder(self) -> OffsetFinder:
        if self._finder_or_none is None:
            self._finder_or_none = OffsetFinder(Positions(self._options.connection), self._options)
        return self._finder_or_none

    # -- offsets --------------------------------------------------------------------------------
    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins."""
        return self._logged(self._finder.starting(), 0)

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return `maxOffsetsPerTrigger`."""
        most = self._options.max_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of the query: what is there now."""
        self._target = self._finder.latest(self._known_places())

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the topics, for the lag in Spark's progress."""
        return self._logged(self._newest, 0) if self._newest else None

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next micro-batch ends; `start` if there is nothing new.

        Raises
        ------
        InputLostError
            Records that the query has not read are gone, and failOnDataLoss is true.
        """
        begin, checkpoint = _parsed(start)
        # Spark asks for a new end only after the micro-batch before it is in commits/.
        self._commit_group(begin)
        offered = max(checkpoint, _offered(self._options.control_path))
        self._wait_a_little()
        end = self._confirmed_end(begin)
        self._newest = dict(end)
        if self._target is not None:
            end = {place: min(end[place], self._target.get(place, begin.get(place, 0))) for place in end}
            end = {place: offset for place, offset in end.items() if place in begin or place in self._target}
        begin = self._with_new(begin, end)
        if self._should_wait(begin, end):
            end = begin
        if isinstance(limit, ReadMaxRows):
            end = plan.limited(begin, end, limit.max_rows)
        if plan.available(begin, end):
            self._last_batch_at = time.monotonic()
        return self._logged(end, offered)

    def _known_places(self) -> frozenset[Place]:
        now = time.monotonic()
        if now - self._looked_at > _LOOK_FOR_PARTITIONS_S:
            self._places, self._looked_at = self._finder.places(), now
        return self._places

    def _wait_a_little(self) -> None:
        left = self._asked_at + _ASK_EVERY_S - time.monotonic()
        if left > 0:
            time.sleep(left)
        self._asked_at = time.monotonic()

    def _confirmed_end(self, begin: Mapping[Place, int]) -> dict[Place, int]:
        """Return the ends of all partitions, none before what was read already."""

        def look() -> tuple[dict[Place, int], list[str]]:
            try:
                end = self._finder.latest(self._known_places())
            except (GraphError, InputLostError) as error:
                # A topic or a partition of the last look does not exist any more.
                return {}, [str(error)]
            gone = [f"{t}-{p} from {o} on" for (t, p), o in sorted(begin.items()) if (t, p) not in end]
            back = [
                f"{t}-{p} from {end[t, p]} to {o - 1}, which were read"
                for (t, p), o in sorted(begin.items())
                if end.get((t, p), o) < o
            ]
            return end, gone + back

        end, losses = _if_it_stays(look, self._forget_places)
        if losses:
            self._report_loss("; ".join(losses))
        kept = {place: max(offset, begin.get(place, 0)) for place, offset in end.items()}
        # A partition that is gone stays in the offset, so that it is not read again if it comes back.
        return {**{place: offset for place, offset in begin.items() if place not in kept}, **kept}

    def _forget_places(self) -> None:
        self._looked_at = float("-inf")

    def _with_new(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> dict[Place, int]:
        """Return `begin` with the first offsets of partitions that were added since."""
        added = sorted(end.keys() - begin.keys())
        if not added:
            return dict(begin)
        first = self._finder.earliest(added)
        lost = [f"{t}-{p} from 0 to {o - 1}" for (t, p), o in sorted(first.items()) if o > 0]
        if lost:
            self._report_loss("; ".join(lost))
        return {**begin, **first}

    def _report_loss(self, ranges: str) -> None:
        if self._options.reader.fail_on_data_loss:
            raise InputLostError(
                f"input is gone: missing are the offsets {ranges}",
                why="Kafka's retention removed records that the query had not read, or a topic was "
                "deleted or created again",
                what_to_do="restore the topic, or set failOnDataLoss to false to go on without them",
            )
        LOG.warning("input is gone and failOnDataLoss is false: %s", ranges)

    def _should_wait(self, begin: Mapping[Place, int], end: Mapping[Place, int]) -> bool:
        least = self._options.min_per_trigger
        if least is None or self._target is not None:
            return False
        waited_ms = (time.monotonic() - self._last_batch_at) * 1000
        return plan.available(begin, end) < least and waited_ms < self._options.max_trigger_delay_ms

    def _logged(self, offsets: Mapping[Place, int], checkpoint: int) -> dict[str, Any]:
        control = {OFFSET_KEY: checkpoint} if self._options.control_path else {}
        return {**plan.to_json(offsets), **control}

    # -- reading --------------------------------------------------------------------------------
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the pieces of a micro-batch; with a barrier behind the last one of each partition."""
        (begin, before), (finish, checkpoint) = _parsed(start), _parsed(end)
        begin = self._with_new(begin, finish)
        whole = [Range(t, p, begin[t, p], max(begin[t, p], o)) for (t, p), o in sorted(finish.items())]
        carries_barrier = checkpoint > before
        if not carries_barrier:
            whole = [r for r in whole if r.size]
        options = self._options
        cut = plan.pieces(
            whole, min_partitions=options.min_partitions, max_per_partition=options.max_per_partition
        )
        channels = {(r.topic, r.partition): announced_channel(i, len(whole)) for i, r in enumerate(whole)}
        return [
            KafkaPiece(
                piece,
                checkpoint if carries_barrier and piece.is_last else 0,
                channels[piece.topic, piece.partition],
            )
            for piece in cut
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one piece, and its barrier. Called in a task."""
        assert isinstance(partition, KafkaPiece)
        return read_piece(self._options, partition)

    # -- the consumer group ---------------------------------------------------------------------
    def commit(self, end: dict[str, Any]) -> None:
        """Commit the group's offsets: Spark has finished everything before `end`."""
        self._commit_group(_parsed(end)[0])

    def _commit_group(self, offsets: Mapping[Place, int]) -> None:
        """Tell lag tools how far the query is; never stops it."""
        group = self._options.group_id
        if not group or offsets == self._group_offsets:
            return
        try:
            with KafkaAdmin(self._options.connection) as admin:
                answer = admin.commit_offsets(group, offsets)
            if answer is GroupCommit.ACTIVE_MEMBERS:
                LOG.warning("the group '%s' has active members, so its offsets cannot be stored", group)
            self._group_offsets = dict(offsets)
        except FlinkishError as error:
            LOG.warning("the offsets of group '%s' are stored with a later micro-batch: %s", group, error)


def _parsed(offset: Mapping[str, Any]) -> tuple[dict[Place, int], int]:
    topics = {topic: partitions for topic, partitions in offset.items() if topic != OFFSET_KEY}
    return plan.from_json(topics), int(offset.get(OFFSET_KEY, 0))


def _offered(control_path: str) -> int:
    """Return the checkpoint that the job's coordinator offers."""
    if not control_path:
        return 0
    try:
        return int(json.loads(Path(control_path).read_text(encoding="utf-8"))["checkpoint"])
    except FileNotFoundError:
        return 0


def _if_it_stays(
    look: Callable[[], tuple[dict[Place, int], list[str]]], forget: Callable[[], None]
) -> tuple[dict[Place, int], list[str]]:
    """Look again, and again, before a loss is believed."""
    for _ in range(_LOSSES_BELIEVED - 1):
        end, losses = look()
        if not losses:
            return end, losses
        time.sleep(_LOSS_PAUSE_S)
        forget()
    return look()
