"""One lazy registry for everything that is chosen by name: policies, tiers, codecs, transports."""

from __future__ import annotations

import importlib
import inspect
from typing import Generic, TypeVar

from qkvault.config_names import nearest
from qkvault.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to classes, imported when first asked for. Outsiders are reached as ``module.path:Class``."""

    def __init__(self, what: str, base: type[object], known: dict[str, str]) -> None:
        """``what`` names the kind in errors, ``known`` maps a name to ``module.path:Class``; each is a ``base``."""
        self._base = base
        self._what = what
        self._known = dict(known)

    @property
    def names(self) -> list[str]:
        return sorted(self._known)

    def load(self, name: str) -> type[T]:
        """The class called ``name``. Raises ConfigError: with the nearest name if there is none, else why not."""
        path = self._known.get(name, name)
        module_name, _, class_name = path.partition(":")
        if not class_name:
            msg = f"unknown {self._what} {name!r}: {nearest(name, {each: each for each in self.names})}"
            raise ConfigError(msg)
        try:
            loaded: type[T] | None = getattr(importlib.import_module(module_name), class_name)
        except Exception as error:  # thread top: others wrote that module, and it may end in any way
            msg = f"{self._what} {name!r} cannot be imported: {type(error).__name__}: {error}"
            raise ConfigError(msg) from error
        if not (isinstance(loaded, type) and issubclass(loaded, self._base)) or inspect.isabstract(loaded):
            msg = f"{self._what} {name!r} is no class derived from {self._base.__name__}, or one that lacks methods"
            raise ConfigError(msg)
        return loaded
