"""Where sources end when a run starts, and whether a position has come to these ends."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark import KafkaSource, StartingOffsets, UpstreamJob
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import SourceUnavailable
from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.job.catch_up import CatchUp, check_can_catch_up
from flinkish_spark.job.inputs import Inputs
from flinkish_spark.protocol.ids import BatchId
from flinkish_spark.sources import CollectionSource, EndAtOffsets, HybridSource, SocketTextSource, SplitSource

NO_DIR: Any = None


class Numbers(SplitSource):
    """A split of as many numbers as the test says."""

    schema = "n LONG"

    def __init__(self, **counts: int) -> None:
        self.counts = counts

    def splits(self):
        return [*self.counts]

    def latest(self, split, start, limit):
        return self.counts[split]

    def read(self, split, start, end):
        return ((n,) for n in range(start, end))


def at(uid: str, **offsets: Any) -> LoggedOffsets:
    return LoggedOffsets((SplitPosition(uid, offsets).to_json(),))


def inputs(source: SplitSource, text: str | None) -> Inputs:
    """Inputs whose log has one micro-batch with an entry, or none."""
    log: Any = SimpleNamespace(
        batches=lambda kind: [] if text is None else [0], read=lambda kind, batch: text
    )
    return Inputs([SourceNode("numbers", source)], NO_DIR, log)


def reading(source: SplitSource, position: LoggedOffsets) -> Inputs:
    """Inputs whose log says how far a micro-batch reads."""
    given: Any = SimpleNamespace(sources=inputs(source, None).sources, read_by=lambda batch: position)
    return given


def test_nothing_is_reached_by_a_run_that_goes_on() -> None:
    source = Numbers(a=0).bind("numbers")
    catch_up = CatchUp(is_wanted=False)
    catch_up.look(inputs(source, None), BatchId(0))
    assert not catch_up.is_reached


def test_a_split_is_read_up_to_where_it_ended() -> None:
    source = Numbers(a=3, b=0).bind("numbers")
    end = source.newest(NO_DIR, "numbers", None)
    assert end == {"a": 3, "b": 0}
    assert not source.has_reached(end, LoggedOffsets(()))
    of = partial(at, "numbers")
    assert not source.has_reached(end, of(a=2, b=0))
    assert not source.has_reached(end, of(a=3))
    assert source.has_reached(end, of(a=3, b=0))
    assert source.has_reached(end, of(a=9, b=1, c=0))


def test_all_parts_of_a_hybrid_source_have_ends_from_the_start() -> None:
    whole = HybridSource(CollectionSource([1, 2], "n LONG"), Numbers(a=3)).bind("both")
    end = whole.newest(NO_DIR, "both", None)
    assert end == {"0:all": 2, "1:a": 3}
    of = partial(at, "both")
    assert not whole.has_reached(end, of(**{"0:all": 2}))
    assert whole.has_reached(end, of(**{"0:all": 2, "1:a": 3}))


class Ending(Numbers):
    """Ends at ten, wherever it is now."""

    is_bounded = True

    def end(self, split):
        return 10


def test_a_part_that_waits_for_its_end_holds_back_the_next() -> None:
    """So the run does not wait for a part that cannot begin."""
    whole = HybridSource(Ending(a=3), Numbers(b=5)).bind("both")
    assert whole.newest(NO_DIR, "both", None) == {"0:a": 3}
    whole = HybridSource(Ending(a=10), Numbers(b=5)).bind("both")
    assert whole.newest(NO_DIR, "both", None) == {"0:a": 10, "1:b": 5}


def test_a_split_that_is_done_is_not_asked_again() -> None:
    source = Numbers(a=3, gone=0).bind("numbers")
    source.latest = lambda split, start, limit: 3 if split == "a" else 1 / 0  # type: ignore[method-assign]
    read = LoggedOffsets((SplitPosition("numbers", {"a": 1, "gone": 7}, done=frozenset({"gone"})).to_json(),))
    assert source.newest(NO_DIR, "numbers", read) == {"a": 3, "gone": 7}


def test_offsets_without_an_order_are_refused() -> None:
    source = Numbers(a="text").bind("numbers")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Only of numbers"):
        source.newest(NO_DIR, "numbers", None)


def test_a_partition_of_kafka_counts_with_its_end_and_never_beyond_that_of_the_source() -> None:
    source = KafkaSource("broker:9092", ["in"], starting_offsets=StartingOffsets.EARLIEST)
    ends = {("in", 0): 7, ("in", 1): 0}
    admin = SimpleNamespace(end_offsets=lambda places: ends, partition_counts=lambda names: {"in": 2})
    source.__dict__["_admin"] = admin
    end = source.newest(NO_DIR, "in", None)
    assert end == {"in": {"0": 7, "1": 0}}
    assert not source.has_reached(end, LoggedOffsets(({"in": {"0": 7}},)))
    assert not source.has_reached(end, LoggedOffsets(({"in": {"0": 6, "1": 0}},)))
    assert source.has_reached(end, LoggedOffsets(({"in": {"0": 8, "1": 0}},)))
    bounded = KafkaSource("broker:9092", ["in"], ending=EndAtOffsets({"in": {0: 5, 1: 0}}))
    bounded.__dict__.update(_admin=admin, _ends={("in", 0): 5, ("in", 1): 0})
    assert bounded.newest(NO_DIR, "in", None) == {"in": {"0": 5, "1": 0}}


def test_ends_are_asked_for_once_and_an_outage_is_asked_again() -> None:
    source = Numbers(a=3).bind("numbers")
    asked = []

    def newest(job_dir, uid, position):
        asked.append(position)
        if len(asked) == 1:
            raise SourceUnavailable("away")
        return {"a": 3}

    object.__setattr__(source, "newest", newest)
    catch_up, given = CatchUp(), inputs(source, None)
    assert not catch_up.fix_ends(given)
    assert catch_up.fix_ends(given) and catch_up.fix_ends(given)
    assert len(asked) == 2
    assert not catch_up.is_reached
    catch_up.look(reading(source, at("numbers", a=2)), BatchId(0))
    assert not catch_up.is_reached
    catch_up.look(reading(source, at("numbers", a=3)), BatchId(1))
    assert catch_up.is_reached
    # The log is not read again.
    catch_up.look(given, BatchId(2))


def test_a_scan_that_has_not_said_where_it_begins_is_waited_for() -> None:
    source = Numbers(a=3).bind("numbers")
    catch_up, given = CatchUp(), inputs(source, None)
    catch_up.fix_ends(given)
    (there,) = at("numbers", a=3).sources
    catch_up.look(reading(source, LoggedOffsets((there, None))), BatchId(0))
    assert not catch_up.is_reached


def test_who_cannot_say_an_end_is_refused_by_name() -> None:
    chained = KafkaSource("broker:9092", ["in"], aligned_with=UpstreamJob())
    node = SourceNode("orders", chained)
    with pytest.raises(GraphError, match=r"'orders' cannot be read until .*\. Its checkpoints"):
        check_can_catch_up([node], [])
    plain = SourceNode("orders", KafkaSource("broker:9092", ["in"]))
    check_can_catch_up([plain], [])
    with pytest.raises(GraphError, match="hold it back"):
        check_can_catch_up([plain], ["orders"])
    socket = SourceNode("lines", SocketTextSource("localhost", 9999).bind("lines"))
    with pytest.raises(GraphError, match="where its input ends"):
        check_can_catch_up([socket], [])
