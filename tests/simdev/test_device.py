"""The simulated device: it refuses, reorders and fails as real ones do, and computes what a CPU does."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.simdev import api as simdev
from tests.simdev.device import install, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")

ROOT = Path(__file__).parents[2]
BEGIN = "from tests.simdev.device import install; install(); import torch\n"
BUSY = 0.3  # seconds that a stream is kept busy


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    install()


@pytest.fixture(autouse=True)
def idle() -> Iterator[None]:
    yield
    simdev.set_sync_debug_mode("default")
    simdev.synchronize()


class Done(NamedTuple):
    """What became of a child process."""

    returncode: int | None
    stdout: str
    stderr: str


def _run_child(code: str, environment: dict[str, str], folder: str) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    install()
    exec(compile(textwrap.dedent(code), "<child>", "exec"), {"torch": torch})
    sys.stdout.flush()


def child(code: str, **environment: str) -> Done:
    """Run code in a process of its own that has torch, forked from one that never used the device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "tests.simdev.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_run_child, args=(code, environment, folder))
        process.start()
        process.join(60)
        texts = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    return Done(process.exitcode, *texts)


def waits(act: Callable[[], object]) -> int:
    before = simdev.synchronizations()
    act()
    return simdev.synchronizations() - before


def test_torch_knows_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("simdev")
    tensor = torch.arange(6.0, device="simdev").reshape(2, 3).t()
    assert getattr(tensor, "is_simdev")  # noqa: B009 - mypy does not know it
    assert tensor.device == torch.device("simdev", 0)
    assert tensor.stride() == (1, 3)
    assert torch.equal((tensor @ tensor.t()).cpu(), (tensor.cpu() @ tensor.cpu().t()))
    assert "device='simdev:0'" in repr(tensor)
    assert torch.equal(torch.nn.Parameter(torch.ones(3)).to("simdev").cpu(), torch.ones(3))


def test_a_process_that_did_not_use_it_has_no_threads_of_it() -> None:
    done = child("""
        import os
        def ours():
            names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
            return [name for name in names if name.startswith("simdev-")]
        assert not torch.simdev.is_initialized() and not ours()
        torch.manual_seed(1); torch.zeros(1).is_pinned(); torch.simdev.is_available()
        assert not torch.simdev.is_initialized() and not ours()
        torch.ones(1, device="simdev")
        assert torch.simdev.is_initialized() and ours()
    """)
    assert done.returncode == 0, done.stderr


# ---- memory


def test_the_host_may_not_touch_it() -> None:
    done = child("""
        import ctypes
        tensor = torch.ones(4, device="simdev"); torch.simdev.synchronize()
        ctypes.c_char.from_address(tensor.data_ptr()).value
    """)
    assert done.returncode == -signal.SIGSEGV


def test_too_much_is_refused_and_all_comes_back() -> None:
    done = child(
        """
        keep = [torch.empty(1 << 20, dtype=torch.uint8, device="simdev") for _ in range(3)]
        try:
            torch.empty(2 << 20, dtype=torch.uint8, device="simdev")
        except torch.OutOfMemoryError as error:
            assert "simdev out of memory" in str(error), error
        else:
            raise AssertionError
        torch.simdev._spin(0.2)
        keep.clear()  # waits for the stream only; an allocation waits for that
        assert torch.simdev.memory_allocated() == 0
        torch.empty(4 << 20, dtype=torch.uint8, device="simdev")
        torch.simdev.synchronize()
        assert torch.simdev.mem_get_info() == (4 << 20, 4 << 20)
        assert torch.simdev.synchronizations() == 1
        """,
        SIMDEV_MEMORY=str(4 << 20),
    )
    assert done.returncode == 0, done.stderr


