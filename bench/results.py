"""Rounds of a group in a file, one line each: a run that is ended early keeps them, and another goes on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path


class Results:
    """The rounds that count of one group.

    Parameters
    ----------
    path
        A file of JSON lines: first what was measured, then a round per line.
    settings
        What was measured. Rounds of other settings, or of other code, are not put together with these.
    resume
        Go on with what is in the file; else it is begun anew.
    """

    def __init__(self, path, settings, resume):
        self.path, self.rounds = Path(path), []
        if resume and self.path.exists():
            self._read(settings)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(settings) + "\n")

    def _read(self, settings):
        lines = self.path.read_text().splitlines(keepends=True)
        before = json.loads(lines[0])
        if before != json.loads(json.dumps(settings)):
            differ = {name: (before.get(name), value) for name, value in settings.items()}
            differ = {name: pair for name, pair in differ.items() if pair[0] != pair[1]}
            raise SystemExit(f"{self.path} is of another run (there, here): {differ}; leave out --resume")
        # A line that was cut off is not a round.
        whole = [line for line in lines[1:] if line.endswith("\n")]
        self.rounds = [json.loads(line) for line in whole]
        self.path.write_text("".join([lines[0], *whole]))

    def add(self, answers):
        """Keep one round: what each variant answered."""
        self.rounds.append(answers)
        with self.path.open("a") as file:
            file.write(json.dumps(answers) + "\n")

    def by_variant(self, variants):
        """Return the answers of each variant, in the order of rounds."""
        return {variant: [answers[variant] for answers in self.rounds] for variant in variants}


def revision(root):
    """Return which code is measured; empty outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return found.stdout.strip()


def records_read(progress):
    """Return how many records a micro-batch has read: to Spark a source's rows are ranges."""
    (source,) = progress["sources"]
    begins, ends = source["startOffset"] or {}, source["endOffset"]
    return sum(
        end - (begins.get(topic) or {}).get(partition, 0)
        for topic, own in ends.items()
        if isinstance(own, dict)
        for partition, end in own.items()
    )
