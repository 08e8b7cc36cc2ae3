"""The words in which Slurm tells the states of its nodes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

SINFO = ("sinfo", "-h", "-N", "-o", "%N %T")
IDLE = frozenset({"idle"})
REGISTERED = IDLE | {"mixed", "allocated", "completing"}
# sinfo puts one of these behind a state, such as * for a node that does not answer.
_MARKS = "*~#!%$@^-+"
_LOST = ("down", "drain", "fail", "error")


def parse(text: str) -> dict[str, str]:
    """Node to state, marks and all, from what `SINFO` prints."""
    return dict(line.split() for line in text.splitlines() if line.strip())


def not_in(accepted: frozenset[str], states: dict[str, str], wanted: Iterable[str]) -> list[str]:
    """Those of the `wanted` nodes that are in no accepted state, in words for a message."""
    return [f"{node} is {states.get(node, 'unknown')}" for node in wanted if states.get(node) not in accepted]


def is_lost(state: str) -> bool:
    """Whether Slurm starts nothing on such a node until somebody resumes it."""
    return state.rstrip(_MARKS).startswith(_LOST)


def slurmd_starts(text: str) -> dict[str, int]:
    """Node to the time, in s since 1970, at which the slurmd that it last heard of was started.

    `text` is what `scontrol -o show nodes` prints with SLURM_TIME_FORMAT=%s; a node without a time is not in.
    Nor is one without a boot time: it was resumed, and is asked to register once more. Slurm reckons that
    boot from the moment of its answer, so that one that booted within the last second or so may be taken for
    rebooted since it was resumed, and be down again.
    """
    return {name: int(start) for name, start in _START.findall(text)}


_START = re.compile(r"^NodeName=(\S+) (?=.*\bBootTime=\d).*\bSlurmdStartTime=(\d+)", re.MULTILINE)
