"""Trains a small byte-level GPT on the sources of Python's own standard library.

The same file runs in three ways:

    ckptless-run --local --nodes 4 --spares 1 docs/demo/train_gpt.py     goes on when a process or a node dies
    torchrun --nproc-per-node 4 docs/demo/train_gpt.py                   plain DDP
    python docs/demo/train_gpt.py                                        one process

What ckptless needs of a script is marked with (1) to (5); everything else is ordinary PyTorch.
"""

import argparse
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptless  # (1)

BYTES = 256  # every byte is a token


class Block(nn.Module):
    """Attention, then a small network, each added to what came in."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, dim)), dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + torch.as_tensor(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """Bytes in, the mean cross-entropy of the next byte out."""

    def __init__(self, dim: int, layers: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(BYTES, dim)
        self.position = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dim, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, BYTES, bias=False)
        self.apply(self._init)
        self.head.weight = self.token.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.dropout(self.token(tokens) + self.position(places)))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows:
    """Random windows of a text. Batch number n of a rank depends on seed, rank and n, and on nothing else.

    With `state_dict` and `load_state_dict` a new process goes straight to its position; without them it
    would have to draw, and throw away, every batch before it.
    """

    def __init__(self, text: torch.Tensor, args: argparse.Namespace, rank: int) -> None:
        self.text, self.rank, self.position = text, rank, 0
        self.seed: int = args.seed
        self.size: int = args.batch
        self.context: int = args.context
        self.batches: int = args.steps

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while self.position < self.batches:
            self.position += 1
            yield self.batch(self.position)
        self.position = 0

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = random.Random(f"{self.seed}/{self.rank}/{number}")
        starts = [draw.randrange(len(self.text) - self.context) for _ in range(self.size)]
        windows = torch.stack([self.text[s : s + self.context + 1] for s in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def read_text() -> torch.Tensor:
    """The modules of the standard library, one after the other: 4 to 5 MB that every machine has."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A factor: up in a line, then down along a cosine to a tenth."""
    if step < args.warmup:
        return (step + 1) / float(args.warmup)
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def device_of(run: ckptless.Run) -> torch.device:
    return torch.device("cuda", run.local_rank) if dist.get_backend() == "nccl" else torch.device("cpu")


def build(run: ckptless.Run, args: argparse.Namespace) -> ckptless.State:  # (2) all that a step depends on
    torch.manual_seed(args.seed)
    model = GPT(args.dim, args.layers, args.heads, args.context, args.dropout)
    ddp = DistributedDataParallel(model.to(device_of(run)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, args))
    torch.manual_seed(args.seed + 1 + run.rank)  # every rank drops other units
    loader = Windows(read_text(), args, run.rank)
    return ckptless.State(model=ddp, optimizer=optimizer, scheduler=scheduler, loader=loader)


def train(run: ckptless.Run, args: argparse.Namespace) -> None:
    state = run.keep(lambda: build(run, args))  # (3) built once in a process, brought back after a fault
    device = device_of(run)
    with (args.out / f"loss-{run.rank}.txt").open("a", buffering=1) as log:
        for tokens, targets in run.batches(state.loader):  # (4) goes on at the committed position
            loss = state.model(tokens.to(device), targets.to(device))
            state.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            state.optimizer.step()
            state.scheduler.step()

            step, value = run.step + 1, loss.item()
            log.write(f"{step} {value.hex()} {time.time():.6f} {run.generation}\n")
            if run.rank == 0 and (step % 10 == 0 or step == args.steps):
                print(f"step {step:4}  loss {value:.4f}", flush=True)
            run.commit(loss=value)  # (5) from here on this step can be restored


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on the standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/train_gpt"), help="loss-RANK.txt goes here")
    parser.add_argument("--batch", type=int, default=2, help="windows in a rank's batch")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window")
    parser.add_argument("--dim", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the learning rate is full")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    ckptless.run(lambda run: train(run, args))


if __name__ == "__main__":
    main()
