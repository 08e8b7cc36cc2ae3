"""Our TCPStore server against torch's: real clients, the same calls, the same answers and errors.

Where calls are compared, our server is a process of its own, as in a job. It could not be a thread here:
`queue_len` and `list_keys` hold the GIL while they wait for the answer (torch 2.13).
"""

import asyncio
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pytest
import torch

# What torch.distributed has too, but only here do type checkers find it.
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ckptless.daemon.agent.kvstore import protocol
from ckptless.daemon.agent.kvstore.server import StoreServer
from ckptless.daemon.protocol.errors import UsageError

T = TypeVar("T")
# A TCPStore. torch's stubs lack half of its calls.
Client: TypeAlias = Any
SOON = timedelta(milliseconds=150)
LONG = timedelta(seconds=30)
FACADES = Path(__file__).parents[1] / "unit" / "daemon" / "facades.py"
# Calls that came with this torch; an older one's clients have none to make.
SINCE = {"list_keys": (2, 10), "barrier": (2, 12)}
ALWAYS = """
    add append check clone compare_set delete_key get has_extended_api host libuvBackend multi_get multi_set
    num_keys port queue_len queue_pop queue_push set set_timeout timeout wait
"""
HELLO = struct.pack("<BI", protocol.Op.VALIDATE, protocol.MAGIC)


def connect(port: int) -> Client:
    return TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)


class Served:
    """A StoreServer with an event loop and a thread of its own."""

    def __init__(self) -> None:
        self.server = StoreServer()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self.server.start("127.0.0.1"), self._loop).result(5)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the loop's thread."""
        result: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: result.set_result(function()))
        return result.result(5)

    def client(self) -> Client:
        return connect(self.port)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


