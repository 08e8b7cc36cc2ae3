"""Trains the GPT of train_gpt.py on any number of ranks, which may change while it trains.

    ckptless-run --local --nodes 4 --min-nodes 2 docs/demo/train_elastic.py

What such a job needs beyond what train_gpt.py has is marked with (1) to (3). Each rank notes, of each step,
which samples it had. It ends with the epoch after which there is a file OUT/end, or after --epochs.
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, device_of, read_text

import ckptless
from ckptless.data import MappedLoader


class Windows(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    """Samples: windows of a text at even distances, each with its number."""

    def __init__(self, text: torch.Tensor, samples: int, context: int) -> None:
        self.text, self.samples, self.context = text, samples, context

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        start = index * ((len(self.text) - self.context) // self.samples)
        return index, self.text[start : start + self.context + 1].long()


def build(run: ckptless.Run, args: argparse.Namespace) -> ckptless.State:
    torch.manual_seed(args.seed)
    ddp = DistributedDataParallel(GPT(args.dim, 2, 2, args.context, 0.0).to(device_of(run)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=args.lr)
    data = Windows(read_text(), args.samples, args.context)
    # (1) each rank gets its part of the same batch
    loader = MappedLoader(
        data, batch_size=args.batch, seed=args.seed, shuffle=True, drop_last=True, workers=0
    )
    # `ends`: all have seen that it is to end with this epoch
    return ckptless.State(model=ddp, optimizer=optimizer, loader=loader, ends=False)


def tell(run: ckptless.Run, old: int, new: int) -> None:
    if run.rank == 0:
        print(f"{old} -> {new} ranks, from step {run.step}", flush=True)


def train(run: ckptless.Run, args: argparse.Namespace) -> None:
    run.on_resize(tell)  # (2) is called where the number of ranks has changed
    state = run.keep(lambda: build(run, args))
    device = device_of(run)
    last = args.samples // args.batch  # steps of an epoch
    with (args.out / f"steps-{run.rank}.txt").open("a", buffering=1) as log:
        for numbers, windows in run.batches(state.loader, epochs=args.epochs):
            if state.ends and run.step % last == 0:
                break
            windows = windows.to(device)
            time.sleep(args.sample_s * len(windows))
            # (3) a mean over this rank's part counts by its size; what all ranks average is the batch's mean
            loss = state.model(windows[:, :-1], windows[:, 1:]) * run.batch_weight(args.batch)
            state.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
            state.optimizer.step()

            # The batch's loss; and all end after the same step, whoever of them sees the file first.
            total = torch.stack(
                [loss.detach() / run.world_size, loss.new_tensor((args.out / "end").exists())]
            )
            dist.all_reduce(total)
            value, ends = total.tolist()
            step, process = run.step + 1, (socket.gethostname(), os.getpid())
            words = (step, value, time.time(), run.generation, run.world_size, *process, numbers.tolist())
            log.write(json.dumps(words) + "\n")
            state.ends = bool(ends)
            run.commit(loss=value)
    state.loader.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on any number of ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("out/train_elastic"), help="steps-RANK.txt goes here"
    )
    parser.add_argument("--batch", type=int, default=24, help="samples of all ranks together in a step")
    parser.add_argument("--samples", type=int, default=1200, help="in an epoch")
    parser.add_argument("--context", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--sample-s", type=float, default=0.0, help="sleep so long for a sample, in place of a larger model"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    ckptless.run(lambda run: train(run, args))


if __name__ == "__main__":
    main()
