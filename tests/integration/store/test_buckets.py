"""Stores in buckets, on servers that speak as the clouds do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.object_store import ObjectStore
from flinkish_spark.core.store import ObjectMissing, Store
from flinkish_spark.core.store_spec import StoreSpec
from tests.support.buckets import SECRETS, BucketServer, LocalAzure, LocalGoogle
from tests.support.services import BUILD
from tests.support.store_contract import FileStoreContract, StoreContract


@pytest.fixture(scope="session")
def s3(service: Callable[[str], Any]) -> Any:
    return service("s3")


@pytest.fixture(scope="module")
def google() -> Iterator[BucketServer]:
    with LocalGoogle() as found:
        yield found


@pytest.fixture(scope="session")
def azure(service: Callable[[str], Any]) -> Any:
    why_not = LocalAzure.why_not(BUILD / "azurite")
    if why_not:
        pytest.skip(why_not)
    return service("azure")


class BucketContract(StoreContract, FileStoreContract):
    """What stores behind a network hold besides."""

    @pytest.fixture
    def server(self) -> BucketServer:
        raise NotImplementedError

    @pytest.fixture
    def spec(self, server: BucketServer) -> StoreSpec:
        return server.new_store()

    def test_another_process_reads_it(self, spec: StoreSpec, store: Store) -> None:
        store.put("x/1", b"there")
        assert self.read_elsewhere(spec, "x/1") == b"there"

    def test_more_children_than_one_answer_holds(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: store.put(f"many/{n:04}/x", b""), range(1_005)))
        assert store.list("many") == tuple(f"many/{n:04}" for n in range(1_005))

    def test_a_bucket_that_is_not_there_is_no_empty_store(self, server: BucketServer) -> None:
        store = server.missing_bucket().open()
        for ask in (store.read, store.list, store.delete):
            with pytest.raises(StoreError, match="make the bucket, or check its name"):
                ask("owners")
        for write in (store.put, store.create_if_absent):
            with pytest.raises(StoreError, match=r"cannot (write|create) owners in .*make the bucket"):
                write("owners", b"")

    def test_requests_are_counted(self, store: ObjectStore) -> None:
        store.create_if_absent("x/1", b"")
        store.create_if_absent("x/2", b"")
        assert store.requests == {"read": 0, "put": 0, "create": 2, "list": 0, "delete": 0, "copy": 0}
        store.create_if_absent("x/1", b"")
        store.put("x/3", b"")
        store.read("x/1")
        store.list("x")
        store.delete("x/1")
        assert store.requests == {"read": 2, "put": 1, "create": 3, "list": 1, "delete": 1, "copy": 0}

    def test_secrets_are_not_shown(self, spec: StoreSpec) -> None:
        shown = f"{spec!r} {spec} {spec.to_text()} {spec.open()!r}"
        assert not [name for name in SECRETS if os.environ[name] in shown]


class TestS3(BucketContract):
    @pytest.fixture
    def server(self, s3: BucketServer) -> BucketServer:
        return s3

    def test_folder_markers_are_hidden(self, s3: Any, spec: StoreSpec, store: Store) -> None:
        for key in ("ck/", "ck/commits/", "ck/empty/"):
            s3.put_raw(spec, key)
        store.put("ck/commits/0", b"v1")
        assert store.list("ck/commits") == ("ck/commits/0",)
        assert store.list("ck/empty") == ()
        # As an empty folder on a disk, it has a name.
        assert store.list("ck") == ("ck/commits", "ck/empty")
        with pytest.raises(ObjectMissing):
            store.read("ck/commits")


class TestGoogle(BucketContract):
    @pytest.fixture
    def server(self, google: BucketServer) -> BucketServer:
        return google


class TestAzure(BucketContract):
    @pytest.fixture
    def server(self, azure: BucketServer) -> BucketServer:
        return azure

    def test_a_wrong_key_is_refused_at_once_and_not_shown(
        self, spec: StoreSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wrong = "bm90IHRoZSBrZXkgb2YgdGhpcyBhY2NvdW50"
        monkeypatch.setenv("FLINKISH_TEST_AZURE_SECRET", wrong)
        with pytest.raises(StoreError, match="check the credentials") as refused:
            spec.open().create_if_absent("x", b"")
        assert refused.value.ends_when_repeated
        assert wrong not in str(refused.value)
