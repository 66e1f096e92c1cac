"""Spark's checkpoint as the simulated Spark writes it: logs, and state files named by commits/N."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.checkpoint.retention import BucketPins
from flinkish_spark.checkpoint.spark_log import REPLAY, BucketLog, SparkLog
from flinkish_spark.core.errors import FencedError
from flinkish_spark.core.offset_log import OFFSET_KEY, LoggedOffsets
from flinkish_spark.core.store import Store
from flinkish_spark.protocol.bases import BASES
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from tests.simulation.input_topic import TOPIC
from tests.simulation.memory_store import MemoryStore
from tests.simulation.scenario import StoreKind

T = TypeVar("T")
R = TypeVar("R")

#: Folder of what each log of Spark's began with, by lineage.
BEGINNINGS = "beginnings"
#: Counts by key: the operator's state.
Counts = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class BatchOffsets:
    """What offsets/N says: where each partition ends, and the control offset of each scan."""

    ends: Mapping[int, int]
    controls: tuple[int, ...]

    def text(self) -> str:
        """Return the entry."""
        topic = {TOPIC: {str(partition): end for partition, end in self.ends.items()}}
        lines = ["v1", json.dumps({"batchTimestampMs": 0}), json.dumps(topic)]
        lines += [json.dumps({OFFSET_KEY: control}) for control in self.controls]
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str) -> BatchOffsets:
        """Read an entry."""
        _, _, topic, *controls = text.split("\n")
        ends = {int(partition): int(end) for partition, end in json.loads(topic)[TOPIC].items()}
        return cls(ends, tuple(int(json.loads(one)[OFFSET_KEY]) for one in controls))


def commit_text(unique_id: str, store: StoreKind) -> str:
    """Return commits/N of a micro-batch whose state got this id; for a bucket as Spark writes it."""
    ids = unique_id if store is StoreKind.DISK else {"0": [[unique_id]]}
    return "v1\n" + json.dumps({"nextBatchWatermarkMs": 0, "stateUniqueIds": ids})


def state_key(commits_text: str, batch: int) -> str:
    """Return the name of the state file that commits/N names: version N+1 and its id.

    In a bucket it is a snapshot as Spark's, which the product's own pins read.
    """
    ids = json.loads(commits_text.partition(chr(10))[2])["stateUniqueIds"]
    return f"{batch + 1}-{ids}" if isinstance(ids, str) else f"0/0/{batch + 1}_{ids['0'][0][0]}.zip"


def state_version(name: str) -> int:
    """Return the version of a state file."""
    return int(name.partition("-")[0])


def state_bytes(counts: Counts, bases: Mapping[int, str], store: StoreKind) -> bytes:
    """Return a state file's content; of a key with a base it has the name of that in place of the count."""
    content = json.dumps([[key, bases.get(key, count)] for key, count in sorted(counts.items())])
    if store is StoreKind.DISK:
        return content.encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("metadata", "v1\n{}")
        archive.writestr("counts", content)
    return packed.getvalue()


def bases_in(state: bytes) -> dict[int, str]:
    """Return the bases that a state file names, by key."""
    return {key: held for key, held in _entries(state) if isinstance(held, str)}


def parse_state(state: bytes, store: Store) -> dict[int, int]:
    """Read a state file, and the bases that it names; raise ObjectMissing if one is gone."""
    return {
        key: int(store.read(f"{BASES}/{held}")) if isinstance(held, str) else held
        for key, held in _entries(state)
    }


def _entries(state: bytes) -> list[tuple[int, int | str]]:
    if state.startswith(b"PK"):
        with zipfile.ZipFile(io.BytesIO(state)) as archive:
            state = archive.read("counts")
    return [(key, held) for key, held in json.loads(state)]


class RenamingStore(Store, Protocol):
    """A store on which folders can be renamed, as on a file system."""

    def rename_folder(self, folder: str, other: str) -> None:
        """Move everything below `folder` at once."""

    def delete_folder(self, folder: str) -> None:
        """Delete everything below `folder`."""


