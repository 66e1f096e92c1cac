"""What fits what when a savepoint is restored: pure values, every rule by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark.protocol.envelope import NewerFormatError
from flinkish_spark.protocol.ids import BatchId, CheckpointId, JobUuid, Lineage
from flinkish_spark.protocol.key_groups import Bundling
from flinkish_spark.protocol.plan_layout import (
    SEEDED,
    Chain,
    NativeOperator,
    OperatorInstance,
    PlanLayout,
    Scan,
    ScannedInput,
    ScanRole,
    lowest,
    offsets_in,
)
from flinkish_spark.protocol.restore import (
    JobShape,
    Misfit,
    NonRestoredState,
    OperatorShape,
    RestoreRules,
    SourceShape,
    UnpositionedSources,
    begin_chain,
    check_restore,
)
from flinkish_spark.protocol.savepoints import (
    Claim,
    ClaimMode,
    OperatorState,
    SavedChain,
    SavepointMetadata,
    Seed,
    SeededChain,
    SeedOrigin,
    SourceFacts,
    StateFile,
    check_groups,
)
from flinkish_spark.transport.routing import Routing, spark_hash_int
from tests.support.effort import examples

AT_5, AT_9 = {"t": {"0": 5}}, {"t": {"0": 9}}
TOTALS = Chain(("orders",), ("totals",), ("totals",))
FILES = (
    StateFile("totals", "totals", "a-0", 3, 100, "0" * 64),
    StateFile("totals", "totals", "a-1", 4, 50, "1" * 64),
)


def savepoint(
    operators=("totals",), chains=None, finished=(), hooks=None, kind="kafka", **more
) -> SavepointMetadata:
    chains = [(Chain(("orders",), tuple(operators), (operators[-1],)), AT_5)] if chains is None else chains
    return SavepointMetadata(
        savepoint="a" * 32,
        job="orders",
        job_uuid=JobUuid("0" * 32),
        checkpoint=CheckpointId(7),
        lineage=Lineage(0),
        batch=BatchId(12),
        decided_at_ms=5,
        shuffle_partitions=2,
        operators={uid: OperatorState(128, ("string",), {"total": "..."}) for uid in operators},
        sources={"orders": SourceFacts(kind, {"topic-orders-t": {"topic_id": "x"}})},
        chains=tuple(SavedChain(chain, dict.fromkeys(chain.inputs, position)) for chain, position in chains),
        sinks=("table",),
        hooks=hooks or {},
        finished=tuple(finished),
        files=FILES,
        **more,
    )


def shape(*operators, chains=(TOTALS,), topics=("t",), **more) -> JobShape:
    return JobShape(
        {uid: OperatorShape(128, ("string",)) for uid in operators or ("totals",)},
        {"orders": SourceShape("kafka", True, frozenset(topics))},
        chains if isinstance(chains, dict) else dict.fromkeys(chains, ()),
        **more,
    )


def misfits(found: SavepointMetadata, job: JobShape, *rules) -> list[tuple[str, str]]:
    report = check_restore(found, job, RestoreRules(*rules))
    return [(problem.misfit.name, problem.subject) for problem in report.problems]


# -- operators --------------------------------------------------------------------------------------


def test_a_job_that_did_not_change_restores_all_of_its_savepoint() -> None:
    # behaviour 84
    report = check_restore(savepoint(), shape(), RestoreRules())
    assert (report.restored, report.added, report.left_out, report.problems) == (
        ("totals", "orders"),
        (),
        (),
        (),
    )


def test_operators_are_matched_by_uid_and_not_by_position() -> None:
    # behaviour 87
    both = Chain(("orders",), ("first", "totals"), ("totals",))
    report = check_restore(savepoint(), shape("first", "totals", chains=[both]), RestoreRules())
    assert report.restored == ("totals", "orders")
    assert report.added == ("first",)
    assert not report.problems
    assert begin_chain(both, (), savepoint().chains, {"orders"}).states == {"totals": "totals"}


def test_state_of_a_missing_operator_is_refused_unless_it_is_allowed() -> None:
    # behaviour 88
    job = shape("other", chains=[Chain(("orders",), ("other",), ("other",))])
    assert misfits(savepoint(), job) == [("OPERATOR_MISSING", "totals")]
    report = check_restore(savepoint(), job, RestoreRules(NonRestoredState.ALLOW))
    assert (report.problems, report.left_out, report.added) == ((), ("totals",), ("other",))


def test_another_number_of_key_groups_is_refused_whatever_is_allowed() -> None:
    # behaviour 86
    job = JobShape({"totals": OperatorShape(64, ("string",))}, shape().sources, {TOTALS: ()})
    found = misfits(savepoint(), job, NonRestoredState.ALLOW)
    assert found == [("MAX_PARALLELISM", "totals")]


def test_another_type_of_key_is_refused() -> None:
    job = JobShape({"totals": OperatorShape(128, ("bigint",))}, shape().sources, {TOTALS: ()})
    assert misfits(savepoint(), job, NonRestoredState.ALLOW) == [("KEY_TYPE", "totals")]


def test_state_that_would_mean_something_else_is_refused_with_both_meanings() -> None:
    found = savepoint()
    state = OperatorState(128, ("string",), {"total": "..."}, meaning={"clock": "event time", "columns": "x"})
    found = replace(found, operators={"totals": state})
    now = OperatorShape(128, ("string",), {"clock": "processing time", "trigger": "new"})
    job = JobShape({"totals": now}, shape().sources, {TOTALS: ()})
    assert misfits(found, job, NonRestoredState.ALLOW) == [("MEANING", "totals")]
    (problem,) = check_restore(found, job, RestoreRules()).problems
    assert problem.detail == "clock: event time -> processing time"


def test_a_savepoint_without_state_begins_every_operator_empty() -> None:
    # behaviour 89
    empty = savepoint(operators=("totals",), chains=[(Chain(("orders",), (), ("table",)), AT_5)])
    begun = begin_chain(TOTALS, (), empty.chains, {"orders"})
    assert (begun.positions, begun.states) == ({"orders": AT_5}, {})


# -- sources ----------------------------------------------------------------------------------------


def test_the_position_of_a_missing_source_is_refused_unless_it_is_allowed() -> None:
    job = JobShape(shape().operators, {"other": SourceShape("kafka", True)})
    assert misfits(savepoint(), job) == [("SOURCE_MISSING", "orders")]
    assert misfits(savepoint(), job, NonRestoredState.ALLOW) == []


def test_a_source_of_another_kind_is_refused() -> None:
    job = JobShape(shape().operators, {"orders": SourceShape("dataframe", False)}, {TOTALS: ()})
    assert misfits(savepoint(), job, NonRestoredState.ALLOW) == [("SOURCE_KIND", "orders")]


def test_a_dataframe_restores_only_on_the_users_word() -> None:
    job = JobShape(shape().operators, {"orders": SourceShape("dataframe", False)}, {TOTALS: ()})
    found = savepoint(kind="dataframe", chains=[(TOTALS, {"logOffset": 3})])
    assert misfits(found, job) == [("NOT_POSITIONABLE", "orders")]
    trusted = (NonRestoredState.REFUSE, UnpositionedSources.BEGIN_WHERE_THEY_ARE)
    assert misfits(found, job, *trusted) == []
    begun = begin_chain(TOTALS, (), found.chains, job.positionable)
    assert (begun.positions, begun.states) == ({}, {"totals": "totals"})


def test_a_topic_that_the_source_reads_no_more_is_refused_unless_it_is_allowed() -> None:
    job = shape(topics=("other",))
    assert misfits(savepoint(), job) == [("INPUT_MISSING", "orders")]
    assert misfits(savepoint(), job, NonRestoredState.ALLOW) == []


def test_keys_of_ours_in_an_offset_are_no_topics() -> None:
    found = savepoint(chains=[(TOTALS, {**AT_5, "flinkish:checkpoint": 3})])
    assert misfits(found, shape()) == []


def test_a_source_that_had_come_to_its_end_gets_no_new_readers() -> None:
    # behaviours 42, 93
    assert misfits(savepoint(finished=("orders",)), shape()) == []
    more = shape("totals", "new", chains=[TOTALS, Chain(("orders",), ("new",), ("new",))])
    assert misfits(savepoint(finished=("orders",)), more) == [("FINISHED_CHANGED", "orders")]


# -- hooks ------------------------------------------------------------------------------------------


def test_state_of_an_unknown_hook_is_refused_unless_it_is_allowed() -> None:
    # behaviour 83
    found = savepoint(hooks={"catalog": {"version": 3}, "other": None})
    assert misfits(found, shape(hooks=["other"])) == [("HOOK_MISSING", "catalog")]
    report = check_restore(found, shape(hooks=["other"]), RestoreRules(NonRestoredState.ALLOW))
    assert (report.problems, report.left_out, report.hooks) == ((), ("catalog",), ("other",))


# -- chains -----------------------------------------------------------------------------------------

SECOND = Chain(("orders",), ("totals", "second"), ("second",))
TWO = [SavedChain(TOTALS, {"orders": AT_5}), SavedChain(SECOND, {"orders": AT_9})]


def test_each_run_of_an_operator_goes_on_with_its_own_state_and_position() -> None:
    """An operator whose output is used twice runs twice, and one run may be ahead of the other."""
    first, second = (begin_chain(chain, (), TWO, {"orders"}) for chain in (TOTALS, SECOND))
    assert (first.positions, first.states) == ({"orders": AT_5}, {"totals": "totals"})
    assert (second.positions, second.states) == ({"orders": AT_9}, {"totals": "second", "second": "second"})


def test_a_new_operator_behind_a_known_one_goes_on_where_that_stood() -> None:
    third = Chain(("orders",), ("totals", "third"), ("third",))
    begun = begin_chain(third, (), TWO, {"orders"})
    assert (begun.positions, begun.states) == ({"orders": AT_5}, {"totals": "totals"})


def test_operators_that_stood_at_different_places_cannot_join() -> None:
    apart = [
        SavedChain(TOTALS, {"orders": AT_5}),
        SavedChain(Chain(("orders",), ("other",), ("other",)), {"orders": AT_9}),
    ]
    joined = Chain(("orders",), ("totals", "other"), ("other",))
    with pytest.raises(ValueError, match="'totals' and 'other' had different positions"):
        begin_chain(joined, (), apart, {"orders"})
    job = shape("totals", "other", chains=[joined])
    found = savepoint(operators=("totals", "other"), chains=[(c.chain, c.positions["orders"]) for c in apart])
    assert misfits(found, job) == [("CHAINS_JOINED", "other")]
    level = [SavedChain(one.chain, {"orders": AT_5}) for one in apart]
    assert begin_chain(joined, (), level, {"orders"}).states == {"totals": "totals", "other": "other"}


def test_sinks_that_share_a_stream_now_must_have_stood_at_one_place() -> None:
    apart = [
        SavedChain(Chain(("orders",), (), ("a",)), {"orders": AT_5}),
        SavedChain(Chain(("orders",), (), ("b",)), {"orders": AT_9}),
    ]
    together = Chain(("orders",), (), ("a", "b"))
    with pytest.raises(ValueError, match="the sinks of 'a,b' have read up to"):
        begin_chain(together, (), apart, {"orders"})
    assert begin_chain(Chain(("orders",), (), ("b",)), (), apart, {"orders"}).positions == {"orders": AT_9}
    # A new sink sees all that any other has not seen.
    assert begin_chain(Chain(("orders",), (), ("c",)), (), apart, {"orders"}).positions == {"orders": AT_5}


COPY = SavedChain(Chain(("orders",), (), ("copy",)), {"orders": AT_9})
BEHIND = SavedChain(TOTALS, {"orders": AT_5}, ("out",))


def test_an_operator_that_is_put_in_front_of_a_sink_begins_where_the_sinks_stream_stood() -> None:
    """Else the sink would get records again that it has committed."""
    clean = Chain(("orders",), ("clean",), ("clean",))
    assert begin_chain(clean, ("copy",), [BEHIND, COPY], {"orders"}).positions == {"orders": AT_9}
    assert begin_chain(clean, ("new",), [BEHIND, COPY], {"orders"}).positions == {"orders": AT_5}
    # Also in front of a sink that was behind an operator, and without any.
    assert begin_chain(
        clean, ("out",), [replace(BEHIND, positions={"orders": AT_9}), COPY], {"orders"}
    ).positions == {"orders": AT_9}
    plain = Chain(("orders",), (), ("out",))
    ahead, behind = replace(BEHIND, positions={"orders": AT_9}), replace(COPY, positions={"orders": AT_5})
    assert begin_chain(plain, (), [ahead, behind], {"orders"}).positions == {"orders": AT_9}


def test_sinks_of_chains_that_stood_at_different_places_cannot_share_an_operator() -> None:
    clean = Chain(("orders",), ("clean",), ("clean",))
    with pytest.raises(ValueError, match="the sinks of 'clean' have read up to another position"):
        begin_chain(clean, ("copy", "out"), [BEHIND, COPY], {"orders"})
    # Nor can a sink go behind an operator that stood somewhere else.
    with pytest.raises(ValueError, match="the sinks of 'totals' have read"):
        begin_chain(TOTALS, ("out", "copy"), [BEHIND, COPY], {"orders"})
    found = replace(savepoint(), chains=(BEHIND, COPY))
    job = shape(chains={TOTALS: ("out", "copy")})
    assert misfits(found, job) == [("CHAINS_JOINED", "totals")]
    level = [BEHIND, replace(COPY, positions={"orders": AT_5})]
    assert begin_chain(TOTALS, ("out", "copy"), level, {"orders"}).positions == {"orders": AT_5}


def test_of_several_runs_of_an_operator_its_sinks_run_goes_on() -> None:
    """`second` is taken out: what it wrote to goes on where `second` stood, with that run's state."""
    saved = [SavedChain(TOTALS, {"orders": AT_5}, ("out",)), SavedChain(SECOND, {"orders": AT_9}, ("far",))]
    begun = begin_chain(TOTALS, ("far",), saved, {"orders"})
    assert (begun.positions, begun.states) == ({"orders": AT_9}, {"totals": "second"})


