"""What tests of sinks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flinkish_spark.contracts.sink import SinkContext
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import JobUuid, OwnerEpoch


def sink_context_of(
    job: JobUuid, epoch: OwnerEpoch, uid: str, schema: Any, checkpoint: Any, folder: Path = Path("/nowhere")
) -> SinkContext:
    """A sink's context, whose folder nobody looks into unless the test names one."""
    return SinkContext(job, epoch, uid, schema, checkpoint, "a job", StoreSpec(str(folder)), SystemClock())
