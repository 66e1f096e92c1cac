"""Stores by URL, without a server of anybody's: memory, a disk, and one server that misbehaves."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flinkish_spark.core.errors import ConfigError, StoreError
from flinkish_spark.core.job_dir import is_written_once
from flinkish_spark.core.object_store import ObjectStore
from flinkish_spark.core.store import (
    CachedReads,
    CreateResult,
    LocalStore,
    ObjectMissing,
    UnknownOutcomeError,
    create_by_id,
)
from flinkish_spark.core.store_spec import StoreSpec
from tests.simulation.memory_store import MemoryStore
from tests.support.clocks import ManualClock
from tests.support.misbehaving_s3 import Answer, MisbehavingS3
from tests.support.store_contract import FileStoreContract, StoreContract

CREATED, EXISTS = CreateResult.CREATED, CreateResult.EXISTS
KEY = "owners/1.json"


class TestDisk(StoreContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> StoreSpec:
        return StoreSpec.parse(str(tmp_path / "job"))


class TestMemory(StoreContract, FileStoreContract):
    @pytest.fixture
    def spec(self) -> StoreSpec:
        return StoreSpec.parse(f"memory://test-{uuid.uuid4().hex}/jobs")


# -- a store that loses its answers ------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[MisbehavingS3]:
    with MisbehavingS3() as running:
        yield running


def impatient(server: MisbehavingS3) -> ObjectStore:
    """Return the store with a clock that does not wait."""
    opened = server.spec.open()
    assert isinstance(opened, ObjectStore)
    return ObjectStore(opened._bucket, opened._once, "job", "s3://bucket/job", clock=ManualClock())


SPECS = {"s3": lambda server: server.spec, "gs": lambda server: server.google_spec}
AMBIGUOUS = [answer for answer in Answer if answer not in (Answer.OBEYS, Answer.SAYS_403, Answer.SAYS_404)]


@pytest.mark.parametrize("scheme", SPECS)
@pytest.mark.parametrize("answer", AMBIGUOUS, ids=lambda one: one.name)
def test_whatever_is_answered_one_s_own_write_is_one_s_own(
    server: MisbehavingS3, answer: Answer, scheme: str
) -> None:
    server.creates.append(answer)
    store = SPECS[scheme](server).open()
    assert store.create_if_absent(KEY, b"mine") is CREATED
    assert store.read(KEY) == b"mine"
    # One try where it was stored, two where it was not.
    assert server.requests["create"] == 1 + (not answer.stores)


@pytest.mark.parametrize("scheme", SPECS)
@pytest.mark.parametrize("answer", AMBIGUOUS, ids=lambda one: one.name)
def test_whatever_is_answered_another_one_s_write_is_not(
    server: MisbehavingS3, answer: Answer, scheme: str
) -> None:
    spec = SPECS[scheme](server)
    assert spec.open().create_if_absent(KEY, b"same") is CREATED
    server.creates.append(answer)
    assert spec.open().create_if_absent(KEY, b"same") is EXISTS


def test_trouble_of_several_kinds_one_after_the_other(server: MisbehavingS3) -> None:
    server.creates += [Answer.SAYS_409, Answer.DROPS, Answer.SAYS_409, Answer.STORES_THEN_500]
    server.looks += [Answer.OBEYS, Answer.OBEYS, Answer.SAYS_500]
    assert server.spec.open().create_if_absent(KEY, b"mine") is CREATED


def test_a_conflict_that_does_not_end_is_given_up_as_unknown(server: MisbehavingS3) -> None:
    server.always_create = Answer.SAYS_409
    with pytest.raises(
        StoreError, match=r"not known whether owners/1.json was written.*nothing is there"
    ) as e:
        impatient(server).create_if_absent(KEY, b"mine")
    assert not e.value.ends_when_repeated
    assert server.requests["create"] > 10


def test_what_cannot_be_looked_at_is_unknown(server: MisbehavingS3) -> None:
    server.creates.append(Answer.STORES_THEN_DROPS)
    server.always_look = Answer.SAYS_403
    with pytest.raises(StoreError, match=r"not known whether owners/1.json was written") as e:
        impatient(server).create_if_absent(KEY, b"mine")
    assert e.value.ends_when_repeated and "check the credentials" in str(e.value)


def test_what_is_refused_behind_a_lost_answer_is_unknown(server: MisbehavingS3) -> None:
    server.creates.append(Answer.DROPS)
    server.always_create = Answer.SAYS_403
    with pytest.raises(StoreError, match=r"not known whether owners/1.json was written"):
        impatient(server).create_if_absent(KEY, b"mine")


@pytest.mark.parametrize(
    ("answer", "words"),
    [(Answer.SAYS_403, "check the credentials, and the rights to"), (Answer.SAYS_404, "make the bucket")],
)
def test_a_refusal_is_said_at_once(server: MisbehavingS3, answer: Answer, words: str) -> None:
    server.always_create = answer
    with pytest.raises(StoreError, match=rf"cannot create owners/1.json in s3://bucket/job\. .*{words}") as e:
        server.spec.open().create_if_absent(KEY, b"mine")
    assert e.value.ends_when_repeated and "Debug source" not in str(e.value)
    assert server.requests["create"] == 1


def test_a_store_that_forgets_ids_is_refused() -> None:
    with MisbehavingS3(keeps_metadata=False) as server:
        assert server.spec.open().create_if_absent(KEY, b"mine") is CREATED
        with pytest.raises(StoreError, match="It does not keep the metadata of objects"):
            server.spec.open().create_if_absent(KEY, b"mine")
        assert set(server.objects) == {f"/bucket/job/{KEY}"}


def test_an_object_of_nobody_s_is_another_one_s_and_ids_are_tried_out_once(server: MisbehavingS3) -> None:
    store = server.spec.open()
    store.put("a", b"")
    store.put("b", b"")
    assert [store.create_if_absent(key, b"") for key in "ab"] == [EXISTS, EXISTS]
    assert set(server.objects) == {"/bucket/job/a", "/bucket/job/b"}
    assert server.requests == {"create": 3, "look": 3}


def test_many_want_one_key_while_answers_are_lost(server: MisbehavingS3) -> None:
    server.creates += [Answer.STORES_THEN_DROPS, Answer.SAYS_500, Answer.SAYS_409, Answer.DROPS] * 3
    results: list[CreateResult] = []
    barrier = threading.Barrier(16)

    def create(n: int) -> None:
        store = server.spec.open()
        barrier.wait()
        results.append(store.create_if_absent(KEY, b"%d" % n))

    threads = [threading.Thread(target=create, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results.count(CREATED), results.count(EXISTS)) == (1, 15)


def test_a_forked_process_is_told_so_and_does_not_hang(server: MisbehavingS3) -> None:
    store = server.spec.open()
    store.put("a", b"1")

    def refused() -> None:
        for one in (store, server.spec.open()):
            with pytest.raises(StoreError, match="It was forked off process"):
                one.read("a")

    child = multiprocessing.get_context("fork").Process(target=refused)
    child.start()
    child.join(30)
    assert child.exitcode == 0


# -- what decides, alone -----------------------------------------------------------------------------


class Scripted:
    """A store that answers creates from a list, and shows ids from another one."""

    def __init__(self, answers: list[bool | Exception], found: list[str | Exception | None]) -> None:
        self.answers, self.found, self.ids = answers, found, set[str]()

    def put_new(self, key: str, data: bytes, write_id: str) -> bool:
        self.ids.add(write_id)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def write_id_at(self, key: str) -> str | None:
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


GONE, LOST = ObjectMissing("k"), UnknownOutcomeError("no answer")


@pytest.mark.parametrize(
    ("answers", "found", "result"),
    [
        ([True], [], CREATED),
        ([False], ["own"], CREATED),
        ([False], ["other"], EXISTS),
        ([False], [None], EXISTS),
        ([LOST], ["own"], CREATED),
        ([LOST], ["other"], EXISTS),
        ([LOST, True], [GONE], CREATED),
        ([False, True], [GONE], CREATED),
        ([LOST, False], [GONE, "own"], CREATED),
        ([LOST, False], [LOST, "own"], CREATED),
        ([LOST, False], [LOST, "other"], EXISTS),
        ([LOST, LOST, LOST, True], [GONE, LOST, GONE], CREATED),
    ],
)
def test_what_is_there_decides(
    answers: list[bool | Exception], found: list[str | Exception | None], result: CreateResult
) -> None:
    scripted = Scripted(answers, found)
    assert create_by_id(scripted, "k", b"", "own", ManualClock(), 60_000) is result
    assert (scripted.answers, scripted.found, scripted.ids) == ([], [], {"own"})


def test_no_try_begins_behind_the_limit() -> None:
    clock, scripted = ManualClock(), Scripted([LOST] * 99, [GONE] * 99)
    began_ms = clock.monotonic_ms()
    with pytest.raises(StoreError, match=r"it is not known whether k was written. No answer"):
        create_by_id(scripted, "k", b"", "own", clock, 10_000)
    assert 5_000 < clock.monotonic_ms() - began_ms <= 10_000


def test_a_link_of_one_s_own_is_no_lost_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NFS the answer to link(2) may be lost; the client asks again and finds what it has made."""
    real = os.link

    def link(source: Path, target: Path) -> None:
        real(source, target)
        raise FileExistsError(target)

    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "link", link)
    assert store.create_if_absent("a/1", b"mine") is CREATED
    assert store.create_if_absent("a/1", b"other") is EXISTS
    assert store.read("a/1") == b"mine"
    assert os.listdir(tmp_path / "a") == ["1"]


