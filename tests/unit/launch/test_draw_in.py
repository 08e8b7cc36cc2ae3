"""Nodes that a job gives back: what Slurm does not answer is asked again, what it refuses is used again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptless.daemon.launch import draw_in
from ckptless.daemon.launch.draw_in import LONGEST_PAUSE_S, DrawIn
from ckptless.daemon.launch.late import LateNodes
from ckptless.daemon.protocol.forming import ask_for_nodes, give_back
from ckptless.daemon.slurm.errors import SlurmRefusedError, SlurmUnreachableError

NAMES = ("n0", "n1", "n2")


@dataclass
class Slurm:
    """Answers as it is told to; `takes`: whether an update is done, also where nobody hears of it."""

    answers: list[Exception | None]
    takes: bool = True
    held: list[str] = field(default_factory=lambda: [*NAMES])
    released: list[list[str]] = field(default_factory=list)
    drawn: int = 0

    async def job(self, _job_id: int, *, deadline_s: float) -> SimpleNamespace:
        assert deadline_s > 0
        return SimpleNamespace(nodes=tuple(self.held))

    async def release(self, _job_id: int, names: list[str], *, deadline_s: float) -> None:
        assert deadline_s > 0
        self.released.append(names)
        answer = self.answers.pop(0)
        if answer is None or self.takes:
            self.held = [name for name in self.held if name not in names]
        if answer is not None:
            raise answer

    async def draw_in(self, *_: object, **__: object) -> tuple[str]:
        self.drawn += 1
        return ("n9",)


def looked(slurm: Slurm, folder: Path, monkeypatch: pytest.MonkeyPatch, *, wanted: int = 0) -> list[str]:
    """Give node 2 back, and look often; the nodes that an agent was started on."""
    monkeypatch.setattr(draw_in, "Commands", lambda: slurm)
    started: list[str] = []

    async def start(name: str) -> None:
        started.append(name)

    async def look() -> None:
        draws = DrawIn(7, LateNodes(3, 2), folder, NAMES, start)
        give_back(folder, (2,))
        ask_for_nodes(folder, wanted)
        for turn in range(6):
            await draws.look(turn * 2 * LONGEST_PAUSE_S, {2})
            await asyncio.sleep(0)
        await draws.close()

    asyncio.run(look())
    return started


@pytest.mark.parametrize("error", [SlurmUnreachableError("away"), TimeoutError()])
def test_what_slurm_does_not_answer_is_asked_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm([error, None], takes=False)
    assert looked(slurm, tmp_path, monkeypatch) == []
    assert slurm.released == [["n2"], ["n2"]]
    assert slurm.held == ["n0", "n1"]


def test_what_slurm_did_without_an_answer_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm([SlurmUnreachableError("away")], takes=True)
    assert looked(slurm, tmp_path, monkeypatch) == []
    assert slurm.released == [["n2"]]


def test_what_slurm_refuses_is_used_again_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm([SlurmRefusedError("not twice")], takes=False)
    assert looked(slurm, tmp_path, monkeypatch, wanted=2) == ["n2", "n9"]
    assert (slurm.released, slurm.drawn) == ([["n2"]], 1)
