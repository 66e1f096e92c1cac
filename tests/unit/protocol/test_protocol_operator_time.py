"""Each operator's watermark: the least of the inputs in front of it, and of no others."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from flinkish_spark.protocol.event_time import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    AssignerInput,
    AssignerRules,
    BatchTimes,
    ChannelReport,
    NoWatermarks,
    NoWatermarkStrategy,
    ReportedWatermarks,
    TimerReport,
    Watermarks,
)
from flinkish_spark.protocol.timer_index import Agenda
from flinkish_spark.protocol.watermarks import EventTime, OperatorTime, Rules, next_micro_batch_ms, step
from tests.support.effort import seeds

REPORTED = AssignerRules(ReportedWatermarks())
PLAIN = AssignerRules(NoWatermarkStrategy())
OVER = frozenset[int]()


def reads(**inputs: str) -> dict[str, OperatorTime]:
    """Return operators by uid; each letter is an assigner."""
    return {uid: OperatorTime(frozenset(own), frozenset({uid})) for uid, own in inputs.items()}


class Job:
    """A job whose assigners have one channel; what it carries is what was on offer behind the last one."""

    def __init__(
        self, rules: Rules, operators: dict[str, OperatorTime], state: EventTime | None = None
    ) -> None:
        self.rules, self.operators = rules, operators
        self.state = (state or EventTime()).adapt_to_job(rules, operators)
        self.now_ms = self.state.processing_time_ms or 0

    def run(
        self, *timers: TimerReport, ended: str = "", after_ms: int = 1, **times_ms: int
    ) -> dict[str, int]:
        """Run a micro-batch; return the operators' watermarks behind it."""
        self.now_ms += after_ms
        reports = tuple(ChannelReport(uid, 0, time_ms) for uid, time_ms in times_ms.items())
        inputs = tuple(AssignerInput(uid, OVER, has_ended=True) for uid in ended)
        carried = self.state.watermarks
        batch = BatchTimes(self.now_ms, reports, inputs, timers, carried.least_ms, carried.above)
        self.state = step(self.rules, self.state, batch)
        return self.at

    @property
    def at(self) -> dict[str, int]:
        return {uid: self.state.watermarks.get(uid) for uid in self.operators}

    def again(self, rules: Rules | None = None, **inputs: str) -> Job:
        """Return the job that goes on from what is stored, maybe with another plan."""
        stored = EventTime.from_json(json.loads(json.dumps(self.state.to_json())))
        return Job(rules or self.rules, reads(**inputs) if inputs else self.operators, stored)


def two(idleness_ms: int | None = None) -> Job:
    """Two pipelines that share nothing: `left` reads a, `right` reads b."""
    rules = {"a": AssignerRules(ReportedWatermarks(), idleness_ms), "b": REPORTED}
    return Job(rules, reads(left="a", right="b"))


def timer(operator: str, event_ms: int | None = None, processing_ms: int | None = None) -> TimerReport:
    return TimerReport(operator, 3, event_ms, processing_ms)


# -- the value -------------------------------------------------------------------------------------------


def test_watermarks_are_written_in_few_words() -> None:
    assert Watermarks.of({"x": 5, "y": 5}) == Watermarks(5)
    assert Watermarks.of({"x": 5, "y": 7, "z": 5}) == Watermarks(5, {"y": 7})
    assert Watermarks.of({}) == Watermarks() == Watermarks(MIN_WATERMARK_MS)
    for wrong in ({"x": 5}, {"x": 4}, {"x": MAX_WATERMARK_MS + 1}, {"../x": 9}, {"x": True}):
        with pytest.raises(ValueError):
            Watermarks(5, wrong)


def test_what_is_further_counts_operator_by_operator() -> None:
    chance = random.Random(7)
    uids = ["x", "y", "z", "unknown"]
    for _ in range(300):
        one, other, third = (
            Watermarks.of({uid: chance.randrange(4) for uid in chance.sample(uids[:3], chance.randrange(4))})
            for _ in range(3)
        )
        both = one.merge_max(other)
        assert [both.get(uid) for uid in uids] == [max(one.get(uid), other.get(uid)) for uid in uids]
        assert both == other.merge_max(one) and both.merge_max(one) == both
        assert both.merge_max(third) == one.merge_max(other.merge_max(third))