# -- reads that are kept -----------------------------------------------------------------------------

DECISION, RECEIPT, ORDER = "checkpoints/7/decision.json", "checkpoints/7/receipt.json", "orders/rewind.json"


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.during_read: Callable[[], None] = lambda: None

    def read(self, key: str) -> bytes:
        self.reads.append(key)
        data = super().read(key)
        self.during_read()
        return data


@pytest.fixture
def below() -> Counting:
    return Counting()


def test_what_is_written_once_is_read_once(below: Counting) -> None:
    store = CachedReads(below, is_written_once)
    below.put(DECISION, b"d")
    assert [store.read(DECISION) for _ in range(3)] == [b"d"] * 3
    assert store.create_if_absent(RECEIPT, b"r") is CREATED
    assert store.read(RECEIPT) == b"r"
    assert below.reads == [DECISION]


def test_only_keys_that_are_never_used_again_are_kept(below: Counting) -> None:
    kept = (DECISION, RECEIPT, "rewinds/3.json")
    others = (ORDER, "rewinding/3.json", "staged/0/1-1.1.json", "statistics.json", "restaged/7/1.json")
    assert [key for key in (*kept, *others) if is_written_once(key)] == list(kept)
    store = CachedReads(below, is_written_once)
    assert store.create_if_absent(ORDER, b"1") is CREATED
    below.put(ORDER, b"2")
    assert store.read(ORDER) == b"2"


