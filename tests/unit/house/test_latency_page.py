"""The examples of docs/latency-markers.md and of the modules behind it; its job runs in tests/integration."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from types import ModuleType

import pytest

from flinkish_spark import latency
from flinkish_spark.protocol import latency as latencies
from flinkish_spark.protocol import latency as latency_histogram

PAGE = Path(__file__).resolve().parents[3] / "docs" / "latency-markers.md"


def test_the_examples_of_the_page_run() -> None:
    blocks = re.findall(r"^```pycon\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    test = doctest.DocTestParser().get_doctest("".join(blocks), {}, PAGE.name, str(PAGE), 0)
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize("module", [latencies, latency_histogram], ids=lambda module: module.__name__)
def test_the_examples_in_the_modules_do_what_they_say(module: ModuleType) -> None:
    found = doctest.testmod(module, extraglobs=vars(module))
    assert found.attempted and not found.failed


def test_every_public_name_is_documented() -> None:
    assert all(getattr(latency, name).__doc__ for name in latency.__all__)
