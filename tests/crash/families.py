"""A job with a sink of every family: where it finds and leaves everything, and what is visible of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from demo.decisions import DecisionBook
from flinkish_spark.core.store_spec import StoreSpec
from tests.crash.sweep.places import Place, place_from_json
from tests.crash.sweep.sinks import SINKS

#: In the order of their declaration, in which the job commits to them; the names are their uids.
FAMILIES = ("kafka", "delta", "files", "kafka-second", "jdbc-postgres", "two-phase")


@dataclass(frozen=True)
class Whereabouts:
    """What the job's process is told.

    Parameters
    ----------
    places
        Of the sinks; all of them stand behind one source.
    """

    job_dir: Path
    scratch: Path
    servers: str
    source_topic: str
    group: str
    places: tuple[Place, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Whereabouts:
        value = json.loads(text)
        places = tuple(map(place_from_json, value.pop("places")))
        paths = {name: Path(value.pop(name)) for name in ("job_dir", "scratch")}
        return cls(places=places, **paths, **value)


class Onlooker:
    """Sees what readers of every sink see, and what is decided.

    The job keeps all of its decisions, so that nobody has to look before they are gone.
    """

    def __init__(self, where: Whereabouts) -> None:
        self._lookers = {place.sink: SINKS[place.sink].looker(place) for place in where.places}
        self._book = DecisionBook(StoreSpec(str(where.job_dir)))

    def close(self) -> None:
        for looker in self._lookers.values():
            looker.close()

    def undecided(self) -> list[str]:
        """Return in which sinks more is visible than was decided."""
        # This order matters: a decision read before the rows could be older than they are.
        seen = {sink: SINKS[sink].weight(looker.look()) for sink, looker in self._lookers.items()}
        decided = self._decided()
        return [
            f"{sink}: {rows} rows visible, {decided[sink]} decided"
            for sink, rows in seen.items()
            if rows > decided[sink]
        ]

    def differences(self, values: Iterable[bytes]) -> list[str]:
        """Compare all that is visible with the input and with what was decided; the job has ended."""
        values, decided = list(values), self._decided()
        said = []
        for sink, looker in self._lookers.items():
            seen, wanted = looker.look(), SINKS[sink].expected(values)
            said += [f"{sink}: missing {row} x{count}" for row, count in (wanted - seen).items()]
            said += [f"{sink}: surplus {row} x{count}" for row, count in (seen - wanted).items()]
            if SINKS[sink].weight(seen) != decided[sink]:
                said.append(f"{sink}: {SINKS[sink].weight(seen)} rows visible, {decided[sink]} decided")
        return said

    def _decided(self) -> Counter[str]:
        self._book.refresh()
        decided: Counter[str] = Counter()
        for one in self._book.checkpoints.values():
            for sink in self._lookers:
                decided[sink] += sum(one.rows.get(sink, {}).values())
        return decided
