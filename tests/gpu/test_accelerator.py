"""What the hooks ask of a device: which a rank takes, that it is at rest and sound, when copies are there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.devices import accelerator
from ckptless.pytorch_hooks.devices.arrival import Arrival, DeviceNumber
from ckptless.pytorch_hooks.devices.memory import MemoryWatch
from ckptless.pytorch_hooks.errors import DeviceLost
from ckptless.pytorch_hooks.process_groups import device_backends
from ckptless.pytorch_hooks.state import State, TensorSet, draft, read
from ckptless.pytorch_hooks.torch_private import calls as torch_private
from tests.gpu import kind

pytestmark = pytest.mark.skipif(kind.missing() is not None, reason=str(kind.missing()))

BUSY_S = 0.2
ROOT = Path(__file__).resolve().parents[2]


DEVICE = kind.name()


@pytest.fixture(autouse=True)
def module() -> Iterator[Any]:
    found = kind.install()
    yield found
    found.synchronize()


def test_the_backend_is_the_one_that_torch_uses_for_the_device() -> None:
    kind = device_backends.present()
    assert kind is not None
    assert (kind.device, kind.backend) == (DEVICE, {"cuda": "nccl", "simdev": "simccl"}[DEVICE])
    kind.refuse()


def test_a_backend_that_nobody_can_leave_is_refused_in_one_sentence() -> None:
    unknown = device_backends.Kind("xpu", "xccl", None)
    with pytest.raises(UsageError, match="collectives on xpu go over xccl, which ckptless cannot leave"):
        unknown.refuse()


def test_memory_of_tensors_is_not_that_of_others() -> None:
    torch.zeros(1, device=DEVICE)
    before = accelerator.other_nbytes()
    kept = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    assert before is not None
    now = accelerator.other_nbytes()
    assert now is not None
    assert abs(now - before) < len(kept) // 2


def test_memory_that_does_not_come_back_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = MemoryWatch(grown_nbytes=100)
    seen = iter([None, 50, 149, 150, 200, 40, 249, 250])
    monkeypatch.setattr(accelerator, "other_nbytes", lambda: next(seen))
    assert [watch.look() is not None for _ in range(8)] == [False] * 3 + [True] + [False] * 3 + [True]


def test_a_device_is_idle_once_all_its_streams_are(module: Any) -> None:
    other = torch.Stream(device=DEVICE)
    with module.stream(other):
        kind.busy()
        event = torch.Event(DEVICE)
        event.record(other)
    accelerator.wait_idle(10.0)
    assert event.query()


def test_a_device_that_is_not_idle_in_time_is_lost(module: Any) -> None:
    with kind.held(), pytest.raises(DeviceLost, match=r"is not idle within 0\.02 s"):
        accelerator.wait_idle(0.02)


def test_a_sound_device_is_known_by_what_it_computes() -> None:
    accelerator.prove_sound()


def test_a_device_that_computes_something_else_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "arange", lambda count, **how: torch.ones(count, **how))
    with pytest.raises(DeviceLost, match=r"does not compute: .*the sum of 0 to 262143 is 262144 there"):
        accelerator.prove_sound()


def test_copies_arrive_behind_what_was_queued_before(module: Any) -> None:
    source = torch.ones(4, device=DEVICE)
    target = torch.zeros(4).pin_memory()
    # A kernel's first launch in a process may wait for the device.
    source.mul_(1)
    with kind.held():
        source.mul_(3)
        target.copy_(source, non_blocking=True)
        arrival = Arrival([source.device])
        assert arrival.from_device
        assert not arrival.is_there
        assert target.tolist() == [0.0] * 4
    arrival.wait()
    assert target.tolist() == [3.0] * 4


def test_what_is_on_the_cpu_is_there() -> None:
    arrival = Arrival([torch.device("cpu")])
    assert (arrival.from_device, arrival.is_there) == (False, True)
    arrival.wait()


def test_a_number_is_waited_for_by_whoever_reads_it(module: Any) -> None:
    loss = torch.full((), 2.0, device=DEVICE)
    with kind.held(), kind.no_waits():
        number = DeviceNumber(loss * 4)
        found: list[float] = []
        reader = threading.Thread(target=lambda: found.append(number.read()))
        reader.start()
        assert not number.arrival.is_there
        assert found == []
    reader.join()
    assert found == [8.0]


def trained(scaler: Any) -> tuple[State, torch.nn.BatchNorm1d]:
    """A model with running statistics, after one step that a scaler has scaled."""
    norm = torch.nn.BatchNorm1d(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), norm).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.randn(8, 4, device=DEVICE)).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return State(model=model, optimizer=optimizer, scaler=scaler), norm


def test_a_record_is_drafted_without_a_wait_and_completed_as_it_was_then(module: Any) -> None:
    """Buffers of batch norm and the scaler's scale are on the device, and change right after."""
    scaler: Any = torch.amp.GradScaler(DEVICE, init_scale=64.0, growth_interval=1)
    state, norm = trained(scaler)
    tensors = TensorSet(state)
    wanted = draft(state, 1, tensors=tensors).finish()
    with kind.held(), kind.no_waits():
        made = draft(state, 1, tensors=tensors)
        assert not made.is_whole
        with torch.no_grad():
            norm.get_buffer("running_mean").mul_(0)
        scaler._scale.mul_(2)
    assert made.finish() == wanted
    assert read(wanted).step == 1


