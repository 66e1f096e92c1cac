"""What of the crash sweep needs no JVM: names of points, the switch, the hooks, the proxy, results."""

from __future__ import annotations

import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from demo.orders import expected_totals, generate, newest_totals
from demo.rig import ROOT
from flinkish_spark.connectors.delta import rows as delta
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.store import CreateResult, LocalStore
from tests.crash.sweep import databases, files, hooks
from tests.crash.sweep.__main__ import chooser
from tests.crash.sweep.gateway import hook_gateway
from tests.crash.sweep.looking import FilesLooker, SqliteLooker
from tests.crash.sweep.places import Fleet, Place
from tests.crash.sweep.points import (
    TRIGGERS,
    Call,
    Effect,
    Fault,
    Layer,
    Point,
    Run,
    fault_runs,
    first_checkpoint,
    kill_runs,
    union,
    without_ids,
)
from tests.crash.sweep.results import Result, Results
from tests.crash.sweep.sinks import orders_in, without_counts
from tests.crash.sweep.subject import Verdict
from tests.crash.sweep.switch import Switch
from tests.crash.sweep.wire import KafkaProxy, kafka_frame

WRITE = Call("store.put a", Layer.CALL, Effect.WRITE)
READ = Call("store.read a", Layer.CALL, Effect.READ)


# -- points -----------------------------------------------------------------------------------------
def test_a_name_is_the_same_in_every_checkpoint():
    assert without_ids("checkpoints/12/decision.json") == without_ids("checkpoints/7/decision.json")
    assert without_ids("job/pins/state/0/1/12_ab12cd34.changelog") == "job/pins/state/*"
    assert without_ids("job/pins/state/0/1/.12.changelog.crc.part") == "job/pins/state/*.part"
    assert without_ids("facts/topic-orders-in.json") == "facts/topic-orders-in.json"


def test_a_point_is_read_as_it_is_written():
    point = Point("os.link checkpoints/*/decision.json", 3)
    assert Point.parse(str(point)) == point


def test_kills_are_in_front_of_every_write_and_a_store_s_write_begins_with_a_system_call():
    link = Call("os.link a", Layer.INNER, Effect.WRITE)
    commit = Call("delta.commit", Layer.CALL, Effect.WRITE)
    trace = [READ, WRITE, link, READ, commit, commit]
    assert [str(run.point) for run in kill_runs(trace)] == [
        "os.link a #1",
        "delta.commit #1",
        "delta.commit #2",
    ]


def test_of_many_state_files_the_first_and_the_last_are_points():
    pin = Call("os.link job/pins/state/*", Layer.FILE, Effect.WRITE)
    assert [run.point.occurrence for run in kill_runs([pin] * 9)] == [1, 9]
    assert [run.point.occurrence for run in fault_runs([pin] * 9)] == [1, 9]


def test_what_is_polled_fails_once_and_committers_are_killed_inside_only():
    polled = Call("store.read spark/*/commits/*", Layer.CALL, Effect.READ)
    assert len(fault_runs([polled] * 9)) == 1
    commit = Call("sink.commit", Layer.SINK, Effect.WRITE)
    assert kill_runs([commit]) == []
    assert len(fault_runs([commit])) == 3


def test_every_call_has_the_faults_that_its_layer_can_have():
    inner = Call("os.link a", Layer.INNER, Effect.WRITE)
    wire = Call("kafka.EndTxn", Layer.WIRE, Effect.WRITE)
    runs = fault_runs([READ, inner, wire])
    assert runs == [
        Run(Point("store.read a"), Fault.FAIL),
        *[Run(Point("kafka.EndTxn"), fault) for fault in (Fault.FAIL, Fault.LOST, Fault.TWICE)],
    ]


