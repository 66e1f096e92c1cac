"""Lines over real sockets, into a real log: what was written down is there, in whatever order things die."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from flinkish_spark import UNLIMITED
from flinkish_spark.connectors import socket as socket_log
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.socket import (
    LineSplitter,
    SocketLogReader,
    SocketLogWriter,
    delete_before,
    find_segments,
)
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import SourceUnavailable, SplitStreamReader, read_piece
from flinkish_spark.core.errors import ConfigError, CorruptObjectError, InputLostError, StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from flinkish_spark.sources import SocketTextSource


class Server:
    """Sends the pieces of one connection after the other, then refuses."""

    def __init__(self, *connections: list[bytes | float]) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.accepted = 0
        self._thread = threading.Thread(target=self._serve, args=(connections,), daemon=True)
        self._thread.start()

    def _serve(self, connections) -> None:
        for pieces in connections:
            connection, _ = self._listening.accept()
            self.accepted += 1
            with connection:
                for piece in pieces:
                    if isinstance(piece, bytes):
                        connection.sendall(piece)
                    else:
                        time.sleep(piece)
        self._listening.close()


def source_of(server: Server, root, **settings) -> SocketTextSource:
    source = SocketTextSource("127.0.0.1", server.port, retry_delay_ms=20, **settings).bind("lines")
    source.preflight(None, JobDir(LocalStore(root)), "lines")
    return source


def values(reader, start, end):
    batches = [batch for piece in reader.partitions(start, end) for batch in read_piece(reader.source, piece)]
    return [line for batch in batches for line in batch.column(0).to_pylist()]


def read_to_the_end(source, root, position=None, timeout_s=20):
    """Run micro-batches until the source has ended; return its lines by micro-batch."""
    reader = SplitStreamReader(source, str(root / "control"))
    position = position or reader.initialOffset()
    found, deadline = [], time.monotonic() + timeout_s
    try:
        while not SplitPosition.from_json(position).is_ended:
            assert time.monotonic() < deadline, f"no end; so far {found}"
            end = reader.latestOffset(position, None)
            if end != position:
                found.append(values(reader, position, end))
            position = end
    finally:
        reader.stop()
    return found


def flat(found):
    return [line for lines in found for line in lines]


def test_lines_come_whole_however_they_are_cut(tmp_path) -> None:
    server = Server([b"one\r\ntw", 0.05, b"o\n\nthree\nb\xff", b"d\nlast without"])
    found = flat(read_to_the_end(source_of(server, tmp_path), tmp_path))
    assert found == ["one", "two", "", "three", "b\ufffdd", "last without"]
    # Whoever starts the job again gets the same, and disturbs no server.
    assert flat(read_to_the_end(source_of(server, tmp_path), tmp_path)) == found and server.accepted == 1


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_a_delimiter_may_be_any_text(pieces) -> None:
    data, lines = b"a||b|c||\r\n||||d", LineSplitter(b"||", 100)
    cut = [data[i : i + pieces] for i in range(0, len(data), pieces)]
    found = [line for piece in cut for line in lines.feed(piece)]
    assert [*found, *lines.finish()] == [b"a", b"b|c", b"\r\n", b"", b"d"] and lines.finish() == []


def test_it_connects_again_as_often_as_it_may(tmp_path) -> None:
    """A try that brings something counts from the beginning; half a line does not go on elsewhere."""
    server = Server([b"a\nhalf"], [], [b"b\n"], [], [])
    found = flat(read_to_the_end(source_of(server, tmp_path, max_retries=2), tmp_path))
    assert found == ["a", "half", "b"] and server.accepted == 5


def test_an_unreachable_peer_fails_the_query_behind_what_it_has_sent(tmp_path) -> None:
    server = Server([b"a\n"])
    reader = SplitStreamReader(source_of(server, tmp_path, max_retries=2), str(tmp_path))
    position, found = reader.initialOffset(), []
    with pytest.raises(SourceUnavailable, match="no more lines come from"):
        for _ in range(400):
            end = reader.latestOffset(position, None)
            found += values(reader, position, end)
            position = end
    assert found == ["a"]
    reader.stop()


def test_two_readers_of_one_job_share_one_connection_and_take_over_from_each_other(tmp_path) -> None:
    server = Server([b"a\nb\n", 30.0], [b"c\n"])
    source = source_of(server, tmp_path, max_retries=UNLIMITED)
    one, two = (SplitStreamReader(source._replace("_connection", None), str(tmp_path)) for _ in range(2))
    start = one.initialOffset()

    def until(reader, wanted):
        deadline = time.monotonic() + 20
        while True:
            end = reader.latestOffset(start, None)
            if values(reader, start, end) == wanted:
                return
            assert time.monotonic() < deadline, values(reader, start, end)

    until(one, ["a", "b"])
    until(two, ["a", "b"])
    assert server.accepted == 1
    one.stop()
    until(two, ["a", "b"])
    server._thread.join(0)
    two.stop()


def test_a_micro_batch_keeps_to_its_limit(tmp_path) -> None:
    server = Server([b"".join(b"%d\n" % n for n in range(10))])
    source = source_of(server, tmp_path, rate=RateLimit(records_per_batch=4))
    found = read_to_the_end(source, tmp_path)
    assert flat(found) == [str(n) for n in range(10)] and max(map(len, found)) == 4


def test_a_line_that_is_too_long_ends_the_job(tmp_path) -> None:
    server = Server([b"x" * 100])
    with pytest.raises(ConfigError, match="max_line_bytes is 10"):
        read_to_the_end(source_of(server, tmp_path, max_line_bytes=10), tmp_path)


@pytest.mark.parametrize("pieces", [[b"a\nb\n" + b"x" * 100 + b"\nc\n"], [b"a\n", b"b\n" + b"x" * 100]])
def test_the_lines_in_front_of_one_that_is_too_long_are_kept(tmp_path, pieces) -> None:
    source = source_of(Server(pieces), tmp_path, max_line_bytes=10)
    with pytest.raises(ConfigError, match="a line of 100 bytes"):
        read_to_the_end(source, tmp_path)
    source.close()
    assert lines_in(source.job_folder) == [b"a", b"b"]


# -- the log ------------------------------------------------------------------------------------------
def writer_of(folder) -> SocketLogWriter:
    writer = SocketLogWriter.take(folder)
    assert writer is not None
    return writer


def lines_in(folder, start=0):
    log = SocketLogReader(folder)
    return list(log.read(start, log.advance(start, None)))


@pytest.mark.parametrize("left", range(1, 30))
def test_what_a_dying_process_leaves_half_written_is_cut_off(tmp_path, left) -> None:
    writer = writer_of(tmp_path)
    writer.append([b"whole", b""])
    size = (tmp_path / f"{0:020d}.log").stat().st_size
    writer.append([b"half of it"])
    writer.append([b"x"])
    writer.close()
    with open(tmp_path / f"{0:020d}.log", "r+b") as file:
        file.truncate(size + left)
    assert lines_in(tmp_path)[:2] == [b"whole", b""]
    seen = lines_in(tmp_path)
    again = writer_of(tmp_path)
    again.append([b"next"])
    assert lines_in(tmp_path) == [*seen, b"next"]


def test_zeros_behind_a_power_cut_are_no_lines(tmp_path) -> None:
    writer = writer_of(tmp_path)
    writer.append([b"a"])
    writer.close()
    with open(tmp_path / f"{0:020d}.log", "ab") as file:
        file.write(bytes(64))
    assert lines_in(tmp_path) == [b"a"]


def test_a_log_without_a_segment_has_no_lines_yet(tmp_path) -> None:
    """Another process has the lock, and has written nothing."""
    assert SocketLogReader(tmp_path).advance(0, 10) == 0


def test_one_writer_at_a_time(tmp_path) -> None:
    writer = writer_of(tmp_path)
    assert SocketLogWriter.take(tmp_path) is None
    writer.close()
    writer_of(tmp_path).close()


def test_segments_follow_each_other_and_go_when_nobody_needs_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(socket_log, "SEGMENT_BYTES", 30)
    writer = writer_of(tmp_path)
    for n in range(20):
        writer.append([b"line %d" % n])
    log, wanted = SocketLogReader(tmp_path), [b"line %d" % n for n in range(20)]
    assert lines_in(tmp_path) == wanted and len(find_segments(tmp_path)) > 5
    places = [log.advance(0, n) for n in range(21)]
    assert [list(log.read(places[i], places[i + 3])) for i in range(17)] == [
        wanted[i : i + 3] for i in range(17)
    ]
    delete_before(tmp_path, places[10])
    assert lines_in(tmp_path, places[10]) == wanted[10:] and find_segments(tmp_path)[0] <= places[10]
    for gone in (lambda: log.advance(0, None), lambda: list(log.read(0, places[1]))):
        with pytest.raises(InputLostError, match="are gone"):
            gone()
    delete_before(tmp_path, places[20] + 100)
    writer.append([b"more"])
    assert lines_in(tmp_path, places[20]) == [b"more"]


def test_damage_in_the_middle_is_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(socket_log, "SEGMENT_BYTES", 30)
    writer = writer_of(tmp_path)
    for n in range(9):
        writer.append([b"line %d" % n])
    first = tmp_path / f"{find_segments(tmp_path)[0]:020d}.log"
    whole, end = first.read_bytes(), SocketLogReader(tmp_path).advance(0, None)
    first.write_bytes(whole[:-3] + b"???")
    log = SocketLogReader(tmp_path)
    for reading in (lambda: log.advance(0, None), lambda: list(log.read(0, end))):
        with pytest.raises(CorruptObjectError, match="cannot be read from position"):
            reading()


def test_a_disk_that_refuses_is_said(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be written"):
        SocketLogWriter.take(tmp_path / "file" / "log")


# -- in a job -----------------------------------------------------------------------------------------
def test_a_job_does_not_go_on_where_lines_are_gone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(socket_log, "SEGMENT_BYTES", 30)
    source, job_dir = source_of(Server(), tmp_path), JobDir(LocalStore(tmp_path))
    writer = writer_of(source.job_folder)
    for n in range(9):
        writer.append([b"line %d" % n])
    log = SocketLogReader(source.job_folder)
    middle, end = log.advance(0, 5), log.advance(0, None)

    def check(at):
        source.check_input(
            job_dir, "lines", LoggedOffsets((SplitPosition("lines", {"lines": at}).to_json(),))
        )

    check(0), check(middle), check(end)
    with pytest.raises(InputLostError):
        check(end + 1)
    source.on_release({"lines": middle})
    check(middle)
    with pytest.raises(InputLostError, match="lines of source 'lines' are gone: it stood at 0"):
        check(0)
    with pytest.raises(InputLostError, match="another uid"):
        source.check_start("lines", SplitPosition("lines", {"lines": 5}).to_json())


@pytest.mark.parametrize(
    "settings",
    [
        {"host": ""},
        {"host": None},
        {"port": 0},
        {"port": 70_000},
        {"port": "9999"},
        {"delimiter": ""},
        {"delimiter": "\ud800"},
        {"host": "\udfff"},
        {"delimiter": b"\n"},
        {"max_retries": -1},
        {"retry_delay_ms": -1},
        {"max_line_bytes": 0},
    ],
)
def test_what_cannot_be_is_refused(settings) -> None:
    with pytest.raises(ConfigError):
        SocketTextSource(**{"host": "h", "port": 1, **settings})
