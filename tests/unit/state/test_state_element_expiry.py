"""Each element of a list, and each entry of a map, has a time to live of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from flinkish_spark.functions.keyed import KeyedProcessFunction
from flinkish_spark.state import ListStateDescriptor, MapStateDescriptor, StateTtl, TtlUpdate
from flinkish_spark.state.codec import OWNER, pack_frame, table_bytes, unpack_frame
from flinkish_spark.state.group_values import inline_base
from flinkish_spark.state.key_group import BasePolicy
from tests.support.effort import examples, seeds
from tests.support.operator_harness import OperatorHarness, Snapshot

TTL_MS = 100
WRITES, READS = TtlUpdate.ON_CREATE_AND_WRITE, TtlUpdate.ON_READ_AND_WRITE
#: A base from the first entry on, and a new one now and then.
BASED = BasePolicy(smallest_bytes=1, delta_share=0.5, smallest_delta_rows=2)
#: What a function does with its states; each is a micro-batch.
Act = Callable[[Any, Any], Any]


class Does(KeyedProcessFunction):
    """Does with its states what it is told, and emits what comes of it."""

    def __init__(self, update: TtlUpdate, element: str = "LONG") -> None:
        self.ttl, self.element = StateTtl(TTL_MS, update), element

    def open(self, context):
        self.list = context.get_list_state(ListStateDescriptor("list", self.element, self.ttl))
        self.map = context.get_map_state(MapStateDescriptor("map", "STRING", self.element, self.ttl))

    def process_element(self, element, ctx):
        yield element[1](self.list, self.map)


class Run:
    """A harness of one key group in which time goes on from call to call."""

    def __init__(self, update: TtlUpdate = WRITES, restore: Snapshot | None = None, **given: Any) -> None:
        function = Does(update, given.pop("element", "LONG"))
        self.harness = OperatorHarness(
            function, key=lambda one: one[0], key_type="STRING", max_parallelism=1, restore=restore, **given
        )

    def at(self, time_ms: int, act: Act, key: str = "k") -> Any:
        self.harness.processing_time(time_ms)
        self.harness.push((key, act))
        return self.harness.take().rows[0]


def both(seen: Any, counts: Any) -> Any:
    return list(seen), dict(counts)


def sizes(seen: Any, counts: Any) -> Any:
    """How much there is, which is no read."""
    return len(seen), len(counts), counts.is_empty(), bool(seen)


def writes(number: int) -> Act:
    def act(seen: Any, counts: Any) -> None:
        seen.append(number)
        counts[str(number)] = number

    return act


def test_a_write_renews_what_it_writes_and_nothing_beside_it():
    run = Run()
    run.at(0, writes(1))
    run.at(60, writes(2))
    assert run.at(99, both) == ([1, 2], {"1": 1, "2": 2})
    assert run.at(100, both) == ([2], {"2": 2})
    assert run.at(159, sizes) == (1, 1, False, True)
    assert run.at(160, sizes) == (0, 0, True, False)
    assert run.harness.entries("list") == run.harness.entries("map") == {}


READERS = [
    (lambda seen, counts: (list(seen), dict(counts.items())), "all", "all"),
    (lambda seen, counts: (seen.get(), counts.copy()), "all", "all"),
    (lambda seen, counts: (seen == [1, 2, 3], counts == {}), "all", "all"),
    (lambda seen, counts: (2 in seen, list(counts)), "all", "all"),
    (lambda seen, counts: (list(reversed(seen)), list(counts.values())), "all", "all"),
    (lambda seen, counts: (seen[-1], counts["3"]), {3}, {3}),
    (lambda seen, counts: (seen[:2], counts.get("1")), {1, 2}, {1}),
    (lambda seen, counts: (seen[::2], "2" in counts), {1, 3}, {2}),
    (lambda seen, counts: (len(seen), counts.contains("4")), set(), set()),
    (lambda seen, counts: (repr(seen), repr(counts)), set(), set()),
    (lambda seen, counts: (seen[7:], counts.get("4", 0)), set(), set()),
]


@pytest.mark.parametrize("update", [WRITES, READS])
@pytest.mark.parametrize(("read", "of_list", "of_map"), READERS)
def test_where_reads_count_what_is_read_is_renewed(update, read, of_list, of_map):
    def write(seen, counts):
        for number in (1, 2, 3):
            writes(number)(seen, counts)

    run = Run(update)
    run.at(0, write)
    run.at(50, read)
    renewed = [set(range(1, 4)) if one == "all" else one for one in (of_list, of_map)]
    left = [sorted(one) if update is READS else [] for one in renewed]
    assert run.at(100, both) == (left[0], {str(number): number for number in left[1]})


def test_changes_of_a_list_keep_the_times_of_the_others():
    def change(seen, counts):
        seen.insert(1, 10)  # 1 10 2 3 4
        seen[2] = 20  # 1 10 20 3 4
        del seen[0]  # 10 20 3 4
        seen[3:] = [40, 41]  # 10 20 3 40 41
        seen.reverse()

    run = Run()
    run.at(0, lambda seen, counts: seen.update([1, 2, 3, 4]))
    run.at(50, change)
    assert run.at(99, both)[0] == [41, 40, 3, 20, 10]
    assert run.at(100, both)[0] == [41, 40, 20, 10]


def test_what_is_refused_has_changed_nothing():
    def refused(seen, counts):
        for wrong in (
            lambda: seen.__setitem__(0, None),
            lambda: seen.insert(0, None),
            lambda: seen.__setitem__(slice(0, 1), [None]),
            lambda: seen.append(None),
        ):
            with pytest.raises(ValueError, match="no None"):
                wrong()
        for missing in (lambda: seen[1], lambda: seen.__setitem__(1, 1), lambda: seen.__delitem__(1)):
            with pytest.raises(IndexError):
                missing()
        with pytest.raises(KeyError):
            counts["2"]
        with pytest.raises(KeyError):
            del counts["2"]

    run = Run(READS)
    run.at(0, writes(1))
    run.at(50, refused)
    assert run.at(99, sizes) == (1, 1, False, True)
    assert run.at(100, sizes) == (0, 0, True, False)


def test_popitem_takes_the_last_and_renews_no_other():
    run = Run(READS)
    run.at(0, writes(1))
    run.at(10, writes(2))
    assert run.at(50, lambda seen, counts: counts.popitem()) == ("2", 2)
    assert run.at(100, both)[1] == {}


# -- beside a model ---------------------------------------------------------------------------------------
class Model:
    """What a key has, with the time of each element."""

    def __init__(self, reads_count: bool) -> None:
        self.list: list[list[int]] = []
        self.map: dict[str, list[int]] = {}
        self.reads_count = reads_count

    def at(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.list = [one for one in self.list if one[1] + TTL_MS > now_ms]
        self.map = {key: one for key, one in self.map.items() if one[1] + TTL_MS > now_ms}

    def read(self, ones: list[list[int]]) -> list[int]:
        if self.reads_count:
            for one in ones:
                one[1] = self.now_ms
        return [one[0] for one in ones]


def step(rng: random.Random, model: Model, number: int) -> tuple[Act, Any]:
    """Do something to the model; return the same for states, and what it returns."""
    now_ms, size, key = model.now_ms, len(model.list), rng.choice("abcde")
    at = rng.randrange(size) if size else 0
    kinds = ["append", "put", "get", "has", "all", "keys", "len", "slice"]
    if size:
        kinds += ["set", "del", "index", "insert", "assign"]
    match rng.choice(kinds):
        case "append":
            model.list.append([number, now_ms])
            return lambda seen, counts: seen.append(number), None
        case "put":
            model.map[key] = [number, now_ms]
            return lambda seen, counts: counts.put(key, number), None
        case "get":
            found = model.read([model.map[key]]) if key in model.map else [None]
            return lambda seen, counts: counts.get(key), found[0]
        case "has":
            is_there = bool(model.read([model.map[key]])) if key in model.map else False
            return lambda seen, counts: key in counts, is_there
        case "all":
            return lambda seen, counts: list(seen), model.read(model.list)
        case "keys":
            model.read(list(model.map.values()))
            return lambda seen, counts: list(counts), list(model.map)
        case "len":
            return lambda seen, counts: (len(seen), len(counts)), (size, len(model.map))
        case "slice":
            return lambda seen, counts: seen[at : at + 2], model.read(model.list[at : at + 2])
        case "set":
            model.list[at] = [number, now_ms]
            return lambda seen, counts: seen.__setitem__(at, number), None
        case "del":
            del model.list[at]
            return lambda seen, counts: seen.__delitem__(at), None
        case "index":
            return lambda seen, counts: seen[at], model.read([model.list[at]])[0]
        case "insert":
            model.list.insert(at, [number, now_ms])
            return lambda seen, counts: seen.insert(at, number), None
        case _:
            model.list[at : at + 2] = [[number, now_ms], [number + 1, now_ms]]
            return lambda seen, counts: seen.__setitem__(slice(at, at + 2), [number, number + 1]), None


@pytest.mark.parametrize("update", [WRITES, READS])
@pytest.mark.parametrize("policy", [BasePolicy(), BASED])
@pytest.mark.parametrize("seed", seeds(3))
def test_states_do_what_a_model_does(update, policy, seed):
    rng, now_ms = random.Random(seed), 0
    models = {f"key-{number}": Model(update is READS) for number in range(6)}
    run = Run(update, policy=policy)
    for number in range(examples(400, least=150)):
        now_ms += rng.randrange(12)
        key = rng.choice(list(models))
        models[key].at(now_ms)
        act, expected = step(rng, models[key], 10 * number)
        assert run.at(now_ms, act, key) == expected
        if rng.random() < 0.1:
            run = Run(update, run.harness.snapshot(), policy=policy, bases=run.harness.bases)
    for key, model in models.items():
        model.at(now_ms)
        assert run.at(now_ms, both, key) == (
            [one for one, _ in model.list],
            {name: one for name, (one, _) in model.map.items()},
        )


# -- what is stored ---------------------------------------------------------------------------------------
def without_touches(frame: bytes | memoryview) -> bytes:
    """A value, or a base, without times of elements, as a writer of savepoints makes it who is told none."""
    sections: dict[str, Any] = dict(unpack_frame(frame))
    for name, payload in sections.items():
        if name != OWNER:
            with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
                table = reader.read_next_batch()
            assert "touches" in table.schema.names
            sections[name] = table_bytes(table.drop_columns(["touches"]))
    return pack_frame(sections)


@pytest.mark.parametrize("policy", [BasePolicy(), BASED])
def test_what_has_no_times_of_elements_has_that_of_the_whole_for_each(policy):
    before = Run(policy=policy)
    before.at(0, lambda seen, counts: (seen.update([1, 2]), counts.update({"1": 1, "2": 2})))
    before.at(0, writes(7), key="idle")
    harness = before.harness
    harness.bases._frames = {ref: without_touches(one) for ref, one in harness.bases._frames.items()}
    values = {group: without_touches(value) for group, value in harness.snapshot().values.items()}
    run = Run(restore=Snapshot(values, -(1 << 63), 0), policy=policy, bases=harness.bases)
    run.at(50, writes(3))
    assert run.at(99, both) == ([1, 2, 3], {"1": 1, "2": 2, "3": 3})
    assert run.at(99, both, key="idle") == ([7], {"7": 7})
    # Base and delta of the two forms become one value, too.
    whole = {group: inline_base(value, run.harness.bases) for group, value in run.harness._values.items()}
    later = Run(restore=Snapshot(whole, -(1 << 63), 99))
    assert later.at(100, both) == ([3], {"3": 3})
    assert run.at(100, both) == ([3], {"3": 3})
    assert run.at(100, both, key="idle") == ([], {})


def test_another_declaration_keeps_the_times():
    before = Run(element="INT")
    before.at(0, writes(1))
    before.at(50, writes(2))
    after = Run(restore=before.harness.snapshot(), element="LONG")
    assert after.at(99, both) == ([1, 2], {"1": 1, "2": 2})
    assert after.at(100, both) == ([2], {"2": 2})
