"""The control source: a streaming DataSource whose offset *is* the control state (DESIGN 4).

The coordinator raises the checkpoint id in a small file; Spark asks this source for its latest
offset, writes it to the offset log, and only then runs the micro-batch that carries the barrier.
So a micro-batch that is run again carries the same barrier, and an idle stream still gets a batch.

Everything here but :class:`ControlFile` runs in Python processes of Spark's, never in the user's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from flinkish_spark.chaining.status import AlignmentStatus, read_status
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from flinkish_spark.protocol.purpose import CheckpointPurpose
from flinkish_spark.runtime.spark_log import OFFSET_KEY

FORMAT_NAME = "flinkish-control"
_SCHEMA = "checkpoint BIGINT"
#: Names of the files of one start: the control file and what lies beside it.
_OF_A_START = re.compile(r"(\d+)(-\d+)?\.")


class ControlFile:
    """How the trigger reaches the source: a file that is replaced atomically.

    Not durable on purpose: what counts is the offset that Spark logs. After a crash the next
    coordinator triggers anew with a higher id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._on_offer: CheckpointId | None = None

    @classmethod
    def of_start(cls, folder: Path, epoch: OwnerEpoch, start: int) -> ControlFile:
        """Return the file of one start of the query, and delete what other starts left in `folder`.

        An id that was offered before may be sealed with ABORT, and what scans agreed on before means
        nothing now. The names are new for every start: a Python process of Spark's may outlive the
        query that it belonged to, and then reads and writes beside the new query's files.

        Parameters
        ----------
        folder
            Of the job; folders in it are left alone.
        start
            Which start of the query it is under this epoch; no two have one number.
        """
        # Offers first. What a crash leaves is deleted by the next start, and until then has no reader.
        for left in sorted(folder.glob("*"), key=lambda path: path.suffix != ".json"):
            owner = _OF_A_START.match(left.name)
            # A newer owner's files stay: this one may have been deposed and not know it yet.
            if owner is not None and int(owner[1]) <= int(epoch) and left.is_file():
                left.unlink(missing_ok=True)
        return cls(folder / f"{epoch}-{start}.json")

    def offer(
        self, checkpoint: CheckpointId, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC
    ) -> None:
        """Let the next micro-batch carry the barrier of `checkpoint`; a chained source, the next cut."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        content = {"checkpoint": int(checkpoint), "purpose": purpose.value}
        temporary.write_text(json.dumps(content), encoding="utf-8")
        os.replace(temporary, self.path)
        self._on_offer = checkpoint

    def withdraw(self, checkpoint: CheckpointId) -> bool:
        """Take an offer back, so that no source draws an id that is dead.

        Returns
        -------
        bool
            Whether it was on offer. It may have been drawn all the same.
        """
        if self._on_offer != checkpoint:
            return False
        self.path.unlink(missing_ok=True)
        self._on_offer = None
        return True

    def source_status(self) -> AlignmentStatus | None:
        """Return where the chained source stands; None if the job has none, or it has not begun."""
        return read_status(str(self.path))


class _BarrierPartition(InputPartition):
    def __init__(self, checkpoint: int) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint


class ControlReader(DataSourceStreamReader):
    """Reads the control file; an id between two offsets that was skipped gets no barrier."""

    def __init__(self, path: str) -> None:
        self._path = path

    def initialOffset(self) -> dict[str, Any]:
        """Return the state before the first checkpoint."""
        return {OFFSET_KEY: 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        """Return the offered checkpoint, or `start` while nothing newer is offered."""
        try:
            offered = int(json.loads(Path(self._path).read_text(encoding="utf-8"))["checkpoint"])
        except FileNotFoundError:
            return start
        return {OFFSET_KEY: max(int(start[OFFSET_KEY]), offered)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return one partition if the checkpoint rose; only the newest id gets a barrier."""
        if int(end[OFFSET_KEY]) > int(start[OFFSET_KEY]):
            return [_BarrierPartition(int(end[OFFSET_KEY]))]
        return []

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        """Yield the barrier."""
        assert isinstance(partition, _BarrierPartition)
        yield (partition.checkpoint,)


class ControlSource(DataSource):
    """Registered with the session by the environment; not for users."""

    @classmethod
    def name(cls) -> str:
        """Return the format name."""
        return FORMAT_NAME

    def schema(self) -> str:
        """Return the one column."""
        return _SCHEMA

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        """Return the reader of the file named by the option `path`."""
        return ControlReader(self.options["path"])
