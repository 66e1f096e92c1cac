"""What a person sees while the demo runs: one line that changes, or a line now and then in a log."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from demo.process import Victim
from demo.rig import Rig

_LINE_EVERY_S = 5.0
_REFRESH_S = 0.5


class Display:
    """Follows a run in a thread of its own; nothing else prints while it does."""

    def __init__(self, console: Console, rig: Rig, orders: int) -> None:
        self._console, self._rig, self._orders = console, rig, orders
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)
        self._began = time.monotonic()
        self._kills = 0
        self._last = "none yet"

    @property
    def seconds(self) -> float:
        """Time since the job was first started."""
        return time.monotonic() - self._began

    def killed(self, victim: Victim) -> None:
        """Say that a kill comes now."""
        self._kills += 1
        self._last = f"{victim.value} at {self.seconds:.1f} s"
        self.say(f"kill {self._kills}: SIGKILL to the {victim.value}")

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(f"{self.seconds:6.1f} s  {text}", highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(5)

    def _follow(self) -> None:
        if not self._console.is_terminal:
            while not self._is_over.wait(_LINE_EVERY_S):
                self.say(self._line())
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while not self._is_over.wait(_REFRESH_S):
                live.update(Text(f"{self.seconds:6.1f} s  {self._line()}"), refresh=True)

    def _line(self) -> str:
        rig, reader = self._rig, self._rig.reader
        sent = rig.producer.sent if rig.producer is not None else 0
        return (
            f"in {sent:,}/{self._orders:,}  checkpoint {rig.confirmed}  "
            f"committed kafka {reader.kafka_rows:,} delta {reader.delta_rows:,}  "
            f"restarts {max(rig.job.starts - 1, 0)}  last kill {self._last}"
        )
