"""A rehearsal (`ckptless-run --rehearse`): what the launcher tells ranks of it, and what they write down."""

from pathlib import Path
from typing import Literal

import msgspec

VERSION = 1
# In the environment of the ranks: a `Rehearsal`, as JSON.
VARIABLE = "CKPTLESS_REHEARSAL"
# In the rehearsal's folder: the process id of an agent whose node is to be lost, for the launcher.
LOST = "lost-node"
# Begins a digest.
OTHER = "#"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's process, or its whole node, is killed in `step`, before it commits that."""

    step: int
    rank: int
    kind: Literal["process", "node"]


class Rehearsal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: so many steps, then every rank ends; with these faults, each once."""

    version: int
    directory: str
    steps: int
    faults: tuple[Fault, ...] = ()


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that there was at a rank's commit of `step`, in a file of JSON lines for each process.

    Short plain values as Python writes them (a float with all its bits), of others a digest, behind OTHER.
    `tensors` and `values`: of the State, by name; `beside`: of the script beside it, by place.
    """

    step: int
    generation: int
    pid: int
    loss: str | None
    tensors: dict[str, str]
    values: dict[str, str]
    beside: dict[str, str]


def fault_file(directory: Path, number: int) -> Path:
    """Return what is there once a rank has come to that fault."""
    return directory / f"fault-{number}"


def lines_file(directory: Path, rank: int, process: int | str) -> Path:
    """Return where a process ("*": any) writes as that rank; it may be killed in the middle of a line."""
    return directory / f"rank-{rank:05d}-{process}.jsonl"
