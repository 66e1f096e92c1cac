"""Marks in Kafka of a job's newest committed checkpoint, stored as offsets of a consumer group.

A topic does not show with which checkpoint a transaction was committed, and Kafka forgets the transactions of
a dead process. It keeps the offsets of groups, each with a note: here the offset is the checkpoint's id, and
the note is the mark.

Brokers delete a mark older than ``offsets.retention.minutes`` (seven days). A job that may not use the group
logs a warning once, and works without marks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin, OffsetDirection
from flinkish_spark.core.errors import AuthorizationError
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.timeline import Mark

LOG = logging.getLogger(__name__)


def find_newest_mark(notes: Iterable[str], job: JobUuid) -> Mark | None:
    marks = [mark for note in notes if (mark := Mark.parse(note, job)) is not None]
    return max(marks, key=lambda mark: mark.checkpoint, default=None)


class KafkaMarks:
    """The mark of one sink or manifest; one instance belongs to one thread."""

    def __init__(self, admin: KafkaAdmin, job: JobUuid, uid: str, topic: str) -> None:
        self._admin, self._job, self._place = admin, job, (topic, 0)
        self.group = f"flinkish-{job}-{uid}"
        self._is_disabled = False

    def newest(self) -> Mark | None:
        """Return the mark; None if there is none, or this principal may not read it."""
        if self._is_disabled:
            return None
        try:
            return find_newest_mark(self._admin.find_committed_notes(self.group).values(), self._job)
        except AuthorizationError as refused:
            self._disable(refused)
            return None

    def leave(self, mark: Mark) -> None:
        if self._is_disabled:
            return
        note, offset = mark.to_text(self._job), int(mark.checkpoint)
        try:
            self._admin.commit_offsets(self.group, {self._place: offset}, OffsetDirection.REWIND, note)
        except AuthorizationError as refused:
            self._disable(refused)

    def _disable(self, refused: AuthorizationError) -> None:
        self._is_disabled = True
        LOG.warning(
            "a start with an older copy of the job directory will not be noticed at the topic %s: "
            "allow READ on the group %s and on the topic (%s)",
            self._place[0],
            self.group,
            refused,
        )
