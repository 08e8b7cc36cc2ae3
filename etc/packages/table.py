"""What goes into which package, .deb and .rpm alike; paths are those of `make install`, from the root."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a package does when. The first four are rpm's, too: rpm puts changed configuration aside by itself, and
# knows no purge.
Moment = Literal[
    "unpacked",  # after the files of a first or another version have come
    "upgraded",  # then, where another version was there before
    "leaving",  # before the files go for good
    "left",  # after that
    "configuration aside",  # before the files go for good: configuration stays
    "configuration back",  # before the first files come
    "purged",  # configuration goes, too
]

HOME = "/usr/lib/ckptless"
COMMANDS = ("ckptlessd", "ckptctl")
_CONF = "/etc/slurm/plugstack.conf.d/ckptless.conf"


@dataclass(frozen=True, slots=True)
class Package:
    """One package. `files`, `config`: patterns without the leading slash, in which * is any text.

    In `needs`, by Debian's name and by rpm's, PYTHON is the interpreter, such as python3.11. With `slurm` it
    is built for one release of Slurm, which its version names. `others` is about files that are not ours.
    `overrides`: what lintian is told not to say, and why.
    """

    name: str
    summary: str
    description: str
    files: tuple[str, ...]
    needs: Mapping[str, str] = field(default_factory=dict)
    config: tuple[str, ...] = ()
    slurm: bool = False
    license: str = "MIT"
    others: str = ""
    scripts: Mapping[Moment, str] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)

    def has(self, path: str) -> bool:
        """Whether this file is the package's."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.files)


_DAEMON = Package(
    name="ckptless",
    summary="PyTorch jobs on Slurm that outlive processes and nodes",
    description="The daemon of compute nodes, ckptlessd, and ckptctl, which asks it. Both with the Python "
    "modules that they take, in a folder of their own; training scripts take ckptless from pip.",
    files=(
        "etc/ckptless/ckptless.yaml",
        "usr/bin/*",
        f"{HOME[1:]}/*",
        "usr/lib/systemd/system/*",
        "usr/share/bash-completion/*",
        "usr/share/man/man[15]/*",
        "usr/share/man/man8/ckptlessd.8.gz",
    ),
    config=("etc/ckptless/ckptless.yaml",),
    license="MIT AND Apache-2.0 AND BSD-2-Clause AND BSD-3-Clause AND PSF-2.0",
    others=f"\nBelow {HOME}/lib are Python modules of others, each with its licence in its .dist-info.\n",
    needs={"PYTHON": "/usr/bin/PYTHON", "munge": "munge"},
    scripts={
        "unpacked": f"""\
find {HOME} -name __pycache__ -prune -exec rm -rf {{}} +
find {HOME} -type d -empty -delete
PYTHON -m compileall -q {HOME}/lib
if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
""",
        # Jobs that run go on; nothing is started that its admin has not started.
        "upgraded": """\
if [ -d /run/systemd/system ]; then
    systemctl try-restart ckptlessd.service || echo 'ckptlessd: see systemctl status ckptlessd' >&2
fi
""",
        "leaving": f"""\
if [ -d /run/systemd/system ]; then
    systemctl --no-reload disable --now ckptlessd.socket ckptlessd.service
fi
find {HOME} -name __pycache__ -prune -exec rm -rf {{}} +
""",
        "left": "if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n",
        "purged": "rm -rf /var/lib/ckptless\n",
    },
    overrides={
        "embedded-library": "Its modules are PyPI's wheels, as they are: the same for each distribution.",
        "unusual-interpreter": "In modules of these wheels that nobody starts.",
        "wrong-path-for-interpreter": "Its commands find its modules by bin/python3 beside them.",
        "python3-script-but-no-python3-dep": "It needs the very Python that its modules are built for.",
        "maintainer-script-calls-systemctl": "Scripts are the same in .rpm, which has no deb-systemd-invoke.",
    },
)
_PLUGIN = Package(
    name="ckptless-slurm",
    summary="sbatch --ckptless: the SPANK plugin of ckptless",
    description="The SPANK plugin for login and compute nodes, its line for plugstack.conf, and "
    "ckptless-notify, a prolog and epilog. For the release of Slurm that the version names.",
    files=(
        "etc/slurm/*",
        "*/ckptless_spank.so",
        "usr/libexec/*",
        "usr/share/man/man8/spank_ckptless.8.gz",
    ),
    config=(_CONF[1:],),
    slurm=True,
    scripts={
        "unpacked": """\
grep -qs plugstack.conf.d /etc/slurm/plugstack.conf ||
    echo 'ckptless-slurm: add to /etc/slurm/plugstack.conf: include /etc/slurm/plugstack.conf.d/*.conf'
""",
        # With the line and without the plugin, each command of Slurm would tell its user that it finds none.
        "configuration aside": f"if [ -e {_CONF} ]; then mv {_CONF} {_CONF}.removed; fi\n",
        "configuration back": f"if [ -e {_CONF}.removed ]; then mv -n {_CONF}.removed {_CONF}; fi\n",
        "purged": f"rm -f {_CONF}.removed\n",
    },
)
_JOB_SUBMIT = Package(
    name="ckptless-slurm-job-submit",
    summary="checks of sbatch --ckptless in slurmctld",
    description="The job_submit plugin of ckptless for the controller, which checks what users ask for. For "
    "the release of Slurm that the version names.",
    files=("*/job_submit_ckptless.so",),
    slurm=True,
)
PACKAGES = (_DAEMON, _PLUGIN, _JOB_SUBMIT)
