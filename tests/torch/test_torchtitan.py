"""What stands between ckptless and torchtitan's Trainer: it is there, and what it cannot do is refused."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# It needs triton, which the Makefile keeps apart; a torch that comes with one goes first.
sys.path.append(f"{sys.prefix}/triton")
pytest.importorskip("torchtitan")

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger

import ckptless.torchtitan
from ckptless.daemon.protocol.errors import UsageError
from ckptless.pytorch_hooks.adapters import torchtitan as adapter
from ckptless.pytorch_hooks.adapters import torchtitan_loggers as loggers

Trainer: Any = vars(adapter)["Trainer"]
IS_02 = adapter.CONFIG == "JobConfig"
if IS_02:
    from torchtitan.config import JobConfig as configured
else:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel as configured

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def test_this_release_has_what_the_adapter_stands_on() -> None:
    adapter._refuse_release()
    adapter._refuse(Trainer, configured())


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in adapter.HOOKS.items() for name in names.split()]
)
def test_a_hook_that_has_moved_is_refused(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    if name in vars(kind):
        monkeypatch.delattr(kind, name)
    else:
        monkeypatch.delitem(kind.__annotations__, name)
    with pytest.raises(UsageError, match=rf"{kind.__name__}\.{name} is gone: use torchtitan 0\.2\.2 to 0\.3"):
        adapter._refuse_release()


@pytest.mark.parametrize("name", adapter.CALLS.split())
def test_a_train_that_goes_another_way_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    code = inspect.unwrap(Trainer.train).__code__

    def train(self: Any) -> None:
        """Stands for one of a later release."""

    train.__code__ = code.replace(co_names=tuple(f"{one}_2" if one == name else one for one in code.co_names))
    monkeypatch.setattr(Trainer, "train", train)
    with pytest.raises(UsageError, match=rf"does not use {name} any more: use torchtitan 0\.2\.2 to 0\.3"):
        adapter._refuse_release()


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        *parts, last = path.split(".")
        for part in parts:
            config = getattr(config, part)
        setattr(config, last, value)

    return change


NEW = (
    [("optimizer.early_step_in_backward", True, "early_step_in_backward")]
    if IS_02
    else [("parallelism.enable_fsdp_symm_mem", True, "symmetric memory")]
)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("parallelism.pipeline_parallel_degree", 2, "pipeline parallelism"),
        ("parallelism.tensor_parallel_degree", 2, "tensor parallelism"),
        ("parallelism.context_parallel_degree", 2, "context parallelism"),
        ("parallelism.expert_parallel_degree", 2, "expert parallelism"),
        *NEW,
        ("training.enable_cpu_offload", True, "enable_cpu_offload"),
        ("checkpoint.create_seed_checkpoint", True, "create_seed_checkpoint"),
        ("comm.mode", "fake_backend", "comm.mode fake_backend"),
    ],
)
def test_what_cannot_be_protected_is_refused(path: str, value: Any, said: str) -> None:
    config = configured()
    _set(path, value)(config)
    with pytest.raises(UsageError, match=f"a Trainer with {said}.* is not protected by ckptless"):
        adapter._refuse(Trainer, config)


def test_checkpoints_in_the_background_are_refused() -> None:
    config = configured()
    config.checkpoint.async_mode = "async"
    adapter._refuse(Trainer, config)
    config.checkpoint.enable = True
    with pytest.raises(UsageError, match=r"checkpoints in the background \(checkpoint.async_mode\)"):
        adapter._refuse(Trainer, config)


@pytest.mark.skipif(IS_02, reason="its Trainer captures none")
def test_graphs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured()
    adapter._refuse(Trainer, config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match=r"CUDA graphs \(take --training.disable_cuda_graphs\)"):
        adapter._refuse(Trainer, config)
    config.training.disable_cuda_graphs = True
    adapter._refuse(Trainer, config)


def test_a_trainer_of_another_kind_is_refused() -> None:
    class Own(Trainer):  # type: ignore[misc]
        def train(self) -> None:
            """Go another way."""

    config = SimpleNamespace(parallelism=None, training=None)
    with pytest.raises(UsageError, match="Own has a `train` of its own, which ckptless does not know"):
        adapter._refuse(Own, config)
    with pytest.raises(UsageError, match=rf"train takes a {adapter.CONFIG} of torchtitan's, not a dict"):
        ckptless.torchtitan.train({})


@pytest.mark.skipif(IS_02, reason="its configuration does not know its Trainer")
def test_a_configuration_that_knows_its_trainer_takes_no_other() -> None:
    with pytest.raises(UsageError, match=r"builds its own Trainer: give train no trainer_class"):
        ckptless.torchtitan.train(configured(), Trainer)


def test_another_release_is_refused_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 0.1, say, has no such modules."""
    monkeypatch.delitem(sys.modules, adapter.__name__)
    for name in ("torchtitan.trainer", "torchtitan.train"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        UsageError, match=r"not the one that ckptless knows .*: use torchtitan 0\.2\.2 to 0\.3"
    ):
        importlib.reload(ckptless.torchtitan)
    monkeypatch.undo()
    importlib.reload(ckptless.torchtitan)


