"""A training step with the same bits for any number of ranks: it is computed by virtual ranks, one by one.

What a virtual rank computes depends on its part of the global batch and on its random numbers, and these on
its number, the step and the seed: on nothing that a real rank has for itself. What they have computed is
added up in an order that their number alone decides (`tree`). So nothing has to move where the number of real
ranks changes.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch
import xxhash

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.elastic.sums import Flats, Packing, Share, Sum, add, gather_single
from ckptless.pytorch_hooks.elastic.tree import Node, block, fold
from ckptless.pytorch_hooks.state import State, gradients, private, reach, rng
from ckptless.pytorch_hooks.state.objects import every_parameter, parts_of, tree_of
from ckptless.pytorch_hooks.state.second_look import is_due
from ckptless.pytorch_hooks.state.walk import shown
from ckptless.pytorch_hooks.torch_private import ddp as torch_ddp

MOST_VIRTUAL_RANKS = 4096
# What a rank tells of itself at each call, before its parameters and parts.
OWN_WORDS = 3

Forward: TypeAlias = Callable[[Any], torch.Tensor]
"""Takes a virtual rank's part of a batch, and gives the mean loss over it."""


@dataclass(frozen=True)
class Exact:
    """How many virtual ranks a job has for its whole life, and the seed of their random numbers.

    At least as many as the job may ever have real ranks, and 4096 at most; best a multiple of each number
    that it may have. `ckptless.run` raises UsageError for others.
    """

    virtual_ranks: int
    seed: int = 0

    def checked(self) -> "Exact":
        """Return it. Raises UsageError where a number cannot be."""
        numbers = type(self.virtual_ranks) is int and type(self.seed) is int
        if not numbers or not 1 <= self.virtual_ranks <= MOST_VIRTUAL_RANKS or abs(self.seed) >= 1 << 63:
            raise UsageError(f"{self}: virtual_ranks is 1 to {MOST_VIRTUAL_RANKS}, and seed a 64-bit number")
        return self

    @property
    def words(self) -> tuple[int, int]:
        """The numbers that each committed step has of it, and the next one must have, too."""
        return self.virtual_ranks, self.seed

    def check_ranks(self, most_ranks: int) -> None:
        """Raise UsageError where the job may have more ranks than virtual ones."""
        if most_ranks > self.virtual_ranks:
            raise UsageError(
                f"the job may have {most_ranks} ranks, and exact={self} has fewer virtual ones: each rank "
                "needs one at least"
            )

    def deal(self, loader: Any) -> None:
        """Have a loader give the parts of virtual ranks. Raises UsageError where it cannot."""
        if not hasattr(loader, "deal_virtually"):
            raise UsageError(
                f"the job is exact, and a {type(loader).__name__} cannot deal its batches to virtual ranks: "
                "take ckptless.data.MappedLoader, or give run.exact.step a list of parts of your own making, "
                "without run.batches"
            )
        loader.deal_virtually(self.virtual_ranks)


def check_saved(saved: tuple[int, int] | None, now: Exact | None) -> None:
    """Raise UsageError where a step was committed by a job that was exact in another way, or not at all."""
    if saved != (None if now is None else now.words):
        was = "not exact" if saved is None else f"exact=Exact(virtual_ranks={saved[0]}, seed={saved[1]})"
        is_now = "not exact" if now is None else f"exact={now}"
        raise UsageError(f"the step was committed by a job that was {was}, and this one is {is_now}")


