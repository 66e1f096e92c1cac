"""HTML tables for notebooks: escaped text, without styles and scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from html import escape

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def html_table(rows: Iterable[Sequence[object]], *, columns: Sequence[str] = (), caption: str = "") -> str:
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    heads = "".join(_cell("th", column) for column in columns)
    head = f"<thead><tr>{heads}</tr></thead>" if columns else ""
    first = "td" if columns else "th"
    body = "".join(
        f"<tr>{''.join(_cell(first if at == 0 else 'td', cell) for at, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return f"<table>{above}{head}<tbody>{body}</tbody></table>"


def _cell(kind: str, value: object) -> str:
    shown = "-" if value is None or value == "" else str(value)
    return f"<{kind}>{escape(shown)}</{kind}>"


def utc_text(wall_ms: int | None) -> str | None:
    """Format a wall clock time in UTC; a number beyond the calendar as milliseconds."""
    if wall_ms is None:
        return None
    try:
        return f"{_EPOCH + timedelta(milliseconds=wall_ms):%Y-%m-%d %H:%M:%SZ}"
    except OverflowError:
        return f"{wall_ms} ms"