def test_what_a_sink_read_of_another_source_says_nothing_about_this_one() -> None:
    moved = Chain(("returns",), (), ("copy",))
    saved = [COPY, SavedChain(Chain(("returns",), (), ("other",)), {"returns": AT_5})]
    assert begin_chain(moved, ("copy",), saved, {"orders", "returns"}).positions == {"returns": AT_5}


def test_an_operator_that_moved_to_another_source_keeps_its_state() -> None:
    moved = Chain(("returns",), ("totals",), ("totals",))
    begun = begin_chain(moved, (), TWO, {"orders", "returns"})
    assert (begun.positions, begun.states) == ({}, {"totals": "totals"})


def test_a_source_that_the_savepoint_does_not_know_begins_where_it_says_itself() -> None:
    assert begin_chain(Chain(("new",), ("fresh",), ("fresh",)), (), TWO, {"new"}).positions == {}


def test_a_chain_whose_source_was_never_asked_has_no_position() -> None:
    unasked = [SavedChain(Chain(("orders",), (), ("a",)), {})]
    assert begin_chain(Chain(("orders",), (), ("b",)), (), unasked, {"orders"}).positions == {}
    assert misfits(savepoint(chains=[(TOTALS, None)]), shape()) == []


# -- layout -----------------------------------------------------------------------------------------

