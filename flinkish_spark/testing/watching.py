"""Servers of tests end with the process that started them, however it ends."""

from __future__ import annotations

import subprocess

from flinkish_spark.forks import close_in_children


def watch(pid: int) -> subprocess.Popen[bytes]:
    """Start a process that kills the server `pid` when its own input ends without a line: we are gone.

    Whoever has ended the server writes it the line.
    """
    command = ["/bin/sh", "-c", 'read -r word || kill -9 "$0"', str(pid)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert watcher.stdin is not None
    close_in_children(watcher.stdin)
    return watcher