# -- what an operator sees -------------------------------------------------------------------------------


def test_a_source_that_stands_still_holds_back_no_other_pipeline() -> None:
    job = two()
    assert job.run(a=10, b=5) == {"left": 10, "right": 5}
    assert job.run(a=90) == {"left": 90, "right": 5}
    assert job.state.watermarks == Watermarks(5, {"left": 90})
    assert job.again().at == job.at


def test_who_reads_both_waits_for_both_and_who_is_in_front_does_not() -> None:
    job = Job({"a": REPORTED, "b": REPORTED}, reads(left="a", right="b", both="ab"))
    assert job.run(a=10, b=5) == {"left": 10, "right": 5, "both": 5}
    assert job.run(a=90) == {"left": 90, "right": 5, "both": 5}
    assert job.run(b=40) == {"left": 90, "right": 40, "both": 40}


def test_nobody_waits_for_watermarks_that_never_come_but_who_reads_them() -> None:
    job = Job({"a": REPORTED, "b": AssignerRules(NoWatermarks())}, reads(left="a", right="b", both="ab"))
    assert job.run(a=10, b=5) == {"left": 10, "right": MIN_WATERMARK_MS, "both": MIN_WATERMARK_MS}


def test_an_input_that_is_idle_is_left_out_where_there_are_others() -> None:
    rules = {"a": AssignerRules(ReportedWatermarks(), 100), "b": REPORTED}
    job = Job(rules, reads(left="a", both="ab"))
    assert job.run(a=10, b=50) == {"left": 10, "both": 10}
    assert job.run(after_ms=100) == {"left": 10, "both": 50}
    # It comes back behind what `both` has seen: late there, and on time where nobody was ahead.
    assert job.run(a=20) == {"left": 20, "both": 50}
    assert job.run(a=60, b=70) == {"left": 60, "both": 60}


# -- the end ---------------------------------------------------------------------------------------------


def test_a_pipeline_ends_with_its_own_inputs_and_the_job_with_all() -> None:
    job = two()
    job.run(a=10, b=5)
    assert job.run(ended="a") == {"left": MAX_WATERMARK_MS, "right": 5}
    assert not job.state.has_ended and next_micro_batch_ms(job.rules, job.state) is None
    job.run(b=6)
    job = job.again()
    assert job.run(ended="b") == {"left": MAX_WATERMARK_MS, "right": MAX_WATERMARK_MS}
    assert job.state.has_ended and job.state.is_due_at_once and not job.state.has_carried_all
    assert job.state.is_told_all_next
    job.run()
    assert job.state.has_carried_all and not job.state.is_due_at_once and not job.state.is_told_all_next


def test_a_source_without_a_strategy_counts_for_the_end_of_whom_it_feeds() -> None:
    job = Job({"a": REPORTED, "b": PLAIN, "c": PLAIN}, reads(left="ab"))
    assert job.run(a=10) == {"left": 10}
    assert job.run(ended="a") == {"left": 10}
    assert job.run(ended="b") == {"left": MAX_WATERMARK_MS}
    # c reaches no operator; it still keeps the job from its last checkpoint.
    job.run()
    assert not job.state.has_ended and not job.state.has_carried_all
    job.run(ended="c")
    assert job.state.has_carried_all


def test_input_that_goes_on_after_its_end_does_not_set_an_operator_back() -> None:
    job = two()
    job.run(ended="a", b=5)
    again = replace(job.state, assigners={"b": job.state.assigners["b"]})
    other = Job(job.rules, job.operators, again)
    assert other.run(a=7) == {"left": MAX_WATERMARK_MS, "right": 5}


# -- timers ----------------------------------------------------------------------------------------------


def test_timers_are_due_by_the_watermark_of_their_operator() -> None:
    job = two()
    job.run(timer("left", 50), timer("right", 40, 900), a=60, b=30)
    assert job.state.due(0) == {("left", 3)} and job.state.is_due_at_once
    assert job.state.due(900) == {("left", 3), ("right", 3)}
    job.run(timer("left"))
    assert not job.state.is_due_at_once
    assert next_micro_batch_ms(job.rules, job.state) == 900


