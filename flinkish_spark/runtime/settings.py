"""What goes into one `execute`, and what may be asked while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from flinkish_spark.clock import Clock
from flinkish_spark.config import CheckpointConfig
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.restart import RestartStrategy
from flinkish_spark.runtime.steps import Observer


@dataclass(frozen=True)
class JobSettings:
    """All settings of one `execute`."""

    name: str
    root: Path
    checkpoint: CheckpointConfig
    restart: RestartStrategy
    trigger_ms: int
    shuffle_partitions: int
    clock: Clock
    observer: Observer


@dataclass
class JobProgress:
    """What a person or a program may ask about a running job; replaced piece by piece."""

    restarts: int = 0
    checkpoints: int = 0
    newest: CheckpointId = field(default_factory=lambda: CheckpointId(0))
    rows_by_sink: dict[str, int] = field(default_factory=dict)
    dropped: int = 0
    last_error: str = ""
    is_running: bool = False