def _began_at(store: Store, lineage: Lineage) -> LoggedOffsets:
    beginning = json.loads(store.read(f"{BEGINNINGS}/{lineage}"))
    return LoggedOffsets(({TOPIC: {str(p): at for p, at in beginning["ends"]}},))


class SimBucketLog(BucketLog):
    """The product's :class:`BucketLog`, but for what the simulated sources keep elsewhere."""

    __slots__ = ()

    def open_sibling(self, folder: str) -> SimBucketLog:
        """Return the log in another folder of the same job directory."""
        return SimBucketLog(self.store, folder, f"/simulated/{folder}")

    def find_first_offsets(self, lineage: Lineage = FIRST_LINEAGE) -> LoggedOffsets:
        """Return what the log began with."""
        return _began_at(self.store, lineage)


class SimBucketPins(BucketPins):
    """The product's :class:`BucketPins`, in a hurry, and one file after the other."""

    clean_every_ms = 20

    @staticmethod
    def each(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Do something for each."""
        return [do(item) for item in items]


class SimSparkLog(SparkLog):
    """The product's :class:`SparkLog`, where it needs more of a file system than a store has."""

    __slots__ = ()

    def clear_state(self) -> None:
        """Delete all state."""
        self._clear(f"{self.folder}/state")

    def retire(self, lineage: Lineage) -> None:
        """Move everything aside at once, and begin an empty checkpoint."""
        store = cast(RenamingStore, self.store)
        aside = f"spark-retired/{lineage}"
        if store.list(aside):
            for folder in store.list(self.folder):
                self._clear(folder)
        else:
            store.rename_folder(self.folder, aside)
        store.put(f"{self.folder}/metadata", b"{}")

    def forget_retired(self) -> None:
        """Delete what was moved aside."""
        for aside in self.store.list("spark-retired"):
            for folder in self.store.list(aside):
                self._clear(folder)
            self.store.delete(f"{aside}/metadata")

    # -- replays --------------------------------------------------------------------------------
    def begin_replay(self, checkpoint: CheckpointId) -> SimSparkLog:
        """Return a log beside this one."""
        self.end_replay()
        name = f"{REPLAY}/{self._own_name}-{checkpoint}"
        self.store.put(f"{name}/metadata", b"{}")
        return SimSparkLog(self.store, name, str(self.root / name))

    def end_replay(self) -> None:
        """Delete what replays have left, of this owner and of earlier ones."""
        for folder in self.store.list(REPLAY):
            if self._is_up_to_mine(folder.rpartition("/")[2]):
                cast(RenamingStore, self.store).delete_folder(folder)

    def find_first_offsets(self, lineage: Lineage = FIRST_LINEAGE) -> LoggedOffsets:
        """Return what the log began with."""
        return _began_at(self.store, lineage)

    def _clear(self, folder: str) -> None:
        for key in self.store.list(folder):
            self.store.delete(key)


def fence(disk: MemoryStore, store: Store, ownership: Ownership) -> SimSparkLog:
    """Do in memory what `spark_log.fence_spark_folder` does on a disk: one rename is the fence.

    Raises
    ------
    FencedError
        A newer owner has renamed it.
    """
    mine = int(ownership.epoch)
    epochs = _epochs(store.list("spark"))
    older = [epoch for epoch in epochs if epoch < mine]
    if mine not in epochs and older:
        if f"spark/{older[-1]}" not in store.list("spark"):
            raise FencedError(f"the simulated checkpoint {older[-1]} was taken by a newer owner")
        disk.rename_folder(f"spark/{older[-1]}", f"spark/{mine}")
        for stray in older[:-1]:
            for key in disk.below(f"spark/{stray}"):
                disk.delete(key)
    # As Spark does; and a folder that is empty otherwise is still there.
    disk.put(f"spark/{mine}/metadata", b"{}")
    return SimSparkLog(store, f"spark/{mine}", f"/simulated/spark/{mine}")


def _epochs(keys: Sequence[str]) -> list[int]:
    return sorted(int(key.rpartition("/")[2]) for key in keys)
