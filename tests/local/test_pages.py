"""Python that pages show runs as it stands; what it takes for granted (a model, data) comes before it."""

from __future__ import annotations

import gzip
import json
import re
import textwrap
from pathlib import Path

import pytest

from .localrun import Job

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
DEADLINE_S = 100.0
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

MODEL = """
import torch
import ckptless
from ckptless.data import MappedLoader
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

config = (64, 16)

def GPT(config):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(*config), torch.nn.Linear(*reversed(config)))
"""
README = """
from torch.utils.data import DataLoader

def warmup(step):
    return min(1.0, (step + 1) / 4)

def step(model, optimizer, batch):
    loss = cross_entropy(model(batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss

loader = DataLoader(torch.arange(64), batch_size=4)
"""
LINES = """
paths = ["lines.jsonl"]
"""
RUNS = "\nckptless.run(train)\n"
TEXT = """
class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return index % 64, index * 7 % 64
"""
DOCUMENTS = """
from types import SimpleNamespace

import torch
import ckptless

tokenizer = SimpleNamespace(encode=lambda text: SimpleNamespace(ids=[ord(letter) for letter in text] * 500))

def train(run):
    run.keep(lambda: ckptless.State(weight=torch.zeros(1)))
"""
# By page and number of the block: what comes before it, and after it.
AROUND = {
    ("README.md", 0): (MODEL + README, ""),
    ("docs/elastic.md", 0): (MODEL + LINES, RUNS),
    ("docs/elastic.md", 1): (MODEL + TEXT, ""),
    ("docs/data.md", 0): (DOCUMENTS, RUNS),
}
# Signatures; what test_saving.py does with a folder that it has, and test_loggers.py; pages that
# test_tutorials.py reads.
ELSEWHERE = (
    "docs/api.md",
    "docs/design/saving.md",
    "docs/loggers.md",
    "docs/quickstart.md",
    "docs/tutorials/",
)


def found() -> dict[tuple[str, int], str]:
    """All blocks but those of other tests."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {
        (name, number): textwrap.dedent(text)
        for page in pages
        if not (name := str(page.relative_to(ROOT))).startswith(ELSEWHERE)
        for number, text in enumerate(BLOCK.findall(page.read_text()))
    }


def test_every_block_is_run() -> None:
    assert found().keys() == AROUND.keys()


def data(home: Path) -> None:
    """Write the files that scripts read: pairs of numbers, and documents."""
    lines = (json.dumps([n % 64, n * 7 % 64]) for n in range(1024))
    (home / "lines.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("a", "b"):
        with gzip.open(home / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": name * (1 + n % 9)}) + "\n" for n in range(600))


@pytest.mark.parametrize("block", AROUND, ids=lambda block: f"{block[0]} {block[1]}")
def test_it_runs(tmp_path: Path, block: tuple[str, int]) -> None:
    before, after = AROUND[block]
    text = found()[block]
    if "def train(run):" in before:
        text = textwrap.indent(text, "    ")
    (tmp_path / "train.py").write_text(before + text + after)
    data(tmp_path)
    with Job(tmp_path, ["--nodes", 2, "--tee", "none"], ["train.py"], cwd=tmp_path) as job:
        job.ended(0, DEADLINE_S)
