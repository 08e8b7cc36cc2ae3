"""An encrypted cache: nothing of the data on the disk, nothing changed is read, the same batches."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import DataError, ProtocolError, UsageError
from ckptless.pytorch_hooks.agent_session import job_key
from ckptless.pytorch_hooks.data import Arrow, Cache, JsonLines, MappedLoader, Pack
from ckptless.pytorch_hooks.data import files as sealed

pytest.importorskip("cryptography")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

KEY, OTHER = b"k" * 32, b"o" * 32
CHUNK = sealed.CHUNK_NBYTES
SECRET = "a word that nobody may read"


@pytest.fixture(autouse=True)
def key() -> Iterator[None]:
    before = job_key._key
    job_key.learn(KEY)
    yield
    job_key._key = before


def put(data: bytes) -> Any:
    return lambda out: out.write(data)


def whole(cache: Cache, name: str, data: bytes) -> bytes:
    return cache.read(name, put(data))


def entries(cache: Cache, suffix: str) -> list[Path]:
    return list(cache.folder.glob(f"*{suffix}.sealed"))


def rows(count: int = 4000) -> list[dict[str, Any]]:
    return [{"id": n, "text": f"{SECRET} {n}"} for n in range(count)]


def gzipped(path: Path) -> Path:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows()).encode()))
    return path


# ------------------------------------------------------------------------------------------------- files


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 17, 40 * CHUNK]),
    st.lists(st.tuples(st.integers(0, 40 * CHUNK), st.integers(0, 2 * CHUNK)), max_size=8),
    st.integers(1, 2 * CHUNK),
)
def test_any_part_of_any_size(tmp_path: Path, nbytes: int, reads: list[tuple[int, int]], piece: int) -> None:
    data = bytes(n * 7 % 251 for n in range(251)) * (nbytes // 251 + 1)
    data = data[:nbytes]
    path = tmp_path / "entry"
    with path.open("wb") as out:
        writer = sealed.SealingWriter(out, KEY, "entry")
        for begin in range(0, max(1, nbytes), piece * 5):
            writer.write(data[begin : begin + piece * 5])
        assert writer.tell() == nbytes
        writer.finish()
    file = sealed.SealedFile(path, KEY, "entry")
    assert file.stamp.nbytes == nbytes
    for begin, count in reads:
        if begin + count <= nbytes:
            assert file.read(begin, begin + count) == data[begin : begin + count]
    assert file.read(0, nbytes) == data
    with pytest.raises(DataError, match="ends at byte"):
        file.read(0, nbytes + 1)
    file.close()


def test_two_files_of_the_same_bytes_are_not_the_same(tmp_path: Path) -> None:
    cache = Cache(tmp_path, encrypt=True)
    one, two = (cache.entry(name, put(b"x" * 1000)).read_bytes() for name in "ab")
    assert one[-1000:] != two[-1000:]
    assert len(set(one)) > 200


@pytest.mark.parametrize("at", [3, 20, 40, sealed.HEADER_NBYTES, -1], ids=str)
def test_a_damaged_entry_is_made_again(tmp_path: Path, at: int) -> None:
    cache = Cache(tmp_path, encrypt=True)
    path = cache.entry("a", put(b"x" * 1000))
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    assert whole(cache, "a", b"anew") == b"anew"
    ((kind, text),) = cache.told
    assert kind == "data-cache-remade"
    assert text.startswith(str(path))


def test_what_was_changed_in_the_middle_is_not_read(tmp_path: Path) -> None:
    cache = Cache(tmp_path, encrypt=True)
    path = cache.entry("a", put(b"x" * (4 * CHUNK)))
    data = bytearray(path.read_bytes())
    begin = sealed.HEADER_NBYTES + CHUNK + sealed.TAG_NBYTES
    data[begin + 100] ^= 1
    path.write_bytes(data)
    file = cache.open("a", put(b""))
    assert file.read(0, CHUNK) == b"x" * CHUNK
    assert file.read(2 * CHUNK, 4 * CHUNK) == b"x" * (2 * CHUNK)
    with pytest.raises(DataError, match="chunk 1 is damaged or was changed; remove it"):
        file.read(CHUNK - 1, CHUNK + 1)
    file.close()


def test_chunks_are_not_taken_for_each_other(tmp_path: Path) -> None:
    cache = Cache(tmp_path, encrypt=True)
    step = CHUNK + sealed.TAG_NBYTES
    changes: dict[str, Callable[[bytes, bytes, bytes, bytes], bytes]] = {
        "exchanged": lambda head, a, b, c: head + b + a + c,
        "cut off": lambda head, a, b, _c: head + a + b,
        "longer": lambda head, a, b, c: head + a + b + b + c,
    }
    for name, change in changes.items():
        path = cache.entry(name, put(b"a" * CHUNK + b"b" * CHUNK + b"c" * 10))
        data = path.read_bytes()
        head, body = data[: sealed.HEADER_NBYTES], data[sealed.HEADER_NBYTES :]
        path.write_bytes(change(head, body[:step], body[step : 2 * step], body[2 * step :]))
        try:
            file = sealed.SealedFile(path, KEY, path.name)
        except ProtocolError:
            continue
        with pytest.raises(DataError, match="damaged or was changed"):
            file.read(0, file.stamp.nbytes)
        file.close()


def test_an_entry_is_not_taken_for_another_one(tmp_path: Path) -> None:
    cache = Cache(tmp_path, encrypt=True)
    cache.entry("a", put(b"of a")).rename(tmp_path / "b.sealed")
    assert whole(cache, "b", b"of b") == b"of b"
    assert len(cache.told) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_no_entry(tmp_path: Path, noise: bytes) -> None:
    path = tmp_path / "noise"
    for data in (noise, sealed.new_header(KEY) + noise):
        path.write_bytes(data)
        with pytest.raises(ProtocolError):
            sealed.SealedFile(path, KEY, "noise")


# ------------------------------------------------------------------------------------------------- cache


def test_entries_of_another_key_are_made_again(tmp_path: Path) -> None:
    path = gzipped(tmp_path / "a.gz")
    old = JsonLines(path, cache=Cache(tmp_path / "cache", encrypt=True))
    old.open()
    job_key.learn(OTHER)
    events: list[tuple[str, str]] = []
    loader = MappedLoader(JsonLines(path, cache=Cache(tmp_path / "cache", encrypt=True)), batch_size=4)
    loader.on_event = lambda kind, text: events.append((kind, text))
    assert len(loader) == 1000
    # The index is of the new copy, and so another entry.
    ((kind, text),) = events
    assert kind == "data-cache-remade"
    assert text.endswith("it was encrypted with another job's key")
    # Who has it open keeps what it has.
    assert old.get(3999) == rows()[3999]
    old.close()


def test_without_a_key_of_the_agent_a_process_has_its_own(tmp_path: Path) -> None:
    job_key._key = b""
    cache = Cache(tmp_path, encrypt=True)
    assert whole(cache, "a", b"x") == whole(cache, "a", b"y") == b"x"
    assert len(job_key.get()) == job_key.KEY_NBYTES


def test_without_cryptography_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(UsageError, match="needs cryptography: pip install 'ckptless"):
        JsonLines(gzipped(tmp_path / "a.gz"), cache=Cache(tmp_path / "cache", encrypt=True)).open()
    assert not list((tmp_path / "cache").glob("*.part"))


def _open(path: Path, folder: Path, out: Any) -> None:
    cache = Cache(folder, encrypt=True)
    source = JsonLines(path, cache=cache)
    source.open()
    out.put((len(source), source.get(17), cache.told))


def test_processes_share_entries(tmp_path: Path) -> None:
    path = gzipped(tmp_path / "a.gz")
    fork = multiprocessing.get_context("fork")
    out = fork.Queue()
    processes = [fork.Process(target=_open, args=(path, tmp_path / "cache", out)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [out.get(timeout=60) for _ in processes] == [(4000, rows()[17], [])] * 4
    for process in processes:
        process.join(60)


# ------------------------------------------------------------------------------------------------- batches


def sources(tmp_path: Path, cache: Cache) -> list[Any]:
    parquet = tmp_path / "a.parquet"
    if not parquet.exists():
        gzipped(tmp_path / "a.gz")
        pq.write_table(pa.Table.from_pylist(rows()), parquet, row_group_size=900)
    chosen = Arrow(parquet, columns=["text", "id"], cache=cache)
    return [JsonLines(tmp_path / "a.gz", cache=cache), Arrow(parquet, cache=cache), chosen]


def tokens(row: dict[str, Any]) -> list[int]:
    return [ord(letter) for letter in row["text"]]


def batches(source: Any, cache: Cache) -> list[torch.Tensor]:
    loader = MappedLoader(
        source,
        batch_size=16,
        seed=3,
        shuffle=True,
        transform=tokens,
        pack=Pack(length=512, separator=0, block=64),
        cache=cache,
        workers=2,
    )
    found = [batch["tokens"] for batch in loader]
    loader.close()
    return found


def test_batches_are_those_of_a_plain_cache_and_the_disk_has_nothing_of_them(tmp_path: Path) -> None:
    plain, encrypted = Cache(tmp_path / "plain"), Cache(tmp_path / "cache", encrypt=True)
    for one, other in zip(sources(tmp_path, plain), sources(tmp_path, encrypted), strict=True):
        want, found = batches(one, plain), batches(other, encrypted)
        assert len(want) == len(found) > 10
        assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))
    kept = [path for path in encrypted.folder.iterdir() if path.suffix != ".lock"]
    assert {path.suffixes[-2] for path in kept} == {
        ".jsonl",
        ".index",
        ".damage",
        ".arrow",
        ".rows",
        ".table",
    }
    assert all(path.suffix == ".sealed" for path in kept)
    assert any(SECRET.encode() in path.read_bytes() for path in plain.folder.iterdir())
    assert not any(SECRET.encode() in path.read_bytes() for path in kept)
