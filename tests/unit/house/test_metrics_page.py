"""The examples of docs/metrics.md do what the page says."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from flinkish_spark.testing import ProgramHarness

PAGE = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"


def example(word: str) -> dict[str, Any]:
    """Run the block of code that has a word in it, and return its names."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (block,) = [one for one in blocks if word in one]
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_the_function_with_metrics_runs() -> None:
    parse = example("class Parse")["Parse"]

    class Lines(parse):  # type: ignore[misc]
        def flat_map(self, row: Any) -> Any:
            yield from super().flat_map(row.line)
            assert self.broken.get_count() in (0, 1)

    harness = ProgramHarness(lambda lines: lines.flat_map(Lines(), output="n LONG"), "line STRING")
    harness.push_all([(("12",), 0), (("x",), 1), (("7",), 2)])
    assert [row.n for row in harness.take().rows] == [12, 7]


def test_the_handler_writes_json() -> None:
    handler = example("JsonFormatter")["handler"]
    logging.getLogger("flinkish_spark").removeHandler(handler)
    record = logging.LogRecord("flinkish_spark.job", logging.INFO, "x.py", 1, "restarted", (), None)
    assert handler.format(record).startswith('{"time": ')


def test_the_board_is_written_by_the_command() -> None:
    (command,) = re.findall(r'python -c "(.*)" > board.json', PAGE.read_text(encoding="utf-8"))
    lines: list[str] = []
    exec(command, {"print": lines.append})
    assert '"schemaVersion"' in lines[0]