LAYOUT = PlanLayout(
    (
        Scan(ScanRole.RECORDS, "orders", "totals"),
        Scan(ScanRole.BARRIERS, "", "totals"),
        Scan(ScanRole.SEED, "totals", "totals"),
        Scan(ScanRole.RECORDS, "files", "copy"),
        Scan(ScanRole.RECORDS, "files", "copy"),
        Scan(ScanRole.RECORDS, "late", "late"),
    ),
    (OperatorInstance("totals", "totals"),),
)
LOGGED = [AT_5, {"flinkish:checkpoint": 3}, SEEDED, 1, 2, None]


def test_positions_are_found_by_the_order_of_the_plan() -> None:
    assert LAYOUT.positions(LOGGED) == {"totals": {"orders": AT_5}, "copy": {"files": [1, 2]}}
    with pytest.raises(ValueError, match="6 sources and the offset log entry 1 positions"):
        LAYOUT.positions([AT_5])


def test_a_layout_survives_its_stored_form() -> None:
    assert PlanLayout.from_json(json.loads(json.dumps(LAYOUT.to_json()))) == LAYOUT


def test_operators_that_share_tasks_have_one_number_and_scans_of_several_chains() -> None:
    layout = PlanLayout(
        (
            Scan(ScanRole.RECORDS, "orders", "totals,hours"),
            Scan(ScanRole.RECORDS, "rates", "hours"),
            Scan(ScanRole.BARRIERS, "", "totals"),
            Scan(ScanRole.RECORDS, "orders", "one,two"),
            Scan(ScanRole.RECORDS, "orders", "behind"),
        ),
        tuple(
            OperatorInstance(uid, chain)
            for uid, chain in [
                ("totals", "totals"),
                ("hours", "hours"),
                ("totals", "behind"),
                ("behind", "behind"),
            ]
        ),
        shared=(("totals", "hours"),),
    )
    assert PlanLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert [(one.uid, one.chain, one.number, one.place) for one in layout.states] == [
        ("totals", "totals", 0, 0),
        ("hours", "hours", 0, 1),
        ("totals", "behind", 1, 0),
        ("behind", "behind", 2, 0),
    ]
    assert layout.positions([1, 2, None, 3, 4]) == {
        "totals": {"orders": 1},
        "hours": {"orders": 1, "rates": 2},
        "one,two": {"orders": 3},
        "behind": {"orders": 4},
    }
    assert "shared" not in LAYOUT.to_json() and [one.number for one in LAYOUT.states] == [0]


