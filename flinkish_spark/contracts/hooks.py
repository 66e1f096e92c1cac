"""Master hooks: systems outside Spark that take part in a job's checkpoints under a name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class MasterHook(ABC):
    """A participant outside Spark, for example a metastore whose version belongs to a checkpoint.

    Called by the driver, one hook after the other, never two calls of one hook at a time. What
    `trigger` returns is stored in the checkpoint's decision, so it must be a JSON value and no
    secret. The semantics are those of Flink's MasterTriggerRestoreHook.

    Examples
    --------
    >>> class Version(MasterHook):
    ...     @property
    ...     def name(self):
    ...         return "catalog"
    ...     def trigger(self, checkpoint_id):
    ...         return {"version": 7}
    ...     def restore(self, checkpoint_id, state):
    ...         print("back to", state["version"])
    >>> Version().restore(3, Version().trigger(3))
    back to 7
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return its stable name; its state is found again by it."""

    @abstractmethod
    def trigger(self, checkpoint_id: int) -> Mapping[str, Any] | None:
        """Take part in a checkpoint; called before its barrier goes out.

        Returns
        -------
        mapping or None
            JSON values that `restore` will get; None for nothing to remember, which is an
            acknowledgement too.

        Raises
        ------
        Exception
            The checkpoint is aborted before any task has heard of it.
        """

    @abstractmethod
    def restore(self, checkpoint_id: int, state: Mapping[str, Any] | None) -> None:
        """Go back to a checkpoint; called before each start of the query that has one.

        May be called several times for one checkpoint.

        Raises
        ------
        Exception
            The start fails.
        """

    def reset(self) -> None:
        """Begin from nothing: the query starts and there is no checkpoint."""

    def close(self) -> None:
        """Release what it holds; the job has ended."""
