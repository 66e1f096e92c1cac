"""Where Kafka sources begin, and which partitions they read; brokers are a stub here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flinkish_spark import Json, KafkaSource, StartingOffsets, UpstreamJob
from flinkish_spark.connectors.kafka import source as kafka_source
from flinkish_spark.connectors.kafka.source import to_subscription_options
from flinkish_spark.contracts.source import NO_JOB, JobPlace, SourceStart
from flinkish_spark.core.errors import ConfigError, GraphError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.preflight import check_loops
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.sources import (
    EndAtLatest,
    EndAtOffsets,
    KafkaRecordsSource,
    StartAtCommittedOffsets,
    StartAtOffsets,
    StartAtTimestamp,
)
from flinkish_spark.transport.channels import channel_by_name, channel_of, check_distinct_channels
from flinkish_spark.transport.columns import Origins

PLACES = [("in", 0), ("in", 1)]


class Brokers:
    """Partitions that hold what the test says; stands in for KafkaAdmin."""

    def __init__(self, *held: tuple[int, int], **groups: dict[int, int]) -> None:
        self.held, self.groups = dict(enumerate(held)), groups

    def __enter__(self) -> Brokers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def partition_counts(self, names):
        return dict.fromkeys(names, len(self.held))

    def beginning_offsets(self, places):
        return {(t, p): self.held[p][0] for t, p in places}

    def end_offsets(self, places):
        return {(t, p): self.held[p][1] for t, p in places}

    def offsets_at(self, wanted):
        return {(t, p): 5 if self.held[p][1] > 5 else None for t, p in wanted}

    def committed_offsets(self, group, isolation=None):
        return {("in", p): at for p, at in self.groups.get(group, {}).items()} | {("other", 0): 3}


BROKERS = Brokers((2, 9), (0, 3), ours={0: 4})


@pytest.mark.parametrize(
    ("start", "wanted"),
    [
        (StartingOffsets.EARLIEST, (2, 0)),
        (StartingOffsets.LATEST, (9, 3)),
        (StartAtTimestamp(100), (5, 3)),
        (StartAtOffsets({"in": {0: 9, 1: 0}}), (9, 0)),
        (StartAtOffsets({"in": {1: 2}}), (2, 2)),
        (StartAtOffsets({"in": {1: 2}}, StartingOffsets.LATEST), (9, 2)),
        (StartAtOffsets(), (2, 0)),
        (StartAtCommittedOffsets("ours"), (4, 0)),
        (StartAtCommittedOffsets("ours", StartingOffsets.LATEST), (4, 3)),
        (StartAtCommittedOffsets("nobody"), (2, 0)),
    ],
)
def test_every_partition_has_a_beginning(start, wanted) -> None:
    assert start.offsets(BROKERS, PLACES) == dict(zip(PLACES, wanted, strict=True))


@pytest.mark.parametrize(
    ("start", "brokers", "message"),
    [
        (StartAtOffsets({"in": {0: 1}}), BROKERS, "names the offset 1 of in-0, which holds 2 to 9"),
        (StartAtOffsets({"in": {1: 4}}), BROKERS, "names the offset 4 of in-1, which holds 0 to 3"),
        (StartAtOffsets({"in": {2: 0}}), BROKERS, "names the partition in-2, which the source does not read"),
        (StartAtOffsets({"out": {0: 0}}), BROKERS, "names the partition out-0"),
        (
            StartAtCommittedOffsets("old"),
            Brokers((7, 9), (0, 3), old={0: 4}),
            "group 'old' stands at the offset 4",
        ),
    ],
)
def test_a_beginning_that_is_not_there_is_refused(start, brokers, message) -> None:
    with pytest.raises(ConfigError, match=message):
        start.offsets(brokers, PLACES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: StartAtTimestamp(-1),
        lambda: StartAtTimestamp("2026"),
        lambda: StartAtOffsets([1]),
        lambda: StartAtOffsets({"in": [1]}),
        lambda: StartAtOffsets({"in": {"0": 1}}),
        lambda: StartAtOffsets({"in": {0: -1}}),
        lambda: StartAtOffsets({"in": {0: 1}}, otherwise="earliest"),
        lambda: StartAtCommittedOffsets(None),
        lambda: StartAtCommittedOffsets("g", otherwise=None),
        lambda: KafkaSource("nowhere:1", ["in"], starting_offsets="middle"),
        lambda: KafkaSource("nowhere:1", ["in"], starting_offsets=StartAtTimestamp),
        lambda: KafkaSource("nowhere:1", ["in"], starting_offsets=StartAtCommittedOffsets()),
        lambda: KafkaSource("nowhere:1"),
        *(
            lambda source=source, given=given: source(**{"bootstrap_servers": "nowhere:1", **given})
            for source in (partial(KafkaSource, topics=["in"]), partial(KafkaRecordsSource, topics=["in"]))
            for given in (
                *({"bootstrap_servers": wrong} for wrong in (None, 5, "", "nowhere")),
                *({"options": wrong} for wrong in ("x", 5, ["a"], {"fetch.max.bytes": 5}, {5: "a"})),
                *({"group_id": wrong} for wrong in (None, 5, b"in")),
                *({"metadata": wrong, "value": Json("n LONG")} for wrong in (None, "topic", 5, {"topic"})),
            )
        ),
        *(
            lambda wrong=wrong: KafkaSource("nowhere:1", ["in"], max_offsets_per_trigger=wrong)
            for wrong in ("x", None, -1, 1.5, True, float("nan"))
        ),
        lambda: KafkaSource("nowhere:1", ["in"], reader_options="x"),
        lambda: KafkaSource("nowhere:1", ["in"], reader_options={5: "x"}),
        lambda: KafkaSource("nowhere:1", ["in"], pattern="in-.*"),
        lambda: KafkaSource("nowhere:1", pattern="in-.*", partitions={"in-1": [0]}),
        lambda: KafkaSource("nowhere:1", pattern="[a&&b]"),
        lambda: KafkaSource("nowhere:1", pattern="in-.*", aligned_with=UpstreamJob()),
        lambda: KafkaSource("nowhere:1", ["in"], partitions={}),
        lambda: KafkaSource("nowhere:1", ["in"], partitions={"in": []}),
        lambda: KafkaSource("nowhere:1", ["in"], partitions={"in": "01"}),
        lambda: KafkaSource("nowhere:1", ["in"], partitions={"in": [-1]}),
        lambda: KafkaSource("nowhere:1", ["in"], partitions={"out": [0]}),
        lambda: KafkaSource("nowhere:1", ["in"], partitions={"in": [0]}, aligned_with=UpstreamJob()),
    ],
)
def test_what_cannot_be_is_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()


# -- what a job keeps of it ----------------------------------------------------------------------------


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    found = Brokers((2, 9), (0, 3), ours={0: 4})
    monkeypatch.setattr(kafka_source, "KafkaAdmin", lambda *_, **__: found)
    return found


def place_in(folder: Path) -> JobPlace:
    return JobPlace(StoreSpec(str(folder)), str(folder / "scratch" / "1-0.json"))


def job_in(folder: Path) -> JobPlace:
    JobDir(LocalStore(folder)).read_or_create_job({"job": "it"}, {"uuid": str(JobUuid("0" * 31 + "1"))})
    return place_in(folder)


def source_of(start: Any, **more: Any) -> KafkaSource:
    return KafkaSource("nowhere:1", ["in"], starting_offsets=start, **more)


def test_a_job_begins_where_its_group_stood_at_the_first_start(tmp_path: Path, brokers: Brokers) -> None:
    source = source_of(StartAtCommittedOffsets(), group_id="ours")
    assert source.starting_option(place_in(tmp_path)) == "earliest", "only looked at"
    place = job_in(tmp_path)
    wanted = {"in": {"0": 4, "1": 0}}
    assert json.loads(source.starting_option(place)) == wanted
    # The group goes on, the log loses its beginning, a partition is added: what was fixed stays.
    brokers.groups["ours"], brokers.held = {0: 9, 1: 3}, {0: (5, 9), 1: (0, 3), 2: (0, 8)}
    again = source_of(StartAtCommittedOffsets(), group_id="ours")
    assert json.loads(again.starting_option(place)) == {"in": {"0": 4, "1": 0, "2": -2}}


def test_outside_of_a_job_nothing_is_kept(brokers: Brokers) -> None:
    source = source_of(StartAtOffsets({"in": {0: 7}}))
    assert json.loads(source.starting_option(NO_JOB)) == {"in": {"0": 7, "1": 0}}


def test_words_are_left_to_the_reader_and_a_savepoint_comes_first(tmp_path: Path, brokers: Brokers) -> None:
    place = job_in(tmp_path)
    assert source_of(StartingOffsets.EARLIEST).starting_option(place) == "earliest"
    assert source_of(StartingOffsets.LATEST).starting_option(place) == "latest"
    start = SourceStart({"in": {"0": 8}, "flinkish:checkpoint": 3}, str(tmp_path), "x")
    # What was added behind the savepoint is read whole; the setting is not even looked at.
    moved = source_of(StartAtOffsets({"in": {0: 700}})).starting_at(start)
    assert json.loads(moved.starting_option(place)) == {"in": {"0": 8, "1": -2}}


def test_single_partitions_begin_and_end_alone(tmp_path: Path, brokers: Brokers) -> None:
    source = source_of(StartAtTimestamp(1), partitions={"in": [1]}, ending=EndAtLatest())
    assert json.loads(source.starting_option(job_in(tmp_path))) == {"in": {"1": 3}}
    source.fix_end(brokers, JobDir(LocalStore(tmp_path)))
    assert source.read_recorded_ends(place_in(Path("/x"))) == {("in", 1): 3}
    assert source.has_ended(LoggedOffsets(({"in": {"1": 3}},)))
    with pytest.raises(GraphError, match="no partition 7"):
        source_of(StartingOffsets.EARLIEST, partitions={"in": [0, 7]}).places(brokers)
    with pytest.raises(ConfigError, match="do not fit its topics at partition 1"):
        source_of(
            StartingOffsets.EARLIEST, partitions={"in": [0]}, ending=EndAtOffsets({"in": {0: 1, 1: 1}})
        ).check_end(brokers)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_offsets_per_second": 0},
        {"max_offsets_per_second": "5"},
        {"max_offsets_per_second": None},
        {"max_offsets_per_second": 5, "aligned_with": UpstreamJob()},
    ],
)
def test_a_pace_that_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KafkaSource("nowhere:1", ["in"], **settings)


def test_what_can_be_aligned() -> None:
    KafkaSource("nowhere:1", ["in"], max_offsets_per_second=0.5).check_alignable("in")
    with pytest.raises(GraphError, match="aligned_with"):
        KafkaSource("nowhere:1", ["in"], aligned_with=UpstreamJob()).check_alignable("in")


# -- topics by a pattern -------------------------------------------------------------------------------


def by_pattern(pattern: str = "in.*", **more: Any) -> KafkaSource:
    return KafkaSource("nowhere:1", pattern=pattern, **more)


def test_a_pattern_takes_its_own_out_of_a_log() -> None:
    logged = LoggedOffsets(
        ({"in": {"0": 5, "1": 7}, "flinkish:checkpoint": 3}, {"in-2": {"0": 1}}, {"other": {"0": 9}}, None)
    )
    source = by_pattern()
    assert source.offsets_in(logged) == {("in", 0): 5, ("in", 1): 7, ("in-2", 0): 1}
    assert by_pattern("nothing").offsets_in(logged) == {}
    wanted = {channel_by_name("in", 0), channel_by_name("in", 1), channel_by_name("in-2", 0)}
    assert source.channels_in(logged) == wanted and min(wanted) > 0
    assert to_subscription_options(source.wanted) == {"subscribePattern": "in.*"}
    assert (source.plan_name, KafkaSource("nowhere:1", ["in"]).plan_name) == ("pattern", "")


def test_topics_that_come_later_are_behind_an_end_and_at_a_beginning(
    tmp_path: Path, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ["in"]
    monkeypatch.setattr(KafkaSource, "topics_now", lambda _self: there)
    source = by_pattern(starting_offsets=StartAtCommittedOffsets("ours"), ending=EndAtLatest())
    place = job_in(tmp_path)
    source.fix_end(brokers, JobDir(LocalStore(tmp_path)))
    assert json.loads(source.starting_option(place)) == {"in": {"0": 4, "1": 0}}
    there.append("in-2")
    assert json.loads(source.starting_option(place))["in-2"] == {"0": -2, "1": -2}
    logged = LoggedOffsets(({"in": {"0": 9, "1": 3}, "in-2": {"0": 1}},))
    assert source.has_ended(logged) and source.channels_in(logged) == frozenset()
    assert source.clip_to_ends(source.offsets_in(logged)) == {("in", 0): 9, ("in", 1): 3}


def test_topics_with_one_number_are_refused() -> None:
    check_distinct_channels(["in", "in-2"])
    # Their checksums are equal.
    with pytest.raises(ConfigError, match="'buckeroo' and 'plumless' cannot be read by one source"):
        check_distinct_channels(["plumless", "in", "buckeroo"])
    with pytest.raises(ConfigError, match="cannot be read by one source"):
        KafkaSource("nowhere:1", ["plumless", "in", "buckeroo"])


def test_channels_of_several_topics_keep_their_numbers_whatever_the_order_and_what_else_is_read() -> None:
    places = [("in", 0), ("in", 2), ("other", 1)]
    found = KafkaSource("nowhere:1", ["other", "in"]).channels_of(places)
    assert found == KafkaSource("nowhere:1", ["in", "a-new-one", "other"]).channels_of(places)
    # Of a single topic they are Kafka's; none of theirs is among those of several.
    assert KafkaSource("nowhere:1", ["in"]).channels_of(places[:2]) == {0, 2} and min(found) > 2
    for topic, number in places:
        where = Origins(("other", "in")).describe(channel_of(("in", "other"), topic, number), 5)
        assert where == {"topic": topic, "partition": number, "offset": 5}


@pytest.mark.parametrize(
    ("sources", "written", "message"),
    [
        ([by_pattern("in.*"), source_of(StartingOffsets.EARLIEST)], "out", "read the same topic 'in'"),
        ([by_pattern("in-.*"), by_pattern("in-2")], "out", "may match the same topic"),
        ([by_pattern("in-.*"), by_pattern("a|out-2")], "out", "may match the same topic"),
        ([by_pattern("(out|in).*")], "out", "'out' is read and written"),
        ([by_pattern("in-.*"), by_pattern("other-.*"), source_of(StartingOffsets.EARLIEST)], "out", ""),
    ],
)
def test_topics_that_two_sources_may_read_or_a_job_writes(sources, written, message) -> None:
    graph = SimpleNamespace(
        sources=[SimpleNamespace(uid=f"s{n}", source=source) for n, source in enumerate(sources)]
    )
    planned = SimpleNamespace(sinks=[SimpleNamespace(uid="out", sink=SimpleNamespace(topics=(written,)))])
    if not message:
        check_loops(graph, planned)
        return
    with pytest.raises(GraphError, match=message):
        check_loops(graph, planned)
