"""Tasks of one owner, in its event loop: kept until they end, and all ended with it."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


class Tasks(set[asyncio.Task[None]]):
    """Those that have not ended yet."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task: the event loop itself would forget it."""
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)
        return task


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them, and wait until they have ended, however they do."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