class ExactSteps:
    """The steps of one process in one generation, which `run.exact` makes. Main thread only.

    `step()`: the newest step that is done. Raises UsageError for a model that cannot be trained this way.
    """

    def __init__(self, how: Exact, state: State, share: Share, step: Callable[[], int]) -> None:
        self._how, self._state, self._share, self._step = how, state, share, step
        # Which call this is since the newest step that is done.
        self._at, self._call = -1, 0
        self._packing: Packing | None = None
        self._packed: list[int] = []
        _refuse(state)
        self._watched = [
            (prefix, module)
            for prefix, module in tree_of(state).modules()
            if private.buffers_of(module) or isinstance(module, torch.nn.SyncBatchNorm)
        ]
        # Of the script's own classes; looked at now and then.
        self._own = [(at, one) for at, one in tree_of(state).modules() if reach.is_looked_into(one)]
        self._looks = 0
        generators = parts_of(state).generators.items()
        self._generators = [(name, one) for name, one in generators if not _is_torchs(one)]

    @property
    def virtual_ranks(self) -> range:
        """The numbers of the virtual ranks that this process has, as many as a batch has parts here."""
        return block(self._share.rank, self._share.ranks, self._share.virtual)

    def step(
        self,
        parts: Sequence[Any],
        forward: Forward,
        *,
        weights: Sequence[float] | None = None,
        scaler: Any = None,
    ) -> torch.Tensor:
        """Compute the gradients of one global batch, and return its mean loss (no dimensions, no gradient).

        `parts`: what this process has of it, one part for each of its virtual ranks. `forward(part)` gives
        the mean loss over a part. `weights`: what each part counts; if nothing is said its number of samples,
        by the first dimension of its first tensor. `scaler`: a GradScaler, where there is one.

        Gradients are added to those that are there. Every rank calls it, each time with the next global
        batch. What `forward` draws (dropout) is the virtual rank's own; what is drawn elsewhere must be the
        same on all ranks. Raises UsageError, GenerationEnded, CollectiveFailed.
        """
        counts = self._weights(parts, weights)
        parameters = [tensor for _name, tensor in every_parameter(self._state) if tensor.requires_grad]
        outside = rng.capture()
        gradients.look(parameters)
        if (these := list(map(id, parameters))) != self._packed:
            self._packing, self._packed = None, these
        present = [False] * len(parameters)
        with self._alone(parameters, outside):
            leaves = self._leaves(zip(parts, counts, strict=True), (forward, scaler), parameters, present)
            mine = fold(self._how.virtual_ranks, leaves, add)
        told = self._tell(present, counts, rng.digest(outside))
        summing = Sum(self._share, mine)
        present, total = self._agree(told, len(parameters))
        flats = summing.finish()
        for flat in flats:
            flat.div_(total)
        assert self._packing is not None
        *found, loss = self._packing.unpack(flats)
        for parameter, gradient, there in zip(parameters, found, present, strict=True):
            if there:
                _give(parameter, gradient)
        return loss.view(())

    # ----------------------------------------------------------------------------- virtual ranks, one by one

    def _weights(self, parts: Sequence[Any], weights: Sequence[float] | None) -> list[float]:
        """Return what each part counts. Raises UsageError."""
        here = self.virtual_ranks
        if not isinstance(parts, (list, tuple)) or len(parts) != len(here):
            given = f"{len(parts)} of them" if isinstance(parts, (list, tuple)) else type(parts).__name__
            raise UsageError(
                f"exact.step takes a list of parts, one for each of this rank's {len(here)} virtual ranks, "
                f"as run.batches gives it: this is {given}"
            )
        found = [float(w) for w in (map(_size, parts) if weights is None else weights)]
        if len(found) != len(here) or not all(0 <= w < float("inf") for w in found):
            raise UsageError(f"exact.step: weights must be {len(here)} numbers that are not negative")
        return found

    def _leaves(
        self,
        parts: Iterator[tuple[Any, float]],
        how: tuple[Forward, Any],
        parameters: Sequence[torch.Tensor],
        present: list[bool],
    ) -> Iterator[tuple[Node, Flats]]:
        """Give what each virtual rank has computed; note which parameters have had a gradient."""
        forward, scaler = how
        at = self._next_call()
        for number, (part, weight) in zip(self.virtual_ranks, parts, strict=True):
            rng.seed(xxhash.xxh3_64_intdigest(struct.pack("<qqqq", self._how.seed, *at, number)))
            self._looks += 1
            numbers = self._numbers() if is_due(self._looks) else {}
            versions, states = self._versions(), self._drawn()
            loss = _checked(forward(part)) * weight
            (loss if scaler is None else scaler.scale(loss)).backward()
            self._check_buffers(versions)
            self._check_drawn(states)
            self._check_numbers(numbers)
            found = [parameter.grad for parameter in parameters]
            if any(grad is not None and grad.layout != torch.strided for grad in found):
                raise UsageError("exact.step adds up no sparse gradients: take sparse=False in embeddings")
            value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32)).view(1)
            if self._packing is None:
                self._packing = Packing([*parameters, value])
            yield Node(number, number + 1), self._packing.pack([*found, value])
            for index, parameter in enumerate(parameters):
                present[index] |= found[index] is not None
                parameter.grad = None

    def _next_call(self) -> tuple[int, int]:
        """Return which call this is: the step that is done, and the number of calls since then."""
        step = self._step()
        self._call = self._call + 1 if step == self._at else 0
        self._at = step
        return step, self._call

    @contextmanager
    def _alone(self, parameters: Sequence[torch.Tensor], outside: dict[str, Any]) -> Iterator[None]:
        """Put gradients aside and back again, and random numbers back that are none of a virtual rank."""
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
            rng.restore(outside)

    # ---------------------------------------------------------------------------------------- all ranks

    def _tell(self, present: list[bool], counts: list[float], drawn: int) -> "_Told":
        """Tell all ranks where this one is, which parameters have a gradient here, and what parts count."""
        assert self._packing is not None
        place = xxhash.xxh3_64_intdigest(f"{self._at} {self._call} {self._packing.described}".encode()) >> 1
        weights = counts + [0.0] * (self._room - len(counts))
        # Sums within one tensor depend on how many share the work, on the CPU.
        threads = torch.get_num_threads() if self._packing.on_cpu else 0
        return _Told([place, drawn, threads, *_bits(present), *_longs(weights)], self._share.ranks)

    @property
    def _room(self) -> int:
        """The most virtual ranks that one real rank has."""
        return -(-self._share.virtual // self._share.ranks)

    def _agree(self, told: "_Told", count: int) -> tuple[list[bool], float]:
        """Return which of `count` parameters have a gradient on any rank, and what all parts count together.

        Raises UsageError where ranks are not alike in what they must be.
        """
        share, room, rows = self._share, self._room, told.heard()
        _check_alike(told.words, rows)
        every = [
            weight
            for rank, row in enumerate(rows)
            for weight in _doubles(row[-room:])[: len(block(rank, share.ranks, share.virtual))]
        ]
        # One after the other, whoever has them.
        if not (total := sum(every)) > 0:
            raise UsageError("exact.step: the parts of this batch count nothing together")
        masks = [row[OWN_WORDS : len(row) - room] for row in rows]
        return [any(mask[i // 63] >> i % 63 & 1 for mask in masks) for i in range(count)], total

    # --------------------------------------------------------------------------- buffers and generators

    def _versions(self) -> list[tuple[int, int]]:
        """Look at all buffers before a forward pass. Raises UsageError where it would write to some."""
        for prefix, module in self._watched:
            name, kind = shown(f"m:{prefix}"), type(module).__name__
            if isinstance(module, torch.nn.SyncBatchNorm) and module.training:
                raise UsageError(
                    f"{name} is a {kind}, whose sums over ranks have another order for any number"
                )
            if module.training and private.buffers_of(module).get("running_mean") is not None:
                raise UsageError(
                    f"{name} is a {kind} that is trained, and its running statistics depend on the order in "
                    "which parts come: an exact job needs it with track_running_stats=False or in eval mode, "
                    "or GroupNorm or LayerNorm in its place"
                )
        return [(id(one), -1 if one is None else private.version(one)) for _name, one in self._buffers()]

    def _check_buffers(self, before: list[tuple[int, int]]) -> None:
        """Raise UsageError where a virtual rank has left something in a buffer for the next one."""
        for (name, one), known in zip(self._buffers(), before, strict=True):
            if (id(one), -1 if one is None else private.version(one)) != known:
                raise UsageError(
                    f"{name} is a buffer that the forward or backward pass writes to: what it has would "
                    "depend on which virtual ranks this rank has"
                )

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for prefix, module in self._watched:
            for key, one in private.buffers_of(module).items():
                yield shown(f"b:{prefix}{key}"), one

    def _numbers(self) -> dict[str, str]:
        """Return by place the fractions that modules of the script's have as attributes, in digits."""
        return {
            f"{shown(f'm:{prefix}')}.{key}": repr(value)
            for prefix, module in self._own
            for key, value in vars(module).items()
            if type(value) is float
        }

    def _check_numbers(self, before: dict[str, str]) -> None:
        """Raise UsageError where a virtual rank has left a temperature, or an average, for the next one."""
        now = self._numbers() if before else {}
        for name in (name for name, value in now.items() if before.get(name, value) != value):
            raise UsageError(
                f"{name} is a number that the forward or backward pass changes: what it is would depend on "
                "which virtual ranks this rank has: change it between steps, outside of `run.exact.step`"
            )

    def _drawn(self) -> list[torch.Tensor]:
        """Return where the State's own random generators are."""
        return [one.get_state() for _name, one in self._generators]

    def _check_drawn(self, before: list[torch.Tensor]) -> None:
        """Raise UsageError where a virtual rank has drawn what the next one would have drawn in its place."""
        for (name, one), known in zip(self._generators, before, strict=True):
            if not torch.equal(one.get_state(), known):
                raise UsageError(
                    f"state.{name} is a random generator that the forward or backward pass draws from: what "
                    "it gives would depend on which virtual ranks this rank has: draw there without "
                    "`generator=`, from torch's own, which is seeded for each virtual rank"
                )


class _Told:
    """Words on their way to all ranks, on the CPU: no device is waited for."""

    def __init__(self, words: list[int], ranks: int) -> None:
        self.words, self._ranks = words, ranks
        self._sent = torch.tensor(words, dtype=torch.int64)
        self._found = torch.empty(ranks, len(words), dtype=torch.int64)
        self._work = gather_single(self._found.view(-1), self._sent, async_op=True) if ranks > 1 else None

    def heard(self) -> list[list[int]]:
        """Return every rank's words. Raises GenerationEnded, CollectiveFailed."""
        if self._work is None:
            return [self.words]
        # no deadline: the group has one
        self._work.wait()
        rows: list[list[int]] = self._found.tolist()
        return rows


def _check_alike(own: list[int], rows: list[list[int]]) -> None:
    """Raise UsageError where what a rank has told of itself is not what another has."""
    place, drawn, threads = own[:OWN_WORDS]
    if any(row[0] != place for row in rows):
        raise UsageError(
            "exact.step: ranks are not at the same call of the same step with the same parameters"
        )
    if any(row[1] != drawn for row in rows):
        raise UsageError(
            "exact.step: ranks have drawn different random numbers outside of it: seed and draw the same "
            "on all ranks, or draw in `forward`"
        )
    if any(row[2] != threads for row in rows):
        counts = sorted({row[2] for row in rows})
        raise UsageError(
            f"exact.step: ranks compute with {counts} threads, and the last bits of what they compute "
            "depend on it: set OMP_NUM_THREADS, the same on all nodes"
        )


def begin(how: Exact) -> None:
    """Seed the generators for what is drawn outside of virtual ranks, on all ranks alike, as a job begins."""
    # Imported later, it would begin with another state on each rank.
    with suppress(ImportError):
        import_module("numpy")
    rng.seed(xxhash.xxh3_64_intdigest(struct.pack("<q", how.seed)))


def _refuse(state: State) -> None:
    for prefix, module in tree_of(state).modules():
        if torch_ddp.of(module) is not None:
            raise UsageError(
                f"{shown(f'm:{prefix}')} is a DistributedDataParallel, which adds up gradients in an order "
                "that depends on the number of ranks: in an exact job give the State the plain module"
            )
    for name, parameter in every_parameter(state):
        if private.placed(parameter) is not None:
            raise UsageError(f"{shown(name)} is a DTensor, and exact trains models that every rank has whole")


def _is_torchs(generator: torch.Generator) -> bool:
    """Return whether it is one that torch draws from by itself, which is seeded for each virtual rank."""
    device = generator.device.type
    others = () if device == "cpu" else getattr(torch.get_device_module(device), "default_generators", ())
    return any(generator is one for one in (torch.default_generator, *others))


def _checked(loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise UsageError("exact.step: `forward` gives the mean loss over a part, a tensor of one number")
    return loss.view(())


def _size(part: Any) -> int:
    """Return the number of samples of a part. Raises UsageError where that does not show."""
    found = _first(part)
    if found is None:
        raise UsageError("exact.step: a part has no tensor that tells its number of samples: give weights")
    return found


def _first(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((size for one in values if (size := _first(one)) is not None), None)


def _give(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to a parameter's."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        with torch.no_grad():
            parameter.grad.add_(gradient)


def _bits(flags: list[bool]) -> list[int]:
    """Return flags as words of 63 bits, least significant first."""
    return [
        sum(1 << bit for bit, flag in enumerate(flags[begin : begin + 63]) if flag)
        for begin in range(0, len(flags), 63)
    ]


def _longs(numbers: list[float]) -> list[int]:
    return list(struct.unpack(f"<{len(numbers)}q", struct.pack(f"<{len(numbers)}d", *numbers)))


def _doubles(words: list[int]) -> list[float]:
    return list(struct.unpack(f"<{len(words)}d", struct.pack(f"<{len(words)}q", *words)))