def test_what_is_missing_or_of_others_is_asked_for_again(below: Counting) -> None:
    store = CachedReads(below, is_written_once)
    with pytest.raises(ObjectMissing):
        store.read(DECISION)
    below.put(DECISION, b"theirs")
    assert store.create_if_absent(DECISION, b"mine") is EXISTS
    assert store.read(DECISION) == b"theirs"


def test_what_is_deleted_is_gone_also_where_it_was_just_read(below: Counting) -> None:
    store = CachedReads(below, is_written_once)
    store.create_if_absent(DECISION, b"d")
    store.delete(DECISION)
    with pytest.raises(ObjectMissing):
        store.read(DECISION)
    below.put(DECISION, b"d")
    below.during_read = lambda: store.delete(DECISION)
    assert store.read(DECISION) == b"d"
    with pytest.raises(ObjectMissing):
        store.read(DECISION)


def test_no_more_is_kept_than_there_is_room_for(below: Counting) -> None:
    store = CachedReads(below, lambda key: True, most_bytes=10)
    for number in range(3):
        store.create_if_absent(f"a/{number}", b"xxxx")
    store.create_if_absent("a/large", b"x" * 11)
    assert [store.read(f"a/{name}") for name in (2, 1, 0, "large")]
    assert below.reads == ["a/0", "a/large"]


# -- URLs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("/var/jobs/", "/var/jobs"),
        ("/", "/"),
        ("/odd %20?#name", "/odd %20?#name"),
        ("file:///var/jobs", "/var/jobs"),
        ("file:/var/jobs/", "/var/jobs"),
        ("s3://bucket", "s3://bucket"),
        ("S3://bucket/a/b/", "s3://bucket/a/b"),
        ("gs://my_bucket.x/ü", "gs://my_bucket.x/ü"),
        ("az://container/x", "az://container/x"),
        ("abfss://c0@acc.dfs.core.windows.net/x/", "abfss://c0@acc.dfs.core.windows.net/x"),
        ("memory://tests/x", "memory://tests/x"),
    ],
)
def test_urls_of_stores(url: str, kept: str) -> None:
    spec = StoreSpec.parse(url)
    assert spec.url == kept
    assert spec == StoreSpec.parse(kept) == pickle.loads(pickle.dumps(spec)) == StoreSpec.from_text(kept)
    assert spec.to_child("a/b").url == f"{kept.rstrip('/')}/a/b"
    assert spec.is_local == kept.startswith("/")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("relative/path", "neither a URL nor an absolute path"),
        ("", "neither a URL nor an absolute path"),
        ("webhdfs://host/x", "There is no store for webhdfs: .*s3://bucket/folder.*memory://"),
        ("s3a://bucket/x", "write s3://"),
        ("s3:/bucket/x", "two slashes"),
        ("s3:///x", "no name of a bucket"),
        ("s3://bad bucket/x", "no name of a bucket"),
        ("s3://bucket/a//b", "a part that is empty"),
        ("s3://bucket/a/../b", "a part that is empty"),
        ("s3://bucket/a?versionId=1", "characters that stores and Spark read in different ways"),
        ("s3://bucket/a%20b", "characters that stores and Spark read in different ways"),
        ("abfss://container/x", "container@account"),
        ("abfss://c0@acc.blob.core.windows.net/x", "container@account"),
        ("file://host/x", "It names a host"),
        ("file:///a%20b", "write it as a plain path"),
    ],
)
def test_bad_urls_are_refused(url: str, words: str) -> None:
    words = words.replace(": .*", ":.*")
    with pytest.raises(ConfigError, match=words):
        StoreSpec.parse(url)


