"""What of a savepoint's metadata hangs on its operators: chains with positions, and timers that wait.

The one place in which writers of savepoints touch chains. A savepoint is restored by uid, but the state of an
operator belongs to a chain, and operators in one chain of a job must have stood at the same place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from flinkish_spark.protocol.agenda import Agenda
from flinkish_spark.protocol.operator_time import OperatorTime
from flinkish_spark.protocol.savepoints import SavedChain
from flinkish_spark.protocol.scans import Chain, Position
from flinkish_spark.protocol.time_facts import TimerReport
from flinkish_spark.protocol.watermark_valve import Valve
from flinkish_spark.protocol.watermarks import EventTime
from flinkish_spark.savepoints.errors import BootstrapRefused

Chains = tuple[SavedChain, ...]
#: A key group, and when its next timers are due by event time and by processing time.
DueTimers = tuple[int, int | None, int | None]


def with_operator(chains: Chains, uid: str, beside: str | None) -> tuple[Chains, str]:
    """Return the chains with one more operator, and the name of the chain in which it is.

    It stands where that chain stood, so it goes with every operator of it, and of chains at the same place.
    In a savepoint without chains it stands nowhere: whatever source a job puts in front of it begins where
    it says itself.

    Parameters
    ----------
    beside
        Name of the chain; None where there is none, or all of them stood at the same places.

    Raises
    ------
    BootstrapRefused
        The chain is not there, or it has to be said which one is meant.

    Examples
    --------
    >>> chains, name = with_operator((), "totals", None)
    >>> with_operator(chains, "counts", None)[0][0].chain.operators
    ('totals', 'counts')
    """
    if not chains:
        return (SavedChain(Chain((), (uid,), (uid,)), {}),), uid
    names = [one.chain.name for one in chains]
    if beside is None:
        if any(_places(one) != _places(chains[0]) for one in chains):
            raise BootstrapRefused(
                f"it is not clear where the new operator '{uid}' stands",
                why="the chains of the savepoint stood at different places",
                what_to_do=f"say in front of which it will run: beside={' or '.join(map(repr, names))}",
            )
        beside = names[0]
    if beside not in names:
        raise BootstrapRefused(
            f"the savepoint has no chain '{beside}'", what_to_do=f"choose from: {', '.join(names)}"
        )
    changed = [
        _with_operators(one, (*one.chain.operators, uid)) if one.chain.name == beside else one
        for one in chains
    ]
    return tuple(changed), beside


def without_operator(chains: Chains, uid: str) -> Chains:
    """Return the chains without an operator; a chain with sources stays, since it says where they stood."""
    changed = [
        _with_operators(one, tuple(other for other in one.chain.operators if other != uid)) for one in chains
    ]
    return tuple(one for one in changed if one.chain.operators or one.chain.inputs)


def with_uid(chains: Chains, old: str, new: str) -> tuple[Chains, Mapping[str, str]]:
    """Return the chains with an operator under another uid, and the chains' new names by the old ones."""
    changed = []
    for one in chains:
        operators, consumers = (
            tuple(new if uid == old else uid for uid in uids)
            for uids in (one.chain.operators, one.chain.consumers)
        )
        changed.append(replace(one, chain=replace(one.chain, operators=operators, consumers=consumers)))
    names = {a.chain.name: b.chain.name for a, b in zip(chains, changed, strict=True)}
    return tuple(changed), names


def _places(one: SavedChain) -> dict[str, Position]:
    """Return where all inputs of a chain stood; None for one that Spark had not asked yet."""
    return {name: one.positions.get(name) for name in one.chain.inputs}


def _with_operators(one: SavedChain, operators: tuple[str, ...]) -> SavedChain:
    """Return a chain with other operators; sinks that were known to read it still are."""
    sinks = tuple(sorted(one.readers))
    # The name stays as long as there are operators, because their state files go by it.
    consumers = one.chain.consumers if operators else sinks or one.chain.consumers
    return replace(one, chain=replace(one.chain, operators=operators, consumers=consumers), sinks=sinks)


# -- timers -----------------------------------------------------------------------------------------
def times_without(times: EventTime | None, uid: str, operators: Collection[str]) -> EventTime | None:
    """Return where time stood, without the timers of an operator.

    Parameters
    ----------
    operators
        All uids that the savepoint knows, this one among them: the name of an operator in one of several
        chains begins with its uid.
    """
    if times is None:
        return None
    groups = {
        place: timers
        for place, timers in times.agenda.groups.items()
        if operator_of(place[0], operators) != uid
    }
    others = {name: one for name, one in times.operators.items() if name != uid}
    return replace(times, agenda=Agenda(groups), operators=others)


def times_with_uid(
    times: EventTime | None, old: str, new: str, operators: Collection[str], names: Mapping[str, str]
) -> EventTime | None:
    """Return where time stood, with an operator under another uid.

    Parameters
    ----------
    operators
        All uids that the savepoint knew before.
    names
        The chains' new names by the old ones: times go by source and chain.
    """
    if times is None:
        return None

    def instance_now(name: str) -> str:
        uid = operator_of(name, operators)
        chain = name.removeprefix(f"{uid}.") if name != uid else ""
        now = new if uid == old else uid
        return f"{now}.{names.get(chain, chain)}" if chain else now

    def operator_now(one: OperatorTime) -> OperatorTime:
        return replace(
            one,
            inputs=frozenset(_renamed(uid, names) for uid in one.inputs),
            instances=frozenset(map(instance_now, one.instances)),
            valve=_valve_renamed(one.valve, names),
        )

    return replace(
        times,
        agenda=Agenda(
            {(instance_now(name), group): timers for (name, group), timers in times.agenda.groups.items()}
        ),
        assigners={_renamed(uid, names): one for uid, one in times.assigners.items()},
        valve=_valve_renamed(times.valve, names),
        operators={(new if uid == old else uid): operator_now(one) for uid, one in times.operators.items()},
    )


def times_with_timers(
    times: EventTime | None, uid: str, chain: str, chains: Collection[str], due: Iterable[DueTimers]
) -> EventTime | None:
    """Return where time stood, with these timers of an operator in a chain in the place of those it had.

    Parameters
    ----------
    chains
        All in which the operator has state: one that is in several goes by its uid and the chain.
    """
    own = f"{uid}.{chain}"
    known = {own} if len(chains) > 1 else {uid, own}
    reports = [
        TimerReport(own if len(chains) > 1 else uid, group, event_ms, processing_ms)
        for group, event_ms, processing_ms in due
        if (event_ms, processing_ms) != (None, None)
    ]
    if times is None and not reports:
        return None
    before = times or EventTime()
    others = {place: one for place, one in before.agenda.groups.items() if place[0] not in known}
    return replace(before, agenda=Agenda(others).after(reports))


def operator_of(name: str, operators: Collection[str]) -> str:
    """Return the uid of an operator from a name under which its timers are known.

    Examples
    --------
    >>> operator_of("totals.counts", ["totals", "counts"])
    'totals'
    """
    fitting = [uid for uid in operators if name == uid or name.startswith(f"{uid}.")]
    return max(fitting, key=len, default=name)


def _valve_renamed(valve: Valve[str], names: Mapping[str, str]) -> Valve[str]:
    return replace(valve, channels={_renamed(uid, names): one for uid, one in valve.channels.items()})


def _renamed(assigner: str, names: Mapping[str, str]) -> str:
    """Return the uid of an assigner, ``<source>.<chain>``, with the chain's new name; names may have dots."""
    old = max((old for old in names if assigner.endswith(f".{old}")), key=len, default=None)
    return assigner if old is None else assigner.removesuffix(old) + names[old]
