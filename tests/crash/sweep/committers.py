"""Puts switches between the coordinator and the two halves of a sink, whatever the sink is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flinkish_spark.errors import EnvironmentFault
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.sinks.base import Sink
from tests.crash.sweep.files import OUTAGE, Jobs
from tests.crash.sweep.points import Call, Effect, Layer
from tests.crash.sweep.switch import Switch

_RETRY = CommitAnswer(Outcome.RETRY, OUTAGE)


class SystemAway(EnvironmentFault):
    """The system behind a sink cannot be asked."""

    restartable = True


def hook_sink(jobs: Jobs, kind: type[Sink]) -> None:
    """Watch the writers and committers that sinks of a class make; again for the same class does nothing."""
    if getattr(kind.create_committer, "is_watched", False):
        return
    create_writer, create_committer = kind.create_writer, kind.create_committer

    def writer(self: Sink, spark: Any, context: Any) -> Any:
        made, found = create_writer(self, spark, context), jobs.of_path(f"{context.folder}/")
        if found is not None:
            _watch(made, "stage", found[0], Layer.STAGE, Effect.WRITE)
        return made

    def committer(self: Sink, spark: Any, context: Any) -> Any:
        made, found = create_committer(self, spark, context), jobs.of_path(f"{context.folder}/")
        if found is not None:
            _watch(made, "why_dead", found[0], Layer.SINK, Effect.READ)
            _watch(made, "sweep", found[0], Layer.SINK, Effect.WRITE)
            _watch(made, "commit", found[0], Layer.SINK, Effect.WRITE, lambda: [_RETRY])
            _watch(made, "checkpoint_complete", found[0], Layer.SINK, Effect.WRITE, lambda: _RETRY)
        return made

    committer.is_watched = True  # type: ignore[attr-defined]
    kind.create_writer, kind.create_committer = writer, committer  # type: ignore[method-assign]


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
