"""One job under test, seen by its parent: its input, what readers see, and whether that is right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kafka import KafkaProducer

from demo.decisions import DecisionBook
from demo.orders import Order, Total, generate
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from tests.crash.sweep.life import Life
from tests.crash.sweep.looking import TopicLooker
from tests.crash.sweep.places import PARTITIONS, Place
from tests.crash.sweep.points import Call, Effect, Run, first_checkpoint, trace_from_json
from tests.crash.sweep.sinks import SINKS

#: How long a job may take to become right again, on a machine that is busy with other things.
_SETTLES_S = 300.0
_ASKS_AGAIN_S = 100.0
_ORDERS = 8
#: A job that ends of a fault may be started again; one that ends again and again is stuck.
_MOST_ENDS = 5
_MARKERS_S = 1.0
_STAGES_S = 2.0
_QUIET_S, _LOOKS = 0.4, 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong; all zero if nothing is.

    `stuck` is 1 for a job that did not become right in time; it then says what was there at the end.
    """

    lost: int = 0
    duplicated: int = 0
    partial: int = 0
    stuck: int = 0
    detail: str = ""

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.duplicated or self.partial or self.stuck)


class NeverRan(Exception):
    """There is nothing to sweep."""


class Subject:
    """Feeds one job and judges it; used by one thread."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place, self.sink = place, SINKS[place.sink]
        place.directory.mkdir(parents=True, exist_ok=True)
        with KafkaAdmin(KafkaConnection(place.broker)) as admin:
            for topic in (place.source_topic, place.output_topic):
                admin.create_topic(topic, PARTITIONS)
        self._orders: Iterator[Order] = generate(seed)
        self._fed: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        self._producer = KafkaProducer(bootstrap_servers=place.broker, linger_ms=5)
        self._looker = self.sink.looker(place)
        self._book = DecisionBook(place.job_dir)
        self._part = ""
        self.looks = 0
        self.notes: list[str] = []

    def close(self) -> None:
        self._producer.close(5)
        self._looker.close()

    # -- input ----------------------------------------------------------------------------------
    def feed(self, count: int = _ORDERS) -> None:
        """Send some orders; a user's are in one partition."""
        sent = []
        for order in islice(self._orders, count):
            partition = sum(order.key) % PARTITIONS
            sent.append(
                self._producer.send(
                    self.place.source_topic, key=order.key, value=order.value, partition=partition
                )
            )
            self._fed[partition].append(order.value)
        for future in sent:
            future.get(timeout=60)

    def _expected(self) -> Counter[Total]:
        return self.sink.expected(value for values in self._fed for value in values)

    def _feed_and_trigger(self, life: Life) -> None:
        """Send orders, and ask for a checkpoint when a micro-batch with them is staged."""
        self.feed()
        deadline = time.monotonic() + _STAGES_S
        while time.monotonic() < deadline and not self._has_staged():
            time.sleep(0.05)
        life.say(self.place.sink, "trigger")

    def _has_staged(self) -> bool:
        store = self.place.job_dir.open()
        return any(store.list(lineage) for lineage in store.list("staged"))

    # -- judging --------------------------------------------------------------------------------
    def watch(self) -> None:
        """Look whether readers see a part of a checkpoint, where they must not; what is found is kept.

        Brokers write the markers of a transaction one after the other, for a moment behind its end.
        """
        if not self.sink.shows_whole:
            return
        deadline = time.monotonic() + _MARKERS_S
        while True:
            self._looker.look()
            self.follow()
            part = self._part_of_a_checkpoint()
            self.looks += 1
            if not part or time.monotonic() > deadline:
                break
        self._part = self._part or part

    def _part_of_a_checkpoint(self) -> str:
        assert isinstance(self._looker, TopicLooker)
        seen = self._looker.by_batch
        for one in self._book.checkpoints.values():
            visible, wanted = sum(seen[batch] for batch in one.batches), one.rows_of("out") if one.rows else 0
            if visible not in (0, wanted):
                return f"{visible} of the {wanted} rows of checkpoint {one.checkpoint} are visible"
        return ""

    def too_early(self) -> Verdict:
        """Look for rows that are visible and that no decision covers, and for parts of checkpoints."""
        # This order matters: a decision read before the rows could be older than they are.
        weight = self.sink.weight(self._looker.look())
        decided = self._decided()
        if weight > decided:
            return Verdict(partial=1, detail=f"{weight} rows visible, {decided} decided")
        self.watch()
        return Verdict(partial=1, detail=self._part) if self._part else Verdict()

    def verdict(self) -> Verdict:
        """Compare all that is visible with all that was fed and decided; the job has settled."""
        seen, wanted = self._looker.look(), self._expected()
        missing, surplus = wanted - seen, seen - wanted
        decided, weight = self._decided(), self.sink.weight(seen)
        detail = [f"missing {row}" for row in list(missing)[:2]] + [
            f"surplus {row}" for row in list(surplus)[:2]
        ]
        if decided != weight:
            detail.append(f"{weight} rows visible, {decided} decided")
        return Verdict(missing.total(), surplus.total(), int(decided != weight), 0, "; ".join(detail))

    def follow(self) -> None:
        """Write down what is decided; a job deletes old decisions, so not too late."""
        self._book.refresh()

    def _decided(self) -> int:
        self.follow()
        return sum(one.rows_of("out") for one in self._book.checkpoints.values() if one.rows)

    def _is_right(self) -> bool:
        # A broker writes the markers of a transaction a moment after it has confirmed its end.
        deadline = time.monotonic() + _MARKERS_S
        while self._looker.look() != self._expected():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    # -- running --------------------------------------------------------------------------------
    def quieten(self, life: Life) -> None:
        """Wait until the job does nothing: what it does behind a receipt belongs to that checkpoint."""
        for _ in range(_LOOKS):
            life.begin(self.place.sink, None)
            time.sleep(_QUIET_S)
            if not any(call.effect is Effect.WRITE for call in self._calls(life)):
                return

    def _calls(self, life: Life) -> list[Call]:
        life.say(self.place.sink, "end")
        return trace_from_json(life.wait_for(self.place.sink, "trace", 60).facts["calls"])

    def recover(self, life: Life) -> Verdict:
        """Let a job that has just been started become right."""
        life.say(self.place.sink, "trigger")
        return self.settle(life)

    def warm_up(self, life: Life, checkpoints: int) -> None:
        """Take some checkpoints, so that there is something to clean away.

        Raises
        ------
        NeverRan
            The job does not work even without faults.
        """
        for _ in range(checkpoints):
            self._feed_and_trigger(life)
            verdict = self.settle(life)
            if not verdict.is_exact:
                raise NeverRan(f"{self.place.sink}: {verdict} {self.notes}")

    def settle(self, life: Life) -> Verdict:
        """Ask for checkpoints until everything that was fed is visible once; else say what is wrong.

        One has been asked for already.
        """
        deadline, asked, ends = time.monotonic() + _SETTLES_S, time.monotonic(), 0
        while time.monotonic() < deadline:
            if time.monotonic() - asked > _ASKS_AGAIN_S:
                life.say(self.place.sink, "trigger")
                asked = time.monotonic()
            event = life.next(self.place.sink, 0.1)
            self.follow()
            if event is None:
                continue
            match event.name:
                case "answer" if event.facts["kind"] == "COMPLETED":
                    if self._is_right():
                        return self.verdict()
                    asked = 0.0
                case "answer":
                    time.sleep(0.1)
                    asked = 0.0
                case "ended":
                    self._note(event.facts["text"])
                    ends += 1
                    if ends > _MOST_ENDS:
                        break
                    life.say(self.place.sink, "start")
                    asked = time.monotonic() - _ASKS_AGAIN_S + 1
                case "fired":
                    self._note("fired")
        found = self.verdict()
        return Verdict(stuck=1, detail=f"not right in time: {found.detail}; {'; '.join(self.notes)}")

    def until_reached(self, life: Life, run: Run, patience_s: float = 120.0) -> bool:
        """Run the job into a kill; return whether it came to the point, and stands there frozen."""
        sink = self.place.sink
        self.quieten(life)
        life.begin(sink, run)
        self._feed_and_trigger(life)
        deadline, tries = time.monotonic() + patience_s, 2
        while time.monotonic() < deadline:
            event = life.next(sink, 0.1)
            self.follow()
            if event is None:
                continue
            if event.name == "reached":
                return True
            if event.name == "ended":
                return False
            if event.name == "answer":
                tries -= 1
                if not tries:
                    return False
                self._feed_and_trigger(life)
        return False

    def under_fault(self, life: Life, run: Run) -> tuple[bool, Verdict]:
        """Let a fault happen and the job become right again; return whether it happened."""
        self.notes.clear()
        self.quieten(life)
        life.begin(self.place.sink, run)
        for _ in range(2):
            self._feed_and_trigger(life)
            verdict = self.settle(life)
            if "fired" in self.notes or not verdict.is_exact:
                break
        return "fired" in self.notes, verdict

    def trace(self, life: Life) -> list[Call]:
        """Return the calls of one checkpoint."""
        self.quieten(life)
        life.begin(self.place.sink, None)
        self._feed_and_trigger(life)
        self.settle(life)
        # What is done behind the answer: pins, and cleaning.
        time.sleep(1.5)
        return first_checkpoint(self._calls(life))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
