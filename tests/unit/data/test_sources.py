"""Files as sources: every record, its place in an error, indices and caches that several processes share."""

from __future__ import annotations

import gzip
import itertools
import json
import multiprocessing
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import BadRecordError, DataError, ProtocolError, UsageError
from ckptless.pytorch_hooks.data.arrow import Arrow
from ckptless.pytorch_hooks.data.cache import Cache, pack_numbers, unpack_numbers
from ckptless.pytorch_hooks.data.files import DataFile
from ckptless.pytorch_hooks.data.sources import BOM, Json, JsonLines, offsets_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [{"id": n, "text": "ä" * n} for n in range(23)]


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def everything(source: Any) -> list[Any]:
    source.open()
    return [source.get(n) for n in range(len(source))]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    rows=st.lists(VALUES, max_size=12),
    blank=st.sampled_from([b"", b"\n", b" \t\r\n", b"\n\n"]),
    head=st.sampled_from([b"", BOM, b"\n"]),
    newline=st.booleans(),
    chunk=st.integers(1, 200),
)
def test_lines_of_anything(
    tmp_path: Path, rows: list[Any], blank: bytes, head: bytes, newline: bool, chunk: int
) -> None:
    path = tmp_path / "a.jsonl"
    data = head + b"".join(
        json.dumps(row, ensure_ascii=False).encode(errors="replace") + b"\n" + blank for row in rows
    )
    path.write_bytes(data if newline else data.rstrip(b"\n"))
    file = DataFile(path)
    offsets = offsets_of(file, chunk)
    found = [json.loads(file.read(int(a), int(b))) for a, b in itertools.pairwise(offsets)]
    file.close()
    assert found == [json.loads(json.dumps(row, ensure_ascii=False).encode(errors="replace")) for row in rows]


def test_several_files_of_every_kind(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:5]))
    (tmp_path / "b.gz").write_bytes(gzip.compress(lines(ROWS[5:11])) + gzip.compress(lines(ROWS[11:15])))
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.jsonl").write_bytes(lines(ROWS[15:]))
    source = JsonLines([tmp_path / n for n in ("a.jsonl", "b.gz", "c.jsonl", "d.jsonl")], cache=cache)
    assert everything(source) == ROWS
    source.close()
    assert everything(source) == ROWS
    with pytest.raises(IndexError):
        source.get(len(ROWS))
    source.close()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_array_in_a_file(tmp_path: Path, cache: Cache, pack: Any) -> None:
    (tmp_path / "a.json").write_bytes(pack(json.dumps(ROWS, indent=3).encode()))
    source = Json(tmp_path / "a.json", cache=cache)
    assert everything(source) == ROWS
    source.close()


@pytest.mark.parametrize("text", ["", "{}", "[1, 2", "[1,, 2]", "nothing"])
def test_no_array(tmp_path: Path, cache: Cache, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=r"a\.json is no JSON array"):
        Json(tmp_path / "a.json", cache=cache).open()
    assert not list(cache.folder.glob("*.part"))


def test_a_bad_line_is_named(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 0}\n\n{"id": }\n{"id": 2}\n\xff\n')
    source = JsonLines(tmp_path / "a.jsonl", cache=cache)
    source.open()
    assert source.get(2) == {"id": 2}
    with pytest.raises(BadRecordError, match=r"a\.jsonl, line 3 \(byte 11\)"):
        source.get(1)
    with pytest.raises(BadRecordError, match=r"a\.jsonl, line 5"):
        source.get(3)
    source.close()


