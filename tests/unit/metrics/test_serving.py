"""Metrics by HTTP and by a file, of a real daemon: who gets them, who does not, and what bad clients do."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis.strategies import binary
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ckptless.daemon.ckptlessd.main import serving as serving_of
from ckptless.daemon.ckptlessd.metrics import serving
from ckptless.daemon.ckptlessd.metrics.catalog import METRICS
from ckptless.daemon.ckptlessd.metrics.readings import Facts
from ckptless.daemon.ckptlessd.metrics.serving import (
    Metrics,
    Server,
    accepts_open_metrics,
    may_ask,
    status_of,
    write,
)
from ckptless.daemon.ckptlessd.recovery.events import NodeLost
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.options import MetricsSettings
from tests.unit.edges.test_service import Serve, Site, folder, serve, until

from .jobs import facts, job

__all__ = ("folder", "serve")

DEADLINE_S = 30.0
GET = b"GET /metrics HTTP/1.1\r\nHost: n0\r\n\r\n"
OPEN = b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n"


async def ask(port: int, request: bytes, host: str = "127.0.0.1") -> tuple[str, dict[str, str], str]:
    """The status, headers and body of an answer."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(request)
    answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    status, *lines = head.split("\r\n")
    return status, dict(line.split(": ", 1) for line in lines), body


def serves(
    scenario: Callable[[Server, int], Awaitable[None]], *allowed: str, host: str = "127.0.0.1"
) -> None:
    """A server of made-up facts."""

    async def main() -> None:
        metrics = Metrics(MetricsSettings(), lambda: facts(("4711", job())))
        server = Server(metrics._answer, [ipaddress.ip_network(one) for one in allowed])
        port = server.open(host, 0)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await scenario(server, port)
        finally:
            await server.close()

    asyncio.run(main())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


# ------------------------------------------------------------------------------------------ HTTP


def test_a_daemon_tells_of_its_jobs(serve: Serve) -> None:
    port = free_port()

    async def scenario(site: Site) -> None:
        metrics = Metrics(MetricsSettings(listen=f"127.0.0.1:{port}"), site.service.facts)
        running = asyncio.create_task(metrics.run())
        await asyncio.sleep(0)
        await site.trains()
        await until(lambda: site.ticks > 1)
        status, headers, body = await ask(port, GET)
        assert status == "HTTP/1.1 200 OK"
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert int(headers["Content-Length"]) == len(body.encode())
        found = {
            (one.name, *one.labels.values()): one.value
            for family in text_string_to_metric_families(body)
            for one in family.samples
        }
        assert found[("ckptless_node_jobs", "joining")] == found[("ckptless_jobs", "joining")] == 1
        assert found[("ckptless_ranks",)] == 1
        assert found[("ckptless_ledger_writable",)] == 1
        assert found[("ckptless_ledger_size_bytes",)] > 0
        assert found[("ckptless_events_total", "info")] > 0
        assert found[("ckptless_tick_delay_seconds_count",)] > 0
        assert found[("ckptless_process_resident_memory_bytes",)] > 0
        assert "4711" not in body
        running.cancel()
        await asyncio.wait({running})
        with pytest.raises(ConnectionRefusedError):
            await ask(port, GET)

    serve(scenario)


def test_open_metrics_for_whoever_asks_for_it() -> None:
    async def scenario(_server: Server, port: int) -> None:
        status, headers, body = await ask(port, OPEN)
        assert status == "HTTP/1.1 200 OK"
        assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        found = openmetrics.text_string_to_metric_families(body)  # type: ignore[no-untyped-call]
        families = {one.name: one for one in found}
        always = [one for one in METRICS if not one.per_job]
        assert {one.name for one in always} <= families.keys()
        assert all(families[one.name].documentation == one.help for one in always)
        assert families["ckptless_ledger_size_bytes"].unit == "bytes"

    serves(scenario)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics?name[]=x HTTP/1.0\r\n\r\n", "200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405 Method Not Allowed"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", "400 Bad Request"),
        (b"GET /metrics\r\n\r\n", "400 Bad Request"),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", "400 Bad Request"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", "400 Bad Request"),
        (b"\r\n\r\n", "400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * serving.REQUEST_LIMIT, "400 Bad Request"),
    ],
)
def test_only_one_thing_can_be_asked(request_: bytes, status: str) -> None:
    assert status_of(request_) == status

    async def scenario(_server: Server, port: int) -> None:
        found, headers, body = await ask(port, request_[: serving.REQUEST_LIMIT])
        assert found == f"HTTP/1.1 {status}"
        assert ("ckptless_" in body) == (status == "200 OK")
        assert headers.get("Allow") == ("GET" if status.startswith("405") else None)
        # And others are answered afterwards.
        assert (await ask(port, GET))[0] == "HTTP/1.1 200 OK"

    serves(scenario)


