"""Everything that takes bytes from somebody else, and valid bytes for each."""

from __future__ import annotations

import atexit
import base64
import contextlib
import gzip
import io
import os
import re
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import torch
import xxhash

from ckptless.daemon.agent.kvstore import parser as store_parser
from ckptless.daemon.agent.kvstore import protocol as store_protocol
from ckptless.daemon.agent.kvstore import wire as store_wire
from ckptless.daemon.agent.nccl import wire as nccl_wire
from ckptless.daemon.agent.ranks import zygote_messages
from ckptless.daemon.agent.ranks.link import Heard
from ckptless.daemon.agent.versions import requeue_memory
from ckptless.daemon.ckptctl.shared import render
from ckptless.daemon.ckptlessd.consensus import packing
from ckptless.daemon.ckptlessd.service import _Heard as FromOutside
from ckptless.daemon.launch import hostfile, wire
from ckptless.daemon.ledger.store import Ledger
from ckptless.daemon.protocol import (
    health,
    keeping,
    messages,
    outcome,
    requests,
    saved,
    saving,
    version,
)
from ckptless.daemon.protocol import records as m_records
from ckptless.daemon.protocol import ring as api_ring
from ckptless.daemon.protocol.codec import CONTROL_LIMIT, RANK_LIMIT, Decoder, encode
from ckptless.daemon.protocol.peers import messages as peers
from ckptless.daemon.protocol.peers.agreement import Decree, Durable
from ckptless.daemon.settings import agent_config as agent_config
from ckptless.daemon.settings import config as daemon_config
from ckptless.daemon.settings.site import load_settings
from ckptless.daemon.slurm import hostlist, pyslurm_worker, text
from ckptless.daemon.transport import bundles, handshake
from ckptless.doctor import pairing
from ckptless.pytorch_hooks.data import cache as data_cache
from ckptless.pytorch_hooks.data import files as sealed
from ckptless.pytorch_hooks.data.arrow import Arrow
from ckptless.pytorch_hooks.data.cache import Cache
from ckptless.pytorch_hooks.data.sources import Json, JsonLines
from ckptless.pytorch_hooks.state import catalog, codec, layout, record
from tests.unit.daemon.nccl_rank import decode_id, encode_check_in

from .seeds import build, members, structs_in

