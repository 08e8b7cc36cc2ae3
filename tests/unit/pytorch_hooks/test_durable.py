"""A version on the disk in DCP's format: read back bit for bit, and by plain DCP under torch's names."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckptless.daemon.protocol import saved as s
from ckptless.daemon.protocol import version
from ckptless.daemon.protocol.errors import BadVersionError, PeerError, RecoveryError
from ckptless.daemon.protocol.saving import WritePart, WriteRecord
from ckptless.pytorch_hooks.commit.versions import record_digest
from ckptless.pytorch_hooks.saving.finish import finish, prune
from ckptless.pytorch_hooks.saving.load import load
from ckptless.pytorch_hooks.saving.write import Shard, write_part
from ckptless.pytorch_hooks.state import State, TensorSet, raw, read, restore

from .captured import capture

CHUNK = 4096


def make(seed: int, steps: int = 2) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4, bias=False))
    model[2].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": trained[:2], "lr": 0.1},
        {"params": trained[2:], "betas": (0.8, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for _ in range(steps):
        model(torch.randn(5, 8)).sum().backward()
        optimizer.step()
    return State(model=model, optimizer=optimizer, best=1.5)


def packed(state: State, step: int, shard: int = 0) -> tuple[Shard, WriteRecord]:
    """A version as a rank writes it, and its record."""
    tensors = TensorSet(state)
    layout = tensors.layout
    head = version.header_nbytes(layout.nbytes, CHUNK)
    data = torch.zeros(head + layout.nbytes, dtype=torch.uint8)
    tensors.pack(data[head:])
    payload = raw.window(data)[head:]
    chunks = tuple(version.digest_of(payload[a:b]) for a, b in version.spans(layout.nbytes, CHUNK))
    header = version.Header(
        "job", shard, shard, step, 1, layout.digest, layout.nbytes, chunks, chunk_nbytes=CHUNK
    )
    digest = version.write_header(raw.window(data), header)
    record = capture(state, step, {"at": step}, tensors=tensors)
    return Shard(shard, data, digest), WriteRecord(
        rank=shard, shard=shard, record=record, digest=record_digest(record)
    )


def part(directory: Path, step: int, **more: Any) -> WritePart:
    folder = directory / f"{s.SAVING}{step}-job"
    folder.mkdir(parents=True, exist_ok=True)
    words: dict[str, Any] = {"parts": (0,), "finishes": True, "keep": 3, "deadline_s": 5.0, **more}
    return WritePart(
        job="job",
        step=step,
        generation=1,
        world_size=1,
        folder=str(folder),
        directory=str(directory),
        node=0,
        **words,
    )


def save(directory: Path, state: State, step: int, keep: int = 3) -> Path:
    asked = part(directory, step, keep=keep)
    shard, record = packed(state, step)
    write_part(Path(asked.folder), 0, step, [shard], [record])
    folder = finish(asked)
    assert prune(directory, asked.keep) == ""
    return folder


def test_it_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = make(1)
    folder = save(tmp_path, state, 7)
    assert folder == tmp_path / "step-00000007"
    assert (tmp_path / "latest").resolve() == folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000007"]
    found = load(folder, 0, 1)
    other = make(2, steps=0)
    tensors = TensorSet(other)
    view = restore_into(tensors, other, found.record, found.payload)
    assert (found.step, view.step, view.cursor) == (7, 7, {"at": 7})
    for (name, here), (_, there) in zip(tensors.named(), TensorSet(state).named(), strict=True):
        assert torch.equal(here, there), name


def restore_into(tensors: TensorSet, state: State, record: bytes, payload: torch.Tensor) -> Any:
    tensors.unpack(payload, read(record).layout)
    return restore(record, state)


def test_plain_dcp_knows_every_name(tmp_path: Path) -> None:
    """What get_state_dict asks for is there, values and all."""
    state = make(1)
    folder = save(tmp_path, state, 3)
    other = make(2)
    found: dict[str, Any] = dict(
        zip(("model", "optimizer"), get_state_dict(other.model, other.optimizer), strict=True)
    )
    state_dict_loader.load(found, checkpoint_id=folder, no_dist=True)
    wanted: dict[str, Any] = dict(
        zip(("model", "optimizer"), get_state_dict(state.model, state.optimizer), strict=True)
    )
    assert found["model"].keys() == wanted["model"].keys()
    for name, value in wanted["model"].items():
        assert torch.equal(found["model"][name], value), name
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    for name, entry in wanted["optimizer"]["state"].items():
        for key, value in entry.items():
            assert torch.equal(found["optimizer"]["state"][name][key], value), (name, key)


def test_a_bad_version_is_not_written(tmp_path: Path) -> None:
    asked = part(tmp_path, 3)
    shard, record = packed(make(1), 3)
    shard.data[-70] ^= 1
    with pytest.raises(BadVersionError, match="does not match"):
        write_part(Path(asked.folder), 0, 3, [shard], [record])
    assert not (Path(asked.folder) / s.part_name(0)).exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", "ckptless-record-0", "ckptless-shard-0"])
def test_a_flipped_bit_is_found(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, make(1), 3)
    data = bytearray((folder / name).read_bytes())
    pieces = s.decode((folder / "ckptless-shard-0").read_bytes(), s.ShardIndex, folder).pieces
    # In a tensor's own bytes, which torch.load does not look at.
    weight = next(piece for piece in pieces if piece.name.startswith("p:"))
    at = weight.offset + weight.nbytes // 2 if name.startswith("__") else len(data) // 2
    data[at] ^= 1
    (folder / name).write_bytes(bytes(data))
    with pytest.raises(RecoveryError, match=r"step-00000003 cannot be gone on from .*another --save-dir"):
        load(folder, 0, 1)


def test_of_another_world_it_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, make(1), 3)
    with pytest.raises(RecoveryError, match="it is of 1 ranks, here are 2"):
        load(folder, 0, 2)


def test_who_finishes_waits_for_every_part_but_not_for_ever(tmp_path: Path) -> None:
    asked = part(tmp_path, 3, parts=(0, 1), deadline_s=0.1)
    shard, record = packed(make(1), 3)
    write_part(Path(asked.folder), 0, 3, [shard], [record])
    with pytest.raises(PeerError, match=r"node-1 has not written its part of step 3 in 0 s"):
        finish(asked)
    (Path(asked.folder) / s.skip_name(1)).touch()
    with pytest.raises(PeerError, match=r"node-1 could not write its part of step 3"):
        finish(part(tmp_path, 3, parts=(0, 1), deadline_s=60.0))
    assert s.steps_in(tmp_path) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    state = make(1)
    (tmp_path / ".saving-2-job-1").mkdir()
    (tmp_path / ".saving-99-job-1").mkdir()
    for step in (1, 2, 3, 4):
        save(tmp_path, state, step, keep=2)
    assert [step for step, _ in s.steps_in(tmp_path)] == [4, 3]
    # Half done, and older than what is whole.
    assert not (tmp_path / ".saving-2-job-1").exists()
    assert (tmp_path / ".saving-99-job-1").exists()
    prune(tmp_path, 1)
    assert [step for step, _ in s.steps_in(tmp_path)] == [4]


def test_what_cannot_be_removed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, where somebody still has a file of it open."""
    state = make(1)
    for step in (1, 2):
        save(tmp_path, state, step)

    def busy(path: str, **_at: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        said = prune(tmp_path, 1)
    assert said.endswith(": Device or resource busy")
    assert ".saving-0-removed-step-00000001-" in said
    # Nobody takes it for a step, and the next save tries again.
    assert [step for step, _ in s.steps_in(tmp_path)] == [2]
    assert prune(tmp_path, 1) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000002"]


def test_a_step_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, make(1), 3)
    folder = save(tmp_path, make(2), 3)
    found = load(folder, 0, 1)
    shard, _ = packed(make(2), 3)
    assert torch.equal(found.payload, shard.data[-len(found.payload) :])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert os.readlink(tmp_path / "latest") == "step-00000003"  # noqa: PTH115