def test_timers_of_each_instance_are_due_by_the_watermark_that_they_share() -> None:
    operators = {"first": OperatorTime(frozenset("ab"), frozenset({"first.x", "first.y"}))}
    job = Job({"a": REPORTED, "b": REPORTED}, operators)
    job.run(timer("first.x", 30), timer("first.y", 40), a=60, b=35)
    assert job.state.due(0) == {("first.x", 3)}


def test_a_watermark_is_awaited_where_timers_wait_behind_it() -> None:
    job = two()
    job.run(timer("right", 900), a=10, b=5)
    assert job.state.is_awaited(Watermarks())
    carried = job.state.watermarks
    job.run(a=20)
    assert not job.state.is_awaited(carried), "the timer is the other one's"
    job.run(b=6)
    assert job.state.is_awaited(carried)


def test_a_stream_wakes_for_a_channel_that_becomes_idle_only_where_timers_wait_behind_it() -> None:
    job = two(idleness_ms=100)
    job.run(timer("right", 900), a=10, b=5)
    assert next_micro_batch_ms(job.rules, job.state) is None
    job.run(timer("left", 900), a=10)
    assert next_micro_batch_ms(job.rules, job.state) == job.now_ms + 100


# -- another plan ----------------------------------------------------------------------------------------


def test_a_new_pipeline_begins_before_all_time_whatever_the_others_have_seen() -> None:
    job = Job({"a": REPORTED}, reads(left="a"))
    job.run(a=60_000)
    more = job.again({"a": REPORTED, "b": REPORTED}, left="a", right="b")
    assert more.at == {"left": 60_000, "right": MIN_WATERMARK_MS}
    assert more.run(b=5) == {"left": 60_000, "right": 5}


def test_a_new_operator_sees_what_its_inputs_have_shown() -> None:
    job = two()
    job.run(a=10, b=5)
    more = job.again(left="a", right="b", other="a", both="ab")
    assert more.run() == {"left": 10, "right": 5, "other": 10, "both": 5}


def test_an_operator_with_a_new_input_stays_until_that_has_caught_up() -> None:
    job = two()
    job.run(a=100, b=5)
    joined = job.again({"a": REPORTED, "b": REPORTED, "c": REPORTED}, left="abc", right="b")
    assert joined.at == {"left": 100, "right": 5}
    assert joined.run(a=200, c=50) == {"left": 100, "right": 5}
    assert joined.run(b=300, c=150) == {"left": 150, "right": 300}


def test_an_operator_without_one_of_its_inputs_waits_for_it_no_more() -> None:
    job = Job({"a": REPORTED, "b": REPORTED}, reads(both="ab"))
    job.run(a=100, b=5)
    assert job.again(both="a").at == {"both": 100}
    assert job.again({"b": REPORTED}, both="b").at == {"both": 5}


def test_what_a_job_without_operators_has_seen_holds_for_those_that_it_gets() -> None:
    old = Job({"a": REPORTED, "b": REPORTED}, {})
    old.run(timer("left", 70), a=100, b=50)
    assert old.state.watermarks == Watermarks(50) and "operators" not in old.state.to_json()
    job = old.again(left="a", right="b", both="ab")
    # Nobody is behind what the job has seen, and who needs not wait does not.
    assert job.at == {"left": 100, "right": 50, "both": 50}
    assert job.state.carried == Watermarks(old.state.carried_ms)
    assert job.again().state == job.state
    late = old.again({"c": REPORTED}, new="c")
    assert late.run(c=7) == {"new": 50}


def test_a_job_that_had_ended_stays_at_the_end_operator_by_operator() -> None:
    job = two()
    job.run(ended="a", b=5)
    assert job.again({"b": REPORTED, "c": REPORTED}, left="c", right="b").at == {
        "left": MAX_WATERMARK_MS,
        "right": 5,
    }
    whole = Job({"a": REPORTED}, {})
    whole.run(ended="a")
    assert whole.again({"b": REPORTED}, left="b").at == {"left": MAX_WATERMARK_MS}