def test_a_call_into_the_jvm_fails_once_and_the_function_around_it_is_not_what_fails():
    bridge = Call("delta.commit", Layer.BRIDGE, Effect.WRITE)
    asks = Call("jvm.transactions._to_list hasNext", Layer.JVM, Effect.READ)
    writes = Call("jvm.rows.commit commit", Layer.JVM, Effect.WRITE)
    trace = [bridge, asks, asks, writes, writes]
    assert fault_runs(trace) == [
        Run(Point(bridge.name), Fault.LOST),
        Run(Point(bridge.name), Fault.TWICE),
        Run(Point(asks.name), Fault.FAIL),
        Run(Point(writes.name), Fault.FAIL),
        Run(Point(writes.name), Fault.LOST),
    ]
    assert kill_runs(trace) == [Run(Point(one.name), Fault.KILL) for one in (bridge, writes)]


class Gateway:
    """Stands for Py4J's connection: notes commands, and makes Java exceptions of numbers."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._jvm = SimpleNamespace(
            _gateway_client=self,
            java=SimpleNamespace(io=SimpleNamespace(IOException=lambda text: text)),
            org=SimpleNamespace(apache=SimpleNamespace(spark=SimpleNamespace(SparkException=self.thrown))),
        )

    def thrown(self, text: str, cause: str) -> SimpleNamespace:
        self.sent.append(f"{text} {cause}")
        return SimpleNamespace(_target_id="o9")

    def send_command(self, command: str) -> str:
        self.sent.append(command)
        return "yv"


def from_the_bridge(gateway: Gateway, command: str) -> str:
    """Send a command as a function of the bridge does."""
    code = compile("def commit(): return gateway.send_command(command)", delta.__file__, "exec")
    names = {"gateway": gateway, "command": command}
    exec(code, names)
    answer: str = names["commit"]()
    return answer


def test_what_fails_is_the_call_of_the_bridge_and_it_fails_as_the_jvm_says_it(told):
    gateway, command = Gateway(), "c\no7\ncommit\ne\n"
    unhook = hook_gateway(gateway)
    switch = switch_with(told, Run(Point("jvm.rows.commit commit"), Fault.FAIL))
    inside = lambda: [from_the_bridge(gateway, command), from_the_bridge(gateway, command)]  # noqa: E731
    assert from_the_bridge(gateway, command) == "yv"
    assert switch.around(WRITE, inside, outage) == ["xro9", "yv"]
    # What only asks, for somebody else, is no call of a checkpoint's; nor is a command that calls nothing.
    switch.around(
        WRITE, lambda: [gateway.send_command(one) for one in ("c\no7\ncol\ne\n", "m\nd\no7\ne\n")], outage
    )
    assert [call.name for call in switch.end()] == [
        WRITE.name,
        *["jvm.rows.commit commit"] * 2,
        WRITE.name,
    ]
    assert gateway.sent[1] == f"Job aborted. {files.OUTAGE}" and told == ["fired"]
    unhook()
    assert from_the_bridge(gateway, command) == "yv"


def test_traces_are_joined_and_cut_at_the_second_trigger():
    trigger = Call(TRIGGERS[0], Layer.CALL, Effect.WRITE)
    assert first_checkpoint([trigger, READ, trigger, WRITE]) == [trigger, READ]
    assert union([READ, WRITE], [READ, READ]) == [READ, WRITE, READ]


# -- the switch -------------------------------------------------------------------------------------
@pytest.fixture
def told() -> list[str]:
    return []


def switch_with(told: list[str], run: Run | None) -> Switch:
    switch = Switch(told.append)
    switch.begin(run)
    return switch


def outage() -> OSError:
    return OSError("out")


def test_a_fault_happens_once_at_its_occurrence(told):
    switch = switch_with(told, Run(Point(WRITE.name, 2), Fault.FAIL))
    done: list[int] = []
    for number in range(4):
        try:
            switch.around(WRITE, lambda number=number: done.append(number), outage)
        except OSError:
            done.append(-1)
    assert done == [0, -1, 2, 3]
    assert told == ["fired"]


def test_a_lost_reply_is_an_error_behind_a_call_that_was_made(told):
    switch, done = switch_with(told, Run(Point(WRITE.name), Fault.LOST)), []
    with pytest.raises(OSError, match="out"):
        switch.around(WRITE, lambda: done.append(1), outage)
    assert done == [1]


def test_a_repeated_call_answers_with_its_first_answer(told):
    switch, answers = switch_with(told, Run(Point(WRITE.name), Fault.TWICE)), iter(["first", "second"])
    assert switch.around(WRITE, lambda: next(answers), outage) == "first"
    assert next(answers, "none is left") == "none is left"


def test_a_frozen_job_makes_no_call_any_more_in_any_thread(told):
    switch, done = switch_with(told, Run(Point(WRITE.name), Fault.KILL)), []
    for call in (WRITE, READ):
        body = lambda call=call: switch.around(call, lambda: done.append(call), outage)  # noqa: E731
        threading.Thread(target=body, daemon=True).start()
        time.sleep(0.1)
    assert told == ["reached"]
    assert not done


def test_a_window_counts_anew_and_records(told):
    switch = switch_with(told, None)
    switch.around(WRITE, lambda: switch.on_file("os.link a"), outage)
    switch.on_file("os.link b")
    assert [(call.name, call.layer) for call in switch.end()] == [
        ("store.put a", Layer.CALL),
        ("os.link a", Layer.INNER),
        ("os.link b", Layer.FILE),
    ]
    switch.around(WRITE, lambda: None, outage)
    switch.begin(None)
    assert switch.end() == []


# -- hooks ------------------------------------------------------------------------------------------
HOOKED = """
import sys
from pathlib import Path
from flinkish_spark.core.store import LocalStore
from tests.crash.sweep import databases, files, hooks
from tests.crash.sweep.points import Fault, Point, Run
from tests.crash.sweep.switch import Switch
import sqlite3