def test_processes_share_the_memory_and_the_dead_keep_theirs_for_a_while(tmp_path: Path) -> None:
    environment = {"SIMDEV_MEMORY": str(8 << 20), "SIMDEV_LEDGER": str(tmp_path), "SIMDEV_RECLAIM_S": "1"}
    holder = subprocess.Popen(
        [sys.executable, "-c", BEGIN + HOLD],
        cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert int((tmp_path / str(holder.pid)).read_text().split()[0]) == 6 << 20
        done = child(
            f"""
            import os, time
            def enough():
                try:
                    torch.empty(4 << 20, dtype=torch.uint8, device="simdev")
                except torch.OutOfMemoryError:
                    return False
                return True
            assert torch.simdev.mem_get_info() == (2 << 20, 8 << 20)
            assert not enough()
            os.kill({holder.pid}, 9)
            while open("/proc/{holder.pid}/stat").read().split()[2] != "Z":
                time.sleep(0.01)
            assert not enough()  # the driver takes its time
            died = time.monotonic()
            while not enough():
                time.sleep(0.02)
            assert time.monotonic() - died > 0.8
            """,
            **environment,
        )
    assert done.returncode == 0, done.stderr


HOLD = """
hold = torch.empty(6 << 20, dtype=torch.uint8, device="simdev")
print("held", flush=True)
input()
"""

REUSE = """
    freed = torch.ones(1 << 16, device="simdev")
    freed + 1  # the first launch takes long
    torch.simdev.synchronize()
    torch.simdev._spin(0.3)
    result = freed + 1
    del freed
    with torch.simdev.stream(torch.simdev.Stream()):
        others = [torch.full((1 << 16,), 7.0, device="simdev") for _ in range(4)]
    torch.simdev.synchronize()
    print(result.unique().tolist())
"""


def test_memory_is_not_given_away_before_the_stream_is_through_with_it() -> None:
    assert child(REUSE).stdout == "[2.0]\n"


def test_the_plant_gives_memory_away_early() -> None:
    assert child(REUSE, SIMDEV_PLANT="early-free").stdout == "[8.0]\n"


@pytest.mark.parametrize("recorded", [True, False])
def test_use_on_another_stream_has_to_be_recorded(recorded: bool) -> None:
    side = simdev.Stream()
    tensor = torch.ones(1 << 16, device="simdev")
    side.wait_stream(simdev.current_stream())
    with simdev.stream(side):
        simdev._spin(BUSY)
        result = tensor + 1
    if recorded:
        tensor.record_stream(side)
    del tensor
    simdev.current_stream().synchronize()
    others = [torch.full((1 << 16,), 7.0, device="simdev") for _ in range(4)]
    side.synchronize()
    assert sorted(set(result.tolist())) == [2.0 if recorded else 8.0]
    del others


# ---- streams


def test_the_host_runs_ahead() -> None:
    begin = time.monotonic()
    simdev._spin(BUSY)
    tensor = torch.ones(4, device="simdev") * 3
    event = torch.Event("simdev")
    event.record()
    assert time.monotonic() - begin < BUSY
    assert not event.query()
    assert not simdev.current_stream().query()
    event.synchronize()
    assert time.monotonic() - begin >= BUSY
    assert event.query()
    assert tensor.tolist() == [3.0] * 4


@pytest.mark.parametrize("waits_for_it", [True, False])
def test_only_an_event_orders_two_streams(waits_for_it: bool) -> None:
    tensor = torch.zeros(4, device="simdev")
    simdev.synchronize()
    writer, reader = simdev.Stream(), simdev.Stream()
    with simdev.stream(writer):
        simdev._spin(BUSY)
        tensor.fill_(5)
        written = writer.record_event()
    with simdev.stream(reader):
        if waits_for_it:
            reader.wait_event(written)
        seen = tensor.clone()
    simdev.synchronize()
    assert seen.tolist() == [5.0 if waits_for_it else 0.0] * 4


def test_each_thread_has_its_own_current_stream() -> None:
    seen = []
    with simdev.stream(simdev.Stream()):
        assert simdev.current_stream() != simdev.default_stream()
        thread = threading.Thread(target=lambda: seen.append(simdev.current_stream()))
        thread.start()
        thread.join()
    assert seen == [simdev.default_stream()] == [simdev.current_stream()]


def test_time_between_events() -> None:
    first, last = (simdev.Event(enable_timing=True) for _ in range(2))
    first.record()
    simdev._spin(0.05)
    last.record()
    last.synchronize()
    assert 50 <= first.elapsed_time(last) < 1000


def test_a_future_carries_its_streams_order() -> None:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[torch.device("simdev:0")])
    with simdev.stream(simdev.Stream()):
        simdev._spin(BUSY)
        future.set_result(torch.ones(4, device="simdev") * 2)
    doubled = future.then(lambda done: done.value() * 2)
    assert waits(lambda: doubled.wait()) == 0
    assert (doubled.value() + 1).tolist() == [5.0] * 4


