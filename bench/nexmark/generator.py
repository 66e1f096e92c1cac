"""The events of Nexmark, by its published model: persons, auctions and bids as 1 : 3 : 46, from a seed.

Every field follows from the seed and the number of the event alone, so any part of the stream can be made by
itself, on any machine, with the same bytes. As in the published model half of the bids are for the hot
auction, three of four by the hot bidder, and three of four auctions by the hot seller; other bids spread
over the auctions and persons that are active. The stream begins behind so many persons and auctions as are
active, so that a job sees as many keys as `Model.active` says from its first record on.

Events are a millisecond apart, so no two have the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

#: The time of the first event, 2026-01-01.
FIRST_MS = 1_767_225_600_000
PERSONS, AUCTIONS, BIDS = 1, 3, 46
EPOCH = PERSONS + AUCTIONS + BIDS
PERSON, AUCTION, BID = range(3)
FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1_000, 10, 5
#: How far ids lead: a bid may be for an auction, or by a person, that comes a little later.
LEAD = 10
#: One in so many is not for the hot one; a hot one stays hot for a hundred of its kind.
HOT_AUCTIONS, HOT_BIDDERS, HOT_SELLERS, HOT_FOR = 2, 4, 4, 100

_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_CITIES = ("Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle")
_STATES = ("AZ", "CA", "CA", "ID", "OR", "OR", "WA", "WA")
_FIRST = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
_LAST = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
#: How many events are made at once.
_CHUNK = 100_000


@dataclass(frozen=True)
class Model:
    """What of the published model can be set.

    Parameters
    ----------
    events
        How many there are.
    active
        How many persons and how many auctions are active at a time: the published model has 1,000 and 100.
    seed
        Of everything that is drawn.
    """

    events: int
    active: int
    seed: int = 1

    @property
    def first_epoch(self) -> int:
        """How many epochs of fifty events have passed before the first one."""
        return self.active // PERSONS


@dataclass(frozen=True)
class Events:
    """Some of a stream's events, in their order: as JSON, and as tables of what is in it."""

    values: list[bytes]
    persons: pd.DataFrame
    auctions: pd.DataFrame
    bids: pd.DataFrame


