"""Settings of a program, by Flink's keys."""

from __future__ import annotations

from typing import Any, Self


class Configuration(dict[str, Any]):
    """Settings by key; docs/migrate/flink-programs.md says which of them the environment reads."""

    def set_string(self, key: str, value: Any) -> Self:
        self[key] = value
        return self

    set_integer = set_float = set_boolean = set_string

    def get_string(self, key: str, default_value: Any) -> Any:
        return self.get(key, default_value)

    get_integer = get_float = get_boolean = get_string
