"""Topics as text, and a chained source that reads them without brokers.

A partition is a line of tokens, one per offset: a word is a record, ``|7`` the barrier of upstream
checkpoint 7 (``|7/3``: of a topic with three partitions then), ``.`` an offset without a record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flinkish_spark.connectors.kafka.chaining.alignment import Offer, View, plan_micro_batch
from flinkish_spark.connectors.kafka.chaining.cut_state import CutState
from flinkish_spark.connectors.kafka.client.barriers import BarrierMark, BarrierScan, SeenBarrier
from flinkish_spark.connectors.kafka.offset_ranges import from_json, to_json
from flinkish_spark.core.upstream_cut import (
    CHANNEL_STATE_KEY,
    Cut,
    CutPhase,
    UpstreamCut,
    flatten,
    upstream_cut,
)
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage, Place
from flinkish_spark.protocol.input_gate import AlignmentMode, AlignmentSettings, BarrierKind

JOB = JobUuid("a" * 32)
TOPIC = "t"


def mark(
    checkpoint: int, partitions: int = 2, previous: int | None = None, job: JobUuid = JOB, sink: str = "out"
) -> BarrierMark:
    before = None if previous is None else CheckpointId(previous)
    return BarrierMark(job, sink, CheckpointId(checkpoint), Lineage(0), partitions, before, 0)


def barrier_of(token: str, partitions: int) -> BarrierMark | None:
    if not token.startswith("|"):
        return None
    number, _, count = token[1:].partition("/")
    return mark(int(number), int(count or partitions))


@dataclass
class Log:
    """Some partitions of one topic, each visible up to a place of its own."""

    lines: list[list[str]]
    visible: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, *lines: str) -> Log:
        return cls([line.split() for line in lines], [len(line.split()) for line in lines])

    @property
    def places(self) -> list[Place]:
        return [(TOPIC, p) for p in range(len(self.lines))]

    def scan(self, place: Place, start: int, end: int) -> BarrierScan:
        line = self.lines[place[1]]
        assert end <= len(line), f"{place} is read up to {end}"
        seen = [(o, line[o]) for o in range(start, end) if line[o] != "."]
        marks = [(offset, barrier_of(token, len(self.lines))) for offset, token in seen]
        barriers = tuple(SeenBarrier(offset, found) for offset, found in marks if found is not None)
        return BarrierScan(seen[-1][0] + 1 if seen else start, barriers)

    def records(self, partition: int, start: int, end: int) -> list[str]:
        return [token for token in self.lines[partition][start:end] if token != "." and token[0] != "|"]

    def barrier(self, partition: int, checkpoint: int) -> int:
        tokens = [token.partition("/")[0] for token in self.lines[partition]]
        return tokens.index(f"|{checkpoint}")


@dataclass(frozen=True)
class Drawn:
    """A checkpoint of the chained job: its upstream cut and all that it holds."""

    checkpoint: int
    cut: UpstreamCut | None
    offset: str
    positions: Mapping[Place, int]

    @property
    def upstream(self) -> int | None:
        return None if self.cut is None else int(self.cut.checkpoint)


class Chained:
    """A chained job over a log. Its whole state is the text of an offset, as in Spark's log.

    Parameters
    ----------
    start
        Offsets at which it begins, by partition; 0 for others.
    behind
        The upstream checkpoint whose cut is right there, as if it had come to it before; None for none.
    """

    def __init__(
        self,
        log: Log,
        mode: AlignmentMode = AlignmentMode.ALIGNED,
        timeout_ms: int | None = None,
        start: Mapping[int, int] | None = None,
        behind: int | None = None,
    ) -> None:
        self.log, self.settings = log, AlignmentSettings(mode, alignment_timeout_ms=timeout_ms)
        begin = {place: (start or {}).get(place[1], 0) for place in log.places}
        state = replace(CutState.create_at_start(begin, self.settings), job=JOB)
        if behind is not None:
            cut = CheckpointId(behind)
            gate = replace(state.gate, newest=cut)
            state = replace(state, gate=gate, cut=Cut(cut, CutPhase.TAKEN), passed=dict.fromkeys(begin, cut))
        self.offset = self._text(begin, 0, state)
        self.offer = Offer(CheckpointId(0))
        self.now_ms = 0
        self.start = dict(start or {})
        self.delivered: list[list[str]] = [[] for _ in log.lines]
        self.drawn: list[Drawn] = []
        self.skipped: list[int] = []
        self._is_replaying = bool(state.channel_state)

    # -- what happens ---------------------------------------------------------------------------
    def offers(self, checkpoint: int, kind: BarrierKind = BarrierKind.CHECKPOINT) -> Chained:
        self.offer = Offer(CheckpointId(checkpoint), kind)
        return self

    def step(self, most: int | None = None) -> bool:
        """Plan and run one micro-batch; return whether there was one."""
        begin, drawn, state = self.parsed()
        for place in self.log.places:
            begin.setdefault(place, 0)
            while len(self.delivered) < len(self.log.lines):
                self.delivered.append([])
        self._is_replaying = self._is_replaying and bool(state.channel_state)
        held = frozenset(begin.keys() - state.channel_state.keys()) if self._is_replaying else frozenset()
        ahead = {place: self._ahead(place, begin[place]) for place in begin}
        view = View(begin, ahead, CheckpointId(drawn), self.offer, self.now_ms, most, held)
        planned = plan_micro_batch(state, view, self.settings)
        if planned is None:
            return False
        for (_, p), end in planned.end.items():
            self.delivered[p] += self.log.records(p, begin[TOPIC, p], end)
        self.skipped += [int(c) for c in planned.skipped]
        self.offset = self._text(planned.end, int(planned.drawn), planned.state)
        if int(planned.drawn) > drawn:
            text = "v1\n{}\n" + self.offset
            cut = upstream_cut(text).get(TOPIC)
            self.drawn.append(Drawn(int(planned.drawn), cut, self.offset, dict(planned.end)))
        return True

    def run(self, most: int | None = None, limit: int = 200) -> Chained:
        """Run micro-batches until there is nothing to run."""
        for _ in range(limit):
            if not self.step(most):
                return self
        raise AssertionError(f"there is no end: {self.offset}")

    def without_cuts(self) -> Chained:
        """Stand where a job stands that has not looked for cuts so far."""
        begin, drawn, _ = self.parsed()
        self.offset = self._text(begin, drawn, replace(CutState.create_midway(begin, self.settings), job=JOB))
        return self

    def restart(self) -> Chained:
        """Let another process plan from here on."""
        self._is_replaying = True
        return self

    def restore(self, drawn: Drawn) -> Chained:
        """Go back to a checkpoint, in another process."""
        self.offset = drawn.offset
        self.delivered = [[] for _ in self.log.lines]
        for (_, p), end in drawn.positions.items():
            self.delivered[p] = self.log.records(p, self.start.get(p, 0), end)
        return self.restart()

    # -- what it shows --------------------------------------------------------------------------
    def parsed(self) -> tuple[dict[Place, int], int, CutState]:
        offset = json.loads(self.offset)
        state = CutState.from_json(offset, self.settings)
        assert state is not None
        topics = {topic: value for topic, value in offset.items() if not topic.startswith("flinkish:")}
        return from_json(topics), offset["flinkish:checkpoint"], state

    @property
    def state(self) -> CutState:
        return self.parsed()[2]

    @property
    def at(self) -> list[int]:
        """Where each partition is."""
        return [offset for _, offset in sorted(self.parsed()[0].items())]

    @property
    def channel_state(self) -> dict[int, tuple[int, int | None]]:
        ranges = flatten(json.loads(self.offset).get(CHANNEL_STATE_KEY, {}))
        return {p: (start, end) for (_, p), (start, end) in ranges.items()}

    def _ahead(self, place: Place, begin: int) -> BarrierScan:
        return self.log.scan(place, begin, max(begin, self.log.visible[place[1]]))

    @staticmethod
    def _text(positions: Mapping[Place, int], drawn: int, state: CutState) -> str:
        entries = {**to_json(positions), "flinkish:checkpoint": drawn}
        return json.dumps({**entries, **state.to_json(positions)})
