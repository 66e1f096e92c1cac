"""The demo's job on another master, with tasks that fail at their first attempt.

FLINKISH_MASTER names the master; FLINKISH_FAILURES is a directory where each failure leaves a
file, so that a test can see that it happened, and FLINKISH_FAILURE_COUNT how many there are.
"""

from __future__ import annotations

import os
from pathlib import Path

from pyspark import TaskContext

from demo.app import RunningTotal, build, parse_args, session

_AFTER_ELEMENTS = 60


class FlakyTotal(RunningTotal):
    """Raises in the middle of a task, while its sink writers already write."""

    def __init__(self, folder, count):
        self.folder, self.count = folder, count

    def open(self, context):
        super().open(context)
        self.left = _AFTER_ELEMENTS if self._takes_a_failure() else -1

    def process_element(self, order, ctx):
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("this task fails at its first attempt")
        return super().process_element(order, ctx)

    def _takes_a_failure(self):
        context = TaskContext.get()
        # A plain remainder would always hit the same stage: every micro-batch has as many tasks.
        if context.attemptNumber() > 0 or (context.taskAttemptId() * 2654435761 >> 9) % 3:
            return False
        for number in range(self.count):
            try:
                os.close(os.open(Path(self.folder) / str(number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False


def main():
    args = parse_args()
    args.master = os.environ["FLINKISH_MASTER"]
    folder, count = os.environ["FLINKISH_FAILURES"], int(os.environ["FLINKISH_FAILURE_COUNT"])
    build(session(args), args, FlakyTotal(folder, count)).execute()


if __name__ == "__main__":
    main()