REPOSITORY = Path(__file__).parents[2]
SCRATCH = Path(tempfile.mkdtemp(prefix="ckptless-fuzz-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


@dataclass(frozen=True)
class Target:
    """`seed` makes valid bytes, `feed` takes any. `mend` puts checksums right, to get behind them."""

    name: str
    seed: Callable[[Random], bytes]
    feed: Callable[[bytes], object]
    mend: Callable[[bytes], bytes] | None = None
    kind: Any = None


# ------------------------------------------------------------------------------------------ edges

EDGES: dict[str, tuple[Any, int]] = {
    "daemon, from anybody": (FromOutside, CONTROL_LIMIT),
    "agent, from its daemon": (messages.ToAgent | saving.SaveNow, CONTROL_LIMIT),
    "agent, from its ranks": (Heard, RANK_LIMIT),
    "rank, from its agent": (messages.ToRank, RANK_LIMIT),
    "reader of a ring": (api_ring.ToReader, RANK_LIMIT),
    "producer of a ring": (api_ring.ToProducer, RANK_LIMIT),
    "writer of saved steps": (saving.ToWriter, RANK_LIMIT),
    "daemon, memory that is kept": (keeping.Taken, CONTROL_LIMIT),
    "agent, what was kept": (keeping.Claimed | messages.Denied, CONTROL_LIMIT),
    "agent, what is to be kept": (keeping.KeepAnswer | messages.Denied, CONTROL_LIMIT),
    "ckptctl evict": (requests.Evicted | messages.Denied, CONTROL_LIMIT),
    "ckptctl drill": (requests.Drilled | messages.Denied, CONTROL_LIMIT),
    "ckptctl resize": (requests.Resized | messages.Denied, CONTROL_LIMIT),
    "ckptctl save": (saving.Saved | messages.Denied, CONTROL_LIMIT),
    "ckptctl, the story": (requests.Page | messages.Denied, CONTROL_LIMIT),
    "ckptctl kept": (keeping.KeptList | messages.Denied, CONTROL_LIMIT),
    "ckptctl health": (health.HealthReport | messages.Denied, CONTROL_LIMIT),
    "host, from its launcher": (wire.ToHost, wire.LAUNCHER_LIMIT),
    "launcher, from a host": (wire.FromHost, wire.HOST_LIMIT),
    "node 0, from a node that meets it": (wire.FromMember, wire.MEMBER_LIMIT),
    "a node, from node 0": (wire.ToMember, CONTROL_LIMIT),
    "a node, from one that it is paired with": (pairing.Said, CONTROL_LIMIT),
    "daemon, from daemons": (peers.DaemonMessage, CONTROL_LIMIT),
    "agent, from agents": (peers.AgentMessage, CONTROL_LIMIT),
}
GREETINGS = (handshake.Opening, handshake.Answer, handshake.Proof)


def _nccl_check_in(data: bytes) -> None:
    opening = nccl_wire.decode_opening(data[:16].ljust(16, b"\0"))
    nccl_wire.decode_check_in(data[16 : 16 + opening.nbytes])


def _edge(name: str, kind: Any, limit: int) -> Target:
    def seed(chance: Random) -> bytes:
        return b"".join(
            encode(build(chance.choice(members(kind)), chance)) for _ in range(chance.choice((1, 1, 3)))
        )

    def feed(data: bytes) -> None:
        decoder: Decoder[Any] = Decoder(kind, limit)
        half = len(data) // 2
        decoder.feed(data[:half])
        decoder.feed(data[half:])

    def mend(data: bytes) -> bytes:
        """One frame of the right length."""
        return struct.pack("<I", max(len(data) - 4, 0)) + data[4:]

    return Target(name, seed, feed, mend, kind)


def _greeting(kind: Any) -> Target:
    return Target(
        f"greeting {kind.__name__}",
        lambda chance: msgspec.msgpack.encode(build(kind, chance)),
        lambda data: handshake.decode(data, kind),
        kind=kind,
    )


def edges() -> list[Target]:
    return [
        *(_edge(name, kind, limit) for name, (kind, limit) in EDGES.items()),
        *map(_greeting, GREETINGS),
        Target(
            "store, to the home",
            lambda chance: msgspec.msgpack.encode([build(store_wire.ToHome, chance) for _ in range(3)]),
            lambda data: store_wire.decode(data, store_wire.TO_HOME),
            kind=store_wire.ToHome,
        ),
        Target(
            "store, from the home",
            lambda chance: msgspec.msgpack.encode([build(store_wire.FromHome, chance) for _ in range(3)]),
            lambda data: store_wire.decode(data, store_wire.FROM_HOME),
            kind=store_wire.FromHome,
        ),
        Target(
            "zygote, a spawn",
            lambda chance: zygote_messages.encode(
                msgspec.structs.replace(build(zygote_messages.Spawn, chance), version=zygote_messages.VERSION)
            ),
            zygote_messages.decode_spawn,
            kind=zygote_messages.Spawn,
        ),
        Target(
            "zygote, a reply",
            lambda chance: zygote_messages.encode(build(zygote_messages.Reply, chance)),
            zygote_messages.decode_reply,
            kind=zygote_messages.Reply,
        ),
        Target(
            "zygote, a program",
            _program,
            _in_memfd(zygote_messages.read_program),
            kind=zygote_messages.Program,
        ),
        Target(
            "pyslurm, a request",
            lambda chance: msgspec.json.encode(build(pyslurm_worker.Request, chance)),
            lambda data: pyslurm_worker.decode(data, pyslurm_worker.Request),
            kind=pyslurm_worker.Request,
        ),
        Target(
            "pyslurm, an answer",
            lambda chance: msgspec.json.encode(build(pyslurm_worker.Answer, chance)),
            lambda data: pyslurm_worker.decode(data, pyslurm_worker.Answer),
            kind=pyslurm_worker.Answer,
        ),
        Target("store, torch's protocol", _store_stream, lambda data: store_parser.StoreParser().feed(data)),
        Target("NCCL, a check-in", _check_in, _nccl_check_in),
        Target("NCCL, an id", _unique_id, decode_id),
        # Compressed again each time: what is within is what shall be looked at.
        Target("decree, packed", lambda c: zlib.decompress(_packed(c)), _zipped(_unpack)),
        Target("bundle", lambda c: zlib.decompress(_bundle(c)), _zipped(_unbundle)),
        Target("bundle, compressed", _bundle, _unbundle),
    ]


def _decree(chance: Random, index: int) -> Decree:
    """As plans are: of some of 12 nodes, 2 ranks on each."""
    infos = [
        info for node in range(12) if chance.random() < 0.7 or node == 0 for info in [_info(node, chance)]
    ]
    places = [messages.Place(node=info.node, slot=slot) for info in infos for slot in range(2)]
    ranks, numbers = range(len(places)), [info.node for info in infos]
    held = [tuple(chance.sample(numbers, chance.randrange(1, min(4, len(numbers)) + 1))) for _ in ranks]
    assignment = messages.Assignment(
        job="4711",
        generation=index,
        term=1,
        leader=0,
        places=tuple(places),
        nodes=tuple(infos),
        restore_step=3,
        shards=tuple(ranks),
        tensor_nodes=tuple(enumerate(held)),
        record_nodes=tuple(held),
    )
    return Decree(index=index, voters=tuple(numbers[:7]), assignment=assignment)


def _info(node: int, chance: Random) -> messages.NodeInfo:
    return messages.NodeInfo(node=node, name=f"n{node}", address="::1", agent_port=chance.randrange(1, 9))


BASE = _decree(Random(1), 1)


def _packed(chance: Random) -> bytes:
    body = packing.pack(_decree(chance, 2), BASE)
    assert body is not None
    return body


def _unpack(body: bytes) -> object:
    with contextlib.suppress(packing.MissingBaseError):
        return packing.unpack(body, BASE, "", range(12))
    return None


def _bundle(chance: Random) -> bytes:
    group = [build(peers.Relayed, chance) for _ in range(chance.randrange(2, 5))]
    return zlib.compress(msgspec.msgpack.encode(group), 1)


def _unbundle(body: bytes) -> object:
    return bundles.unbundle(peers.Bundle(job="4711", body=body))


def _program(chance: Random) -> bytes:
    made = build(zygote_messages.Program, chance)
    return msgspec.msgpack.encode(made)


def _in_memfd(read: Callable[[int], object]) -> Callable[[bytes], object]:
    def feed(data: bytes) -> object:
        fd = os.memfd_create("fuzz")
        try:
            os.write(fd, data)
            return read(fd)
        finally:
            os.close(fd)

    return feed


def _store_stream(chance: Random) -> bytes:
    def some(nbytes: int = 12) -> bytes:
        data = chance.randbytes(chance.randrange(nbytes))
        return struct.pack("<Q", len(data)) + data

    def many(part: Callable[[], bytes]) -> bytes:
        count = chance.randrange(4)
        return struct.pack("<Q", count) + b"".join(part() for _ in range(count))

    fields: dict[str, Callable[[], bytes]] = {
        "key": some,
        "value": some,
        "signed": lambda: struct.pack("<q", chance.choice((-1, 0, 5, 1 << 40))),
        "nonce": lambda: struct.pack("<I", chance.randrange(1 << 32)),
        "keys": lambda: many(some),
        "items": lambda: many(lambda: some() + some()),
    }
    found = bytes([store_protocol.Op.VALIDATE]) + struct.pack("<I", store_protocol.MAGIC)
    for _ in range(chance.randrange(1, 5)):
        op = chance.choice(list(store_parser._LAYOUT))
        found += bytes([op]) + b"".join(fields[f.__name__]() for f in store_parser._LAYOUT[op][1])
    return found


def _check_in(chance: Random) -> bytes:
    nbytes = chance.choice(list(nccl_wire.LAYOUTS))
    listen = nccl_wire.Address(chance.choice(("127.0.0.1", "::1")), chance.randrange(1, 1 << 16))
    found = nccl_wire.CheckIn(1, 2, 0, 1, 0, listen, b"x" * 8)
    return nccl_wire.encode_message(chance.randrange(1 << 64), encode_check_in(found, nbytes))


def _unique_id(chance: Random) -> bytes:
    return nccl_wire.encode_id(
        nccl_wire.UniqueId(7, nccl_wire.Address("10.0.0.1", chance.randrange(1, 1 << 16)))
    )


# ------------------------------------------------------------------------------------------ files


def _header(chance: Random, payload: bytes = b"") -> version.Header:
    nbytes = len(payload) or chance.choice((1, 4096, 10 * 4096 + 1))
    data = payload or bytes(nbytes)
    chunks = tuple(version.digest_of(data[a:b]) for a, b in version.spans(nbytes, 4096))
    return version.Header("4711", 0, 1, 7, 2, "ab" * 16, nbytes, chunks, 4096)


def _mend_version(data: bytes) -> bytes:
    return data[:-16] + xxhash.xxh3_128_digest(data[:-16]) if len(data) >= 16 else data


def _mend_sealed(data: bytes) -> bytes:
    head = codec._HEADER.size
    return data if len(data) < head else codec.seal(data[head:])


def _mend_digest_before(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data[16:]) + data[16:] if len(data) > 16 else data


def _tree(chance: Random) -> Any:
    leaves = [
        None,
        True,
        5,
        1 << 80,
        1.5,
        "x",
        b"y",
        torch.arange(6).reshape(2, 3),
        np.ones(3),
        (1, "a"),
        {3: 4},
    ]
    return {"a": chance.choice(leaves), "b": [chance.choice(leaves), {"c": chance.choice(leaves)}]}


def _batch(chance: Random) -> bytes:
    encoded = codec.encode_apart(_tree(chance))
    data = bytearray(encoded.nbytes)
    for offset, part in encoded.parts:
        data[offset : offset + len(part)] = part
    return bytes(data)


def _layout(chance: Random) -> layout.Layout:
    entries, at = [], 0
    for number in range(chance.randrange(1, 4)):
        entries.append(layout.Entry(f"model:{number}", "float32", (2, 3), at, 24))
        at += layout._up(24)
    made = tuple(entries)
    return layout.Layout(made, at, layout._digest(made, at))


def _record(chance: Random) -> bytes:
    made = msgspec.structs.replace(
        build(record._Record, chance),
        cursor=codec.pack(_tree(chance)),
        ddp_layouts={},
        layout=_layout(chance).packed,
        catalog=_catalog(chance),
    )
    return codec.seal(msgspec.msgpack.encode(made))


def _catalog(chance: Random) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(build(catalog.Catalog, chance)))


def _read_manifest(data: bytes) -> object:
    (SCRATCH / saved.MANIFEST).write_bytes(data)
    try:
        return saved.read_manifest(SCRATCH)
    except OSError:  # it names files that are not there, which is said as such
        return None


def _read_outcome(data: bytes) -> object:
    outcome.outcome_path(SCRATCH).write_bytes(data)
    return outcome.read_outcome(SCRATCH, "4711")


def _vote(data: bytes) -> object:
    """A row of the ledger, however it came to be."""
    with Ledger.open(SCRATCH / "ledger.db") as ledger:
        ledger.save_vote("4711", "abc", DURABLE)
        with ledger._engine.begin() as connection:
            connection.exec_driver_sql("UPDATE votes SET state = ?", (data.decode(errors="replace"),))
        return ledger.vote("4711")


def _zipped(read: Callable[[bytes], object]) -> Callable[[bytes], object]:
    return lambda data: read(zlib.compress(data, 1))


def files() -> list[Target]:
    def json_of(kind: Any) -> Callable[[Random], bytes]:
        return lambda chance: msgspec.json.encode(build(kind, chance))

    return [
        Target("version header", lambda c: version.encode(_header(c)), version.decode, _mend_version),
        Target("batch", _batch, lambda data: codec.decode_apart(bytearray(data), 0, len(data))),
        Target("state tree", lambda c: codec.encode(_tree(c)), codec.decode, _mend_sealed),
        Target("record", _record, record.read, _mend_sealed),
        Target("layout", lambda c: msgspec.msgpack.encode(_layout(c)), _zipped(layout.unpack)),
        Target("catalog", lambda c: zlib.decompress(_catalog(c)), _zipped(catalog.read)),
        Target("zipped", lambda c: _layout(c).packed, layout.unpack),
        Target(
            "row of numbers",
            lambda _c: data_cache.pack_numbers(np.array([0, 10, 20, 30])),
            data_cache.unpack_numbers,
            _mend_numbers,
        ),
        Target(
            "catalog of kept memory",
            lambda c: _mend_digest_before(bytes(16) + msgspec.msgpack.encode(build(keeping.Catalog, c))),
            _in_memfd(requeue_memory._read_catalog),
            _mend_digest_before,
        ),
        Target("saved manifest", json_of(saved.Manifest), _read_manifest),
        Target("outcome file", json_of(outcome._OutcomeFile), _read_outcome),
        Target("bulk transfer", lambda c: c.randbytes(3 * 4096 + 5), _receive),
    ]


def _mend_numbers(data: bytes) -> bytes:
    head, content = data[: data_cache._NUMBERS.size], data[data_cache._NUMBERS.size :]
    return head[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(content)) + content


PAYLOAD = Random(1).randbytes(3 * 4096 + 5)
HEADER = _header(Random(1), PAYLOAD)


def _receive(data: bytes) -> None:
    """What comes over a bulk transfer, in pieces: only the very bytes are taken."""
    view = memoryview(data[: len(PAYLOAD)].ljust(len(PAYLOAD), b"\0"))
    digests = version.ChunkDigests(view, HEADER.chunk_nbytes)
    for upto in range(0, len(view), 1000):
        digests.came(upto)
    for index, digest in enumerate(digests.finish()):
        HEADER.check_chunk(index, digest)
    assert bytes(view) == PAYLOAD, "other bytes were taken"


# -------------------------------------------------------------------------------- files of training data


def _lines(chance: Random) -> bytes:
    return b"".join(msgspec.json.encode(build(m_records.EventRecord, chance)) + b"\n" for _ in range(4))


def _array(chance: Random) -> bytes:
    return b"[" + b",".join(_lines(chance).splitlines()) + b"]"


def _of_source(make: Callable[..., Any], name: str) -> Callable[[bytes], object]:
    """Every sample of a file that has these bytes, in a cache of its own."""

    def feed(data: bytes) -> object:
        with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
            (Path(folder) / name).write_bytes(data)
            source = make(Path(folder) / name, cache=Cache(Path(folder) / "cache"))
            try:
                source.open()
                return [source.get(index) for index in range(len(source))]
            finally:
                source.close()

    return feed


SEALING_KEY, SEALED_NAME = bytes(range(32)), "an entry"


def _sealed(chance: Random) -> bytes:
    out = io.BytesIO()
    writer = sealed.SealingWriter(out, SEALING_KEY, SEALED_NAME)
    writer.write(chance.randbytes(chance.choice((0, 1, 5000))))
    writer.finish()
    return out.getvalue()


def _unseal(data: bytes) -> object:
    path = SCRATCH / "sealed"
    path.write_bytes(data)
    file = sealed.SealedFile(path, SEALING_KEY, SEALED_NAME)
    try:
        return file.read(0, file.stamp.nbytes)
    finally:
        file.close()


def _arrow(kind: str) -> Callable[[Random], bytes]:
    def seed(chance: Random) -> bytes:
        table = pyarrow.table(
            {
                "id": list(range(20)),
                "tokens": [[1, 2, 3]] * 20,
                "text": ["x" * chance.randrange(9) for _ in range(20)],
                "label": pyarrow.array(["a", "b"] * 10).dictionary_encode(),
            }
        )
        out = io.BytesIO()
        if kind == "parquet":
            pyarrow.parquet.write_table(table, out)
        else:
            new = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
            with new(out, table.schema) as writer:
                writer.write_table(table)
        return out.getvalue()

    return seed


def data_files() -> list[Target]:
    return [
        Target("an Arrow file", _arrow("file"), _of_source(Arrow, "a.arrow")),
        Target("an Arrow stream", _arrow("stream"), _of_source(Arrow, "a.arrows")),
        Target("a Parquet file", _arrow("parquet"), _of_source(Arrow, "a.parquet")),
        Target("JSON lines", _lines, _of_source(JsonLines, "a.jsonl")),
        Target("JSON lines, gzip", lambda c: gzip.compress(_lines(c), 1), _of_source(JsonLines, "a.gz")),
        Target("a JSON array", _array, _of_source(Json, "a.json")),
        Target("an encrypted entry", _sealed, _unseal),
    ]


# ------------------------------------------------------------------------------------------- texts


def _shown(data: bytes) -> None:
    """What `ckptctl events` prints of an event moves no cursor and begins no line."""
    line = render.harmless(data.decode(errors="replace"))
    assert line.isprintable(), line


SECRET = "Secret_0123456789"
DURABLE = build(Durable, Random(1))


def _jobs(chance: Random) -> bytes:
    values = {
        "JobID": "4711",
        "JobArrayID": chance.choice(("4711", "2_[1-9%4]", "2_3")),
        "UserID": "5001",
        "State": "RUNNING",
        "RestartCnt": "1",
        "NodeList": chance.choice(("node[01-04,7]", "a,b[1-2]", "(null)")),
        "BatchFlag": "1",
        "BatchHost": "node01",
        "Partition": "debug",
        "StartTime": chance.choice(("2026-11-21T15:08:47", "N/A")),
        "EndTime": "Unknown",
        "TimeLimit": chance.choice(("1-02:03:04", "UNLIMITED", "30:00")),
        "Reason": "None",
        "Name": "a job; with\nlines",
        "Comment": "(null)",
    }
    form = text.JobFormat(SECRET)
    found = "".join(values[name] + form._end(name) for name in text._JOB_FIELDS)
    return (found * chance.choice((1, 2))).encode()


def _recorded(name: str) -> Callable[[Random], bytes]:
    found = sorted((REPOSITORY / "tests/slurm/recorded").glob(f"*/{name}"))

    def seed(chance: Random) -> bytes:
        lines = chance.choice(found).read_bytes().splitlines(keepends=True)
        begin = chance.randrange(len(lines))
        return b"".join(lines[begin : begin + chance.choice((1, 3))])

    return seed


def _as_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode(errors="replace"))


