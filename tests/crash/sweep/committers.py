"""Puts switches between the coordinator and the two halves of a sink, whatever the sink is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flinkish_spark.contracts.sink import Sink
from flinkish_spark.core.errors import EnvironmentFault
from flinkish_spark.protocol.records import CommitAnswer, Outcome
from tests.crash.sweep.files import OUTAGE, Jobs
from tests.crash.sweep.points import Call, Effect, Layer
from tests.crash.sweep.switch import Switch

_RETRY = CommitAnswer(Outcome.RETRY, OUTAGE)


class SystemAway(EnvironmentFault):
    """The system behind a sink cannot be asked."""

    restartable = True


def hook_sink(jobs: Jobs, kind: type[Sink]) -> None:
    """Watch the writers and committers that sinks of a class make; again for the same class does nothing."""
    _hook(jobs, kind, "create_writer", _watch_writer)
    _hook(jobs, kind, "create_committer", _watch_committer)


def _hook(jobs: Jobs, kind: type[Sink], name: str, watch: Callable[[Any, Switch], None]) -> None:
    # Where it is defined: a class of the user's may travel to tasks with everything that is in it.
    owner = next(one for one in kind.__mro__ if name in vars(one))
    original = vars(owner)[name]
    if getattr(original, "is_watched", False):
        return

    def create(self: Sink, spark: Any, context: Any) -> Any:
        made, found = original(self, spark, context), jobs.of_place(context.place)
        if found is not None:
            watch(made, found)
        return made

    create.is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, create)


def _watch_writer(writer: Any, switch: Switch) -> None:
    _watch(writer, "stage", switch, Layer.STAGE, Effect.WRITE)


def _watch_committer(committer: Any, switch: Switch) -> None:
    _watch(committer, "why_dead", switch, Layer.SINK, Effect.READ)
    _watch(committer, "sweep", switch, Layer.SINK, Effect.WRITE)
    _watch(committer, "commit", switch, Layer.SINK, Effect.WRITE, lambda: [_RETRY])
    _watch(committer, "checkpoint_complete", switch, Layer.SINK, Effect.WRITE, lambda: _RETRY)


def _watch(
    owner: Any,
    name: str,
    switch: Switch,
    layer: Layer,
    effect: Effect,
    instead: Callable[[], Any] | None = None,
) -> None:
    """Watch a method of one object; `instead` is what it answers when its system is out."""
    original, call = getattr(owner, name), Call(f"sink.{name}", layer, effect)

    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return switch.around(call, lambda: original(*args, **kwargs), lambda: _Out(OUTAGE))
        except _Out:
            if instead is not None:
                return instead()
            raise SystemAway(f"{name} of the sink cannot be done", why=OUTAGE) from None

    setattr(owner, name, watched)


class _Out(Exception):
    """Ours, and nobody else's."""
