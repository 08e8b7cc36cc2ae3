"""Pretrains a model of Llama 3's shape, dense or with experts, by FSDP2 or HSDP: `llama.py CONFIG.yaml`."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ckptless
from ckptless.data import MappedLoader


@dataclass(frozen=True)
class Config:
    """The settings of the YAML file. `batch` counts the sequences of a step, of all ranks together.

    `replicas` is how many times the state is there (1: FSDP2; more: HSDP). With `experts` each block has so
    many, of which each token takes `picks`. `tokens` is a file of 32-bit token numbers; "" makes some up.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    length: int
    batch: int
    steps: int
    experts: int = 0
    picks: int = 2
    replicas: int = 1
    tokens: str = ""
    rate: float = 3e-4
    warmup: int = 10
    theta: float = 500_000.0
    commit_every: int | str = 1
    log_every: int = 10
    seed: int = 1


CONFIG = Config(**yaml.safe_load(Path(sys.argv[1]).read_text()))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# ---------------------------------------------------------------------------------------- the model


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Without a bias, as all of them here."""
    return nn.Linear(inputs, outputs, bias=False)


def rotation(length: int, size: int, device: torch.device) -> torch.Tensor:
    """Return e^(i angle) of each place and pair of a head: complex64 (length, size / 2)."""
    rates = CONFIG.theta ** (-torch.arange(0, size, 2, device=device).float() / size)
    angles = torch.outer(torch.arange(length, device=device).float(), rates)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Turn each pair of (batch, heads, length, size) by its angle."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * by).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Causal, with fewer heads of keys and values than of queries."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.size = c.dim // c.heads
        self.query, self.key = linear(c.dim, c.dim), linear(c.dim, c.kv_heads * self.size)
        self.value, self.out = linear(c.dim, c.kv_heads * self.size), linear(c.dim, c.dim)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, length, dim) both."""
        query, key, value = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        mixed = F.scaled_dot_product_attention(
            rotated(query, by), rotated(key, by), value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            linear(c.dim, c.hidden),
            linear(c.dim, c.hidden),
            linear(c.hidden, c.dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (..., dim) both."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each token takes `picks` of the experts, all of which each rank has (its part of, between steps)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.picks, self.router = c.picks, linear(c.dim, c.experts)
        self.experts = nn.ModuleList(Gated(c) for _ in range(c.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, length, dim) both."""
        flat = x.flatten(0, 1)
        weights, picks = self.router(flat).float().topk(self.picks)
        weights = weights.softmax(-1).type_as(x)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            # Each expert is called, be it for no token: its gradients must be there on all ranks.
            rows, place = (picks == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return out.view_as(x)


class Block(nn.Module):
    """Attention and what follows it, each behind a norm and beside a way around it."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.before, self.attention = nn.RMSNorm(c.dim), Attention(c)
        self.between, self.after = nn.RMSNorm(c.dim), Experts(c) if c.experts else Gated(c)

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, length, dim) both."""
        x = x + self.attention(self.before(x), by)
        return x + self.after(self.between(x))


class Llama(nn.Module):
    """Token numbers in, logits out."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.size = c.dim // c.heads
        self.embedding = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.out = nn.RMSNorm(c.dim), linear(c.dim, c.vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: (batch, length) and (batch, length, vocab)."""
        x = self.embedding(tokens)
        by = rotation(tokens.shape[1], self.size, tokens.device)
        for block in self.blocks:
            x = block(x, by)
        return self.out(self.norm(x))


def sharded(mesh: DeviceMesh) -> nn.Module:
    """Make the model without its memory, shard it, and only then draw what each rank has of it."""
    with torch.device("meta"):
        model = Llama(CONFIG)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": precision if DEVICE == "cuda" else MixedPrecisionPolicy()}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device=DEVICE)
    # The same in all replicas of a shard.
    shard = mesh.get_local_rank(mesh.ndim - 1)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        assert isinstance(parameter, DTensor)
        own = parameter.to_local()
        draw = torch.Generator(DEVICE).manual_seed(CONFIG.seed + 1000 * number + 1_000_000 * shard)
        with torch.no_grad():
            if parameter.ndim == 1:
                own.fill_(1.0)
            else:
                depth = 2 * CONFIG.layers if name.endswith(("out.weight", "down.weight")) else 1
                own.normal_(0.0, 0.02 / math.sqrt(depth), generator=draw)
    return model


# ------------------------------------------------------------------------------------- data, training


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Sequences of a file of token numbers, one after the other, each with the token that comes next."""

    def __init__(self) -> None:
        if CONFIG.tokens:
            self.all = np.memmap(CONFIG.tokens, dtype=np.uint32, mode="r")
        else:
            self.all = np.random.default_rng(0).integers(
                CONFIG.vocab, size=100 * CONFIG.length, dtype=np.uint32
            )

    def __len__(self) -> int:
        return (len(self.all) - 1) // CONFIG.length

    def __getitem__(self, number: int) -> torch.Tensor:
        at = number * CONFIG.length
        return torch.from_numpy(self.all[at : at + CONFIG.length + 1].astype(np.int64))


def pace(step: int) -> float:
    """The learning rate's part after so many steps: a warm-up, then half a cosine down to a tenth."""
    if step < CONFIG.warmup:
        return (step + 1) / CONFIG.warmup
    done = (step - CONFIG.warmup) / max(1, CONFIG.steps - CONFIG.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def train(run):
    """Called again after each fault."""

    def build():
        shape = (CONFIG.replicas, run.world_size // CONFIG.replicas)
        names = ("replicate", "shard")
        mesh = (
            init_device_mesh(DEVICE, shape, mesh_dim_names=names)
            if CONFIG.replicas > 1
            else init_device_mesh(DEVICE, shape[1:])
        )
        model = sharded(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), CONFIG.rate, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, pace)
        loader = MappedLoader(
            Tokens(), batch_size=CONFIG.batch, seed=CONFIG.seed, shuffle=True, drop_last=True
        )
        return ckptless.State(model=model, optimizer=optimizer, scheduler=schedule, loader=loader)

    if DEVICE == "cuda":
        torch.cuda.set_device(run.local_rank)
    state = run.keep(build)
    for tokens in run.batches(state.loader, epochs=1_000_000):
        if run.step >= CONFIG.steps:
            break
        tokens = tokens.to(DEVICE, non_blocking=True)
        logits = state.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), 1.0)
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad()
        loss = loss.detach()
        run.commit(loss=loss)
        if run.step % CONFIG.log_every == 0:
            dist.all_reduce(loss, dist.ReduceOp.AVG if DEVICE == "cuda" else dist.ReduceOp.SUM)
            mean = loss.item() if DEVICE == "cuda" else loss.item() / run.world_size
            if run.rank == 0:
                print(f"step {run.step}, loss {mean:.6f}", flush=True)


ckptless.run(train, commit_every=CONFIG.commit_every)
