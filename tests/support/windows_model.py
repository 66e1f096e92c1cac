"""A model of windows of tests: recomputes all of them from all elements at each step, by brute force."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from flinkish_spark.core.elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tests.support.windows_support import INTERVAL_MS, KINDS, Combination, Step


@dataclass
class Item:
    """An element in one window, as the model sees it."""

    key: str
    number: int
    time_ms: int | None
    own: tuple[int, int]
    is_gone: bool = False
    is_counted: bool = False
    planned_ms: int | None = None


@dataclass
class Model:
    """Recomputes all windows from all elements at each step."""

    of: Combination
    items: list[Item] = field(default_factory=list)
    watermark_ms: int = MIN_WATERMARK_MS
    clock_ms: int = 0
    rows: list[tuple[Any, int]] = field(default_factory=list)
    late: list[Any] = field(default_factory=list)
    #: What each window has emitted last, if that may be taken back.
    fired: dict[tuple[str, tuple[int, int]], Any] = field(default_factory=dict)

    def step(self, step: Step) -> tuple[list[Any], list[Any]]:
        """Return sorted (row, time) and the late elements."""
        self.rows, self.late = [], []
        what, argument = step
        before = self.now_ms
        if what == "watermark":
            if argument <= self.watermark_ms:
                return [], []
            self.watermark_ms = argument
        elif what == "time":
            if argument < self.clock_ms:
                return [], []
            self.clock_ms = argument
        self._advance(before)
        for element in argument if what == "push" else ():
            self._add(*element)
        return sorted(self.rows, key=repr), self.late

    @property
    def now_ms(self) -> int:
        return self.watermark_ms if self.of.by_event_time else self.clock_ms

    def _groups(self) -> list[tuple[str, tuple[int, int], list[Item]]]:
        """Return key, window and items of all windows."""
        groups: list[tuple[str, tuple[int, int], list[Item]]] = []
        for item in sorted(self.items, key=lambda item: (item.key, item.own)):
            if groups and groups[-1][0] == item.key and self._is_one(groups[-1][1], item.own):
                key, window, items = groups.pop()
                groups.append((key, (window[0], max(window[1], item.own[1])), [*items, item]))
            else:
                groups.append((item.key, item.own, [item]))
        return groups

    def _is_one(self, window: tuple[int, int], other: tuple[int, int]) -> bool:
        return other[0] <= window[1] if self.of.merges else window == other

    @staticmethod
    def _last_ms(window: tuple[int, int]) -> int:
        return MAX_WATERMARK_MS if window[1] == MAX_WATERMARK_MS else window[1] - 1

    def _over_ms(self, window: tuple[int, int]) -> int:
        return self._last_ms(window) + (self.of.lateness_ms if self.of.by_event_time else 0)

    def _add(self, key: str, number: int, time_ms: int) -> None:
        windows = KINDS[self.of.kind][2]((key, number), time_ms if self.of.by_event_time else self.clock_ms)
        is_taken = False
        for own in windows:
            added = Item(key, number, time_ms, own)
            self.items.append(added)
            window, items = next((w, i) for _, w, i in self._groups() if any(one is added for one in i))
            self._withdraw_merged(key)
            if self.of.by_event_time and self.of.has_end and self._over_ms(window) <= self.now_ms:
                self.items.remove(added)
                continue
            is_taken = True
            self._on_element(key, number, window, items, time_ms)
        is_late = self.of.by_event_time and self.of.has_end
        if not is_taken and is_late and time_ms + self.of.lateness_ms <= self.now_ms:
            self.late.append((key, number))

    def _on_element(
        self, key: str, number: int, window: tuple[int, int], items: list[Item], time_ms: int
    ) -> None:
        if wanted := self._count_wanted():
            if len([item for item in items if not item.is_counted]) >= wanted:
                self._fire(key, window, items)
        elif self.of.trigger == "own":
            if number % 2 == 0:
                self._fire(key, window, items)
        elif self.of.trigger == "processing time" or self._never_fires():
            return
        elif self.of.by_event_time and self._last_ms(window) <= self.now_ms:
            self._fire(key, window, items)
        elif self.of.trigger == "continuous" and all(item.planned_ms is None for item in items):
            begin_ms = time_ms if self.of.by_event_time else self.clock_ms
            following = next(t for t in itertools.count(begin_ms + 1) if t % INTERVAL_MS == 0)
            items[0].planned_ms = min(following, self._last_ms(window))

    def _advance(self, before_ms: int) -> None:
        now_ms = self.now_ms
        for key, window, items in self._groups():
            last_ms = self._last_ms(window)
            if self.of.trigger == "continuous":
                self._fire_planned(key, window, items)
            if self._fires_at_its_end(items, before_ms, last_ms):
                self._fire(key, window, items)
            if last_ms <= now_ms:
                for item in items:
                    item.planned_ms = None
            if self._over_ms(window) <= now_ms and self.of.has_end:
                self.items = [one for one in self.items if not any(one is item for item in items)]
                self.fired.pop((key, window), None)

    def _fires_at_its_end(self, items: list[Item], before_ms: int, last_ms: int) -> bool:
        has_news = any(not item.is_counted for item in items)
        if self.of.trigger == "processing time":
            # A timer that is due already fires with whatever comes next.
            return has_news and last_ms <= self.clock_ms
        if self._count_wanted() or self._never_fires() or (self.of.trigger == "own" and not has_news):
            return False
        is_ending = before_ms < last_ms or not self.of.by_event_time
        return is_ending and last_ms <= self.now_ms

    def _count_wanted(self) -> int:
        """Return how many more elements fire a window; 0 if that does not depend on them."""
        if self.of.kind == "sliding count":
            return 2
        return 3 if self.of.trigger == "count" or self.of.kind == "count" else 0

    def _never_fires(self) -> bool:
        return self.of.kind == "global" and self.of.trigger == "default"

    def _withdraw_merged(self, key: str) -> None:
        """Take back what windows have emitted that are part of another one now."""
        there = {(key, window) for own, window, _ in self._groups() if own == key}
        for gone in [one for one in self.fired if one[0] == key and one not in there]:
            self.rows.append(((*self.fired.pop(gone), True), self._last_ms(gone[1])))

    def _fire_planned(self, key: str, window: tuple[int, int], items: list[Item]) -> None:
        last_ms = self._last_ms(window)
        if last_ms == self.now_ms == MAX_WATERMARK_MS:
            return
        planned = min((item.planned_ms for item in items if item.planned_ms is not None), default=None)
        if planned is None:
            return
        while planned <= self.now_ms and planned < last_ms:
            self._fire(key, window, items)
            planned = min(planned + INTERVAL_MS, last_ms)
        for item in items:
            item.planned_ms = None
        items[0].planned_ms = planned

    def _fire(self, key: str, window: tuple[int, int], items: list[Item]) -> None:
        there = self._evicted([item for item in items if not item.is_gone])
        if there:
            row = self.of.result(key, window, [item.number for item in there])
            self._emit(key, window, row)
        for item in items:
            item.is_counted = True
            item.is_gone |= self.of.is_discarding

    def _evicted(self, there: list[Item]) -> list[Item]:
        """Return the items that an evictor leaves."""
        if self.of.evicts and there:
            limit_ms = max(item.time_ms or 0 for item in there) - 6
            for item in there:
                item.is_gone = (item.time_ms or 0) <= limit_ms
        if self.of.kind == "sliding count":
            for item in there[:-3]:
                item.is_gone = True
        return [item for item in there if not item.is_gone]

    def _emit(self, key: str, window: tuple[int, int], row: Any) -> None:
        last_ms = self._last_ms(window)
        if not self.of.retracts:
            self.rows.append((row, last_ms))
            return
        if (key, window) in self.fired:
            self.rows.append(((*self.fired.pop((key, window)), True), last_ms))
        self.rows.append(((*row, False), last_ms))
        if not self.of.is_discarding:
            self.fired[key, window] = row