@pytest.mark.parametrize(
    "url", ["s3://AKIA:hush/hush@bucket/x", "s3://hush@bucket/x", "http://x/y?sig=hush", "gs://a:hush@b"]
)
def test_a_login_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StoreSpec.parse(url)
    assert "hush" not in f"{refused.value} {refused.value.facts}"


@pytest.mark.parametrize(
    "name",
    ["secret_access_key", "AWS_SESSION_TOKEN", "account_key", "sas_token", "client_secret", "bearer_token"],
)
def test_secrets_are_given_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"{name} of s3://bucket is a secret.*{name}=env:NAME") as refused:
        StoreSpec.parse("s3://bucket", {name: "hush"})
    assert "hush" not in str(refused.value)
    spec = StoreSpec.parse("s3://bucket", {name: "env:FLINKISH_SOME_SECRET"})
    monkeypatch.setenv("FLINKISH_SOME_SECRET", "hush-hush")
    assert "hush" not in f"{spec} {spec!r} {spec.to_text()} {pickle.dumps(spec)!r}"
    assert StoreSpec.from_text(spec.to_text()) == spec
    monkeypatch.delenv("FLINKISH_SOME_SECRET")
    with pytest.raises(ConfigError, match="variable FLINKISH_SOME_SECRET is not set"):
        spec.open()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("proxy_url", "http://me:hush@proxy", "is a secret"),
        ("bucket", "other", "contradicts s3://bucket"),
        ("region", 7, "is no text"),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StoreSpec.parse("s3://bucket", {name: value})


@pytest.mark.parametrize("cloud", ["core.windows.net", "core.chinacloudapi.cn", "fabric.microsoft.com"])
def test_an_account_of_azure_is_in_the_url(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLINKISH_SOME_SECRET", "bm90IGEga2V5")
    spec = StoreSpec.parse(f"abfss://ctr@acc.dfs.{cloud}/x", {"account_key": "env:FLINKISH_SOME_SECRET"})
    assert repr(spec.open()) == f"ObjectStore('abfss://ctr@acc.dfs.{cloud}/x')"


def test_options_that_are_no_secrets_are_taken_as_they_are() -> None:
    options = {"aws_sse_kms_key_id": "k", "access_key_id": "a", "container_authorization_token_file": "/x"}
    assert dict(StoreSpec.parse("s3://bucket", options).options) == options
    with pytest.raises(ConfigError, match="takes no options"):
        StoreSpec.parse("/var/jobs", {"region": "x"})


def test_an_unknown_option_is_said_when_it_is_opened() -> None:
    with pytest.raises(ConfigError, match="'nonsense' is not valid"):
        StoreSpec.parse("s3://bucket", {"nonsense": "1", "region": "x"}).open()


def test_a_secret_is_taken_out_of_what_others_say(
    server: MisbehavingS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It stands in the URL, which obstore's errors show.
    monkeypatch.setenv("FLINKISH_SOME_SECRET", dict(server.spec.options)["endpoint"])
    options = {**dict(server.spec.options), "endpoint": "env:FLINKISH_SOME_SECRET"}
    server.always_create = Answer.SAYS_403
    with pytest.raises(StoreError, match=r"PUT \*\*\*/bucket/job/x"):
        StoreSpec.parse("s3://bucket/job", options).open().create_if_absent("x", b"")


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert StoreSpec.parse("/var/jobs").open()
    with pytest.raises(ConfigError, match=r"pip install 'obstore>=0.12.1,<0.13'"):
        StoreSpec.parse("s3://bucket").open()


@pytest.mark.parametrize("key", ["a\\b", "a\nb", "a\x00"])
def test_keys_that_a_service_would_change_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="not a key of an object store"):
        StoreSpec.parse("memory://tests").open().put(key, b"")
