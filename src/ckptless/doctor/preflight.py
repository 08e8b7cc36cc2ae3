"""Tries a node before a job begins on it: memory, a disk, arithmetic on each device, and its own network.

Each part computes something whose result is known, and is given up when its time is over: what hangs is
found, too. For a prolog, see docs/admin.md.
"""

import ctypes
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash

from ckptless.doctor.findings import Finding

MIB = 1 << 20
# Of a node's free memory a tenth is written and read back, and no more than this.
MEMORY_SHARE, MEMORY_NBYTES = 10, 1024 * MIB
DISK_NBYTES, NETWORK_NBYTES = 64 * MIB, 64 * MIB
# Products of whole numbers so small that each sum of them is exact in float32, in whatever order.
SIZE, LARGEST = 512, 8
# xxh3_64 of the product's 512 x 512 numbers as little-endian int32.
PRODUCT = "fecf50416f1019c4"
RECEIVE_NBYTES = 1 << 20

Part = Callable[[], str]


class Wrong(Exception):
    """A part of the node did not do what it was to do."""


def preflight(folders: Sequence[Path], limit_s: float) -> list[Finding]:
    """Return what each part of this node does; one that takes longer than the limit is broken."""
    parts: list[tuple[str, Part]] = [("memory", memory), ("network", network)]
    parts += [(f"disk {folder}", lambda folder=folder: disk(folder)) for folder in folders]  # type: ignore[misc]
    parts += [("processor", lambda: product("cpu"))]
    findings = [_tried(name, part, limit_s) for name, part in parts]
    return [*findings, *_devices(limit_s)]


def _tried(name: str, part: Part, limit_s: float) -> Finding:
    """Try a part in a thread that is left alone where it hangs."""
    said: list[Finding] = []

    def run() -> None:
        try:
            said.append(Finding(name, "fine", part()))
        except ImportError as error:
            said.append(Finding(name, "limited", f"not tried: {error}"))
        except (Wrong, OSError, RuntimeError, MemoryError) as error:
            said.append(Finding(name, "broken", str(error) or type(error).__name__))

    thread = threading.Thread(target=run, name=f"preflight-{name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    return said[0] if said else Finding(name, "broken", f"no answer in {limit_s:g} s")


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes // MIB} MiB, {nbytes / MIB / max(seconds, 1e-9):.0f} MiB/s"


def memory() -> str:
    """Write memory and read it back, in patterns that differ from one MiB to the next. Raises Wrong."""
    nbytes = min(MEMORY_NBYTES, _free_nbytes() // MEMORY_SHARE) // MIB * MIB
    began = time.monotonic()
    blocks = [bytearray(_pattern(number)) for number in range(nbytes // MIB)]
    for number, block in enumerate(blocks):
        if block != _pattern(number):
            raise Wrong(f"MiB {number} of {len(blocks)} did not keep what was written to it")
    return _rate(2 * nbytes, time.monotonic() - began)


def _free_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise Wrong("/proc/meminfo does not say how much memory there is")


def _pattern(number: int) -> bytes:
    """Return a MiB that is another one for each number, each bit of it now one, now zero."""
    return xxhash.xxh3_128_digest(str(number).encode()) * (MIB // 16)


def disk(folder: Path) -> str:
    """Write a file, have it on the disk, and read it back from there. Raises Wrong, OSError."""
    began = time.monotonic()
    with tempfile.TemporaryFile(dir=folder, prefix=".ckptless-doctor-") as file:
        for number in range(DISK_NBYTES // MIB):
            file.write(_pattern(number))
        file.flush()
        os.fsync(file.fileno())
        # Not from memory, where the file system can tell the difference.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        for number in range(DISK_NBYTES // MIB):
            if file.read(MIB) != _pattern(number):
                raise Wrong(f"MiB {number} of a file was not read as it was written")
    return _rate(2 * DISK_NBYTES, time.monotonic() - began)


def network() -> str:
    """Send over this node's own address, and over loopback, and compare. Raises Wrong, OSError."""
    told = []
    for name in dict.fromkeys(("127.0.0.1", socket.gethostname())):
        address = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        began = time.monotonic()
        _send_to(str(address))
        told.append(f"{name}: {_rate(NETWORK_NBYTES, time.monotonic() - began)}")
    return "; ".join(told)


def _send_to(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        got: list[str] = []

        def receive() -> None:
            # no deadline: the preflight's own
            connection, _ = server.accept()
            digest = xxhash.xxh3_64()
            with connection:
                while data := connection.recv(RECEIVE_NBYTES):
                    digest.update(data)
            got.append(digest.hexdigest())

        receiver = threading.Thread(target=receive, name="preflight-receiver", daemon=True)
        receiver.start()
        sent = xxhash.xxh3_64()
        with socket.create_connection(server.getsockname()) as connection:
            for number in range(NETWORK_NBYTES // MIB):
                connection.sendall(_pattern(number))
                sent.update(_pattern(number))
        # no deadline: the preflight's own
        receiver.join()
    if got != [sent.hexdigest()]:
        raise Wrong(f"what was sent to {address} is not what came")


def _devices(limit_s: float) -> Iterator[Finding]:
    """Try each device that torch sees; where looking for them hangs or fails, that is broken itself."""
    found: list[str] = []

    def look() -> str:
        import torch

        found.extend(f"cuda:{index}" for index in range(torch.cuda.device_count()))
        return ""

    looked = _tried("devices", look, limit_s)
    if looked.grade == "broken":
        yield looked
    elif looked.grade == "fine":
        for device in found:
            yield _tried(device, lambda device=device: product(device), limit_s)  # type: ignore[misc]


def product(device: str) -> str:
    """Multiply two matrices of whole numbers, of which the product is known. Raises Wrong, ImportError."""
    import torch

    draw = random.Random(1)
    numbers = [draw.randint(-LARGEST, LARGEST) for _ in range(2 * SIZE * SIZE)]
    left, right = torch.tensor(numbers, dtype=torch.float32).reshape(2, SIZE, SIZE).to(device)
    began = time.monotonic()
    result = (left @ right).to("cpu", torch.int32).contiguous()
    took_s = time.monotonic() - began
    # As bytes() a storage is read number by number, for seconds.
    digest = xxhash.xxh3_64_hexdigest(ctypes.string_at(result.data_ptr(), result.nbytes))
    if digest != PRODUCT:
        raise Wrong(f"a product of two matrices on {device} is not what it is elsewhere ({digest})")
    return f"a product of two {SIZE} x {SIZE} matrices is right, {1000 * took_s:.1f} ms"