base = Path(sys.argv[1])
switch = Switch(lambda event: print(event))
jobs = files.Jobs(base, {"one": switch})
hooks.hook_store(jobs)
databases.hook_sqlite(jobs)
files.hook_files(jobs)
store = LocalStore(base / "one" / "job")
switch.begin(None)
store.create_if_absent("checkpoints/3/decision.json", b"x")
store.read("checkpoints/3/decision.json")
LocalStore(base / "other").put("a", b"x")
(base / "one" / "free").write_text("x")
for call in switch.end():
    print(call.layer.value, call.effect.value, call.name)
switch.begin(Run(Point("open free"), Fault.FAIL))
try:
    (base / "one" / "free").write_text("y")
except OSError as error:
    print("refused", error.errno, (base / "one" / "free").read_text())
connection = sqlite3.connect(base / "one" / "db")
switch.begin(None)
with connection:
    connection.execute("CREATE TABLE t (a INTEGER)")
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO t VALUES (?)", [(1,), (2,)])
print(connection.execute("SELECT count(*) FROM t").fetchone())
for call in switch.end():
    print(call.effect.value, call.name)
switch.begin(Run(Point("sqlite COMMIT"), Fault.LOST))
try:
    with connection:
        connection.execute("INSERT INTO t VALUES (3)")
except sqlite3.OperationalError as error:
    print("lost")