@contextmanager
def our_process(nodes: int = 1) -> Iterator[list[int]]:
    """Our stores in a process. Gives the port of each node; at the end, they must have refused nobody."""
    server = subprocess.Popen(
        [sys.executable, str(FACADES), str(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield [int(port) for port in server.stdout.readline().split()]
        assert server.communicate(timeout=15)[0] == "0 False\n"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture
def torchs() -> Client:
    return TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Return what a call returns, or the name of what it raises."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001  the error's type is what is compared
        return type(error).__name__


@contextmanager
def later(function: Callable[..., Any], *args: Any) -> Iterator[None]:
    timer = threading.Timer(0.1, function, args)
    timer.start()
    yield
    timer.join()


def settle(*stores: Client) -> None:
    """Wait until what was sent without an answer has been done: each client is served in order."""
    for store in stores:
        store.num_keys()


def has(call: str) -> bool:
    return hasattr(TCPStore, call)


def test_a_client_has_the_calls_of_its_torch() -> None:
    """What is missing elsewhere, or is new, would be compared by nobody."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert {call: has(call) for call in SINCE} == {call: version >= since for call, since in SINCE.items()}
    assert {name for name in dir(TCPStore) if not name.startswith("_")} - set(SINCE) == set(ALWAYS.split())


def script(ports: list[int]) -> Iterator[Any]:
    """Every call of a store, with two clients, of the last two nodes. Yields what each one gave."""
    a, b = connect(ports[-1]), connect(ports[-2 % len(ports)])
    yield from values(a, b)
    yield from waits(a, b)
    yield from queues(a, b)
    if has("barrier"):
        yield from barriers(a, b)
    yield from prefixes(a, b)
    if has("list_keys"):
        yield sorted(a.list_keys())


def values(a: Client, b: Client) -> Iterator[Any]:
    a.set("x", "1")
    settle(a)
    yield b.get("x")
    yield a.add("c", 5), b.add("c", -7), a.get("c"), a.add("c", 0)
    yield b.check(["x"]), b.check(["x", "no"]), b.check([])
    yield a.delete_key("x"), a.delete_key("x"), a.check(["x"])
    yield a.compare_set("q", "", "v"), b.compare_set("q", "v", "w"), a.compare_set("q", "bad", "z")
    yield a.compare_set("no key", "expected", "z"), a.check(["no key"]), a.compare_set("empty", "", "")
    a.append("p", "12")
    a.append("p", "34")
    settle(a)
    yield b.get("p"), b.compare_set("p", "1234", "5"), b.add("p", 1)
    a.multi_set(["m1", "m2", "m3"], ["a", b"\0\xff", ""])
    settle(a)
    yield b.multi_get(["m3", "m1", "m2", "m1"]), b.multi_get([])
    a.set("space", " 41 and more")
    yield a.add("space", 1)
    yield a.num_keys(), b.num_keys()
    b.set("from a clone", "1")
    settle(b)
    yield a.clone().get("from a clone")
    a.set("large", "y" * 3_000_000)
    settle(a)
    yield len(b.get("large")), b.get("large") == b"y" * 3_000_000, len(b.multi_get(["large", "large"])[1])


def waits(a: Client, b: Client) -> Iterator[Any]:
    yield outcome(b.wait, ["never"], SOON), outcome(b.wait, ["c", "never", "never too"], SOON)
    b.set_timeout(SOON)
    yield outcome(b.get, "never"), outcome(b.multi_get, ["c", "never"])
    b.set_timeout(LONG)
    yield outcome(b.wait, ["c"]), outcome(b.wait, []), b.get("c")
    changes: list[Callable[[str], Any]] = [
        lambda key: a.set(key, "v"),
        lambda key: a.add(key, 3),
        lambda key: a.append(key, "v"),
        lambda key: a.compare_set(key, "", "v"),
        lambda key: a.multi_set([key, "other"], ["v", "w"]),
    ]
    for number, change in enumerate(changes):
        with later(change, f"late {number}"):
            yield b.get(f"late {number}")
    with later(a.multi_set, ["part 1", "part 2"], ["v", "w"]):
        yield b.multi_get(["part 2", "c", "part 1", "part 2"])


def queues(a: Client, b: Client) -> Iterator[Any]:
    yield a.queue_len("queue"), outcome(a.queue_pop, "queue", False), a.check(["queue"])
    a.queue_push("queue", "1")
    a.queue_push("queue", b"\0")
    settle(a)
    yield b.queue_len("queue"), b.check(["queue"]), outcome(b.wait, ["queue"], SOON)
    yield b.queue_pop("queue"), a.queue_pop("queue", False), outcome(a.queue_pop, "queue", False)
    yield b.queue_len("queue"), a.num_keys(), a.delete_key("queue")
    with later(a.queue_push, "late queue", "z"):
        yield b.queue_pop("late queue"), b.queue_len("late queue")
    b.set_timeout(SOON)
    yield outcome(b.queue_pop, "never")
    b.set_timeout(LONG)


def barriers(a: Client, b: Client) -> Iterator[Any]:
    yield outcome(a.barrier, "alone", 1), a.get("alone")
    with later(a.barrier, "two", 2):
        yield outcome(b.barrier, "two", 2), b.get("two")
    yield outcome(b.barrier, "nobody comes", 2, SOON), a.get("nobody comes")
    yield outcome(b.barrier, "nobody comes", 2, SOON), outcome(b.barrier, "two", 2), a.get("two")


def prefixes(a: Client, b: Client) -> Iterator[Any]:
    inner: Client = PrefixStore("0/", PrefixStore("default_pg", a))
    inner.set("rank", "0")
    settle(a)
    yield b.get("default_pg/0//rank"), inner.get("rank"), inner.check(["rank", "x"]), inner.add("n", 2)
    inner.multi_set(["i", "j"], ["1", "2"])
    inner.queue_push("queue", "q")
    yield inner.multi_get(["j", "i"]), inner.compare_set("i", "1", "3"), inner.queue_pop("queue")
    yield inner.num_keys(), inner.delete_key("i"), b.num_keys(), outcome(inner.wait, ["i"], SOON)


@pytest.mark.parametrize("nodes", [1, 3])
def test_every_call_gives_the_same(torchs: Client, nodes: int) -> None:
    expected = list(script([torchs.port]))
    assert len(expected) > 25
    with our_process(nodes) as ports:
        for ours, theirs in zip(script(ports), expected, strict=True):
            assert ours == theirs


@pytest.mark.parametrize("nodes", [1, 3])
def test_many_random_calls_give_the_same(torchs: Client, nodes: int) -> None:
    with our_process(nodes) as ports:
        call_at_random([connect(port) for port in ports], torchs, random.Random(7))


def call_at_random(clients: list[Client], torchs: Client, dice: random.Random) -> None:
    """Each call by another client; the next one is made when it has been done."""
    texts = ["", "0", "1", "-3"]
    ours = clients[0]
    for _ in range(1500):
        settle(ours)
        ours = dice.choice(clients)
        calls: list[tuple[Any, ...]] = [
            ("set", dice.choice("abc"), dice.choice("012")),
            ("add", dice.choice("abcn"), dice.randrange(-3, 4)),
            ("append", dice.choice("abc"), dice.choice("012")),
            ("compare_set", dice.choice("abcd"), dice.choice(texts), dice.choice("012")),
            ("check", dice.choices("abcdqr", k=2)),
            ("delete_key", dice.choice("abcd")),
            ("multi_set", ["a", dice.choice("abc")], dice.choices("012", k=2)),
            ("queue_push", dice.choice("qr"), dice.choice(texts)),
            ("queue_pop", dice.choice("qr"), False),
            ("queue_len", dice.choice("qr")),
            ("num_keys",),
        ]
        name, *args = dice.choice(calls)
        got, expected = (outcome(getattr(store, name), *args) for store in (ours, torchs))
        if name == "list_keys":
            got, expected = sorted(got), sorted(expected)
        assert got == expected, (name, args)
        for key in "abcd":
            if torchs.check([key]):
                assert ours.get(key) == torchs.get(key), (name, args)
                if len(ours.get(key)) > 12:
                    ours.set(key, "1")
                    torchs.set(key, "1")


@pytest.mark.parametrize("text", ["", "text", "- 1", "9" * 30])
def test_adding_to_what_is_no_number_ends_only_that_client(served: Served, torchs: Client, text: str) -> None:
    for port in (torchs.port, served.port):
        victim, other = (connect(port) for _ in range(2))
        other.set("k", text)
        settle(other)
        assert outcome(victim.add, "k", 1) == "DistNetworkError"
        assert other.get("k") == text.encode()
    assert served.server.refused == 1


def test_torchs_own_mistakes_are_not_copied(served: Served) -> None:
    a, b = served.client(), served.client()
    # torch's server ends this wait, though the key is not there.
    with later(a.compare_set, "k", "expected", "v"):
        assert outcome(b.wait, ["k"], 2 * SOON) == "DistStoreError"
    # ... and this one, because the same client once waited for the queue.
    with later(a.queue_push, "queue", "1"):
        b.queue_pop("queue")
    with later(a.queue_push, "queue", "2"):
        assert outcome(b.wait, ["another"], 2 * SOON) == "DistStoreError"


RANK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
rank, size = dist.get_rank(), dist.get_world_size()
group = dist.new_group([0, size - 1])
store = dist.distributed_c10d._get_default_store()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
listed = True
if hasattr(store, "barrier"):
    store.barrier("all here", size)
    # A PrefixStore makes its barrier of other calls.
    listed = "all here/last_member" in store.list_keys()
print(int(total), listed, type(store).__name__)
dist.barrier()
dist.destroy_process_group()
"""


def test_an_unchanged_env_script_of_four_processes(served: Served, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK)
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(served.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=100)
            # Gloo of torch 2.8 to 2.10 says something there, too.
            assert (rank.returncode, out.splitlines()[-1:]) == (0, ["6 True PrefixStore"]), errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert served.server.refused == 0


def in_thread(function: Callable[..., Any], *args: Any) -> "Future[tuple[Any, float]]":
    """Run a call beside the test; the result is its outcome and when it ended."""
    result: Future[tuple[Any, float]] = Future()

    def run() -> None:
        result.set_result((outcome(function, *args), time.monotonic()))

    threading.Thread(target=run).start()
    return result


def test_cut_ends_waits_at_once_and_forgets_every_key(served: Served) -> None:
    idle, waiting, at_barrier = served.client(), served.client(), served.client()
    idle.set("k", "old")
    settle(idle)
    ends = [in_thread(waiting.wait, ["never"], LONG)]
    if has("barrier"):
        ends.append(in_thread(at_barrier.barrier, "b", 2, LONG))
    time.sleep(0.1)
    assert not any(end.done() for end in ends)
    began = time.monotonic()
    assert served.call(served.server.cut) == 3
    for end in ends:
        name, ended = end.result(5)
        assert name == "DistNetworkError"
        assert ended - began < 1
    assert outcome(idle.get, "k") == "DistNetworkError"
    assert served.call(served.server.cut) == 0
    new = served.client()
    assert (new.num_keys(), new.check(["k", "b"]), new.add("b", 1)) == (0, False, 1)
    assert served.server.refused == 0


def test_a_wait_ends_with_its_client(served: Served) -> None:
    with served.connect() as gone:
        gone.sendall(HELLO + b"\x06" + struct.pack("<QQ", 1, 1) + b"k" + b"\x0d1234")
        assert gone.recv(4) == b"1234"
        assert served.call(lambda: len(waiting(served))) == 1
    deadline = time.monotonic() + 2
    while served.call(lambda: len(served.server.clients)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.call(lambda: (len(served.server.clients), len(waiting(served)))) == (0, 0)


def waiting(served: Served) -> Any:
    return served.server._proxy._asking


HOSTILE = {
    "a stranger": b"GET / HTTP/1.1\r\n\r\n",
    "a huge key": HELLO + b"\x03" + b"\xff" * 8,
    "many keys": HELLO + b"\x06" + struct.pack("<Q", 1 << 40),
    "an unknown opcode": HELLO + b"\x13",
    "two waits": HELLO + 2 * (b"\x06" + struct.pack("<QQ", 1, 1) + b"k"),
    "a sum beyond 64 bits": HELLO + 2 * (b"\x04" + struct.pack("<Q", 1) + b"n" + b"\xff" * 7 + b"\x7f"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_client_is_hung_up_on_alone(
    served: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = served.client()
    waiting = in_thread(good.get, "k")
    with served.connect() as bad:
        bad.sendall(HOSTILE[name])
        try:
            while bad.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert served.server.refused == 1
    assert [record.message.startswith("store: hung up on") for record in caplog.records] == [True]
    other = served.client()
    other.set("k", "v")
    assert waiting.result(5)[0] == b"v"


def test_a_client_that_does_not_read_costs_one_answer(served: Served) -> None:
    good = served.client()
    good.set("k", "x" * (1 << 20))
    settle(good)
    gets = 4000 * (b"\x03" + struct.pack("<Q", 2) + b"/k")
    with served.connect() as bad:
        bad.sendall(HELLO + gets)
        time.sleep(0.2)
        unsent = served.call(
            lambda: max(client._transport.get_write_buffer_size() for client in served.server.clients)
        )
        assert 0 < unsent < 3 << 20
        assert good.get("k") == b"x" * (1 << 20)
        # It does get its answers, once it reads.
        nbytes = 0
        while nbytes < 20 << 20:
            nbytes += len(bad.recv(1 << 20))
    assert served.server.refused == 0


def test_small_answers_are_not_delayed(served: Served) -> None:
    client = served.client()
    client.num_keys()
    options = served.call(
        lambda: [
            peer._transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for peer in served.server.clients
        ]
    )
    assert options == [1]


def test_it_listens_at_one_numeric_address() -> None:
    with pytest.raises(UsageError, match="numeric"):
        asyncio.run(StoreServer().start("localhost"))


def test_close_is_harmless_before_start_and_twice() -> None:
    async def play() -> None:
        server = StoreServer()
        await server.close()
        port = await server.start("127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO + b"\x0dping")
        assert await reader.readexactly(4) == b"ping"
        await server.close()
        assert await reader.read() == b""
        writer.close()
        await server.close()

    asyncio.run(play())
