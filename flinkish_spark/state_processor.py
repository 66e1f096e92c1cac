"""State from outside of a job: read it, make it, edit it. See ``docs/state.md``.

Public, and all that is public of it; `read_state` is in :mod:`flinkish_spark`, too.
"""

from flinkish_spark.savepoints.bootstrap import KeyedRows, KeyedStateBootstrapFunction, key_by
from flinkish_spark.savepoints.files import BootstrapError, CheckpointNotRetainedError
from flinkish_spark.savepoints.reader import read_broadcast_state, read_list_state, read_state, read_timers
from flinkish_spark.savepoints.writer import SavepointWriter

#: As in `sources`: a misspelt import from here is looked for.
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
    "read_state",
    "read_timers",
]
