"""How long Delta keeps what a sink depends on, against how long a job may be down."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flinkish_spark.errors import ConfigError
from flinkish_spark.sinks.base import SinkContext

FILES = "deletedFileRetentionDuration"
MARKERS = "setTransactionRetentionDuration"
#: Delta's own, where neither the table nor the session says anything.
_DEFAULT = {FILES: "interval 1 week"}
_UNIT_MS = {
    "week": 604_800_000.0,
    "day": 86_400_000.0,
    "hour": 3_600_000.0,
    "minute": 60_000.0,
    "second": 1_000.0,
    "millisecond": 1.0,
    "microsecond": 0.001,
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s+([a-z]+?)s?(?=\s|$)")


def duration_ms(text: str) -> int | None:
    """Return an interval of a table property in milliseconds; None for what is not understood.

    Examples
    --------
    >>> duration_ms("interval 1 week"), duration_ms("INTERVAL 36 HOURS"), duration_ms("2 months")
    (604800000, 129600000, None)
    """
    rest, total = text.strip().lower().removeprefix("interval").strip(), 0.0
    if not rest:
        return None
    while rest:
        part = _PART.match(rest)
        if part is None or part[2] not in _UNIT_MS:
            return None
        total += float(part[1]) * _UNIT_MS[part[2]]
        rest = rest[part.end() :].strip()
    return int(total)


def check_retention(
    name: str, properties: Mapping[str, str], defaults: Mapping[str, str], path: str, context: SinkContext
) -> None:
    """Refuse a table that forgets staged files or markers while the job may still be down.

    Parameters
    ----------
    name
        :data:`FILES` or :data:`MARKERS`.
    properties
        Of the table; empty if the first commit makes it.
    defaults
        What the session gives to new tables, by bare name.

    Raises
    ------
    ConfigError
        It is shorter than interval + restart budget.
    """
    text = properties.get(f"delta.{name}")
    if text is None and not properties:
        text = defaults.get(name)
    text = text or _DEFAULT.get(name)
    kept_ms = None if text is None else duration_ms(text)
    checkpoint = context.checkpoint
    least_ms = checkpoint.interval_ms + checkpoint.restart_budget_ms
    if kept_ms is None or kept_ms >= least_ms:
        return
    what = "staged files" if name == FILES else "which checkpoints it has"
    raise ConfigError(
        f"delta.{name} of the table {path} is '{text}' = {kept_ms} ms, shorter than checkpoint interval + "
        f"restart budget = {least_ms} ms of sink '{context.uid}'",
        why=f"the table could forget {what} while the job restarts",
        what_to_do=f"ALTER TABLE ... SET TBLPROPERTIES ('delta.{name}' = 'interval 7 days'), "
        "or lower restart_budget_ms",
        uid=context.uid,
    )
