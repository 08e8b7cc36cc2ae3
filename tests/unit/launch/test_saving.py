"""Which saved step a run goes on from, and what of the command line is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import xxhash

from ckptless.daemon.launch.options import newest, save_config
from ckptless.daemon.protocol import saved as s
from ckptless.daemon.protocol.errors import ProtocolError, UsageError
from ckptless.daemon.protocol.saving import SaveConfig
from ckptless.daemon.settings.options import run_options


def step(directory: Path, number: int, ranks: int = 2) -> Path:
    """A folder as a save leaves it, but for what is in the tensors."""
    folder = directory / s.step_name(number)
    folder.mkdir()

    def file(name: str, data: bytes) -> s.SavedFile:
        (folder / name).write_bytes(data)
        return s.SavedFile(name=name, nbytes=len(data), digest=xxhash.xxh3_128_hexdigest(data))

    manifest = s.Manifest(
        format=s.FORMAT,
        step=number,
        job="job",
        generation=1,
        world_size=ranks,
        saved_at_s=1.0,
        shards=(s.SavedShard(shard=0, tensors=file("__0_0.distcp", b"tensors"), index=file("i", b"{}")),),
        records=tuple(
            s.SavedRecord(rank=rank, shard=0, file=file(s.record_name(rank), b"record"))
            for rank in range(ranks)
        ),
    )
    (folder / s.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return folder


def test_the_newest_whole_one(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") is None
    assert newest(tmp_path) is None
    step(tmp_path, 90)
    hundred = step(tmp_path, 100)
    (tmp_path / ".saving-200-job-end").mkdir()
    (tmp_path / "latest").symlink_to("step-00000090")
    (tmp_path / "step-12").mkdir()
    assert newest(tmp_path) == (hundred, 2)


@pytest.mark.parametrize("damage", ["no manifest", "cut", "gone", "garbage", "rank missing", "format"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    older, bad = step(tmp_path, 90), step(tmp_path, 100)
    manifest = bad / s.MANIFEST
    match damage:
        case "no manifest":
            manifest.unlink()
        case "cut":
            (bad / "__0_0.distcp").write_bytes(b"tens")
        case "gone":
            (bad / s.record_name(1)).unlink()
        case "garbage":
            manifest.write_bytes(b"\xff{")
        case "rank missing":
            manifest.write_bytes(manifest.read_bytes().replace(b'"world_size":2', b'"world_size":3'))
        case "format":
            manifest.write_bytes(manifest.read_bytes().replace(b'"format":1', b'"format":9'))
    assert newest(tmp_path) == (older, 2)
    assert f"{bad} is not used" in caplog.text


def test_the_number_of_ranks_is_told(tmp_path: Path) -> None:
    assert newest(step(tmp_path, 100, ranks=4).parent) == (tmp_path / "step-00000100", 4)


def test_what_is_read_has_its_digest(tmp_path: Path) -> None:
    folder = step(tmp_path, 1)
    (record, *_) = s.read_manifest(folder).records
    assert s.read_checked(folder, record.file) == b"record"
    (folder / record.file.name).write_bytes(b"rEcord")
    with pytest.raises(ProtocolError, match="ckptless-record-0 does not match its digest"):
        s.read_checked(folder, record.file)


def test_the_options(tmp_path: Path) -> None:
    def config(**given: object) -> SaveConfig | None:
        return save_config(given, run_options(given), 2)

    assert config() is None
    with pytest.raises(UsageError, match="need --save-dir"):
        config(save_every=10)
    with pytest.raises(UsageError, match="need --save-dir"):
        config(save_total_limit=3)
    found = config(save_dir=tmp_path / "new", save_every=10)
    assert found is not None
    assert (found.directory, found.every, found.keep, found.resume) == (str(tmp_path / "new"), 10, 3, "")
    folder = step(tmp_path / "new", 5)
    again = config(save_dir=tmp_path / "new", save_total_limit=1)
    assert again is not None
    assert (again.every, again.keep, again.resume) == (0, 1, str(folder))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--save-dir .*file"):
        config(save_dir=tmp_path / "file" / "below")
