"""A real corpus, 50 MB of Python's and its packages' sources, through a tokenizer trained on it, packed and
shuffled.

Run it with -s for what it measures.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ckptless.data import Arrow, Cache, JsonLines, MappedLoader, Pack

pa = pytest.importorskip("pyarrow")
tokenizers = pytest.importorskip("tokenizers")

NBYTES = 50 << 20
SAMPLE_NBYTES = 3 << 20
VOCABULARY = 4096
DOCUMENT_LIMIT = 200_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


def texts() -> Iterator[str]:
    """Sources and documentation on this machine, in an order that is not that of folders."""
    named = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        "/usr/share/doc",
        "/usr/lib/python3",
    ]
    roots = [Path(name) for name in named]
    ends = ("py", "pyi", "rst", "md", "txt")
    paths = sorted(path for root in roots for end in ends for path in root.rglob(f"*.{end}"))
    random.Random(0).shuffle(paths)
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            continue
        if text.strip():
            yield text[:DOCUMENT_LIMIT]


def write(folder: Path) -> tuple[int, int, list[str]]:
    """The corpus as gzip of JSON lines and as Arrow: documents, bytes, and some texts for the tokenizer."""
    taken, count, sample, sample_nbytes = 0, 0, [], 0
    schema = pa.schema([("id", pa.int64()), ("text", pa.large_string())])
    arrow = folder / "corpus.arrow"
    with (
        gzip.open(folder / "corpus.jsonl.gz", "wt", compresslevel=1, encoding="utf-8") as lines,
        pa.OSFile(str(arrow), "wb") as out,
        pa.ipc.new_file(out, schema) as writer,
    ):
        for text in texts():
            lines.write(json.dumps({"id": count, "text": text}, ensure_ascii=False) + "\n")
            writer.write_batch(pa.record_batch([[count], [text]], schema=schema))
            count += 1
            taken += len(text.encode())
            if sample_nbytes < SAMPLE_NBYTES:
                sample.append(text)
                sample_nbytes += len(text)
            if taken >= NBYTES:
                break
    return count, taken, sample


def trained(sample: list[str]) -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<end>"], show_progress=False
    )
    made.train_from_iterator(sample, trainer)
    return made


def digest(batch: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(batch["tokens"].numpy().tobytes() + batch["document"].numpy().tobytes())


def test_a_real_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its threads do not survive a fork.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    began = time.perf_counter()
    documents, nbytes, sample = write(tmp_path)
    assert nbytes >= NBYTES, "this machine has fewer sources and documents than the test needs"
    tokenizer = trained(sample)
    print(f"\n{documents} documents, {nbytes} bytes, tokenizer: {time.perf_counter() - began:.0f} s")

    def tokenize(row: dict[str, Any]) -> list[int]:
        return list(tokenizer.encode(row["text"]).ids)

    def loader(kind: str, workers: int) -> MappedLoader:
        cache = Cache(tmp_path / "cache")
        lines = JsonLines(tmp_path / "corpus.jsonl.gz", cache=cache)
        source = lines if kind == "lines" else Arrow(tmp_path / "corpus.arrow", cache=cache)
        how = Pack(1024, separator=0, block=64)
        options: dict[str, Any] = {"batch_size": 16, "seed": 4, "shuffle": True, "drop_last": True}
        return MappedLoader(source, transform=tokenize, pack=how, cache=cache, workers=workers, **options)

    began = time.perf_counter()
    clean = loader("lines", 2)
    batches = len(clean)
    seconds = time.perf_counter() - began
    print(f"unpacked, indexed, tokenized and counted: {seconds:.1f} s, {batches} batches")
    began = time.perf_counter()
    want, states = [], []
    for batch in clean:
        want.append(digest(batch))
        states.append(clean.state_dict())
        if len(want) == 60:
            break
    clean.close()
    seconds = time.perf_counter() - began
    print(f"packed with 2 workers: {60 * 16 * 1024 / seconds:.0f} tokens/s")

    # Arrow has the same documents, so the same sequences; a worker is killed on the way.
    arrow = loader("arrow", 3)
    found = []
    for batch in arrow:
        found.append(digest(batch))
        if len(found) == 20:
            os.kill(arrow._pool.workers[0].pid, signal.SIGKILL)
        if len(found) == 60:
            break
    arrow.close()
    assert found == want

    # Another process, from any position.
    for done in (1, 30, 55):
        began = time.perf_counter()
        again = loader("lines", 1)
        again.load_state_dict(states[done - 1])
        rest = iter(again)
        first = digest(next(rest))
        print(f"first batch from position {done}: {time.perf_counter() - began:.2f} s")
        assert [first, *(digest(next(rest)) for _ in range(4))] == want[done : done + 5]
        again.close()
