"""Runs a script of a framework plain under torchrun, and killed under ckptless-run; what each leaves."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from .localrun import FAULTY_DEADLINE_S, Job
from .test_torchrun import execute

RANKS = 2
Told = dict[str, set[str]]


def told(home: Path) -> Told:
    """Return the lines that a run has left, by file; a step that is done again has the same ones."""
    return {path.name: set(path.read_text().splitlines()) for path in home.glob("*.txt")}


def scalars(home: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a run: by name the steps and values, as they come."""
    (folder,) = {file.parent for file in home.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    events.Reload()
    # How long things took is another one in each run.
    names = [name for name in events.Tags()["scalars"] if "loss" in name or name.endswith(("norm", "val"))]
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in names}


def plain(script: Path, home: Path, size: int, env: dict[str, str]) -> Told:
    """Run it without ckptless and without faults; PLAIN in its environment says so."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    # The ranks take torchrun's own store: a port that is picked first, and bound later, others may have then.
    plainly = {**env, "PLAIN": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    execute([*words, script, home / "plain", size, ""], home, plainly)
    found = told(home / "plain")
    assert sum(name.startswith("final") for name in found) == RANKS
    return found


def protected(script: Path, home: Path, size: int, kills: str, env: dict[str, str]) -> Told:
    """Run it with processes killed at "STEP:RANK,..."; nothing else may count as a fault."""
    options = ["--nodes", RANKS, "--tee", "none", "--max-stall", 60]
    with Job(home / "job", options, [script, home / "ours", size, kills], env) as job:
        job.ended(0, FAULTY_DEADLINE_S)
        # Survivors may see it first; none of them raises.
        kinds = [one.kind for one in job.ledger().faults if one.kind != "broken"]
        assert kinds == ["died"] * len(kills.split(",")), job.story()
    return told(home / "ours")
