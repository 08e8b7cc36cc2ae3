"""What of Slurm's view of a node is told, and how the probe asks."""

from __future__ import annotations

import asyncio

import pytest

from ckptless.daemon.ckptlessd.health.meanings import meaning
from ckptless.daemon.ckptlessd.health.slurm_view import SlurmProbe, findings
from ckptless.daemon.slurm.adapter import Node
from ckptless.daemon.slurm.errors import SlurmUnreachableError
from ckptless.daemon.slurm.text import read_nodes

OURS = "ckptless: health nvml: xid-79 (GPU 3): the GPU has fallen off the bus"


def told(state: str, reason: str = "") -> list[tuple[str, str]]:
    """By scontrol's own line of a node."""
    why = f" Reason={reason} [root@2026-11-21T15:09:06]" if reason else ""
    (node,) = read_nodes(f"NodeName=n1 NodeAddr=n1 CPUTot=2 State={state} Partitions=all{why}\n")
    return [(one.code, one.evidence) for one in findings(node)]


@pytest.mark.parametrize(
    ("state", "reason", "found"),
    [
        ("IDLE", "", []),
        ("MIXED+PLANNED", "", []),
        ("IDLE+MAINTENANCE+RESERVED", "", []),
        ("IDLE*", "", [("slurm-not-responding", "IDLE+NOT_RESPONDING")]),
        ("ALLOCATED+NOT_RESPONDING", "", [("slurm-not-responding", "ALLOCATED+NOT_RESPONDING")]),
        ("DOWN", "", [("slurm-down", "DOWN")]),
        ("DOWN", "bad disk", [("slurm-down", "DOWN: bad disk")]),
        (
            "DOWN*+DRAIN",
            "Not responding",
            [
                ("slurm-down", "DOWN+DRAIN+NOT_RESPONDING: Not responding"),
                ("slurm-not-responding", "DOWN+DRAIN+NOT_RESPONDING: Not responding"),
            ],
        ),
        ("MIXED+DRAIN", "NHC: check_fs", [("slurm-drained", "MIXED+DRAIN: NHC: check_fs")]),
        ("MIXED+DRAIN", OURS, []),
        ("ALLOCATED+FAIL", "fan", [("slurm-fail", "ALLOCATED+FAIL: fan")]),
        ("FAIL", "", [("slurm-fail", "FAIL")]),
        ("IDLE+DRAIN+FAIL", "fan", [("slurm-fail", "IDLE+DRAIN+FAIL: fan")]),
    ],
)
def test_what_is_told(state: str, reason: str, found: list[tuple[str, str]]) -> None:
    assert told(state, reason) == found


def test_nothing_of_it_is_acted_upon_a_second_time() -> None:
    codes = ("slurm-down", "slurm-fail", "slurm-drained", "slurm-not-responding")
    assert {meaning(code, {}).action for code in codes} == {"note"}
    assert all(meaning(code, {}).text != meaning("unknown", {}).text for code in codes)


async def asked(answer: Node | Exception) -> list[str]:
    """Look once, from a thread, as `Looking` does."""

    async def ask() -> Node:
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    probe = SlurmProbe(ask)
    assert probe.missing() == ""
    # Longer than a question may take: the finding is Slurm's word, not that of the probe that hangs.
    assert probe.deadline_s > probe.LIMIT_S
    return [one.code for one in await asyncio.to_thread(probe.look)]


def test_it_asks_in_the_daemon_s_loop() -> None:
    assert asyncio.run(asked(Node(name="n1", address="n1", state="DOWN"))) == ["slurm-down"]


def test_where_slurm_does_not_answer_the_probe_has_failed() -> None:
    with pytest.raises(SlurmUnreachableError, match="no answer"):
        asyncio.run(asked(SlurmUnreachableError("no answer")))


def test_one_that_never_answers_ends_the_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> None:
        async def ask() -> Node:
            await asyncio.sleep(60.0)
            raise AssertionError

        monkeypatch.setattr(SlurmProbe, "LIMIT_S", 0.1)
        await asyncio.to_thread(SlurmProbe(ask).look)

    with pytest.raises(TimeoutError):
        asyncio.run(look())


def test_not_all_nodes_ask_at_once() -> None:
    async def intervals() -> set[float]:
        async def ask() -> Node:
            raise AssertionError

        return {SlurmProbe(ask).interval_s for _ in range(20)}

    found = asyncio.run(intervals())
    assert len(found) == 20
    assert all(90.0 <= one <= 150.0 for one in found)
