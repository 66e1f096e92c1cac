"""The REST server over a job directory: Flink's shapes, ours, who may ask what, and jobs that are down."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from flinkish_spark.checkpoint.answers import AnswerKind, CheckpointAnswer
from flinkish_spark.core.config import UiConfig
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.job_dir import open_job_dir
from flinkish_spark.core.object_store import open_object_store
from flinkish_spark.core.store_spec import StoreSpec, StoreUrl
from flinkish_spark.job.requests import OutsideRequest, RequestKind, StopMode
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointPurpose
from flinkish_spark.protocol.job_status import JobEvent, JobStatus
from flinkish_spark.rest.server import UiServer
from tests.support.cli_rig import JobOnDisk
from tests.support.rest_rig import (
    INTERVAL_MS,
    ORDERS,
    TABLE,
    TOKEN,
    TOPIC,
    TOTALS,
    ShownJob,
    asked,
    serving,
    shown_job,
)

NO_TOKEN: dict[str, str] = {}


@pytest.fixture
def job(tmp_path: Path) -> ShownJob:
    return shown_job(tmp_path / "jobs" / "orders")


@pytest.fixture
def server(job: ShownJob) -> Iterator[UiServer]:
    with serving(job.root.parent) as server:
        yield server


def got(server: UiServer, path: str) -> Any:
    status, answer = asked(server, path, headers=NO_TOKEN)
    assert status == 200, answer
    return answer


def ended(server: UiServer, path: str, trigger: str) -> Any:
    """Wait for an operation; return what is said of it."""
    deadline = time.monotonic() + 30
    while True:
        answer = got(server, f"{path}/{trigger}")
        if answer["status"]["id"] == "COMPLETED":
            return answer["operation"]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_lines_over_time_and_totals(server: UiServer, job: ShownJob) -> None:
    base = f"/jobs/{job.uuid}/flinkish"
    assert got(server, f"{base}/series")["hour"] == {"slot_ms": 15_000, "points": []}
    job.measured_over_time(hours=2)
    found = got(server, f"{base}/series")
    assert found["interval_ms"] == 10_000 and found["week"]["slot_ms"] == 900_000
    points = found["hour"]["points"]
    assert 220 < len(points) <= 240 and sum(one["starts"] for one in points) == 1
    assert points[-1]["in_per_second"] > 3 * points[-1]["out_per_second"] - 1 > 0
    assert points[-1]["worst_lag"] <= points[-1]["lag"] and points[-1]["took_ms"] > 0
    totals = [one["totals"] for one in got(server, f"{base}/graph")["vertices"]]
    assert totals[0] == {"read": 12_345_678, "written": None, "unread": 2_100, "late": None}
    assert totals[1]["late"] == 17 and totals[2]["written"] == 4_115_226
    job.damage("series.json")
    assert got(server, f"{base}/series")["hour"]["points"] == []


def test_an_interval_that_is_never_kept_has_a_hint(server: UiServer, job: ShownJob) -> None:
    path = f"/jobs/{job.uuid}/flinkish/checkpoints"
    assert got(server, path)["hint"] is None
    job.report = replace(job.report, settings={**job.report.settings, "interval_ms": 5_000})
    job.job_dir.put_report(job.report)
    assert got(server, path)["hint"] == (
        "The interval of 5.0 s is never kept: the newest 6 checkpoints began at least 10.0 s apart. "
        "The longest part is staging: 4.0 s. To do: shorten that part, such as by smaller micro-batches, "
        "or make the interval longer."
    )
    # A savepoint beside the timer says nothing about it.
    job.completed(8, CheckpointPurpose.SAVEPOINT)
    assert "the newest 6 checkpoints" in got(server, path)["hint"]


# -- Flink's paths ----------------------------------------------------------------------------------
def test_jobs_are_listed_as_flink_lists_them(server: UiServer, job: ShownJob) -> None:
    job_id = str(job.uuid)
    assert got(server, "/jobs") == {"jobs": [{"id": job_id, "status": "RUNNING"}]}
    (listed,) = got(server, "/jobs/overview")["jobs"]
    assert (listed["jid"], listed["name"], listed["state"]) == (job_id, "orders", "RUNNING")
    assert (listed["start-time"], listed["end-time"]) == (job.began_ms, -1)
    assert listed["tasks"]["total"] == listed["tasks"]["running"] == 4
    overview = got(server, "/overview")
    assert (overview["jobs-running"], overview["jobs-finished"], overview["jobs-failed"]) == (1, 0, 0)
    assert got(server, "/v1/jobs") == got(server, "/jobs")


def test_a_job_has_its_vertices_with_what_went_through_of_late(server: UiServer, job: ShownJob) -> None:
    found = got(server, f"/jobs/{job.uuid}")
    assert [one["id"] for one in found["vertices"]] == [ORDERS, TOTALS, TABLE, TOPIC]
    assert found["timestamps"]["RESTARTING"] == job.began_ms + 40_500
    assert found["maxParallelism"] == 128 and found["plan"]["nodes"][1]["inputs"][0]["id"] == ORDERS
    source, totals, table, _ = found["vertices"]
    assert source["metrics"]["read-records"] == table["metrics"]["write-records"] == 1_000
    assert (totals["parallelism"], totals["maxParallelism"], source["parallelism"]) == (4, 128, -1)


def test_shares_are_those_of_the_micro_batch_and_of_the_sinks_staging(
    server: UiServer, job: ShownJob
) -> None:
    base = f"/jobs/{job.uuid}/vertices"
    (subtask,) = got(server, f"{base}/{TOTALS}/backpressure")["subtasks"]
    # 4 s of 10 s at work, 1 s held back.
    assert (subtask["busyRatio"], subtask["ratio"], subtask["idleRatio"]) == (0.4, 0.1, 0.5)
    (subtask,) = got(server, f"{base}/{TABLE}/backpressure")["subtasks"]
    assert (subtask["busyRatio"], subtask["ratio"]) == (0.3, 0.0)
    wanted = "0.busyTimeMsPerSecond,0.numRecordsInPerSecond,0.nonsense"
    assert got(server, f"{base}/{ORDERS}/metrics?get={wanted}") == [
        {"id": "0.busyTimeMsPerSecond", "value": "400"},
        {"id": "0.numRecordsInPerSecond", "value": "100.0"},
    ]
    (over_all,) = got(server, f"{base}/{TOPIC}/subtasks/metrics?get=numRecordsOutPerSecond")
    assert over_all == {"id": "numRecordsOutPerSecond", "min": 100, "max": 100, "avg": 100, "sum": 100}
    watermark_ms = job.at_ms(7) - 2_000
    assert got(server, f"{base}/{TOTALS}/watermarks") == [
        {"id": "0.currentInputWatermark", "value": str(watermark_ms)}
    ]


def test_checkpoints_have_flinks_members(server: UiServer, job: ShownJob) -> None:
    base = f"/jobs/{job.uuid}/checkpoints"
    found = got(server, base)
    assert found["counts"] == {"restored": 1, "total": 6, "in_progress": 0, "completed": 5, "failed": 1}
    assert [(one["id"], one["status"]) for one in found["history"]][:4] == [
        (7, "IN_PROGRESS"),
        (6, "COMPLETED"),
        (5, "COMPLETED"),
        (4, "FAILED"),
    ]
    assert found["latest"]["completed"]["id"] == 6 and found["latest"]["restored"]["id"] == 3
    assert found["latest"]["failed"]["failure_message"] == "TASK_FAILED: no broker answered"
    # Clients made from Flink's OpenAPI document take no null.
    assert "savepoint" not in found["latest"]
    took = [5_400 + number % 7 * 100 for number in (1, 2, 3, 5, 6)]
    spread = found["summary"]["end_to_end_duration"]
    assert (spread["min"], spread["max"], spread["p50"]) == (min(took), max(took), sorted(took)[2])
    details = got(server, f"{base}/details/5")
    assert details["tasks"].keys() == {TOTALS, TABLE, TOPIC}
    assert details["tasks"][TABLE]["state_size"] == 20_000
    subtasks = got(server, f"{base}/details/5/subtasks/{TABLE}")
    assert subtasks["subtasks"][0]["checkpoint"] == {"sync": 3_000, "async": 600}
    config = got(server, f"{base}/config")
    assert (config["interval"], config["mode"], config["timeout"]) == (INTERVAL_MS, "EXACTLY_ONCE", 600_000)


def test_causes_of_restarts_name_the_vertex(server: UiServer, job: ShownJob) -> None:
    found = got(server, f"/jobs/{job.uuid}/exceptions")
    (entry,) = found["exceptionHistory"]["entries"]
    assert entry["taskName"] == "totals" and entry["timestamp"] == job.began_ms + 40_000
    assert found["root-exception"] == entry["stacktrace"]
    assert entry["stacktrace"].startswith("the sink 'topic' lost its broker")
    metrics = got(server, f"/jobs/{job.uuid}/metrics?get=numRestarts,lastCompletedCheckpointId")
    assert metrics == [{"id": "numRestarts", "value": "1"}, {"id": "lastCompletedCheckpointId", "value": "6"}]


# -- ours -------------------------------------------------------------------------------------------
def test_sinks_say_what_is_open_and_since_when(server: UiServer, job: ShownJob) -> None:
    table, _ = got(server, f"/jobs/{job.uuid}/flinkish/sinks")["sinks"]
    # Checkpoint 7 is decided, micro-batch 8 only staged: each has a committable of the sink.
    assert (table["staged_rows"], table["decided_rows"], table["open_committables"]) == (1_000, 1_000, 2)
    assert (table["confirmed_checkpoint"], table["facts"]) == (6, {"version": 6})
    age_ms = int(time.time() * 1_000) - (job.at_ms(7) + 100)
    assert abs(table["oldest_open_ms"] - age_ms) < 10_000


def test_no_payload_of_a_committable_is_told(server: UiServer, job: ShownJob) -> None:
    paths = ("sinks", "decisions", "audit", "checkpoints", "checkpoints/7", "graph", "")
    texts = [json.dumps(got(server, f"/jobs/{job.uuid}/flinkish/{path}".rstrip("/"))) for path in paths]
    assert not any("in the payload" in text or "transaction 7" in text for text in texts)


def test_old_checkpoints_are_read_a_page_at_a_time(tmp_path: Path) -> None:
    job = ShownJob(tmp_path / "orders")
    for number in range(1, 41):
        job.completed(number)
    with serving(job.root) as server:
        base = f"/jobs/{job.uuid}/flinkish/checkpoints"
        first = got(server, f"{base}?limit=15")
        assert [one["id"] for one in first["checkpoints"]] == list(range(40, 25, -1))
        assert (first["known"], first["older_than"]) == (40, 26)
        last = got(server, f"{base}?limit=30&before=26")
        assert [one["id"] for one in last["checkpoints"]] == list(range(25, 0, -1))
        assert last["older_than"] is None
        # More than anybody should ask for at once, and no number at all.
        assert len(got(server, f"{base}?limit=999999999")["checkpoints"]) == 40
        assert asked(server, f"{base}?limit=all")[0] == 400


def test_event_time_and_lineages(server: UiServer, job: ShownJob) -> None:
    (operator,) = got(server, f"/jobs/{job.uuid}/flinkish/watermarks")["operators"]
    assert (operator["uid"], operator["lag_ms"]) == ("totals", 7_000)
    assert got(server, f"/jobs/{job.uuid}/flinkish/lineages") == {"live": 0, "rewinds": []}
    rewind = got(server, f"/jobs/{job.uuid}/flinkish/rewind")
    assert rewind["order"] is None and [one["checkpoint"] for one in rewind["targets"]] == [6, 5, 3, 2, 1]


def test_a_change_is_told_as_it_happens(server: UiServer, job: ShownJob) -> None:
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
    connection.request("GET", f"/jobs/{job.uuid}/flinkish/events")
    answer = connection.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")

    def told() -> Any:
        assert answer.readline() == b"event: change\n"
        line = answer.readline()
        assert answer.readline() == b"\n"
        return json.loads(line.removeprefix(b"data: "))

    assert told()["completed"] == 5
    job.completed(9)
    assert told()["completed"] == 6
    job.change(JobStatus.FAILING, JobEvent.FAILURE, 100_000, "gone")
    assert told()["status"] == "FAILING"
    connection.close()


# -- changing ---------------------------------------------------------------------------------------
def test_a_savepoint_goes_below_the_directory_that_is_named(
    server: UiServer, job: ShownJob, tmp_path: Path
) -> None:
    base, parent = f"/jobs/{job.uuid}/savepoints", tmp_path / "savepoints"
    with job.running(job.carry_out) as seen:
        body = {"target-directory": str(parent), "cancel-job": False, "triggerId": "ab" * 16}
        assert asked(server, base, body) == (202, {"request-id": "ab" * 16})
        location = ended(server, base, "ab" * 16)["location"]
        assert location.startswith(f"{parent}/savepoint-{str(job.uuid)[:6]}-")
        # The same request again begins nothing new.
        assert asked(server, base, body)[0] == 202
        assert [(one.kind, one.target) for one in seen] == [(RequestKind.SAVEPOINT, location)]
        status, begun = asked(
            server, f"/jobs/{job.uuid}/stop", {"targetDirectory": str(parent), "drain": True}
        )
        assert status == 202
        assert ended(server, base, begun["request-id"])["location"].startswith(str(parent))
        assert seen[1].stop_mode is StopMode.DRAIN
    assert got(server, f"/jobs/{job.uuid}")["state"] == "FINISHED"
    # It does not run any more: whoever asks hears it at once.
    status, answer = asked(server, base, body | {"triggerId": None})
    assert status == 409 and "it is FINISHED" in answer["errors"][0]


def test_a_checkpoint_that_fails_says_why(server: UiServer, job: ShownJob) -> None:
    def refuse(request: OutsideRequest) -> CheckpointAnswer:
        return CheckpointAnswer.make_refused(CheckpointFailureReason.PARTICIPANT_NOT_RUNNING, "it restarts")

    with job.running(refuse):
        _, begun = asked(server, f"/jobs/{job.uuid}/checkpoints", {})
        operation = ended(server, f"/jobs/{job.uuid}/checkpoints", begun["request-id"])
    assert operation["failure-cause"]["stack-trace"] == "refused: PARTICIPANT_NOT_RUNNING, it restarts"


def test_a_cancel_is_carried_out(server: UiServer, job: ShownJob) -> None:
    with job.running(job.carry_out) as seen:
        assert asked(server, f"/jobs/{job.uuid}?mode=stop", method="PATCH")[0] == 400
        assert asked(server, f"/jobs/{job.uuid}?mode=cancel", method="PATCH") == (202, {})
    assert [one.kind for one in seen] == [RequestKind.CANCEL]
    assert got(server, f"/jobs/{job.uuid}")["state"] == "CANCELED"


def test_a_job_that_is_down_is_sent_back_at_its_next_start(server: UiServer, job: ShownJob) -> None:
    job.change(JobStatus.CANCELLING, JobEvent.CANCEL, 100_000)
    job.change(JobStatus.CANCELED, JobEvent.ALL_ENDED, 100_100)
    base = f"/jobs/{job.uuid}/flinkish/rewind"
    status, answer = asked(server, base, {"checkpoint": True})
    assert status == 400 and "whole number" in answer["errors"][0]
    _, begun = asked(server, base, {"checkpoint": 4})
    assert "was not completed" in ended(server, base, begun["request-id"])["failure-cause"]["stack-trace"]
    assert got(server, base)["order"] is None
    _, begun = asked(server, base, {"checkpoint": 3, "tables": "RESTORE"})
    assert ended(server, base, begun["request-id"])["outcome"] == "WAITS_FOR_START"
    order = job.job_dir.rewind_order()
    assert order is not None and (order.target.value, order.tables.value) == (3, "RESTORE")
    assert got(server, base)["order"]["order_id"] == order.order_id
    # One order at a time.
    _, begun = asked(server, base, {"checkpoint": 2})
    said = ended(server, base, begun["request-id"])["failure-cause"]["stack-trace"]
    assert "Another order to go back is waiting" in said


def test_a_job_that_runs_is_told_to_go_back(server: UiServer, job: ShownJob) -> None:
    def obey(request: OutsideRequest) -> CheckpointAnswer:
        job.went_back(target=3, lineage=1, order_id=request.target)
        return CheckpointAnswer(AnswerKind.COMPLETED)

    with job.running(obey) as seen:
        base = f"/jobs/{job.uuid}/flinkish/rewind"
        _, begun = asked(server, base, {"checkpoint": 3})
        done = ended(server, base, begun["request-id"])
    assert [one.kind for one in seen] == [RequestKind.REWIND]
    assert (done["outcome"], done["lineage"]) == ("DONE", 1)
    lineages = got(server, f"/jobs/{job.uuid}/flinkish/lineages")
    assert (lineages["live"], lineages["rewinds"][0]["checkpoint"]) == (1, 3)


def test_what_a_request_brings_is_checked(server: UiServer, job: ShownJob) -> None:
    base = f"/jobs/{job.uuid}/savepoints"
    for body, said in (
        ({}, "names no directory"),
        ({"target-directory": "relative/path"}, "relative/path"),
        ({"target-directory": 7}, "must be a text"),
        ({"target-directory": "/s", "cancel-job": True}, "cannot cancel"),
        ({"target-directory": "/s", "triggerId": "../../x"}, "32 lower-case"),
        ([], "no JSON object"),
    ):
        status, answer = asked(server, base, body)
        assert status == 400 and said in answer["errors"][0], answer
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "text/plain"}
    assert asked(server, base, {}, headers=headers)[0] == 415


# -- who may ask what -------------------------------------------------------------------------------
def test_a_change_needs_the_token_and_reading_does_not(server: UiServer, job: ShownJob) -> None:
    base = f"/jobs/{job.uuid}/checkpoints"
    for headers in (NO_TOKEN, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        status, answer = asked(server, base, {}, headers=headers)
        assert status == 401 and TOKEN not in json.dumps(answer)
    assert asked(server, f"/jobs/{job.uuid}?mode=cancel", method="PATCH", headers=NO_TOKEN)[0] == 401
    assert not list((job.root / "requests").glob("*"))
    assert asked(server, base, headers=NO_TOKEN)[0] == 200


def test_nothing_is_changed_by_get(server: UiServer, job: ShownJob) -> None:
    before = job.files()
    for path in ("stop", "savepoints", "cancel", "yarn-cancel", "flinkish/rewind", ""):
        asked(server, f"/jobs/{job.uuid}/{path}?mode=cancel&checkpoint=3")
    assert job.files() == before


def test_other_names_and_other_origins_are_refused(server: UiServer, job: ShownJob) -> None:
    port = urlsplit(server.url).port
    own = {"Authorization": f"Bearer {TOKEN}"}
    status, answer = asked(server, "/jobs", headers={"Host": "evil.example"})
    assert status == 421 and "does not answer to that name" in answer["errors"][0]
    assert asked(server, "/jobs", headers={"Host": f"localhost:{port}"})[0] == 200
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{(port or 0) + 1}"):
        assert asked(server, f"/jobs/{job.uuid}/checkpoints", {}, headers={**own, "Origin": origin})[0] == 403
        assert asked(server, "/jobs", headers={"Origin": origin})[0] == 403
    site = {**own, "Sec-Fetch-Site": "cross-site"}
    assert asked(server, f"/jobs/{job.uuid}/checkpoints", {}, headers=site)[0] == 403
    assert asked(server, "/jobs", headers={"Origin": server.url.rstrip("/")})[0] == 200


def test_ids_are_checked_before_they_become_paths(server: UiServer, job: ShownJob) -> None:
    base = f"/jobs/{job.uuid}"
    for path in ("/jobs/..", "/jobs/%2e%2e%2fetc", "/jobs/orders", f"{base}/vertices/{'f' * 32}", f"{base}x"):
        assert asked(server, path)[0] == 404, path
    for number in ("0", "-1", "x", "1e3", "9" * 30, "..%2f5", "%D9%A5"):
        assert asked(server, f"{base}/checkpoints/details/{number}")[0] == 404, number


def test_a_server_beyond_this_machine_wants_the_token_for_all_but_the_page(job: ShownJob) -> None:
    with serving(job.root, host="0.0.0.0", names=("proxy.example",)) as server:
        at_home = f"127.0.0.1:{urlsplit(server.url).port}"
        own = {"Host": "proxy.example"}
        assert asked(server, "/jobs", headers=own)[0] == 401
        assert asked(server, "/jobs", headers={**own, "Authorization": f"Bearer {TOKEN}"})[0] == 200
        place = http.client.HTTPConnection(at_home, timeout=10)
        place.request("GET", "/", headers=own)
        assert place.getresponse().status == 200


def test_a_server_that_only_shows_changes_nothing(job: ShownJob) -> None:
    with serving(job.root, can_change=False) as server:
        assert asked(server, f"/jobs/{job.uuid}/checkpoints", {})[0] == 403
        assert got(server, "/config")["features"]["web-cancel"] is False


def test_the_page_is_static_and_may_load_nothing_from_elsewhere(server: UiServer) -> None:
    place = urlsplit(server.url)
    for path in ("/", "/page.css", "/page.js", "/icon.svg"):
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200 and TOKEN not in text
        assert "default-src 'none'" in answer.getheader("content-security-policy", "")
        assert "://" not in text.replace("http://www.w3.org", "")
        connection.close()


# -- jobs that are down, damaged, or not there -------------------------------------------------------
def test_a_job_whose_process_is_gone_is_suspended(tmp_path: Path) -> None:
    # It writes its directory, and ends without a word.
    program = "from pathlib import Path; from tests.support.rest_rig import shown_job; import sys; "
    program += "shown_job(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "orders")], check=True, timeout=120)
    with serving(tmp_path) as server:
        (listed,) = got(server, "/jobs/overview")["jobs"]
        assert (listed["state"], listed["tasks"]["canceled"]) == ("SUSPENDED", 4)
        base = f"/jobs/{listed['jid']}"
        found = got(server, f"{base}/flinkish")
        assert (found["was_cut_off"], found["owner"]["life"]) == (True, "ENDED")
        # When it was heard of last, which was the decision of checkpoint 7.
        assert listed["end-time"] == listed["start-time"] + 7 * INTERVAL_MS + 5_000
        assert got(server, f"{base}/vertices/{TOTALS}/backpressure")["status"] == "deprecated"
        status, answer = asked(server, f"{base}/checkpoints", {})
        assert status == 409 and "does not run" in answer["errors"][0]


def test_a_job_on_another_machine_is_as_it_reports_until_it_is_silent(tmp_path: Path) -> None:
    now_ms = int(time.time() * 1_000)
    here, silent = (
        ShownJob(tmp_path / "here", now_ms - 60_000),
        ShownJob(tmp_path / "silent", now_ms - 3_600_000),
    )
    for job in (here, silent):
        elsewhere = {
            "owner_epoch": 1,
            "host": "far",
            "pid": 7,
            "taken_at_ms": job.began_ms,
            "process": "a/b/7/1",
        }
        job.job_dir.store.put("owners/1.json", seal("owner", elsewhere))
    with serving(tmp_path) as server:
        states = {one["id"]: one["status"] for one in got(server, "/jobs")["jobs"]}
        assert states == {str(here.uuid): "RUNNING", str(silent.uuid): "SUSPENDED"}
        owner = got(server, f"/jobs/{silent.uuid}/flinkish")
        assert (owner["owner"]["life"], owner["heard_at_ms"]) == ("UNKNOWN", silent.began_ms + 2_000)
        # It may run all the same, so it is asked.
        with silent.running(silent.carry_out):
            base = f"/jobs/{silent.uuid}/checkpoints"
            _, begun = asked(server, base, {})
            assert ended(server, base, begun["request-id"]) == {"checkpointId": 1}


def test_a_job_that_an_earlier_version_ran_is_shown_without_a_report(tmp_path: Path) -> None:
    job = JobOnDisk(tmp_path / "orders")
    job.complete(1, 2)
    never = JobOnDisk(tmp_path / "never", owners=0)
    with serving(tmp_path) as server:
        states = {one["id"]: one["status"] for one in got(server, "/jobs")["jobs"]}
        # Nobody has written anything since 1970.
        assert states == {str(job.uuid): "SUSPENDED", str(never.uuid): "CREATED"}
        for one in (job, never):
            for path in ("", "/plan", "/exceptions", "/checkpoints", "/checkpoints/config", "/metrics"):
                got(server, f"/jobs/{one.uuid}{path}")
            for path in (
                "",
                "/graph",
                "/sinks",
                "/watermarks",
                "/checkpoints",
                "/rewind",
                "/chained",
                "/audit",
            ):
                got(server, f"/jobs/{one.uuid}/flinkish{path}")


def test_damaged_and_copied_directories_hide_no_others(job: ShownJob, tmp_path: Path) -> None:
    root = job.root.parent
    shutil.copytree(job.root, root / "copy")
    JobOnDisk(root / "torn").damage("job.json")
    damaged = ShownJob(root / "zebra")
    damaged.damage("graph.json")
    with serving(root) as server:
        jobs = got(server, "/jobs")["jobs"]
        assert len(jobs) == 3 and len({one["id"] for one in jobs}) == 3
        assert list(got(server, "/flinkish/unreadable")) == [str(root / "torn")]
        # Its graph cannot be read, and the others are listed.
        assert len(got(server, "/jobs/overview")["jobs"]) == 2
        status, answer = asked(server, f"/jobs/{damaged.uuid}")
        assert status == 500 and "graph.json" in answer["errors"][0]


def test_jobs_in_a_bucket_are_found_by_their_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(self: StoreSpec) -> Any:
        memory = StoreSpec.parse(self.url.replace("s3://", "memory://rest-"))
        return open_object_store(memory, StoreUrl.parse(memory.url))

    monkeypatch.setattr(StoreSpec, "open_bucket", opened)
    folder = StoreSpec.parse("s3://bucket/jobs", {"region": "eu-central-1"})
    uuid, _ = open_job_dir(folder.to_child("orders")).read_or_create_job({"job": "orders"})
    for place in (folder, folder.to_child("orders")):
        server = UiServer([place], UiConfig(token=TOKEN))
        try:
            assert got(server, "/jobs") == {"jobs": [{"id": str(uuid), "status": "CREATED"}]}
            assert got(server, f"/jobs/{uuid}/checkpoints")["history"] == []
        finally:
            server.stop()


def test_what_cannot_be_served_is_refused_in_words(job: ShownJob) -> None:
    for settings, said in (
        ({"port": 70_000}, "port is 70000 .*a whole number from 0 to 65535"),
        ({"token": "short"}, "16 characters"),
        ({"savepoint_dir": "somewhere"}, "somewhere"),
    ):
        with pytest.raises(ConfigError, match=said):
            UiConfig(**settings)  # type: ignore[arg-type]
    assert TOKEN not in repr(UiConfig(token=TOKEN))
    with serving(job.root) as server, pytest.raises(EnvironmentFault, match="choose another port"):
        UiServer([], UiConfig(port=urlsplit(server.url).port or 0))


def test_purposes_are_told_as_flink_tells_them(tmp_path: Path) -> None:
    job = ShownJob(tmp_path / "orders")
    job.completed(1, CheckpointPurpose.SAVEPOINT)
    job.completed(2, CheckpointPurpose.FINAL_SAVEPOINT)
    with serving(job.root) as server:
        found = got(server, f"/jobs/{job.uuid}/checkpoints")
    types = [(one["checkpoint_type"], one["is_savepoint"]) for one in found["history"]]
    assert types == [("SYNC_SAVEPOINT", True), ("SAVEPOINT", True)]
    assert found["latest"]["savepoint"]["id"] == 2
