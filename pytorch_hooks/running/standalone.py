"""A training function without an agent around it: the same calls, stock PyTorch underneath."""

import atexit
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks import env
from ckptless.pytorch_hooks.cursor import Cursors
from ckptless.pytorch_hooks.elastic import batches
from ckptless.pytorch_hooks.elastic.exact import Exact, ExactSteps, begin
from ckptless.pytorch_hooks.elastic.policy import of_size
from ckptless.pytorch_hooks.elastic.sums import Share
from ckptless.pytorch_hooks.state import State
from ckptless.pytorch_hooks.torch_private import asked
from ckptless.pytorch_hooks.torch_private import calls as torch_private


class StandaloneRun:
    """A `Run` where nobody watches: nothing is written, nothing is waited for."""

    generation = 1
    spare = joins = False

    def __init__(self, exact: Exact | None = None) -> None:
        found = env.read()
        self.rank, self.local_rank, self.world_size = found.rank, found.local_rank, found.world_size
        self.step = 0
        self._cursor = Cursors()
        self._exact = exact
        self._exact_steps: ExactSteps | None = None
        if exact is not None:
            exact.check_ranks(self.world_size)

    @property
    def policy(self) -> Mapping[str, Any]:
        """See Run; of the environment's CKPTLESS_POLICY."""
        found = env.read()
        return of_size(found.policy, max(1, found.world_size // found.local_world_size))

    @property
    def exact(self) -> ExactSteps:
        """See Run."""
        return exact_steps(self._exact_steps)

    @property
    def redone(self) -> bool:
        """See Run: nothing is done again."""
        return False

    @property
    def epoch(self) -> int:
        """See Run."""
        return self._cursor.epoch

    def on_recovery(self, function: Callable[[Any], None]) -> None:
        """See Run; there is no recovery here."""

    def on_resize(self, function: Callable[[Any, int, int], None]) -> None:
        """See Run; the number of ranks stays."""

    def keep(self, build: Callable[[], State] | State) -> State:
        """See Run."""
        state = build if isinstance(build, State) else checked_state(build())
        if self._exact is not None:
            share = Share(self.rank, self.world_size, self._exact.virtual_ranks)
            self._exact_steps = ExactSteps(self._exact, state, share, lambda: self.step)
            begin(self._exact)
        return state

    def building(self) -> None:
        """See Run; nobody is refused anything here."""

    def repeat(self, body: Callable[[], object]) -> None:
        """See Run; it is called once."""
        body()

    def end_epoch(self, name: str = "") -> None:
        """See Run."""
        self._cursor.end_epoch(name)

    def compare(self, where: str = "") -> None:
        """See Run; nothing is compared here."""

    def batches(self, loader: Iterable[Any], epochs: int = 1, *, name: str = "") -> Iterator[Any]:
        """See Run."""
        if self._exact is not None:
            self._exact.deal(loader)
        return self._cursor.batches(loader, epochs, name)

    def local_batch(self, batch_size: int) -> int:
        """See Run."""
        batches.check(batch_size, self.world_size)
        return batches.local_batch(batch_size, self.rank, self.world_size)

    def batch_weight(self, batch_size: int) -> float:
        """See Run."""
        batches.check(batch_size, self.world_size)
        return batches.batch_weight(batch_size, self.rank, self.world_size)

    def accumulate(self, batch_size: int, micro_batch: int) -> int:
        """See Run."""
        batches.check(batch_size, self.world_size, micro_batch)
        return batches.micro_batches(batch_size, micro_batch, self.world_size)

    @contextmanager
    def phase(self, name: str, up_to: float) -> Iterator[None]:
        """See Run; nobody watches here."""
        del name, up_to
        yield

    def commit(self, loss: float | torch.Tensor | None = None) -> int:
        """See Run; only counts."""
        del loss
        self._cursor.committed()
        self.step += 1
        return self.step


def exact_steps(found: ExactSteps | None) -> ExactSteps:
    """Return what `run.exact` is. Raises UsageError where there is none."""
    if found is None:
        raise UsageError(
            "run.exact is there after run.keep, in a job that is started with "
            "ckptless.run(train, exact=ckptless.Exact(virtual_ranks=...))"
        )
    return found


def checked_state(built: object) -> State:
    """Return what `build` has made. Raises UsageError where that is no State."""
    if not isinstance(built, State):
        raise UsageError(f"the function given to run.keep must return a State, not a {type(built).__name__}")
    return built


# The groups that were made here, while there are any.
_made: list[asked.Standing] = []


def run(train: Callable[[Any], object], exact: Exact | None = None) -> None:
    """Call `train` once, with the process group that torchrun's variables describe, or a world of one."""
    if dist.is_initialized():
        train(StandaloneRun(exact))
        return
    _init_process_group()
    try:
        train(StandaloneRun(exact))
    finally:
        _made.clear()
        dist.destroy_process_group()


def protect() -> StandaloneRun:
    """Return the run of a script that is no function, with the process group of `run`; the script ends it."""
    if not dist.is_initialized():
        _init_process_group(lasts=False)
        atexit.register(_end)
    return StandaloneRun()


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _init_process_group(*, lasts: bool = True) -> None:
    # With one for the CPU, as there is under an agent.
    backends = {"cpu": "gloo", **({"cuda": "nccl"} if torch.cuda.is_available() else {})}
    standing = asked.Standing(max(0, env.read().rank), env.read().world_size, "", backends, lasts)
    backend = standing.config if len(backends) > 1 else "gloo"
    if env.read().launched:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch_private.HashStore(), rank=0, world_size=1)
    _made.append(standing)
    asked.answer(_standing, stock=True)


def _standing() -> asked.Standing | None:
    return _made[0] if _made else None