def test_a_gzip_that_ends_too_early(tmp_path: Path, cache: Cache) -> None:
    rows = [{"id": n, "noise": os.urandom(40).hex()} for n in range(2000)]
    packed = gzip.compress(lines(rows))
    (tmp_path / "a.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"a\.gz is a damaged gzip: after [0-9]+ bytes"):
        JsonLines(tmp_path / "a.gz", cache=cache).open()
    kept = JsonLines(tmp_path / "a.gz", cache=cache, keep_damaged=True)
    found = everything(kept)
    assert 0 < len(found) < len(rows)
    assert found == rows[: len(found)]
    assert len(kept.damage) == 1
    kept.close()
    # The note is lost, the unpacked file is not: it is found out again.
    for path in cache.folder.glob("*.damage"):
        path.unlink()
    with pytest.raises(DataError, match="damaged gzip"):
        JsonLines(tmp_path / "a.gz", cache=cache).open()


@pytest.mark.parametrize("at", [30, 200, -3])
def test_a_gzip_with_a_wrong_byte(tmp_path: Path, cache: Cache, at: int) -> None:
    packed = bytearray(gzip.compress(lines([{"noise": os.urandom(40).hex()} for _ in range(50)])))
    packed[at] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.gz is a damaged gzip"):
        JsonLines(tmp_path / "a.gz", cache=cache).open()


# ------------------------------------------------------------------------------------------------ changes


def test_a_file_that_grows_shrinks_or_is_rewritten(tmp_path: Path, cache: Cache) -> None:
    for change in (
        lambda p: p.write_bytes(p.read_bytes() + b"1\n"),
        lambda p: os.truncate(p, 5),
        lambda p: os.utime(p, ns=(1, 1)),
    ):
        path = tmp_path / "a.jsonl"
        path.write_bytes(lines(ROWS))
        source = JsonLines(path, cache=cache)
        source.open()
        change(path)
        with pytest.raises(DataError, match=r"a\.jsonl was changed while it was read"):
            source.get(20)
        source.close()


def test_a_file_that_vanishes(tmp_path: Path, cache: Cache) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(ROWS))
    source = JsonLines(path, cache=cache)
    source.open()
    path.unlink()
    # Who has it open keeps it; who opens it is told.
    assert source.get(3) == ROWS[3]
    source.close()
    with pytest.raises(DataError, match=r"cannot open .*a\.jsonl: No such file"):
        source.open()


def test_another_file_of_the_same_name(tmp_path: Path, cache: Cache) -> None:
    path = tmp_path / "a.jsonl"
    for rows in (ROWS, ROWS[:3], ROWS):
        path.write_bytes(lines(rows))
        source = JsonLines(path, cache=cache)
        assert everything(source) == rows
        source.close()


def test_no_files() -> None:
    with pytest.raises(UsageError, match="at least one file"):
        JsonLines([])


# -------------------------------------------------------------------------------------------------- index


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20), st.data())
def test_numbers_with_other_bytes_are_refused(numbers: list[int], data: st.DataObject) -> None:
    good = pack_numbers(np.array(numbers, dtype=np.int64))
    assert unpack_numbers(good).tolist() == numbers
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    for bad in (flipped, good[:at], good + b"\0" * 8):
        with pytest.raises(ProtocolError):
            unpack_numbers(bad)


def test_an_index_with_a_right_digest_of_nonsense(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    size = (tmp_path / "a.jsonl").stat().st_size
    source = JsonLines(tmp_path / "a.jsonl", cache=cache)
    everything(source)
    source.close()
    (index,) = cache.folder.glob("*.index")
    for offsets in ([5, 3, size], [0, 7], [0, 0, size], [-1, size], []):
        index.write_bytes(pack_numbers(np.array(offsets, dtype=np.int64)))
        with pytest.raises(DataError, match=r"is no index of .*a\.jsonl: remove it"):
            source.open()


def test_a_damaged_index_is_made_again(tmp_path: Path, cache: Cache) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    source = JsonLines(tmp_path / "a.jsonl", cache=cache)
    assert everything(source) == ROWS
    source.close()
    (index,) = cache.folder.glob("*.index")
    index.write_bytes(index.read_bytes()[:-8] + struct.pack("<Q", 1))
    assert everything(source) == ROWS
    source.close()


def _open(path: Path, cache: Path, out: Any) -> None:
    source = JsonLines(path, cache=Cache(cache))
    out.put(len(everything(source)))


def test_many_build_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(lines(ROWS * 200)))
    fork = multiprocessing.get_context("fork")
    out = fork.Queue()
    processes = [fork.Process(target=_open, args=(path, tmp_path / "cache", out)) for _ in range(6)]
    for process in processes:
        process.start()
    found = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert found == [len(ROWS) * 200] * 6
    assert not list((tmp_path / "cache").glob("*.part"))


# -------------------------------------------------------------------------------------------------- cache


