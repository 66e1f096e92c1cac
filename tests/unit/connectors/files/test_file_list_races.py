"""Several processes look at one folder, and an older owner goes on beside the new one: the list stays one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from flinkish_spark.connectors.files import source as file_source
from flinkish_spark.connectors.files.source import FileList, FoundFile
from flinkish_spark.core.errors import InputLostError
from flinkish_spark.core.store import CreateResult
from flinkish_spark.protocol.envelope import seal
from tests.simulation.memory_store import MemoryStore


class Place:
    """A store, and what is asked before each of its calls."""

    url = "memory"

    def __init__(self, store: MemoryStore, turn: Callable[[], None] = lambda: None) -> None:
        self._store, self._turn = store, turn

    def open(self) -> Any:
        return self

    def read(self, key: str) -> bytes:
        self._turn()
        return self._store.read(key)

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        self._turn()
        return self._store.create_if_absent(key, data)

    def list(self, prefix: str) -> tuple[str, ...]:
        self._turn()
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._turn()
        self._store.delete(key)


class World:
    """Files that come, and what place in the list each has for whoever was the first to say it."""

    def __init__(self) -> None:
        self.store, self.files, self._places = MemoryStore(), list[FoundFile](), dict[int, FoundFile]()

    def come(self) -> None:
        self.files.append(FoundFile(f"f{len(self.files):05d}", 1, len(self.files), None))

    def look(self, found: FileList) -> None:
        found.read()
        found.add([one for one in self.files if one.path not in found._known], False)
        found.fold(lambda: max(0, len(found) - 20), lambda path: True)
        self.check(found)

    def check(self, found: FileList) -> None:
        for at in range(found._dropped, len(found)):
            assert self._places.setdefault(at, found[at]) == found[at], at

    def check_fresh(self, least: int) -> None:
        fresh = FileList(Place(self.store)).read()
        self.check(fresh)
        assert len(fresh) >= least

    def end(self) -> None:
        """Whoever starts now finds all there is, each file once."""
        last = FileList(Place(self.store)).read()
        self.look(last)
        self.check_fresh(len(self.files))
        assert len(last) == len(self.files) == len({one.path for one in self._places.values()})


@pytest.mark.parametrize("parts", [3, 10])
@pytest.mark.parametrize("seed", range(40))
def test_looks_in_any_order_leave_one_list(monkeypatch: pytest.MonkeyPatch, parts: int, seed: int) -> None:
    monkeypatch.setattr(file_source, "_PARTS_PER_FOLD", parts)
    chance, world = random.Random(seed), World()
    lists = [FileList(Place(world.store)).read() for _ in range(3)]
    # The last one sleeps, and finds that the others have put together what it has not read.
    weights = [8, 8, chance.choice([0, 0.1, 1])]
    for _ in range(150):
        if chance.random() < 0.6:
            world.come()
        (found,) = chance.choices(lists, weights)
        world.look(found)
        world.check_fresh(len(found))
        if chance.random() < 0.02:
            lists[0] = FileList(Place(world.store)).read()
    world.look(lists[2])
    world.end()


def test_an_older_owner_beside_the_new_one_and_then_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "_PARTS_PER_FOLD", 10)
    world = World()
    old = new = FileList(Place(world.store)).read()
    for at in range(300):
        world.come()
        if at == 150:
            new = FileList(Place(world.store)).read()
        if at < 200:
            world.look(old)
            world.come()
        world.look(new)
        world.check_fresh(len(new))
    world.end()


class Turns:
    """Lets one thread run at a time, up to its next call of the store; chance says which is next."""

    def __init__(self, seed: int, count: int) -> None:
        self._chance, self._free = random.Random(seed), threading.Condition()
        self._alive, self._turn = set(range(count)), 0
        # The slower ones wait long between two calls, so what they have read is old.
        self._weights = [self._chance.choice([1, 10, 100]) for _ in range(count)]

    def of(self, own: int) -> Callable[[], None]:
        def wait() -> None:
            with self._free:
                self._next()
                assert self._free.wait_for(lambda: self._turn == own, 60)

        return wait

    def run(self, own: int, body: Callable[[], None], failed: list[BaseException]) -> None:
        try:
            with self._free:
                assert self._free.wait_for(lambda: self._turn == own, 60)
            body()
        except BaseException as error:
            failed.append(error)
        finally:
            with self._free:
                self._alive.discard(own)
                self._next()

    def _next(self) -> None:
        if alive := sorted(self._alive):
            (self._turn,) = self._chance.choices(alive, [self._weights[one] for one in alive])
        self._free.notify_all()


@pytest.mark.parametrize("seed", range(60))
def test_calls_of_the_store_in_any_order_leave_one_list(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(file_source, "_PARTS_PER_FOLD", 2)
    world, turns, failed = World(), Turns(seed, 3), list[BaseException]()

    def body(own: int) -> None:
        place, chance = Place(world.store, turns.of(own)), random.Random(seed * 3 + own)
        found = FileList(place)
        for _ in range(40):
            if chance.random() < 0.6:
                world.come()
            if chance.random() < 0.3:
                found = FileList(place)
            world.look(found)

    threads = [
        threading.Thread(target=turns.run, args=(own, lambda o=own: body(o), failed)) for own in range(3)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failed, failed
    world.end()


def test_a_list_that_two_owners_of_an_older_version_broke_is_refused() -> None:
    store = MemoryStore()
    for kind, at in (("files", 0), ("pages", 2)):
        body = {"files": [FoundFile(f"f{at}", 1, at, None).to_json()], "is_last": False}
        store.create_if_absent(f"{kind}/{at:012d}.json", seal("files", body))
    with pytest.raises(InputLostError, match="has a gap after 1 files"):
        FileList(Place(store)).read()