def test_operators_that_are_gone_take_their_timers_with_them() -> None:
    job = two()
    job.run(timer("left", 900), timer("right", 900), a=1, b=1)
    assert job.again(right="b").state.agenda == Agenda().update([timer("right", 900)])


# -- a model ---------------------------------------------------------------------------------------------

UIDS = "abcde"


def random_job(chance: random.Random) -> Job:
    """Return a job whose operators read sources and operators: who reads one reads all of its inputs."""
    rules = {
        uid: AssignerRules(
            chance.choice([ReportedWatermarks()] * 4 + [NoWatermarkStrategy()]),
            chance.choice([None, None, 20, 60]),
        )
        for uid in UIDS[: chance.randint(2, 5)]
    }
    inputs: dict[str, str] = {}
    for number in range(chance.randint(1, 5)):
        own = set(chance.sample(sorted(rules), chance.randint(1, 2)))
        for other in chance.sample(sorted(inputs), chance.randint(0, min(2, len(inputs)))):
            own |= set(inputs[other])
        inputs[f"op{number}"] = "".join(sorted(own))
    return Job(rules, reads(**inputs))


@pytest.mark.parametrize("seed", seeds(150))
def test_an_operator_sees_what_a_job_of_its_inputs_alone_would_see(seed: int) -> None:
    """Behaviour 124: joins, idle sources, ends, and crashes behind which others go on from stored states."""
    chance = random.Random(seed)
    job = random_job(chance)
    rules, operators = job.rules, job.operators
    alone = {
        uid: Job({one: rules[one] for one in operator.inputs}, {}) for uid, operator in operators.items()
    }
    before, over = job.at, set[str]()
    stored, since = job.again().state, list[BatchTimes]()
    for _ in range(40):
        times = {uid: chance.randrange(200) for uid in rules if uid not in over and chance.random() < 0.5}
        ended = [uid for uid in rules if uid not in over and chance.random() < 0.02]
        over.update(ended)
        now_ms = job.now_ms + chance.randrange(30)
        reports = tuple(ChannelReport(uid, chance.randrange(2), time_ms) for uid, time_ms in times.items())
        inputs = tuple(AssignerInput(uid, OVER, has_ended=True) for uid in ended)
        # What was on offer is drawn late at times.
        carried = job.state.carried if chance.random() < 0.3 else job.state.watermarks
        batch = BatchTimes(now_ms, reports, inputs, (), carried.least_ms, carried.above)
        job.state, job.now_ms = step(rules, job.state, batch), now_ms
        since.append(BatchTimes.from_json(json.loads(json.dumps(batch.to_json()))))
        for uid, one in alone.items():
            own = BatchTimes(
                now_ms,
                tuple(report for report in reports if report.assigner in one.rules),
                tuple(known for known in inputs if known.assigner in one.rules),
                (),
                carried.get(uid),
            )
            one.state = step(one.rules, one.state, own)
        assert job.at == {uid: one.state.watermark_ms for uid, one in alone.items()}
        assert all(job.at[uid] >= before[uid] for uid in operators), "a watermark went back"
        before = job.at
        _nobody_is_ahead_of_whom_it_reads(job)
        if chance.random() < 0.2:
            # Died: another process has what was stored, and what was staged behind it.
            again = Job(rules, operators, stored)
            for facts in since:
                again.state = step(rules, again.state, facts)
            assert again.state == job.state
            if chance.random() < 0.5:
                stored, since = job.again().state, []
    if over == set(rules):
        assert job.state.has_ended and set(job.at.values()) == {MAX_WATERMARK_MS}


def _nobody_is_ahead_of_whom_it_reads(job: Job) -> None:
    """Only inputs that are idle, or have just come back from it, are not waited for."""
    for front in job.state.operators.values():
        for behind in job.state.operators.values():
            if front.inputs <= behind.inputs and front.watermark_ms < behind.watermark_ms:
                channels = behind.valve.channels
                waiting = [uid for uid, one in front.valve.channels.items() if one.counts]
                assert all(not channels[uid].counts for uid in waiting)
