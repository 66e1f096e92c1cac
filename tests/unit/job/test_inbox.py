"""Requests from outside: each is carried out at most once, whoever dies in between."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from flinkish_spark.checkpoint.answers import AnswerKind, CheckpointAnswer
from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult, LocalStore
from flinkish_spark.job.requests import (
    KEPT_MS,
    OLDEST_MS,
    Claim,
    Claimant,
    Inbox,
    OutsideRequest,
    Reply,
    ReplyKind,
    RequestFiles,
    RequestKind,
    StopMode,
    parse_file,
)
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import CheckpointId, OwnerEpoch
from tests.support.clocks import ManualClock

A, B, C = "a" * 32, "b" * 32, "c" * 32
DONE = CheckpointAnswer.make_completed(CheckpointId(3))
BY_OWNER_1 = Claim(Claimant.OWNER, OwnerEpoch(1))
BY_ASKER = Claim(Claimant.ASKER, OwnerEpoch(1))


class FlakyStore(LocalStore):
    """Fails where a test says so: before or after it has done what it was asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.refuses: set[str] = set()
        self.loses_reply: set[str] = set()
        self.calls: list[str] = []

    def _fail(self, verb: str) -> None:
        raise StoreError(f"cannot {verb}")

    def read(self, key: str) -> bytes:
        self.calls.append(f"read {key}")
        return super().read(key)

    def list(self, prefix: str) -> tuple[str, ...]:
        self.calls.append(f"list {prefix}")
        if "list" in self.refuses:
            self._fail("list")
        return super().list(prefix)

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        ending = key.split(".", 1)[1]
        if ending in self.refuses:
            self._fail("create")
        created = super().create_if_absent(key, data)
        if ending in self.loses_reply:
            self._fail("create")
        return created


@pytest.fixture
def store(tmp_path: Path) -> FlakyStore:
    return FlakyStore(tmp_path)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_000)


@pytest.fixture
def job_dir(store: FlakyStore) -> JobDir:
    return JobDir(store)


@pytest.fixture
def inbox(job_dir: JobDir, clock: ManualClock) -> Inbox:
    """The inbox of owner 2."""
    inbox = Inbox(job_dir, clock)
    inbox.took_over(OwnerEpoch(2))
    return inbox


def ask(job_dir: JobDir, name: str = A, owner: int = 2, at_ms: int = 1_000, **more) -> RequestFiles:
    kind = more.pop("kind", RequestKind.CHECKPOINT)
    files = RequestFiles(job_dir, name)
    files.create(OutsideRequest(name, kind, OwnerEpoch(owner), at_ms, **more))
    return files


def outcome(files: RequestFiles) -> ReplyKind | None:
    answer = files.answer()
    return None if answer is None else answer.kind


# -- values -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", RequestKind)
def test_a_request_is_read_as_it_was_written(kind: RequestKind) -> None:
    targets = {
        RequestKind.SAVEPOINT: "/a",
        RequestKind.STOP_WITH_SAVEPOINT: "/a",
        RequestKind.REWIND: "order-7",
    }
    request = OutsideRequest(A, kind, OwnerEpoch(2), 5, targets.get(kind, ""), StopMode.DRAIN)
    assert OutsideRequest.from_json(A, request.to_json()) == request


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (RequestKind.SAVEPOINT, ""),
        (RequestKind.SAVEPOINT, "relative/path"),
        (RequestKind.STOP_WITH_SAVEPOINT, "/with\0nothing"),
        (RequestKind.SAVEPOINT, "/" + "x" * 5_000),
        (RequestKind.REWIND, "../order"),
        (RequestKind.CHECKPOINT, "/a"),
        (RequestKind.CANCEL, "/a"),
    ],
)
def test_targets_that_make_no_sense_are_no_request(kind: RequestKind, target: str) -> None:
    with pytest.raises(ValueError, match=r"target|order id"):
        OutsideRequest(A, kind, OwnerEpoch(2), 5, target)


@pytest.mark.parametrize("name", ["", "../" + "a" * 29, "A" * 32, "a" * 31, "a" * 33])
def test_names_that_could_lead_elsewhere_are_no_request(name: str) -> None:
    with pytest.raises(ValueError, match="name of a request"):
        OutsideRequest(name, RequestKind.CHECKPOINT, OwnerEpoch(2), 5)


@pytest.mark.parametrize("kind", AnswerKind)
def test_every_answer_of_the_coordinator_has_a_stored_form(kind: AnswerKind) -> None:
    answer = CheckpointAnswer(kind, CheckpointId(3), CheckpointFailureReason.EXPIRED, "too slow")
    stored = Reply.of(answer)
    assert Reply.from_json(stored.to_json()) == stored
    assert stored.kind.value == kind.value


