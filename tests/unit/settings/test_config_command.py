"""`ckptctl config`: exit codes, one sentence, and what scripts read."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ckptless.daemon.ckptctl.config_command import config
from ckptless.daemon.ckptctl.main import _Group
from ckptless.daemon.ckptctl.shared.options import Asked, common
from ckptless.daemon.settings.site import load_settings


@click.group(cls=_Group)
@common
def ctl(_asked: Asked) -> None:
    """As in ckptctl."""


ctl.add_command(config)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ckptless.yaml"
    path.write_text("version: 1\nmax_stall: 60s\n")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(ctl, [str(one) for one in arguments])


def test_check_of_a_good_file(file: Path) -> None:
    done = run("config", "check", file)
    assert (done.exit_code, done.stdout, done.stderr) == (0, f"{file} is good.\n", "")


def test_check_of_a_bad_file(file: Path) -> None:
    file.write_text("version: 1\nmax_stal: 60s\n")
    done = run("config", "check", file)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"ckptctl: error: {file}, line 2: there is no key max_stal: is it max_stall?\n"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for command in ("check", "show"):
        done = run("config", command, tmp_path / "none")
        assert done.exit_code == 2
        assert done.stderr == f"ckptctl: error: cannot read {tmp_path / 'none'}: No such file or directory\n"


def test_the_default_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptless.daemon.settings.site.DEFAULT_FILE", file)
    assert run("config", "check").stdout == f"{file} is good.\n"
    file.unlink()
    done = run("config", "check")
    assert (done.exit_code, done.stdout) == (
        0,
        "There is no /etc/ckptless/ckptless.yaml: the defaults hold.\n",
    )
    assert run("config", "show").stdout.startswith("# no file: the defaults\nversion: 1  # default\n")


def test_show(file: Path, tmp_path: Path) -> None:
    done = run("config", "show", file)
    assert done.exit_code == 0
    assert "\nmax_stall: 1m  # file\n" in done.stdout
    again = tmp_path / "again.yaml"
    again.write_text(done.stdout)
    assert load_settings(again).timeouts == load_settings(file).timeouts


@pytest.mark.parametrize("before", [True, False])
def test_show_as_json(file: Path, before: bool) -> None:
    arguments = ["--json", "config", "show", file] if before else ["config", "show", file, "--json"]
    document = json.loads(run(*arguments).stdout)
    assert document["meta"] == {"schema": 1}
    assert document["file"] == str(file)
    rows = {row.pop("key"): row for row in document["settings"]}
    assert rows["max_stall"] == {"value": 60.0, "source": "file", "unit": "s"}
    assert rows["timeouts.stall"] == {"value": 60.0, "source": "derived", "unit": "s"}
    assert rows["daemon.port"] == {"value": 6821, "source": "default", "unit": None}
