"""The workload with ckptless: a script of `ckptless-run`."""

import json
import os
from typing import Any

import workload  # type: ignore[import-not-found]  # run as a script, beside it

import ckptless


def train(run: Any) -> None:
    """Build, or go on with, the state; train without end."""

    def build() -> ckptless.State:
        model = workload.model(run.world_size)
        return ckptless.State(model=model, optimizer=workload.optimizer(model))

    state = run.keep(build)
    notes = workload.Notes(run.rank)
    while True:
        loss = workload.train_step(state.model, state.optimizer, run.step + 1, run.rank)
        notes.step(run.step + 1, loss)
        run.commit(loss=loss)


# How commits are made, where it is not by the defaults.
OPTIONS: Any = json.loads(os.environ.get("BENCH_OPTIONS", "{}"))
ckptless.run(train, **{"commit_every": workload.EVERY, **OPTIONS})
