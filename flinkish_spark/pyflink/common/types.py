"""Rows of PyFlink's kind: values by position or by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Row:
    """A row by position, ``Row("ann", 3)``, or by name, ``Row(user="ann", amount=3)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(_fields=list(kwargs), _values=list(kwargs.values() if kwargs else args))

    @classmethod
    def of(cls, names: list[str], values: Any) -> Row:
        return cls(**dict(zip(names, values, strict=True))) if names else cls(*values)

    def as_dict(self, recursive: bool = False) -> dict[str, Any]:
        pairs = dict(zip(self._fields, self._values, strict=True)).items()
        is_row = {name: recursive and isinstance(value, Row) for name, value in pairs}
        return {name: value.as_dict(True) if is_row[name] else value for name, value in pairs}

    def set_field_names(self, names: list[str]) -> None:
        self._fields[:] = names

    def get_fields_by_names(self, names: list[str]) -> list[Any]:
        return [self[name] for name in names]

    def __getitem__(self, at: Any) -> Any:
        return self._values[self._fields.index(at) if isinstance(at, str) else at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._values[self._fields.index(at) if isinstance(at, str) else at] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            raise AttributeError(f"the row has no field {name!r}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __call__(self, *args: Any) -> Row:
        return Row.of(self._values, args)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(tuple(self._values))

    def __reduce__(self) -> tuple[Any, ...]:
        return make_row, (self._fields, self._values)

    def __repr__(self) -> str:
        names = [f"{name}=" for name in self._fields] or [""] * len(self)
        return f"Row({', '.join(f'{name}{value!r}' for name, value in zip(names, self, strict=True))})"


def make_row(names: list[str], values: list[Any]) -> Row:
    """Return a row; a pickle names this function."""
    return Row.of(names, values)
