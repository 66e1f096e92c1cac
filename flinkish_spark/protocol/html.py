"""What notebooks show of values: tables of escaped text, without styles and scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from html import escape

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def html_table(rows: Iterable[Sequence[object]], *, columns: Sequence[str] = (), caption: str = "") -> str:
    """Return a table; None is shown as a dash.

    Parameters
    ----------
    columns
        Headings. Without any the first cell of each row is the name of what is behind it.
    caption
        What stands above it.

    Examples
    --------
    >>> html_table([["a<b", None]], columns=["id", "rows"])
    '<table><thead><tr><th>id</th><th>rows</th></tr></thead><tbody><tr><td>a&lt;b</td><td>-</td></tr></tbody></table>'
    """
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
    """Return a wall clock time as text in UTC; a number that is no time of this calendar as it is.

    Examples
    --------
    >>> utc_text(1_700_000_000_000), utc_text(10**20), utc_text(None)
    ('2023-11-14 22:13:20Z', '100000000000000000000 ms', None)
    """
    if wall_ms is None:
        return None
    try:
        return f"{_EPOCH + timedelta(milliseconds=wall_ms):%Y-%m-%d %H:%M:%SZ}"
    except OverflowError:
        return f"{wall_ms} ms"
