"""The rows of one group as a keyed operator takes and gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from flinkish_spark.runtime import columns as C
from flinkish_spark.runtime.row_blocks import EMITTED


class GroupRows:
    """The rows of one group, as plain columns: frames cost more than what is asked of these few rows."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._kinds, self._sequences = frame[C.KIND].tolist(), frame[C.SEQUENCE].tolist()
        self._blocks = frame[C.BLOCK].tolist()

    def of_kind(self, wanted: C.Kind) -> list[tuple[int, Any]]:
        """Return sequence and block of each row of a kind."""
        kind = int(wanted)
        rows = zip(self._kinds, self._sequences, self._blocks, strict=True)
        return [(sequence, block) for own, sequence, block in rows if own == kind]


@dataclass(frozen=True, slots=True)
class Out:
    """One row of an operator's output."""

    kind: int
    checkpoint: int
    channel: int
    sequence: int
    block: bytes = b""
    side: int = 0


def frame_of(rows: list[Out]) -> pd.DataFrame:
    """Return rows as a frame with the columns of EMITTED."""
    numbers = np.array([[r.side, r.kind, r.checkpoint, r.channel, r.sequence] for r in rows], dtype=np.int64)
    columns: dict[str, Any] = {name: numbers[:, at] for at, name in enumerate(EMITTED.names[:-1])}
    columns[C.BLOCK] = [row.block for row in rows]
    return pd.DataFrame(columns)