# ---- copies and waits


def test_copies_wait_or_do_not() -> None:
    source = torch.arange(8.0, device="simdev")
    pinned, pageable = torch.zeros(8).pin_memory(), torch.zeros(8)
    assert waits(lambda: pageable.copy_(source, non_blocking=True)) == 1
    assert pageable.tolist() == list(range(8))
    simdev._spin(BUSY)
    assert waits(lambda: pinned.copy_(source, non_blocking=True)) == 0
    assert pinned.tolist() == [0.0] * 8
    simdev.synchronize()
    assert pinned.tolist() == list(range(8))


def test_pinned_memory_is_read_when_the_stream_gets_there() -> None:
    for host, expected in ((torch.zeros(4).pin_memory(), 9.0), (torch.zeros(4), 0.0)):
        simdev._spin(BUSY)
        copy = host.to("simdev", non_blocking=True)
        host.fill_(9)
        assert copy.tolist() == [expected] * 4


def test_a_queued_copy_keeps_pinned_memory() -> None:
    simdev._spin(BUSY)
    copies = [
        torch.full((1 << 16,), float(i), pin_memory=True).to("simdev", non_blocking=True) for i in range(4)
    ]
    again = [torch.full((1 << 16,), 99.0, pin_memory=True) for _ in range(4)]
    assert [list(set(copy.tolist())) for copy in copies] == [[0.0], [1.0], [2.0], [3.0]]
    del again


def test_what_is_pinned() -> None:
    host = torch.zeros(16)
    assert not host.is_pinned()
    assert host.pin_memory().is_pinned()
    assert host.pin_memory()[3:5].is_pinned()
    simdev.host_register(host.data_ptr(), host.nbytes)
    assert host.is_pinned()
    assert host[7:].is_pinned()
    with pytest.raises(RuntimeError, match="pinned already"):
        simdev.host_register(host[4:].data_ptr(), 4)
    simdev.host_unregister(host.data_ptr())
    assert not host.is_pinned()
    with pytest.raises(RuntimeError, match="not registered"):
        simdev.host_unregister(host.data_ptr())


def test_waits_are_counted_and_can_be_refused() -> None:
    tensor = torch.tensor([1.0, 0.0, 2.0], device="simdev")
    pageable = torch.zeros(3)
    acts: list[Callable[[], object]] = [
        tensor[0].item,
        tensor.cpu,
        tensor.nonzero,
        lambda: tensor[tensor > 0],
        lambda: pageable.copy_(tensor),
        simdev.synchronize,
        simdev.current_stream().synchronize,
        torch.accelerator.synchronize,
    ]
    for act in acts:
        simdev.set_sync_debug_mode("default")
        assert waits(act) == 1
        simdev.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="sync-debug mode"):
            act()
    assert waits(lambda: torch.ones(3).to("simdev").add_(tensor).mul_(2)) == 0


# ---- operations


