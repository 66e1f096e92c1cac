"""Writing savepoints of confirmed checkpoints, while the job goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flinkish_spark.protocol.decisions import Decision
from flinkish_spark.protocol.ids import CheckpointId

LOG = logging.getLogger(__name__)


class SavepointExports:
    """The savepoints that are being written; each in a thread of its own.

    Parameters
    ----------
    write
        Exports a confirmed checkpoint to a target.
    """

    def __init__(self, write: Callable[[Decision, str], None]) -> None:
        self._write = write
        self._running: frozenset[CheckpointId] = frozenset()
        self._lock = threading.Lock()

    @property
    def running(self) -> frozenset[CheckpointId]:
        """Checkpoints that are read now: nothing they need may be deleted."""
        return self._running

    def announce(self, checkpoint: CheckpointId) -> None:
        """Protect a checkpoint until its export has ended; called before that begins."""
        with self._lock:
            self._running |= {checkpoint}

    def write(self, decision: Decision, target: str) -> str:
        """Write a savepoint; return why it failed, empty if it is there.

        Whatever goes wrong is the savepoint's: the checkpoint is complete and the job goes on.
        """
        try:
            self._write(decision, target)
        except Exception as error:
            LOG.error("the savepoint of checkpoint %s failed: %s", decision.checkpoint, error)
            return str(error) or type(error).__name__
        finally:
            with self._lock:
                self._running -= {decision.checkpoint}
        return ""
