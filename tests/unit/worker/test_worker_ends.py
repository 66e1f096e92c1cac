"""A Python worker ends when Spark has closed its connection, whatever it does; and not before."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap

import pytest

#: A worker as PySpark's daemon runs it, over the connection with the number that it is given.
_WORKER = textwrap.dedent(
    """
    import socket, sys, time
    import pyspark.worker
    from pyspark import daemon
    from flinkish_spark.worker.daemon import end_quietly, freeze_modules

    daemon.worker = end_quietly(daemon.worker)

    def task(infile, outfile):
        freeze_modules()
        outfile.write(b"begun")
        outfile.flush()
        while True:
            try:
                {does}
            except BaseException:
                pass

    pyspark.worker.main = task
    number = int(sys.argv.pop())
    daemon.worker(socket.socket(fileno=number), True)
    """
)


@pytest.mark.parametrize("does", ["time.sleep(60)", "sum(range(10_000))"])
def test_a_worker_ends_with_its_connection(does: str) -> None:
    ours, its = socket.socketpair()
    with ours, its:
        command = [sys.executable, "-c", _WORKER.format(does=does), str(its.fileno())]
        worker = subprocess.Popen(command, pass_fds=[its.fileno()])
        try:
            its.close()
            assert ours.recv(5) == b"begun"
            # Data that it does not read is no end.
            ours.sendall(b"x")
            with pytest.raises(subprocess.TimeoutExpired):
                worker.wait(0.5)
            ours.close()
            assert worker.wait(20) == 1
        finally:
            worker.kill()
            worker.wait()


def test_a_process_without_such_a_connection_goes_on() -> None:
    code = "from flinkish_spark.worker.daemon import end_with_the_task\nend_with_the_task()\nprint('on')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "on\n"


#: A worker that still has something to write when Spark has closed the connection.
_LATE = textwrap.dedent(
    """
    import socket, sys
    import pyspark.worker
    from pyspark import daemon
    from flinkish_spark.worker.daemon import end_quietly

    def task(infile, outfile):
        infile.read()
        outfile.write(b"late")

    pyspark.worker.main = task
    end_quietly(daemon.worker)(socket.socket(fileno=int(sys.argv.pop())), True)
    """
)


def test_a_worker_whose_task_was_cancelled_prints_no_traceback() -> None:
    ours, its = socket.socketpair()
    with ours, its:
        worker = subprocess.Popen(
            [sys.executable, "-c", _LATE, str(its.fileno())],
            pass_fds=[its.fileno()],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1"},
        )
        its.close()
        ours.close()
        _, printed = worker.communicate(timeout=60)
    assert (worker.returncode, printed) == (1, b"")
