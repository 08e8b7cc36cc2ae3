"""A classifier under Accelerate: `accelerate_script.py OUT EPOCHS KILLS`, KILLS as "STEP:RANK,...".

"STEP:RANK:1" is behind the step's line of log, before its commit; others are before its update.

With PLAIN in the environment without ckptless, with PROTECT run from its begin in each process. Each update's
loss is written with all bits, and at the end a digest of the parameters. With FSDP in it they are sharded,
with RAM they come from rank 0; with SEEDABLE it is Accelerate's own sampler. Two batches make an update, the
last of an epoch one.
"""

import contextlib
import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import one_gpu  # type: ignore[import-not-found]  # run as a script, beside it
import shards_anywhere  # type: ignore[import-not-found]  # run as a script, beside it
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin

OUT, EPOCHS = Path(sys.argv[1]), int(sys.argv[2])
KILLS = {tuple(map(int, one.split(":"))) for one in sys.argv[3].split(",") if one}
# Whether to commit in the middle of an accumulation, too.
EACH = "EACH" in os.environ
WORKERS = int(os.environ.get("WORKERS", "0"))


def make() -> tuple[Any, ...]:
    sharded = None
    if "FSDP" in os.environ:
        shards_anywhere.begin()
        sharded = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="size_based_wrap",
            min_num_params=200,
            cpu_ram_efficient_loading="RAM" in os.environ,
        )
    order = DataLoaderConfiguration(use_seedable_sampler="SEEDABLE" in os.environ)
    accelerator = Accelerator(
        cpu=not one_gpu.ON_GPU,
        gradient_accumulation_steps=2,
        fsdp_plugin=sharded,
        dataloader_config=order,
        log_with=os.environ.get("LOGGER"),
        project_dir=OUT,
    )
    if "LOGGER" in os.environ:
        # TensorBoard would make a folder of it in each process.
        config = {"lr": 1e-2} if os.environ["LOGGER"] == "mlflow" else None
        accelerator.init_trackers("gpt", config=config)
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(52, 8), torch.randint(0, 4, (52,)))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=WORKERS)
    held: Any = torch.utils.data.DataLoader(data, batch_size=16)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler, held)


def kill(*at: int) -> None:
    if at in KILLS:
        with contextlib.suppress(FileExistsError):
            (OUT / f"kill-{at}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


def train(run: Any) -> None:
    if run is None:
        accelerator, model, optimizer, loader, scheduler, held = make()
    else:
        made = make() if "PROTECT" in os.environ else ()
        things = ckptless.accelerate.keep(run, (lambda: made) if made else make)
        accelerator, model, optimizer, loader, scheduler, held = things
        if "PAST" in os.environ:
            loader = made[3]
    rank, updates = accelerator.process_index, 0 if run is None else run.step
    for _epoch in range(0 if run is None else run.epoch, EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                kill(updates, rank)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if run is not None and EACH:
                run.commit()
            if accelerator.sync_gradients:
                updates += 1
                with (OUT / f"loss-{rank}.txt").open("a") as file:
                    file.write(f"{updates} {float(loss.detach()).hex()} {scheduler.get_last_lr()[0].hex()}\n")
                accelerator.log({"loss": float(loss.detach())}, step=updates)
                kill(updates, rank, 1)
                if run is not None and not EACH:
                    run.commit()
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in held:
            found, wanted = accelerator.gather_for_metrics((model(x).argmax(1), y))
            right += int((found == wanted).sum())
    # Not end_training(), which destroys the process groups, too.
    for tracker in accelerator.trackers:
        tracker.finish()
    digest = hashlib.sha256()
    assert shards_anywhere.reshard(model) == ("FSDP" in os.environ)
    for parameter in model.parameters():
        digest.update(shards_anywhere.local(parameter).cpu().numpy().tobytes())
    (OUT / f"final-{rank}.txt").write_text(f"{digest.hexdigest()} {updates} {right}\n")


OUT.mkdir(parents=True, exist_ok=True)
one_gpu.begin()
if "PLAIN" in os.environ:
    train(None)
    torch.distributed.barrier()
    # Stock Gloo groups now and then crash a process that ends with them.
    os._exit(0)
else:
    import ckptless.accelerate

    if "PROTECT" in os.environ:
        train(ckptless.protect())
    else:
        ckptless.run(train, commit_every=int(os.environ.get("EVERY", "1")))