@pytest.mark.parametrize(
    "act",
    [
        lambda x: torch.cat([x, x + 1]).transpose(0, 1).contiguous(),
        lambda x: torch.sort(x, dim=0),
        lambda x: torch.unique(x.round(), return_counts=True),
        lambda x: x.unfold(0, 2, 1).sum(-1),
        lambda x: torch.where(x > 0, x, 0.0).to(torch.bfloat16),
        lambda x: x.double().topk(2),
        lambda x: F.conv1d(x[None], x[:2, None].repeat(1, x.shape[0], 1)[..., :3]),
        lambda x: torch.linalg.vector_norm(x, 2, dim=0),
        lambda x: torch.stft(x.flatten(), 8, window=torch.ones(8, device=x.device), return_complex=True).real,
        lambda x: x.clone().index_put_((torch.tensor([0, 1], device=x.device),), x[:2] * 2, accumulate=True),
        lambda x: torch.empty(0, device=x.device).resize_(3, 2).copy_(x[:3, :2]),
        lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
        lambda x: torch.masked_select(x, x > 0, out=torch.empty(0, device=x.device)),
        lambda x: torch._foreach_norm([x, x * 2]),
        lambda x: list(torch.view_as_complex(x[:, :2].contiguous()).abs().chunk(2)),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True).round(decimals=4),
        lambda x: (torch.fft.fft(x).conj() + 1).imag,
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5, device=x.device)),
    ],
)  # fmt: skip
def test_operations_give_what_the_cpu_gives(act: Callable[[torch.Tensor], object]) -> None:
    values = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))

    def flat(result: object) -> list[torch.Tensor]:
        return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]

    for ours, cpus in zip(flat(act(values.to("simdev"))), flat(act(values)), strict=True):
        assert ours.device.type == "simdev"
        assert ours.stride() == cpus.stride()
        assert ours.dtype == cpus.dtype
        assert torch.equal(ours.cpu(), cpus)


def test_a_wrong_shape_is_the_callers_error_and_does_not_stick() -> None:
    with pytest.raises(RuntimeError, match="size of tensor a"):
        torch.ones(3, device="simdev") + torch.ones(4, device="simdev")
    assert torch.ones(3, device="simdev").sum().item() == 3


def test_autocast_chooses_as_for_other_devices() -> None:
    x = torch.ones(2, 4, device="simdev")
    with torch.autocast("simdev", dtype=torch.bfloat16):
        product = F.linear(x, x)
        assert product.dtype == torch.bfloat16
        assert F.softmax(product, -1).dtype == torch.float32


def test_storage_is_saved_and_loaded(tmp_path: Path) -> None:
    tensor = torch.arange(10.0, device="simdev")
    torch.save({"whole": tensor, "part": tensor[3:5]}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file")
    assert loaded["part"].is_simdev
    assert loaded["part"].tolist() == [3.0, 4.0]
    assert torch.load(tmp_path / "file", map_location="cpu")["whole"].tolist() == tensor.tolist()


class Model(nn.Module):
    """A transformer's parts: embedding, attention by the plain formula, norms, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return self.head(x)  # type: ignore[no-any-return]


def train(where: str, make: Callable[..., torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Train a few steps; return losses, parameters and the optimizer's state."""
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(0, 50, (4, 4, 17)).to(where)
    model.to(where)
    optimizer = make(model.parameters())
    losses = []
    if where == "simdev":
        simdev.set_sync_debug_mode("error")
    for batch in tokens:
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    simdev.set_sync_debug_mode("default")
    state = [
        value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)
    ]
    return [tensor.detach().cpu() for tensor in [*losses, *model.parameters(), *state]]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters),
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
    ],
    ids=["sgd", "adam", "adamw-foreach", "adamw", "adamw-fused"],
)
def test_training_is_the_cpus_bit_for_bit_and_never_waits(make: Callable[..., torch.optim.Optimizer]) -> None:
    for ours, cpus in zip(train("simdev", make), train("cpu", make), strict=True):
        assert torch.equal(ours, cpus)


def test_backward_runs_on_the_streams_of_forward() -> None:
    weight = torch.ones(4, device="simdev", requires_grad=True)
    with simdev.stream(simdev.Stream()):
        simdev._spin(BUSY)
        loss = (weight * torch.full((4,), 3.0, device="simdev")).sum()
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 4


