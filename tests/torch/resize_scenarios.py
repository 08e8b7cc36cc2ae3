"""A job that goes on with another number of ranks, in the same processes and new ones. Run by `world.run`."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import version
from ckptless.pytorch_hooks.data import MappedLoader
from ckptless.pytorch_hooks.process_groups.groups import ProcessGroups
from ckptless.pytorch_hooks.running.training import Run
from ckptless.pytorch_hooks.state import State

from .stub_agent import HOST, Agent
from .world import Place

# Of which no three ranks have alike parts.
BATCH, WIDTH, SAMPLES = 10, 37, 40


class ElasticAgent(Agent):
    """Gives what any rank of any cut has committed, by way of the store."""

    agent_socket = "nobody listens"

    def __init__(self, place: Place) -> None:
        super().__init__(place, 0)
        self.told: list[str] = []
        self._part: m.Assigned | None = None
        self._shard = 0
        self._former = 0

    def assign(self, rank: int, ranks: int, cut: tuple[int, int], former: tuple[int, ...] = ()) -> m.Assigned:
        """`cut`: the one before, and the present one."""
        self._ranks, self._former = ranks, cut[0]
        generation = 1 if self._part is None else self._part.generation + 1
        step = max(self.kept, default=None)
        self._part = structs.replace(
            self.assigned(generation, rank, step), cut=cut[1], former_shards=former, sizes=(2, 3)
        )
        return self._part

    def send(self, message: Any) -> None:
        if isinstance(message, m.Twins):
            self._shard = min(message.ranks, default=0)
        if isinstance(message, m.Note):
            self.told.append(message.kind)
        super().send(message)
        if isinstance(message, m.Commit):
            part = self._part
            assert part is not None
            name = f"{part.cut}/{message.step}"
            self._place.store.set(f"record/{name}/{part.rank}", message.record)
            kept = self.kept[message.step]
            header = version.decode(kept.data, kept.at.digest)
            assert (header.shard, header.step) == (self._shard, message.step)
            self._place.store.set(f"tensors/{name}/{header.shard}", kept.data[header.header_nbytes :])

    def committed(self, step: int, ranks: int) -> None:
        """Wait until every rank has committed a step, and go on from there."""
        assert self._part is not None
        wanted = [f"record/{self._part.cut}/{step}/{rank}" for rank in range(ranks)]
        self._place.store.wait(wanted, timedelta(seconds=30))
        self.kept = {one: kept for one, kept in self.kept.items() if one <= step}

    def fetch_record(self, generation: int, rank: int) -> m.FetchedRecord:
        name = f"record/{self._former}/{self._restored(generation)}/{rank}"
        return m.FetchedRecord(record=self._place.store.get(name))

    def fetch_spans(
        self, generation: int, shard: int, layout: str, spans: tuple[tuple[int, int], ...]
    ) -> tuple[m.FetchedSpans, int]:
        assert layout
        data = self._place.store.get(f"tensors/{self._former}/{self._restored(generation)}/{shard}")
        found = b"".join(data[start : start + count] for start, count in spans)
        fd = os.memfd_create("ckptless-test")
        os.write(fd, found)
        return m.FetchedSpans(nbytes=len(found)), fd

    def _restored(self, generation: int) -> int:
        assert self._part is not None
        assert generation == self._part.generation
        assert self._part.restore_step is not None
        return self._part.restore_step


class Data(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Numbers, and what follows from them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


def digest(state: State) -> str:
    """Of parameters and moments, whole."""
    found = hashlib.sha256()
    for parameter in state.model.parameters():
        for tensor in (parameter, *state.optimizer.state.get(parameter, {}).values()):
            whole: Any = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.update(whole.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def net() -> Any:
    model: Any = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8))
    model[2].bias.requires_grad_(False)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def load(replica: int | None = None, replicas: int | None = None) -> MappedLoader:
    return MappedLoader(
        Data(), batch_size=BATCH, seed=3, shuffle=True, workers=0, replica=replica, replicas=replicas
    )


def alone(steps: int) -> list[float]:
    """The losses of one process that trains on whole batches."""
    torch.manual_seed(1)
    model, losses, loader = net(), list[float](), load(0, 1)
    optimizer = adam(model)
    for epoch in range(steps):
        loader.set_epoch(epoch)
        for _numbers, x in loader:
            loss = (model(x) - x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:steps]


class Job:
    """One process's part, from its first entry on."""

    def __init__(self, agent: ElasticAgent, kind: str) -> None:
        self.agent, self.kind = agent, kind
        self.groups = ProcessGroups(timedelta(seconds=20), host=HOST)
        self.run = Run(agent.session, self.groups)
        self.state: State | None = None
        self.model: Callable[[], object] = lambda: None
        self.told: list[Any] = []
        self.steps: dict[int, tuple[list[int], float, str]] = {}
        self.built = 0
        self.free = True

    def build(self) -> State:
        self.built += 1
        # There is no room for two.
        self.free &= self.model() is None
        model = net()
        if self.kind == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (self.run.world_size,))
            for part in (model[0], model):
                # Gloo of torch 2.8 takes a mean that is scattered for a sum.
                fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(True)
        self.model = weakref.ref(model)
        return State(model=model, optimizer=adam(model), loader=load(), lr=1.0)

    def enter(self, part: m.Assigned) -> None:
        self.groups.abort()
        # A training function's frames are gone by then.
        self.state = None
        self.run.leave()
        self.run.enter(part)
        self.run.on_recovery(lambda _run: self.told.append("recovery"))
        self.run.on_resize(self._resized)
        torch.manual_seed(1)
        self.state = self.run.keep(self.build)
        self.told.append([self.run.rank, self.run.step, digest(self.state), self.state.lr])

    def _resized(self, run: Run, old: int, new: int) -> None:
        self.told.append([old, new, run.world_size, run.step])

    def train(self, steps: int) -> None:
        state, last = self.state, self.run.step + steps
        assert state is not None
        for numbers, x in self.run.batches(state.loader, epochs=100):
            assert len(x) == self.run.local_batch(BATCH)
            loss = (state.model(x) - x).pow(2).mean() * self.run.batch_weight(BATCH)
            loss.backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            total = loss.detach() / self.run.world_size
            dist.all_reduce(total)
            self.run.commit()
            self.steps[self.run.step] = (numbers.tolist(), total.item(), digest(state))
            if self.run.step == last:
                break
        self.run._copying.wait()
        self.agent.committed(last, self.run.world_size)


