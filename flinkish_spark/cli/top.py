"""`flinkish top`: a live view of a job in a terminal, running or not."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from flinkish_spark.cli.client import (
    UNKNOWN,
    Seconds,
    job_argument,
    local_time,
    one_line,
    output_console,
    table_of,
)
from flinkish_spark.core.clock import duration_text
from flinkish_spark.core.errors import FlinkishError
from flinkish_spark.job.snapshot import JobSnapshot
from flinkish_spark.job.stored_job import StoredJob
from flinkish_spark.rest import flinkish_views

#: Numbers of newest checkpoints and restart causes that are shown.
_CHECKPOINTS, _CAUSES = 8, 5
#: Parts of the last hour in a line, and the signs by which it rises.
_PARTS, _SIGNS = 40, "▁▂▃▄▅▆▇█"
#: On terminals narrower than this, tables have only the most important columns.
_WIDE = 90
_QUIT, _UP, _DOWN = (b"q", b"Q", b"\x1b"), (b"k", b"\x1b[A", b"\x1bOA"), (b"j", b"\x1b[B", b"\x1bOB")
_PAGE_UP, _PAGE_DOWN = (b"\x1b[5~",), (b"\x1b[6~", b" ")
#: A key other than a letter sends several bytes at once.
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_STATE_STYLES = {
    "RUNNING": "green",
    "FINISHED": "green",
    "COMPLETED": "green",
    "IN_PROGRESS": "cyan",
    "RESTARTING": "yellow",
    "FAILING": "red",
    "FAILED": "red",
    "CANCELED": "yellow",
    "SUSPENDED": "yellow",
}


@click.command()
@job_argument
@click.option("--once", is_flag=True, help="Print one view and end, as a pipe does.")
@click.option(
    "--interval-s",
    type=Seconds(min=0.2, max=3_600.0),
    default=2.0,
    show_default=True,
    help="How long a view stays; in a bucket each costs requests.",
)
def top(job: StoredJob, once: bool, interval_s: float) -> None:
    """Show a live view of a job: rates, checkpoints, sinks, event time, restarts.

    Only reads the job directory, so the job may be down. q quits; arrows, j, k and space scroll.
    """
    console = output_console()
    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(_view(job, console))
    else:
        _show_live(job, interval_s, console)


class _Window:
    """The lines of a view that fit on the screen, with a line about the keys."""

    def __init__(self) -> None:
        self.view: RenderableType = Text("")
        self.first, self._height = 0, 1

    def scroll(self, lines: int = 0, pages: int = 0) -> None:
        self.first = max(0, self.first + lines + pages * max(1, self._height - 1))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.view, options.update(height=None), pad=False)
        self._height = max(1, options.size.height - 1)
        self.first = min(self.first, max(0, len(lines) - self._height))
        shown = lines[self.first : self.first + self._height]
        for line in shown:
            yield from line
            yield Segment.line()
        for _ in range(self._height - len(shown)):
            yield Segment.line()
        below = len(lines) - self.first - len(shown)
        more = f"   {below} more lines below: space, j, arrows" if below else ""
        yield Text(f"q: quit{more}", style="dim", no_wrap=True, overflow="ellipsis", end="")


def _show_live(job: StoredJob, interval_s: float, console: Console) -> None:
    window = _Window()
    with _keys() as keys, Live(window, console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                window.view = _view_or_error(job, window.view, console)
                live.refresh()
                for key in keys.read_keys(interval_s):
                    if key in _QUIT:
                        return
                    window.scroll((key in _DOWN) - (key in _UP), (key in _PAGE_DOWN) - (key in _PAGE_UP))
                    live.refresh()
        except KeyboardInterrupt:
            return


def _view_or_error(job: StoredJob, last: RenderableType, console: Console) -> RenderableType:
    """Return the view; if the directory cannot be read now, the reason followed by the last view."""
    try:
        return _view(job, console)
    except FlinkishError as error:
        # The view must continue after an outage.
        shown = last.renderables[1] if isinstance(last, _StaleView) else last
        return _StaleView(Text(f"cannot be read now: {one_line(str(error))}", style="red"), shown)


class _StaleView(Group):
    """An outdated view."""


class _Keys:
    def __init__(self, file: int | None) -> None:
        self._file = file

    def read_keys(self, for_s: float) -> Iterator[bytes]:
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0:
            if self._file is None:
                time.sleep(left_s)
            elif select.select([self._file], [], [], left_s)[0]:
                typed = os.read(self._file, 1_024)
                yield from _KEY.findall(typed) if typed else _QUIT[:1]


@contextmanager
def _keys() -> Iterator[_Keys]:
    """Read keys without echo; none if standard input is no terminal."""
    if not sys.stdin.isatty():
        yield _Keys(None)
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield _Keys(file)
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def _view(job: StoredJob, console: Console) -> RenderableType:
    # The id is for servers with several jobs.
    return _Views(JobSnapshot(str(job.uuid), job), console).all()


class _Views:
    def __init__(self, snapshot: JobSnapshot, console: Console) -> None:
        self._snapshot = snapshot
        self._is_drawn = console.is_terminal
        self._is_wide = console.width >= _WIDE

    def all(self) -> Group:
        facts = flinkish_views.job(self._snapshot)
        parts = (
            self._head(facts),
            self._waits(facts),
            self._vertices(),
            self._totals(),
            self._lines(),
            self._causes(facts),
            self._checkpoints(),
        )
        return Group(*(part for part in (*parts, self._sinks(), self._watermarks()) if part is not None))

    def _head(self, facts: dict[str, Any]) -> RenderableType:
        owner, status = facts["owner"], facts["status"]
        lines = Text()
        lines.append(one_line(facts["name"]), "bold")
        lines.append(f"  {status}", f"bold {_STATE_STYLES.get(status, '')}")
        lines.append(f"  {_format_since(facts)}\n")
        if owner["epoch"] == 0:
            lines.append("it has never run\n")
        else:
            where = f"{owner['host'] or UNKNOWN}, process {owner['pid'] or UNKNOWN}"
            lines.append(one_line(f"owner {owner['epoch']} on {where}: {_format_life(facts)}") + "\n")
        lines.append(f"restarts {facts['restarts']}, lineage {facts['lineage']}")
        lines.append(f", heard of at {local_time(facts['heard_at_ms'])}\n" if facts["was_cut_off"] else "\n")
        lines.append(one_line(facts["job_dir"]), "dim")
        return lines

    def _vertices(self) -> RenderableType:
        graph = flinkish_views.graph(self._snapshot)
        lags = {one["uid"]: one["lag_ms"] for one in flinkish_views.watermarks(self._snapshot)["operators"]}
        span = graph["span_ms"]
        over = "" if span is None else f", over the {duration_text(span)} of the last checkpoint"
        rows = [
            [
                one["name"],
                one["state"],
                one["records_in_per_second"],
                one["records_out_per_second"],
                _share(one["busy"]),
                _share(one["back_pressured"]),
                duration_text(_most(lags.get(operator["uid"]) for operator in one["operators"])),
                one["parallelism"],
            ]
            for one in graph["vertices"]
        ]
        columns = ["vertex", "state", "in/s", "out/s", "busy", "held back", "lag", "tasks"]
        none = "its graph is not written down yet"
        return self._section(f"Vertices{over}", columns, rows, narrow=5, none=none)

    def _totals(self) -> RenderableType | None:
        vertices = flinkish_views.graph(self._snapshot)["vertices"]
        counted = [one for one in vertices if any(n is not None for n in one["totals"].values())]
        rows = [[one["name"], *one["totals"].values()] for one in counted]
        columns = ["vertex", "read", "written", "not read yet", "late"]
        return self._section("Totals since the first start", columns, rows, narrow=3) if rows else None

    def _lines(self) -> RenderableType | None:
        found = flinkish_views.series(self._snapshot)
        since_ms = found["now_ms"] - _PARTS * _PART_MS
        points = [one for one in found["hour"]["points"] if one["at_ms"] >= since_ms]
        rows = []
        for title, name, describe in _LINES:
            known = [(one["at_ms"], one[name]) for one in points if one[name] is not None]
            values = [value for _, value in known]
            if any(values):
                rows.append([title, describe(values[-1]), describe(max(values)), _sparkline(known, since_ms)])
        columns = ["line", "newest", "most", "from an hour ago to now"]
        return self._section("The last hour", columns, rows, narrow=3) if rows else None

    def _waits(self, facts: dict[str, Any]) -> RenderableType | None:
        rows = [
            [one["who"], one["what"], duration_text(facts["now_ms"] - one["since_ms"]), one["error"]]
            for one in facts["waits"]
        ]
        if not rows:
            return None
        if self._is_wide or not self._is_drawn:
            return self._section("Held back", ["who", "waits for", "for", "last error"], rows)
        # The longest column, which must stay readable.
        lines = [[f"{who}, {for_}: {what}: {error or UNKNOWN}"] for who, what, for_, error in rows]
        return self._section("Held back", ["who waits for what"], lines)

    def _causes(self, facts: dict[str, Any]) -> RenderableType | None:
        rows = [[local_time(one["at_ms"]), one["name"], one["cause"]] for one in facts["failures"][:_CAUSES]]
        if not rows:
            return None
        if self._is_wide or not self._is_drawn:
            return self._section("Restarts", ["at", "vertex", "cause"], rows)
        # The longest column, which must stay readable.
        return self._section("Restarts", ["cause"], [[f"{at}: {cause}"] for at, _, cause in rows])

    def _checkpoints(self) -> RenderableType:
        found = flinkish_views.checkpoints(self._snapshot, _CHECKPOINTS, None)
        counts, summary = found["counts"], found["summary"].get("end_to_end_ms")
        title = f"Checkpoints: {counts['completed']} completed, {counts['failed']} failed"
        if counts["in_progress"]:
            title += f", {counts['in_progress']} in progress"
        if summary is not None:
            title += f"; took {duration_text(summary['p50'])} (p50), {duration_text(summary['p99'])} (p99)"
        rows = [
            [
                one["id"],
                one["status"],
                duration_text(one["durations"]["end_to_end_ms"]),
                one["rows"],
                local_time(one["triggered_at_ms"]),
                one["purpose"],
                _failure(one["failure"]),
            ]
            for one in found["checkpoints"]
        ]
        columns = ["id", "status", "took", "rows", "triggered", "purpose", "failure"]
        section = self._section(title, columns, rows, narrow=4, none="none yet")
        hint = found["hint"]
        return section if hint is None else Group(section, Text(one_line(hint), style="yellow"))

    def _sinks(self) -> RenderableType | None:
        rows = [
            [
                one["uid"],
                one["staged_rows"],
                one["decided_rows"],
                one["open_committables"],
                duration_text(one["oldest_open_ms"]),
                one["confirmed_checkpoint"],
                one["confirmed_rows"],
            ]
            for one in flinkish_views.sinks(self._snapshot)["sinks"]
        ]
        columns = ["sink", "staged", "decided", "open", "oldest", "confirmed", "rows"]
        return self._section("Sinks", columns, rows, narrow=5) if rows else None

    def _watermarks(self) -> RenderableType | None:
        rows = [
            [
                one["name"],
                "end of input" if one["is_at_end"] else local_time(one["watermark_ms"]),
                duration_text(one["lag_ms"]),
            ]
            for one in flinkish_views.watermarks(self._snapshot)["operators"]
        ]
        title = "Event time, at the newest checkpoint"
        return self._section(title, ["operator", "watermark", "lag"], rows) if rows else None

    def _section(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        narrow: int | None = None,
        none: str = "",
    ) -> RenderableType:
        """Return a table with a title; on a narrow terminal only its first columns."""
        heading = Text(f"\n{one_line(title)}", style="bold" if self._is_drawn else "")
        if not rows:
            return Group(heading, Text(none))
        count = len(columns) if self._is_wide or narrow is None or not self._is_drawn else narrow
        table = table_of(columns[:count], [row[:count] for row in rows], is_drawn=self._is_drawn)
        return Group(heading, table)


def _format_since(facts: dict[str, Any]) -> str:
    if facts["began_at_ms"] is None:
        return ""
    if facts["ended_at_ms"] is not None:
        return f"since {local_time(facts['ended_at_ms'])}"
    return f"for {duration_text(facts['now_ms'] - facts['began_at_ms'])}"


def _format_life(facts: dict[str, Any]) -> str:
    if facts["was_cut_off"]:
        return "it is gone; the next start continues the job"
    return {"ALIVE": "it lives", "ENDED": "it has ended"}.get(facts["owner"]["life"], "not seen from here")


#: Lines over time: their title, their name in points, and their text.
_LINES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("rows in/s", "in_per_second", str),
    ("rows out/s", "out_per_second", str),
    ("not read yet", "lag", str),
    ("worst partition", "worst_lag", str),
    ("checkpoint took", "took_ms", duration_text),
    ("starts", "starts", str),
)
_PART_MS = 3_600_000 // _PARTS


def _sparkline(points: Sequence[tuple[int, float]], since_ms: int) -> str:
    """Return a sign for each part of the last hour: its highest value, or a dot where there is none."""
    parts: dict[int, float] = {}
    for at_ms, value in points:
        part = (at_ms - since_ms) // _PART_MS
        parts[part] = max(value, parts.get(part, 0))
    most = max(parts.values()) or 1
    signs = {part: _SIGNS[round(value / most * (len(_SIGNS) - 1))] for part, value in parts.items()}
    return "".join(signs.get(part, "·") for part in range(_PARTS))


def _failure(failure: dict[str, Any] | None) -> str:
    return "" if failure is None else ": ".join(filter(None, (failure["reason"], failure["text"])))


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _share(share: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.0%}"
