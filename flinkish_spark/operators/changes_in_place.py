"""Which entries of a state a function has changed in place, without putting them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flinkish_spark.operators.layered_table import LayeredTable
from flinkish_spark.operators.table_codec import SlotForm
from flinkish_spark.state.handed_out import same
from flinkish_spark.state.tables import StateTable


def note_changes_in_place(
    table: StateTable, stored: LayeredTable, hash_of: Mapping[Any, int], now_ms: int
) -> None:
    """Let entries that a function has had in hand and has not put back be written, if it changed them.

    Parameters
    ----------
    stored
        The same state, as it was before.
    hash_of
        Of keys.
    """
    has_window = stored.layout.form is SlotForm.KEY_AND_WINDOW
    lent = [slot for slot in table.lent - table.changed if slot in table.entries]
    if not lent:
        return
    hashes = {hash_of[slot[0] if has_window else slot] for slot in lent}
    before = stored.decoded(np.array(sorted(hashes), dtype=np.int64))
    for slot in lent:
        if slot not in before or not same(table.entries[slot], before[slot].value):
            table.written_in_place(slot, now_ms)
