"""Two jobs chained over a topic, and a check of their checkpoints that trusts neither of them.

    source --[upstream job]--> middle --[chained job]--> out

Records are orders whose amount is a number of its own, so that contents of topics are sets of numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kafka import KafkaProducer

from flinkish_spark import Json, KafkaSink, KafkaSource, KeyedProcessFunction
from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
from flinkish_spark.connectors.kafka.client.barriers import BARRIER_HEADER, BarrierMark, BarrierRecords
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.upstream_cut import upstream_cut
from flinkish_spark.protocol.decisions import Decision, Verdict
from tests.support.jobs import ORDER, read_committed

WITH_BARRIERS = BarrierRecords.EACH_CHECKPOINT


class PassOn(KeyedProcessFunction):
    """Emits every order as it is."""

    def process_element(self, order, ctx):
        yield order.user, order.amount


@dataclass(frozen=True)
class Chain:
    """The topics, and the two job directories."""

    servers: str
    source: str
    middle: str
    out: str
    upstream_dir: Path
    chained_dir: Path

    def upstream(self, env: Any, **sink: Any) -> Any:
        """Build the upstream job in `env`."""
        source = KafkaSource(self.servers, [self.source], value=Json(ORDER))
        orders = env.from_source(source, uid="orders")
        passed = orders.key_by("user").process(PassOn(), output=ORDER, uid="pass-on")
        settings = {"key": "user", "barriers": WITH_BARRIERS, **sink}
        passed.sink_to(KafkaSink(self.servers, self.middle, **settings), uid="middle")
        return env

    def chained(self, env: Any, upstream: UpstreamJob, **source: Any) -> Any:
        """Build the chained job in `env`; its own barrier records show what its checkpoints hold."""
        settings = {"value": Json(ORDER), "aligned_with": upstream, **source}
        orders = env.from_source(KafkaSource(self.servers, [self.middle], **settings), uid="orders")
        passed = orders.key_by("user").process(PassOn(), output=ORDER, uid="pass-on")
        sink = KafkaSink(self.servers, self.out, key="user", barriers=WITH_BARRIERS)
        passed.sink_to(sink, uid="out")
        return env


@contextmanager
def held_back(chain: Chain, partition: int) -> Iterator[None]:
    """Hide what comes next in a partition of the middle topic behind somebody's open transaction."""
    producer = KafkaProducer(
        bootstrap_servers=chain.servers,
        transactional_id=f"stranger-{chain.middle}",
        transaction_timeout_ms=600_000,
        acks="all",
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(chain.middle, value=b"never seen", partition=partition).get(30)
    try:
        yield
    finally:
        producer.abort_transaction()
        producer.close()


def decisions(job_dir: Path) -> list[Decision]:
    """The COMMIT decisions of a job, in order of id."""
    job = JobDir(LocalStore(job_dir))
    found = [job.decision(checkpoint) for checkpoint in job.list_checkpoint_ids()]
    return [d for d in found if d is not None and d.verdict is Verdict.COMMIT]


@dataclass
class Topic:
    """What a read_committed reader sees of a topic: numbers and barriers, by partition and offset."""

    numbers: dict[int, dict[int, int]] = field(default_factory=dict)
    barriers: dict[int, dict[int, int]] = field(default_factory=dict)
    others: int = 0

    @classmethod
    def read(cls, servers: str, name: str) -> Topic:
        topic = cls()
        for record in read_committed(servers, name):
            marks = [BarrierMark.from_header(v) for key, v in record.headers if key == BARRIER_HEADER]
            if marks:
                assert (record.key, record.value) in ((None, None), (b"flinkish-barrier", None))
                by_partition = topic.barriers.setdefault(int(marks[0].checkpoint), {})
                assert record.partition not in by_partition, "two barriers of one checkpoint"
                by_partition[record.partition] = record.offset
            else:
                number = json.loads(record.value)["amount"]
                topic.numbers.setdefault(record.partition, {})[record.offset] = number
        return topic

    @property
    def content(self) -> Counter[int]:
        return Counter(n for numbers in self.numbers.values() for n in numbers.values())

    def upto(self, ends: Mapping[int, int]) -> Counter[int]:
        """The numbers in front of an offset in each partition; partitions without one hold none."""
        return self.between({p: (0, end) for p, end in ends.items()})

    def between(self, ranges: Mapping[int, tuple[int, int]]) -> Counter[int]:
        return Counter(
            number
            for partition, (start, end) in ranges.items()
            for offset, number in self.numbers.get(partition, {}).items()
            if start <= offset < end
        )


@dataclass
class Checked:
    """What :func:`check_cuts` has looked at."""

    cuts: list[int] = field(default_factory=list)
    unaligned: int = 0
    scans: int = 0


def check_cuts(chain: Chain) -> Checked:
    """Assert for every checkpoint of the chained job that it is the cut that it names.

    Three independent accounts must agree: the positions in the two jobs' decisions, the records in
    front of the barrier records in `middle`, and those in front of the chained job's own in `out`.
    """
    source, middle, out = (Topic.read(chain.servers, t) for t in (chain.source, chain.middle, chain.out))
    upstream = {int(d.checkpoint): _positions(d, chain.source) for d in decisions(chain.upstream_dir)}
    assert set(middle.barriers) == set(upstream), "barriers of checkpoints that were not decided, or none"
    checked = Checked()
    for decision in decisions(chain.chained_dir):
        cut = upstream_cut(decision.offsets_text).get(chain.middle)
        scans = [s for s in LoggedOffsets.parse(decision.offsets_text).sources if chain.middle in (s or ())]
        assert scans.count(scans[0]) == len(scans), "two scans of one source are at different places"
        checked.scans = len(scans)
        holds = middle.upto(_positions(decision, chain.middle))
        # The chained job's own barrier, and with it what it wrote, as one checkpoint.
        assert out.upto(out.barriers[int(decision.checkpoint)]) == holds, decision.checkpoint
        if cut is None:
            assert not holds
            continue
        named = int(cut.checkpoint)
        barriers = middle.barriers[named]
        ranges = {
            p: (at, barriers[p] if end is None else end) for (_, p), (at, end) in cut.channel_state.items()
        }
        assert all(barriers[p] == end for p, (_, end) in ranges.items())
        assert holds + middle.between(ranges) == middle.upto(barriers), (decision.checkpoint, named)
        assert middle.upto(barriers) == source.upto(upstream[named]), named
        checked.cuts.append(named)
        checked.unaligned += bool(middle.between(ranges))
    assert checked.cuts == sorted(checked.cuts)
    return checked


def _positions(decision: Decision, topic: str) -> dict[int, int]:
    return LoggedOffsets.parse(decision.offsets_text).kafka(frozenset({topic})).get(topic, {})
