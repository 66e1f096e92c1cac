"""Master hooks: systems outside Spark that take part in a job's checkpoints under a name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class MasterHook(ABC):
    """A participant outside Spark, for example a metastore whose version belongs to a checkpoint.

    The driver calls one hook after the other, and never one hook concurrently. The result of
    `trigger` is stored in the checkpoint's decision, so it must be a JSON value and not
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
        """Return the stable name under which its state is stored."""

    @abstractmethod
    def trigger(self, checkpoint_id: int) -> Mapping[str, Any] | None:
        """Take part in a checkpoint; called before its barrier goes out.

        Returns
        -------
        mapping or None
            JSON values to pass to `restore`; None, without a state, also acknowledges the
            checkpoint.

        Raises
        ------
        Exception
            The checkpoint is aborted before its barrier is sent.
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
        """Reset the system: the query starts without a checkpoint."""

    def close(self) -> None:
        """Release all resources, after the job has ended."""
