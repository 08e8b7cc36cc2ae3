"""Try whether recovery works with this torch: `python -m ckptless.pytorch_hooks.torch_private.self_test`.

What torch has inside can change without changing its name, so a look for the names (`torch_names`) shows too
little of a torch that nobody has tested. Here two processes make groups, leave them in the middle of a
collective whose peer does not come, and renew them; one of them comes back as a newcomer. DDP and FSDP2 train
before and after, and must come to the bits that one process comes to. Prints one sentence where that fails;
exit code 0 where all works. Torch is loaded once for both.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ckptless.pytorch_hooks.errors import GenerationEnded, TorchMismatch
from ckptless.pytorch_hooks.process_groups.fabric import Fabric
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from ckptless.pytorch_hooks.torch_private import fsdp as torch_fsdp
from ckptless.pytorch_hooks.torch_private.self_test_models import Kept, Wrong, kept_models

HOST = "127.0.0.1"
SIZE = 2
# What hangs is what is looked for.
DEADLINE_S = 60.0
# A survivor is out of a collective in milliseconds, and the other rank there in a second.
LEFT_S = 10.0
SENTENCE_NBYTES = 4096


def main() -> int:
    """Try it; the exit code."""
    wrong = tried()
    if wrong:
        print(wrong)
    return 1 if wrong else 0


def tried() -> str:
    """What does not work with this torch, in a sentence; "" for nothing. Forks, and leaves no process."""
    try:
        torch_private.check()
        torch_fsdp.check()
        load()
    except Exception as error:  # noqa: BLE001 - as in a rank
        return (
            str(error) if isinstance(error, TorchMismatch) else f"torch {torch.__version__} {_raised(error)}"
        )
    wrong = _processes()
    return f"torch {torch.__version__} was tried, and {wrong}" if wrong else ""


def load() -> None:
    """Load what DDP would load in each process."""
    torch.compiler.disable(_sum)  # type: ignore[no-untyped-call]


def _raised(error: BaseException) -> str:
    # The first of its sentences: torch's errors may fill a page.
    text = " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0]
    return f"this was raised: {text}"


def _processes() -> str:
    """What the two processes say is wrong, "" for nothing."""
    ports, tell = os.pipe()
    said, say = os.pipe()
    children = [_fork(rank, ports, say) for rank in range(SIZE)]
    os.close(say)
    # A server has threads: it is made after the forks.
    server: Any = torch_private.TCPStore(HOST, 0, None, True, wait_for_workers=False)
    os.write(tell, f"{server.port:>8}".encode() * SIZE)
    with os.fdopen(said, "rb", buffering=0) as file:
        # One that says what is wrong, or the end of both.
        over = select.select([file], [], [], DEADLINE_S)[0]
        text = file.read(SENTENCE_NBYTES) if over else b""
    ends = [_end(pid, now=bool(text) or not over) for pid in children]
    if not over:
        return f"groups were not made, left and renewed within {DEADLINE_S:g} s"
    if text:
        return text.decode(errors="replace").splitlines()[0]
    return "" if not any(ends) else "a process that tried it ended without a word"


def _end(pid: int, *, now: bool) -> int:
    """The status with which it has ended, or is made to."""
    if now:
        os.kill(pid, signal.SIGKILL)
    # no deadline: it is killed, or has closed the pipe with its last act
    return os.waitpid(pid, 0)[1]


def _fork(rank: int, ports: int, say: int) -> int:
    """A process for a rank; its number."""
    pid = os.fork()
    if not pid:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
        _child(rank, ports, say)
    return pid


def _child(rank: int, ports: int, say: int) -> NoReturn:
    code = 1
    try:
        torch.set_num_threads(1)
        store = torch_private.TCPStore(
            HOST, int(os.read(ports, 8)), None, False, timedelta(seconds=DEADLINE_S)
        )
        _try(rank, store)
        code = 0
    except Wrong as wrong:
        os.write(say, f"{wrong}\n".encode()[:SENTENCE_NBYTES])
    except BaseException as error:  # noqa: BLE001 - whatever it is, this torch does not do what it should
        os.write(say, f"{_raised(error)}\n".encode()[:SENTENCE_NBYTES])
    os._exit(code)


# ---------------------------------------------------------------------------------------- one rank


def _try(rank: int, store: torch_private.Store) -> None:
    _default_device()
    fabric = Fabric(timedelta(seconds=LEFT_S), host=HOST)
    fabric.open(rank=rank, world_size=SIZE, generation=1, store=store)
    _sum("made")
    _from_anyone(rank)
    models = kept_models(fabric)
    fabric.mark()
    dist.new_group()  # it is not of the next generation
    for model in models:
        model.train(rank)
    for model in models:
        model.begin(rank)
    if rank:
        models = _come_anew(rank, fabric, store)
    else:
        _survive(models, fabric, store)
    _sum("renewed")
    _another()
    for model in models:
        model.restore()
        model.train(rank)
    # Nothing may hold up the end: the process ends without taking anything down.


def _survive(models: list[Kept], fabric: Fabric, store: torch_private.Store) -> None:
    for model in models:
        model.begin_alone()
    _leave(fabric)
    store.set("left", "1")
    for model in models:
        model.give_up()  # parameters must be shards again before anything else
    fabric.configure(2, store)
    layouts = [model.layout() for model in models]
    store.set("layouts", json.dumps(layouts))
    for model, layout in zip(models, layouts, strict=True):
        model.renew(layout)


def _come_anew(rank: int, fabric: Fabric, store: torch_private.Store) -> list[Kept]:
    """As a process does that is started for another one: it builds before it has anybody."""
    fabric.in_store(lambda store: torch_private.store_get(store, "left"))
    fabric.reset()
    fabric.open(rank=rank, world_size=SIZE, generation=2, store=None)
    models = kept_models(fabric)
    fabric.mark()
    fabric.configure(2, store)
    layouts = json.loads(fabric.in_store(lambda store: torch_private.store_get(store, "layouts")))
    for model, layout in zip(models, layouts, strict=True):
        model.renew(layout)
    return models


def _leave(fabric: Fabric) -> None:
    """Be in a collective to which nobody comes, until another thread says that it is over."""
    timer = threading.Timer(0.05, fabric.abort)
    began = time.monotonic()
    timer.start()
    try:
        dist.all_reduce(torch.ones(300_000))
    except GenerationEnded:
        pass
    else:
        raise Wrong("a collective ended well to which the other rank did not come")
    if time.monotonic() - began > LEFT_S / 2:
        raise Wrong(f"a collective was not left within {LEFT_S / 2:g} s")


def _sum(done: str) -> None:
    tensor = torch.full((1000,), dist.get_rank() + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    # no deadline: the group's own
    if work is None or not work.wait() or not bool((tensor == sum(range(1, SIZE + 1))).all()):
        raise Wrong(f"a group that was just {done} gave a wrong sum")
    if not work.is_completed():
        raise Wrong("a collective that is done does not say so")


def _from_anyone(rank: int) -> None:
    tensor = torch.zeros(1)
    if rank:
        dist.send(tensor + 7.0, 0)
        return
    # no deadline: the group's own
    if dist.recv(tensor) != 1 or tensor.item() != 7.0:
        raise Wrong("a message of anyone did not come, or of nobody knows whom")


def _another() -> None:
    """A later group, which a survivor and a newcomer make by the same name."""
    counts = torch.tensor([torch_private.group_count(), -torch_private.group_count()])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    if counts.sum().item():
        raise Wrong("a survivor and a newcomer number their groups otherwise")
    dist.all_reduce(torch.ones(1), group=dist.new_group())


def _default_device() -> None:
    """A backend where no address is given, whose peer does not come in time."""
    over = threading.Event()

    def connect() -> None:
        devices = torch_private.gloo_devices(None, [])
        try:
            torch_private.gloo_backend(
                torch_private.HashStore(), 0, SIZE, timeout=timedelta(seconds=0.1), devices=devices
            )
        except RuntimeError:
            over.set()

    threading.Thread(target=connect, daemon=True).start()
    if not over.wait(LEFT_S):
        raise Wrong("Gloo waits longer for others than it is told to")


if __name__ == "__main__":
    sys.exit(main())
