"""The soak without a job: its schedule, the rule of what is flat, its report, homes of users."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest
from rich.console import Console

from demo.orders import expected_totals, generate
from demo.process import Victim
from demo.rig import PARTITIONS
from demo.verify import Difference, Verdict
from flinkish_spark.core.steps import Step
from tests.crash.soak import savepoints
from tests.crash.soak.__main__ import parse_args, report
from tests.crash.soak.app import Trigger
from tests.crash.soak.flatness import BOUND, JOB, LOG, LOG_BEGINS, PROCESSES, Answer, find_slope, find_slopes
from tests.crash.soak.rig import Homes
from tests.crash.soak.samples import Sample, read_samples
from tests.crash.soak.schedule import MOST_PARTITIONS_ADDED, Death, Disturbance, Shot, draw
from tests.crash.soak.soak import Outcome


# -- schedule -----------------------------------------------------------------------------------------
def test_the_same_seed_draws_the_same_minutes():
    assert draw(30, 7) == draw(30, 7) != draw(30, 8)


@pytest.mark.parametrize("seed", range(5))
def test_a_hundred_minutes_have_every_kill_and_every_disturbance_several_times(seed):
    minutes = draw(100, seed)
    assert [minute.number for minute in minutes] == list(range(1, 101))
    others = Counter(one for minute in minutes for one in minute.disturbances)
    assert set(others) == set(Disturbance)
    assert min(others.values()) >= 4
    assert others[Disturbance.PARTITION] == MOST_PARTITIONS_ADDED
    victims = Counter(minute.kill.victim for minute in minutes if isinstance(minute.kill, Shot))
    assert set(victims) == set(Victim) and min(victims.values()) >= 5
    points = {minute.kill.point for minute in minutes if isinstance(minute.kill, Death)}
    assert len(points) >= 5


def test_ten_minutes_have_every_disturbance():
    for seed in range(20):
        found = {one for minute in draw(10, seed) for one in minute.disturbances}
        assert found == set(Disturbance), seed


def test_in_the_middle_of_a_long_run_the_driver_lives_on():
    alone = [minute.number for minute in draw(100, 3) if minute.kill == Shot(Victim.WORKER)]
    assert set(range(36, 66)) <= set(alone)
    for minute in draw(100, 3)[35:65]:
        assert not {Disturbance.BOUNCE, Disturbance.REWIND} & set(minute.disturbances)


def test_a_rewind_follows_a_kill_that_leaves_kept_micro_batches():
    rewinds = [minute for minute in draw(100, 1) if minute.rewinds]
    assert rewinds
    for minute in rewinds:
        assert str(minute.kill) == "killed at decision:before:1"


def test_a_process_dies_at_the_point_that_a_file_names_and_not_before(tmp_path):
    path, died = tmp_path / "trigger", []
    trigger = Trigger(path, kill=lambda: died.append("now"))
    trigger.on_step_start(Step.DECISION, "1")
    path.write_text("decision:before:1")
    trigger.on_step_start(Step.STAGED_FILE, "x")
    trigger.on_step_end(Step.STAGED_FILE, "x")
    assert not died
    trigger.on_step_start(Step.DECISION, "2")
    assert died == ["now"]
    # Once: a driver that has outlived it would else die at each.
    trigger.on_step_start(Step.DECISION, "3")
    assert died == ["now"]


# -- input --------------------------------------------------------------------------------------------
def test_a_user_stays_in_one_partition_when_others_are_added():
    homes, partitions = Homes(PARTITIONS), PARTITIONS
    seen: dict[str, set[int]] = {}
    by_partition: Counter[int] = Counter()
    for number, order in enumerate(islice(generate(1), 6_000)):
        partitions += number in (2_000, 4_000)
        placed, partition = homes.place(order, number, partitions)
        seen.setdefault(placed.user, set()).add(partition)
        by_partition[partition] += 1
    assert all(len(places) == 1 for places in seen.values())
    assert set(by_partition) == set(range(PARTITIONS + 2))
    assert by_partition[PARTITIONS] > 700
    late = [user for user in seen if user.startswith("late-")]
    assert len(late) == 2 * Homes.USERS_OF_A_LATER_ONE


# -- flatness -----------------------------------------------------------------------------------------
def points(slope: float, *, noise: float = 0.03, count: int = 40, seed: int = 1, at: float = 200.0):
    """Return a value a minute around `at`, which grows by `slope` of it an hour."""
    chance = random.Random(seed)
    return [(60.0 * n, at * (1 + slope * n / 60 + chance.gauss(0, noise))) for n in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_a_series_that_grows_is_noticed_and_a_flat_one_is_not(seed):
    assert find_slope(points(0.0, seed=seed)).answer is Answer.FLAT
    assert find_slope(points(-0.5, seed=seed)).answer is Answer.FLAT
    assert find_slope(points(BOUND / 2, seed=seed)).answer is Answer.FLAT
    growing = find_slope(points(3 * BOUND, seed=seed))
    assert growing.answer is Answer.GROWS
    assert growing.slope == pytest.approx(3 * BOUND, abs=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_ten_minutes_tell_a_leak_of_the_whole_in_an_hour_from_noise(seed):
    assert find_slope(points(2.0, count=8, seed=seed)).answer is Answer.GROWS
    assert find_slope(points(0.0, count=8, seed=seed)).answer is Answer.FLAT


def test_a_few_odd_values_change_nothing():
    flat, growing = points(0.0), points(3 * BOUND)
    for odd in (3, 17, 39):
        flat[odd] = (flat[odd][0], 2_000.0)
        growing[odd] = (growing[odd][0], 10.0)
    assert find_slope(flat).answer is Answer.FLAT
    assert find_slope(growing).answer is Answer.GROWS


def test_whole_numbers_that_go_up_by_one_and_stay_are_no_growth_and_a_stair_is():
    one_more = [(60.0 * n, 70.0 + (n >= 20)) for n in range(40)]
    assert find_slope(one_more).answer is Answer.FLAT
    stair = [(60.0 * n, 70.0 + n // 3) for n in range(40)]
    assert find_slope(stair).answer is Answer.GROWS


def test_a_series_of_zeros_is_flat_and_one_that_leaves_zero_grows():
    assert find_slope([(60.0 * n, 0.0) for n in range(20)]).answer is Answer.FLAT
    assert find_slope([(60.0 * n, float(n)) for n in range(20)]).answer is Answer.GROWS


def test_too_few_values_say_nothing():
    assert find_slope([]).answer is Answer.TOO_SHORT
    assert find_slope(points(5.0, count=3)).answer is Answer.TOO_SHORT


def samples(minutes: int, *, lives: bool = True, **growth: float) -> list[Sample]:
    """Return samples of a run in which each minute is a life, which warms up; names grow an hour as told."""
    found = []
    for minute in range(minutes):
        for second in range(0, 60, 4):
            at_s, age_s = 60.0 * minute + second, (second - 20.0 if lives else 60.0 * minute + second)
            values = {}
            for name in (*PROCESSES, *JOB):
                warm = 1 + 0.01 * second if name in PROCESSES and lives else 1
                values[name] = 100.0 * warm * (1 + growth.get(name, 0.0) * at_s / 3600)
            values[LOG_BEGINS] = max(0.0, at_s - 200)
            values[LOG] = at_s * (1 + growth.get(LOG, 0.0) * at_s / 3600)
            start = minute + 1 if lives else 1
            found.append(Sample(at_s, minute + 1, start, age_s if age_s >= 0 else None, values))
    return found


def test_a_run_is_flat_though_each_life_grows_while_it_warms_up():
    found = find_slopes(samples(30))
    assert set(found) == {*PROCESSES, *JOB, f"{LOG} a minute"}
    assert {slope.answer for slope in found.values()} == {Answer.FLAT}


@pytest.mark.parametrize("name", [*PROCESSES, *JOB, LOG])
def test_each_series_that_grows_is_named(name):
    found = find_slopes(samples(60, **{name: 0.5}))
    shown = f"{name} a minute" if name == LOG else name
    assert [one for one, slope in found.items() if slope.answer is Answer.GROWS] == [shown]


def test_growth_at_the_beginning_does_not_count():
    filling = samples(50)
    for sample in filling:
        sample.values["driver MB"] *= 0.5 + min(sample.at_s, 500.0) / 1_000
    assert find_slopes(filling)["driver MB"].answer is Answer.FLAT


def test_what_belongs_to_the_job_counts_when_its_logs_are_full():
    filling = samples(20)
    for sample in filling:
        sample.values["Spark log files"] = min(sample.at_s, 700.0)
        sample.values[LOG_BEGINS] = max(0.0, sample.at_s - 700.0)
    assert find_slopes(filling)["Spark log files"].answer is Answer.FLAT
    for sample in filling:
        sample.values[LOG_BEGINS] = 0.0
    assert find_slopes(filling)["Spark log files"].answer is Answer.TOO_SHORT


def test_in_a_long_life_what_grows_within_it_is_noticed():
    found = find_slopes(samples(30, lives=False, **{"driver files": 0.5, "jvm MB": 0.5}))
    grows = [name for name, slope in found.items() if slope.answer is Answer.GROWS]
    assert grows == ["driver files, one life"]


# -- samples and report -------------------------------------------------------------------------------
def test_samples_are_read_as_they_were_written_without_a_line_that_was_cut_off(tmp_path):
    written = [Sample(4.0, 1, 1, None, {"driver MB": 80.5}), Sample(8.0, 1, 1, 2.5, {})]
    path = tmp_path / "samples.jsonl"
    lines = [json.dumps(sample.to_json()) for sample in written]
    path.write_text("\n".join(lines) + '\n{"at_s": 12.0, "min')
    assert read_samples(path) == written


def outcome(**changes) -> Outcome:
    numbers = {"undecided_rows": 0, "partial": (), "open_transactions": (), "group_lag": 0}
    shape = {"orders": 100, "checkpoints": 9, "orphan_files": 0, "max_skew_ms": 5}
    difference = Difference(changes.pop("lost", 0), 0)
    verdict = Verdict(**shape, **numbers, differences={"totals-kafka": difference})
    return Outcome(verdict, find_slopes(samples(30, **changes.pop("growth", {}))), **changes)


def test_the_report_names_what_grows_and_what_is_wrong(capsys):
    good = outcome()
    assert good.is_exact and not good.growing
    bad = outcome(growth={"driver MB": 2.0}, wrong=["savepoint 007: 1 key of 10 is missing"])
    assert not bad.is_exact and bad.growing == ["driver MB"]
    assert not outcome(lost=1).is_exact
    assert not outcome(failure="the job ended").is_exact

    report(Console(width=120), bad)
    shown = capsys.readouterr().out
    assert shown.index("driver MB") < shown.index("jvm MB")
    assert "savepoint 007" in shown and "NOT exact; grows: ['driver MB']" in shown
    line = json.loads(json.dumps(bad.to_json()))
    assert line["growing"] == ["driver MB"] and line["slopes"]["driver MB"]["is"] == "GROWS"


def test_arguments_that_make_no_run_are_refused(capsys):
    assert parse_args(["--minutes", "3", "--seed", "7"]).minutes == 3
    with pytest.raises(SystemExit):
        parse_args(["--minutes", "0"])
    assert "1 or more" in capsys.readouterr().err


# -- savepoints ---------------------------------------------------------------------------------------
def test_a_savepoint_is_compared_with_the_input_up_to_its_positions(tmp_path, monkeypatch):
    values = [order.value for order in islice(generate(1), 50)]
    records = [SimpleNamespace(partition=0, offset=n, value=value) for n, value in enumerate(values)]
    newest = {row[0]: row for row in sorted(expected_totals(values[:30]), key=lambda row: row[2])}
    state = Counter(newest.values())
    for name in ("001", "002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "savepoint.json").touch()
    wrong = Counter(list(newest.values())[1:])
    monkeypatch.setattr(savepoints, "_find_positions", lambda path, topic: {0: 30})
    monkeypatch.setattr(savepoints, "_read_states", lambda folder, _: {"001": state, "002": wrong})
    (told,) = savepoints.find_wrong(tmp_path, records, "orders", {})
    assert told.startswith(f"savepoint 002: of {len(state)} keys 1 are missing or wrong, 0 are surplus")
