"""Places on HDFS, and what is said without one."""

from __future__ import annotations

import os
import pickle
import sys

import pytest

from flinkish_spark.core import hdfs_store
from flinkish_spark.core.errors import ConfigError, StoreError
from flinkish_spark.core.hdfs_store import HdfsStore
from flinkish_spark.core.store_spec import StoreSpec


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("hdfs://nn:8020/jobs/orders/", "hdfs://nn:8020/jobs/orders"),
        ("HDFS://10.0.0.1:9000/x", "hdfs://10.0.0.1:9000/x"),
        ("hdfs://nameservice1/x", "hdfs://nameservice1/x"),
        ("hdfs://nn:8020", "hdfs://nn:8020"),
    ],
)
def test_a_place_on_hdfs_is_for_hadoop_what_it_is_for_us(url: str, kept: str) -> None:
    spec = StoreSpec.parse(url)
    assert spec.url == spec.hadoop_url == spec.to_text() == kept and not spec.is_local
    assert StoreSpec.from_text(spec.to_text()) == pickle.loads(pickle.dumps(spec)) == spec
    assert spec.to_child("a/b").url == f"{kept}/a/b"
    store = spec.open()
    assert isinstance(store, HdfsStore) and kept in repr(store)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("hdfs:///jobs", "no NameNode, or nameservice"),
        ("hdfs://nn:port/jobs", "no NameNode, or nameservice"),
        ("hdfs://user@nn:8020/jobs", "A login in a URL"),
        ("hdfs://nn:8020/jobs/a:b", "no colon"),
        ("hdfs://nn:8020/jobs/../x", "empty, . or .."),
        ("hdfs:/jobs", "followed by two slashes"),
        ("webhdfs://nn:9870/jobs", "There is no store for webhdfs:"),
    ],
)
def test_what_is_no_place_on_hdfs_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StoreSpec.parse(url)


def test_hadoops_own_files_hold_its_options() -> None:
    with pytest.raises(ConfigError, match="HADOOP_CONF_DIR"):
        StoreSpec.parse("hdfs://nn:8020/x", {"dfs.replication": "1"})


@pytest.mark.parametrize("key", ["a:b", "a\\b", "a\nb", "../x", "/x"])
def test_what_hdfs_takes_in_no_name_is_no_key(key: str) -> None:
    store = StoreSpec.parse("hdfs://nn:8020/x").open()
    for write in (store.put, store.create_if_absent):
        with pytest.raises(ValueError, match=r"not a (store )?key"):
            write(key, b"")


def test_whoever_lacks_the_package_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    monkeypatch.setattr(hdfs_store, "_CLIENTS", {})
    with pytest.raises(ConfigError, match=r"pip install 'hdfs-native>=0.14.7,<0.15'"):
        StoreSpec.parse("hdfs://nn:8020/x").open().read("a")


def test_a_nameservice_that_no_file_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hdfs_native")
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    with pytest.raises(ConfigError, match=r"names no NameNode.*8020 as a rule"):
        StoreSpec.parse("hdfs://nameservice7/x").open().read("a")


def test_a_process_that_was_forked_off_one_that_uses_hdfs_is_told_so() -> None:
    """The client's threads do not come along: it would wait for ever."""
    pytest.importorskip("hdfs_native")
    store = HdfsStore("hdfs://127.0.0.1:1", "x", patience_ms=0)
    with pytest.raises(StoreError, match="cannot read a"):
        store.read("a")
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store.read("a")
            os.write(writes, b"read")
        except StoreError as error:
            os.write(writes, str(error).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as said:
        assert b"forked off process" in said.read()
    os.waitpid(child, 0)
