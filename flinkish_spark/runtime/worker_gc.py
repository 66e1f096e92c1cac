"""Keeps the pauses between the tasks of a Python worker short.

PySpark's daemon collects garbage after every task. A worker that has pandas, pyarrow and a Kafka
client loaded has hundreds of thousands of objects, and each of these collections looks at all of
them: 50 ms of CPU for a task that may have taken 5. Modules do not become garbage, so they are
taken out of what is looked at.
"""

from __future__ import annotations

import gc
import os

#: The process in which it was done; a fork has to do it for itself.
_frozen_in: int | None = None


def freeze_modules() -> None:
    """Take what is loaded by now out of garbage collection; does it once in a process.

    Called by every task of ours when its imports are done. What is alive then is still freed when
    nothing refers to it; only cycles among it would stay.
    """
    global _frozen_in
    if _frozen_in != os.getpid():
        gc.collect()
        gc.freeze()
        _frozen_in = os.getpid()
