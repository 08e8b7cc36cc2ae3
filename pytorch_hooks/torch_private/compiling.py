"""torch.compile: when it compiles, which takes a rank much longer than a step."""

import sys
from collections.abc import Callable
from typing import Any


def tell(begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Have these called around each compilation, once however often this is; nothing where none can come.

    Of a torch that has no such callbacks a compilation is a long step.
    """
    handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if handler is None or any(getattr(one, "begins", None) is begins for one in handler.start_callbacks):
        return

    def begin(_arguments: Any = None) -> None:
        begins()

    def end(_arguments: Any = None) -> None:
        ends()

    begin.begins = begins  # type: ignore[attr-defined]  # by which it is found again
    handler.register_start_callback(begin)
    handler.register_end_callback(end)
