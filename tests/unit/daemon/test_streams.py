"""Streams whose connection is lost while nobody asks for it."""

import asyncio
import gc

import pytest

from ckptless.daemon.transport.bulk import Streams


@pytest.mark.parametrize(("kind", "said"), [(Streams, 0), (asyncio.StreamReaderProtocol, 1)])
def test_a_loss_that_nobody_asks_for_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, kind: type[asyncio.StreamReaderProtocol], said: int
) -> None:
    """Where asyncio's own look comes too late, as it may in a cycle: there is one only in the second case."""
    monkeypatch.setattr(asyncio.StreamReaderProtocol, "__del__", lambda _self: None)
    heard: list[object] = []

    async def lose() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: heard.append(context["message"]))
        streams = kind(asyncio.StreamReader(), loop=loop)
        streams.connection_lost(ConnectionResetError())
        del streams
        gc.collect()

    asyncio.run(lose())
    assert heard == ["Future exception was never retrieved"] * said
