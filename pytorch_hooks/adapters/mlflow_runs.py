"""MLflow's run of a job: found again by a tag in each process that comes to write it, with what it has."""

from __future__ import annotations

from typing import Any

from ckptless.pytorch_hooks.adapters.written import Line

TAG = "ckptless.job"


def run_of(client: Any, experiment: str, job: str) -> str | None:
    """Return the id of the run that a process before this one began; `client` is an MlflowClient."""
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return None
    runs = client.search_runs([found.experiment_id], f"tags.`{TAG}` = '{job}'", max_results=1)
    return str(runs[0].info.run_id) if runs else None


def lines(client: Any, run_id: str | None, step: int) -> list[Line]:
    """Return what a run has from a step on: of MLflow each value is a line of its own."""
    if run_id is None:
        return []
    names = client.get_run(run_id).data.metrics
    return [
        (one.step, frozenset({name}))
        for name in names
        for one in client.get_metric_history(run_id, name)
        if one.step >= step
    ]