def test_only_files_of_requests_are_parsed() -> None:
    for file in ("notes.txt", A, f"{A}.json.tmp", f"{A}.other.json", f"{A[1:]}.json", f".{A}.json"):
        assert parse_file(file) is None


# -- taking and answering ---------------------------------------------------------------------------
def test_a_request_is_returned_once_and_answered(inbox: Inbox, job_dir: JobDir) -> None:
    files = ask(job_dir, kind=RequestKind.SAVEPOINT, target="/a")
    (request,) = inbox.take()
    assert (request.name, request.kind, request.target) == (A, RequestKind.SAVEPOINT, "/a")
    assert inbox.take() == ()
    inbox.answer(A, DONE)
    assert inbox.take() == ()
    assert files.answer() == Reply(ReplyKind.COMPLETED, CheckpointId(3))


def test_requests_come_in_the_order_in_which_they_were_asked(inbox: Inbox, job_dir: JobDir) -> None:
    for name, at_ms in ((A, 30), (B, 10), (C, 20)):
        ask(job_dir, name, at_ms=at_ms)
    assert [request.name for request in inbox.take()] == [B, C, A]


def test_the_first_answer_stays(inbox: Inbox, job_dir: JobDir) -> None:
    files = ask(job_dir)
    inbox.take()
    inbox.answer(A, DONE)
    inbox.answer(A, CheckpointAnswer.make_refused(CheckpointFailureReason.SHUT_DOWN))
    assert outcome(files) is ReplyKind.COMPLETED


def test_an_answer_may_come_from_another_thread_while_others_are_taken(inbox: Inbox, job_dir: JobDir) -> None:
    names = [f"{n:032x}" for n in range(50)]
    for name in names:
        ask(job_dir, name)
    taken = [request.name for request in inbox.take()]
    threads = [threading.Thread(target=inbox.answer, args=(name, DONE)) for name in taken]
    for thread in threads:
        thread.start()
        inbox.take()
    for thread in threads:
        thread.join()
    assert sorted(taken) == names
    assert all(outcome(RequestFiles(job_dir, name)) is ReplyKind.COMPLETED for name in names)


def test_an_empty_inbox_costs_one_listing(inbox: Inbox, store: FlakyStore) -> None:
    assert inbox.take() == ()
    assert store.calls == ["list requests"]


def test_a_request_that_is_being_carried_out_is_not_read_again(
    inbox: Inbox, job_dir: JobDir, store: FlakyStore
) -> None:
    ask(job_dir)
    inbox.take()
    store.calls.clear()
    inbox.take()
    assert store.calls == ["list requests"]


# -- owners -----------------------------------------------------------------------------------------
def test_nothing_is_taken_before_the_job_is_owned(job_dir: JobDir, clock: ManualClock) -> None:
    ask(job_dir)
    assert Inbox(job_dir, clock).take() == ()


def test_what_was_asked_of_an_earlier_owner_is_refused(inbox: Inbox, job_dir: JobDir) -> None:
    files = ask(job_dir, owner=1)
    assert inbox.take() == ()
    answer = files.answer()
    assert answer is not None and answer.kind is ReplyKind.REFUSED
    assert "owner 2 has the job now" in answer.text


def test_a_process_that_takes_over_again_keeps_what_was_asked_of_it_before(
    inbox: Inbox, job_dir: JobDir
) -> None:
    inbox.took_over(OwnerEpoch(3))
    ask(job_dir, owner=2)
    assert [request.name for request in inbox.take()] == [A]


def test_an_owner_leaves_alone_what_is_for_the_one_that_followed_it(inbox: Inbox, job_dir: JobDir) -> None:
    files = ask(job_dir, owner=3)
    assert inbox.take() == ()
    assert files.read_claim() is None and files.answer() is None


def test_an_owner_leaves_alone_what_the_one_that_followed_it_settles(inbox: Inbox, job_dir: JobDir) -> None:
    files = ask(job_dir)
    files.claim(Claim(Claimant.OWNER, OwnerEpoch(3)))
    assert inbox.take() == ()
    assert files.answer() is None


def test_a_crash_between_carrying_out_and_answering_is_answered_by_the_next_owner(
    inbox: Inbox, job_dir: JobDir
) -> None:
    files = ask(job_dir, owner=1)
    files.claim(BY_OWNER_1)
    assert inbox.take() == ()
    answer = files.answer()
    assert answer is not None and answer.kind is ReplyKind.UNKNOWN
    assert "owner 1 took it" in answer.text and "may or may not" in answer.text


