"""A second driver that waits until the owner of the job has ended."""

from __future__ import annotations

import logging
import threading

from flinkish_spark.errors import OwnedElsewhereError
from flinkish_spark.runtime.engine import OwnerLock
from flinkish_spark.runtime.settings import JobSettings, Standby

LOG = logging.getLogger(__name__)


def wait_for_lock(lock: OwnerLock, settings: JobSettings, cancelled: threading.Event) -> None:
    """Take the lock; a standby waits for it as long as its owner lives.

    Raises
    ------
    OwnedElsewhereError
        Somebody else has it, and the job is not to stand by, or was cancelled.
    """
    while True:
        try:
            lock.acquire()
            return
        except OwnedElsewhereError as error:
            if settings.standby is not Standby.WAIT or cancelled.is_set():
                raise
            LOG.info("standing by: %s", error)
            settings.clock.wait(cancelled, settings.standby_poll_ms)
