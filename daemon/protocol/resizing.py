"""The messages of `ckptctl resize` and a daemon, over the daemon's Unix socket."""

from typing import Annotated, Literal

from msgspec import Meta

from ckptless.daemon.protocol.limits import NodeCount, Protocol, Text, clip_texts
from ckptless.daemon.protocol.messages import Message
from ckptless.daemon.protocol.reading import MAX_NAME


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
