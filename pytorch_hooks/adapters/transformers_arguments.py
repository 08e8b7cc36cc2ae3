"""What callbacks change in a Trainer's arguments while it trains, as a schedule of `max_grad_norm` does.

Only that: what a process was built with (its rank, its device) stays its own.
"""

from __future__ import annotations

import copy
import enum
from typing import Any

_PLAIN = (int, float, str, bool, type(None))
# Of the process, or set by the adapter.
_LEFT_ALONE = ("local_rank", "eval_on_start")


class Arguments:
    """Knows the arguments as they were built; `changed` says what of their plain data is another one now."""

    def __init__(self, args: Any) -> None:
        self._args = args
        self._built = {
            name: copy.deepcopy(value) if _is_plain(value) else value
            for name, value in vars(args).items()
            if _is_public(name)
        }

    def changed(self) -> dict[str, Any]:
        """Return by name plain data that is not as it was built; members of an Enum by their values."""
        return {
            name: value.value if isinstance(value, enum.Enum) else value
            for name, value in vars(self._args).items()
            if not self._is_as_built(name, value) and _is_public(name) and _is_plain(value)
        }

    def put_back(self, changed: dict[str, Any]) -> None:
        """Have plain data be as it was built, but for what had `changed`."""
        args = vars(self._args)
        for name in self.changed().keys() - self._built.keys() - changed.keys():
            del args[name]
        for name, built in self._built.items():
            if name not in changed and _is_plain(args.get(name)):
                args[name] = copy.deepcopy(built) if _is_plain(built) else built
        for name, value in changed.items():
            kind: Any = type(self._built.get(name))
            is_member = issubclass(kind, enum.Enum) and value is not None
            args[name] = kind(value) if is_member else copy.deepcopy(value)

    def _is_as_built(self, name: str, value: Any) -> bool:
        if name not in self._built:
            return False
        built = self._built[name]
        return value is built or (type(value) is type(built) and _is_plain(built) and value == built)


def _is_public(name: str) -> bool:
    return not name.startswith("_") and name not in _LEFT_ALONE


def _is_plain(value: Any) -> bool:
    return (isinstance(value, str) and isinstance(value, enum.Enum)) or _is_data(value)


def _is_data(value: Any) -> bool:
    """Whether it is of numbers and words, in lists and dicts or not."""
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_data, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_data, (*value, *value.values())))
    return type(value) in _PLAIN
