"""Legal training that few write, without a job: `unusual.py KIND...` prints a line of JSON for each.

Each is trained undisturbed, in a process that is cut off and goes back, and in a new process that goes on
from its version: forks of this one. The objects are taken, looked at and put back as `Run` does it.
"""

import copy
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Optimizers import it in their first step: here once, and not in each fork.
import torch._dynamo
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.cursor import Cursors
from ckptless.pytorch_hooks.running import standalone as plain
from ckptless.pytorch_hooks.state import State, TensorSet, draft, gradients, read, readback, restore
from ckptless.pytorch_hooks.state.objects import parts_of
from ckptless.pytorch_hooks.state.reach import Outside
from ckptless.pytorch_hooks.state.second_look import SecondLook
from ckptless.pytorch_hooks.state.twins import refuse

STEPS = 16
LATE = 6
FROM = 7  # the version that a new process goes on from
CUTS = {"clean": (), "dump": (), "survivor": (3, FROM, 11), "new": (11,)}
DEADLINE_S = 120.0


class Cut(BaseException):
    """A fault, in the middle of a step."""


class Kind:
    """DDP, AdamW, a shuffled loader; others are different in one way."""

    step = 0

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def wrap(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def loader(self) -> Any:
        data = torch.randn(20, 8, generator=torch.Generator().manual_seed(5))
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(data),
            batch_size=4,
            shuffle=self.sampler is None,
            sampler=self.sampler,
        )

    sampler: Any = None

    def more(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def build(self) -> State:
        torch.manual_seed(1)
        model = self.wrap(self.net())
        optimizer = self.optimizer(model)
        torch.manual_seed(100)
        return State(model=model, optimizer=optimizer, loader=self.loader(), **self.more(optimizer))

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        return (s.model(x + 0.1 * torch.randn_like(x)) - x).square().mean()

    def update(self, s: Any) -> None:
        s.optimizer.step()
        s.optimizer.zero_grad()

    def train(self, s: Any, x: torch.Tensor) -> Any:
        loss = self.loss(s, x)
        loss.backward()
        self.update(s)
        return loss


KINDS: dict[str, Callable[[], Kind]] = {}


def kind(cls: type[Kind]) -> type[Kind]:
    KINDS[cls.__name__] = cls
    return cls


class Net(nn.Module):
    """With attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.stage = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)) * (1 + self.stage))  # type: ignore[no-any-return]


# ---- models


@kind
class Tied(Kind):
    def net(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        net[2].weight = net[0].weight
        return net


@kind
class Composed(Kind):
    """`replicate` makes its DDP in the first forward pass; torchtitan 0.2 has it so."""

    def wrap(self, net: nn.Module) -> nn.Module:
        return replicate(net)


@kind
class Viewed(Kind):
    """Two parameters on one memory."""

    def net(self) -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        weight: Any = net[0].weight
        net[2].weight = nn.Parameter(weight.data.t())
        return net


@kind
class Parametrized(Kind):
    def net(self) -> nn.Module:
        first = parametrizations.weight_norm(nn.Linear(8, 16))
        return nn.Sequential(first, nn.ReLU(), parametrizations.spectral_norm(nn.Linear(16, 8)))


@kind
class Odd(Kind):
    """Dtypes, strides and sizes that few have."""

    class Net(Net):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = self.a.bfloat16(), self.b.double()
            self.a.weight = nn.Parameter(self.a.weight.t().contiguous().t())
            self.scalar, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 3))
            self.z = nn.Parameter(torch.ones(8, dtype=torch.complex64))
            self.f8: torch.Tensor
            self.register_buffer("f8", torch.ones(5).to(torch.float8_e4m3fn))
            self.wide: torch.Tensor
            self.register_buffer("wide", torch.zeros(1).expand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.f8.copy_((self.f8.float() * 0.9 + x.abs().mean()).to(torch.float8_e4m3fn))
            self.wide = self.wide + 1
            y = self.b(torch.relu(self.a(x.bfloat16())).double()).float() * self.scalar + self.empty.sum()
            return torch.view_as_real(y * self.z).sum(-1) + self.f8.float().mean() + 0.01 * self.wide

    def net(self) -> nn.Module:
        return self.Net()

    def wrap(self, net: nn.Module) -> nn.Module:
        return net


@kind
class Modes(Kind):
    """Parts of the model are trained and evaluated in turn."""

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.4), nn.Linear(16, 8))

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        s.model.module[1].train(self.step % 3 == 0)
        s.model.module[2].train(self.step < LATE)
        return super().loss(s, x)


@kind
class Remade(Kind):
    """Each update makes parameters anew; there is no optimizer."""

    def build(self) -> State:
        torch.manual_seed(1)
        return State(model=self.net(), loader=self.loader())

    def update(self, s: Any) -> None:
        for layer in (s.model[0], s.model[2]):
            for key, p in list(layer.named_parameters()):
                setattr(layer, key, nn.Parameter(p.detach() - 0.05 * p.grad))


@kind
class Inference(Kind):
    def net(self) -> nn.Module:
        net = Net()
        with torch.inference_mode():
            net.register_buffer("cache", torch.zeros(8))
        return net

    def wrap(self, net: nn.Module) -> nn.Module:
        return net


# ---- attributes of modules


@kind
class Late(Kind):
    """Plain attributes that change for the first time in a step that is cut off, and after it."""

    def net(self) -> nn.Module:
        net = Net()
        return nn.Sequential(net, nn.Dropout(0.1), nn.BatchNorm1d(8))

    def update(self, s: Any) -> None:
        super().update(s)
        if self.step >= LATE + 1:
            net = s.model.module
            net[0].stage, net[1].p, net[2].momentum = 0.1 * self.step, 0.3, 0.5


@kind
class LargeAttribute(Kind):
    def net(self) -> nn.Module:
        net: Any = Net()
        net.memory = torch.zeros(4096, 8)
        return net  # type: ignore[no-any-return]

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        net = s.model.module
        net.memory = net.memory * 0.9 + x.mean()
        return super().loss(s, x)


class Queue:
    """No module."""

    def __init__(self) -> None:
        self.rows, self.at = torch.zeros(6, 8), 0

    def add(self, x: torch.Tensor) -> None:
        self.rows[self.at % 6] = x
        self.at += 1


@kind
class HeldObject(Kind):
    held: Callable[[], Any] = Queue

    def net(self) -> nn.Module:
        net: Any = Net()
        net.held = [self.held()]
        return net  # type: ignore[no-any-return]

    def use(self, held: Any, x: torch.Tensor) -> None:
        held.add(x[0])

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        self.use(s.model.module.held[0], x)
        return super().loss(s, x)


@kind
class HeldModule(HeldObject):
    """In a plain list, where no module sees it."""

    held = staticmethod(lambda: nn.BatchNorm1d(8))

    def use(self, held: Any, x: torch.Tensor) -> None:
        held(x)


@kind
class HeldGenerator(HeldObject):
    held = staticmethod(lambda: torch.Generator().manual_seed(4))

    def use(self, held: Any, x: torch.Tensor) -> None:
        x.add_(torch.randn(x.shape, generator=held))


# ---- optimizers and what steps beside them


@kind
class Lbfgs(Kind):
    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")

    def train(self, s: Any, x: torch.Tensor) -> Any:
        def closure() -> Any:
            s.optimizer.zero_grad()
            loss = (s.model(x) - x).square().mean()
            loss.backward()
            return loss

        loss = s.optimizer.step(closure)
        s.optimizer.zero_grad()
        return loss


@kind
class InBackward(Kind):
    """An optimizer for each parameter, which steps as soon as its gradient is there."""

    def wrap(self, net: nn.Module) -> nn.Module:
        return net

    def optimizer(self, model: nn.Module) -> Any:
        made = {}
        for name, p in model.named_parameters():
            one = made[name.replace(".", "_")] = torch.optim.AdamW([p], lr=0.01)

            def stepped(_p: Any, one: Any = one) -> None:
                one.step()
                one.zero_grad()

            p.register_post_accumulate_grad_hook(stepped)  # type: ignore[no-untyped-call]
        return made

    def update(self, s: Any) -> None:
        """Done."""


@kind
class Infinite(Kind):
    """A scaler that leaves updates out, that of the cut step among them."""

    def more(self, optimizer: Any) -> dict[str, Any]:
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)}

    def train(self, s: Any, x: torch.Tensor) -> Any:
        loss = self.loss(s, x) * (float("inf") if self.step in (3, 4, FROM) else 1.0)
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.optimizer.zero_grad()
        return self.loss(s, x) * s.scaler.get_scale()


@kind
class DictParameters(Kind):
    """Parameters in a dict of the State, which an optimizer has, too."""

    def build(self) -> State:
        torch.manual_seed(1)
        self.model = self.net()
        params = {k: v.detach().clone().requires_grad_() for k, v in self.model.named_parameters()}
        optimizer = torch.optim.AdamW(params.values(), lr=0.01)
        return State(params=params, optimizer=optimizer, loader=self.loader())

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        return (torch.func.functional_call(self.model, s.params, (x,)) - x).square().mean()


@kind
class Leftover(Kind):
    """As a GAN's: a loss leaves gradients in what it does not train."""

    def more(self, optimizer: Any) -> dict[str, Any]:
        return {"other": nn.Linear(8, 8)}

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        return super().loss(s, x) + s.other(x).mean()


@kind
class PowerSgd(Kind):
    def wrap(self, net: nn.Module) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model = DistributedDataParallel(net)
        kept = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(kept, powerSGD_hook.powerSGD_hook)
        return model


class Counts:
    """A schedule that is an object: LambdaLR saves it."""

    n = 0

    def __call__(self, _epoch: int) -> float:
        self.n += 1
        return 0.9**self.n


@kind
class ObjectSchedule(Kind):
    def more(self, optimizer: Any) -> dict[str, Any]:
        return {"scheduler": LambdaLR(optimizer, Counts())}

    def update(self, s: Any) -> None:
        super().update(s)
        s.scheduler.step()


@kind
class ClosureSchedule(ObjectSchedule):
    """A schedule that counts where nobody can save it."""

    def more(self, optimizer: Any) -> dict[str, Any]:
        counts = Counts()
        return {"scheduler": LambdaLR(optimizer, lambda epoch: counts(epoch))}


# ---- objects and data of the script's own


class Slotted:
    """Its state_dict does not tell of all."""

    __slots__ = ("n", "t")

    def __init__(self) -> None:
        self.t, self.n = torch.zeros(8), 0

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]


