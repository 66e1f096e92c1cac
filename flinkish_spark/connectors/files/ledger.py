"""Records of the file sink about each checkpoint, in its folder of the job directory.

They are not beside the files, so a clean-up of the target does not delete them. Every record is written
once; the newest DONE is the sink's state.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from flinkish_spark.connectors.files.rolling import Chunk
from flinkish_spark.core.store import SealedObjects, Store
from flinkish_spark.protocol.codec import StoredObject, StoredRow
from flinkish_spark.protocol.envelope import seal

T = TypeVar("T")


class Entry(enum.Enum):
    """The records of one checkpoint, in the order in which they are written."""

    #: The files that it contains. From here on they are the sink's, and only a deletion can lose them.
    COMMITTED = "committed"
    #: The parts that it finishes, and their names.
    PLAN = "plan"
    #: Merged files are whole; from here on files are only renamed.
    BUILT = "built"
    #: Every part of the plan has been visible.
    MOVED = "moved"
    #: The state after the checkpoint.
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Part(StoredObject):
    target: str
    #: Absolute path that is renamed: the only chunk, or the file into which the chunks are merged.
    source: str
    chunks: tuple[Chunk, ...]

    @property
    def is_merged(self) -> bool:
        return len(self.chunks) > 1


@dataclass(frozen=True, slots=True)
class Plan(StoredObject):
    """Files that one checkpoint makes visible, and chunks that stay open after it."""

    parts: tuple[Part, ...]
    open: tuple[Chunk, ...]

    @property
    def facts(self) -> dict[str, int]:
        """Number, size and rows of the files that become visible; rows only if all are known."""
        chunks = [chunk for part in self.parts for chunk in part.chunks]
        known = [chunk.rows for chunk in chunks if chunk.rows is not None]
        facts = {"files": len(self.parts), "bytes": sum(chunk.bytes for chunk in chunks)}
        return {**facts, "rows": sum(known)} if len(known) == len(chunks) else facts


@dataclass(frozen=True, slots=True)
class CommittedChunks(StoredObject):
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class OpenPartition(StoredRow):
    root: str
    bucket: str
    #: Time of the decision of the checkpoint with which it began to wait.
    since_ms: int


@dataclass(frozen=True, slots=True)
class State(StoredObject):
    #: 0 before the first.
    checkpoint: int = 0
    #: Chunks that are not visible yet, the oldest first.
    open: tuple[Chunk, ...] = ()
    partitions: tuple[OpenPartition, ...] = ()
    #: The greatest partition time of committed data; None before there was any.
    seen_ms: int | None = None


@dataclass
class Ledger:
    store: Store

    def checkpoints(self) -> tuple[int, ...]:
        names = (key.rsplit("/", 1)[-1] for key in self.store.list("checkpoints"))
        return tuple(sorted(int(name) for name in names if name.isdecimal()))

    def has(self, checkpoint: int, entry: Entry) -> bool:
        return _key(checkpoint, entry) in self.store.list(f"checkpoints/{checkpoint}")

    def find_committed(self, checkpoint: int) -> tuple[Chunk, ...] | None:
        found = self._read(checkpoint, Entry.COMMITTED, CommittedChunks.from_json)
        return None if found is None else found.chunks

    def plan(self, checkpoint: int) -> Plan | None:
        return self._read(checkpoint, Entry.PLAN, Plan.from_json)

    def state(self, checkpoint: int) -> State | None:
        return self._read(checkpoint, Entry.DONE, State.from_json)

    def state_before(self, checkpoint: int) -> State:
        for older in reversed(self.checkpoints()):
            if older < checkpoint and (state := self.state(older)) is not None:
                return state
        return State()

    def newest_done(self) -> int:
        return next((one for one in reversed(self.checkpoints()) if self.has(one, Entry.DONE)), 0)

    def unseen(self, checkpoint: int) -> tuple[Chunk, ...]:
        """Return the chunks committed since the last state before a checkpoint, up to it, in order."""
        since = self.state_before(checkpoint).checkpoint
        found = (self.find_committed(c) or () for c in self.checkpoints() if since < c <= checkpoint)
        return tuple(chunk for chunks in found for chunk in chunks)

    def record_plan(self, checkpoint: int, plan: Plan) -> Plan:
        """Record a plan; return the recorded one, which another process may have written."""
        self.record(checkpoint, Entry.PLAN, plan)
        return self.plan(checkpoint) or plan

    def record(self, checkpoint: int, entry: Entry, value: StoredObject | None = None) -> None:
        body = {} if value is None else value.to_json()
        self.store.create_if_absent(_key(checkpoint, entry), seal(_kind(entry), body))

    def replace_state(self, state: State) -> None:
        self.store.put(_key(state.checkpoint, Entry.DONE), seal(_kind(Entry.DONE), state.to_json()))

    def forget(self, checkpoint: int, *, keeps_state: bool = False) -> None:
        # This order matters: each record depends on those before it.
        for entry in reversed(Entry):
            if not (keeps_state and entry is Entry.DONE) and self.has(checkpoint, entry):
                self.store.delete(_key(checkpoint, entry))

    def find_staged_in_use(self) -> frozenset[str]:
        """Return the folders below `pending` with chunks that records name."""
        named: set[str] = set()
        for checkpoint in self.checkpoints():
            chunks = self.find_committed(checkpoint) or ()
            plan, state = self.plan(checkpoint), self.state(checkpoint)
            if plan is not None:
                chunks += tuple(c for part in plan.parts for c in part.chunks) + plan.open
            named |= {chunk.staged for chunk in (*chunks, *(state.open if state is not None else ()))}
        return frozenset(named)

    def _read(self, checkpoint: int, entry: Entry, parse: Callable[[Any], T]) -> T | None:
        objects = SealedObjects(self.store, "the folder of a file sink")
        return objects.optional(_key(checkpoint, entry), _kind(entry), parse)


def _key(checkpoint: int, entry: Entry) -> str:
    return f"checkpoints/{checkpoint}/{entry.value}.json"


def _kind(entry: Entry) -> str:
    return f"file-sink-{entry.value}"
