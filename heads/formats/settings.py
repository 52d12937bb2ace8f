"""Another project's config.json, read field by field: each value is checked before anything is built on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.formats.format import FormatError


@dataclass(frozen=True)
class Settings:
    """An object of a config.json and where it stands, for messages."""

    values: dict[str, Any]
    where: str

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> Settings:
        """The whole configuration of a checkpoint at ``path``."""
        return cls(config, f"the config.json of {path}")

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def part(self, key: str) -> Settings:
        """An object inside, empty when it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return Settings(value or {}, f"{key} in {self.where}")

    def whole(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if type(value) is not int or not 0 < value < 1 << 40:
            raise self._wrong(key, "a positive integer")
        return value

    def count(self, key: str) -> int:
        """An integer of 0 or more, which must be there."""
        value = self._get(key, None)
        if type(value) is not int or not 0 <= value < 1 << 40:
            raise self._wrong(key, "an integer of 0 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
            raise self._wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, empty when it is absent."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(key, "a list of integers")
        return tuple(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise FormatError(f"{self.where} lacks {key}: add it, it cannot be told from the tensors")
        return default

    def _wrong(self, key: str, what: str) -> FormatError:
        return FormatError(f"{self.where}: {key} must be {what}, not {str(self.values.get(key))[:80]!r}")
