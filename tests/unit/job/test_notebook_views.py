"""What notebooks show of a job, its statistics, savepoints and comparisons: complete, and harmless."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from flinkish_spark.checkpoint.answers import CheckpointAnswer, PendingAnswer
from flinkish_spark.job.client import JobClient
from flinkish_spark.job.engine import JobProgress
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.html import html_table, utc_text
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, Lineage
from flinkish_spark.protocol.job_status import JobStatus
from flinkish_spark.protocol.savepoints import OperatorState, SavepointMetadata, SourceFacts
from flinkish_spark.protocol.statistics import CheckpointDurations, CheckpointStatistics, StatisticsHistory
from flinkish_spark.savepoints.comparison import ComparedPart, Comparison, Fate

EVIL = '<script>alert("x")</script>&'


class Shown(HTMLParser):
    """Rows of cells, and whatever else a browser would take for an element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.text, self._is_in_cell = "", False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._is_in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._is_in_cell = self._is_in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._is_in_cell:
            self.rows[-1][-1] += data


def shown(value: Any) -> Shown:
    found = Shown(value._repr_html_())
    assert found.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "pre", "p", "a"}
    return found


def test_a_table_has_headings_or_names() -> None:
    assert html_table([]) == "<table><tbody></tbody></table>"
    assert html_table([["a", 1, ""]], caption=EVIL).startswith("<table><caption>&lt;script&gt;")
    assert Shown(html_table([["a", 1, ""]])).rows == [["a", "1", "-"]]
    assert utc_text(None) is None and utc_text(0) == "1970-01-01 00:00:00Z"
    assert utc_text(10**20) == f"{10**20} ms"


def test_statistics_are_the_newest_checkpoints_and_a_summary() -> None:
    history = StatisticsHistory()
    assert shown(history).text.startswith("Checkpoints: 0 completed, 0 failed, 0 in progress")
    one, two = (
        CheckpointStatistics.begin(CheckpointId(number), CheckpointPurpose.PERIODIC, number * 1_000)
        for number in (1, 2)
    )
    done = one.complete(CheckpointDurations(sync_ms=20, end_to_end_ms=90), rows=12, bytes_staged=340)
    failed = two.fail(CheckpointFailureReason.EXPIRED, EVIL)
    found = shown(history.add_triggered(one).add_ended(done).add_triggered(two).add_ended(failed))
    assert found.rows[1] == [
        *("2", "PERIODIC", "FAILED", "1970-01-01 00:00:02Z", "-", "-", "-", "-"),
        f"EXPIRED: {EVIL}",
    ]
    assert found.rows[2] == [
        *("1", "PERIODIC", "COMPLETED", "1970-01-01 00:00:01Z", "90", "20", "12", "340", "-")
    ]
    assert ["end_to_end_ms", "1", "90", "90.0", "90", "90", "90"] in found.rows


def test_a_savepoint_says_what_is_in_it_and_not_what_hooks_gave() -> None:
    metadata = SavepointMetadata(
        *("a" * 32, EVIL, JobUuid("0" * 32), CheckpointId(7), Lineage(0), BatchId(3), 1_000, 2),
        operators={"totals": OperatorState(128, ("string",))},
        sources={"in": SourceFacts("kafka")},
        chains=(),
        hooks={"catalog": {"password": "of a system outside"}},
    )
    found = shown(metadata)
    assert ["job", EVIL] in found.rows and ["operators", "totals"] in found.rows
    assert ["hooks", "catalog"] in found.rows and "outside" not in found.text


def test_an_answer_is_shown_when_it_is_there() -> None:
    pending = PendingAnswer()
    assert "not answered yet" in shown(pending).text
    pending.resolve(CheckpointAnswer.make_completed(CheckpointId(3), "/savepoints/<3>"))
    assert shown(pending).rows == [["answer", "COMPLETED"], ["checkpoint", "3"], ["-", "/savepoints/<3>"]]
    refused = CheckpointAnswer.make_refused(CheckpointFailureReason.EXPIRED)
    assert ["reason", "EXPIRED"] in shown(refused).rows and ["checkpoint", "-"] in shown(refused).rows


def test_a_comparison_has_a_line_for_each_uid_and_the_verdict() -> None:
    part = ComparedPart("totals", Fate.REFUSED, "operator", EVIL)
    found = shown(Comparison((part,), is_refused=True))
    assert found.rows[1] == ["totals", "refused", "operator", EVIL]
    assert found.text.startswith("The restore would be refused")
    assert "would go through" in shown(Comparison((), is_refused=False)).text


class Page:
    url, link = "http://127.0.0.1:1/", 'http://127.0.0.1:1/#token="x'

    def stop(self) -> None:
        pass


class Supervisor:
    """Runs a job that ends at once."""

    def __init__(self) -> None:
        self.job_id = "a" * 32
        self.progress = JobProgress(2, 9, 3, rows_by_sink={"out": 12}, last_error=EVIL)
        self.progress.accumulators = {"read": 7}
        self.states, self.status, self.vertices = self, JobStatus.FINISHED, ()

    def run(self, on_left: Any) -> None:
        pass


def test_a_client_says_what_the_job_does_and_where_its_page_is() -> None:
    supervisor: Any = Supervisor()
    client = JobClient(supervisor, ui=Page())
    client.wait()
    found = shown(client)
    assert found.text.startswith(f"Job {'a' * 32}: FINISHED")
    assert found.rows[:4] == [
        ["restarts", "2"],
        ["micro-batches", "9"],
        ["checkpoints", "3"],
        ["rows of out", "12"],
    ]
    assert found.rows[4][0] == "last error" and found.rows[4][1].startswith(EVIL)
    assert 'href="http://127.0.0.1:1/#token=&quot;x"' in client._repr_html_()
    assert "a" not in shown(JobClient(supervisor)).tags
    assert ["read", "7"] in shown(client.get_job_execution_result()).rows
