"""The demo's job on another master, with tasks that fail at their first attempt.

FLINKISH_MASTER names the master; FLINKISH_FAILURES is a directory where each failure leaves a
file, so that a test can see that it happened, and FLINKISH_FAILURE_COUNT how many there are.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from demo.app import RunningTotal, build, parse_args, session

_AFTER_ELEMENTS = 60
#: Longer than Spark takes to repeat a task: the second attempt must not fail too.
_PAUSE_S = 4.0


class FlakyTotal(RunningTotal):
    """Raises in the middle of a task, while its sink writers already write."""

    def __init__(self, folder, count, after=_AFTER_ELEMENTS):
        self.folder, self.count, self.after = Path(folder), count, after
        self.seen = 0

    def process_element(self, order, ctx):
        self.seen += 1
        if self.seen % self.after == 0 and self._takes_a_failure():
            raise RuntimeError("this task fails at its first attempt")
        return super().process_element(order, ctx)

    def _takes_a_failure(self):
        done = [p.stat().st_mtime for p in self.folder.iterdir()]
        if len(done) >= self.count or (done and time.time() - max(done) < _PAUSE_S):
            return False
        try:
            os.close(os.open(self.folder / str(len(done)), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False  # the other worker was faster
        return True


def main():
    args = parse_args()
    args.master = os.environ["FLINKISH_MASTER"]
    folder, count = os.environ["FLINKISH_FAILURES"], int(os.environ["FLINKISH_FAILURE_COUNT"])
    build(session(args), args, FlakyTotal(folder, count)).execute()


if __name__ == "__main__":
    main()