def events(model: Model) -> Iterator[Events]:
    """Yield a stream part by part."""
    for begin in range(0, model.events, _CHUNK):
        numbers = np.arange(begin, min(begin + _CHUNK, model.events), dtype=np.int64)
        within = numbers % EPOCH
        kinds = np.where(within < PERSONS, PERSON, np.where(within < PERSONS + AUCTIONS, AUCTION, BID))
        persons, auctions, bids = (_Part(model, numbers[kinds == kind]) for kind in (PERSON, AUCTION, BID))
        frames = persons.persons(), auctions.auctions(), bids.bids()
        values = np.empty(len(numbers), dtype=object)
        for kind, name, frame in zip(
            (PERSON, AUCTION, BID), ("person", "auction", "bid"), frames, strict=True
        ):
            values[kinds == kind] = _json(kind, name, frame)
        yield Events(values.tolist(), *frames)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Return 64 bits for each number: splitmix64, so that the same comes out with any version of numpy."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _Part:
    """Events of one kind, by their numbers."""

    def __init__(self, model: Model, numbers: np.ndarray) -> None:
        self.model = model
        # Of each kind the newest one, counted from 0: that of this event, or the one before it.
        self.last_person = numbers // EPOCH + model.first_epoch
        self.last_auction = self.last_person * AUCTIONS + np.clip(numbers % EPOCH - PERSONS, -1, AUCTIONS - 1)
        self.times = numbers + FIRST_MS
        self._numbers = numbers.astype(np.uint64)

    def drawn(self, what: int, below: np.ndarray | int) -> np.ndarray:
        """Draw a whole number for each event, from 0; `what` tells draws apart."""
        with np.errstate(over="ignore"):
            salted = self._numbers + _mixed(np.array([self.model.seed * 1_000 + what], dtype=np.uint64))
            bits = _mixed(_mixed(salted))
        return (bits % np.asarray(below).astype(np.uint64)).astype(np.int64)

    def any_person(self, what: int) -> np.ndarray:
        """Draw one of the active persons."""
        known = self.last_person + 1
        active = np.minimum(known, self.model.active)
        return known - active + self.drawn(what, active + LEAD) + FIRST_ID

    def persons(self) -> pd.DataFrame:
        first, last = self.drawn(1, len(_FIRST)), self.drawn(2, len(_LAST))
        cities, cards = self.drawn(3, len(_CITIES)), self.drawn(4, 10**16)
        frame = {
            "id": self.last_person + FIRST_ID,
            "name": [f"{_FIRST[a]} {_LAST[b]}" for a, b in zip(first.tolist(), last.tolist(), strict=True)],
            "emailAddress": [
                f"{_FIRST[a].lower()}@{_LAST[b].lower()}.com"
                for a, b in zip(first.tolist(), last.tolist(), strict=True)
            ],
            "creditCard": [f"{card:016d}" for card in cards.tolist()],
            "city": [_CITIES[n] for n in cities.tolist()],
            "state": [_STATES[n] for n in cities.tolist()],
            "dateTime": self.times,
            "extra": self._text(5, 100),
        }
        return pd.DataFrame(frame)

    def auctions(self) -> pd.DataFrame:
        hot = self.last_person // HOT_FOR * HOT_FOR + FIRST_ID
        seller = np.where(self.drawn(10, HOT_SELLERS) > 0, hot, self.any_person(11))
        initial = self._prices(12)
        item = self.drawn(13, 1_000_000)
        frame = {
            "id": self.last_auction + FIRST_ID,
            "itemName": [f"item {n}" for n in item.tolist()],
            "description": self._text(14, 100),
            "initialBid": initial,
            "reserve": initial + self._prices(15),
            "dateTime": self.times,
            "expires": self.times + 1 + self.drawn(16, 20_000),
            "seller": seller,
            "category": FIRST_CATEGORY + self.drawn(17, CATEGORIES),
            "extra": self._text(18, 100),
        }
        return pd.DataFrame(frame)

    def bids(self) -> pd.DataFrame:
        oldest = np.maximum(self.last_auction - self.model.active, 0)
        cold = oldest + self.drawn(20, self.last_auction - oldest + 1 + LEAD)
        is_hot = self.drawn(21, HOT_AUCTIONS) > 0
        hot_bidder = self.last_person // HOT_FOR * HOT_FOR + 1 + FIRST_ID
        channel = self.drawn(22, 2 * len(_CHANNELS))
        named = [
            _CHANNELS[n] if n < len(_CHANNELS) else f"channel-{m}"
            for n, m in zip(channel.tolist(), self.drawn(23, 10_000).tolist(), strict=True)
        ]
        frame = {
            "auction": np.where(is_hot, self.last_auction // HOT_FOR * HOT_FOR, cold) + FIRST_ID,
            "bidder": np.where(self.drawn(24, HOT_BIDDERS) > 0, hot_bidder, self.any_person(25)),
            "price": self._prices(26),
            "channel": named,
            "url": [
                f"https://www.nexmark.com/{n:x}/item.htm?query=1" for n in self.drawn(27, 2**31).tolist()
            ],
            "dateTime": self.times,
            "extra": self._text(28, 30),
        }
        return pd.DataFrame(frame)

    def _prices(self, what: int) -> np.ndarray:
        """Draw prices in cents as the model does, ten to a power of 0 to 6: whole numbers all the way."""
        drawn = self.drawn(what, 6_000)
        return _PRICES[drawn]

    def _text(self, what: int, about: int) -> list[str]:
        """Draw texts of about so many letters."""
        drawn, lengths = self.drawn(what, 2**63), self.drawn(what + 100, about // 2)
        least = about - about // 4
        return [
            (f"{n:016x}" * (1 + (least + more) // 16))[: least + more]
            for n, more in zip(drawn.tolist(), lengths.tolist(), strict=True)
        ]


#: A price for each of 6,000 steps of the exponent.
_PRICES = np.array([round(10 ** (step / 1_000) * 100) for step in range(6_000)], dtype=np.int64)


def _json(kind: int, name: str, frame: pd.DataFrame) -> list[bytes]:
    """Return records as JSON; no text has a letter that JSON would escape."""
    parts = [
        f'"{column}":%d' if frame[column].dtype.kind == "i" else f'"{column}":"%s"'
        for column in frame.columns
    ]
    form = f'{{"event_type":{kind},"{name}":{{{",".join(parts)}}}}}'
    rows = zip(*(frame[column].tolist() for column in frame.columns), strict=True)
    return [(form % row).encode() for row in rows]
