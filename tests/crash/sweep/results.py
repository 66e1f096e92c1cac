"""What a sweep has found so far: per sink a file, per run a line of JSON. The next start goes on from it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.rig import ROOT
from tests.crash.sweep.points import Call, Fault, Point, Run, trace_from_json, trace_to_json
from tests.crash.sweep.subject import Verdict

#: What a run's result depends on.
_SOURCES = ("flinkish_spark", "jvm-shim/src", "tests/crash/sweep", "demo")


def revision() -> str:
    """Return what tells this code from other code: the commit, marked if there are changes beside it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("log", "-1", "--format=%h", "--", *_SOURCES) + (
        "+" if git("status", "--porcelain", "--", *_SOURCES) else ""
    )


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run."""

    run: Run
    is_met: bool
    verdict: Verdict
    seconds: float = 0.0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "point": str(self.run.point),
            "fault": self.run.fault.value,
            "met": self.is_met,
            "lost": self.verdict.lost,
            "duplicated": self.verdict.duplicated,
            "partial": self.verdict.partial,
            "stuck": self.verdict.stuck,
            "detail": self.verdict.detail,
            "seconds": round(self.seconds, 1),
            "note": self.note,
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Result:
        run = Run(Point.parse(line["point"]), Fault(line["fault"]))
        verdict = Verdict(*(line[name] for name in ("lost", "duplicated", "partial", "stuck", "detail")))
        return cls(run, line["met"], verdict, line["seconds"], line["note"])


class Results:
    """The file of one sink.

    Parameters
    ----------
    revision
        Lines of another revision do not count; they stay in the file.
    """

    def __init__(self, file: Path, revision: str) -> None:
        self._file, self._revision = file, revision
        file.parent.mkdir(parents=True, exist_ok=True)
        # A last line without its end was cut off by a kill of this program.
        old = file.read_bytes() if file.exists() else b""
        file.write_bytes(old[: old.rfind(b"\n") + 1])

    def _lines(self) -> Iterator[dict[str, Any]]:
        for text in self._file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if line["revision"] == self._revision:
                yield line

    def _append(self, **line: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"revision": self._revision, **line}) + "\n")

    @property
    def trace(self) -> list[Call] | None:
        """The calls of one checkpoint, if they were recorded."""
        found = [line["trace"] for line in self._lines() if "trace" in line]
        return trace_from_json(found[-1]) if found else None

    def add_trace(self, calls: list[Call]) -> None:
        self._append(trace=trace_to_json(calls))

    def add(self, result: Result) -> None:
        self._append(**result.to_json())

    def all(self) -> dict[Run, Result]:
        """Return the newest result of each run."""
        found = [Result.from_json(line) for line in self._lines() if "point" in line]
        return {result.run: result for result in found}

    def is_done(self, run: Run) -> bool:
        """Whether a run need not be done again; one that did not meet its point may meet it next time."""
        result = self.all().get(run)
        return result is not None and result.is_met