print(connection.execute("SELECT count(*) FROM t").fetchone())
"""


def test_hooks_see_the_store_its_system_calls_other_files_and_sqlite(tmp_path):
    """In a process of its own: an audit hook stays until the end."""
    done = subprocess.run(
        [sys.executable, "-c", HOOKED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    temporary = "job/checkpoints/*/.decision.json.*.tmp"
    folders = ("job", "job/checkpoints", "job/checkpoints/*")
    assert done.stdout.splitlines() == [
        "call write store.create_if_absent checkpoints/*/decision.json",
        *[f"inner write os.mkdir {folder}" for folder in ("", *folders)],
        f"inner write open {temporary}",
        "inner write os.link job/checkpoints/*/decision.json",
        f"inner write os.remove {temporary}",
        "call read store.read checkpoints/*/decision.json",
        "file write open free",
        "fired",
        "refused 5 x",
        "(2,)",
        "write sqlite CREATE TABLE t (a INTEGER)",
        "write sqlite BEGIN",
        "write sqlite INSERT INTO t VALUES (?)",
        "write sqlite COMMIT",
        "read sqlite SELECT count(*) FROM t",
        "fired",
        "lost",
        "(3,)",
    ]


def test_a_job_is_found_by_what_lies_in_its_directory(tmp_path):
    one = Switch(lambda event: None)
    jobs = files.Jobs(tmp_path, {"one": one})
    assert jobs.of_path(f"file:{tmp_path}/one/job/staged/7") == (one, "job/staged/*")
    assert jobs.of_path(tmp_path / "two" / "a") is None
    assert jobs.of_path(f"{tmp_path}-one/a") is None
    assert jobs.of_path(7) is None


def test_a_store_that_fails_raises_what_the_store_raises(tmp_path, monkeypatch):
    for name in ("read", "list", "put", "create_if_absent", "delete"):
        monkeypatch.setattr(LocalStore, name, getattr(LocalStore, name))
    switch = Switch(lambda event: None)
    hooks.hook_store(files.Jobs(tmp_path, {"one": switch}))
    store = LocalStore(tmp_path / "one")
    switch.begin(Run(Point("store.create_if_absent a", 1), Fault.LOST))
    with pytest.raises(StoreError, match="The sweep lets this call fail"):
        store.create_if_absent("a", b"x")
    assert store.create_if_absent("a", b"x") is CreateResult.EXISTS


def test_a_system_call_that_changes_nothing_is_a_read(tmp_path):
    (tmp_path / "file").touch()
    assert files._changes("os.remove", str(tmp_path / "file"))
    assert not files._changes("os.remove", str(tmp_path / "none"))
    assert not files._changes("os.mkdir", str(tmp_path))
    assert not files._changes("os.rmdir", str(tmp_path))
    assert files._changes("os.rename", str(tmp_path / "none"))


def test_statements_are_told_apart_by_their_first_words():
    assert databases.sql_call("  UPDATE  t\n SET a = 12", "sqlite").name == "sqlite UPDATE t SET a = *"
    assert databases.sql_call("select 1", "sqlite").effect is Effect.READ


# -- the proxy --------------------------------------------------------------------------------------
class Echo(threading.Thread):
    """A server that answers each request with its correlation id, and remembers the requests."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.requests: list[int] = []
        self.start()

    def run(self) -> None:
        while True:
            client, _ = self.socket.accept()
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client: socket.socket) -> None:
        with client:
            while head := client.recv(4):
                data = client.recv(struct.unpack(">i", head)[0])
                self.requests.append(struct.unpack_from(">hhi", data)[2])
                client.sendall(struct.pack(">ii", 4, self.requests[-1]))


def request(key: int, correlation: int) -> bytes:
    return struct.pack(">ihhi", 8, key, 3, correlation)


def answer(client: socket.socket) -> int | None:
    data = client.recv(8)
    return struct.unpack(">ii", data)[1] if data else None


END_TXN = 26


def proxied(told: list[str], fault: Fault) -> tuple[Echo, socket.socket]:
    server, switch = Echo(), switch_with(told, Run(Point("kafka.EndTxn"), fault))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    KafkaProxy(port, server.port, switch)
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(10)
    client.sendall(request(3, 1))
    assert answer(client) == 1
    client.sendall(request(END_TXN, 2))
    return server, client


def test_a_request_is_named_by_its_api_key():
    frame = kafka_frame(request(END_TXN, 7))
    assert (frame.correlation, frame.call) == (7, Call("kafka.EndTxn", Layer.WIRE, Effect.WRITE))
    assert kafka_frame(request(3, 7)).call is None
    # Of an atomic sink: its offsets go into the transaction.
    asked = [kafka_frame(request(key, 7)).call for key in (25, 28, 61)]
    assert asked == [
        Call("kafka.AddOffsetsToTxn", Layer.WIRE, Effect.WRITE),
        Call("kafka.TxnOffsetCommit", Layer.WIRE, Effect.WRITE),
        Call("kafka.DescribeProducers", Layer.WIRE, Effect.READ),
    ]
    # Of a request that nobody has named it is not known that it changes nothing.
    assert kafka_frame(request(19, 7)).call == Call("kafka.api-19", Layer.WIRE, Effect.WRITE)