def test_operators_of_sparks_own_have_numbers_between_ours() -> None:
    own = [OperatorInstance("totals", "totals"), OperatorInstance("hours", "hours")]
    natives = tuple(NativeOperator(number, "orders", "totals", "limit()") for number in (0, 2, 3))
    layout = PlanLayout((), tuple(own), natives=natives)
    assert [(one.uid, one.number) for one in layout.states] == [("totals", 1), ("hours", 4)]
    assert PlanLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_a_scan_may_bring_several_inputs_of_a_chain_and_of_others() -> None:
    brings = (("sums", "orders"), ("pairs", "orders#2"))
    layout = PlanLayout(
        (
            Scan(ScanRole.RECORDS, "orders", "sums,pairs"),
            Scan(ScanRole.RECORDS, "orders", "pairs"),
            Scan(ScanRole.BARRIERS, "", "sums"),
        ),
        (OperatorInstance("sums", "sums"), OperatorInstance("pairs", "pairs")),
        (("sums", "pairs"),),
        tuple(ScannedInput(0, chain, name) for chain, name in brings),
    )
    assert [layout.inputs_of(number) for number in range(2)] == [brings, (("pairs", "orders"),)]
    stood = {"sums": {"orders": AT_5}, "pairs": {"orders#2": AT_5, "orders": AT_9}}
    assert layout.positions([AT_5, AT_9, {}]) == stood
    assert PlanLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert "together" not in LAYOUT.to_json()