def test_the_grad_scaler_scales() -> None:
    scaler = torch.amp.GradScaler("simdev", init_scale=8.0)
    weight = torch.ones(2, device="simdev", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for factor, expected in ((0.5, 0.5), (float("inf"), 0.5)):
        optimizer.zero_grad()
        torch.autograd.backward(scaler.scale((weight * factor).sum()))
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == [expected] * 2
    assert scaler.get_scale() == 4.0


# ---- random numbers


def test_random_numbers_follow_the_devices_generator() -> None:
    def draw() -> list[torch.Tensor]:
        x = torch.ones(64, device="simdev")
        drawn = [
            torch.rand(4, device="simdev"),
            torch.randn(4, device="simdev"),
            F.dropout(x),
            torch.bernoulli(x / 2),
        ]
        return [tensor.cpu() for tensor in [*drawn, torch.randperm(9, device="simdev")]]

    def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, left, right))

    torch.manual_seed(7)
    host, state = torch.get_rng_state(), simdev.get_rng_state()
    first, second = draw(), draw()
    assert not same(first, second)
    assert torch.equal(torch.get_rng_state(), host)
    assert simdev.initial_seed() == 7
    torch.manual_seed(7)
    assert same(draw(), first)
    assert same(draw(), second)
    simdev.set_rng_state(state)
    assert same(draw(), first)
    with torch.random.fork_rng(devices=[0], device_type="simdev"):
        draw()
    assert same(draw(), second)


def test_a_generator_of_ones_own() -> None:
    generator = torch.Generator("simdev").manual_seed(1)
    state = generator.get_state()
    first = torch.rand(4, device="simdev", generator=generator)
    generator.set_state(state)
    assert torch.equal(first.cpu(), torch.rand(4, device="simdev", generator=generator).cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device="simdev", generator=torch.Generator())


def test_the_generators_state_needs_no_wait() -> None:
    simdev.set_sync_debug_mode("error")
    simdev._spin(BUSY)
    F.dropout(torch.ones(8, device="simdev"))
    simdev.set_rng_state(simdev.get_rng_state())


# ---- errors

STICKY = """
    tensor = torch.ones(4, device="simdev")
    {cause}
    def refused(act):
        try:
            act()
        except RuntimeError as error:
            assert {text!r} in str(error), error
            return True
        return False
    import time
    until = time.monotonic() + 5
    while not refused(lambda: tensor + 1) and time.monotonic() < until:
        time.sleep(0.01)
    acts = [lambda: tensor + 1, tensor.cpu, torch.simdev.synchronize, lambda: torch.empty(1, device="simdev"),
            torch.simdev.current_stream().synchronize, lambda: torch.ones(4).to("simdev"),
            torch.Event("simdev").record]
    assert all(refused(act) for act in acts)
    print("over")
"""


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("torch.simdev.inject_sticky_error('device-side assert')", "device-side assert"),
        ("torch.simdev._throw_on_device('a kernel failed')", "a kernel failed"),
        ("torch.embedding(tensor.repeat(4, 1), torch.full((1,), 9, device='simdev'))", "out of range"),
    ],
)  # fmt: skip
def test_an_error_on_the_device_sticks(cause: str, text: str) -> None:
    done = child(STICKY.format(cause=cause, text=text))
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_an_error_ends_the_waits() -> None:
    done = child("""
        import threading
        torch.simdev._spin(0.3)
        torch.simdev._spin(3600)
        threading.Timer(0.1, torch.simdev.inject_sticky_error, ["gone"]).start()
        try:
            torch.simdev.synchronize()
        except RuntimeError as error:
            print(error)
    """)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


def test_it_refuses_to_work_in_a_fork() -> None:
    done = child("""
        import os
        tensor = torch.ones(4, device="simdev")
        child = os.fork()
        if not child:
            assert torch.simdev._is_in_bad_fork() and not torch.simdev.is_initialized()
            acts = [lambda: tensor + 1, torch.simdev.synchronize, tensor.cpu,
                    lambda: torch.empty(1, device="simdev")]
            for act in acts:
                try:
                    act()
                except RuntimeError as error:
                    assert "simdev was initialised before the fork" in str(error), error
                else:
                    os._exit(2)
            del tensor, acts, act
            torch.manual_seed(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert tensor.sum().item() == 4
    """)
    assert done.returncode == 0, done.stderr


def test_a_fork_before_the_first_use_is_fine() -> None:
    done = child("""
        import os
        child = os.fork()
        assert torch.ones(4, device="simdev").sum().item() == 4
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """)
    assert done.returncode == 0, done.stderr


def test_a_process_ends_with_work_in_flight() -> None:
    work = "torch.simdev._spin(0.2)\nfor _ in range(200): torch.ones(1 << 16, device='simdev').exp()\n"
    done = subprocess.run([sys.executable, "-c", BEGIN + work], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