@given(binary(max_size=200))
@example(b"GET /metrics HTTP/1.1\r\nAccept: \xff\r\n\r\n")
def test_whatever_bytes_come_there_is_an_answer(head: bytes) -> None:
    assert status_of(head)[:3] in ("200", "400", "404", "405")
    assert accepts_open_metrics(head) in (False, True)


def test_who_says_nothing_or_goes_away_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "DEADLINE_S", 0.1)

    async def scenario(server: Server, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET[:-2])
        assert await reader.read() == b"", "it did not come to an end in time"
        writer.close()
        for words in (b"", GET[:10], GET):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(words)
            writer.close()
        assert (await ask(port, GET))[0] == "HTTP/1.1 200 OK"
        while server._open:  # noqa: ASYNC110  # nobody tells of it; the test's own deadline is around this
            await asyncio.sleep(0.01)

    serves(scenario)


def test_who_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "DEADLINE_S", 0.3)

    async def endless(_head: bytes) -> bytes:
        return b"x" * (64 << 20)

    async def main() -> None:
        server = Server(endless, [])
        port = server.open("127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(GET)
        async with asyncio.timeout(DEADLINE_S):
            while not server._open:  # noqa: ASYNC110  # nobody tells of it
                await asyncio.sleep(0.01)
            while server._open:  # noqa: ASYNC110  # nobody tells of it
                await asyncio.sleep(0.01)
        writer.close()
        await server.close()

    asyncio.run(main())


def test_idle_connections_keep_nobody_out() -> None:
    async def scenario(server: Server, port: int) -> None:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * serving.MOST_OPEN)]
        assert (await ask(port, GET))[0] == "HTTP/1.1 200 OK"
        assert len(server._open) <= serving.MOST_OPEN
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()

    serves(scenario)


def test_many_in_a_second_wait_and_are_answered() -> None:
    async def scenario(_server: Server, port: int) -> None:
        began_s = asyncio.get_running_loop().time()
        for _ in range(serving.A_SECOND + 10):
            assert (await ask(port, GET))[0] == "HTTP/1.1 200 OK"
        # The bucket has what it began with, and what has come since.
        assert asyncio.get_running_loop().time() - began_s >= 9 / serving.A_SECOND

    serves(scenario)


def test_who_asks_again_at_once_gets_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def told() -> Facts:
        asked.append(True)
        return facts(("4711", job()))

    async def main() -> None:
        metrics = Metrics(MetricsSettings(), told)
        first = await metrics.text(open_metrics=False)
        count = len(asked)
        assert await metrics.text(open_metrics=False) is first
        assert len(asked) == count
        assert (await metrics.text(open_metrics=True)).endswith(b"# EOF\n")
        assert len(asked) == count + 1
        monkeypatch.setattr(serving, "SAME_S", 0.0)
        metrics._texts.clear()
        await metrics.text(open_metrics=False)
        await metrics.text(open_metrics=False)
        assert len(asked) == count + 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("address", "allowed", "may"),
    [
        ("127.0.0.1", [], True),
        ("127.8.8.8", [], True),
        ("::1", [], True),
        ("10.1.0.7", [], False),
        ("10.1.0.7", ["10.1.0.0/16"], True),
        ("10.2.0.7", ["10.1.0.0/16", "10.2.0.7"], True),
        ("10.2.0.8", ["10.1.0.0/16", "10.2.0.7"], False),
        ("fe80::1%eth0", ["10.1.0.0/16"], False),
        ("fe80::1%eth0", ["fe80::/64"], True),
        ("::ffff:10.1.0.7", ["fe80::/64"], False),
    ],
)
def test_who_may_ask(address: str, allowed: list[str], may: bool) -> None:
    assert may_ask(address, [ipaddress.ip_network(one) for one in allowed]) is may


