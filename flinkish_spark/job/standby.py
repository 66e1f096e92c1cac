"""A second driver that waits until the owner of the job has ended."""

from __future__ import annotations

import enum
import logging
import threading

from flinkish_spark.checkpoint.ownership import LivenessUnknown
from flinkish_spark.checkpoint.staging import OwnerLock
from flinkish_spark.core.errors import OwnedElsewhereError
from flinkish_spark.core.watchdog import note_failure
from flinkish_spark.job.engine import JobSettings, Standby

LOG = logging.getLogger(__name__)


class LockWait(enum.Enum):
    TAKEN = "TAKEN"
    #: This driver was stopped while it waited; the job continues at its owner.
    GIVEN_UP = "GIVEN_UP"


def wait_for_lock(lock: OwnerLock, settings: JobSettings, end_wanted: threading.Event) -> LockWait:
    """Take the lock; a standby waits until the owner's process has ended."""
    # A stopped standby must not take the job over later.
    waits = settings.standby is Standby.WAIT
    while True:
        if waits and end_wanted.is_set():
            return LockWait.GIVEN_UP
        try:
            lock.acquire()
            return LockWait.TAKEN
        except LivenessUnknown as error:
            LOG.info("before the start: %s", error)
            note_failure(str(error))
            waits = True
            settings.clock.wait(end_wanted, settings.standby_poll_ms)
        except OwnedElsewhereError as error:
            if settings.standby is not Standby.WAIT:
                raise
            LOG.info("standing by: %s", error)
            note_failure(str(error))
            settings.clock.wait(end_wanted, settings.standby_poll_ms)