def test_the_lowest_position_is_taken_by_partition() -> None:
    left, right = {"t": {"0": 5, "1": 7}, "u": {"0": 1}}, {"t": {"0": 6, "1": 4, "2": 0}}
    assert lowest([left, right]) == {"t": {"0": 5, "1": 4, "2": 0}, "u": {"0": 1}}
    assert lowest([left, left]) is left
    assert offsets_in({**AT_5, "flinkish:upstream": {}}) == AT_5


# -- stored forms -----------------------------------------------------------------------------------


def test_a_savepoint_survives_its_stored_form() -> None:
    # behaviour 60
    found = savepoint(hooks={"h": None}, finished=("x",), upstream={"t": {"job": "0" * 32, "checkpoint": 4}})
    stored = json.loads(json.dumps(found.to_json()))
    assert SavepointMetadata.from_json(stored) == found
    of_now = replace(found, timeline="9f3c")
    assert "timeline" not in stored
    assert SavepointMetadata.from_json(json.loads(json.dumps(of_now.to_json()))) == of_now
    assert (stored["rows"], stored["bytes"]) == (7, 150)
    assert FILES[0].path == "state/totals/a-0.parquet"


def test_a_savepoint_of_a_later_version_is_refused() -> None:
    with pytest.raises(NewerFormatError, match="version 2 of savepoints"):
        SavepointMetadata.from_json({**savepoint().to_json(), "version": 2})


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x"])
def test_names_that_could_lead_out_of_the_savepoint_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not usable"):
        StateFile.from_json({**FILES[0].to_json(), "name": name})
    with pytest.raises(ValueError, match="not usable"):
        StateFile.from_json({**FILES[0].to_json(), "operator": name})


