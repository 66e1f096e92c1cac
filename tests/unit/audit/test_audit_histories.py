"""Random right histories of a job, with all that takes offsets or comes again, and each broken in one way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark.audit import audit as auditing
from flinkish_spark.audit import outputs
from flinkish_spark.audit.audit import AuditResult, AuditSettings, audit
from flinkish_spark.audit.decided import JobDecisions
from flinkish_spark.audit.outputs import OutputKind, OutputSpec
from flinkish_spark.connectors.kafka.client.batches import HEADERS_TYPE
from flinkish_spark.connectors.kafka.client.reader import OffsetRange
from flinkish_spark.protocol.decisions import Decision, Receipt, RewindIntent, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck
from tests.support.cli_rig import JobOnDisk
from tests.support.effort import seeds


@dataclass(frozen=True)
class Rec:
    """A record; of the output with the micro-batch and the origin that it names."""

    key: bytes | None
    batch: str = ""
    origin: tuple[int, int] = (0, 0)


@dataclass
class Log:
    """A partition: committed records by offset, and offsets of markers and aborted records between them."""

    start: int = 0
    end: int = 0
    records: list[tuple[int, Rec]] = field(default_factory=list)

    def append(self, record: Rec) -> None:
        self.records.append((self.end, record))
        self.end += 1


class History:
    """A job that copies a topic: stages, decides, is given up, goes back and is begun anew."""

    def __init__(self, seed: int, root: Path) -> None:
        self.chance = chance = random.Random(seed)
        self.in_values = bool(seed % 2)
        self.on_disk = JobOnDisk(root)
        self.logs = {"in": [self._input() for _ in range(chance.randint(1, 3))]}
        self.logs["out"] = [Log() for _ in range(chance.randint(1, 3))]
        self.position = [log.start for log in self.logs["in"]]
        self.lineage, self.batch, self.checkpoint = 0, 0, 0
        self.staged: list[tuple[str, int]] = []
        #: Checkpoints that can be gone back to: id, next micro-batch, position.
        self.targets: list[tuple[int, int, list[int]]] = [(0, 0, list(self.position))]
        for _ in range(chance.randint(3, 14)):
            steps: list[Callable[[], None]] = [self.stage, self.decide, self.give_up, self.go_back, self.anew]
            chance.choices(steps, [55, 30, 7, 4, 4])[0]()
        self.stage()
        self.decide(is_sure=True)

    def _input(self) -> Log:
        log = Log(start := self.chance.choice([0, 5]), start)
        for _ in range(self.chance.randint(1, 30)):
            log.end += self.chance.choice([0, 0, 0, 1, 3])
            log.append(Rec(self.chance.choice([None, b"a", b"b", b"c"])))
        log.end += 1
        return log

    # -- what a job does --------------------------------------------------------------------------
    def stage(self) -> None:
        """Write what some offsets of each partition hold: in their order, but tasks write side by side."""
        name, tasks, out = f"{self.lineage}/{self.batch}", [], self.logs["out"]
        for partition, log in enumerate(self.logs["in"]):
            first, end = (
                self.position[partition],
                min(log.end, self.position[partition] + self.chance.randint(0, 8)),
            )
            tasks.append([Rec(r.key, name, (partition, o)) for o, r in log.records if first <= o < end])
            self.position[partition] = end
        rows = sum(map(len, tasks))
        for log in out:
            # What an attempt of a task that failed had written, and markers.
            log.end += self.chance.choice([0, 0, 2])
        while tasks := [task for task in tasks if task]:
            record = self.chance.choice(tasks).pop(0)
            out[self.chance.randrange(len(out)) if record.key is None else record.key[0] % len(out)].append(
                record
            )
        self.staged.append((name, rows))
        self.batch += 1

    def decide(self, *, is_sure: bool = False) -> None:
        self.checkpoint += 1
        if not is_sure and (not self.staged or self.chance.random() < 0.15):
            self.on_disk.abort(self.checkpoint, "expired")
            return
        batches = tuple(
            StagedBatch(
                Lineage(int(name.split("/")[0])),
                BatchId(int(name.split("/")[1])),
                OwnerEpoch(1),
                self.checkpoint,
                (SinkAck("out", (TaskAck(0, rows, 0),)),),
                (),
            )
            for name, rows in self.staged
        )
        offsets = json.dumps({"in": {str(p): end for p, end in enumerate(self.position)}})
        one = CheckpointId(self.checkpoint)
        decision = Decision(
            one, Verdict.COMMIT, OwnerEpoch(1), 1, batches=batches, offsets_text=f"v1\n{{}}\n{offsets}"
        )
        self.on_disk.job_dir.create_decision(replace(decision, lineage=batches[-1].lineage))
        self.on_disk.job_dir.create_receipt(Receipt(one, OwnerEpoch(1), 2))
        self.targets.append((self.checkpoint, self.batch, list(self.position)))
        self.staged = []

    def give_up(self) -> None:
        """What is staged dies, and is staged again."""
        self._rewind(RewindKind.PLAIN, self.targets[-1])

    def go_back(self) -> None:
        """To an older checkpoint: what later ones have shown stays in the topic."""
        if len(self.targets) > 1:
            at = self.chance.randrange(1, len(self.targets))
            del self.targets[at + 1 :]
            self._rewind(RewindKind.TO_CHECKPOINT, self.targets[at])

    def anew(self) -> None:
        """Micro-batches are counted from 0 again, and nothing older can be gone back to."""
        self.targets = [(self.targets[-1][0], 0, self.targets[-1][2])]
        self._rewind(RewindKind.RESEED, self.targets[0])

    def _rewind(self, kind: RewindKind, target: tuple[int, int, list[int]]) -> None:
        given_up = {name for name, _ in self.staged}
        for log in self.logs["out"]:
            log.records = [(o, r) for o, r in log.records if r.batch not in given_up]
        self.lineage, self.staged = self.lineage + 1, []
        checkpoint, self.batch, self.position = target[0], target[1], list(target[2])
        to = CheckpointId(checkpoint) if checkpoint else None
        intent = RewindIntent(BatchId(self.batch), Lineage(self.lineage), "test", {}, kind, to)
        self.on_disk.job_dir.create_rewind(intent)
        self.on_disk.job_dir.close_rewind(intent)

    # -- what the audit sees ----------------------------------------------------------------------
    def audit(self, patch: pytest.MonkeyPatch) -> AuditResult:
        def ranges(_: Any, topic: str) -> Iterator[tuple[OffsetRange, int]]:
            for partition, log in enumerate(self.logs[topic]):
                yield OffsetRange(topic, partition, log.start, log.end), 0

        for module in (auditing, outputs):
            patch.setattr(module, "ranges_of", ranges)
            patch.setattr(module, "RangeReader", lambda *_: SimpleNamespace(read=self._read))
            patch.setattr(
                module, "read_topic_retention", lambda *_: {"in": SimpleNamespace(is_compacted=False)}
            )
        settings = AuditSettings(None, ("in",), (OutputSpec("out", OutputKind.KAFKA, "out"),))  # type: ignore[arg-type]
        return audit(self.on_disk.job_dir, self.on_disk.uuid, settings)

    def _read(self, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        log = self.logs[wanted.topic][wanted.partition]
        there = [(o, r) for o, r in log.records if wanted.start <= o < wanted.end]
        size = self.chance.choice([1, 3, 100])
        for at in range(0, len(there), size):
            offsets, records = zip(*there[at : at + size], strict=True)
            said = [
                dict(zip(("_topic", "_partition", "_offset"), ("in", *r.origin), strict=True))
                for r in records
            ]
            headers = [{"flinkish-batch": r.batch} | ({} if self.in_values else one)
                       for r, one in zip(records, said, strict=True)]  # fmt: skip
            columns = {
                "key": pa.array([r.key for r in records], pa.binary()),
                "value": pa.array([json.dumps(one).encode() for one in said], pa.binary()),
                "offset": pa.array(offsets, pa.int64()),
                "headers": pa.array(
                    [[{"key": k, "value": str(v).encode()} for k, v in one.items()] for one in headers],
                    HEADERS_TYPE,
                ),
            }
            yield pa.record_batch(columns)

    # -- what can be broken -----------------------------------------------------------------------
    def live(self) -> list[tuple[Log, int]]:
        """The places of records that no rewind has left behind."""
        decided = JobDecisions.read(self.on_disk.job_dir)
        out = self.logs["out"]
        return [
            (log, at)
            for log in out
            for at, (_, r) in enumerate(log.records)
            if not decided.is_dead_batch(r.batch)
        ]

    def pair(self, is_wanted: Callable[[Rec, Rec], bool]) -> tuple[Log, int, int] | None:
        """Two live records of a partition, the first one first."""
        live = self.live()
        found = [
            (log, at, other)
            for log, at in live
            for of, other in live
            if of is log and at < other and is_wanted(log.records[at][1], log.records[other][1])
        ]
        return self.chance.choice(found) if found else None


def _lost(history: History) -> bool:
    log, at = history.chance.choice(history.live())
    del log.records[at]
    return True


def _unseen(history: History) -> bool:
    log, at = history.chance.choice(history.live())
    gone = log.records[at][1].batch
    for log in history.logs["out"]:
        log.records = [(o, r) for o, r in log.records if r.batch != gone]
    return True


def _twice(history: History) -> bool:
    log, at = history.chance.choice(history.live())
    history.chance.choice(history.logs["out"]).append(log.records[at][1])
    return True


def _swapped(history: History, is_wanted: Callable[[Rec, Rec], bool]) -> bool:
    if found := history.pair(is_wanted):
        log, one, other = found
        first, second = log.records[one], log.records[other]
        log.records[one], log.records[other] = (first[0], second[1]), (second[0], first[1])
    return found is not None


def _of_one_key(one: Rec, other: Rec) -> bool:
    return one.key is not None and one.key == other.key and one.origin[0] == other.origin[0]


def _of_two_batches(one: Rec, other: Rec) -> bool:
    return one.batch != other.batch


def _undecided(history: History) -> bool:
    history.logs["out"][0].append(Rec(b"a", f"{history.lineage}/{history.batch}", (0, 10**6)))
    return True


def _other_batch(history: History) -> bool:
    if found := history.pair(_of_two_batches):
        log, at, other = found
        offset, record = log.records[at]
        log.records[at] = (offset, replace(record, batch=log.records[other][1].batch))
    return found is not None


def _aborted_poll(history: History) -> bool:
    for partition, log in enumerate(history.logs["in"]):
        there = {o for o, _ in log.records}
        for offset in range(log.start, history.position[partition]):
            if offset not in there:
                of, at = history.chance.choice(history.live())
                of.records[at] = (of.records[at][0], replace(of.records[at][1], origin=(partition, offset)))
                return True
    return False


#: What breaks a history, and the number that must tell.
BREAKS: dict[str, tuple[Callable[[History], bool], str]] = {
    "a record is lost": (_lost, "lost"),
    "a micro-batch is unseen": (_unseen, "lost"),
    "a record is there twice": (_twice, "duplicated"),
    "two of a key are exchanged": (lambda h: _swapped(h, _of_one_key), "reordered"),
    "two of two micro-batches are exchanged": (lambda h: _swapped(h, _of_two_batches), "reordered"),
    "an undecided one is visible": (_undecided, "partial_checkpoints"),
    "one names another micro-batch": (_other_batch, "partial_checkpoints"),
    "an aborted one was polled": (_aborted_poll, "unexpected"),
}


@pytest.mark.parametrize("seed", seeds(60))
def test_right_histories_are_called_right_and_broken_ones_by_their_name(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(seed, tmp_path / "right")
    found = history.audit(monkeypatch)
    assert found.zeros == dict.fromkeys(found.zeros, 0), found.examples
    for number, (name, (spoil, kind)) in enumerate(BREAKS.items()):
        history = History(seed, tmp_path / str(number))
        if history.live() and spoil(history):
            assert history.audit(monkeypatch).zeros[kind], name
