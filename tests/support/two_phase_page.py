"""The example of docs/two-phase-sinks.md, as it stands there."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "two-phase-sinks.md"


def example() -> str:
    """The text of the first code block."""
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


def sqlite_sink_class() -> Any:
    """The class that the text defines; as in a notebook, no module can be imported for it."""
    namespace: dict[str, Any] = {"__name__": "a_notebook"}
    exec(compile(example(), str(PAGE), "exec"), namespace)
    return namespace["SqliteSink"]


class Ledger:
    """A database that the example writes into."""

    def __init__(self, root: Path) -> None:
        self.database, self.staging = root / "totals.db", root / "staged"

    def sink(self, kind: Any = None) -> Any:
        return (kind or sqlite_sink_class())(str(self.database), str(self.staging))

    def rows(self) -> list[tuple[Any, ...]]:
        if not self.database.exists():
            return []
        with closing(sqlite3.connect(self.database)) as db:
            tables = db.execute("SELECT name FROM sqlite_master WHERE name = 'totals'").fetchall()
            return db.execute("SELECT user, total FROM totals").fetchall() if tables else []

    def files(self) -> list[str]:
        return sorted(file.name for file in self.staging.glob("*")) if self.staging.exists() else []
