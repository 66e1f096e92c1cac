"""The examples of docs/datastream.md, run as they stand; they declare streams and start nothing."""

from __future__ import annotations

import doctest

from tests.support.pages import check_page
from tests.unit.planning.test_stream_settings import environment


def test_the_examples_of_the_page_run() -> None:
    check_page("datastream.md", at_least=5, flags=doctest.ELLIPSIS, given={"env": environment()})
