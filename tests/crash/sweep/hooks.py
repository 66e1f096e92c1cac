"""Puts switches into the calls of a driver: its store, functions that name a path, Spark's own commit.

Nothing of the product knows of this.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flinkish_spark.core.errors import StoreError
from flinkish_spark.core.object_store import ObjectStore
from flinkish_spark.core.steps import Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.core.store_spec import StoreSpec
from tests.crash.sweep.files import OUTAGE, Jobs
from tests.crash.sweep.points import Call, Effect, Layer, without_ids
from tests.crash.sweep.switch import Switch

#: What threads look for, or say, all the time, asked by nobody; it would make every trace another one.
_BACKGROUND = ("requests", "orders", "orders/rewind.json", "owners/*.beat")


# -- the store of a job directory -------------------------------------------------------------------
_STORE = {
    "read": Effect.READ,
    "list": Effect.READ,
    "put": Effect.WRITE,
    "create_if_absent": Effect.WRITE,
    "delete": Effect.WRITE,
}
_FILE_STORE = {
    **_STORE,
    "sizes_below": Effect.READ,
    "read_start": Effect.READ,
    "copy": Effect.WRITE,
    "delete_all": Effect.WRITE,
}


def hook_store(jobs: Jobs) -> None:
    for name, effect in _STORE.items():
        _hook_method(
            LocalStore, "store", name, effect, lambda store: jobs.of_place(StoreSpec(str(store.root)))
        )
    for name, effect in _FILE_STORE.items():
        _hook_method(ObjectStore, "bucket", name, effect, lambda store: jobs.of_url(store._place))


def _hook_method(
    owner: type, prefix: str, name: str, effect: Effect, job_of: Callable[[Any], Switch | None]
) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, key: Any, *rest: Any) -> Any:
        switch, shown = job_of(self), without_ids(key if isinstance(key, str) else next(iter(key), ""))
        if switch is None or shown in _BACKGROUND:
            return original(self, key, *rest)
        call = Call(f"{prefix}.{name} {shown}", Layer.CALL, effect)
        body = functools.partial(original, self, key, *rest)
        return switch.around(call, body, lambda: StoreError(f"cannot {name} {shown}", why=OUTAGE, key=shown))

    setattr(owner, name, wrapped)


# -- functions that name a path ---------------------------------------------------------------------
_PLACES = ("path", "paths", "folder")


def hook_methods(
    jobs: Jobs, owner: type, prefix: str, writes: Iterable[str], error: Callable[[], BaseException]
) -> None:
    """Hook every public method of a class that has a parameter which names a place: :data:`_PLACES`.

    Parameters
    ----------
    writes
        How the names of those begin that change something.
    error
        What they raise when their answer is lost.
    """
    beginnings = tuple(writes)
    for name, original in list(vars(owner).items()):
        if name.startswith("_") or not inspect.isfunction(original):
            continue
        names = [one for one in _PLACES if one in inspect.signature(original).parameters]
        if names:
            effect = Effect.WRITE if name.startswith(beginnings) else Effect.READ
            call = Call(f"{prefix}.{name}", Layer.BRIDGE, effect)
            setattr(owner, name, _path_method(jobs, original, names[0], call, error))


def _path_method(
    jobs: Jobs,
    original: Callable[..., Any],
    parameter: str,
    call: Call,
    error: Callable[[], BaseException],
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        place = signature.bind(*args, **kwargs).arguments.get(parameter)
        if isinstance(place, Sequence) and not isinstance(place, str):
            place = next(iter(place), None)
        found = jobs.of_path(place)
        body = functools.partial(original, *args, **kwargs)
        return body() if found is None else found[0].around(call, body, error)

    return wrapped


# -- Spark ------------------------------------------------------------------------------------------
class SparkSteps:
    """An observer that lets a job be killed around Spark's own commit of a micro-batch."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def on_step_start(self, step: Step, subject: str) -> None:
        """Stop here if this is the point: foreachBatch is about to return."""
        if step is Step.SPARK_COMMIT:
            self._switch.passing(Call("spark.write commits/*", Layer.SPARK, Effect.WRITE))

    def on_step_end(self, step: Step, subject: str) -> None:
        """Stop here if this is the point: commits/N was read."""
        if step is Step.SPARK_COMMIT:
            self._switch.passing(Call("spark.wrote commits/*", Layer.SPARK, Effect.WRITE))
