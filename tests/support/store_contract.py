"""What every store must hold, as tests: derive a class and give it the fixture `spec`."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult, ObjectMissing, Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch

CREATED, EXISTS = CreateResult.CREATED, CreateResult.EXISTS
RACERS = 16
ODD_KEYS = (
    "a b",
    "ü ö",
    "日本",
    "x%20y",
    "q?#",
    "~t*|+&=:;,!'()@$",
    "[{<>}]",
    '"',
    "trailing.",
    "é",
    "..x",
    "-",
)


class StoreContract:
    """Cases for one kind of store."""

    #: How often `RACERS` want one key.
    rounds = 20
    #: Names that must stay what they are.
    odd_keys = ODD_KEYS

    @pytest.fixture
    def spec(self) -> StoreSpec:
        raise NotImplementedError

    @pytest.fixture
    def store(self, spec: StoreSpec) -> Store:
        return spec.open()

    def test_what_is_missing_is_said_and_may_be_deleted(self, store: Store) -> None:
        with pytest.raises(ObjectMissing):
            store.read("none/1.json")
        assert store.list("none") == ()
        store.delete("none/1.json")
        store.put("some/1.json", b"1")
        store.delete("some/1.json")
        store.delete("some/1.json")
        with pytest.raises(ObjectMissing):
            store.read("some/1.json")
        assert store.list("some") == ()

    def test_a_put_replaces(self, store: Store) -> None:
        store.put("x/1", b"a")
        store.put("x/1", b"bc")
        assert store.read("x/1") == b"bc"
        assert store.create_if_absent("x/1", b"d") is EXISTS
        assert store.read("x/1") == b"bc"

    def test_a_key_is_created_once_and_again_when_it_was_deleted(self, store: Store) -> None:
        assert store.create_if_absent("orders/rewind.json", b"one") is CREATED
        # Also with the same bytes: it was not this call.
        assert store.create_if_absent("orders/rewind.json", b"one") is EXISTS
        assert store.create_if_absent("orders/rewind.json", b"two") is EXISTS
        assert store.read("orders/rewind.json") == b"one"
        store.delete("orders/rewind.json")
        assert store.create_if_absent("orders/rewind.json", b"three") is CREATED
        assert store.read("orders/rewind.json") == b"three"
        store.put("orders/rewind.json", b"four")
        assert store.read("orders/rewind.json") == b"four"

    def test_of_many_creators_exactly_one_wins(self, spec: StoreSpec) -> None:
        stores = [spec.open() for _ in range(RACERS)]
        with ThreadPoolExecutor(RACERS) as pool:
            for number in range(self.rounds):
                barrier, key = Barrier(RACERS), f"owners/{number}.json"

                def race(me: int, barrier: Barrier = barrier, key: str = key) -> CreateResult:
                    barrier.wait()
                    return stores[me].create_if_absent(key, b"%d" % me)

                results = list(pool.map(race, range(RACERS)))
                assert results.count(CREATED) == 1
                assert stores[0].read(key) == b"%d" % results.index(CREATED)
        assert len(stores[0].list("owners")) == self.rounds

    @pytest.mark.parametrize("size", [0, 1, 9 * 1024 * 1024 + 7])
    def test_bytes_come_back_as_they_went(self, store: Store, size: int) -> None:
        data = (bytes(range(256)) * (size // 256 + 1))[:size]
        assert store.create_if_absent("files/created", data) is CREATED
        store.put("files/put", data)
        assert store.read("files/created") == store.read("files/put") == data
        assert store.list("files") == ("files/created", "files/put")

    def test_odd_keys_stay_what_they_are(self, store: Store) -> None:
        for name in self.odd_keys:
            assert store.create_if_absent(f"odd/{name}", name.encode()) is CREATED, name
            assert store.create_if_absent(f"odd/{name}", b"") is EXISTS, name
            store.put(f"odd/{name} of a folder/1", b"")
        listed = store.list("odd")
        visible = [name for name in self.odd_keys if not name.startswith(".")]
        assert set(listed) == {f"odd/{name}{end}" for name in visible for end in ("", " of a folder")}
        read = [store.read(f"odd/{name}") for name in self.odd_keys]
        assert read == [name.encode() for name in self.odd_keys]

    def test_a_list_has_direct_children_sorted_and_folders_among_them(self, store: Store) -> None:
        for key in ("a/10", "a/9", "a/.hidden", "a/.folder/1", "a/f/deep/er", "a/f/1", "ab/1", "a.b/1", "b"):
            store.put(key, b"")
        assert store.list("a") == ("a/10", "a/9", "a/f")
        assert store.list("a/f") == ("a/f/1", "a/f/deep")
        assert store.list("a//f") == ("a/f/1", "a/f/deep")
        # A folder has no life of its own.
        store.delete("a/f/deep/er")
        assert store.list("a/f") == ("a/f/1",)

    @pytest.mark.parametrize("key", ["/etc/passwd", "../x", "a/../../b", "", ".."])
    def test_what_leads_out_of_it_is_no_key(self, store: Store, key: str) -> None:
        for ask in (store.read, store.list, store.delete):
            with pytest.raises(ValueError, match="not a store key"):
                ask(key)
        for write in (store.put, store.create_if_absent):
            with pytest.raises(ValueError, match="not a store key"):
                write(key, b"")

    def test_a_job_directory_lies_on_it(self, store: Store) -> None:
        job_dir = JobDir(store)
        job_dir.read_or_create_job({"job": "orders"})
        for number in (2, 10, 9):
            aborted = Decision(CheckpointId(number), Verdict.ABORT, OwnerEpoch(1), 0)
            assert job_dir.create_decision(aborted) is CREATED
            assert job_dir.create_decision(aborted) is EXISTS
        assert [int(c) for c in job_dir.list_checkpoint_ids()] == [2, 9, 10]
        assert job_dir.newest_commit() is None

    def test_a_part_of_it_is_a_store(self, spec: StoreSpec, store: Store) -> None:
        store.put("seeds/3/a", b"x")
        assert spec.to_child("seeds").to_child("3").open().read("a") == b"x"

    def read_elsewhere(self, spec: StoreSpec, key: str) -> bytes:
        """Return what another process reads that is given the specification only."""
        code = "import pickle, sys; spec, key = pickle.load(sys.stdin.buffer); "
        code += "sys.stdout.buffer.write(spec.open().read(key))"
        given = pickle.dumps((spec, key))
        return subprocess.run(
            [sys.executable, "-c", code], input=given, capture_output=True, check=True
        ).stdout


class FileStoreContract:
    """Cases for a store in which Spark, too, writes files: mixed into a :class:`StoreContract`."""

    def test_everything_below_a_folder_is_found_however_deep(self, spec: StoreSpec) -> None:
        store = spec.open_bucket()
        for name, size in (("a/b/c/1", 3), ("a/b/2", 0), ("a/.hidden", 5), ("ab/3", 1)):
            store.put(name, b"x" * size)
        assert store.sizes_below("a") == {"b/c/1": 3, "b/2": 0, ".hidden": 5}
        assert store.sizes_below("a/b/c") == {"1": 3} and store.sizes_below("none") == {}
        assert store.sizes_below("").keys() == {"a/b/c/1", "a/b/2", "a/.hidden", "ab/3"}

    def test_a_listing_has_more_than_one_page(self, spec: StoreSpec) -> None:
        store = spec.open_bucket()
        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(lambda n: store.put(f"many/{n}", b""), range(1_050)))
        assert len(store.sizes_below("many")) == 1_050
        store.delete_all([f"many/{n}" for n in range(1_050)])
        assert store.sizes_below("many") == {}

    def test_the_beginning_of_an_object_is_read_alone(self, spec: StoreSpec) -> None:
        store = spec.open_bucket()
        store.put("x/1", b"0123456789")
        assert store.read_start("x/1", 4) == b"0123" and store.read_start("x/1", 400) == b"0123456789"
        with pytest.raises(ObjectMissing):
            store.read_start("x/2", 4)

    def test_a_copy_replaces_and_needs_an_original(self, spec: StoreSpec) -> None:
        store = spec.open_bucket()
        store.put("x/1", b"one")
        store.put("y/1", b"another")
        store.copy("x/1", "y/1")
        assert store.read("y/1") == b"one" == store.read("x/1")
        with pytest.raises(ObjectMissing):
            store.copy("x/2", "y/2")
        # A create that meets a copy is told that somebody else has written it.
        assert store.create_if_absent("y/1", b"mine") is EXISTS

    def test_missing_ones_may_be_deleted_among_others(self, spec: StoreSpec) -> None:
        store = spec.open_bucket()
        store.put("x/1", b"")
        store.put("x/3", b"")
        store.delete_all(["x/1", "x/2", "x/3"])
        store.delete_all([])
        assert store.sizes_below("x") == {}
