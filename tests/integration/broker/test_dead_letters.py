"""Dead letters into every kind of sink, and what becomes of them when their records are lost."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from flinkish_spark import DeltaSink, FileFormat, FileSink, KafkaSink, SinkWithDeadLetters
from tests.support.jobs import environment, read_committed, read_delta, rows
from tests.support.two_phase_app import check_each_once, crash_at, picky, run_for, totals_of
from tests.support.two_phase_page import Ledger, sqlite_sink_class

pytestmark = pytest.mark.timeout(600)


def own_place(root):
    """The sink of the page, for dead letters: reason and record take the place of its two columns."""
    kind = sqlite_sink_class()

    def write(self, handle, letter):
        handle[0].execute("INSERT INTO totals VALUES (?, ?)", (letter.uid, letter.record))

    return Ledger(root).sink(type("LettersSink", (kind,), {"write": write}))


@pytest.mark.nightly(by_day="tests/integration/broker/test_dead_letter_records.py")
def test_dead_letters_come_once_also_if_their_records_are_staged_again(
    spark, broker, topic, tmp_path
) -> None:
    """They commit before the records. These are lost behind the decision, of each sink in turn."""
    servers, refused = broker.bootstrap_servers, topic()
    places = {
        "kafka": KafkaSink(servers, refused),
        "delta": DeltaSink(str(tmp_path / "refused-delta")),
        "files": FileSink(str(tmp_path / "refused-files"), FileFormat.JSON),
        # As many again in another system of the user's.
        "mine": own_place(tmp_path / "refused-mine"),
    }
    (tmp_path / "refused-mine").mkdir()
    ledgers = {uid: Ledger(tmp_path / uid) for uid in places}
    for ledger in ledgers.values():
        ledger.database.parent.mkdir()

    def job():
        env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
        totals = totals_of(env)
        for uid, place in places.items():
            main = ledgers[uid].sink(picky(sqlite_sink_class(), 3))
            totals.sink_to(SinkWithDeadLetters(main, place), uid=uid)
        return env

    crash_at(job(), "decision:after:2")
    for ledger in ledgers.values():
        assert ledger.files()
        for file in ledger.files():
            (ledger.staging / file).unlink()
    client = run_for(job(), 2)

    def letters_of(uid):
        if uid == "kafka":
            return [json.loads(record.value) for record in read_committed(servers, refused)]
        if uid == "delta":
            return read_delta(tmp_path / "refused-delta")
        if uid == "files":
            paths = (tmp_path / "refused-files").glob("part-*")
            return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        return [{"uid": who, "record": record} for who, record in Ledger(tmp_path / "refused-mine").rows()]

    restaged = list((tmp_path / "job" / "restaged").rglob("*.json"))
    assert len(restaged) >= len(places), "each sink has lost its records"
    for uid, ledger in ledgers.items():
        letters = letters_of(uid)
        assert {letter["uid"] for letter in letters} == {uid}
        found = Counter((r["user"], r["total"]) for r in (json.loads(one["record"]) for one in letters))
        assert found and max(found.values()) == 1, uid
        assert all(total % 3 == 0 for _, total in found)
        assert check_each_once([*ledger.rows(), *found]) > rows(client, uid), uid
        assert not ledger.files()
