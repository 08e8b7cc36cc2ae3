"""A real Slurm cluster for the tests here: one that they share, and a maker for those that need their own.

Without root, Slurm or MUNGE they are skipped, and say what is missing; where CKPTLESS_REQUIRE_SLURM=1 is set,
as in the gate, they fail instead. With CKPTLESS_SLURM_ROOTFS=DIR the Slurm is that of the system in DIR.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import pytest

from .cluster import requirements
from .cluster.api import Cluster
from .cluster.plan import Plan
from .cluster.prepare import Files
from .training import make_site

NODES = 5
ROOTFS = os.environ.get("CKPTLESS_SLURM_ROOTFS", "")


class MakeCluster(Protocol):
    """Bring up a cluster that is taken down when the test ends."""

    def __call__(
        self, plan: Plan | None = None, *, ckptless: bool = False, files: Files | None = None
    ) -> Cluster: ...


def require_slurm() -> None:
    """Skip the test, or fail it where that is asked for, unless a cluster can be brought up here."""
    lacks = requirements.missing(ROOTFS)
    if lacks:
        require(f"no Slurm cluster here, it takes {', '.join(lacks)}")


def require(reason: str) -> None:
    """Skip the test, or fail it where that is asked for, since something is not here."""
    if os.environ.get("CKPTLESS_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Five nodes with Slurm's defaults and ckptless within reach, restored before each test that names it."""
    require_slurm()
    plan = Plan(nodes=NODES, rootfs=ROOTFS)
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster", plan, ckptless=True) as shared:
        yield shared


@pytest.fixture(scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with ckptless on it, of as many nodes as the module's NODES says."""
    require_slurm()
    place = tmp_path_factory.mktemp("site") / "cluster"
    with make_site(place, tmp_path_factory.mktemp("spank"), request.module.NODES) as up:
        yield up


@pytest.fixture(autouse=True)
def _restored(request: pytest.FixtureRequest) -> None:
    if "cluster" in request.fixturenames:
        shared: Cluster = request.getfixturevalue("cluster")
        shared.restore()


@pytest.fixture
def make_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeCluster]:
    """A maker of clusters; what it made is taken down, and deleted, when the test ends."""
    require_slurm()
    with ExitStack() as made:

        def make(plan: Plan | None = None, *, ckptless: bool = False, files: Files | None = None) -> Cluster:
            place = tmp_path_factory.mktemp("slurm") / "cluster"
            there = replace(plan or Plan(), rootfs=ROOTFS)
            return made.enter_context(Cluster(place, there, ckptless=ckptless, files=files))

        yield make
