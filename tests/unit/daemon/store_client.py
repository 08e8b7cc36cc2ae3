"""A client of a store, without torch: what a rank's TCPStore sends, one call after the other."""

import asyncio
import contextlib
import struct
from collections.abc import Sequence
from typing import ClassVar, Self

from ckptless.daemon.agent.kvstore.protocol import MAGIC

DEADLINE_S = 20.0


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


class Client:
    """Every call raises ConnectionError where the store hangs up, TimeoutError after a long while."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.every.append(self)

    # All that were made, so that a test can close them.
    every: ClassVar[list["Client"]] = []

    @classmethod
    async def connect(cls, port: int) -> Self:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = cls(reader, writer)
        await client._ask(struct.pack("<BIBI", 0, MAGIC, 13, 7), 4)
        return client

    async def _ask(self, request: bytes, nbytes: int) -> bytes:
        self._writer.write(request)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self._reader.readexactly(nbytes)
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError("hung up on") from error

    async def set(self, key: bytes, value: bytes) -> None:
        """Sent; and the count of keys, which comes when it is done."""
        self._writer.write(b"\1" + _text(key) + _text(value))
        await self.num_keys()

    def set_soon(self, key: bytes, value: bytes) -> None:
        """Sent."""
        self._writer.write(b"\1" + _text(key) + _text(value))

    async def num_keys(self) -> int:
        return int.from_bytes(await self._ask(b"\7", 8), "little")

    async def add(self, key: bytes, amount: int) -> int:
        return int.from_bytes(await self._ask(b"\4" + _text(key) + struct.pack("<q", amount), 8), "little")

    async def wait(self, *keys: bytes) -> None:
        await self._ask(b"\6" + struct.pack("<Q", len(keys)) + b"".join(map(_text, keys)), 1)

    async def get(self, key: bytes) -> bytes:
        size = int.from_bytes(await self._ask(b"\3" + _text(key), 8), "little")
        return await self._reader.readexactly(size)

    async def multi_get(self, keys: Sequence[bytes]) -> list[bytes]:
        self._writer.write(b"\12" + struct.pack("<Q", len(keys)) + b"".join(map(_text, keys)))
        values = []
        for _ in keys:
            size = int.from_bytes(await self._ask(b"", 8), "little")
            values.append(await self._reader.readexactly(size))
        return values

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
