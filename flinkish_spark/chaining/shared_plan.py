"""One plan for all scans of one source.

Spark scans a source again for every branch of the plan that reads it, and asks each scan for its
offset apart, in a process of its own. Scans of a chained source must end every micro-batch at the
same place, or a checkpoint would be at the cut for one branch and elsewhere for another. All scans
begin at the same offset, and Spark asks each of them once per round. So whoever is asked first in a
round plans, and the others return what was planned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flinkish_spark.errors import InternalError

Offset = dict[str, Any]


class SharedPlan:
    """The rounds of one start of a query; each scan has one of these, made when the query starts.

    Parameters
    ----------
    path
        A file that all scans of one start of the query see, and no other start. Not durable: what
        counts is the offset that Spark logs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._round = 0

    def agreed(self, start: Offset, plan: Callable[[], Offset]) -> Offset:
        """Return the offset of this round, planning it if no other scan has.

        Raises
        ------
        InternalError
            The scans are not at the same place; the query has to be started again.
        """
        self._round += 1
        known = self._read()
        is_planned = known is not None and known["round"] == self._round and known["start"] == start
        if known is not None and is_planned:
            end: Offset = known["end"]
            return end
        if known is not None and known["round"] >= self._round:
            raise InternalError(
                "two scans of a chained source are not at the same place",
                why=f"one is in round {known['round']}, another in round {self._round}",
            )
        end = plan()
        self._write({"round": self._round, "start": start, "end": end})
        return end

    def _read(self) -> dict[str, Any] | None:
        try:
            known: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return known

    def _write(self, content: dict[str, Any]) -> None:
        # Where the job began with a savepoint nobody else may have made the folder yet.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        os.replace(temporary, self._path)
