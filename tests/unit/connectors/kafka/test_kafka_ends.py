"""Ends of Kafka sources: fixed once, kept, and counted; brokers are a stub here."""

from __future__ import annotations

import pytest

from flinkish_spark import KafkaSource, UpstreamJob
from flinkish_spark.contracts.source import NO_JOB, JobPlace
from flinkish_spark.core.errors import ConfigError, JobDirError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.sources import EndAtLatest, EndAtOffsets, EndAtTimestamp


class Brokers:
    """Two partitions whose ends the test moves."""

    def __init__(self, *ends: int) -> None:
        self.ends = dict(enumerate(ends))

    def partition_counts(self, names):
        return dict.fromkeys(names, len(self.ends))

    def end_offsets(self, places):
        return {place: self.ends[place[1]] for place in places}

    def offsets_at(self, wanted):
        return {place: 5 if self.ends[place[1]] > 5 else None for place in wanted}


def source_of(ending) -> KafkaSource:
    return KafkaSource("nowhere:1", ["in"], ending=ending)


def test_the_end_is_where_the_topic_ended_at_the_first_start(tmp_path) -> None:
    job_dir, brokers = JobDir(LocalStore(tmp_path)), Brokers(3, 9)
    first = source_of(EndAtLatest())
    place = JobPlace(StoreSpec(str(tmp_path)), "1-0.json")
    assert first.is_bounded and first.read_recorded_ends(place) is None
    first.fix_end(brokers, job_dir)
    brokers.ends = {0: 70, 1: 90, 2: 5}
    later = source_of(EndAtLatest())
    # A plan may be made before the input is looked at, as by a replay.
    assert later.read_recorded_ends(place) == {("in", 0): 3, ("in", 1): 9} == first.read_recorded_ends(place)
    later.fix_end(brokers, job_dir)
    assert later.read_recorded_ends(NO_JOB) == {("in", 0): 3, ("in", 1): 9}


def test_it_has_ended_when_every_partition_and_every_scan_has(tmp_path) -> None:
    source = source_of(EndAtOffsets({"in": {0: 3, 1: 0}}))
    at = [LoggedOffsets(({"in": {"0": n, "1": 0}}, {"flinkish:checkpoint": 1})) for n in range(5)]
    assert not source.has_ended(at[4])
    source.fix_end(Brokers(1, 1), JobDir(LocalStore(tmp_path)))
    assert [source.has_ended(one) for one in at] == [False, False, False, True, True]
    assert not source.has_ended(LoggedOffsets((*at[4].sources, *at[2].sources)))
    assert not source.has_ended(LoggedOffsets(({"flinkish:checkpoint": 1},)))
    assert [source.channels_in(one) for one in at[2:4]] == [frozenset({0}), frozenset()], (
        "the ended one is out"
    )
    both = source_of(None).channels_in(at[2])
    assert both == {0, 1} and isinstance(both, frozenset)
    read = {("in", 0): 7, ("in", 1): 0, ("in", 2): 4}
    assert source.clip_to_ends(read) == {("in", 0): 3, ("in", 1): 0}
    assert source_of(None).clip_to_ends({("in", 0): 7}) == {("in", 0): 7} and not source_of(None).is_bounded


def test_a_partition_without_so_late_a_record_ends_where_it_is() -> None:
    assert EndAtTimestamp(100).offsets(Brokers(9, 2), [("in", 0), ("in", 1)]) == {("in", 0): 5, ("in", 1): 2}


def test_a_job_keeps_the_end_that_it_began_with(tmp_path) -> None:
    job_dir = JobDir(LocalStore(tmp_path))
    source_of(EndAtLatest()).fix_end(Brokers(1), job_dir)
    with pytest.raises(JobDirError, match=r"has the end .*latest.*, not .*5"):
        source_of(EndAtOffsets({"in": {0: 5}})).fix_end(Brokers(9), job_dir)


@pytest.mark.parametrize("ends", [{"in": {0: 5}}, {"in": {0: 5, 1: 5, 2: 5}}, {"out": {0: 5, 1: 5}}, {}])
def test_an_end_is_needed_for_every_partition(ends) -> None:
    with pytest.raises(ConfigError, match="do not fit its topics at partition"):
        source_of(EndAtOffsets(ends)).check_end(Brokers(1, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EndAtOffsets({"in": {0: -1}}),
        lambda: EndAtOffsets({"in": {"0": 1}}),
        lambda: EndAtOffsets({"in": [1]}),
        lambda: EndAtOffsets([1]),
        lambda: EndAtTimestamp(-1),
        lambda: EndAtTimestamp("2026"),
        lambda: source_of("latest"),
        lambda: source_of(EndAtLatest),
        lambda: KafkaSource("nowhere:1", ["in"], ending=EndAtLatest(), aligned_with=UpstreamJob()),
    ],
)
def test_what_cannot_be_is_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()
