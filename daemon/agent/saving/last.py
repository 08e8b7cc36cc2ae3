"""Agents at a job's end agree on the last step to save: through the directory, as daemons may be gone.

Their ranks have ended, so what they hold does not change any more. Each writes that down in a folder of this
run. Who sees all of them, or has waited for the rest, decides; the first decision stands, by link(2).
"""

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ckptless.daemon.agent.saving.plan import Task, last_step, newest_step
from ckptless.daemon.protocol import saved
from ckptless.daemon.protocol.messages import Holdings
from ckptless.daemon.protocol.model import Value

POLL_S = 0.05
# Where the newest step is there in part, an older one, or none, is decided on only after so many times as
# long: on a busy node an agent may come later than others wait for it, and hold what they lack.
PARTLY_TIMES = 4
DECISION = "decision.json"


class Decision(Value, frozen=True, kw_only=True):
    """The step that is saved, and who writes it; None for nothing."""

    task: Task | None


async def agree(
    folder: Path, me: int, nodes: Sequence[int], holdings: Holdings, world_size: int, gather_s: float
) -> Task | None:
    """Return what to save, the same at all who call this. Raises ProtocolError, OSError."""
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(_tell, folder, me, holdings)
    began_s = loop.time()
    while True:
        waited = (loop.time() - began_s) / gather_s
        decision = await asyncio.to_thread(_decide, folder, nodes, world_size, waited)
        if decision is not None:
            return decision.task
        await asyncio.sleep(POLL_S)


def leave(folder: Path, me: int) -> None:
    """Note that this node needs the folder no more; the last one removes it. Raises OSError."""
    (folder / f"node-{me}.json").unlink(missing_ok=True)
    if not any(folder.glob("node-*.json")):
        shutil.rmtree(folder, ignore_errors=True)


def _tell(folder: Path, me: int, holdings: Holdings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _whole(folder, f"node-{me}.json", msgspec.json.encode(holdings)).rename(folder / f"node-{me}.json")


def _decide(folder: Path, nodes: Sequence[int], world_size: int, waited: float) -> Decision | None:
    """The decision that stands, if one can be made; `waited` is in times of `gather_s`."""
    path = folder / DECISION
    if not path.exists():
        there = [node for node in nodes if (folder / f"node-{node}.json").exists()]
        if len(there) < len(nodes) and waited <= 1.0:
            return None
        held = {
            node: saved.decode(one.read_bytes(), Holdings, one)
            for node in there
            if (one := folder / f"node-{node}.json")
        }
        mine = Decision(task=last_step(held, world_size))
        partly = newest_step(held) > (mine.task.step if mine.task is not None else 0)
        if partly and len(there) < len(nodes) and waited <= PARTLY_TIMES:
            return None
        partial = _whole(folder, DECISION, msgspec.json.encode(mine))
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
        partial.unlink()
    return saved.decode(path.read_bytes(), Decision, path)


def _whole(folder: Path, name: str, data: bytes) -> Path:
    partial = folder / f".{name}.{secrets.token_hex(8)}"
    partial.write_bytes(data)
    return partial
