"""Making the files of a decided checkpoint visible. The order of these steps is what makes it exact.

1. COMMITTED: every file is there, and the record says which they are.
2. PLAN: which files readers will see, under which names. Names come from the plan and not from the
   moment, so whoever repeats a step finds its own work.
3. Small files are merged under hidden names; nothing that a reader or a later try needs is touched.
4. BUILT: from here on there are only renames.
5. Renames, in the plan's order.
6. MOVED: every file has been visible. From here on nobody looks for them again, because readers may
   take them away.
7. DONE, written by the committer; then what is not needed any more is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flinkish_spark.sinks.files.disk import Disk
from flinkish_spark.sinks.files.ledger import Entry, Ledger, Part, Plan
from flinkish_spark.sinks.files.merging import Merge, Merger
from flinkish_spark.sinks.files.names import PartName, SinkFiles
from flinkish_spark.sinks.files.rolling import Chunk, Rolled

LOG = logging.getLogger(__name__)


class FilesGone(Exception):
    """Files of a decided checkpoint were deleted before readers could see them.

    Whether some of them were visible for a while is not known any more.
    """


@dataclass(frozen=True)
class Publisher:
    """Carries plans out; any number of times, by any process.

    Parameters
    ----------
    files
        Names of the sink's files.
    """

    files: SinkFiles
    ledger: Ledger
    disk: Disk
    merger: Merger

    def plan_of(self, checkpoint: int, rolled: Rolled) -> Plan:
        """Return a plan with names for what a checkpoint makes visible."""
        parts = [self._part(checkpoint, index, chunks) for index, chunks in enumerate(rolled.parts)]
        return Plan(tuple(parts), rolled.open)

    def publish(self, checkpoint: int, plan: Plan) -> bool:
        """Make the parts of a recorded plan visible; False if they all have been before.

        Raises
        ------
        FilesGone
            A file that has not been visible is not there.
        OSError
            The file system refuses; the call may be repeated.
        """
        if self.ledger.has(checkpoint, Entry.MOVED):
            return False
        if not self.ledger.has(checkpoint, Entry.BUILT):
            self._require_sources(plan)
            self._build(checkpoint, plan)
            self.ledger.record(checkpoint, Entry.BUILT)
        self._move(plan)
        self.ledger.record(checkpoint, Entry.MOVED)
        return True

    def clear(self, checkpoint: int, plan: Plan) -> None:
        """Remove what a plan has used up, behind DONE."""
        kept = {(chunk.root, chunk.staged) for chunk in plan.open}
        for part in plan.parts:
            if part.is_merged:
                for chunk in part.chunks:
                    if (chunk.root, chunk.staged) in kept:
                        self.disk.remove(self.path_of(chunk))
        for root, staged in sorted({(c.root, c.staged) for p in plan.parts for c in p.chunks} - kept):
            self.disk.remove_tree(self._files(root).pending / staged)
        for root in sorted({c.root for p in plan.parts if p.is_merged for c in p.chunks}):
            self.disk.remove_tree(self._files(root).merged / str(checkpoint))

    def path_of(self, chunk: Chunk) -> Path:
        """Return where a chunk is until it is visible."""
        return self._files(chunk.root).pending / chunk.staged / chunk.name

    def _files(self, root: str) -> SinkFiles:
        return SinkFiles(Path(root), self.files.job, self.files.uid)

    def _part(self, checkpoint: int, index: int, chunks: Sequence[Chunk]) -> Part:
        files = self._files(chunks[0].root)
        extension = chunks[0].extension
        name = PartName(min(chunk.checkpoint for chunk in chunks), checkpoint, index, extension)
        target = files.root / chunks[0].bucket / files.finished_name(name)
        merged = files.merged / str(checkpoint) / f"{index}{extension}"
        source = merged if len(chunks) > 1 else self.path_of(chunks[0])
        return Part(str(target), str(source), tuple(chunks))

    def _require_sources(self, plan: Plan) -> None:
        """Look for every chunk; nothing of the plan has been renamed yet."""
        for part in plan.parts:
            for chunk in part.chunks:
                if not self.disk.exists(self.path_of(chunk)):
                    raise FilesGone(f"the pending file {self.path_of(chunk)} is gone")

    def _build(self, checkpoint: int, plan: Plan) -> None:
        merged = [part for part in plan.parts if part.is_merged]
        for root in sorted({part.chunks[0].root for part in merged}):
            folder = self._files(root).merged / str(checkpoint)
            mine = [part for part in merged if part.chunks[0].root == root]
            self.disk.make_folder(folder)
            scratch = folder / "scratch"
            self.merger.merge(
                [Merge(tuple(self.path_of(c) for c in part.chunks), Path(part.source)) for part in mine],
                scratch,
            )
            self.disk.remove_tree(scratch)

    def _move(self, plan: Plan) -> None:
        touched: set[Path] = set()
        for part in plan.parts:
            source, target = Path(part.source), Path(part.target)
            self.disk.make_folder(target.parent)
            touched |= {target.parent, source.parent}
            try:
                self.disk.rename(source, target)
            except FileNotFoundError:
                self._explain_missing(source, target)
        self.disk.sync_folders(sorted(path for path in touched if self.disk.exists(path)))

    def _explain_missing(self, source: Path, target: Path) -> None:
        """Tell a file that was renamed before from one that was deleted before it could be.

        The folder that a file is renamed from stays until MOVED, so its absence means that somebody
        removed it. If it is there and the file is neither here nor there, the rename was done before a
        crash, and whoever reads finished files has taken this one away.
        """
        if self.disk.exists(target):
            return
        if not self.disk.exists(source.parent):
            raise FilesGone(f"the folder {source.parent} with pending files is gone")
        LOG.warning("%s was finished before and has been taken away since, so it is left so", target)