# Every key with one word, a list or a mapping is there; other comments are sentences.
SETTINGS = re.sub(
    r"(?m)^( *)# ?(?= *[a-z_]+:(?: \S+| \[.*\]| \{.*\})?$)",
    r"\1",
    (REPOSITORY / "etc/ckptless.yaml").read_text(),
)


# What YAML's own constructors and its recursion make of some words.
TRAPS = (
    "",
    "daemon: {port: 6822}",
    "a: &a [*a]",
    "a: !!python/object:os.system x",
    "daemon: {port: 2026-13-45}",
    "daemon: {port: " + "9" * 5000 + "}",
    "domains: " + "[" * 400,
    "domains: {rack: " + "{a: " * 500 + "}" * 501,
    "max_stall: !!float x",
    "max_stall: !!binary x",
    "max_stall: !!bool x",
    "max_stall: !!timestamp x",
    "? {a: b}\n: c",
    "<<: 5",
    "a: &x [1]\nb: *y",
)


def _settings(chance: Random) -> bytes:
    lines = SETTINGS.splitlines()
    if chance.random() < 0.7:
        roots = (line for line in lines if line[:1].isalpha() and not line.startswith("version"))
        lines = ["version: 1", *(line for line in roots if chance.random() < 0.3)]
    trap = chance.choice(TRAPS) if chance.random() < 0.5 else ""
    return "\n".join([*lines, trap]).encode()