def test_a_request_is_not_carried_out_twice_by_a_process_that_was_started_again(
    inbox: Inbox, job_dir: JobDir, clock: ManualClock
) -> None:
    """The first process took it and was killed; the second one has the same directory."""
    ask(job_dir)
    assert len(inbox.take()) == 1
    successor = Inbox(job_dir, clock)
    successor.took_over(OwnerEpoch(3))
    assert successor.take() == ()


# -- askers that give up ----------------------------------------------------------------------------
def test_what_was_taken_back_is_never_carried_out(inbox: Inbox, job_dir: JobDir) -> None:
    files = ask(job_dir)
    files.claim(BY_ASKER)
    assert inbox.take() == ()
    assert files.answer() is None


def test_one_side_gets_the_claim(job_dir: JobDir) -> None:
    files = ask(job_dir)
    assert files.claim(BY_OWNER_1) == BY_OWNER_1
    assert files.claim(BY_ASKER) == BY_OWNER_1


def test_a_request_that_was_taken_back_and_deleted_meanwhile_is_not_carried_out(
    inbox: Inbox, job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The asker claims and deletes all of it between the owner's look and the owner's claim."""
    files = ask(job_dir)
    claim = RequestFiles.claim

    def late(self: RequestFiles, mine: Claim) -> Claim:
        if mine.by is Claimant.OWNER:
            claim(files, BY_ASKER)
            files.delete()
        return claim(self, mine)

    monkeypatch.setattr(RequestFiles, "claim", late)
    assert inbox.take() == ()
    assert job_dir.store.list("requests") == ()


def test_a_request_that_is_gone_when_it_is_read_is_nothing(
    inbox: Inbox, job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(job_dir)
    monkeypatch.setattr(RequestFiles, "request", lambda self: None)
    assert inbox.take() == ()


def test_a_claim_that_is_deleted_under_the_other_side_is_made_again(
    job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ask(job_dir)
    files.claim(BY_ASKER)

    def gone(self: RequestFiles) -> None:
        self.delete_claim()

    monkeypatch.setattr(RequestFiles, "read_claim", gone)
    assert files.claim(BY_OWNER_1) == BY_OWNER_1


def test_requests_of_askers_that_are_gone_are_refused_when_they_are_old(
    inbox: Inbox, job_dir: JobDir, clock: ManualClock
) -> None:
    files = ask(job_dir, at_ms=0)
    clock.now_ms = OLDEST_MS + 1
    assert inbox.take() == ()
    assert outcome(files) is ReplyKind.REFUSED


# -- cleaning ---------------------------------------------------------------------------------------
def test_answers_that_nobody_comes_for_are_deleted(inbox: Inbox, job_dir: JobDir, clock: ManualClock) -> None:
    ask(job_dir)
    inbox.take()
    inbox.answer(A, DONE)
    clock.now_ms += KEPT_MS
    inbox.take()
    assert len(job_dir.store.list("requests")) == 3
    clock.now_ms += 1
    inbox.take()
    assert job_dir.store.list("requests") == ()


def test_what_takes_long_is_not_deleted_before_it_is_answered(
    inbox: Inbox, job_dir: JobDir, clock: ManualClock
) -> None:
    files = ask(job_dir)
    inbox.take()
    clock.now_ms += 10 * KEPT_MS
    assert inbox.take() == ()
    inbox.answer(A, DONE)
    inbox.take()
    assert outcome(files) is ReplyKind.COMPLETED


@pytest.mark.parametrize("left", ["claim", "answer", "answered by an earlier owner"])
def test_what_askers_and_owners_left_is_deleted_in_time(
    inbox: Inbox, job_dir: JobDir, clock: ManualClock, left: str
) -> None:
    files = RequestFiles(job_dir, A)
    if left == "claim":
        files.claim(BY_OWNER_1)
    else:
        files.give_answer(Reply(ReplyKind.COMPLETED))
    if left.startswith("answered"):
        ask(job_dir, owner=1)
    assert inbox.take() == ()
    clock.now_ms += KEPT_MS + 1
    inbox.take()
    assert job_dir.store.list("requests") == ()


def test_an_answer_that_comes_after_its_asker_has_gone_is_deleted_in_time(
    inbox: Inbox, job_dir: JobDir, clock: ManualClock
) -> None:
    files = ask(job_dir)
    inbox.take()
    files.delete()
    inbox.take()
    inbox.answer(A, DONE)
    inbox.take()
    clock.now_ms += KEPT_MS + 1
    inbox.take()
    assert job_dir.store.list("requests") == ()


# -- what is wrong never ends the job ---------------------------------------------------------------
def test_a_torn_request_is_refused(inbox: Inbox, job_dir: JobDir, tmp_path: Path) -> None:
    files = ask(job_dir)
    path = tmp_path / f"requests/{A}.json"
    path.write_bytes(path.read_bytes()[:-3])
    ask(job_dir, B)
    assert [request.name for request in inbox.take()] == [B]
    assert outcome(files) is ReplyKind.REFUSED


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"kind": "EXPLODE", "owner_epoch": 2, "asked_at_ms": 0, "target": "", "stop_mode": "SUSPEND"},
        {"kind": "CHECKPOINT", "owner_epoch": -1, "asked_at_ms": 0, "target": "", "stop_mode": "SUSPEND"},
        {"kind": "CHECKPOINT", "owner_epoch": 2, "asked_at_ms": "0", "target": "", "stop_mode": "SUSPEND"},
        {"kind": "CHECKPOINT", "owner_epoch": 2, "asked_at_ms": 0, "target": 5, "stop_mode": "SUSPEND"},
        {"kind": ["CHECKPOINT"], "owner_epoch": 2, "asked_at_ms": 0, "target": "", "stop_mode": "SUSPEND"},
    ],
)
def test_a_sealed_request_that_says_nonsense_is_refused(inbox: Inbox, job_dir: JobDir, body: dict) -> None:
    job_dir.store.create_if_absent(f"requests/{A}.json", seal("request", body))
    assert inbox.take() == ()
    assert outcome(RequestFiles(job_dir, A)) is ReplyKind.REFUSED


def test_a_request_of_a_newer_version_is_refused(inbox: Inbox, job_dir: JobDir, tmp_path: Path) -> None:
    files = ask(job_dir)
    path = tmp_path / f"requests/{A}.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 99'))
    assert inbox.take() == ()
    answer = files.answer()
    assert answer is not None and "newer version" in answer.text and "\n" not in answer.text


def test_a_torn_claim_is_answered_with_unknown(inbox: Inbox, job_dir: JobDir, tmp_path: Path) -> None:
    files = ask(job_dir)
    (tmp_path / f"requests/{A}.claim.json").write_bytes(b"torn")
    assert inbox.take() == ()
    assert outcome(files) is ReplyKind.UNKNOWN


def test_strange_files_are_left_alone_and_told_once(
    inbox: Inbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "requests").mkdir()
    (tmp_path / "requests/notes.txt").write_text("mine")
    assert inbox.take() == inbox.take() == ()
    assert caplog.text.count("notes.txt") == 1
    assert (tmp_path / "requests/notes.txt").exists()


def test_a_store_that_fails_is_asked_again(
    inbox: Inbox, job_dir: JobDir, store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    ask(job_dir)
    store.refuses = {"list"}
    assert inbox.take() == ()
    assert "later" in caplog.text
    store.refuses = set()
    assert [request.name for request in inbox.take()] == [A]


@pytest.mark.parametrize("fault", ["refuses", "loses_reply"])
def test_a_claim_that_the_store_did_not_answer_is_made_again(
    inbox: Inbox, job_dir: JobDir, store: FlakyStore, fault: str
) -> None:
    ask(job_dir)
    setattr(store, fault, {"claim.json"})
    assert inbox.take() == ()
    setattr(store, fault, set())
    assert [request.name for request in inbox.take()] == [A]
    assert inbox.take() == ()


def test_requests_that_were_claimed_before_the_store_failed_are_not_lost(
    inbox: Inbox, job_dir: JobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(job_dir, A)
    ask(job_dir, B)
    claim, calls = RequestFiles.claim, []

    def second_fails(self: RequestFiles, mine: Claim) -> Claim:
        calls.append(mine)
        if len(calls) == 2:
            raise StoreError("no room")
        return claim(self, mine)

    monkeypatch.setattr(RequestFiles, "claim", second_fails)
    assert [request.name for request in inbox.take()] == [A]
    assert [request.name for request in inbox.take()] == [B]


def test_an_answer_that_the_store_refuses_does_not_raise(
    inbox: Inbox, job_dir: JobDir, store: FlakyStore, caplog: pytest.LogCaptureFixture
) -> None:
    ask(job_dir)
    inbox.take()
    store.refuses = {"answer.json"}
    with caplog.at_level(logging.WARNING):
        inbox.answer(A, DONE)
    assert "is not written" in caplog.text
