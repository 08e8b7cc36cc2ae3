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
        """Return all of it: the tensors stacked, so that they are copied as one. Raises UsageError."""
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
            "tensors": tensors.stacked(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put it back."""
        tensors = [one.unbind() for one in saved["tensors"]]
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

    def _metric(self, told: dict[str, Any], tensors: list[tuple[torch.Tensor, ...]]) -> Any:
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
        self._groups: list[list[torch.Tensor]] = []
        # By type, shape and device.
        self._alike: dict[Any, int] = {}
        self._places: dict[int, list[int]] = {}

    def add(self, value: Any) -> Any:
        """Return what stands for a value: a number for itself, for a tensor a list of where it is."""
        place = self._places.get(id(value))
        if place is not None:
            return place
        if not isinstance(value, torch.Tensor):
            return value
        number = self._alike.setdefault((value.dtype, value.shape, value.device), len(self._groups))
        if number == len(self._groups):
            self._groups.append([])
        group = self._groups[number]
        group.append(value.detach() if value.requires_grad else value)
        place = self._places[id(value)] = [number, len(group) - 1]
        return place

    def stacked(self) -> list[torch.Tensor]:
        """Return the tensors, those that are alike as one."""
        return [torch.stack(group) for group in self._groups]


def _there(value: Any, tensors: list[tuple[torch.Tensor, ...]]) -> Any:
    return tensors[value[0]][value[1]] if isinstance(value, list) else value


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