class Texts(torch.utils.data.IterableDataset[Any]):
    """Sums of a list that grows with each that it gives, as torchtitan's texts put tokens aside."""

    def __init__(self) -> None:
        self.aside: list[int] = []
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 9:
            self.at += 1
            self.aside.append(self.at * 1000)
            yield sum(self.aside)

    def state_dict(self) -> dict[str, Any]:
        """The list itself, which goes on growing."""
        return {"aside": self.aside, "at": self.at, "pair": (1, 2)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        assert saved["pair"] == (1, 2)
        self.aside, self.at = saved["aside"], saved["at"]


def loader() -> Any:
    return ParallelAwareDataloader(Texts(), dp_rank=0, dp_world_size=1, batch_size=None)


def test_a_loader_goes_on_where_it_was_and_nothing_is_pickled() -> None:
    position = adapter._Position(loader())
    batches = iter(position)
    taken = [next(batches) for _ in range(3)]
    saved = position.state_dict()
    assert b"pickle" not in saved["packed"]
    assert b"dp_rank_0" not in saved["packed"]
    rest = [*batches]
    other = adapter._Position(loader())
    other.load_state_dict(saved)
    assert [*other] == rest
    assert taken + rest == [*adapter._Position(loader())]
    # Where the cursor looks for what is the loader's own.
    assert other.num_workers == 0


def test_where_a_checkpoint_has_put_a_loader_it_begins_each_time() -> None:
    first = loader()
    batches = iter(first)
    taken = [next(batches) for _ in range(4)]
    on_disk = first.state_dict()
    rest = [*batches]
    second = loader()
    second.load_state_dict(on_disk)
    position = adapter._Position(second)
    state = torch.get_rng_state()
    position.begins_here()
    assert torch.equal(state, torch.get_rng_state())
    assert position.first is not None
    assert [*position] == [*position] == rest
    # A process that takes the rank has not read the disk.
    joined = adapter._Position(loader())
    joined.first = position.first
    assert [*joined] == rest
    assert taken + rest == [*loader()]
    assert adapter._Position(loader())._kind is StatefulDataLoader


def test_each_line_is_written_once_and_in_the_jobs_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    one = loggers._InJobsFolder(f"{tmp_path}/tb/20261128-0412/rank_0")
    assert [path.name for path in (tmp_path / "tb" / "job-7" / "rank_0").iterdir()]
    assert isinstance(one, TensorBoardLogger)
    written: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(one, "log", lambda metrics, step: written.append((step, [*metrics])))
    at = [0]
    kept = loggers.Loggers(SimpleNamespace(logger=SimpleNamespace(_loggers=[one])), lambda: at[0])
    one.log({"loss": 1.0}, 1)
    at[0] = 1
    one.log({"loss": 1.0}, 2)
    kept.go_back(1, joins=False)
    one.log({"loss": 1.0}, 2)
    one.log({"val": 1.0}, 2)
    assert written == [(1, ["loss"]), (2, ["loss"]), (2, ["val"])]
    loggers.Loggers(SimpleNamespace(logger=object()), lambda: 0).go_back(3, joins=True)
    one.close()


def test_a_container_of_loggers_that_is_another_one_is_refused() -> None:
    container = LoggerContainer()
    del container._loggers
    with pytest.raises(UsageError, match=r"torchtitan's LoggerContainer\._loggers is gone"):
        loggers.Loggers(SimpleNamespace(logger=container), lambda: 0)
