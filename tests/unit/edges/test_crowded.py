"""A daemon with more connections than it wants: who gives way, who stays, and who is still let in.

One user may have thousands of uids (subuid(5)), so no limit of each uid keeps the others' places free.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ckptless.daemon.ckptlessd import admission, unix_server
from ckptless.daemon.ckptlessd.admission import Admission
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder
from ckptless.daemon.protocol.keeping import KeptList, WhatIsKept
from ckptless.daemon.protocol.saving import Save

from .test_service import DEADLINE_S, Client, Site, hello, until

ROOT, OWNER = 0, 1001
WANTED, MOST = 4, 8
ASK = WhatIsKept(protocol=m.PROTOCOL)


class Crowd:
    """Connections of many users to one daemon, which wants four of them, and takes eight."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self._site, self._uid, self._asked = site, ROOT, 0
        monkeypatch.setattr(unix_server, "peer_credentials", self._credentials)
        monkeypatch.setattr(site.cluster, "check_owner", self._check_owner)
        site.service._admission = Admission((ROOT,))

    def _credentials(self, _sock: object) -> tuple[int, int]:
        self._asked += 1
        return os.getpid(), self._uid

    async def _check_owner(self, _run: str, uid: int) -> None:
        assert uid == OWNER

    async def enter(self, uid: int, *first: object) -> Client:
        """Once the daemon has it, by whomever that made room."""
        self._uid, before = uid, self._asked
        client = await self._site.client(*first)
        await until(lambda: self._asked > before)
        return client

    async def ask(self, client: Client) -> None:
        """What every user may, and gets an answer to."""
        client.say(ASK)
        decoder: Decoder[KeptList] = Decoder(KeptList, CONTROL_LIMIT)
        while not decoder.feed(data := await client._reader.read(1 << 16)):
            assert data, "the daemon hung up"


async def gone(client: Client) -> bool:
    """Whether the daemon hangs up on it, without a word, within the test's time."""
    return await client.rest() == []


def there(client: Client) -> bool:
    return not client._reader.at_eof()


Work = Callable[[Crowd], Awaitable[None]]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Work], None]:
    monkeypatch.setattr(admission, "CONNECTIONS", WANTED)
    monkeypatch.setattr(admission, "MOST_CONNECTIONS", MOST)
    monkeypatch.setattr("ckptless.daemon.ckptlessd.service.SPEAK_S", 10 * DEADLINE_S)

    def run(work: Work) -> None:
        async def main(folder: Path) -> None:
            site = Site(folder)
            crowd = Crowd(site, monkeypatch)
            async with asyncio.timeout(DEADLINE_S), site.running():
                await work(crowd)

        with tempfile.TemporaryDirectory(prefix="crowded-") as folder:
            asyncio.run(main(Path(folder)))

    return run


Crowded = Callable[[Work], None]


def test_who_says_nothing_gives_way_the_oldest_first(
    crowded: Crowded, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(crowd: Crowd) -> None:
        silent = [await crowd.enter(uid) for uid in range(2000, 2000 + WANTED)]
        for number in range(WANTED):
            asker = await crowd.enter(3000 + number)
            assert await gone(silent[number])
            assert all(map(there, silent[number + 1 :]))
            await crowd.ask(asker)
        assert "refused process" in caplog.text
        assert "of uid 2000: it says nothing, and many others want to" in caplog.text

    crowded(work)


def test_of_the_user_who_has_most(crowded: Crowded) -> None:
    """One who has a single connection keeps it, however often others come."""

    async def work(crowd: Crowd) -> None:
        single = await crowd.enter(2000)
        for _ in range(2 * MOST):
            await crowd.enter(3000)
            await crowd.enter(3001)
        await crowd.ask(single)

    crowded(work)


def test_an_agent_and_root_stay(crowded: Crowded) -> None:
    """However many come behind them."""

    async def work(crowd: Crowd) -> None:
        root = await crowd.enter(ROOT)
        agent = await crowd.enter(OWNER, hello("7"))
        await agent.hears(m.Assign)
        for uid in range(2000, 2000 + 3 * MOST):
            await crowd.ask(await crowd.enter(uid))
        agent.say(m.Cancel(exit_code=130, reason="by the user"))
        assert (await agent.hears(m.End)).outcome.reason == "by the user"
        await crowd.ask(root)

    crowded(work)


def test_a_question_that_was_answered_keeps_no_place(crowded: Crowded) -> None:
    """Or whoever asks something on each of many connections, now and then, keeps all others out."""

    async def work(crowd: Crowd) -> None:
        held = []
        for uid in range(2000, 2000 + 3 * MOST):
            held.append(await crowd.enter(uid))
            await crowd.ask(held[-1])
        await crowd.ask(await crowd.enter(3000))
        for client in held[:MOST]:
            assert await gone(client)

    crowded(work)


def test_a_question_that_is_not_answered_yet_does(crowded: Crowded, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def save(*_: object) -> m.Denied:
        asked.set()
        await answered.wait()
        return m.Denied(reason="enough")

    monkeypatch.setattr("ckptless.daemon.ckptlessd.service.save", save)

    async def work(crowd: Crowd) -> None:
        asker = await crowd.enter(2000, Save(protocol=m.PROTOCOL, job="7", deadline_s=9.0))
        await asked.wait()  # until a thread has read it, it has said nothing
        for uid in range(3000, 3000 + 3 * MOST):
            await crowd.enter(uid)
        answered.set()
        assert (await asker.hears(m.Denied)).reason == "enough"

    crowded(work)
