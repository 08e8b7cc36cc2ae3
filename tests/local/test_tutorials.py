"""What docs/tutorials and the quickstart show: blocks are typed as they stand, and say what is there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.reading import Reading, commands, holds

from .localrun import Job, wait_until
from .terminals import DEADLINE_S, SLEEPS, Started, Terminal

pytestmark = pytest.mark.timeout(5 * DEADLINE_S)


def saves(page: Reading, number: int, home: Path, *names: str) -> None:
    """Save a script of the page's under these names."""
    text = page.block(number)
    for old, new in SLEEPS.items():
        text = text.replace(old, new)
    for name in names:
        (home / name).write_text(text)


def changes(page: Reading, number: int, home: Path) -> None:
    """Make of the plain script, which is `train.py` as yet, what the page's diff does."""
    diff = f"--- a/train.py\n+++ b/train.py\n{page.block(number)}"
    subprocess.run(["git", "apply", "-"], cwd=home, input=diff, text=True, check=True)


def starts(page: Reading, number: int, home: Path) -> Started:
    """The job of a block that has nothing but its command."""
    ((command, _),) = commands(page.block(number))
    return Started(home, command)


def trains(job: Job, rank: int) -> int:
    """Wait until this rank has made its first steps; return its process."""
    wait_until(
        lambda: any(s.rank == rank and (s.step or 0) >= 3 for s in job.ledger().slots), DEADLINE_S, job
    )
    (pid,) = [one.pid for one in job.ledger().slots if one.rank == rank]
    assert pid is not None
    return pid


def test_the_first_job_outlives_a_rank(tmp_path: Path) -> None:
    page, say = Reading("docs/tutorials/first-job.md"), Terminal(tmp_path)
    saves(page, 1, tmp_path, "train.py")
    with page, starts(page, 2, tmp_path) as job:
        pid = {"19885": trains(job, 1)}
        page.hears(2, lambda: job.said)
        page.types(3, say)
        page.types(4, say, pid)
        page.hears(5, lambda: job.said, pid)
        job.finishes()


def test_a_script_prints_the_same_before_the_change_and_after(tmp_path: Path) -> None:
    page, say = Reading("docs/tutorials/your-script.md"), Terminal(tmp_path)
    with page:
        saves(page, 1, tmp_path, "plain.py", "train.py")
        before = page.types(2, say).stdout.splitlines()
        changes(page, 3, tmp_path)
        after = page.types(4, say).stdout.splitlines()
        assert [line.removeprefix("[rank 0] ") for line in after] == before
        assert len(before) == 2


def test_the_changed_script_is_rehearsed(tmp_path: Path) -> None:
    """And the one that the page asks about, whose `smooth` is no part of its State."""
    page, say = Reading("docs/tutorials/your-script.md"), Terminal(tmp_path)
    with page:
        saves(page, 1, tmp_path, "train.py")
        changes(page, 3, tmp_path)
        done = say("ckptless-run --rehearse train.py 20")
        assert done.returncode == 0, done.stderr
        assert "rehearsal: all of it is the same, bit for bit" in done.stdout + done.stderr
        text = (tmp_path / "train.py").read_text()
        text = text.replace(", smooth=1.0", "").replace("state.smooth", "smooth")
        (tmp_path / "train.py").write_text(
            text.replace("    for epoch", "    smooth = 1.0\n    for epoch", 1)
        )
        page.types(5, say, code=1)


def test_a_lightning_script_outlives_a_rank_and_prints_the_same(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    page, say = Reading("docs/tutorials/lightning.md"), Terminal(tmp_path)
    saves(page, 1, tmp_path, "plain.py", "train.py")
    changes(page, 3, tmp_path)
    with page, starts(page, 4, tmp_path) as job:
        pid = {"13544": trains(job, 1)}
        page.types(5, say, pid)
        page.hears(6, lambda: job.said, pid)
        page.hears(4, lambda: job.said)
        job.finishes()
        page.types(7, say)
        plain = re.findall(r"^epoch .*$", page.types(2, say).stdout, re.MULTILINE)
        assert re.findall(r"^\[rank 0\] (epoch .*)$", job.stdout, re.MULTILINE)[: len(plain)] == plain
        assert len(plain) == 3


def test_a_sharded_job_outlives_a_node(tmp_path: Path) -> None:
    page, say = Reading("docs/tutorials/fsdp2.md"), Terminal(tmp_path)
    saves(page, 1, tmp_path, "train.py")
    with page, starts(page, 2, tmp_path) as job:
        page.hears(2, lambda: job.said)
        page.types(3, say)
        page.types(4, say)
        page.hears(5, lambda: job.said)
        page.types(6, say)
        job.finishes()


def test_an_elastic_job_shrinks_and_grows(tmp_path: Path) -> None:
    page, say = Reading("docs/tutorials/elastic.md"), Terminal(tmp_path)
    saves(page, 1, tmp_path, "train.py")
    with page, starts(page, 2, tmp_path) as job:
        page.hears(2, lambda: job.said)
        page.types(3, say)
        page.hears(4, lambda: job.said)
        page.types(5, say)
        page.types(6, say)
        page.hears(7, lambda: job.said)
        job.finishes()


def test_the_quickstart(tmp_path: Path) -> None:
    page, watches, say = Reading("docs/quickstart.md"), Terminal(tmp_path), Terminal(tmp_path)
    saves(page, 2, tmp_path, "train.py")
    # However slow the commands are, it trains until all is typed.
    script = tmp_path / "train.py"
    lasts = script.read_text().replace("sleep(0.02)", "sleep(0.02 if run.step < 70 else 0.4)")
    script.write_text(lasts)
    with page, starts(page, 3, tmp_path) as job:
        pid = {"6263": trains(job, 1)}
        (export, _), (follow, _) = commands(page.block(4))
        watches(export)
        followed = tmp_path / "followed.txt"
        with watches.follows(follow, followed):
            page.types(5, say, pid)
            page.hears(6, followed.read_text, pid)
            page.types(7, say)
            page.hears(8, lambda: say("ckptctl timeline").stdout)
        page.hears(3, lambda: job.said)
        job.finishes()
        holds(job.state_dir, page.block(11))


def test_the_doctor_of_the_quickstart(tmp_path: Path) -> None:
    with Reading("docs/quickstart.md") as page:
        page.types(10, Terminal(tmp_path))