def own_address() -> str:
    """An address of this machine that is not a loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no address but loopback ones")
        return str(sock.getsockname()[0])


def test_a_foreign_address_learns_nothing() -> None:
    address = own_address()

    async def refused(_server: Server, port: int) -> None:
        reader, writer = await asyncio.open_connection(address, port)
        with suppress(ConnectionError):
            writer.write(GET)
            assert await reader.read() == b""
        writer.close()
        assert (await ask(port, GET))[0] == "HTTP/1.1 200 OK"

    async def let_in(_server: Server, port: int) -> None:
        assert (await ask(port, GET, address))[0] == "HTTP/1.1 200 OK"

    serves(refused, "198.51.100.0/24", host="0.0.0.0")
    serves(let_in, "198.51.100.0/24", address, host="0.0.0.0")


def test_who_holds_what_is_counted_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PARTS_S", 0.01)
    monkeypatch.setattr(serving, "PARTS_SHARE", 100.0)
    led = job()
    metrics = Metrics(MetricsSettings(), lambda: facts(("4711", led), ("4712", job(leads=False))))

    async def shows(count: int) -> None:
        metrics._texts.clear()
        while (
            f"ckptless_state_parts_on_one_node {count}.0"
            not in (await metrics.text(open_metrics=False)).decode()
        ):
            metrics._texts.clear()
            await asyncio.sleep(0.01)

    async def main() -> None:
        running = asyncio.create_task(metrics.run())
        async with asyncio.timeout(DEADLINE_S):
            await shows(0)
            led.lose(NodeLost(1, "x", 0.0, source="slurm"))
            await shows(8)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(main())


def test_a_port_that_is_taken_is_said_once_and_the_file_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = MetricsSettings(listen=f"127.0.0.1:{port}", textfile=str(tmp_path / "c.prom"))
        with keeps(settings) as until:
            until(lambda: (tmp_path / "c.prom").exists())
    (said,) = [one.getMessage() for one in caplog.records if one.name == serving.logger.name]
    assert said.startswith(f"metrics: cannot listen at 127.0.0.1:{port}: ")
    assert "already in use" in said


# -------------------------------------------------------------------------------------- the file


@contextmanager
def keeps(settings: MetricsSettings) -> Iterator[Callable[[Callable[[], object]], None]]:
    """What runs in a daemon; yields what lets it run until something is so."""
    with asyncio.Runner() as runner:
        running = []

        async def start() -> None:
            running.append(asyncio.create_task(Metrics(settings, lambda: facts(("4711", job()))).run()))

        async def wait(true: Callable[[], object]) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not true():  # a file tells of no event
                    assert not running[0].done()
                    await asyncio.sleep(0.005)

        async def end() -> None:
            running[0].cancel()
            await asyncio.wait(running)

        runner.run(start())
        yield lambda true: runner.run(wait(true))
        runner.run(end())


def test_the_file_is_whole_is_anybodys_to_read_and_goes_with_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "TEXTFILE_S", 0.01)
    path = tmp_path / "ckptless.prom"
    umask = os.umask(0o077)
    try:
        with keeps(MetricsSettings(textfile=str(path))) as until:
            until(path.exists)
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
            assert {one.name for one in text_string_to_metric_families(path.read_text())} > {"ckptless_jobs"}
            first = path.stat().st_ino
            until(lambda: path.stat().st_ino != first)
    finally:
        os.umask(umask)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "TEXTFILE_S", 0.01)
    path = tmp_path / "not-there" / "ckptless.prom"
    tries: list[Path] = []

    def counted(path: Path, text: bytes) -> None:
        tries.append(path)
        write(path, text)

    monkeypatch.setattr(serving, "write", counted)
    with keeps(MetricsSettings(textfile=str(path))) as until:
        until(lambda: len(tries) > 3)
        (said,) = [one.getMessage() for one in caplog.records if one.name == serving.logger.name]
        assert said == f"metrics: {path} cannot be written: No such file or directory; it is tried again"
        path.parent.mkdir()
        until(path.exists)


def test_a_link_in_a_folder_of_others_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "ckptless.prom"
    victim.write_text("precious")
    path.symlink_to(victim)
    write(path, b"x 1\n")
    assert victim.read_text() == "precious"
    assert not path.is_symlink()
    assert path.read_bytes() == b"x 1\n"


def test_what_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "ckptless.prom"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write(path, b"x 1\n")
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------------------- prometheus_client


def test_where_nobody_wants_metrics_the_library_is_not_needed() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from ckptless.daemon.ckptlessd import main\n"
        "from ckptless.daemon.settings.options import MetricsSettings\n"
        "assert main.serving(MetricsSettings(), None) == []\n"
        "try: main.serving(MetricsSettings(textfile='/c.prom'), None)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == (
        "UsageError metrics.listen and metrics.textfile need prometheus-client: "
        "pip install 'ckptless[daemon]', or leave both out\n"
    )
    assert issubclass(UsageError, Exception)


def test_where_they_are_wanted_they_are_served() -> None:
    (one,) = serving_of(MetricsSettings(textfile="/c.prom"), facts)
    one.close()
