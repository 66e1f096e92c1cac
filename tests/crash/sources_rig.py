"""What `tests/crash/sources_app.py` reads, fed while the job is killed, and what it left."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from flinkish_spark.connectors.socket import SocketLogReader
from flinkish_spark.connectors.split_positions import find_scan_positions, lowest_offsets
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import LocalStore
from tests.crash.sources_app import MADE_SPLITS, SOCKET_ORIGIN

_PAUSE_S, _LOOK_UP_S = 0.04, 0.2
_BOOKS, _FILE_LINES = 3, 4

#: Lines in their order, by origin.
Lines = dict[str, list[str]]


class Stopping(threading.Thread):
    """A thread that does something again and again until it is stopped; what it fails of comes out then."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.is_stopping = threading.Event()
        self.failure: BaseException | None = None

    def stop(self) -> None:
        """End it; raises what went wrong."""
        self.is_stopping.set()
        self.join(60)
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.failure = error

    def work(self) -> None:
        """Go on until `is_stopping`."""
        raise NotImplementedError


class LineServer(Stopping):
    """Sends numbered lines to whoever is connected. A line is sent once, whoever receives it."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__("line-server")
        self._chance = chance
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(_LOOK_UP_S)
        self.port: int = self._listening.getsockname()[1]
        self.sent: list[str] = []

    def work(self) -> None:
        with self._listening:
            while not self.is_stopping.is_set():
                try:
                    connection, _ = self._listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    try:
                        self._serve(connection)
                    except OSError:
                        continue  # Whoever was connected has been killed.

    def _serve(self, connection: socket.socket) -> None:
        while not self.is_stopping.wait(_PAUSE_S):
            line = f"{len(self.sent):07d} {'x' * self._chance.randrange(60)}."
            self.sent.append(line)
            # In two pieces, so that kills come between them, too.
            data = line.encode() + self._chance.choice((b"\n", b"\r\n"))
            cut = self._chance.randrange(len(data))
            connection.sendall(data[:cut])
            time.sleep(self._chance.choice((0, 0.01)))
            connection.sendall(data[cut:])


class Writer(Stopping):
    """Adds files to a folder, and lines to files of another one."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        super().__init__("writer")
        self._files, self._books, self._chance = directory / "files", directory / "books", chance
        for folder in (self._files, self._books):
            folder.mkdir(parents=True)
        self.files: Lines = {}
        self.books: Lines = {}

    def work(self) -> None:
        while not self.is_stopping.wait(_PAUSE_S):
            self._write_book()
            if self._chance.random() < 0.05:
                self._write_file()

    def _write_book(self) -> None:
        # More books as time goes by.
        known = 1 + sum(map(len, self.books.values())) // 300
        own = self.books.setdefault(f"book-{self._chance.randrange(min(known, _BOOKS))}", [])
        name = next(name for name, lines in self.books.items() if lines is own)
        line = f"{name} line {len(own)}"
        with (self._books / name).open("a") as file:
            file.write(line + "\n")
        own.append(line)

    def _write_file(self) -> None:
        name = f"{len(self.files):05d}.json"
        lines = [f"{name} line {number}" for number in range(_FILE_LINES)]
        text = "".join(json.dumps({"origin": name, "line": line}) + "\n" for line in lines)
        (self._files / f".{name}").write_text(text)
        (self._files / f".{name}").rename(self._files / name)
        self.files[name] = lines


class Left:
    """What a run left in the job's directory and its outputs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def out(self, uid: str) -> Lines:
        """Return the lines of a source that are visible without a hole in front, by origin."""
        found = {}
        for origin, own in self._places(uid).items():
            end = next(place for place in count() if place not in own)
            found[origin] = [own[place] for place in range(end)]
        return found

    def holes(self, uid: str) -> list[str]:
        """Return the origins of which a line is missing. A checkpoint's files appear one after the other."""
        return [origin for origin, own in self._places(uid).items() if max(own) >= len(own)]

    def _places(self, uid: str) -> dict[str, dict[int, str]]:
        places: dict[str, dict[int, str]] = {}
        for path in (self._directory / "out").glob("part-*"):
            for row in map(json.loads, path.read_text().splitlines()):
                if row["source"] != uid:
                    continue
                own = places.setdefault(row["origin"], {})
                assert row["place"] not in own, f"{uid}: {row} and {own[row['place']]!r}"
                own[row["place"]] = row["line"]
        return places

    def received(self) -> list[str]:
        """Return the lines that came over the socket, as the job's log has them."""
        log = SocketLogReader(self._directory / "job" / "sources" / "socket")
        end = log.advance(0, None)
        return [line.decode() for line in log.read(0, end)]

    def position(self, uid: str) -> dict[str, Any]:
        """Return how far the newest checkpoint has read a source, by split."""
        newest = JobDir(LocalStore(self._directory / "job")).newest_commit()
        assert newest is not None
        return lowest_offsets(find_scan_positions(LoggedOffsets.parse(newest.offsets_text), uid))

    def told(self, what: str) -> list[dict[str, int]]:
        """Return what the books were told of checkpoints, in order."""
        path = self._directory / "books" / "told"
        # A kill may have cut off the last line.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [offsets for kind, offsets in map(json.loads, lines) if kind == what]

    def check_told(self) -> None:
        """Raise if a book was told of more than is visible, or of less than before."""
        committed = self.told("committed")
        visible = {name: len(lines) for name, lines in self.out("books").items()}
        for before, after in pairwise(committed):
            assert all(after[name] >= at for name, at in before.items()), (before, after)
        for name, at in committed[-1].items() if committed else ():
            assert visible.get(name, 0) >= at, f"{name}: {at} committed, {visible} visible"
        for name, at in (self.told("released") or [{}])[-1].items():
            assert at <= committed[-1][name], f"{name}: {at} released"


def made(position: dict[str, int]) -> Lines:
    """Return what the generator's splits bring up to a position."""
    return {name: [str(n * MADE_SPLITS + int(name)) for n in range(at)] for name, at in position.items()}


def is_part_of(received: Sequence[str], sent: Sequence[str]) -> bool:
    """Return whether lines are of those sent, in order; one may be cut where a connection ended."""
    left = iter(sent)
    return all(any(one == line or one.startswith(line) for one in left) for line in received)


def socket_lines(received: Sequence[str]) -> Lines:
    """Return them as lines of their one origin."""
    return {SOCKET_ORIGIN: list(received)}
