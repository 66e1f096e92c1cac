"""State of savepoints and checkpoints outside of a job: read, create and edit it. See ``docs/state.md``.

The whole public API for it; `read_state` is in :mod:`flinkish_spark`, too.
"""

from flinkish_spark.savepoints.bootstrap import KeyedRows, KeyedStateBootstrapFunction, key_by
from flinkish_spark.savepoints.files import BootstrapError, CheckpointNotRetainedError
from flinkish_spark.savepoints.reader import (
    read_broadcast_state,
    read_list_state,
    read_native_state,
    read_state,
    read_timers,
)
from flinkish_spark.savepoints.writer import SavepointWriter

#: Needed for suggestions on misspelt imports, as in `sources`.
__path__: list[str] = []

__all__ = [
    "BootstrapError",
    "CheckpointNotRetainedError",
    "KeyedRows",
    "KeyedStateBootstrapFunction",
    "SavepointWriter",
    "key_by",
    "read_broadcast_state",
    "read_list_state",
    "read_native_state",
    "read_state",
    "read_timers",
]
