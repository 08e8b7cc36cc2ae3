"""A cluster with ckptless as a site has it, and training jobs on it: submit, watch, and compare every bit."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptless.daemon.ledger.merge import Snapshot, read_all
from tests.local.localrun import TOY, Fault, Result, read_toy, reference

from . import miniconf
from .cluster.api import Cluster
from .cluster.plan import Plan, Service

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.prefix) / "bin"
PLUGIN = miniconf.PLUGIN
STEPS = 40
USER = "tester"
POLL_S = 0.1
DEADLINE_S = 90.0
# The job runs at this pace for as long as its file "slow" is there.
SLEEP_S = 0.1
PACKAGES = "/etc/ckptless/packages"
YAML = "version: 1\nmax_stall: 60s\nslurm: {backend: commands, poll: 1s}\n"


def make_site(  # noqa: PLR0917  # what a site may have
    directory: Path,
    build: Path,
    nodes: int,
    conf: dict[str, str] | None = None,
    lines: tuple[str, ...] = (),
    yaml: str = YAML,
    more: Mapping[str, str] | None = None,
) -> Cluster:
    """A cluster, still off, with ckptlessd on every node and the plugin in Slurm.

    `more` are files of Python's, by name, that the daemons can import.
    """
    plugin = miniconf.build("spank", "ckptless_spank.so", build)
    env = {"PYTHONPATH": PACKAGES} if more else {}
    # The package's own sees no PYTHONPATH.
    command = "/usr/bin/ckptlessd" if miniconf.PACKAGED and not more else str(BIN / "ckptlessd")
    daemon = Service(name="ckptlessd", argv=(command, "--verbose"), env=env)
    files: dict[str, str | bytes] = {
        "/etc/ckptless/ckptless.yaml": yaml,
        "/etc/slurm/plugstack.conf": f"optional {PLUGIN} launcher={BIN / 'ckptless-run'}\n",
        PLUGIN: plugin.read_bytes(),
        **{f"{PACKAGES}/{name}": text for name, text in (more or {}).items()},
    }
    conf = {"PrologFlags": "Alloc", **(conf or {})}
    plan = Plan(nodes=nodes, services=(daemon,), conf=conf, lines=lines, rootfs=miniconf.ROOTFS)
    return Cluster(directory, plan, ckptless=True, files=files)


@dataclass
class Training:
    """One submitted job of the toy; every file of it is in a folder that all nodes see."""

    cluster: Cluster
    faults: Sequence[Fault] = ()
    nodes: int = 5
    spares: int = 1
    steps: int = STEPS
    user: str = USER
    options: Sequence[str] = ()
    run_options: Sequence[str] = ()
    srun: bool = False
    name: str = field(default_factory=lambda: f"job-{secrets.token_hex(3)}")
    job_id: int = 0

    @property
    def home(self) -> Path:
        """Its folder, as seen from here."""
        return self.cluster.shared / self.name

    def submit(self) -> Training:
        """`sbatch --ckptless`, slow until `hurry`."""
        inside = f"/shared/{self.name}"
        self.cluster.run("ctl", "mkdir", inside, user=self.user)
        (self.home / "slow").touch()
        faults = json.dumps(list(self.faults))
        run = " ".join([*(["srun"] if self.srun else []), "ckptless-run", *self.run_options])
        script = f"#!/bin/bash\n{run} {TOY} {self.steps} {inside}/out '{faults}'\n"
        (self.home / "job.sh").write_text(script)
        words = ["sbatch", "--parsable", f"--ckptless=spares={self.spares}", f"--nodes={self.nodes}"]
        # The reference is made with one thread to a rank, as four on one machine get.
        env = {"TOY_SLEEP_S": str(SLEEP_S), "TOY_SLEEP_WHILE": f"{inside}/slow", "OMP_NUM_THREADS": "1"}
        done = self.cluster.run("ctl", *words, *self.options, "job.sh", user=self.user, env=env, cwd=inside)
        self.job_id = int(done.stdout)
        return self

    def hurry(self) -> None:
        """From here on without pauses."""
        (self.home / "slow").unlink(missing_ok=True)

    # -------------------------------------------------------------------------------- what is there

    @property
    def log_dir(self) -> Path:
        """Return what ckptless-run made."""
        return self.home / f"ckptless-{self.run_name}"

    def result(self) -> Result:
        """Return what the toy wrote."""
        return read_toy(self.home / "out")

    def newest(self, generation: int = 0) -> int:
        """The newest step that every rank has made (in this generation or a later one)."""
        if max(self.result().generations, default=0) < generation:
            return 0
        found = self.result().losses
        return min(max((s for r, s in found if r == rank), default=0) for rank in range(4))

    def ledger(self) -> Snapshot:
        """All nodes' ledgers, also of those that are off; only this job."""
        return read_all(self._everywhere())

    def row(self, run: str = "") -> tuple[str, int | None] | None:
        """State and exit code of a run's row (this one's, if none is named), None where there is none yet."""
        rows = {(j.state, j.exit_code) for j in self.ledger().jobs if j.job == (run or self.run_name)}
        return rows.pop() if len(rows) == 1 else None

    def _everywhere(self) -> Path:
        """The nodes' state directories side by side, as links, since `read_all` wants them so."""
        folder = self.home / "ledgers"
        folder.mkdir(exist_ok=True)
        for node in self.cluster.plan.node_names:
            link = folder / node
            if not link.is_symlink():
                link.symlink_to(self.cluster.var(node) / "lib/ckptless")
        return folder

    def outcome(self) -> dict[str, Any] | None:
        """Return what the agents wrote down."""
        path = self.log_dir / "outcome.json"
        return json.loads(path.read_text()) if path.exists() else None

    def slurm(self, what: str) -> str:
        """A field of `scontrol show job`."""
        text = self.cluster.run("ctl", "scontrol", "-o", "show", "job", str(self.job_id)).stdout
        found = re.search(rf"\b{what}=(\S*)", text)
        assert found is not None, text
        return found.group(1)

    def story(self) -> str:
        """Everything that tells why a test failed."""
        parts = [path.read_text(errors="replace")[-2000:] for path in sorted(self.home.glob("slurm-*.out"))]
        parts += [
            f"--- {path.name}\n{text[-1500:]}"
            for path in sorted(self.log_dir.glob("*.log"))
            if (text := path.read_text(errors="replace"))
        ]
        parts.append(f"--- slurmctld\n{self.cluster.log('ctl', 'slurmctld')[-3000:]}")
        events = sorted(self.ledger().events, key=lambda e: e.at_s)
        parts += [
            f"{e.at_s:.3f} node-{e.node} g{e.generation} {e.kind}: {e.text}"
            for e in events
            if e.job == self.run_name
        ]
        return "\n".join(parts)

    @property
    def run_name(self) -> str:
        """The run in the ledger."""
        return f"{self.job_id}.s0" if self.srun else str(self.job_id)

    @property
    def again(self) -> str:
        """The run of the job's second start."""
        return f"{self.job_id}.s0r1" if self.srun else f"{self.job_id}.1"

    # -------------------------------------------------------------------------------------- waiting

    def wait(self, what: Callable[[], object], why: str, deadline_s: float = DEADLINE_S) -> None:
        """Until `what` holds; fails with the job's story."""
        limit = time.monotonic() + deadline_s
        while not what():
            if time.monotonic() > limit:
                raise AssertionError(f"not within {deadline_s:.0f} s: {why}\n{self.story()}")
            time.sleep(POLL_S)

    def trains(self, generation: int = 1, steps: int = 4) -> None:
        """Until some steps more are made in this generation or a later one, and the ledgers know it, too."""
        self.wait(lambda: self.newest(generation) > 0, f"generation {generation} trains")
        start = self.newest(generation)
        self.wait(lambda: self.newest(generation) >= start + steps, f"{steps} steps more")

        def known() -> bool:
            return any(
                g.job == self.run_name and g.generation >= generation for g in self.ledger().generations
            )

        self.wait(known, f"the ledgers have generation {generation}")

    def ended(self, code: int = 0, state: str = "COMPLETED") -> None:
        """Until the job's outcome is there, and Slurm agrees."""
        self.hurry()
        self.wait(lambda: self.outcome() is not None, "an outcome")
        outcome = self.outcome()
        assert outcome is not None
        assert outcome["exit_code"] == code, f"{outcome}\n{self.story()}"
        self.wait(lambda: self.slurm("JobState") == state, f"Slurm says {state}", 30.0)
        self.nothing_left()

    def nothing_left(self) -> None:
        """No process of the user on any node that is on."""
        nodes = [s.machine for s in self.cluster.status() if s.pid is not None and s.machine != "ctl"]

        def left() -> list[str]:
            found = [
                (n, self.cluster.run(n, "pgrep", "-a", "-u", self.user, check=False).stdout) for n in nodes
            ]
            return [f"{node}: {text}" for node, text in found if text]

        self.wait(lambda: not left(), "no process left", 30.0)

    def same_bits(self) -> None:
        """Every loss of every rank, and the end of every rank, are those of a run without faults."""
        clean, found = reference(self.steps), self.result()
        wrong = {at: lines for at, lines in found.losses.items() if lines != clean.losses.get(at)}
        assert not wrong, f"other losses: {sorted(wrong.items())[:6]}\n{self.story()}"
        assert set(found.losses) == set(clean.losses), "losses are missing"
        assert found.finals == clean.finals


def kept(site: Cluster, node: str, user: str = "root") -> list[dict[str, Any]]:
    """Give what `ckptctl kept` shows a user there."""
    done = site.run(node, "ckptctl", "--json", "kept", user=user)
    found: list[dict[str, Any]] = json.loads(done.stdout)["kept"]
    return found
