"""What a recovery leaves to others: beginning Spark's checkpoint anew, and staging lost data again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from flinkish_spark.errors import CommittableLostError
from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import Lineage
from flinkish_spark.protocol.records import Committable


class Reseeding(Protocol):
    """Begins Spark's checkpoint anew from exported state, for a change that it cannot follow."""

    def is_wanted(self, log_began_in: Lineage) -> bool:
        """Whether the log that began in that lineage does not fit the job any more.

        False once a log that fits has begun, or the recovery would not end.
        """

    def export(self, decision: Decision | None, lineage: Lineage) -> None:
        """Write the state of a decided checkpoint where the log that begins in `lineage` finds it.

        Called with Spark not running, possibly again after a crash. `decision` is None if nothing
        was decided in the present log: then the new one begins as that one did.
        """


class NoReseeding:
    """A job whose log always fits."""

    def is_wanted(self, log_began_in: Lineage) -> bool:
        """Return False."""
        return False

    def export(self, decision: Decision | None, lineage: Lineage) -> None:
        """Do nothing."""


NO_RESEEDING = NoReseeding()


class Replaying(Protocol):
    """Stages again what a decided checkpoint has lost."""

    def replay(
        self,
        decision: Decision,
        lost: CommittableLostError,
        abort: Callable[[str, Sequence[Committable]], None],
        patiently: Callable[[Callable[[], str]], str],
    ) -> None:
        """See :meth:`flinkish_spark.runtime.replaying.Replayer.replay`."""


class NoReplaying:
    """Stages nothing again: what is lost ends the job."""

    def replay(
        self,
        decision: Decision,
        lost: CommittableLostError,
        abort: Callable[[str, Sequence[Committable]], None],
        patiently: Callable[[Callable[[], str]], str],
    ) -> None:
        """Raise `lost`."""
        raise lost


NO_REPLAYING = NoReplaying()
