"""The messages of `ckptctl evict`, `release` and `resize` and a daemon, over the daemon's Unix socket."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from ckptless.daemon.protocol.limits import (
    NodeCount,
    NodeNumber,
    Protocol,
    Text,
    clip_texts,
)
from ckptless.daemon.protocol.messages import Message

MAX_NAME = 256
MAX_REASON = 200

EvictionSource: TypeAlias = Literal["operator", "health"]


class Evict(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: take a node out of a job that runs, whatever its state is.

    `job` is a run, or the number of a Slurm job with one run. `node` is its name, or its number in the job.
    `force`: also where its ranks have no spare to go to, so that the job ends. `give_back`: Slurm gets it.
    """

    protocol: Protocol
    job: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    node: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    source: EvictionSource
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    force: bool = False
    give_back: bool = False


class Evicted(Message, frozen=True, kw_only=True):
    """Answer to Evict: what has come of it, in one sentence, and the node's number where it is known.

    "already": it was lost before. "elsewhere": this daemon cannot say, another one of the job can.
    "unknown": there is no such job here, or none that the asker may touch.
    """

    verdict: Literal["accepted", "already", "refused", "elsewhere", "unknown"]
    text: Text
    node: NodeNumber | None = None

    def __post_init__(self) -> None:
        clip_texts(self, "text")


class ResizeJob(Message, frozen=True, kw_only=True):
    """ckptctl to daemon: train on so many nodes from now on; None: on as many as there are.

    `job` is a run, or the number of a Slurm job with one. `give_back`: Slurm gets what is left over.
    """

    protocol: Protocol
    job: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    nodes: NodeCount | None
    give_back: bool = False


class Resized(Message, frozen=True, kw_only=True):
    """Answer to ResizeJob: what has come of it, in one sentence. The verdicts are those of `Evicted`."""

    verdict: Literal["accepted", "already", "refused", "elsewhere", "unknown"]
    text: Text

    def __post_init__(self) -> None:
        clip_texts(self, "text")