def resize(place: Place, kind: str) -> dict[str, Any]:
    """Three ranks, then two, of which one has another number than before; a fault; and three again."""
    agent, me = ElasticAgent(place), place.index
    job = Job(agent, kind)
    shards = (0, 0, 0) if kind == "ddp" else (0, 1, 2)
    job.enter(agent.assign(me, 3, (0, 1)))
    job.train(3)
    place.meet("three", 3)
    first = agent.kept
    if me != 1:
        rank = 0 if me == 0 else 1
        job.enter(agent.assign(rank, 2, (1, 2), shards))
        job.train(2)
        job.enter(agent.assign(rank, 2, (1, 2)))
        job.train(1)
    else:
        job.groups.close()
        agent = ElasticAgent(place)
        agent.kept, agent.told = {6: first[3]}, []
        job, told = Job(agent, kind), job
        job.steps = told.steps
    place.meet("two", 3)
    # As long ago as the others' last one.
    agent._part = agent.assigned(3, 0, None)
    job.enter(agent.assign(me, 3, (2, 4), shards[:2]))
    job.train(3)
    place.meet("end", 3)
    job.groups.close()
    gc.collect()
    return {
        "told": job.told,
        "steps": job.steps,
        "built": job.built,
        "free": job.free,
        "notes": agent.told,
    }
