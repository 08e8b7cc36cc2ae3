"""Every field of every message has bounds: none can bring a number, a text or a list without end."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

import ckptless.daemon
from ckptless.daemon.ckptlessd.service import _Heard
from ckptless.daemon.protocol import health, keeping, requests, ring, saving
from ckptless.daemon.protocol import messages as m
from ckptless.daemon.protocol.codec import Decoder, encode
from ckptless.daemon.protocol.errors import ProtocolError
from ckptless.daemon.protocol.limits import COMMAND_LIMIT, TEXT_LIMIT, clip, clip_command, one_line
from ckptless.daemon.protocol.peers import messages as p
from ckptless.daemon.protocol.records import EventRecord, JobRecord, printable
from ckptless.daemon.transport import handshake

KINDS = {
    "to the daemon": _Heard,
    "to an agent": m.ToAgent | m.Ping | saving.SaveNow,
    "answers": requests.Evicted
    | requests.Resized
    | health.HealthReport
    | saving.Saved
    | keeping.KeptList
    | keeping.KeepAnswer
    | keeping.Claimed,
    "page": requests.Page,
    "memory taken": keeping.Taken,
    "catalog of memory": keeping.Catalog,
    "from a rank": m.FromRank | saving.FromWriter | ring.FromRing,
    "to a rank": m.ToRank,
    "to a writer": saving.ToWriter,
    "to a ring": ring.ToRing,
    "daemons": p.DaemonMessage,
    "agents": p.AgentMessage,
    "opening": handshake.Opening,
    "answer": handshake.Answer,
    "proof": handshake.Proof,
}
# A loss is what training makes of it: NaN and infinity are among that. Nothing is decided by it.
FREE = {"loss"}


def is_open(kind: inspect.Type) -> bool:
    """Whether a value of this type itself may be as large as it likes."""
    match kind:
        case inspect.IntType() | inspect.FloatType():
            return (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)
        case inspect.StrType():
            return kind.max_length is None and not (kind.pattern or "").endswith("}$")
        case inspect.BytesType() | inspect.CollectionType() | inspect.DictType():
            return kind.max_length is None
        case inspect.AnyType() | inspect.RawType() | inspect.ExtType():
            return True
    return False


def inner(kind: inspect.Type) -> Iterator[tuple[str, inspect.Type]]:
    """The types that a type is made of, each with where it stands."""
    match kind:
        case inspect.CollectionType():
            yield "[]", kind.item_type
        case inspect.TupleType():
            yield from ((f"[{number}]", one) for number, one in enumerate(kind.item_types))
        case inspect.DictType():
            yield from (("[key]", kind.key_type), ("[]", kind.value_type))
        case inspect.UnionType():
            yield from (("", one) for one in kind.types)


def unbounded(kind: inspect.Type, where: str, seen: set[type]) -> Iterator[str]:
    """Fields without bounds, as the path to each."""
    if is_open(kind):
        yield where
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        for field in kind.fields:
            if field.name not in FREE:
                yield from unbounded(field.type, f"{kind.cls.__name__}.{field.name}", seen)
    for more, one in inner(kind):
        yield from unbounded(one, where + more, seen)


@pytest.mark.parametrize("name", KINDS)
def test_every_field_of_every_message_has_bounds(name: str) -> None:
    assert list(unbounded(inspect.type_info(KINDS[name]), name, set())) == []


def all_messages() -> set[type]:
    """Every message that the code has, whatever edge it is of."""
    for module in pkgutil.walk_packages(ckptless.daemon.__path__, "ckptless.daemon."):
        if not module.name.endswith(("__main__", "pyslurm_worker")):
            importlib.import_module(module.name)
    found: set[type] = set()
    waiting: list[type] = [m.Message]
    while waiting:
        subs: list[type] = waiting.pop().__subclasses__()
        found |= {sub for sub in subs if sub.__module__.startswith("ckptless.")}
        waiting += subs
    return found


def test_every_message_that_there_is_has_bounds() -> None:
    """Also one that is of no union yet, or of one that `KINDS` does not name."""
    messages = all_messages()
    assert len(messages) > 60
    seen: set[type] = set()
    found = [path for one in messages for path in unbounded(inspect.type_info(one), one.__name__, seen)]
    assert found == []


class _Open(msgspec.Struct):
    number: int
    share: float
    text: str
    data: bytes
    many: tuple[m.Place, ...]
    table: dict[str, int]


def test_the_walk_finds_what_has_none() -> None:
    found = set(unbounded(inspect.type_info(_Open), "", set()))
    names = ("number", "share", "text", "data", "many", "table", "table[key]", "table[]")
    assert found == {f"_Open.{name}" for name in names}


# ------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize(
    "message",
    [
        m.AgentEvent(level="info", kind="k", text="x" * 99_999),
        m.Cancel(exit_code=1, reason="x" * 99_999),
        m.Note(level="info", kind="k", text="x" * 99_999),
        m.Left(generation=1, cause=m.Cause(kind="raised", text="x" * 99_999)),
        m.End(outcome=m.Outcome(state="failed", exit_code=1, reason="x" * 99_999)),
    ],
)
def test_whatever_is_put_in_arrives(message: object) -> None:
    """A long exception must not end the connection of whoever tells of it."""
    decoder: Decoder[Any] = Decoder(m.FromAgent | m.ToAgent | m.FromRank, 1 << 20)
    data = encode(message)
    assert len(data) < 2 * TEXT_LIMIT
    assert decoder.feed(data) == [message]


def test_a_longer_text_is_refused() -> None:
    event = {"type": "AgentEvent", "level": "info", "kind": "k", "text": "x" * (TEXT_LIMIT + 1)}
    decoder: Decoder[Any] = Decoder(m.FromAgent, 1 << 20)
    with pytest.raises(ProtocolError, match="text"):
        decoder.feed(encode(event))


def test_what_is_cut_says_so() -> None:
    text = "a" * 5000 + "b" * 5000
    cut = clip(text)
    assert len(cut) == TEXT_LIMIT
    assert cut[0] == "a"
    assert cut[-1] == "b"
    assert "left out" in cut
    assert clip("short") == "short"
    assert clip_command(("python", "train.py")) == ("python", "train.py")
    many = clip_command(("word",) * 9999)
    assert sum(map(len, many)) <= COMMAND_LIMIT
    assert many[-1] == f"[... {9999 - len(many) + 1} more]"
    assert clip_command(("x" * 9999,)) == ("[... 1 more]",)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("plain ä 数", "plain ä 数"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x1b[2J\x00\x7f", "\\x1b[2J\\x00\\x7f"),
        ("a\u2028b\u202ec", "a\\u2028b\\u202ec"),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line


def test_rows_are_printable() -> None:
    event = EventRecord(
        event="e", job="1", node=0, at_s=0.0, level="info", kind="a\nb", generation=None, text="\x1b[2J"
    )
    row = printable(event)
    assert isinstance(row, EventRecord)
    assert (row.kind, row.text) == ("a\\nb", "\\x1b[2J")
    job = JobRecord(
        job="1",
        command=("a\nb",),
        world_size=1,
        nodes=1,
        spares=0,
        state="failed",
        started_s=0.0,
        reason="\n",
    )
    row = printable(job)
    assert isinstance(row, JobRecord)
    assert (row.command, row.reason) == (("a\\nb",), "\\n")


@pytest.mark.parametrize(
    "field", [{"slots_per_node": 20_000_000}, {"nodes": 1 << 16, "slots_per_node": 256}, {"spares": -1}]
)
def test_no_monstrous_jobs(field: dict[str, int]) -> None:
    spec = {"job": "1", "command": [], "nodes": 1, "spares": 0, "slots_per_node": 1}
    spec["limits"] = msgspec.to_builtins(m.Limits.from_max_stall(60))
    m_spec = msgspec.convert(spec, m.JobSpec)
    assert m_spec.world_size == 1
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**spec, **field}, m.JobSpec)
