"""Functions with two keyed inputs: shared state, shared timers, beside a model that recomputes."""

from __future__ import annotations

import random

import pytest

from flinkish_spark.core.elements import OutputTag
from flinkish_spark.functions.keyed import KeyedCoProcessFunction
from flinkish_spark.operators.process import ElementError, KeyedProcessOperator
from flinkish_spark.state import ListStateDescriptor, StateTtl, ValueStateDescriptor
from tests.support.effort import seeds
from tests.support.operator_harness import OperatorHarness
from tests.support.windows_support import TINY

LATE = OutputTag("unmatched", "k STRING, n LONG")


class Match(KeyedCoProcessFunction):
    """Pairs each order with the payment that comes within ten milliseconds; else it goes to the side."""

    def open(self, context):
        self.orders = context.get_list_state(ListStateDescriptor("orders", "n LONG, due LONG"))
        self.paid = context.get_state(ValueStateDescriptor("paid", "LONG", ttl=StateTtl(50)))

    def process_element1(self, order, ctx):
        paid = self.paid.value()
        if paid is not None:
            yield ctx.get_current_key(), order[1], paid
            return
        due = ctx.timestamp() + 10
        self.orders.add((order[1], due))
        ctx.timer_service().register_event_time_timer(due)

    def process_element2(self, payment, ctx):
        self.paid.update(payment[1])
        for number, due in self.orders:
            ctx.timer_service().delete_event_time_timer(due)
            yield ctx.get_current_key(), number, payment[1]
        self.orders.clear()

    def on_timer(self, time_ms, ctx):
        for number, due in self.orders:
            if due == time_ms:
                ctx.output(LATE, (ctx.get_current_key(), number))
        self.orders.update([one for one in self.orders if one[1] != time_ms])


class Model:
    """The same, over dicts."""

    def __init__(self):
        self.orders, self.paid, self.now = {}, {}, 0

    def step(self, what, argument, source):
        rows, side = [], []
        if what == "time":
            self.now = max(self.now, argument)
        elif what == "watermark":
            for key, orders in self.orders.items():
                side += [(due, key, n) for n, due in orders if due <= argument]
                self.orders[key] = [(n, due) for n, due in orders if due > argument]
        else:
            for (key, n), time_ms in argument:
                paid = self.paid.get(key)
                if source == 0:
                    if paid is not None and paid[1] + 50 > self.now:
                        rows.append((key, n, paid[0]))
                    else:
                        self.orders.setdefault(key, []).append((n, time_ms + 10))
                else:
                    self.paid[key] = (n, self.now)
                    rows += [(key, number, n) for number, _ in self.orders.pop(key, [])]
        return sorted(rows), sorted((k, n) for _, k, n in side)


def make(**given):
    return OperatorHarness(
        KeyedProcessOperator(Match()),
        key=lambda e: e[0],
        key_type="STRING",
        max_parallelism=2,
        policy=TINY,
        **given,
    )


@pytest.mark.parametrize("seed", seeds(6))
def test_both_inputs_share_state_and_timers_with_a_restore_after_every_step(seed) -> None:
    chance, one, model, now, watermark = random.Random(seed), make(), Model(), 0, 0
    for number in range(60):
        now += chance.choice((0, 1, 7))
        what = chance.choice(("push", "push", "push", "watermark", "time"))
        source = chance.randrange(2)
        argument = now
        if what == "push":
            argument = [((chance.choice("abc"), number), now + chance.randrange(5))]
            one.push_all(argument, source)
        elif what == "watermark":
            watermark = max(watermark, now)
            one.watermark(now)
        else:
            one.processing_time(now)
        output = one.take()
        expected = model.step(what, argument, source)
        assert (sorted(output.rows), sorted(output.side.get("unmatched", []))) == expected, (number, what)
        one = make(restore=one.snapshot(), bases=one.bases)
    assert set(one.entries("orders")) == {key for key, orders in model.orders.items() if orders}


def test_a_failure_names_the_input_s_element() -> None:
    class Failing(Match):
        def process_element2(self, payment, ctx):
            raise ValueError("no")

    one = OperatorHarness(KeyedProcessOperator(Failing()), key=lambda e: e[0], key_type="STRING")
    one.push(("a", 1), 0)
    with pytest.raises(ElementError, match="ValueError: no"):
        one.push(("a", 2), 0, source=1)
    one.push(("a", 3), 1)
    assert one.entries("orders") == {"a": [(1, 10), (3, 11)]}


def test_a_timer_without_on_timer_says_so() -> None:
    class Silent(KeyedCoProcessFunction):
        def process_element1(self, value, ctx):
            ctx.timer_service().register_event_time_timer(5)

        def process_element2(self, value, ctx):
            return None

    one = OperatorHarness(KeyedProcessOperator(Silent()), key=lambda e: e, key_type="STRING")
    one.push("a", 0, source=1)
    one.push("a", 0)
    with pytest.raises(Exception, match=r"Silent has a timer for 5 and no on_timer"):
        one.watermark(5)
