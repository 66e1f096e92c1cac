"""What is looked at once a run has ended: the output as readers see it."""

from __future__ import annotations

from collections import Counter, defaultdict

from flinkish_spark.checkpoint.spark_log import REPLAY
from flinkish_spark.protocol.lineage import RewindKind, Tables
from tests.simulation.input_topic import Row
from tests.simulation.invariants import Invariants
from tests.simulation.ledger import DecisionRecord
from tests.simulation.outputs import MicroBatch, TransactionState
from tests.simulation.rules import Rule
from tests.simulation.scenario import SinkKind
from tests.simulation.world import InvariantBroken, World


def check_end(world: World, invariants: Invariants) -> InvariantBroken | None:
    """Return what is wrong with the end of a run; None if nothing is."""
    lost = invariants.lost_for_good()
    for uid, kind in zip(world.scenario.sink_uids, world.scenario.sinks, strict=True):
        visible = _of_topic(world, uid) if kind is SinkKind.TRANSACTIONS else _of_table(world, uid)
        rows = [row for origin, row in visible if _left_behind(invariants, origin) is None]
        if lost is not None and not world.is_refused:
            trouble = _why_not_all_but_lost(invariants, lost, uid, rows)
        else:
            trouble = _why_wrong(world, rows) if not world.is_refused else _why_double(rows)
        if trouble:
            return InvariantBroken(Rule.EXACTLY_ONCE.name, f"{uid}: {trouble}")
        if kind is SinkKind.TRANSACTIONS and (trouble := _why_out_of_order(rows)):
            return InvariantBroken(Rule.IN_ORDER.name, f"{uid}: {trouble}")
        if kind is SinkKind.TABLE:
            kept = [origin for origin, _ in visible if _left_behind(invariants, origin)]
            if kept:
                return InvariantBroken(Rule.TABLE_RESTORED.name, f"{uid}: rows of {kept[0]} are still there")
    if world.is_refused or lost is not None:
        return None
    for one in world.broker.open_ones():
        # What a zombie begins after that, nobody is there to sweep; the next start does.
        if one.began_us < world.told_to_stop_us or int(one.id.owner_epoch) == invariants.owner:
            return InvariantBroken(Rule.NO_LEFTOVERS.name, f"{one.name} is still open")
    left = [k for k in world.disk.below(REPLAY) if k.rpartition("/")[0] not in invariants.replays.strays]
    if left:
        return InvariantBroken(Rule.NO_LEFTOVERS.name, f"{left[0]} is still there")
    return None


def _of_topic(world: World, uid: str) -> list[tuple[MicroBatch, Row]]:
    return [
        (one.origin, row)
        for one in world.broker.transactions
        if one.sink == uid and one.state is TransactionState.COMMITTED
        for row in one.rows
    ]


def _of_table(world: World, uid: str) -> list[tuple[MicroBatch, Row]]:
    return [(file.origin, row) for file in world.tables[uid].content for row in file.rows]


def _left_behind(invariants: Invariants, origin: MicroBatch) -> bool | None:
    """Return whether the rewind that left a micro-batch behind restores tables; None for a live one."""
    for lineage, rewind in sorted(invariants.decisions.rewinds.items()):
        if lineage <= origin.lineage:
            continue
        if origin.batch >= rewind.first_removed:
            return rewind.tables is Tables.RESTORE
        if rewind.kind is RewindKind.RESEED:
            # Later rewinds count micro-batches from another beginning.
            return None
    return None


def _why_double(rows: list[Row]) -> str:
    seen = Counter(row.place for row in rows)
    twice = sorted(place for place, count in seen.items() if count > 1)
    return f"record {twice[0]} is visible {seen[twice[0]]} times" if twice else ""


def _why_not_all_but_lost(invariants: Invariants, lost: DecisionRecord, uid: str, rows: list[Row]) -> str:
    """Return why a job that could not replay has not left just that: everything before it is visible."""
    double = _why_double(rows)
    if double:
        return double
    live = [d for d in invariants.ledger.commits.values() if not d.is_dead and d is not lost]
    if any(d.checkpoint > lost.checkpoint for d in live):
        return f"something was decided behind checkpoint {lost.checkpoint}, which is lost"
    wanted = {row for decision in live for record in decision.batches for row in record.rows(uid)}
    may_be = {row for record in lost.batches for row in record.rows(uid)}
    missing, extra = sorted(wanted - set(rows)), sorted(set(rows) - wanted - may_be)
    if missing or extra:
        return f"checkpoint {lost.checkpoint} is lost, but {missing[:1]} is missing, {extra[:1]} is there"
    return ""


def _why_out_of_order(rows: list[Row]) -> str:
    """Return which records of a key a reader of the topic sees in another order than they were made in."""
    newest: dict[int, int] = {}
    for row in rows:
        if row.nth < newest.get(row.key, 0):
            return f"of key {row.key} the count {row.nth} comes behind {newest[row.key]}"
        newest[row.key] = row.nth
    return ""


def _why_wrong(world: World, rows: list[Row]) -> str:
    double = _why_double(rows)
    if double:
        return double
    wanted = {(p, offset) for p, end in world.input.final.items() for offset in range(end)}
    missing = sorted(wanted - {row.place for row in rows})
    if missing:
        return f"record {missing[0]} is missing, and {len(missing) - 1} more"
    counts: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        counts[row.key].append(row.nth)
    for key, found in counts.items():
        if sorted(found) != list(range(1, len(found) + 1)):
            return f"the counts of key {key} are {sorted(found)}"
    return ""
