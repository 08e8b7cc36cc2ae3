"""What Lightning's `self.log` has summed up, for a Trainer's commits: neither loops nor modules have it.

Stands on what is not public in Lightning: its logger connector, and the results of its loops.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

from ckptless.daemon.protocol.errors import UsageError

# Of the connector: by name what was seen last. What a progress bar shows comes again with the next batch.
SEEN = ("_logged_metrics", "_callback_metrics")
# Of what is known of a metric, besides how it is reduced over steps and ranks.
KNOWN = (
    "fx name prog_bar logger on_step on_epoch enable_graph add_dataloader_idx dataloader_idx metric_attribute"
)
# Of a metric: counts, then sums; of one that is torchmetrics' the first two are its own.
COUNTS = ("has_reset", "_update_count")
SUMS = ("value", "cumulated_batch_size", "_forward_cache", "_computed")


class Metrics:
    """The metrics of one Trainer's training; those of a validation are over when a step is committed."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # By key, for as long as they are the same: what is known of a metric.
        self._known: dict[str, tuple[Any, dict[str, Any]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it: each tensor once, the rest by its index. Raises UsageError."""
        tensors = _Tensors()
        connector = self._trainer._logger_connector
        return {
            "seen": [
                {name: tensors.add(value) for name, value in getattr(connector, of).items()} for of in SEEN
            ],
            "first": connector._first_loop_iter,
            "fx": connector._current_fx,
            "sums": {
                key: self._told(key, one, tensors)
                for key, one in self._trainer.fit_loop.epoch_loop._results.items()
            },
            "tensors": tensors.all,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put it back."""
        device = self._trainer.strategy.root_device
        tensors = [one.to(device) for one in saved["tensors"]]
        connector, loop = self._trainer._logger_connector, self._trainer.fit_loop.epoch_loop
        for of, values in zip(SEEN, saved["seen"], strict=True):
            setattr(connector, of, {name: _there(value, tensors) for name, value in values.items()})
        connector._first_loop_iter, connector._current_fx = saved["first"], saved["fx"]
        loop.val_loop._results.clear()
        results = loop._results
        results.clear()
        results.batch = results.batch_size = results.dataloader_idx = None
        for key, told in saved["sums"].items():
            results[key] = self._metric(told, tensors)

    def _told(self, key: str, one: Any, tensors: _Tensors) -> dict[str, Any]:
        """Return what a metric has and is. Raises UsageError where it cannot be made again."""
        meta, known = self._known.get(key, (None, {}))
        if meta is not one.meta:
            known = _known(one)
            self._known[key] = one.meta, known
        has = vars(one)
        return {
            "known": known,
            "counts": [has[name] for name in COUNTS],
            "sums": [tensors.add(has.get(name)) for name in (SUMS if one.is_tensor else SUMS[2:])],
        }

    def _metric(self, told: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        known = dict(told["known"])
        reduce, sync, is_tensor = (known.pop(name) for name in ("reduce", "sync", "is_tensor"))
        should, rank_zero_only, has_fn = sync
        meta = _Metadata(**known, reduce_fx=getattr(torch, reduce))
        fn = self._trainer.strategy.reduce if has_fn else _Sync.no_op
        meta.sync = _Sync(_should=should, fn=fn, rank_zero_only=rank_zero_only)
        one = _ResultMetric(meta, is_tensor).to(self._trainer.strategy.root_device)
        if not is_tensor:
            one.value = self._trainer.lightning_module.get_submodule(known["metric_attribute"])
        sums = SUMS if is_tensor else SUMS[2:]
        vars(one).update(zip(COUNTS, told["counts"], strict=True))
        values = (_there(value, tensors) for value in told["sums"])
        # Of sums, a largest one and the like there is no number of samples.
        vars(one).update((n, v) for n, v in zip(sums, values, strict=True) if n in vars(one))
        return one


class _Tensors:
    """Tensors, each once: the same one is in several places."""

    def __init__(self) -> None:
        self.all: list[torch.Tensor] = []
        self._index: dict[int, int] = {}

    def add(self, value: Any) -> Any:
        """Return what stands for a value: a number for itself, a tensor's index in a list."""
        index = self._index.get(id(value))
        if index is None:
            if not isinstance(value, torch.Tensor):
                return value
            index = self._index[id(value)] = len(self.all)
            self.all.append(value.detach() if value.requires_grad else value)
        return [index]


def _there(value: Any, tensors: list[torch.Tensor]) -> Any:
    return tensors[value[0]] if isinstance(value, list) else value


def _known(one: Any) -> dict[str, Any]:
    """Return what a metric is. Raises UsageError where it cannot be made again."""
    meta = one.meta
    if meta.sync.group is not None:
        raise UsageError(
            f"self.log({meta.name!r}, sync_dist_group=...) is not protected by ckptless: leave the group out"
        )
    if not one.is_tensor and meta.metric_attribute is None:
        raise UsageError(
            f"self.log({meta.name!r}) has a metric that is no attribute of the module: make it one"
        )
    return {
        **{name: getattr(meta, name) for name in KNOWN.split()},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only, meta.sync.fn is not _Sync.no_op],
        "is_tensor": one.is_tensor,
    }
