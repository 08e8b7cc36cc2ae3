"""Tells whoever may know: an HTTP server for Prometheus, of one page, and a file for node_exporter.

The daemon's state may be read in its event loop alone. That takes a millisecond, and however often somebody
asks, only a few of them in a second; the rest is done in threads. There is no TLS here: that is the business
of a proxy, or of node_exporter, at a loopback address.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from ckptless.daemon.ckptlessd.metrics.exposition import CONTENT_TYPES, OPEN_METRICS, encode, families
from ckptless.daemon.ckptlessd.metrics.readings import Facts, Parts, held, parts, readings
from ckptless.daemon.settings.option_kinds import endpoint
from ckptless.daemon.settings.options import MetricsSettings
from ckptless.daemon.transport.bucket import TokenBucket
from ckptless.daemon.transport.listener import listen
from ckptless.daemon.transport.tasks import end_all

logger = logging.getLogger(__name__)

REQUEST_LIMIT = 4096
# From the connection to the last byte of the answer.
DEADLINE_S = 5.0
# Connections at a time: one more, and the oldest gives way. And in a second: others wait in the kernel.
MOST_OPEN = 16
A_SECOND = 50
# Whoever asks again within this time gets the same text.
SAME_S = 1.0
TEXTFILE_S = 15.0
# Who holds what is looked at this often, and takes at most this part of the time.
PARTS_S, PARTS_SHARE = 10.0, 0.03
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class Metrics:
    """The metrics of one daemon, whose state `facts` returns. `run` serves them until it is cancelled."""

    def __init__(self, settings: MetricsSettings, facts: Callable[[], Facts]) -> None:
        self._settings, self._facts = settings, facts
        self._parts: dict[str, Parts] = {}
        # By format: until when a text is the newest, and that text.
        self._texts: dict[bool, tuple[float, bytes]] = {}
        self._trouble = ""

    async def run(self) -> None:
        """Serve, and write the file, as far as the settings want it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_parts())
            if self._settings.listen is not None:
                tasks.create_task(self._serve(self._settings.listen))
            if self._settings.textfile is not None:
                tasks.create_task(self._keep_file(Path(self._settings.textfile)))

    async def text(self, *, open_metrics: bool) -> bytes:
        """Return all metrics as they are, or were a moment ago."""
        now_s = asyncio.get_running_loop().time()
        until_s, text = self._texts.get(open_metrics, (0.0, b""))
        if now_s >= until_s:
            told = families(readings(self._facts(), self._parts, per_job=self._settings.jobs))
            text = await asyncio.to_thread(encode, told, open_metrics=open_metrics)
            self._texts[open_metrics] = now_s + SAME_S, text
        return text

    async def _keep_parts(self) -> None:
        """Count, again and again, the parts of each job's state that few hold; in a thread."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            # What is held is told in values that never change.
            led = {name: what for name, job in self._facts().jobs.items() if (what := held(name, job))}
            self._parts = {name: await asyncio.to_thread(parts, what) for name, what in led.items()}
            await asyncio.sleep(max(PARTS_S, (loop.time() - began_s) / PARTS_SHARE))

    async def _serve(self, at: str) -> None:
        address = endpoint(at)
        assert address is not None  # the settings are checked
        allowed = [ipaddress.ip_network(network) for network in self._settings.allow]
        server = Server(self._answer, allowed)
        try:
            server.open(str(address[0]), address[1])
        except OSError as error:
            logger.error("metrics: cannot listen at %s: %s", at, error.strerror)  # noqa: TRY400  # one sentence
            return
        try:
            # no deadline: a daemon's life
            await asyncio.Event().wait()
        finally:
            await server.close()

    async def _answer(self, head: bytes) -> bytes:
        """Return the answer to a request."""
        status = status_of(head)
        if status != "200 OK":
            return _response(status, "text/plain", f"{status}: ask for GET /metrics\n".encode())
        open_metrics = accepts_open_metrics(head)
        text = await self.text(open_metrics=open_metrics)
        return _response(status, CONTENT_TYPES[open_metrics], text)

    async def _keep_file(self, path: Path) -> None:
        """Write the file again and again, and take it away at the end: what is old says nothing."""
        written = False
        try:
            while True:
                text = await self.text(open_metrics=False)
                try:
                    await asyncio.to_thread(write, path, text)
                except OSError as error:
                    self._tell(f"{path} cannot be written: {error.strerror}")
                else:
                    written = True
                    self._tell("")
                await asyncio.sleep(TEXTFILE_S)
        finally:
            if written:
                path.unlink(missing_ok=True)

    def _tell(self, trouble: str) -> None:
        if trouble not in ("", self._trouble):
            logger.error("metrics: %s; it is tried again", trouble)
        self._trouble = trouble


class Server:
    """Takes connections, and sends what `answer` returns for the head of a request. One for each connection.

    `allowed`: who may ask, beside processes of this node.
    """

    def __init__(
        self,
        answer: Callable[[bytes], Awaitable[bytes]],
        allowed: Sequence[Network],
    ) -> None:
        self._answer, self._allowed = answer, allowed
        self._sock: socket.socket | None = None
        self._bucket = TokenBucket(A_SECOND, A_SECOND)
        self._again: asyncio.TimerHandle | None = None
        # In the order in which they came.
        self._open: dict[asyncio.Task[None], None] = {}

    def open(self, host: str, port: int) -> int:
        """Listen at a numeric address; the port. Raises OSError."""
        self._sock = listen(host, port)
        self._wait()
        return int(self._sock.getsockname()[1])

    def _wait(self) -> None:
        assert self._sock is not None
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        if not self._bucket.spend(1, loop.time()):
            loop.remove_reader(self._sock)
            self._again = loop.call_later(1 / A_SECOND, self._wait)
            return
        try:
            # no deadline: the socket does not block
            sock, address = self._sock.accept()
        except OSError:
            return  # it is gone already, or no descriptor is left: the bucket says when to look again
        if not may_ask(address[0], self._allowed):
            sock.close()
            return
        sock.setblocking(False)
        if len(self._open) >= MOST_OPEN:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = loop.create_task(self._talk(sock))
        self._open[task] = None
        task.add_done_callback(lambda task: self._gone(task, sock))

    def _gone(self, task: "asyncio.Task[None]", sock: socket.socket) -> None:
        self._open.pop(task, None)
        sock.close()

    async def _talk(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError, TimeoutError):  # whoever does not wait for it gets no answer
            async with asyncio.timeout(DEADLINE_S):
                head = b""
                while b"\r\n\r\n" not in head and len(head) < REQUEST_LIMIT:
                    more = await loop.sock_recv(sock, REQUEST_LIMIT - len(head))
                    if not more:
                        return
                    head += more
                await loop.sock_sendall(sock, await self._answer(head))

    async def close(self) -> None:
        """Listen no more, and hang up on everybody."""
        assert self._sock is not None
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        await end_all(self._open)


def may_ask(address: str, allowed: Sequence[Network]) -> bool:
    """Whether who has this address may read the metrics."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_loopback or any(found in network for network in allowed)


def status_of(head: bytes) -> str:
    """Return what is to be said to a request."""
    request, _, _ = head.partition(b"\r\n")
    match request.split(b" "):
        case [method, target, b"HTTP/1.0" | b"HTTP/1.1"] if b"\r\n\r\n" in head:
            if target.partition(b"?")[0] != b"/metrics":
                return "404 Not Found"
            return "200 OK" if method == b"GET" else "405 Method Not Allowed"
        case _:
            return "400 Bad Request"


def accepts_open_metrics(head: bytes) -> bool:
    """Whether a request's `Accept` names OpenMetrics."""
    lines = head.lower().split(b"\r\n")
    return any(line.startswith(b"accept:") and OPEN_METRICS.encode() in line for line in lines)


def _response(status: str, kind: str, body: bytes) -> bytes:
    allow = "Allow: GET\r\n" if status.startswith("405") else ""
    about = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{allow}{about}\r\n\r\n".encode() + body


def write(path: Path, text: bytes) -> None:
    """Write a file that anybody may read, all of it at once. Raises OSError.

    The folder may be another user's: what lies there is replaced, and no link of it followed.
    """
    # node_exporter reads only what ends in .prom.
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o644)
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