def test_the_longest_unused_goes(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", budget_nbytes=250)
    for n, name in enumerate("abc"):
        path = cache.entry(name, lambda out: void(out.write(b"x" * 100)), nbytes=100)
        os.utime(path, (n + 1, n + 1))
    left = {p.name for p in cache.folder.iterdir() if p.suffix != ".lock"}
    assert left == {"b", "c"}
    cache.entry("b", lambda _out: pytest.fail("it is there"))
    cache.entry("d", lambda out: void(out.write(b"x" * 100)), nbytes=100)
    assert {p.name for p in cache.folder.iterdir() if p.suffix != ".lock"} == {"b", "d"}


def void(_value: object) -> None:
    pass


def test_what_is_over_the_budget_alone(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", budget_nbytes=250)
    with pytest.raises(DataError, match="251 bytes, over the budget of 250"):
        cache.entry("a", lambda out: void(out.write(b"x" * 251)))
    assert [p.name for p in cache.folder.iterdir()] == ["a.lock"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="CKPTLESS_DATA_CACHE"):
        Cache(tmp_path / "file" / "cache").entry("a", lambda _out: None)


def test_a_builder_that_was_killed(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    cache.folder.mkdir()
    (cache.folder / "a.part").write_bytes(b"half")
    (cache.folder / "a.lock").write_bytes(b"")
    assert cache.entry("a", lambda out: void(out.write(b"whole"))).read_bytes() == b"whole"


# -------------------------------------------------------------------------------------------------- Arrow

TABLE: dict[str, Any] = {
    "id": list(range(23)),
    "tokens": [[n] * (n % 5) for n in range(23)],
    "text": ["ä" * n for n in range(23)],
}


def arrow_file(path: Path, kind: str) -> Path:
    table = pa.table(TABLE)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=6)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as out, new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=6)
    return path


@pytest.mark.parametrize("kind", ["file", "stream", "parquet"])
def test_arrow_of_every_kind(tmp_path: Path, cache: Cache, kind: str) -> None:
    paths = [arrow_file(tmp_path / name, kind) for name in ("a", "b")]
    source = Arrow(paths, cache=cache)
    found = everything(source)
    assert len(found) == 46
    for n, row in enumerate(found):
        assert {k: v.tolist() if k == "tokens" else v for k, v in row.items()} == {
            k: v[n % 23] for k, v in TABLE.items()
        }
    tokens = found[4]["tokens"]
    assert not tokens.flags.owndata
    assert not tokens.flags.writeable
    assert source.where(25).endswith("b, row 2")
    source.close()


def test_some_columns(tmp_path: Path, cache: Cache) -> None:
    for kind in ("file", "parquet"):
        path = arrow_file(tmp_path / kind, kind)
        source = Arrow(path, columns=["id"], cache=cache)
        assert everything(source)[3] == {"id": 3}
        source.close()
        with pytest.raises(UsageError, match="no column 'missing'"):
            Arrow(path, columns=["missing"], cache=cache).open()


@pytest.mark.parametrize("kind", ["file", "stream", "parquet"])
def test_arrow_that_is_cut_off(tmp_path: Path, cache: Cache, kind: str) -> None:
    path = arrow_file(tmp_path / "a", kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match="no sound Arrow or Parquet"):
        Arrow(path, cache=cache).open()


def test_arrow_that_is_cut_off_while_it_is_read(tmp_path: Path, cache: Cache) -> None:
    path = arrow_file(tmp_path / "a", "file")
    source = Arrow(path, cache=cache)
    source.open()
    os.truncate(path, 100)
    with pytest.raises(DataError, match="changed while it was read"):
        source.get(20)
    source.close()


def test_what_a_copy_has_in_common(tmp_path: Path, cache: Cache) -> None:
    found: list[Any] = []
    for folder, rows in (("x", ROWS), ("y", ROWS), ("z", ROWS[1:])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(lines(rows))
        source = JsonLines(tmp_path / folder / "a.jsonl", cache=cache)
        source.open()
        found.append([source.describe(strict=strict) for strict in (False, True)])
        source.close()
    assert found[0][0] == found[1][0] != found[2][0]
    assert found[0][1] != found[1][1]