def test_a_version_is_packed_as_it_was_when_it_was_queued(module: Any) -> None:
    model = torch.nn.Linear(64, 64).to(DEVICE)
    tensors = TensorSet(State(model=model))
    wanted = torch.zeros(tensors.layout.nbytes, dtype=torch.uint8).pin_memory()
    tensors.pack(wanted)
    found = torch.zeros_like(wanted).pin_memory()
    tensors.queue(found).wait()
    with kind.held(), kind.no_waits():
        arrival = tensors.queue(found)
        with torch.no_grad():
            model.weight.zero_()
        assert not arrival.is_there
    arrival.wait()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("import_does", "error"),
    [
        ("torch.accelerator.current_accelerator()", ""),
        (
            f"torch.ones(2, device={DEVICE!r})",
            f"cannot preload 'warm': its import initialises {DEVICE}",
        ),
    ],
)
def test_what_initialises_a_device_is_not_preloaded(tmp_path: Path, import_does: str, error: str) -> None:
    """A process that is forked after that has no device, as with CUDA."""
    (tmp_path / "warm.py").write_text(
        f"from tests.gpu import kind\nkind.install()\nimport torch\n{import_does}\n"
    )
    asked = "from ckptless.daemon.agent.ranks import zygote\nprint(zygote.preload(['torch', 'warm']).error)"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = done.stdout.strip()
    assert bool(said) == bool(error), done.stderr
    assert said.startswith(error)


def test_two_ranks_on_one_device_are_refused_but_where_it_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch_private.HashStore()
    here = torch.device(DEVICE, 0)
    monkeypatch.setattr(accelerator, "identity", lambda _device: "GPU-1")
    monkeypatch.setenv("NCCL_HOSTID", "a")
    device_backends.claim(store, here, 3)
    device_backends.claim(store, here, 3)
    with pytest.raises(UsageError, match=r"^ranks 1 and 3 work on the same device, GPU-1 \("):
        device_backends.claim(store, here, 1)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    device_backends.claim(store, here, 1)
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE")
    monkeypatch.setenv("NCCL_HOSTID", "b")
    device_backends.claim(store, here, 1)
    monkeypatch.setattr(accelerator, "identity", lambda _device: None)
    device_backends.claim(store, here, 2)


def test_each_process_tells_its_device_by_a_uuid() -> None:
    found = accelerator.identity(torch.device(DEVICE, 0))
    assert found is not None
    assert found == accelerator.identity(torch.device(DEVICE, 0))
    assert accelerator.identity(torch.device("cpu")) is None
