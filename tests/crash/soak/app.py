"""The crash tests' job, for a process that is told in its life where to die.

Takes the arguments of `demo/app.py` and the variables of `tests/crash/app.py`. When a file appears at the
path in FLINKISH_TRIGGER, the process kills itself the next time that it comes to the kill point in the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from demo.app import build, parse_args, session
from flinkish_spark.core.steps import Step
from flinkish_spark.planning import keyed as keyed_plan
from flinkish_spark.testing.crash_points import KillAt, KillPoint, kill_process
from tests.crash.app import SMALL_BASES, break_as_told

TRIGGER_VARIABLE = "FLINKISH_TRIGGER"


class Trigger:
    """An observer that is loaded by a file, once; see KillAt."""

    def __init__(self, path: Path, kill: Callable[[], None] = kill_process) -> None:
        self._path, self._kill = path, kill
        self._loaded: KillAt | None = None

    def on_step_start(self, step: Step, subject: str) -> None:
        if loaded := self._load():
            loaded.on_step_start(step, subject)

    def on_step_end(self, step: Step, subject: str) -> None:
        if loaded := self._load():
            loaded.on_step_end(step, subject)

    def _load(self) -> KillAt | None:
        if self._loaded is None and self._path.exists():
            self._loaded = KillAt(KillPoint.parse(self._path.read_text(encoding="utf-8")), self._kill)
        return self._loaded


def main() -> None:
    keyed_plan.BASE_POLICY = SMALL_BASES
    break_as_told()
    args = parse_args()
    env = build(session(args), args)
    env.observe(Trigger(Path(os.environ[TRIGGER_VARIABLE])))
    env.execute()


if __name__ == "__main__":
    main()
