"""Two real jobs chained over a topic: every checkpoint of the second is one cut with one of the first.

What is compared, and how independently, is in tests/support/chained_jobs.py.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pytest
from kafka.admin import KafkaAdminClient, NewPartitions

from flinkish_spark import CheckpointConfig, KafkaSink
from flinkish_spark.checkpoint.control import read_status
from flinkish_spark.connectors.kafka.chaining.upstream import UpstreamJob
from flinkish_spark.connectors.kafka.client.barriers import BARRIER_KEY, BarrierScanner, BarrierWriter
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.settings import ReaderSettings
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.upstream_cut import flatten, upstream_cut
from flinkish_spark.datastream.data_stream import DataStream
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.input_gate import AlignmentMode
from tests.support.chained_jobs import WITH_BARRIERS, Chain, Topic, check_cuts, decisions, held_back
from tests.support.jobs import await_that, environment, order, produce, read_committed, running
from tests.support.open_transactions import still_open

pytestmark = pytest.mark.timeout(600)
USERS = tuple(f"u{i}" for i in range(8))
ALIGNED, UNALIGNED = UpstreamJob(), UpstreamJob(AlignmentMode.UNALIGNED)


class Orders:
    """Feeds the source; every order has a number of its own."""

    def __init__(self, chain: Chain) -> None:
        self._chain, self.sent = chain, 0

    def put(self, count: int, users: tuple[str, ...] = USERS) -> None:
        for user in users:
            values = [order(user, self.sent + n) for n in range(count)]
            produce(self._chain.servers, self._chain.source, values, key=user.encode())
            self.sent += count

    def arrived(self) -> int:
        return sum(Topic.read(self._chain.servers, self._chain.out).content.values())


@pytest.fixture
def chain(broker, topic, tmp_path) -> Chain:
    servers = broker.bootstrap_servers
    return Chain(servers, topic(2), topic(2), topic(2), tmp_path / "upstream", tmp_path / "chained")


def upstream_job(spark, chain, **sink):
    # Every checkpoint of it is one of the chained job, which must keep pace on a busy machine.
    config = CheckpointConfig(interval_ms=3_000, retained=1_000)
    return chain.upstream(environment(spark, chain.upstream_dir, job="upstream", checkpoint=config), **sink)


def chained_job(spark, chain, upstream, **source):
    # A checkpoint that is on offer when the source comes to a cut takes one micro-batch, not two.
    config = CheckpointConfig(interval_ms=300, retained=1_000)
    env = environment(spark, chain.chained_dir, job="chained", checkpoint=config)
    return chain.chained(env, upstream, **source)


def stop(*clients) -> None:
    for client in clients:
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000), "a job did not stop"


def status_text(spark) -> str:
    # Of the running job: one for every start of its query, and those of earlier starts are deleted.
    scratch = Path(spark.sparkContext._temp_dir)
    found = scratch.glob("flinkish-*/*.alignment")
    return "".join(status.text for path in found if (status := read_status(str(path))) is not None)


def drawn_at(chain: Chain) -> set[int]:
    """Return the upstream checkpoints whose cuts the chained job's checkpoints are."""
    cuts = (upstream_cut(d.offsets_text).get(chain.middle) for d in decisions(chain.chained_dir))
    return {int(cut.checkpoint) for cut in cuts if cut is not None}


def unaligned_decisions(chain: Chain):
    found = [(d, upstream_cut(d.offsets_text).get(chain.middle)) for d in decisions(chain.chained_dir)]
    return [(d, cut) for d, cut in found if cut is not None and cut.channel_state]


def assert_all_is_there(chain: Chain, orders: Orders) -> None:
    out = Topic.read(chain.servers, chain.out).content
    assert out == Topic.read(chain.servers, chain.middle).content
    assert (len(out), set(out.values())) == (orders.sent, {1})
    with TransactionClient(KafkaConnection(chain.servers)) as client:
        for job_dir in (chain.upstream_dir, chain.chained_dir):
            job = JobDir(LocalStore(job_dir)).find_uuid()
            assert job is not None
            assert not still_open(client, job)


def test_aligned_jobs_with_a_slow_partition(spark, broker, chain, topic):
    """behaviour 96: the fast partition waits at its barrier, and both jobs' checkpoints hold the same.

    The chained job has two branches, so Spark scans its source more than once; a partition is added.
    """
    orders, other = Orders(chain), replace(chain, out=topic(1))
    orders.put(2)
    with ExitStack() as stack:
        first = stack.enter_context(running(upstream_job(spark, chain)))
        await_that(lambda: first.progress.checkpoints > 0, first)
        env = chained_job(spark, chain, ALIGNED, max_offsets_per_trigger=30)
        second = stack.enter_context(running(with_second_branch(env, other)))
        await_that(lambda: second.progress.checkpoints > 0, second)
        with held_back(chain, partition=1):
            orders.put(4)
            waits = f"{chain.middle}-1 (not visible yet"
            await_that(lambda: waits in status_text(spark), second)
            seen = first.progress.checkpoints
            # Two: the barriers of one may stand in front of the stranger's transaction, and show later.
            await_that(lambda: first.progress.checkpoints > seen + 1, first)
            barriers = Topic.read(chain.servers, chain.middle).barriers
            ahead = {checkpoint: at[0] for checkpoint, at in barriers.items() if 1 not in at}
            assert ahead
            assert not ahead.keys() & drawn_at(chain)
            read = [positions.get(0, 0) for positions, _ in logged(chain).values()]
            assert max(read) <= min(ahead.values()) + 1
        add_a_partition(chain)
        # One user has most of the orders.
        orders.put(50, USERS[:1])
        orders.put(3)
        await_that(lambda: orders.arrived() == orders.sent, second, timeout_s=200)
        # The upstream job rests when the other one takes its last checkpoint.
        stop(first)
        stop(second)
    checked = check_cuts(chain)
    assert len(set(checked.cuts)) >= 3
    assert checked.unaligned == 0
    assert checked.scans > 1
    assert check_cuts(other).cuts == checked.cuts
    assert_all_is_there(chain, orders)


