"""A training function without an agent around it: the same calls, plain PyTorch underneath."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ckptless.daemon.api.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.cursor import Cursors
from ckptless.pytorch_hooks.state import State
from ckptless.pytorch_hooks.torch_private import calls as torch_private


class PlainRun:
    """What `Run` is, where nobody watches: nothing is written, nothing is waited for."""

    generation = 1
    spare = False

    def __init__(self) -> None:
        self._env = env.read()
        self._cursor = Cursors()
        self._step = 0

    @property
    def rank(self) -> int:
        """See Run."""
        return self._env.rank

    @property
    def local_rank(self) -> int:
        """See Run."""
        return self._env.local_rank

    @property
    def world_size(self) -> int:
        """See Run."""
        return self._env.world_size

    @property
    def step(self) -> int:
        """See Run."""
        return self._step

    @property
    def epoch(self) -> int:
        """See Run."""
        return self._cursor.position.epoch

    def on_recovery(self, function: Callable[[Any], None]) -> None:
        """See Run; there is no recovery here."""

    def keep(self, build: Callable[[], State]) -> State:
        """See Run."""
        state = build()
        if not isinstance(state, State):
            raise UsageError(f"the function given to run.keep returned {type(state).__name__}, not a State")
        return state

    def compare(self, where: str = "") -> None:
        """See Run; nothing is compared here."""

    def batches(self, loader: Iterable[Any], epochs: int = 1, *, name: str = "") -> Iterator[Any]:
        """See Run."""
        return self._cursor.batches(loader, epochs, name)

    def commit(self, loss: float | torch.Tensor | None = None) -> int:
        """See Run; only counts."""
        del loss
        self._cursor.committed()
        self._step += 1
        return self._step


def run(train: Callable[[Any], object]) -> None:
    """Call `train` once, with the process group that torchrun's variables describe, or a world of one."""
    made = not dist.is_initialized()
    if made:
        _init_process_group()
    try:
        train(PlainRun())
    finally:
        if made:
            dist.destroy_process_group()


def _init_process_group() -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if env.read().launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch_private.HashStore(), rank=0, world_size=1)
