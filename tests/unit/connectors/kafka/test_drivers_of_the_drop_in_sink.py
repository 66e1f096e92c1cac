"""How the drop-in sink tells its own driver from another one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flinkish_spark.connectors import stream_writer as writer

#: A daemon as Spark's, whose two forks plan and commit.
_DAEMON = """
import os, sys
from flinkish_spark.connectors.stream_writer import _identify_driver
for _ in range(2):
    if not os.fork():
        print(os.getppid(), _identify_driver(), flush=True)
        os._exit(0)
    os.wait()
"""


def _driver_of_a_new_daemon() -> str:
    done = subprocess.run([sys.executable, "-c", _DAEMON], check=True, capture_output=True, text=True)
    planning, committing = done.stdout.splitlines()
    assert planning == committing
    return planning.split(" ", 1)[1]


def test_processes_of_one_daemon_are_one_driver_and_those_of_the_next_another() -> None:
    one, next_one = _driver_of_a_new_daemon(), _driver_of_a_new_daemon()
    assert one != next_one
    # It is written as a line of ASCII.
    assert one == one.encode("ascii").decode().strip()


def test_a_daemon_with_the_host_and_number_of_an_earlier_one_is_another_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container that starts again."""
    here = os.getpid()
    monkeypatch.setattr("os.getppid", lambda: here)
    earlier = writer._identify_driver()
    assert writer._identify_driver() == earlier
    read = Path.read_text

    def started_a_tick_later(path: Path, *args: str, **named: str) -> str:
        text = read(path, *args, **named)
        if str(path) != f"/proc/{here}/stat":
            return text
        command, _, facts = text.rpartition(")")
        fields = facts.split()
        fields[19] = str(int(fields[19]) + 1)
        return f"{command}) {' '.join(fields)}"

    monkeypatch.setattr(Path, "read_text", started_a_tick_later)
    assert writer._identify_driver() != earlier


def test_where_the_operating_system_does_not_tell_host_and_number_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "process_key", lambda pid: None)
    assert writer._identify_driver() == f"{socket.gethostname()}-{os.getppid()}"