def with_second_branch(env, chain):
    """Add a sink behind a transform of the source, which barriers must not go through."""
    kept = DataStream(env, env.graph.sources[0]).transform(lambda df: df.where("amount >= 0"))
    kept.sink_to(KafkaSink(chain.servers, chain.out, key="user", barriers=WITH_BARRIERS), uid="plain")
    return env


def add_a_partition(chain: Chain) -> None:
    admin = KafkaAdminClient(bootstrap_servers=chain.servers)
    admin.create_partitions({chain.middle: NewPartitions(total_count=3)})
    admin.close()


@pytest.mark.nightly
def test_unaligned_jobs_replay_what_was_in_flight(spark, broker, chain):
    """behaviour 121: the checkpoint does not wait for the slow partition; a restart reads its rest first."""
    orders = Orders(chain)
    orders.put(2)
    with ExitStack() as stack:
        first = stack.enter_context(running(upstream_job(spark, chain)))
        await_that(lambda: first.progress.checkpoints > 0, first)
        with held_back(chain, partition=1):
            with running(chained_job(spark, chain, UNALIGNED)) as second:
                orders.put(5)
                await_that(lambda: unaligned_decisions(chain), second)
                orders.put(5)
                seen = first.progress.checkpoints
                await_that(lambda: first.progress.checkpoints > seen + 1, first)
                second.cancel()
                assert second.wait(timeout_ms=240_000)
            before = logged(chain)
        # Somewhere behind the barrier in one partition, in front of it in the other.
        newest, channel_state = before[max(before)]
        assert channel_state == {1: [newest[1], None]}
        second = stack.enter_context(running(chained_job(spark, chain, UNALIGNED, max_offsets_per_trigger=4)))
        await_that(lambda: orders.arrived() == orders.sent, second)
        stop(first)
        stop(second)
    replayed = [logged_ for batch, logged_ in sorted(logged(chain).items()) if batch > max(before)]
    while_replaying = [positions[0] for positions, _ in takewhile(lambda entry: entry[1], replayed)]
    assert len(while_replaying) > 1
    assert set(while_replaying) == {newest[0]}
    checked = check_cuts(chain)
    assert checked.unaligned >= 1
    assert_all_is_there(chain, orders)


def logged(chain: Chain) -> dict[int, tuple[dict[int, int], dict[int, list[int | None]]]]:
    """Positions and channel state in the chained job's offset log, by micro-batch."""
    found = {}
    for folder in sorted((chain.chained_dir / "spark").glob("*/offsets")):
        for entry in folder.glob("[0-9]*"):
            offset = json.loads(entry.read_text().split("\n")[2])
            left = flatten(offset.get("flinkish:channel-state", {}))
            positions = {int(p): o for p, o in offset.get(chain.middle, {}).items()}
            found[int(entry.name)] = (positions, {p: value for (_, p), value in left.items()})
    return found


def test_a_job_whose_upstream_writes_no_barriers_says_so(spark, broker, chain, topic):
    orders = Orders(replace(chain, source=chain.middle))
    orders.put(2)
    with running(chained_job(spark, chain, ALIGNED)) as client:
        says = "has seen no barrier record yet. The upstream job's Kafka sink needs barriers="
        await_that(lambda: says in status_text(spark), client)
        assert client.progress.checkpoints == 0


# -- without Spark ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["delete", "compact"])
def test_barrier_records_of_a_topic(broker, topic, policy):
    """What stays invisible until it is committed, and what ordinary readers see."""
    servers, name = broker.bootstrap_servers, topic(3, {"cleanup.policy": policy})
    connection = KafkaConnection(servers)
    writer = BarrierWriter(connection, name, JobUuid("a" * 32), "out", 60_000)
    scanner = BarrierScanner(connection, ReaderSettings())
    with TransactionClient(connection) as client:
        for checkpoint in (4, 5, 6):
            staged = writer.stage(CheckpointId(checkpoint), Lineage(0), f"barriers-{name}-{checkpoint}")
            assert staged.records == 3
            if checkpoint == 5:
                client.abort(staged)
            else:
                client.commit(staged)
    for partition in range(3):
        seen = scanner.scan((name, partition), 0, 5)
        marks = [one.mark for one in seen.barriers]
        assert [(int(m.checkpoint), m.previous, m.partitions) for m in marks] == [
            (4, None, 3),
            (6, CheckpointId(5), 3),
        ]
        assert seen.end == 5
        assert scanner.scan((name, partition), 1, 4).end == 1
        assert scanner.scan((name, partition), 3, 3).barriers == ()
    records = read_committed(servers, name)
    assert len(records) == 6
    key = BARRIER_KEY if policy == "compact" else None
    assert {(r.key, r.value) for r in records} == {(key, None)}
    assert pa.array([r.value for r in records]).null_count == 6
