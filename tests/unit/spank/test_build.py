"""The Makefiles: builds without a warning, random input under sanitizers, what is installed where."""

from pathlib import Path

from native import HOOKS, JOB_SUBMIT, SPANK, make


def test_symbols_and_random_input(build: Path) -> None:
    assert "as it should be" in make(SPANK, build, "check")


def test_random_input_under_sanitizers(build: Path) -> None:
    assert "as it should be" in make(SPANK, build, "asan")


def test_job_submit_plugin(build: Path) -> None:
    assert "job_submit: as it should be" in make(JOB_SUBMIT, build, "check")


def test_install(build: Path, tmp_path: Path) -> None:
    where = (f"DESTDIR={tmp_path}", "PLUGINDIR=/usr/lib/x/slurm")
    make(SPANK, build, "install", *where)
    make(HOOKS, build, "install", *where)
    make(JOB_SUBMIT, build, "install", *where)
    installed = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert installed == [
        "etc/slurm/plugstack.conf.d/ckptless.conf",
        "usr/lib/x/slurm/ckptless_spank.so",
        "usr/lib/x/slurm/job_submit_ckptless.so",
        "usr/libexec/ckptless/ckptless-notify",
        "usr/share/man/man8/spank_ckptless.8",
    ]
    conf = tmp_path / installed[0]
    assert conf.read_text() == "optional /usr/lib/x/slurm/ckptless_spank.so\n"

    conf.write_text("optional /usr/lib/x/slurm/ckptless_spank.so socket=/srv/d.sock\n")
    assert "kept" in make(SPANK, build, "install", *where)
    assert "socket=/srv/d.sock" in conf.read_text()
