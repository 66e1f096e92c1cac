"""A source that reads other sources one after the other: bounded history first, then live data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pyspark.sql import SparkSession

from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.split_positions import Offset, SplitPosition, find_scan_positions
from flinkish_spark.connectors.splits import Rows, SplitSource, check_splits
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import check_arguments
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.protocol.ids import JobUuid
from flinkish_spark.protocol.plan_layout import Position
from flinkish_spark.protocol.timeline import Mark


class HybridSource(SplitSource):
    """Reads several split sources one after the other, as one source with one position.

    A part begins in the micro-batch after the one in which the last split of the part before it ended, so all
    records of a part come before those of later parts. The position has the splits of every part that has
    begun, so it also says which part is being read.

    Parameters
    ----------
    parts
        All but the last are bounded, and all have the same schema. Splits of part 1 are called ``1:<name>``.

    Raises
    ------
    ConfigError
        The parts do not fit together.

    Examples
    --------
    >>> from flinkish_spark.connectors.collection import CollectionSource
    >>> both = HybridSource(CollectionSource([1, 2], "n LONG"), CollectionSource([3], "n LONG"))
    >>> list(both.read("1:all", 0, 1))
    [(3,)]
    """

    kind = "hybrid"

    @check_arguments(parts="give for example a FileSource and a SplitSource of your own")
    def __init__(self, *parts: SplitSource) -> None:
        if len(parts) < 2:
            raise ConfigError(f"a hybrid source is given {len(parts)} parts", what_to_do="give two or more")
        for index, part in enumerate(parts):
            what, what_to_do = "", ""
            if not part.is_bounded and index + 1 < len(parts):
                what, what_to_do = "has no end", "give it an end, or put it last"
            elif part.record_type != parts[0].record_type:
                fields, wanted = part.record_type.simpleString(), parts[0].record_type.simpleString()
                what, what_to_do = f"has the fields {fields}, not {wanted}", "give all parts one schema"
            elif getattr(part, "decoding", None) is not None:
                what, what_to_do = "decodes its records", "leave value= out, and decode in a transform"
            elif part.rate != RateLimit():
                what, what_to_do = "has a limit of its own", "limit all: HybridSource(...).limit_rate(...)"
            if what:
                raise ConfigError(f"part {index} of a hybrid source {what}", what_to_do=what_to_do)
        self.schema = parts[0].record_type
        self._parts: tuple[SplitSource, ...] = parts

    def list_uids(self, uid: str) -> tuple[str, ...]:
        return (uid, *(_part_uid(uid, index) for index in range(len(self._parts))))

    def bind(self, uid: str) -> Self:
        parts = tuple(part.bind(_part_uid(uid, index)) for index, part in enumerate(self._parts))
        return super(HybridSource, self._replace("_parts", parts)).bind(uid)

    def datasets(self) -> tuple[Dataset, ...]:
        return tuple(dict.fromkeys(one for part in self._parts for one in part.datasets()))

    @property
    def is_bounded(self) -> bool:  # type: ignore[override]
        return self._parts[-1].is_bounded

    # Between micro-batches:
    def splits(self) -> Sequence[str]:
        return self.splits_from(SplitPosition(self._fs_uid, {}))

    def splits_from(self, position: SplitPosition) -> Sequence[str]:
        found: list[str] = []
        for index in range(len(self._parts)):
            of_part = self._position_of(index, position)
            # Checked before the part's number is added: with it, any value would be a valid name.
            names = check_splits(of_part.uid, self._part(index).splits_from(of_part))
            found += [f"{index}:{split}" for split in names]
            if not self._is_part_at_end(index, position):
                break
        return found

    def _is_part_at_end(self, index: int, position: SplitPosition) -> bool:
        part, of_part = self._part(index), self._position_of(index, position)
        if not part.is_bounded or not set(part.splits_from(of_part)) <= set(of_part.offsets):
            return False
        return part.is_at_end(of_part)

    def is_at_end(self, position: SplitPosition) -> bool:
        return all(self._is_part_at_end(index, position) for index in range(len(self._parts)))

    def first(self, split: str) -> Offset:
        part, name = self._find_part(split)
        return part.first(name)

    def latest(self, split: str, start: Offset, limit: int | None) -> Offset:
        part, name = self._find_part(split)
        return part.latest(name, start, limit)

    def end(self, split: str) -> Offset | None:
        part, name = self._find_part(split)
        return part.end(name)

    def records_between(self, split: str, start: Offset, end: Offset) -> int | None:
        part, name = self._find_part(split)
        return part.records_between(name, start, end)

    def piece_facts(self, split: str, start: Offset, end: Offset) -> Any:
        part, name = self._find_part(split)
        return part.piece_facts(name, start, end)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    # In a task:
    def read(self, split: str, start: Offset, end: Offset) -> Rows:
        part, name = self._find_part(split)
        return part._replace("_fs_piece_facts", self._fs_piece_facts).read(name, start, end)

    # On the driver:
    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        super().preflight(spark, job_dir, uid)
        for index in range(len(self._parts)):
            self._parts[index].preflight(spark, job_dir, _part_uid(uid, index))
            # The part gets a folder below this source's: another source may have the part's uid.
            self._part(index)

    def check_retention(self, uid: str, needed_ms: int) -> None:
        for index, part in enumerate(self._parts):
            part.check_retention(_part_uid(uid, index), needed_ms)

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        super().check_input(job_dir, uid, position)
        for index in range(len(self._parts)):
            scans = [] if position is None else find_scan_positions(position, uid)
            of_part = LoggedOffsets(tuple(self._position_of(index, scan).to_json() for scan in scans))
            own = None if position is None else of_part
            self._part(index).check_input(job_dir, _part_uid(uid, index), own)

    def check_start(self, uid: str, position: Position) -> None:
        for index in range(len(self._parts)):
            of_part = self._position_of(index, SplitPosition.from_json(position))
            if of_part.offsets:
                self._part(index).check_start(_part_uid(uid, index), of_part.to_json())

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        facts = dict(super().identity(job_dir, uid))
        for index in range(len(self._parts)):
            facts.update(self._part(index).identity(job_dir, _part_uid(uid, index)))
        return facts

    def newest(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> Mapping[str, Offset]:
        """Return the ends of the parts that can be read now: a part begins when the one before has ended."""
        scans = [] if position is None else find_scan_positions(position, uid)
        found: dict[str, Offset] = {}
        for index in range(len(self._parts)):
            own = LoggedOffsets(tuple(self._position_of(index, scan).to_json() for scan in scans))
            ends = self._part(index).newest(job_dir, _part_uid(uid, index), own)
            found |= {f"{index}:{name}": end for name, end in ends.items()}
            if not self._part(index).is_at_end(SplitPosition(_part_uid(uid, index), ends)):
                break
        return found

    @property
    def has_ends(self) -> bool:
        return all(part.has_ends for part in self._parts)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the kinds of the parts; each part's fingerprint is compared on its own."""
        return {"parts": [part.kind for part in self._parts]}

    def _tell(self, offsets: Mapping[str, Offset], note: str) -> None:
        for index, own in self._group_by_part(offsets).items():
            self._part(index)._tell(own, note)

    def newest_marks(self, job: JobUuid) -> Sequence[Mark]:
        return [mark for index in range(len(self._parts)) for mark in self._part(index).newest_marks(job)]

    def on_release(self, offsets: Mapping[str, Offset]) -> None:
        for index, own in self._group_by_part(offsets).items():
            self._part(index).on_release(own)

    def _overrides(self, method: str) -> bool:
        return any(part._overrides(method) for part in self._parts)

    def _part(self, index: int) -> SplitSource:
        """Return a part, with its folder set if this source has one."""
        part = self._parts[index]
        if self._fs_folder:
            object.__setattr__(part, "_fs_folder", self.job_store.to_child(str(index)).to_text())
        return part

    def _find_part(self, split: str) -> tuple[SplitSource, str]:
        index, _, name = split.partition(":")
        return self._part(int(index)), name

    def _position_of(self, index: int, position: SplitPosition) -> SplitPosition:
        own = self._group_by_part(position.offsets).get(index, {})
        return SplitPosition(_part_uid(position.uid, index), own)

    @staticmethod
    def _group_by_part(offsets: Mapping[str, Offset]) -> dict[int, dict[str, Offset]]:
        found: dict[int, dict[str, Offset]] = {}
        for split, offset in offsets.items():
            index, _, name = split.partition(":")
            found.setdefault(int(index), {})[name] = offset
        return found


def _part_uid(uid: str, index: int) -> str:
    return f"{uid}.{index}"
