"""Where rows wait for their checkpoint: folders below the table that Delta and its VACUUM do not look into.

A name says whose the folder is, so that a sweep can tell a leftover from what runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Delta's VACUUM passes over folders whose names begin with an underscore.
FOLDER = "_flinkish"
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)-([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class StagedFolder:
    """One attempt to stage one micro-batch.

    Parameters
    ----------
    owner_epoch, lineage, batch, block
        Of the attempt.
    token
        Eight hexadecimal digits that no other attempt has.

    Examples
    --------
    >>> StagedFolder.parse(StagedFolder(1, 0, 7, 3, "00c0ffee").name).batch
    7
    >>> StagedFolder.parse("_temporary") is None
    True
    """

    owner_epoch: int
    lineage: int
    batch: int
    block: int
    token: str

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"{self.owner_epoch}-{self.lineage}-{self.batch}-{self.block}-{self.token}"

    @classmethod
    def parse(cls, name: str) -> StagedFolder | None:
        """Read a name; None for what is not ours."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return cls(int(found[1]), int(found[2]), int(found[3]), int(found[4]), found[5])


def folder_of_sink(path: str, app_id: str) -> str:
    """Return the folder that holds all staged rows of one sink of one job."""
    return f"{path.rstrip('/')}/{FOLDER}/{app_id}"
