"""The examples of docs/job-graph.md, run as they stand; its pictures are looked at in tests/unit/job."""

from __future__ import annotations

from functools import partial
from typing import Any

from flinkish_spark import StreamExecutionEnvironment
from flinkish_spark.job import plan_forms
from tests.support.job_graphs import Session, graph_of, windows_and_patterns
from tests.support.pages import DOCS, check_page


def environment(session: Any, job: str) -> StreamExecutionEnvironment:
    return StreamExecutionEnvironment(session, job, f"/jobs/{job}")


def test_the_examples_of_the_page_run() -> None:
    check_page("job-graph.md", at_least=2, given={"environment": partial(environment, Session())})


def test_the_picture_on_the_page_is_what_is_drawn() -> None:
    drawn = plan_forms.markdown(graph_of(windows_and_patterns))
    assert f"\n{drawn}\n" in (DOCS / "job-graph.md").read_text(encoding="utf-8")
