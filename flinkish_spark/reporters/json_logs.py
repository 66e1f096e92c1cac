"""Logs for machines: a JSON object for each line, with what its thread worked for."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from flinkish_spark.core.log_context import log_facts
from flinkish_spark.job.trace_log import hide_secrets


class JsonFormatter(logging.Formatter):
    """Formats a line of a log as a JSON object, for a handler of Python's logging.

    Beside the time in UTC, the level, the logger, the thread and the message: `job`, `lineage`, `checkpoint`
    and `micro_batch`, as far as the thread works for one; and `exception` with a trace. What looks like a
    secret is hidden. Give the formatter to a handler that formats in the thread that logs, as all but
    `QueueHandler` do.

    Examples
    --------
    >>> handler = logging.StreamHandler()
    >>> handler.setFormatter(JsonFormatter())
    >>> logging.getLogger("flinkish_spark").addHandler(handler)
    >>> logging.getLogger("flinkish_spark").removeHandler(handler)
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = datetime.fromtimestamp(record.created, UTC)
        found: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "thread": record.threadName,
            **log_facts(),
            "message": hide_secrets(record.getMessage()),
        }
        if record.exc_info:
            found["exception"] = hide_secrets(self.formatException(record.exc_info))
        return json.dumps(found, ensure_ascii=False, default=str)
