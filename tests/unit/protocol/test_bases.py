"""Which bases of key groups count, and which no state will ever name again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flinkish_spark.protocol.bases import LiveBases, check_base_name, find_superseded, merge_bases
from flinkish_spark.protocol.ids import BatchId


def base(group: int, batch: int, random: int = 0, place: str = "sums/sums") -> str:
    return f"{place}/{group}-{batch}-{random:016x}"


@pytest.mark.parametrize(
    "name",
    [
        "sums/3-17-00112233445566ff",
        "../sums/3-17-00112233445566ff",
        "sums/../3-17-00112233445566ff",
        "/sums/3-17-00112233445566ff",
        "sums/sums/3-17-00112233445566f",
        "sums/sums/3-17-00112233445566ff/",
        "sums/sums/3--00112233445566ff",
        "",
        7,
        None,
    ],
)
def test_a_name_that_is_none_is_refused_where_it_is_read(name: object) -> None:
    with pytest.raises(ValueError):
        check_base_name(name)  # type: ignore[arg-type]


def test_two_chains_and_two_operators_have_key_groups_of_their_own() -> None:
    before = [base(1, 4), base(1, 4, place="sums/other"), base(1, 4, place="others/sums")]
    behind = merge_bases(before, [base(1, 9)])
    assert behind == tuple(sorted([base(1, 9), *before[1:]]))


def test_what_two_attempts_wrote_counts_until_the_next() -> None:
    both = merge_bases([base(1, 4)], [base(1, 9, 1), base(1, 9, 2)])
    assert both == (base(1, 9, 1), base(1, 9, 2))
    assert merge_bases(both, [base(1, 12)]) == (base(1, 12),)


def test_word_that_was_lost_costs_no_state() -> None:
    """Micro-batch 5 wrote a base, and nobody was told; the state names it, and so it stays."""
    untold = base(1, 5)
    newest = LiveBases(BatchId(7), {base(1, 3)})
    assert find_superseded([untold, base(1, 2)], newest, [newest]) == {base(1, 2)}
    # Behind the next base it is needed by checkpoints of before alone.
    later = LiveBases(BatchId(9), {base(1, 8)})
    assert find_superseded([untold], later, [newest, later]) == frozenset()
    assert find_superseded([untold], later, [later]) == {untold}


def test_what_is_written_behind_the_newest_checkpoint_stays() -> None:
    newest = LiveBases(BatchId(7), {base(1, 6)})
    assert find_superseded([base(1, 8), base(1, 5)], newest, [newest]) == {base(1, 5)}
    # A log that began anew counts from 0, and may go on with names of the one before.
    anew = LiveBases(BatchId(2), {base(1, 500)})
    assert find_superseded([base(1, 3), base(1, 1)], anew, [anew]) == {base(1, 1)}


@given(st.data())
def test_a_checkpoint_that_is_kept_has_its_bases_whatever_happens(data: st.DataObject) -> None:
    """A job of two key groups, with lost word, repeated tasks, rewinds and checkpoints that are let go."""
    there: set[str] = set()
    #: Of each kept checkpoint: micro-batch, what the state names, what was told.
    kept: list[tuple[int, dict[int, str], tuple[str, ...]]] = []
    batch, state, told = 0, dict[int, str](), tuple[str, ...]()
    listed, newest = frozenset[str](), None
    for number in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["run", "run", "checkpoint", "rewind", "let go", "clean"]))
        if what == "run":
            batch, written = batch + 1, list[str]()
            for group in data.draw(st.sets(st.sampled_from([1, 2]))):
                for attempt in range(data.draw(st.integers(1, 2))):
                    state = {**state, group: base(group, batch, 100 * number + attempt)}
                    there.add(state[group])
                    written += [state[group]] if data.draw(st.integers(0, 9)) else []
            told = merge_bases(told, written)
        elif what == "checkpoint" and (not kept or kept[-1][0] < batch):
            kept.append((batch, dict(state), told))
            newest = LiveBases(BatchId(batch), set(told))
        elif what == "rewind" and kept:
            batch, state, told = data.draw(st.sampled_from(kept))
            kept = [one for one in kept if one[0] <= batch or data.draw(st.booleans())]
        elif what == "let go":
            kept = kept[-2:]
        elif what == "clean":
            counting = [LiveBases(BatchId(one), set(names)) for one, _, names in kept]
            if newest is not None:
                there -= find_superseded(listed, newest, counting)
            listed, newest = frozenset(there), None
        for _, names, _ in [*kept, (batch, state, told)]:
            assert set(names.values()) <= there