def test_a_request_that_fails_does_not_reach_the_server(told):
    server, client = proxied(told, Fault.FAIL)
    with client:
        assert answer(client) is None
    assert server.requests == [1]


def test_a_reply_is_lost_behind_a_request_that_reached_the_server(told):
    server, client = proxied(told, Fault.LOST)
    with client:
        assert answer(client) is None
    assert server.requests == [1, 2]


def test_a_repeated_request_reaches_the_server_twice_and_is_answered_once(told):
    server, client = proxied(told, Fault.TWICE)
    with client:
        assert answer(client) == 2
        client.sendall(request(3, 3))
        assert answer(client) == 3
    assert server.requests == [1, 2, 2, 3]


def test_a_killed_request_is_held_for_ever(told):
    server, client = proxied(told, Fault.KILL)
    with client:
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(8)
    assert server.requests == [1]
    assert told == ["reached"]


# -- results and judging ----------------------------------------------------------------------------
def test_results_are_read_again_without_a_cut_off_line_and_without_other_revisions(tmp_path):
    file, run = tmp_path / "delta.jsonl", Run(Point("delta.commit"), Fault.KILL)
    old = Results(file, "old")
    old.add(Result(run, True, Verdict()))
    new = Results(file, "new")
    new.add_trace([READ])
    new.add(Result(run, False, Verdict()))
    assert not new.is_done(run)
    new.add(Result(run, True, Verdict(lost=1, detail="missing"), 1.0, "note"))
    with file.open("a") as end:
        end.write('{"revision": "new", "poi')
    again = Results(file, "new")
    assert again.trace == [READ]
    assert again.is_done(run)
    assert again.all()[run].verdict == Verdict(lost=1, detail="missing")


def test_a_sample_is_the_same_every_time_and_keeps_the_order():
    runs = [Run(Point("a", number), Fault.FAIL) for number in range(1, 50)]
    choose = chooser(5, list(Fault), "")
    assert choose(runs) == choose(runs)
    assert len(choose(runs)) == 5
    assert choose(runs) == sorted(choose(runs), key=lambda run: run.point.occurrence)
    assert chooser(0, [Fault.KILL], "")(runs) == []
    assert chooser(0, list(Fault), "#7")(runs) == [runs[6]]


def test_an_upsert_shows_the_newest_row_of_each_user_and_counts_all():
    values = [order.value for order, _ in zip(generate(3), range(200), strict=False)]
    rows = newest_totals(values)
    assert len(rows) == len({user for user, _, _ in expected_totals(values)})
    assert orders_in(rows) == 200


def test_a_reader_of_files_does_not_see_hidden_ones(tmp_path):
    row = '{"user": "a", "total": 1, "orders": 1}\n'
    looker = FilesLooker(tmp_path)
    assert looker.look() == Counter()
    for name in ("one.json", "day=1/two.json", "_pending/three.json", "day=1/.four.json", "_SUCCESS"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(row)
    assert looker.look() == Counter({("a", 1, 1): 2})


def test_a_reader_of_a_database_sees_nothing_before_there_is_a_table(tmp_path):
    file = str(tmp_path / "db")
    looker = SqliteLooker(file, "user, total, 0")
    assert looker.look() == Counter()
    with sqlite3.connect(file) as database:
        assert looker.look() == Counter()
        database.execute("CREATE TABLE totals (user TEXT, total INTEGER)")
        database.execute("INSERT INTO totals VALUES ('a', 3)")
    assert looker.look() == Counter({("a", 3, 0): 1})
    value = next(generate(1)).value
    assert {row[2] for row in without_counts([value])} == {0}


def test_what_the_process_is_told_is_what_its_parent_knows(tmp_path):
    place = Place("delta", tmp_path / "jobs" / "delta", 1, 2, "localhost:3")
    fleet = Fleet(tmp_path / "jobs", tmp_path, tmp_path / "control", (place,))
    assert Fleet.from_json(fleet.to_json()) == fleet
    assert fleet.only(["delta"]) == fleet
    assert fleet.only([]).places == ()
