"""The page of a rank: what it writes is what its agent reads, and garbage does no harm."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from ckptless.daemon.agent.core.slots import Slot
from ckptless.daemon.agent.core.stillness import waits_in
from ckptless.daemon.agent.ranks.standing import Page as AgentPage
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol import page as p
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, Decoder, encode
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.agent_session.page import FIRST_STEPS, MESSAGES, MOST_S, NOWHERE, Page, operation
from ckptless.pytorch_hooks.torch_private import compiling


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("page", os.MFD_CLOEXEC)
    os.ftruncate(made, p.NBYTES)
    yield made
    os.close(made)


@pytest.fixture
def reader(fd: int) -> Iterator[p.PageReader]:
    one = p.PageReader(fd)
    yield one
    one.close()


@pytest.fixture
def page(fd: int) -> Page:
    made = Page(os.dup(fd))
    made.renew_groups()
    return made


def test_a_page_that_nobody_has_taken_says_nothing(reader: p.PageReader) -> None:
    assert not reader.taken
    assert reader.groups() == []
    assert reader.steps_after(-1) == []


def test_all_that_a_rank_does_moves_its_page(page: Page, reader: p.PageReader) -> None:
    assert reader.taken
    at = page.add_group("0", 4)
    moves: list[Callable[[], object]] = [
        lambda: page.begin(7),
        lambda: page.enter(p.DATA),
        lambda: page.enter(p.COMPUTE),
        lambda: page.call(at, operation("allreduce"), 72),
        lambda: page.done(at),
        lambda: page.call(at, operation("allreduce"), 72, p.QUEUED),
        lambda: page.waits(for_agent=True),
        lambda: page.stepped(8, 1.0, 0.1),
        lambda: page.stepped(9, 2.0, 0.1),
        lambda: page.add_group("1", 2),
    ]
    for number, move in enumerate(moves):
        before = reader.moving()
        move()
        assert reader.moving() != before, number
    before = reader.moving()
    page.done(NOWHERE)
    page.call(NOWHERE, 1, 1)
    assert reader.moving() == before


def test_collectives_are_counted_by_group(page: Page, reader: p.PageReader) -> None:
    one, two = page.add_group("0", 4), page.add_group("a" * 60, 2)
    for number, elements in (("allreduce", 72), ("broadcast", 1 << 40), ("no such", 3)):
        page.call(one, operation(number), elements)
    page.done(one)
    page.call(two, operation("barrier"), 0, p.QUEUED)
    page.call(MESSAGES, operation("recv"), 5)
    messages, first, second = reader.groups()
    assert (messages.name, messages.operation, messages.elements) == ("", "recv", 5)
    assert (first.name, first.size, first.begun, first.done) == ("0", 4, 3, 1)
    assert (first.operation, first.elements) == ("broadcast", 1 << 40), "the oldest that is not done"
    page.done(one)
    assert reader.groups()[1].operation == "another call"
    assert (second.name, second.begun, second.queued, second.operation) == ("a" * 48, 0, 1, "barrier")
    page.renew_groups()
    assert [group.name for group in reader.groups()] == [""]
    assert page.add_group("0", 4) == one
    assert reader.groups()[1].begun == 0


def test_groups_without_room_are_counted_nowhere(page: Page, reader: p.PageReader) -> None:
    places = [page.add_group(str(number), 2) for number in range(p.GROUPS + 3)]
    assert places[p.GROUPS - 1 :] == [NOWHERE] * 4
    assert len(reader.groups()) == p.GROUPS


def test_steps_are_read_once_each_and_the_first_are_none(page: Page, reader: p.PageReader) -> None:
    page.begin(10)
    for number in range(1, 9):
        page.waited_for_data(0.25)
        page.stepped(10 + number, float(number), 0.125)
    found = reader.steps_after(-1)
    assert [one.step for one in found] == list(range(11 + FIRST_STEPS, 19))
    assert found[0] == p.Stepped(14, 1.0, 0.0, 0.25, 0.125)
    assert found[0].own_s == 0.875
    assert [one.step for one in reader.steps_after(16)] == [17, 18]
    page.begin(12)
    page.stepped(13, 20.0, 0.0)
    assert reader.steps_after(18) == []
    for number in range(14, 300):
        page.stepped(number, float(number), 0.0)
    assert [one.step for one in reader.steps_after(18)] == list(range(300 - p.STEPS, 300))


def test_what_was_waited_for_is_told_of_its_step(page: Page, reader: p.PageReader) -> None:
    page.begin(0)
    for number in range(1, FIRST_STEPS + 1):
        page.stepped(number, time.monotonic(), 0.0)
    now = time.monotonic()
    page.waited(now - 1.0)
    page.tail(now - 3.0)
    page.tail(now - 2.0)
    page.tail(now - 2.5)  # it began before the last one
    page.stepped(FIRST_STEPS + 1, time.monotonic(), 0.0)
    page.stepped(FIRST_STEPS + 2, time.monotonic(), 0.0)
    waited, not_waited = reader.steps_after(0)
    assert waited.waited_s == pytest.approx(3.0, abs=0.2)
    assert not_waited.waited_s == 0.0


def test_a_phase_of_the_script_has_its_name_and_its_time(page: Page, reader: p.PageReader) -> None:
    page.enter(p.COMPUTE)
    with page.phase("evaluation é", 60.0):
        assert reader.phase == "evaluation é"
        assert reader.until == pytest.approx(time.monotonic() + 60.0, abs=5.0)
        with page.phase("save", 1.0):
            assert reader.phase == "save"
            assert (reader.until or 0.0) > time.monotonic() + 30.0, "the longer one counts"
        assert reader.phase == "evaluation é"
        assert (reader.until or 0.0) < time.monotonic() + 100.0
    assert (reader.phase, reader.until) == ("compute", None)
    for wrong in (0.0, -1.0, float("nan"), MOST_S * 2):
        with pytest.raises(UsageError, match="up_to"), page.phase("x", wrong):
            pass


def test_a_compilation_may_take_its_time(page: Page, reader: p.PageReader) -> None:
    page.enter(p.DATA)
    page.compiles()
    assert reader.phase == "compile"
    assert (reader.until or 0.0) > time.monotonic() + 60.0
    page.compiled()
    assert (reader.phase, reader.until) == ("data", None)


def test_torch_says_when_it_compiles(page: Page) -> None:
    """By a name of its own, which may move: then a compilation would pass for a hang."""
    page.enter(p.DATA)
    seen: list[int] = []

    def backend(module: Any, _inputs: Any) -> Any:
        seen.append(page.words[p.PHASE])
        return module.forward

    torch.compiler.reset()
    for _ in range(2):
        compiling.tell(*page.compile_hooks)
    torch.compile(lambda x: (x * 2).sum(), backend=backend)(torch.ones(3))
    assert seen == [p.COMPILE]
    assert (page.words[p.PHASE], page.words[p.UNTIL]) == (p.DATA, 0)


def test_the_time_of_all_steps_is_kept_by_what_it_was_for(page: Page, reader: p.PageReader) -> None:
    assert reader.spent() == (0.0, (0.0,) * 5)
    page.begin(7)
    # The first of a generation is the recovery's, or the start's.
    page.waited_for_data(0.5)
    page.stepped(8, 10.0, 0.25)
    assert reader.spent() == (10.0, (0.0,) * 5)
    page.waited_for_data(0.5)
    page.stepped(9, 14.0, 0.25)
    assert reader.spent() == (14.0, (3.25, 0.5, 0.25, 0.0, 0.0))
    # After a fault: again the first, one that had been done, and one that is new.
    page.begin(8)
    page.stepped(9, 20.0, 0.25, again=True)
    page.waited_for_data(0.5)
    page.stepped(10, 22.0, 0.25, again=True)
    page.stepped(11, 23.0, 0.0)
    assert reader.spent() == (23.0, (4.25, 0.5, 0.25, 0.0, 2.0))
    with page.phase("checkpoint", 60), page.phase("checkpoint", 60):
        time.sleep(0.01)
    with page.phase("evaluation", 60):
        time.sleep(0.01)
    page.stepped(12, 24.0, 0.0)
    _, (training_s, *_, checkpoint_s, redone_s) = reader.spent()
    assert training_s + checkpoint_s == pytest.approx(5.25)
    assert 0.01 <= checkpoint_s < 0.5
    assert redone_s == 2.0


def test_a_slot_adds_up_what_its_processes_have_spent(fd: int) -> None:
    slot = Slot(0)
    assert slot.told(5.0).spent is None
    for process in range(3):
        agents = AgentPage.make(0.0)
        mine = Page(os.dup(agents.fd))
        mine.renew_groups()
        mine.begin(4)
        slot.enter("restored", 1, 0.0)
        slot.step = 4
        for step in range(1, 4):
            mine.stepped(4 + step, 100.0 * process + step, 0.25)
            agents.count(slot, own=step < 3)
            # Of a process that is not the slot's any more no step counts.
            assert slot.step == 4 + min(step, 2)
        agents.close()
    told = slot.told(210.0).spent
    assert told == m.Spent(training_s=3 * 1.5, commit_s=3 * 0.5, since_s=210.0 - 203.0)
    assert told.total_s == 6.0


def test_a_rank_that_lies_about_its_time_is_believed_within_limits() -> None:
    slot = Slot(0)
    for _ in range(30):
        slot.spend([p.MOST_S] * 5, 1e9)
    state = m.AgentState(seq=1, slots=(slot.told(0.0),))
    assert Decoder(m.AgentState, CONTROL_LIMIT).feed(encode(state)) == [state]


def test_garbage_is_read_within_bounds(fd: int, reader: p.PageReader) -> None:
    for seed in range(2000):
        draw = random.Random(seed)
        data = bytearray(draw.randbytes(p.NBYTES) if seed % 2 else os.pread(fd, p.NBYTES, 0))
        for _ in range(draw.randint(1, 40)):
            value = draw.choice((0, 1, -1, 2**63 - 1, -(2**63), draw.getrandbits(62), draw.randint(0, 90)))
            at = 8 * draw.randrange(p.WORDS)
            data[at : at + 8] = value.to_bytes(8, "little", signed=True)
        os.pwrite(fd, data, 0)
        assert reader.taken in (True, False)
        assert len(reader.phase) <= 64
        call = waits_in(reader.groups(), for_agent=reader.waits)
        still = m.Still(
            still_s=1.0,
            late=True,
            how="working",
            phase=reader.phase,
            call=call,
            queued=tuple((group.name, group.queued) for group in reader.groups()),
        )
        steps = reader.steps_after(draw.randint(-1, 5))
        done_at, spent = reader.spent()
        one = Slot(0, phase="restored", generation=1, pace=p.pace_of(steps) if steps else None)
        one.stands(still, reader.until)
        one.spend(spent, done_at)
        slot = one.told(0.0)
        # What an agent makes of it, its daemon takes.
        state = m.AgentState(seq=1, slots=(slot,))
        assert Decoder(m.AgentState, CONTROL_LIMIT).feed(encode(state)) == [state]
        for group in reader.groups():
            assert 0 <= group.done <= group.begun
            assert 0 <= group.elements <= p.MOST_ELEMENTS
        for step in steps:
            assert 0.0 <= step.own_s <= p.MOST_S


def test_calls_of_many_threads_are_all_counted(page: Page, reader: p.PageReader) -> None:
    """As a generation's scope does it: under one lock."""
    at, lock = page.add_group("0", 2), threading.Lock()

    def calls() -> None:
        for _ in range(2000):
            with lock:
                page.call(at, 1, 1)
            with lock:
                page.done(at)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = reader.groups()[1]
    assert (found.begun, found.done) == (8000, 8000)
