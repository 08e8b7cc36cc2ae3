"""Trains with the same bits on any number of ranks: `exact_script.py STEPS OUT`; also by python alone.

Each rank notes, of each step, the number of ranks, the loss as hex, a digest of parameters and moments, and
what the policy has for the number of nodes.
Between steps it sleeps EXACT_SLEEP_S seconds, until there is a file OUT/fast. A file OUT/last has another
last step; it must be there some steps before.
"""

import hashlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ckptless
from ckptless.data import MappedLoader

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
SLEEP_S = float(os.environ.get("EXACT_SLEEP_S", "0"))
DEVICE = os.environ.get("EXACT_DEVICE", "cpu")
# Of which no part is like all others.
BATCH, WIDTH, VIRTUAL = 10, 37, 4


class Data(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Numbers, and what follows from them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(16, generator=torch.Generator().manual_seed(index))


def build() -> ckptless.State:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(16, WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH),
        nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 16),
    ).to(DEVICE)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = MappedLoader(Data(), batch_size=BATCH, seed=3, shuffle=True, workers=int(SLEEP_S > 0))
    # As many scripts do; what is drawn outside of `forward` does not come from here.
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    return ckptless.State(model=model, optimizer=optimizer, loader=loader)


def digest(state: Any) -> str:
    found = hashlib.sha256()
    for parameter in state.model.parameters():
        for tensor in (parameter, *state.optimizer.state.get(parameter, {}).values()):
            found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def last_step() -> int:
    found = OUT / "last"
    return int(found.read_text()) if found.exists() else STEPS


def train(run: Any) -> None:
    state = run.keep(build)
    log = (OUT / f"seen-{run.rank}.txt").open("a", buffering=1)

    def forward(part: Any) -> torch.Tensor:
        x = part[1].to(DEVICE)
        # Of Python's generator as well.
        loss: torch.Tensor = (state.model(x + random.random() / 10) - x).pow(2).mean()
        return loss

    for parts in run.batches(state.loader, epochs=10_000):
        if run.step >= last_step():
            break
        loss = run.exact.step(parts, forward)
        nn.utils.clip_grad_norm_(state.model.parameters(), 0.5)
        state.optimizer.step()
        state.optimizer.zero_grad()
        # What is drawn here is the same on all ranks.
        jitter = torch.rand(1).item() + random.random()
        numbers = [part[0].tolist() for part in parts]
        line = [run.step + 1, run.world_size, loss.item().hex(), jitter.hex(), numbers, digest(state)]
        line.append(run.policy.get("told"))
        log.write(json.dumps(line) + "\n")
        run.commit(loss=loss)
        if not (OUT / "fast").exists():
            time.sleep(SLEEP_S)
    state.loader.close()


OUT.mkdir(parents=True, exist_ok=True)
if DEVICE != "cpu":
    from tests.gpu import kind

    kind.install()
ckptless.run(train, exact=ckptless.Exact(VIRTUAL, seed=5))