def _load_settings(data: bytes) -> object:
    path = SCRATCH / "ckptless.yaml"
    path.write_bytes(data)
    return load_settings(path)


def _load_config(kind: Any) -> Callable[[bytes], object]:
    def feed(data: bytes) -> object:
        path = SCRATCH / "config.json"
        path.write_bytes(data)
        return daemon_config.load(path, kind)

    return feed


def _step_environment(data: bytes) -> object:
    config = base64.b64encode(data).decode()
    return agent_config.of_this_node({agent_config.AGENT_CONFIG: config, "SLURMD_NODENAME": "localhost"}, 2)


def texts() -> list[Target]:
    return [
        Target("Slurm's jobs", _jobs, _as_text(text.JobFormat(SECRET).read)),
        Target("Slurm's nodes", _recorded("nodes.txt"), _as_text(text.read_nodes)),
        Target(
            "Slurm's topology",
            lambda _: (
                b"SwitchName=s0 Level=0 LinkSpeed=1 Nodes=node[01-02]\nBlockName=b BlockIndex=0 Nodes=a,b\n"
            ),
            _as_text(text.read_topology),
        ),
        Target("hostlist", lambda _: b"node[01-04,7,9-12],b[1-2]x,c", _as_text(hostlist.expand)),
        Target(
            "hostfile",
            lambda _: b"# all\nnode-1 slots=8 address=10.1.0.1\n\nnode-2 slots=8\nn3.x address=::1 # last\n",
            _as_text(lambda said: hostfile.read_hosts(said, "it")),
        ),
        Target("ckptless.yaml", _settings, _load_settings),
        Target(
            "a local daemon's file",
            lambda c: msgspec.json.encode(build(daemon_config.LocalConfig, c)),
            _load_config(daemon_config.LocalConfig),
        ),
        Target("YAML of such a file", _settings, _load_config(daemon_config.LocalConfig)),
        Target(
            "a local agent's file",
            lambda c: msgspec.json.encode(build(agent_config.AgentConfig, c)),
            _load_config(agent_config.AgentConfig),
        ),
        Target(
            "a step's environment",
            lambda c: msgspec.json.encode(build(agent_config.SharedConfig, c)),
            _step_environment,
        ),
        Target("text of an event, on a terminal", lambda _: b"a\x1b[2J\x9b\nb\xe2\x80\xaec", _shown),
        Target("a vote in the ledger", lambda _: msgspec.json.encode(DURABLE), _vote),
    ]


def covered() -> set[type]:
    """Every struct of whose type some seed of an edge is."""
    return {one for target in edges() if target.kind is not None for one in structs_in(target.kind)}
