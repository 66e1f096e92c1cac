"""The join of Nexmark's q20 finds each pair of a bid and its auction once, whichever comes first."""

from __future__ import annotations

import random

import pytest

from bench.nexmark.ours import JOINED_OUTPUT, Joined
from flinkish_spark.state.key_group import BasePolicy
from tests.support.effort import seeds
from tests.support.operator_harness import VectorizedHarness

_KEYS = 12


def _bid(auction: int, number: int) -> tuple[object, ...]:
    return auction, number, number * 10, "Google", f"url {number}", number, None, *[None] * 9


def _auction(auction: int) -> tuple[object, ...]:
    item = (f"item {auction}", "as new", 1, 2, 3, 4, 5, 10, None)
    return auction, *[None] * 6, *item


@pytest.mark.parametrize("policy", [None, BasePolicy(smallest_bytes=1, smallest_delta_rows=1)])
@pytest.mark.parametrize("seed", seeds(6))
def test_each_bid_is_joined_once_with_its_auction(seed: int, policy: BasePolicy | None) -> None:
    draw = random.Random(seed)
    harness = VectorizedHarness(Joined(), JOINED_OUTPUT, JOINED_OUTPUT, "auction", policy=policy)
    # Some auctions never come.
    bids = [_bid(draw.randrange(_KEYS), number) for number in range(60)]
    auctions = [_auction(key) for key in range(_KEYS - 3)]
    records = draw.sample(bids + auctions, len(bids) + len(auctions))
    while records:
        taken = records[: draw.randrange(1, 12)]
        del records[: len(taken)]
        harness.micro_batch([(record, 0) for record in taken])
    known = {auction[0]: auction[7:] for auction in auctions}
    wanted = [(*bid[:7], *known[bid[0]]) for bid in bids if bid[0] in known]
    assert sorted(map(tuple, harness.take().rows), key=str) == sorted(wanted, key=str)
