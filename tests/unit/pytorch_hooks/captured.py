"""A whole record at once, for tests that have nothing else to do meanwhile."""

from typing import Any

from ckptless.pytorch_hooks.state import State, draft


def capture(state: State, step: int, *more: Any, **named: Any) -> bytes:
    """Make the record of `step` as `draft` does, and wait for what a device has of it."""
    return draft(state, step, *more, **named).finish()
