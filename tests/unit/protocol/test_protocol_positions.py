"""The earliest of several positions of one source: where its readers all still have to go on from."""

from __future__ import annotations

from typing import Any

import pytest

from flinkish_spark.protocol.plan_layout import SPLITS, lowest

FILES = {SPLITS: [["a", 5], ["b", 2]], "listed": 3}


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([FILES, FILES], FILES),
        ([{"t": {"0": 5}}, {"t": {"0": 4, "1": 2}}], {"t": {"0": 4, "1": 2}}),
        # The split that the second one does not know is read from its beginning.
        ([FILES, {SPLITS: [["a", 3]], "listed": 3}], {SPLITS: [["a", 3]], "listed": 3}),
        # What they know besides counts where they agree.
        ([FILES, {SPLITS: [["b", 1], ["a", 9]], "listed": 4}], {SPLITS: [["a", 5], ["b", 1]]}),
        # Offsets that are no numbers have no order: equal ones stay, others are left out.
        (
            [{SPLITS: [["a", "x"], ["b", "y"]]}, {SPLITS: [["a", "x"], ["b", "z"]], "more": 1}],
            {SPLITS: [["a", "x"]]},
        ),
    ],
)
def test_the_earliest_of_several_positions(positions: list[Any], expected: Any) -> None:
    assert lowest(positions) == expected
