"""JSON logs: one object per line, with job, lineage, checkpoint and micro-batch of its thread."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from flinkish_spark.core.log_context import log_facts
from flinkish_spark.core.secrets import hide_secrets


class JsonFormatter(logging.Formatter):
    """A formatter for Python's logging that writes each line as a JSON object.

    Besides the time in UTC, level, logger, thread and message: `job`, `lineage`, `checkpoint` and
    `micro_batch`, if the thread works for one; and `exception` with the traceback. Likely secrets are hidden.
    Use it with a handler that formats in the logging thread, as all but `QueueHandler` do.

    Examples
    --------
    >>> handler = logging.StreamHandler()
    >>> handler.setFormatter(JsonFormatter())
    >>> logging.getLogger("flinkish_spark").addHandler(handler)
    >>> logging.getLogger("flinkish_spark").removeHandler(handler)
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format the record."""
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
