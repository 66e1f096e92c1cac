"""Timelines: which marks are a job directory's own. Every expected value is written down by hand."""

from __future__ import annotations

import pytest

from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.timeline import NO_TIMELINE, Mark, Stretch, Timeline, find_token

A, B, C, OTHER = "a" * 16, "b" * 16, "c" * 16, "0123456789abcdef"
JOB = JobUuid("1" * 32)


def at(*stretches: tuple[int, str], accepted: int = 0) -> Timeline:
    """Return a timeline; its last stretch is the present owner's."""
    return Timeline(tuple(Stretch(CheckpointId(n), t) for n, t in stretches), CheckpointId(accepted))


def mark(checkpoint: int, token: str | None = None) -> Mark:
    return Mark(CheckpointId(checkpoint), token)


#: Owner A decided 3 to 5, B 6 to 9, C begins at 10; 1 and 2 have no token.
THREE = at((3, A), (6, B), (10, C))


@pytest.mark.parametrize(
    ("found", "upto", "why"),
    [
        # At the start of owner C nothing above 9 is known.
        (mark(9, B), 9, ""),
        (mark(5, A), 9, ""),
        (mark(2), 9, ""),
        (mark(9), 9, ""),
        (mark(10), 9, "knows no checkpoint above 9"),
        (mark(10, B), 9, "knows no checkpoint above 9"),
        (mark(21, OTHER), 9, "knows no checkpoint above 9"),
        # A copy that went on as owner A, while this one was taken over by B.
        (mark(7, A), 9, "after another process had taken the job over"),
        # A copy with a takeover of its own.
        (mark(7, OTHER), 9, "does not know the process"),
        # Whoever knows a token from before it was there.
        (mark(2, A), 9, "after another process had taken the job over"),
        # At the commit of 12 by owner C.
        (mark(12, C), 12, ""),
        (mark(11, C), 12, ""),
        (mark(12, OTHER), 12, "does not know the process"),
        (mark(13, C), 12, "knows no checkpoint above 12"),
        (mark(11, B), 12, "after another process had taken the job over"),
    ],
)
def test_a_mark_is_ours_if_its_token_is_that_of_its_id(found: Mark, upto: int, why: str) -> None:
    given = THREE.why_not_ours(found, CheckpointId(upto))
    assert why in given
    assert bool(why) == bool(given)


def test_what_was_given_up_is_committed_by_nobody_here() -> None:
    """Owner B gave 4 and 5 up; 5 was open, and whoever has the directory of before may commit it."""
    given_up = (CheckpointId(4), CheckpointId(5))
    timeline = Timeline((Stretch(CheckpointId(3), A), Stretch(CheckpointId(6), B, given_up)))
    for upto in (CheckpointId(5), CheckpointId(9)):
        for found in (mark(5, A), mark(4, A), mark(5)):
            why = f"checkpoint {found.checkpoint} was given up here, and committed elsewhere"
            assert timeline.why_not_ours(found, upto) == why
    assert timeline.why_not_ours(mark(3, A), CheckpointId(9)) == ""
    # Of a mark that nobody here can have left it is said so.
    assert "does not know the process" in timeline.why_not_ours(mark(5, OTHER), CheckpointId(9))
    accepted = Timeline(timeline.stretches, CheckpointId(5))
    assert accepted.why_not_ours(mark(5, A), CheckpointId(9)) == ""
    stored = timeline.stretches[1]
    assert Stretch.from_json(stored.to_json()) == stored
    assert "given_up" not in timeline.stretches[0].to_json()


def test_each_id_has_one_token() -> None:
    tokens = [THREE.mark_of(CheckpointId(n)).token for n in (1, 2, 3, 5, 6, 9, 10, 99)]
    assert tokens == [None, None, A, A, B, B, C, C]
    assert THREE.newest == CheckpointId(9)


def test_what_was_accepted_is_taken_as_it_is() -> None:
    accepted = at((3, A), (22, C), accepted=21)
    assert accepted.why_not_ours(mark(21, OTHER), CheckpointId(21)) == ""
    assert accepted.why_not_ours(mark(15, B), CheckpointId(22)) == ""
    assert "does not know" in accepted.why_not_ours(mark(22, OTHER), CheckpointId(22))


def test_without_a_directory_every_mark_is_ours() -> None:
    assert NO_TIMELINE.why_not_ours(mark(7, OTHER), CheckpointId(1)) == ""
    assert NO_TIMELINE.newest == CheckpointId(0)
    assert NO_TIMELINE.mark_of(CheckpointId(7)) == mark(7)


def test_a_mark_is_one_line() -> None:
    text = f"flinkish {JOB} 7 {OTHER}"
    assert mark(7, OTHER).to_text(JOB) == text
    assert Mark.parse(text, JOB) == mark(7, OTHER)
    assert Mark.parse(f"flinkish {JOB} 7", JOB) == mark(7)
    assert mark(7).to_text(JOB) == f"flinkish {JOB} 7"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "flinkish",
        f"flinkish {JOB}",
        f"flinkish {JOB} -7",
        f"flinkish {JOB} x",
        f"other {JOB} 7",
        f"flinkish {JOB} 7 {OTHER} more",
        "flinkish " + "2" * 32 + " 7",
    ],
)
def test_what_is_no_mark_of_the_job_is_none(text: str) -> None:
    assert Mark.parse(text, JOB) is None


def test_a_token_is_sixteen_digits() -> None:
    assert find_token(["x", OTHER, A]) == OTHER
    assert find_token(["0badcafe", "A" * 16]) is None
    for token in ("", "a" * 15, "A" * 16, 7):
        with pytest.raises(ValueError, match="16 lower-case hex digits"):
            Stretch(CheckpointId(1), token)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="first checkpoint of all is 1"):
        Stretch(CheckpointId(0), A)
    stretch = Stretch(CheckpointId(4), B)
    assert stretch.to_json() == {"first": 4, "token": B}
    assert Stretch.from_json(stretch.to_json()) == stretch


def test_a_mark_may_say_whose_it_is() -> None:
    assert Mark(CheckpointId(1), A, OwnerEpoch(3)).owner_epoch == OwnerEpoch(3)
