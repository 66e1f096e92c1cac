"""Writes the traceback of an error that a user reads into a file, and prints the file's name."""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback

from flinkish_spark.core.errors import FlinkishError, causes_of
from flinkish_spark.core.secrets import hide_secrets

LOG = logging.getLogger(__name__)


def write_trace_file(error: FlinkishError, job: str) -> FlinkishError:
    """Return the error without its traceback, which goes to a file that only this user can read."""
    # An error without a cause stays unchanged; so does any error if the file cannot be written.
    inner, causes = error.facts.get("trace"), list(causes_of(error))
    if inner is None and len(causes) == 1:
        return error
    # Suppressed contexts are written, too.
    traces = ("".join(traceback.format_exception(one, chain=False)) for one in reversed(causes))
    whole = "\nand so:\n\n".join(traces)
    if inner is not None:
        whole += f"\nFrom the inside out:\n{inner}\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", prefix=f"flinkish-{job}-", suffix=".log", delete=False
        ) as file:
            file.write(hide_secrets(whole))
    except OSError as trouble:
        LOG.debug("the trace cannot be written: %s", trouble)
        return error
    # Printed before the error, whose last line users read.
    print(f"flinkish: the trace, with Spark's, is in {file.name}", file=sys.stderr)
    # The frames of the user's program stay; the rest is in the file.
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