def test_a_fact_that_could_become_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="name of a fact"):
        SourceFacts.from_json({"kind": "kafka", "identity": {"../job": {}}})


SEED = Seed(
    lineage=Lineage(2),
    origin=SeedOrigin.SAVEPOINT,
    savepoint="a" * 32,
    checkpoint=CheckpointId(7),
    shuffle_partitions=4,
    chains=(SeededChain(SECOND, {"orders": AT_9}, {"totals": "totals"}), SeededChain(TOTALS, {}, {})),
    hooks={"h": {"a": 1}},
    finished=("x",),
    files=(FILES[1], FILES[0]),
    claim=ClaimMode.CLAIM,
    path="/savepoints/7",
)


def test_a_claim_survives_its_stored_form() -> None:
    claim = Claim("a" * 32, "/savepoints/7", JobUuid("1" * 32), "/jobs/orders-2")
    assert Claim.from_json(json.loads(json.dumps(claim.to_json()))) == claim


def test_a_seed_survives_its_stored_form() -> None:
    assert Seed.from_json(json.loads(json.dumps(SEED.to_json()))) == SEED


def test_a_seed_knows_the_files_of_each_run_of_an_operator() -> None:
    assert SEED.files_of("totals", "second") == FILES
    assert SEED.files_of("second", "second") == ()
    assert SEED.files_of("totals", "totals") == ()
    assert SEED.files_of("totals", "gone") == ()


# -- key groups -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(50))
@given(
    groups=st.integers(1, 300),
    before=st.tuples(st.integers(1, 17), st.integers(1, 9)),
    after=st.tuples(st.integers(1, 17), st.integers(1, 9)),
    data=st.data(),
)
def test_every_key_group_lands_exactly_once_whatever_the_parallelism(groups, before, after, data) -> None:
    # behaviours 85, 91
    stored = data.draw(st.sets(st.integers(0, groups - 1)))
    first, then = Routing(Bundling(groups, *before)), Routing(Bundling(groups, *after))
    found = {route: first.bundling.groups_of(bundle) for bundle, route in enumerate(first.of_bundle)}
    routes = {first.of_group[group] for group in stored}
    back = [group for route in sorted(routes) for group in found[route] if group in stored]
    check_groups("totals", groups, back)
    assert sorted(back) == sorted(stored)
    for routing in (first, then):
        bundles = routing.bundling.bundles
        assert len(set(routing.of_bundle)) == bundles <= groups
        assert not set(routing.of_bundle) & set(routing.of_barrier)
        for group in back:
            bundle = routing.bundling.bundle_of(group)
            assert group in routing.bundling.groups_of(bundle) and bundle in range(bundles)
            partition = spark_hash_int(routing.of_group[group]) % routing.partitions
            assert partition == group % routing.partitions


@pytest.mark.parametrize("found,says", [([0, 1, 0], "key group 0 .* occurs twice"), ([4], "no key group 4")])
def test_a_key_group_that_does_not_belong_is_named(found, says) -> None:
    with pytest.raises(ValueError, match=says):
        check_groups("totals", 4, found)


def test_the_misfits_all_have_words() -> None:
    assert all(misfit.value for misfit in Misfit)
