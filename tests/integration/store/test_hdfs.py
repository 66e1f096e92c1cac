"""The store on HDFS, on a NameNode of Hadoop's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.hdfs_store import HdfsStore
from flinkish_spark.core.store import CreateResult, ObjectMissing, Store
from flinkish_spark.core.store_spec import StoreSpec
from tests.support.hdfs import LocalHdfs
from tests.support.local_server import HOST
from tests.support.misbehaving_hdfs import Wire
from tests.support.store_contract import ODD_KEYS, FileStoreContract, StoreContract

CREATED, EXISTS = CreateResult.CREATED, CreateResult.EXISTS


@pytest.fixture
def spec(hdfs: LocalHdfs) -> StoreSpec:
    return hdfs.new_store()


@pytest.fixture
def wire(hdfs: LocalHdfs) -> Iterator[Wire]:
    with Wire(hdfs.port) as found:
        yield found


@pytest.fixture
def store(spec: StoreSpec) -> Store:
    return spec.open()


@pytest.fixture
def wired(spec: StoreSpec, wire: Wire) -> HdfsStore:
    """The same folder as `store`, over the wire; a lost answer costs as long as one is waited for."""
    folder = spec.url.split("/", 3)[3]
    return HdfsStore(f"hdfs://{HOST}:{wire.port}", folder, patience_ms=240_000)


class TestHdfs(StoreContract, FileStoreContract):
    #: HDFS takes no colon in a name.
    odd_keys = tuple(name.replace(":", "") for name in ODD_KEYS)
    rounds = 10

    @pytest.fixture
    def spec(self, hdfs: LocalHdfs) -> StoreSpec:
        return hdfs.new_store()

    def test_another_process_reads_it(self, spec: StoreSpec, store: Store) -> None:
        store.put("x/1", b"there")
        assert self.read_elsewhere(spec, "x/1") == b"there"

    def test_requests_are_counted(self, store: HdfsStore) -> None:
        store.create_if_absent("x/1", b"")
        store.put("x/3", b"")
        store.read("x/1")
        store.list("x")
        store.delete("x/1")
        assert store.requests == {"read": 1, "put": 1, "create": 1, "list": 1, "delete": 1, "copy": 0}

    def test_folders_go_with_their_last_object(self, store: HdfsStore) -> None:
        store.put("a/b/c/1", b"1")
        store.put("a/2", b"2")
        store.delete_all(["a/b/c/1"])
        assert store.list("a") == ("a/2",)
        store.delete("a/2")
        assert store.list("a") == () and store.sizes_below("") == {}


@pytest.mark.parametrize("times", [1, 3])
def test_a_create_whose_answer_is_lost_knows_its_own_file(
    wire: Wire, wired: HdfsStore, store: HdfsStore, times: int
) -> None:
    """The client asks again, and is told that there is nothing to rename."""
    wire.lose_answers("rename2", times)
    assert wired.create_if_absent("owners/1.json", b"mine") is CREATED
    assert wire.lost >= 1
    assert store.sizes_below("") == {"owners/1.json": 4} and store.read("owners/1.json") == b"mine"
    assert wired.create_if_absent("owners/1.json", b"mine") is EXISTS


def test_of_two_whose_answers_are_lost_one_has_it(wire: Wire, wired: HdfsStore, store: HdfsStore) -> None:
    for number in range(10):
        wire.lose_answers("rename2", 2)
        key, results = f"owners/{number}.json", {}

        def race(name: str, which: HdfsStore, key: str = key, results: dict[str, Any] = results) -> None:
            results[name] = which.create_if_absent(key, name.encode())

        threads = [threading.Thread(target=race, args=pair) for pair in (("wired", wired), ("direct", store))]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        (winner,) = [name for name, result in results.items() if result is CREATED]
        assert store.read(key) == winner.encode()
    assert all(not name.rpartition("/")[2].startswith(".") for name in store.sizes_below("")), "no leftovers"


# Each lost answer is waited for; with less time for it, a client that is busy with its own tries never ends.
@pytest.mark.nightly(by_day="tests/integration/store/test_hdfs.py")
def test_a_put_whose_answer_is_lost_is_done_once(wire: Wire, wired: HdfsStore, store: HdfsStore) -> None:
    wired.put("beat", b"1")
    for call in ("rename2", "create", "addBlock", "complete"):
        wire.lose_answers(call, 1)
        wired.put("beat", call.encode())
        assert store.read("beat") == call.encode()
    assert wire.lost == 4
    wire.lose_answers("delete", 1)
    wired.delete("beat")
    with pytest.raises(ObjectMissing):
        store.read("beat")


def test_a_namenode_that_says_nothing_is_given_up(spec: StoreSpec, wire: Wire, wired: HdfsStore) -> None:
    wired.put("beat", b"1")
    hurried = HdfsStore(
        f"hdfs://{HOST}:{wire.port}", spec.url.split("/", 3)[3], patience_ms=1_500, answer_ms=500
    )
    with wire.dead():
        with pytest.raises(StoreError, match=r"No answer within 0.5 s.*can be reached"):
            hurried.read("beat")
        with pytest.raises(StoreError, match="it is not known whether other was written"):
            hurried.create_if_absent("other", b"2")
    assert wired.read("beat") == b"1"


def test_what_is_replaced_all_the_time_is_read_whole(store: HdfsStore) -> None:
    """A reader may have been told of blocks that are gone by now."""
    store.put("beat", b"0" * 1_000)
    stop = threading.Event()

    def beat() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            store.put("beat", b"%d" % (count % 10) * 1_000)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        for _ in range(200):
            found = store.read("beat")
            assert len(found) == 1_000 and len(set(found)) == 1
    finally:
        stop.set()
        thread.join()


def test_what_stays_is_listed_while_folders_beside_it_come_and_go(store: HdfsStore) -> None:
    store.put("a/z/stays", b"1")
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            for number in range(10):
                store.create_if_absent(f"a/{number}/b/c", b"")
            store.delete_all([f"a/{number}/b/c" for number in range(10)])

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert all(store.sizes_below("a").get("z/stays") == 1 for _ in range(200))
    finally:
        stop.set()
        thread.join()
    assert store.sizes_below("a") == {"z/stays": 1}


def test_a_nameservice_is_asked_by_all_its_namenodes(
    spec: StoreSpec, hdfs: LocalHdfs, tmp_path: Path
) -> None:
    """As HADOOP_CONF_DIR has them; the first one is down."""
    conf = {
        "dfs.nameservices": "cluster",
        "dfs.ha.namenodes.cluster": "one,two",
        "dfs.namenode.rpc-address.cluster.one": f"{HOST}:1",
        "dfs.namenode.rpc-address.cluster.two": f"{HOST}:{hdfs.port}",
    }
    properties = [
        f"<property><name>{name}</name><value>{value}</value></property>" for name, value in conf.items()
    ]
    (tmp_path / "hdfs-site.xml").write_text(f"<configuration>{''.join(properties)}</configuration>")
    code = "import sys; from flinkish_spark.core.store_spec import StoreSpec\n"
    code += "store = StoreSpec.parse(sys.argv[1]).open(); print(store.create_if_absent('x/1', b'there'))"
    url = f"hdfs://cluster/{spec.url.split('/', 3)[3]}"
    environment = {**os.environ, "HADOOP_CONF_DIR": str(tmp_path)}
    asked = subprocess.run(
        [sys.executable, "-c", code, url], env=environment, capture_output=True, text=True, check=False
    )
    assert asked.stdout == "CreateResult.CREATED\n", asked.stderr
    assert spec.open().read("x/1") == b"there"


def test_who_may_not_write_is_told_whom_hdfs_takes_him_for(spec: StoreSpec) -> None:
    code = "import sys; from flinkish_spark.core.store_spec import StoreSpec\n"
    code += "StoreSpec.parse(sys.argv[1]).open().put('x/1', b'')"
    environment = {**os.environ, "HADOOP_USER_NAME": "nobody-knows-him"}
    asked = subprocess.run(
        [sys.executable, "-c", code, spec.url], env=environment, capture_output=True, text=True, check=False
    )
    assert "StoreError" in asked.stderr and "user=nobody-knows-him" in asked.stderr
    assert "HADOOP_USER_NAME" in asked.stderr and "\tat org" not in asked.stderr
