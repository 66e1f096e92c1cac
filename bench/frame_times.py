"""Times of a group's rows as numbers, for the peers that get frames of pandas."""

from __future__ import annotations

import numpy as np


def times_ms(frame):
    """Return the times of the rows.

    applyInPandasWithState wants the column that has the watermark, and a second column would cost each group
    a conversion more; transformWithState takes a number that the JVM has made. Times of the session's zone,
    which is UTC in the bench.
    """
    if "at_ms" in frame.columns:
        return frame["at_ms"].to_numpy()
    return frame["at"].to_numpy().astype("datetime64[ms]").astype(np.int64)
