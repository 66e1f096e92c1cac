"""Files through which a job's driver and its sources talk without Spark: offers, held channels, alignment."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flinkish_spark.protocol.control_offset import NO_TIME_YET, PINNED_KEY, ControlOffset, TimeOffer
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, OwnerEpoch
from flinkish_spark.protocol.watermark_alignment import (
    NONE_HELD,
    HeldChannels,
    HeldSources,
    decode_held,
    encode_held,
)


# The planner of a source runs in a Python process of Spark's, the coordinator in the user's. The file of a
# chained source lies beside the control file and is replaced whenever something changes. It is not durable:
# what counts is in Spark's offset log.
@dataclass(frozen=True, slots=True)
class AlignmentStatus:
    #: Whether it stands at a cut, so that it waits for a checkpoint of this job or could draw one now.
    wants_checkpoint: bool
    #: What it waits for, in words; part of the reason of a checkpoint that expires.
    text: str
    #: The upstream checkpoint at whose cut it stands; None if it wants no checkpoint.
    cut: int | None = None
    #: This job's newest checkpoint whose barrier it has put into a micro-batch; 0 before the first.
    drawn: int = 0


def _replace(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f"{path.suffix}-tmp")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def write_status(control_path: str, status: AlignmentStatus) -> None:
    _replace(Path(control_path).with_suffix(".alignment"), asdict(status))


def read_status(control_path: str) -> AlignmentStatus | None:
    """Return the status; None if the job has no chained source, or Spark has not planned it yet."""
    value = _read(Path(control_path).with_suffix(".alignment"))
    return None if value is None else AlignmentStatus(**value)


#: Names of the files of one start: the control file and its neighbours.
_OF_A_START = re.compile(r"(\d+)(-\d+)?\.")


class ControlFile:
    """The file by which the driver offers checkpoints and times to the sources; replaced atomically.

    Not durable on purpose: only the offset that Spark logs counts. After a crash the next coordinator
    triggers with a higher id, and the time keeper writes the times again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._on_offer: CheckpointId | None = None
        self._purpose = CheckpointPurpose.PERIODIC
        self._time, self._waiting = NO_TIME_YET, NO_TIME_YET
        self._pinned: BatchId | None = None

    @classmethod
    def create_for_start(cls, folder: Path, epoch: OwnerEpoch, start: int) -> ControlFile:
        """Return the file of one start of the query; delete the files of earlier starts in `folder`."""
        # An id that was offered before may be sealed with ABORT. The names are new for every start: a Python
        # process of Spark's may outlive its query and goes on with the old files. Offers are deleted first.
        # Files that a crash leaves have no reader, and the next start deletes them.
        for left in sorted(folder.glob("*"), key=lambda path: path.suffix != ".json"):
            owner = _OF_A_START.match(left.name)
            # Files of a newer owner stay: this owner may be deposed and not know it yet.
            if owner is not None and int(owner[1]) <= int(epoch) and left.is_file():
                left.unlink(missing_ok=True)
        return cls(folder / f"{epoch}-{start}.json")

    def offer(
        self, checkpoint: CheckpointId, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC
    ) -> None:
        """Let the next micro-batch, in a chained source that at the next cut, carry a barrier."""
        with self._lock:
            self._time = self._time.merge_max(self._waiting)
            self._write(checkpoint, purpose)
            self._on_offer, self._purpose = checkpoint, purpose

    def withdraw(self, checkpoint: CheckpointId) -> bool:
        """Withdraw an offer, so that no source draws an aborted checkpoint; return if it was on offer."""
        with self._lock:
            if self._on_offer != checkpoint:
                return False
            self._write(None, self._purpose)
            self._on_offer = None
            return True

    def offer_time(self, time: TimeOffer) -> None:
        """Offer a watermark and key groups to call; they make a micro-batch due even without records."""
        with self._lock:
            # An earlier offer may not have been drawn; the newest one holds everything that is due.
            if time != self._time:
                self._time = self._waiting = time
                self._write(self._on_offer, self._purpose)

    def keep_time(self, time: TimeOffer) -> None:
        """Offer a watermark with the next checkpoint; alone it does not make a micro-batch due."""
        with self._lock:
            self._waiting = time

    def keep_pinned(self, batch: BatchId) -> None:
        with self._lock:
            self._pinned = batch

    def _write(self, checkpoint: CheckpointId | None, purpose: CheckpointPurpose) -> None:
        content: dict[str, Any] = self._time.to_json()
        if checkpoint is not None:
            content |= {"checkpoint": int(checkpoint), "purpose": purpose.value}
            # Only with a checkpoint: alone it does not make a micro-batch due.
            content |= {} if self._pinned is None else {PINNED_KEY: self._pinned.value}
        if content:
            _replace(self.path, content)
        else:
            self.path.unlink(missing_ok=True)

    def source_status(self) -> AlignmentStatus | None:
        """Return where the chained source stands; None without one, or before Spark has planned it."""
        return read_status(str(self.path))


def read_control(path: str) -> dict[str, Any]:
    """Return the content of a control file; empty while nothing is on offer."""
    content: dict[str, Any] = _read(Path(path)) or {}
    return content


def to_control_offset(content: dict[str, Any]) -> ControlOffset:
    pinned, checkpoint = content.get(PINNED_KEY), int(content.get("checkpoint", 0))
    is_drained = content.get("purpose") == CheckpointPurpose.DRAINED_SAVEPOINT.value
    return ControlOffset(checkpoint, TimeOffer.from_json(content), pinned, checkpoint if is_drained else 0)


# This file tells sources which of their channels are ahead of the others. The time keeper replaces it after
# each micro-batch, before Spark asks for the next one. It is not durable: each start of the query makes it
# from the stored state; without the file no channel is held back.
def to_held_path(control_path: Path) -> Path:
    return control_path.with_suffix(".held")


def write_held(control_path: Path, held: HeldSources) -> None:
    if held:
        _replace(to_held_path(control_path), encode_held(held))
    else:
        to_held_path(control_path).unlink(missing_ok=True)


def read_held(control_path: str, source: str) -> HeldChannels:
    """Return the channels of a source that bring no records in the next micro-batch."""
    held = _read(to_held_path(Path(control_path))) if control_path else None
    return decode_held(held or {}).get(source, NONE_HELD)
