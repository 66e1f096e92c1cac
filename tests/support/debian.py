"""Programs out of Debian packages, unpacked beside each other: no installation, no administrator.

Whatever the machine has already is used from there; the rest is fetched with apt-get, which checks
signatures, and unpacked with dpkg. Works for an ordinary user, too.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from flinkish_spark.core.errors import EnvironmentFault

#: Not fetched: the C library must be the machine's, and LLVM (100 MB) only speeds long queries up.
_LEFT_OUT = re.compile(r"libc6|libllvm.*|libgcc-s1|libcrypt1")
_STAMP = ".unpacked"


class PackagesMissing(EnvironmentFault):
    """Debian packages cannot be had here."""


def unpack(choose: Callable[[Apt], Sequence[str]], into: Path) -> Path:
    """Fetch packages and the libraries they need that the machine lacks; unpack all of them.

    Parameters
    ----------
    choose
        Names the packages. Only their libraries are looked for besides, not other programs.
    into
        Directory that gets ``usr/`` and so on. Finished when a stamp is in it; a second call does nothing.

    Returns
    -------
    Path
        `into`, absolute. Who comes while another process unpacks there waits for that one.

    Raises
    ------
    PackagesMissing
        There is no apt-get, or it cannot fetch them.
    """
    into = into.resolve()
    if (into / _STAMP).exists():
        return into
    for tool in ("apt-get", "apt-cache", "dpkg", "dpkg-query"):
        if shutil.which(tool) is None:
            raise PackagesMissing(
                f"there is no {tool} on this machine",
                why="a program would be taken out of Debian packages",
                what_to_do="run these tests on Debian or Ubuntu",
            )
    into.parent.mkdir(parents=True, exist_ok=True)
    with (into.parent / f"{into.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (into / _STAMP).exists():
            _unpack(choose, into)
    return into


def _unpack(choose: Callable[[Apt], Sequence[str]], into: Path) -> None:
    shutil.rmtree(into, ignore_errors=True)
    debs = into / "debs"
    debs.mkdir(parents=True)
    try:
        apt = Apt()
        apt.download(choose(apt), debs)
    except PackagesMissing:
        # The machine's lists are missing or old: take some of our own, which any user may fetch.
        apt = Apt.with_own_lists(into / "apt")
        apt.download(choose(apt), debs)
    for deb in sorted(debs.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(deb), str(into)], check=True, stdin=subprocess.DEVNULL)
    shutil.rmtree(debs)
    shutil.rmtree(into / "apt", ignore_errors=True)
    (into / _STAMP).touch()


def library_path(root: Path) -> str:
    """Return the LD_LIBRARY_PATH by which unpacked programs find unpacked libraries."""
    # Some lie in a folder of their own, such as PulseAudio's, which is known by its absolute path.
    folders = sorted({str(path.parent) for path in (root / "usr/lib").glob("*-linux-gnu*/**/*.so*")})
    return ":".join(folders)


class Apt:
    """apt-get and apt-cache, over the machine's package lists or over some of our own.

    Parameters
    ----------
    options
        Where the lists are; empty for the machine's.
    """

    def __init__(self, options: Sequence[str] = ()) -> None:
        # Root's apt-get would fetch as a user of its own, which cannot write into a private directory.
        self._options = ("-o", "APT::Sandbox::User=root", *options)

    @classmethod
    def with_own_lists(cls, folder: Path) -> Self:
        """Fetch package lists into a folder and go by these."""
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        apt = cls(("-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"))
        apt._get("update")
        return apt

    def newest_version(self, prefix: str) -> str:
        """Return the package ``<prefix><number>`` with the highest number."""
        listed = self._cache("pkgnames", prefix)
        numbers = [int(n) for n in re.findall(rf"^{re.escape(prefix)}(\d+)$", listed, re.MULTILINE)]
        if not numbers:
            raise PackagesMissing(
                f"apt-cache knows no package {prefix}<number>",
                why="its package lists are empty, or this is not Debian",
                what_to_do="check the machine's package sources",
            )
        return f"{prefix}{max(numbers)}"

    def download(self, packages: Sequence[str], into: Path) -> None:
        """Fetch packages and the libraries they stand on, without what is installed."""
        self._get("download", *packages, *self._missing_libraries(packages), cwd=into)

    def _missing_libraries(self, packages: Sequence[str]) -> list[str]:
        kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
        wanted: set[str] = set()
        ahead = set(packages)
        while ahead:
            text = self._cache("depends", *[f"--no-{kind}" for kind in kinds], *sorted(ahead))
            found = set(re.findall(r"^ [ |]?(?:Pre)?Depends: (lib[^\s<>]+)$", text, re.MULTILINE))
            ahead = {name for name in found - wanted if not _LEFT_OUT.fullmatch(name)}
            wanted |= ahead
        return sorted(wanted - _installed(wanted))

    def _get(self, *arguments: str, cwd: Path | None = None) -> None:
        command = ["apt-get", "-qq", *self._options, *arguments]
        done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            raise PackagesMissing(
                f"apt-get {arguments[0]} failed",
                why=" / ".join(done.stderr.splitlines()[-3:]),
                what_to_do="check the network and the machine's package sources",
            )

    def _cache(self, *arguments: str) -> str:
        command = ["apt-cache", *self._options, *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout


def _installed(packages: set[str]) -> set[str]:
    command = ["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *sorted(packages)]
    listed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    return set(re.findall(r"^(\S+) .* installed$", listed, re.MULTILINE))
