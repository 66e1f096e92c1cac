"""A change that Spark's log cannot follow: the next log begins with what the last checkpoint left."""

from __future__ import annotations

import json
from dataclasses import dataclass

from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.core.errors import CorruptObjectError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import ObjectMissing
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import Lineage
from tests.simulation.spark_files import BEGINNINGS, BatchOffsets, Counts, parse_state, state_key


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a log of Spark's begins with.

    Parameters
    ----------
    layout
        Stands for the number of shuffle partitions: a log keeps the one that it began with.
    ends
        Where each input partition was read up to.
    counts
        The operator's state.
    """

    layout: int
    ends: dict[int, int]
    counts: Counts

    def data(self) -> bytes:
        """Return the stored form."""
        body = {
            "layout": self.layout,
            "ends": sorted(self.ends.items()),
            "counts": sorted(self.counts.items()),
        }
        return json.dumps(body).encode()

    @classmethod
    def parse(cls, data: bytes) -> Beginning:
        """Read the stored form."""
        body = json.loads(data)
        return cls(body["layout"], dict(body["ends"]), dict(body["counts"]))


class SimReseeding:
    """A :class:`~flinkish_spark.job.recovery.Reseeding` of one driver.

    Parameters
    ----------
    job_dir
        As the driver reaches it.
    layout
        The one that the driver was started with.
    """

    def __init__(self, job_dir: JobDir, log: SparkLog, layout: int) -> None:
        self._job_dir, self._store, self._log, self._layout = job_dir, job_dir.store, log, layout

    def is_wanted(self, log_began_in: Lineage) -> bool:
        """Whether the log has another layout than the driver wants."""
        return self.beginning(log_began_in).layout != self._layout

    def export(self, decision: Decision | None, lineage: Lineage) -> None:
        """Write what the log that begins in `lineage` begins with."""
        if decision is None:
            before = self.beginning(self._job_dir.history().log_began_in)
            beginning = Beginning(self._layout, before.ends, before.counts)
        else:
            name = state_key(decision.commits_text, int(decision.batch))
            try:
                counts = parse_state(self._store.read(f"{self._log.folder}/state/{name}"), self._store)
            except ObjectMissing:
                raise CorruptObjectError(f"the simulated state {name} is gone") from None
            ends = dict(BatchOffsets.parse(decision.offsets_text).ends)
            beginning = Beginning(self._layout, ends, counts)
        self._store.put(f"{BEGINNINGS}/{lineage}", beginning.data())

    def record(self, beginning: Beginning) -> None:
        """Note what the very first log begins with, at the first start."""
        self._store.create_if_absent(f"{BEGINNINGS}/0", beginning.data())

    def beginning(self, log_began_in: Lineage) -> Beginning:
        """Return what the log of a lineage began with."""
        return Beginning.parse(self._store.read(f"{BEGINNINGS}/{log_began_in}"))
