"""A recovery that leaves nothing to others: the log always fits, and what is lost ends the job."""

from __future__ import annotations

from typing import NoReturn

from flinkish_spark.core.errors import CommittableLostError
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import Lineage


class NoReseeding:
    def is_wanted(self, log_began_in: Lineage) -> bool:
        return False

    def export(self, decision: Decision | None, lineage: Lineage) -> None:
        raise AssertionError("nobody wants it")


class NoReplaying:
    def replay(self, decision: Decision, lost: CommittableLostError, *_: object) -> NoReturn:
        raise lost
