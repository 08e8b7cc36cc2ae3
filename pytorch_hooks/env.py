"""The environment of a training process, read in one place."""

import os
from dataclasses import dataclass
from pathlib import Path

AGENT_SOCKET = "CKPTLESS_AGENT_SOCKET"
RESUME = "CKPTLESS_RESUME"
POLICY = "CKPTLESS_POLICY"
LOG_FORMAT = "CKPTLESS_LOG_FORMAT"


@dataclass(frozen=True)
class Environment:
    """The values of torchrun's variables; a process that nobody launched is a world of one.

    `resume`: the folder of a saved step to go on from, "" for none. `policy`: values for each number of nodes
    as JSON, "" for none. `log_format`: "json", or anything else for the script's own.
    """

    agent_socket: str | None
    rank: int
    local_rank: int
    world_size: int
    launched: bool
    resume: str
    local_world_size: int
    policy: str
    log_format: str


def read() -> Environment:
    """Read the variables of this process."""
    return Environment(
        agent_socket=os.environ.get(AGENT_SOCKET),
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        resume=os.environ.get(RESUME, ""),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        policy=os.environ.get(POLICY, ""),
        log_format=os.environ.get(LOG_FORMAT, ""),
        launched="RANK" in os.environ and "MASTER_ADDR" in os.environ,
    )


def become(rank: int, world_size: int, group_rank: int, store: tuple[str, int], ranks_per_root: int) -> None:
    """Correct the variables for the rank this process has now, for libraries that read them late."""
    os.environ.update(
        RANK=str(rank),
        ROLE_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        ROLE_WORLD_SIZE=str(world_size),
        GROUP_RANK=str(group_rank),
        MASTER_ADDR=store[0],
        MASTER_PORT=str(store[1]),
        # torch reads it with each communicator.
        TORCH_NCCL_RANKS_PER_ROOT=str(ranks_per_root),
    )
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(Path(file).with_name(f"rank-{rank:05d}.error.json"))
