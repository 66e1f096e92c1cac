"""In which order the processes of a test run take its files: the longest first, so that they end together.

`--dist loadfile` of pytest-xdist gives each process the next file when it is through with its own. How long
each file takes is in `costs.json`, in seconds; `pytest --write-costs` keeps what a run has measured. An old
figure, or none, costs some seconds of waiting at the end of a run and nothing else.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "costs.json"
#: Of a file that nobody has measured yet.
_UNKNOWN_S = 15.0


def longest_first(items: list[pytest.Item]) -> None:
    """Order tests by the costs of their files; those of a file stay together."""
    costs = _read()
    found = {path: costs.get(_name(path), _UNKNOWN_S) for path in {item.path for item in items}}
    items.sort(key=lambda item: (-found[item.path], item.path))


class Measured:
    """Adds up how long the tests of each file take."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._costs: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._costs[_name(self._root / report.nodeid.partition("::")[0])] += report.duration

    def pytest_sessionfinish(self) -> None:
        merged = {**_read(), **{name: round(seconds, 1) for name, seconds in self._costs.items()}}
        FILE.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _read() -> dict[str, float]:
    found: dict[str, float] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def _name(path: Path) -> str:
    return path.resolve().relative_to(FILE.parents[1]).as_posix()
