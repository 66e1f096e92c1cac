"""What a chained source waits for, told to its job through a file.

The planner of a source runs in a Python process of Spark's, the coordinator in the user's. The file
lies beside the control file and is replaced whenever something changes. It is not durable: what
counts is in Spark's offset log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flinkish_spark.chaining.cut_plan import View, next_barrier
from flinkish_spark.chaining.cut_state import CutPhase, CutState, channel_of, place_of
from flinkish_spark.kafka.answers import Place
from flinkish_spark.protocol.gate import InputGate


@dataclass(frozen=True, slots=True)
class AlignmentStatus:
    """Where a chained source stands.

    Parameters
    ----------
    wants_checkpoint
        Whether it can go on only with a checkpoint of this job, or could draw one now.
    text
        What it waits for; for the reason of a checkpoint that expires, and for people.
    """

    wants_checkpoint: bool
    text: str


def status_path(control_path: str) -> Path:
    """Return where the source with this control file writes its status."""
    return Path(control_path).with_suffix(".alignment")


def write_status(control_path: str, status: AlignmentStatus) -> None:
    """Replace the status; called by the planner when it changes."""
    path = status_path(control_path)
    temporary = path.with_suffix(".alignment-tmp")
    temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
    os.replace(temporary, path)


def read_status(control_path: str) -> AlignmentStatus | None:
    """Return the status; None if the job has no chained source, or it was not planned yet.

    Called by the coordinator: on every tick, to ask for a checkpoint that the source waits for, and
    for the reason of a checkpoint that expires.
    """
    try:
        value = json.loads(status_path(control_path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return AlignmentStatus(**value)


def described(state: CutState, view: View, topics: str) -> AlignmentStatus:
    """Return where a source stands.

    Parameters
    ----------
    state, view
        Of the last plan; `view.begin` is where it ended.
    topics
        What the source reads, for the text.
    """
    gate, cut = state.gate, state.cut
    if cut is not None and cut.phase is CutPhase.REACHED:
        text = f"stands at upstream checkpoint {cut.checkpoint} and waits for a checkpoint of this job"
        return AlignmentStatus(not view.is_offered, text)
    if gate.blocked:
        at_ms = gate.turns_unaligned_at_ms
        could_draw = at_ms is not None and view.now_ms >= at_ms and not view.is_offered
        return AlignmentStatus(could_draw, _aligning(gate, view))
    if state.stands_at_cut:
        where = "the beginning" if cut is None else f"upstream checkpoint {cut.checkpoint}"
        return AlignmentStatus(False, f"stands at {where}; nothing new is there")
    if state.job is None:
        text = (
            f"has read records of {topics} and has seen no barrier record yet. The upstream job's Kafka "
            "sink needs barriers=BarrierRecords.EACH_CHECKPOINT; without barrier records this job can "
            "take no checkpoint: leave aligned_with out then"
        )
        return AlignmentStatus(False, text)
    behind = "" if cut is None else f" behind {cut.checkpoint}"
    return AlignmentStatus(False, f"reads on to the next upstream checkpoint{behind}")


def _aligning(gate: InputGate, view: View) -> str:
    alignment = gate.pending[-1]
    missing = sorted(place_of(channel) for channel in alignment.awaited)
    places = ", ".join(_place_text(place, gate, view) for place in missing[:5])
    more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
    return f"waits for the barrier of upstream checkpoint {alignment.checkpoint} on {places}{more}"


def _place_text(place: Place, gate: InputGate, view: View) -> str:
    ahead = view.ahead.get(place)
    barrier = None if ahead is None else next_barrier(gate, ahead)
    where = "not visible yet" if barrier is None else f"at offset {barrier.offset}"
    return f"{place[0]}-{place[1]} ({where}, read up to {_position(gate.channels, place)})"


def _position(channels: Mapping[str, int], place: Place) -> int:
    return channels[channel_of(place)]
