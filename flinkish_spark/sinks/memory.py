"""A sink for tests: rows of completed checkpoints, in this process."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flinkish_spark.errors import ConfigError
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.sinks.base import Committer, SinkContext
from flinkish_spark.sinks.buffer import Applied, BufferedCommitter, BufferedRows, BufferedSink
from flinkish_spark.sinks.two_phase_rows import in_utc, records_of

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

#: Job, sink uid and checkpoint: a checkpoint that is committed again is known by it.
_Key = tuple[JobUuid, str, CheckpointId]


class _Rooms:
    """What the sinks of this process hold, by the name that the test gave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, dict[_Key, list[Row]]] = {}

    def put(self, name: str, key: _Key, rows: list[Row]) -> bool:
        """Keep the rows of a checkpoint; return False if they are there already."""
        with self._lock:
            room = self._rows.setdefault(name, {})
            return room.setdefault(key, rows) is rows

    def holds(self, name: str, key: _Key) -> bool:
        with self._lock:
            return key in self._rows.get(name, {})

    def all(self, name: str) -> dict[_Key, list[Row]]:
        with self._lock:
            return dict(self._rows.get(name, {}))

    def remove_behind(self, name: str, key: _Key) -> int:
        """Remove what a job's sink committed after a checkpoint; return how many checkpoints that were."""
        with self._lock:
            room = self._rows.get(name, {})
            gone = [one for one in room if one[:2] == key[:2] and one[2] > key[2]]
            for one in gone:
                del room[one]
            return len(gone)

    def clear(self, name: str) -> None:
        with self._lock:
            self._rows.pop(name, None)


_ROOMS = _Rooms()


@dataclass(frozen=True)
class MemorySink(BufferedSink):
    """Keeps the rows of completed checkpoints in this process, for tests.

    Each row is there once, also if a checkpoint is committed again, by this start of the job or another
    one in the same process. With the process the rows are gone: a job that goes on in a new one adds
    those of later checkpoints only.

    Parameters
    ----------
    name
        Whose rows :meth:`rows` returns. Sinks and jobs with the same name share them.

    Examples
    --------
    >>> MemorySink("totals").rows()
    []
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(
                f"the name of a MemorySink is {self.name!r}", what_to_do='give a text: MemorySink("totals")'
            )

    def rows(self) -> list[Row]:
        """Return the rows of all completed checkpoints, in order of checkpoint."""
        return [row for rows in self.by_checkpoint().values() for row in rows]

    def by_checkpoint(self) -> dict[int, list[Row]]:
        """Return the rows of each completed checkpoint that had any, in order."""
        found: dict[int, list[Row]] = {}
        for (_, _, checkpoint), rows in sorted(_ROOMS.all(self.name).items(), key=lambda one: one[0]):
            found.setdefault(int(checkpoint), []).extend(rows)
        return dict(sorted(found.items()))

    def clear(self) -> None:
        """Forget the rows of this name."""
        _ROOMS.clear(self.name)

    def create_committer(self, spark: SparkSession, context: SinkContext) -> Committer:
        """Return the committing half."""
        return _MemoryCommitter(self.name, context)


class _MemoryCommitter(BufferedCommitter):
    def __init__(self, name: str, context: SinkContext) -> None:
        super().__init__(context)
        self._name = name

    def _key(self, checkpoint: CheckpointId) -> _Key:
        return (self._context.job, self._context.uid, checkpoint)

    def apply(self, checkpoint: CheckpointId, rows: BufferedRows) -> CommitAnswer:
        """Keep the rows, unless they are there."""
        read = [row for batch in rows.batches() for row in records_of(in_utc(batch))]
        is_new = _ROOMS.put(self._name, self._key(checkpoint), read)
        return CommitAnswer(Outcome.COMMITTED if is_new else Outcome.ALREADY_COMMITTED)

    def has_applied(self, checkpoint: CheckpointId) -> Applied:
        """Say YES if the rows are here; another process may have had them."""
        return Applied.YES if _ROOMS.holds(self._name, self._key(checkpoint)) else Applied.UNKNOWN

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Forget what was committed after `target`."""
        count = _ROOMS.remove_behind(self._name, self._key(target))
        return CommitAnswer(Outcome.COMMITTED if count else Outcome.ALREADY_COMMITTED)
