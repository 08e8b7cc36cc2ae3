"""Runs a script of a framework plain under torchrun, and killed under ckptless-run; what each leaves."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

from .localrun import FAULTY_DEADLINE_S, Job
from .test_torchrun import execute

RANKS = 2
# torchtitan needs triton, which only its runs find: see the Makefile.
TITAN_ENV = {"PYTHONPATH": f"{sys.prefix}/triton", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
Told = dict[str, set[str]]
Lines = list[tuple[int, float]]
"""Steps and values, as they come."""
WANDB_BLOCK = 32768
WANDB_STEPS = ("trainer/global_step", "train/global_step", "_step")


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


def mlflow_lines(home: Path) -> dict[str, Lines]:
    """Return what the only run of MLflow's file store has, by metric."""
    (folder,) = {file.parent for file in home.rglob("mlruns/*/*/metrics/*") if file.is_file()}
    found = {}
    for file in folder.iterdir():
        rows = [line.split() for line in file.read_text().splitlines()]
        found[file.name] = [(int(step), float(value)) for _, value, step in rows]
    return found


def wandb_files(home: Path) -> list[dict[str, Lines]]:
    """Return what each process has written offline for the only run, by metric; first the first one's."""
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2

    paths = sorted(home.rglob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    assert len({path.name for path in paths}) == 1, paths
    files = []
    for path in paths:
        found: dict[str, Lines] = {}
        for data in _wandb_records(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            items = {(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            # The number of the step where a framework has given one, which is another than that of the line.
            step = next((items[name] for name in WANDB_STEPS if name in items), None)
            for name, value in items.items():
                if step is not None and name not in WANDB_STEPS and not name.startswith("_"):
                    found.setdefault(name, []).append((step, value))
        files.append(found)
    return files


def once_each(files: list[dict[str, Lines]], clean: Lines, name: str) -> int:
    """Each file has a metric's steps once, as without faults, and the last one all from where it begins.

    Returns where that is. What one has that was killed, and whether the next one has it again, is wandb's.
    """
    for rows in (file.get(name, []) for file in files):
        first = rows[0][0] if rows else 0
        assert rows == [row for row in clean if row[0] >= first][: len(rows)]
    assert rows[-1] == clean[-1]
    return first


def _wandb_records(data: bytes) -> Iterator[bytes]:
    """Take a .wandb file apart: LevelDB's format of logs, after a header of 7 bytes; whole records alone."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = WANDB_BLOCK - at % WANDB_BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # Whole, or the last part.
            yield record
            record = b""


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
