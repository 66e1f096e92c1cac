"""Python processes of Spark, forked off one that has imported what they need.

Spark starts an interpreter for each Python source of each query, and a daemon for each kind of question to a
Python source; each imports pandas, pyarrow, PySpark and this package for more than a second of CPU. In tests
``PYSPARK_PYTHON`` is :func:`interpreter`: a program that has a process forked instead, hands it its own
standard streams, arguments and environment, passes signals on to it, and ends when and as it ends.
Where nobody listens it is the real interpreter. Crash tests, which look for a driver's children, go without.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

#: What the processes import, beside what the product's daemon has imported for its workers.
PRELOADED = (
    "psycopg",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.write_into_data_source",
    "pytest",
    "tests.support.jobs",
    "tests.support.savepoint_support",
)
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
asker = socket.socket(socket.AF_UNIX)
try:
    asker.connect({address!r})
    if sys.argv[1:2] != ["-m"]:
        raise OSError("not a module")
except OSError:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
asked = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(asker, [len(asked).to_bytes(8, "big")], [0, 1, 2])
asker.sendall(asked)
nothing = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(nothing, stream)
answers = asker.makefile()
pid = int(answers.readline())
def hand_on(number, _):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
signal.signal(signal.SIGTERM, hand_on)
signal.signal(signal.SIGINT, hand_on)
code = int(answers.readline() or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def interpreter(folder: Path) -> Iterator[str]:
    """Run a fork server, and give the path of the program that asks it."""
    address, program = folder / "forks", folder / "python"
    program.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o700)
    command = [sys.executable, "-m", "tests.support.fork_server", str(address)]
    # It ends when nobody holds the other end of its input any more, however that came.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline(), "the fork server did not start"
        yield str(program)
        server.kill()


class _Server:
    """Forks a process for each connection, and says how it ended."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._asking: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._ended, wake_up = os.pipe()
        os.set_blocking(wake_up, False)
        signal.set_wakeup_fd(wake_up)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for source in (self._listener, self._ended, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._fork(self._listener.accept()[0])
                elif key.fileobj is sys.stdin:
                    return
                elif key.fileobj == self._ended:
                    os.read(self._ended, 4096)
                    self._tell()
                else:
                    self._kill(key.fileobj)

    def _fork(self, asker: socket.socket) -> None:
        begin, streams, _, _ = socket.recv_fds(asker, 8, 3)
        length, asked = int.from_bytes(begin, "big"), b""
        while len(asked) < length:
            asked += asker.recv(length - len(asked))
        pid = os.fork()
        if not pid:
            self._become(streams, *json.loads(asked))
        for stream in streams:
            os.close(stream)
        self._asking[pid] = asker
        self._selector.register(asker, selectors.EVENT_READ)
        asker.sendall(b"%d\n" % pid)

    def _tell(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                asker = self._asking.pop(pid)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(asker)
                with contextlib.suppress(OSError):
                    asker.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
                asker.close()

    def _kill(self, asker: object) -> None:
        # Whoever asked was killed: so is what it stood for, unless that has ended. SIGCHLD follows.
        for pid in [pid for pid, one in self._asking.items() if one is asker]:
            self._selector.unregister(self._asking[pid])
            os.kill(pid, signal.SIGKILL)

    def _become(self, streams: list[int], arguments: list[str], environment: dict[str, str], at: str) -> None:
        """Be the process that was asked for; does not return."""
        code: object = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            self._listener.close()
            for asker in self._asking.values():
                asker.close()
            for stream, number in zip(streams, range(3), strict=True):
                os.dup2(stream, number)
                os.close(stream)
            os.chdir(at)
            os.environ.clear()
            os.environ.update(environment)
            # Spark's own copies of PySpark are left out, as tests/quick_imports does.
            named = environment.get("PYTHONPATH", "").split(os.pathsep)
            more = [entry for entry in named if entry and not entry.endswith((".zip", ".jar"))]
            sys.path[:0] = [entry for entry in more if entry not in sys.path]
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for written in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    written.flush()
            os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))


def main() -> None:
    from flinkish_spark.worker import daemon

    warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    for name in PRELOADED:
        importlib.import_module(name)
    daemon.preload()
    server = _Server(sys.argv[1])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    server.serve()


if __name__ == "__main__":
    main()
