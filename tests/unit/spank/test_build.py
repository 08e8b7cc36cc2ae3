"""The Makefiles: builds without a warning, random input under sanitizers, what is installed where."""

from pathlib import Path

from .native import JOB_SUBMIT, REPOSITORY, SPANK, make


def test_symbols_and_random_input(build: Path) -> None:
    assert "as it should be" in make(SPANK, build, "check")


def test_random_input_under_sanitizers(build: Path) -> None:
    assert "as it should be" in make(SPANK, build, "asan")


def test_job_submit_plugin(build: Path) -> None:
    assert "job_submit: as it should be" in make(JOB_SUBMIT, build, "check")


FILES = [
    "etc/ckptless/ckptless.yaml",
    "etc/slurm/plugstack.conf.d/ckptless.conf",
    "usr/lib/systemd/system/ckptlessd.service",
    "usr/lib/systemd/system/ckptlessd.socket",
    "usr/lib/x/slurm/ckptless_spank.so",
    "usr/libexec/ckptless/ckptless-notify",
    "usr/share/bash-completion/completions/ckptctl",
    "usr/share/bash-completion/completions/ckptless-run",
    *(f"usr/share/man/man{page.suffix[1]}/{page.name}" for page in (REPOSITORY / "docs/man").iterdir()),
]
CONFIG = FILES[:2]


def files(place: Path) -> list[str]:
    return sorted(str(file.relative_to(place)) for file in place.rglob("*") if not file.is_dir())


def install(build: Path, place: Path, what: str, *more: str) -> str:
    """`make install`, or `uninstall`, of the whole repository; what it printed."""
    return make(REPOSITORY, build, what, f"DESTDIR={place}", "PLUGINDIR=/usr/lib/x/slurm", *more)


def test_everything_is_installed_and_goes_again(build: Path, tmp_path: Path) -> None:
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / "etc/slurm/plugstack.conf").write_text("include /etc/slurm/plugstack.conf.d/*.conf\n")
    before = files(tmp_path)
    assert "pip install" in install(build, tmp_path, "install")
    assert files(tmp_path) == sorted([*before, *FILES])
    conf, unit = tmp_path / CONFIG[1], tmp_path / "usr/lib/systemd/system/ckptlessd.service"
    assert conf.read_text() == "optional /usr/lib/x/slurm/ckptless_spank.so\n"
    assert "\nExecStart=/usr/bin/ckptlessd\n" in unit.read_text()
    install(build, tmp_path, "install")  # a second time changes nothing
    install(build, tmp_path, "uninstall")
    assert files(tmp_path) == before
    assert not (tmp_path / "etc/ckptless").exists()
    assert not (tmp_path / "usr/libexec/ckptless").exists()


def test_edited_configuration_is_kept(build: Path, tmp_path: Path) -> None:
    install(build, tmp_path, "install", "PREFIX=/usr/local")
    unit = tmp_path / "usr/local/lib/systemd/system/ckptlessd.service"
    assert "\nExecStart=/usr/local/bin/ckptlessd\n" in unit.read_text()
    for name in CONFIG:
        (tmp_path / name).write_text("mine\n")
    for what in ("install", "uninstall"):
        said = install(build, tmp_path, what, "PREFIX=/usr/local")
        assert said.count("kept") == 2
        assert [(tmp_path / name).read_text() for name in CONFIG] == ["mine\n"] * 2
    assert files(tmp_path) == CONFIG


def test_the_controllers_plugin_is_installed_by_itself(build: Path, tmp_path: Path) -> None:
    install(build, tmp_path, "install-job-submit")
    assert files(tmp_path) == ["usr/lib/x/slurm/job_submit_ckptless.so"]
    install(build, tmp_path, "uninstall-job-submit")
    assert files(tmp_path) == []
