"""A store in memory, with the promises of a local disk."""

from __future__ import annotations

from flinkish_spark.core.store import CreateResult, ObjectMissing


class MemoryStore:
    """A :class:`~flinkish_spark.core.store.Store`; what a process of the simulation left behind stays.

    Objects are immutable bytes. Names that begin with a dot are hidden from :meth:`list`, as in
    :class:`~flinkish_spark.core.store.LocalStore`.

    Examples
    --------
    >>> store = MemoryStore()
    >>> store.create_if_absent("owners/1.json", b"me"), store.create_if_absent("owners/1.json", b"you")
    (<CreateResult.CREATED: 'CREATED'>, <CreateResult.EXISTS: 'EXISTS'>)
    >>> store.list("owners"), store.read("owners/1.json")
    (('owners/1.json',), b'me')
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._children: dict[str, set[str]] = {}
        self._listings: dict[str, tuple[str, ...]] = {}

    def read(self, key: str) -> bytes:
        """Return the object; raise ObjectMissing if there is none."""
        try:
            return self.objects[key]
        except KeyError:
            raise ObjectMissing(key) from None

    def put(self, key: str, data: bytes) -> None:
        """Write the object, replacing an older one."""
        if key not in self.objects:
            self._link(key)
        self.objects[key] = data

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        """Write the object only if the key is free."""
        if key in self.objects:
            return CreateResult.EXISTS
        self.put(key, data)
        return CreateResult.CREATED

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return what lies directly below a folder, sorted, without hidden names."""
        listing = self._listings.get(prefix)
        if listing is None:
            names = sorted(name for name in self._children.get(prefix, ()) if not name.startswith("."))
            listing = self._listings[prefix] = tuple(f"{prefix}/{name}" for name in names)
        return listing

    def delete(self, key: str) -> None:
        """Delete the object, and folders that are empty then."""
        if self.objects.pop(key, None) is None:
            return
        while "/" in key:
            folder, _, name = key.rpartition("/")
            self._listings.pop(folder, None)
            names = self._children[folder]
            names.discard(name)
            if names:
                return
            del self._children[folder]
            key = folder

    def below(self, folder: str) -> tuple[str, ...]:
        """Return the keys of all objects below a folder, hidden ones too, sorted."""
        return tuple(sorted(key for key in self.objects if key.startswith(f"{folder}/")))

    def sizes_below(self, folder: str) -> dict[str, int]:
        """Return everything below a folder with its size."""
        return {key[len(folder) + 1 :]: len(self.objects[key]) for key in self.below(folder)}

    def rename_folder(self, folder: str, other: str) -> None:
        """Move everything below `folder` at once, as rename(2) does; a missing one moves nothing."""
        for key in self.below(folder):
            data = self.objects[key]
            self.delete(key)
            self.put(other + key[len(folder) :], data)

    def copied(self) -> MemoryStore:
        """Return another store with the same objects."""
        copied = MemoryStore()
        for key, data in self.objects.items():
            copied.put(key, data)
        return copied

    def become(self, other: MemoryStore) -> None:
        """Hold what `other` holds, and nothing else."""
        copied = other.copied()
        self.objects, self._children, self._listings = copied.objects, copied._children, copied._listings

    def _link(self, key: str) -> None:
        while "/" in key:
            folder, _, name = key.rpartition("/")
            self._listings.pop(folder, None)
            names = self._children.setdefault(folder, set())
            if name in names:
                return
            names.add(name)
            key = folder
