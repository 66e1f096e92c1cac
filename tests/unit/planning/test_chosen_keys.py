"""Which keys a vectorised function means, where it says so: one true or false per key, and nothing else."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from flinkish_spark import ValueStateDescriptor, VectorizedProcessFunction
from flinkish_spark.core.errors import UserFunctionError
from flinkish_spark.testing import ProgramHarness

INPUT = "user LONG, amount LONG"
#: Four keys, one of which has two rows.
ROWS = [((user, 1), 5) for user in (0, 1, 2, 3, 0)]


class Chosen(VectorizedProcessFunction):
    """Does something for some of the keys."""

    def __init__(self, call: str, where: object) -> None:
        self.call, self.where = call, where

    def open(self, context):
        context.get_state(ValueStateDescriptor("seen", "LONG"))

    def process_batch(self, batch, ctx):
        seen = ctx.state("seen")
        if self.call == "remove":
            seen.put([np.ones(len(ctx.index), dtype=np.int64)])
            seen.remove(self.where)
        elif self.call == "put":
            seen.put([np.ones(len(ctx.index), dtype=np.int64)], self.where)
        elif self.call == "delete":
            ctx.register_event_time_timers(7)
            ctx.delete_event_time_timers(7, self.where)
        else:
            ctx.register_event_time_timers(7, self.where)
        return ()

    def on_timers(self, domain, ctx):
        return ()


def run(call: str, where: object) -> ProgramHarness:
    one = ProgramHarness.of(Chosen(call, where), INPUT, key="user", output="n LONG", max_parallelism=1)
    one.push_all(ROWS)
    return one


@pytest.mark.parametrize("call", ["register", "delete", "put", "remove"])
@pytest.mark.parametrize(
    "where",
    [
        np.array([0, 2]),
        np.array([1, 0, 1, 0]),
        np.array([True, False]),
        np.array([True, True, False, False, False]),
        np.array(True),
        pa.array([True, None, True, False]),
        np.array([True, False, True, np.nan], dtype=object),
    ],
    ids=["numbers of keys", "ones", "too few", "by row", "one for all", "null", "nan"],
)
def test_what_says_it_otherwise_is_refused(call, where) -> None:
    """It chose other keys: those whose numbers are the places of what is not 0."""
    # A state says which one it is.
    error, name = (UserFunctionError, "state 'seen': ") if call in ("put", "remove") else (ValueError, "")
    wanted = "the array that selects keys .* one true or false for each of the 4 keys"
    with pytest.raises(error, match=f"{name}{wanted}"):
        run(call, where)


@pytest.mark.parametrize(
    "where",
    [np.array([True, False, True, True]), [True, False, True, True], pa.array([True, False, True, True])],
    ids=["numpy", "list", "arrow"],
)
def test_one_true_or_false_per_key_chooses(where) -> None:
    assert run("register", where).timer_count() == 3
    assert run("delete", where).timer_count() == 1
    assert len(run("put", where).entries("seen")) == 3
    assert len(run("remove", where).entries("seen")) == 1