@kind
class Slots(Kind):
    def more(self, optimizer: Any) -> dict[str, Any]:
        return {"own": Slotted()}

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        s.own.t += x.mean(0)
        s.own.n += 1
        return super().loss(s, x + s.own.t * s.own.n)


@kind
class Replay(Kind):
    """A buffer and its generator, by state_dict; an array, a deque."""

    class Buffer:
        def __init__(self) -> None:
            self.items: list[torch.Tensor] = []
            self.random = random.Random(0)

        def state_dict(self) -> dict[str, Any]:
            return {"items": self.items, "random": self.random.getstate()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.items = state["items"]
            self.random.setstate(state["random"])

    def more(self, optimizer: Any) -> dict[str, Any]:
        return {"buffer": self.Buffer(), "seen": np.zeros(3)}

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        s.buffer.items.append(x.clone())
        s.seen[self.step % 3] += 1
        return super().loss(s, s.buffer.random.choice(s.buffer.items) + float(s.seen[0]))


@kind
class LargeList(Kind):
    """Too long to be looked through at each commit."""

    class Held:
        def __init__(self) -> None:
            self.items = [0.0] * 20_000

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """There is nothing."""

    def more(self, optimizer: Any) -> dict[str, Any]:
        return {"own": self.Held()}

    def update(self, s: Any) -> None:
        super().update(s)
        s.own.items[self.step] = 1.0


COUNTER = [0]


@kind
class Global(Kind):
    def loss(self, s: Any, x: torch.Tensor) -> Any:
        COUNTER[0] += 1
        return super().loss(s, x) * (1 + 0.01 * COUNTER[0])


# ---- data


class Shuffled:
    """A sampler that goes on from its last order."""

    def __init__(self) -> None:
        self.order, self.random = list(range(20)), random.Random(1)

    def __iter__(self) -> Iterator[int]:
        self.random.shuffle(self.order)
        return iter(list(self.order))

    def __len__(self) -> int:
        return 20


@kind
class OwnSampler(Kind):
    def build(self) -> State:
        self.sampler = Shuffled()
        return super().build()


@kind
class SharedWeights(Kind):
    """A sampler whose weights are in the State: the very list, before and after a fault."""

    class Weighted:
        def __init__(self) -> None:
            self.weights = [1.0] * 20

        def __iter__(self) -> Iterator[int]:
            return iter(sorted(range(20), key=lambda i: (self.weights[i], i)))

        def __len__(self) -> int:
            return 20

    def build(self) -> State:
        self.sampler = self.Weighted()
        return super().build()

    def more(self, optimizer: Any) -> dict[str, Any]:
        return {"weights": self.sampler.weights}

    def update(self, s: Any) -> None:
        super().update(s)
        if self.step % 5 == 4:
            s.weights[self.step] += 1.0
        assert s.weights is self.sampler.weights


class Carrying(nn.Module):
    """Its hidden state is detached only where it is used again."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.cell, self.out, self.times = nn.GRUCell(8, 16), nn.Linear(16, 8), times
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = None if self.hidden is None else self.hidden.detach()[:, :16]
        self.hidden = self.cell(x, before).repeat(1, self.times)
        return self.out(self.hidden[:, :16])  # type: ignore[no-any-return]


@kind
class Recurrent(Kind):
    def net(self) -> nn.Module:
        return Carrying(1)


@kind
class WideRecurrent(Kind):
    def net(self) -> nn.Module:
        return Carrying(1000)


class Counting(nn.Module):
    """Counts in its class, and in a default of its method."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, *, seen: list[int] = [0]) -> torch.Tensor:  # noqa: B006  # it is what is tried
        Counting.calls += 1
        seen[0] += 1
        return self.layer(x) * (1 + 0.01 * Counting.calls + 0.01 * seen[0])  # type: ignore[no-any-return]


@kind
class InClass(Kind):
    def net(self) -> nn.Module:
        return Counting()


@kind
class SparseDdp(Kind):
    def net(self) -> nn.Module:
        return nn.Embedding(16, 8, sparse=True)

    def optimizer(self, model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, s: Any, x: torch.Tensor) -> Any:
        return s.model((x[:, 0].abs() * 7).long() % 16).square().mean()


# ------------------------------------------------------------------------------------ how they are run


class Life:
    """What `Run` does with one process's objects, in its order."""

    def __init__(self, one: Kind, cuts: tuple[int, ...], version: Any) -> None:
        self.one, self.cuts, self.version = one, set(cuts), version
        self.versions: dict[int, Any] = {}
        self.told: list[str] = []
        self.losses: dict[int, str] = {}
        self.state: Any = None
        self.cursors = Cursors(shared=lambda: parts_of(self.state).own, tell=self.told.append)
        self.step = 0

    def keep(self) -> None:
        fresh = self.state is None
        if fresh:
            self.state = self.one.build()
            refuse(self.state)
            self.tensors = TensorSet(self.state)
            self.look = SecondLook(self.state, self.tensors.names)
            self.outside = Outside(type(self.one).train, self.told.append)
            gradients.watch_steps(self.state)
        if self.version is None:
            self.put(0)
            return
        self.tensors.check_built()
        self.look.at_modules()
        self.step, record, payload = self.version
        view = read(record)
        self.tensors.unpack(payload, view.layout)
        restore(record, self.state)
        self.cursors.restore(view.cursor)

    def put(self, step: int) -> None:
        self.tensors.check_built()
        self.tensors.check_shared()
        gradients.check_used(self.state)
        self.look.look(self.tensors)
        self.outside.look(self.look)
        payload = aligned(self.tensors.layout.nbytes)
        self.tensors.pack(payload)
        record = draft(self.state, step, self.cursors.committed(), {}, self.tensors).finish()
        if step == 1:
            readback.check_written(self.state, record, payload)
        self.versions[step], self.step = (step, record, payload), step

    def train(self) -> None:
        self.keep()
        for (x,) in self.cursors.batches(self.state.loader, 1000, ""):
            if self.step >= STEPS:
                return
            self.one.step = self.step
            loss = self.one.train(self.state, x.clone())
            if self.step in self.cuts:
                self.cuts.discard(self.step)
                self.version = self.versions.get(self.step, self.version)
                raise Cut
            line = f"{loss.item().hex()} {x.sum().item().hex()}"
            assert self.losses.setdefault(self.step + 1, line) == line, f"step {self.step + 1} is another one"
            self.put(self.step + 1)


def aligned(nbytes: int) -> torch.Tensor:
    memory = torch.zeros(nbytes + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    return memory[start : start + nbytes]


def live(name: str, mode: str, folder: Path) -> dict[str, Any]:
    """One process's life; `folder` is where a version is left and taken from."""
    register_optimizer_step_post_hook(gradients.mark_used)
    plain._init_process_group()
    version = None
    if mode == "new":
        step, record, content = torch.load(folder / "version", weights_only=True)
        payload = aligned(len(content))
        version = step, bytes(record.tolist()), payload.copy_(content)
    life = Life(KINDS[name](), CUTS[mode], version)
    while True:
        try:
            life.train()
            break
        except Cut:
            continue
    if mode == "dump":
        step, record, payload = life.versions[FROM]
        kept = step, torch.frombuffer(bytearray(record), dtype=torch.uint8), copy.deepcopy(payload)
        torch.save(kept, folder / "version")
    return {"losses": life.losses, "told": life.told}


def forked(name: str, mode: str, folder: Path) -> dict[str, Any]:
    out = folder / mode
    child = os.fork()
    if not child:
        try:
            found = live(name, mode, folder)
        except UsageError as error:
            found = {"refused": str(error)}
        except BaseException:  # noqa: BLE001  # the parent says what it was
            found = {"failed": traceback.format_exc()}
        out.write_text(json.dumps(found))
        os._exit(0)
    limit = time.monotonic() + DEADLINE_S
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > limit:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return {"failed": f"not within {DEADLINE_S} s"}
        time.sleep(0.01)
    return json.loads(out.read_text()) if out.exists() else {"failed": "it died"}


def verdict(name: str) -> dict[str, str]:
    """Return what became of it: "clean", "survivor" and "new", each "equal", "refused: ..." or "WRONG..."."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="ckptless-unusual-") as scratch:
        clean = forked(name, "clean", Path(scratch))
        if "losses" not in clean:
            return {"clean": word(clean, clean)}
        found["told"] = "; ".join(clean["told"])
        found["survivor"] = word(forked(name, "survivor", Path(scratch)), clean)
        forked(name, "dump", Path(scratch))
        found["new"] = word(forked(name, "new", Path(scratch)), clean)
    return found


def word(found: dict[str, Any], clean: dict[str, Any]) -> str:
    if "losses" not in found:
        return f"refused: {found['refused']}" if "refused" in found else f"FAILED: {found['failed']}"
    wrong = [step for step, line in found["losses"].items() if clean["losses"][step] != line]
    whole = str(STEPS) in found["losses"]
    return "equal" if whole and not wrong else f"WRONG from step {wrong[:1]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[1:] or KINDS:
        print(json.dumps([each, verdict(each)]), flush=True)
