"""The parts that show a job, as :class:`~flinkish_spark.job.face.JobFace` has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from flinkish_spark.contracts.source import SourceNode
from flinkish_spark.core.clock import SystemClock
from flinkish_spark.core.config import UiConfig
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.client import JobClient
from flinkish_spark.job.face import Reporter
from flinkish_spark.job.live_line import LiveLine
from flinkish_spark.job.plan_forms import markdown, plan_in, print_tree
from flinkish_spark.reporters.reporter import ReporterGroup
from flinkish_spark.rest.server import UiServer

__all__ = ["make_reporting", "markdown", "plan_in", "print_tree", "serve_page", "show_line"]


def serve_page(place: StoreSpec, config: UiConfig) -> UiServer:
    return UiServer([place], config)


def show_line(
    name: str, client: JobClient, sources: Sequence[SourceNode], hold_bars: Callable[[], None]
) -> LiveLine:
    return LiveLine(name, client, sources, sys.stderr, hold_bars, SystemClock())


def make_reporting(place: StoreSpec, reporters: Sequence[Reporter]) -> ReporterGroup:
    return ReporterGroup(place, reporters)
