"""Tells a consumer group how far a query is, so that lag tools see it. Never stops the query."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from flinkish_spark.drop_in.source_options import SourceOptions
from flinkish_spark.errors import FlinkishError
from flinkish_spark.kafka import GroupCommit, KafkaAdmin
from flinkish_spark.kafka.answers import Place

LOG = logging.getLogger(__name__)
#: After a refusal the next try waits, so that a missing right does not slow every micro-batch down.
_BACK_OFF_S = 30.0
_TIMEOUT_MS = 5_000


class GroupOffsets:
    """Commits the offsets of the option `flinkish.group.id`; does nothing without it.

    Parameters
    ----------
    options
        Of the source.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._admin: KafkaAdmin | None = None
        self._committed: dict[Place, int] = {}
        self._not_before = float("-inf")

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Store offsets, forward only.

        Called with what Spark has finished: the micro-batch that ended there is in commits/.
        """
        group = self._options.group_id
        if not group or offsets == self._committed or time.monotonic() < self._not_before:
            return
        try:
            if self._admin is None:
                self._admin = KafkaAdmin(self._options.connection, timeout_ms=_TIMEOUT_MS)
            answer = self._admin.commit_offsets(group, offsets)
        except FlinkishError as error:
            LOG.warning("the offsets of group '%s' are stored later: %s", group, error)
            self._not_before = time.monotonic() + _BACK_OFF_S
            return
        if answer is GroupCommit.ACTIVE_MEMBERS:
            LOG.warning("the group '%s' has active members, so its offsets cannot be stored", group)
            self._not_before = time.monotonic() + _BACK_OFF_S
            return
        self._committed = dict(offsets)
