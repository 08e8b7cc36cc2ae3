"""ckptless.yaml: what is good, what follows from it, and one sentence for every mistake."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies
from msgspec import structs

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.protocol.model import Limits
from ckptless.daemon.settings.config import Timers
from ckptless.daemon.settings.option_kinds import duration, seconds
from ckptless.daemon.settings.options import KEYS
from ckptless.daemon.settings.site import (
    DEFAULT_FILE,
    Settings,
    Timeouts,
    as_yaml,
    load_settings,
    needs_restart,
    shown,
)

ROOT = Path(__file__).parents[3]


@dataclass
class Files:
    folder: Path

    def write(self, text: str | bytes) -> Path:
        path = self.folder / "ckptless.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def load(self, text: str | bytes) -> Settings:
        return load_settings(self.write(text))

    def refused(self, text: str | bytes) -> str:
        """The one sentence that a file is refused with, without the file's name before it."""
        path = self.write(text)
        with pytest.raises(UsageError) as caught:
            load_settings(path)
        sentence = str(caught.value)
        assert "\n" not in sentence
        assert "$" not in sentence
        assert str(path) in sentence
        return sentence.removeprefix(str(path)).lstrip(":, ")


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_smallest_file(files: Files) -> None:
    found = files.load("version: 1\n")
    assert found.max_stall_s == 300.0
    assert found.timeouts == Timeouts(
        beat_s=0.25, dark_s=1.5, pong_s=10.0, leave_s=30.0, join_s=300.0, stall_s=300.0, lease_s=10.0
    )
    assert found.daemon.port == 6821
    assert found.daemon.bind is None
    assert found.slurm.poll_s == 30.0
    assert found.given == {"version"}


def test_no_file_is_the_defaults(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptless.daemon.settings.site.DEFAULT_FILE", files.folder / "none.yaml")
    found = load_settings()
    assert found.file is None
    given = files.load("version: 1")
    assert dataclasses.replace(given, file=None, given=frozenset()) == found
    # But a file that was asked for must be there.
    with pytest.raises(UsageError, match=r"cannot read .*none\.yaml: No such file"):
        load_settings(files.folder / "none.yaml")


def test_the_default_file_is_read(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ckptless.daemon.settings.site.DEFAULT_FILE", files.write("version: 1\nmax_stall: 60s")
    )
    assert load_settings().max_stall_s == 60.0


def test_every_key(files: Files) -> None:
    found = files.load(
        """
version: 1
max_stall: 2m
timeouts: {beat: 100ms, dark: 1s, pong: 5s, leave: 7.5s, join: 90s, stall: 100s, lease: 4s}
daemon:
  port: 7000
  bind: 10.1.0.0/16
  socket: /run/x.sock
  state_dir: /srv/ckptless
  log_level: debug
  log_format: json
slurm: {backend: commands, poll: 1m, on_node_lost: drain, bin_dir: /opt/slurm/bin}
munge: {socket: /run/m.sock}
keep: {memory: 512MiB, ttl: 1h}
ledger: {keep: 720h, size: 64MiB}
data: {budget: 256MiB, prefetch: 4}
domains: {rack1: "node[1-4]"}
replication: {bandwidth: 2GB/s, interface: ib0}
comm: {interface: 10.3.0.0/16}
elastic:
  {allow: false, partitions: [gpu, a-b], qos: [low], draw_in: false, give_way: true, leave_drained: true}
health:
  act: drain
  most_per_hour: 5
  undrain_after: 1h
  without: [nvml]
  disks: [/local]
  mounts: [/home, /scratch/a b]
  commands: {nhc: "/usr/sbin/nhc -a"}
  actions: {xid-13: drain, our-own: move}
  move_stragglers: 10
metrics: {listen: "10.1.0.7:9821", allow: [10.1.0.0/16], textfile: /var/c.prom, jobs: true}
budgets: {raise_tries: 2, process_tries: 4, flap_tries: 6, flap_window: 30m}
"""
    )
    assert found.given == set(KEYS)
    assert found.timeouts == Timeouts(
        beat_s=0.1, dark_s=1.0, pong_s=5.0, leave_s=7.5, join_s=90.0, stall_s=100.0, lease_s=4.0
    )
    assert (found.daemon.bind, found.daemon.log_level) == ("10.1.0.0/16", "debug")
    assert found.daemon.log_format == "json"
    assert (found.slurm.poll_s, found.slurm.on_node_lost) == (60.0, "drain")
    assert found.munge.socket == "/run/m.sock"
    assert found.comm.interface == "10.3.0.0/16"
    assert (found.keep.memory_nbytes, found.keep.ttl_s) == (512 << 20, 3600.0)
    assert (found.ledger.keep_s, found.ledger.size_nbytes) == (30 * 86400.0, 64 << 20)
    assert (found.data.budget_nbytes, found.data.prefetch) == (256 << 20, 4)
    assert (found.elastic.allow, found.elastic.partitions) == (False, ("gpu", "a-b"))
    assert found.elastic.qos == ("low",)
    assert not found.elastic.draw_in
    assert found.elastic.give_way
    assert found.elastic.leave_drained
    health = found.health
    assert (health.act, health.most_per_hour, health.undrain_after_s) == ("drain", 5, 3600.0)
    assert (health.without, health.disks) == (("nvml",), ("/local",))
    assert health.mounts == ("/home", "/scratch/a b")
    assert health.move_stragglers == 10
    assert health.commands == {"nhc": "/usr/sbin/nhc -a"}
    assert health.actions == {"xid-13": "drain", "our-own": "move"}
    assert files.load(as_yaml(found)).health == health
    assert (found.metrics.listen, found.metrics.allow) == ("10.1.0.7:9821", ("10.1.0.0/16",))
    assert (found.metrics.textfile, found.metrics.jobs) == ("/var/c.prom", True)
    assert found.limits(start_tries=2) == Limits(
        pong_s=5.0,
        leave_s=7.5,
        join_s=90.0,
        stall_s=100.0,
        lease_s=4.0,
        raise_tries=2,
        process_tries=4,
        start_tries=2,
        flap_tries=6,
        flap_window_s=1800.0,
    )
    assert found.domains == {"rack1": ("node1", "node2", "node3", "node4")}
    assert found.timers == Timers(beat_s=0.1, dark_s=1.0)
    # A job with a knob of its own has the site's budgets all the same.
    assert found.limits(60.0) == structs.replace(
        Limits.from_max_stall(60.0), raise_tries=2, process_tries=4, flap_tries=6, flap_window_s=1800.0
    )


def test_sections_with_nothing_in_them(files: Files) -> None:
    assert files.load("version: 1\ntimeouts:\ndaemon:\nslurm: {}\nmunge:\n").daemon.port == 6821


SENTENCES = [
    ("", "version is missing: it must be 1, as in `version: 1`"),
    ("max_stall: 5m", "version is missing: it must be 1, as in `version: 1`"),
    ("version: 2", "line 1: version is 2: it must be 1, as in `version: 1`"),
    ("version: '1'", "line 1: version is '1': it must be 1, as in `version: 1`"),
    ("- version", "it must consist of keys with values, as in `version: 1`"),
    ("version", "it must consist of keys with values, as in `version: 1`"),
    ("version: 1\ncolour: blue", "line 2: there is no key colour: the keys here are version, max_stall,"),
    ("version: 1\ndaemon:\n  prot: 1", "line 3: there is no key daemon.prot: is it port?"),
    ("version: 1\n1: 2", "line 2: there is no key 1: the keys here are"),
    ("version: 1\n? [a]\n: 2", "line 2: this is no YAML: found unhashable key"),
    ("version: 1\nversion: 1", "line 2: version stands here again, first in line 1"),
    (
        "version: 1\nslurm:\n  poll: 9s\n  bin_dir: null\n  poll: 8s",
        "line 5: slurm.poll stands here again, first in line 3",
    ),
    ("version: 1\ndaemon: 7", "line 2: daemon is a section: write its keys under it, indented"),
    (
        "version: 1\nmax_stall: 60",
        "line 2: max_stall is 60: it must be a duration with its unit from 5s to 24h",
    ),
    ("version: 1\nmax_stall: 1:30", "line 2: max_stall is 90: it must be a duration with its unit"),
    ("version: 1\nmax_stall: 60 min", "line 2: max_stall is '60 min': it must be a duration"),
    ("version: 1\nmax_stall: -5s", "line 2: max_stall is '-5s': it must be a duration"),
    ("version: 1\nmax_stall: .inf", "line 2: max_stall is inf: it must be a duration"),
    ("version: 1\nmax_stall: 4s", "line 2: max_stall is '4s': it must be a duration with its unit from 5s"),
    ("version: 1\nmax_stall: 25h", "line 2: max_stall is '25h': it must be a duration"),
    ("version: 1\nmax_stall: &a [*a]", "line 2: max_stall is a list: it must be"),
    ("version: 1\nmax_stall: &a {b: *a}", "line 2: max_stall is a section: it must be"),
    ("version: 1\nmax_stall: null", "line 2: max_stall is null: it must be a duration"),
    ("version: 1\ndaemon: {port: 80}", "line 2: daemon.port is 80: it must be a TCP port from 1024 to 65535"),
    ("version: 1\ndaemon: {port: 70000}", "line 2: daemon.port is 70000: it must be"),
    ("version: 1\ndaemon: {port: '7000'}", "line 2: daemon.port is '7000': it must be"),
    ("version: 1\ndaemon: {port: yes}", "line 2: daemon.port is true: it must be"),
    ("version: 1\ndaemon:\n\n  port: 6818", "line 4: daemon.port is 6818, which is one of Slurm's own"),
    (
        "version: 1\ndaemon: {bind: 10.0.0.300}",
        "line 2: daemon.bind is 10.0.0.300: it must be an IP address, a",
    ),
    ("version: 1\ndaemon: {bind: 10.0.0.5/24}", "line 2: daemon.bind is 10.0.0.5/24: it must be"),
    ("version: 1\ndaemon: {bind: 'ib0; rm'}", "line 2: daemon.bind is ib0; rm: it must be"),
    ("version: 1\ndaemon: {bind: ''}", "line 2: daemon.bind is : it must be"),
    ("version: 1\ndaemon: {socket: '@x'}", "line 2: daemon.socket is '@x': it must be the absolute path"),
    (f"version: 1\ndaemon: {{socket: /{'x' * 107}}}", "line 2: daemon.socket is '/xxxxxxxx"),
    (
        "version: 1\ndaemon: {state_dir: var}",
        "line 2: daemon.state_dir is 'var': it must be an absolute path",
    ),
    ('version: 1\ndaemon: {state_dir: "/a\\nb"}', "line 2: daemon.state_dir is '/a\\nb': it must be"),
    ("version: 1\ndaemon: {log_level: loud}", "line 2: daemon.log_level is 'loud': it must be debug, info,"),
    ("version: 1\nslurm: {backend: rest}", "line 2: slurm.backend is 'rest': it must be auto, commands or"),
    (
        "version: 1\nslurm: {on_node_lost: null}",
        "line 2: slurm.on_node_lost is null: it must be down, drain or",
    ),
    (
        "version: 1\nslurm: {poll: 0s}",
        "line 2: slurm.poll is '0s': it must be a duration with its unit from 1s",
    ),
    ("version: 1\nmunge: {socket: [a]}", "line 2: munge.socket is a list: it must be"),
    ("version: 1\ndaemon: {port: 6821", "line 2: this is no YAML: expected ',' or '}', but got"),
    ("version: 1\n\tdaemon: 1", "line 2: this is no YAML: found character '\\t' that cannot start any token"),
    ("version: 1\n---\nversion: 1", "line 2: this is no YAML: but found another document"),
    ("version: !!python/name:os.system 1", "line 1: this is no YAML: could not determine a constructor"),
    ("version: *a", "line 1: this is no YAML: found undefined alias"),
    (b"version: 1\n# \xff", "byte 13 is not UTF-8: save the file as UTF-8"),
    (b"version: 1\n# \x01", "this is no YAML: special characters are not allowed"),
]


@pytest.mark.parametrize(("text", "sentence"), SENTENCES, ids=[sentence for _, sentence in SENTENCES])
def test_one_sentence(files: Files, text: str | bytes, sentence: str) -> None:
    assert files.refused(text).startswith(sentence)


INCONSISTENT = [
    (
        "beat: 500ms",
        "timeouts.beat (500ms) must be less than a third of timeouts.dark (1.5s, derived from max_stall)",
    ),
    (
        "dark: 750ms",
        "timeouts.beat (250ms, derived from max_stall) must be less than a third of timeouts.dark (750ms)",
    ),
    ("dark: 12s", "timeouts.dark (12s) must be less than timeouts.lease (10s, derived from max_stall)"),
    (
        "dark: 5m, lease: 6m",
        "timeouts.dark (5m) must be less than timeouts.stall (5m, derived from max_stall)",
    ),
    ("lease: 1s", "timeouts.dark (1.5s, derived from max_stall) must be less than timeouts.lease (1s)"),
    ("lease: 5m", "timeouts.lease (5m) must be less than timeouts.stall (5m, derived from max_stall)"),
    ("stall: 8s", "timeouts.pong (10s, derived from max_stall) must be less than timeouts.stall (8s)"),
    ("leave: 100s, stall: 100s", "timeouts.leave (100s) must be less than timeouts.stall (100s)"),
    ("join: 301s", "timeouts.join (301s) must not be more than max_stall (5m)"),
    ("stall: 10m", "timeouts.stall (10m) must not be more than max_stall (5m)"),
]


@pytest.mark.parametrize(("timeouts", "sentence"), INCONSISTENT)
def test_timeouts_that_do_not_fit(files: Files, timeouts: str, sentence: str) -> None:
    assert files.refused(f"version: 1\ntimeouts: {{{timeouts}}}") == f"line 2: {sentence}"


def test_timeouts_that_just_fit(files: Files) -> None:
    found = files.load("version: 1\ntimeouts: {dark: 751ms, join: 5m}")
    assert found.timeouts.dark_s == 0.751
    assert files.load("version: 1\ntimeouts: {beat: 1s, dark: 4s}").timeouts.beat_s == 1.0


@given(strategies.floats(5.0, 86400.0))
def test_what_is_derived_always_fits(max_stall_s: float) -> None:
    times = Timeouts.derive(max_stall_s)
    assert times.beat_s < times.dark_s / 3
    assert 1.5 <= times.dark_s <= 5.0
    assert times.dark_s < times.lease_s
    for low_s in (times.dark_s, times.pong_s, times.leave_s, times.lease_s):
        assert low_s < times.stall_s
    assert times.stall_s == times.join_s == max_stall_s


@pytest.mark.parametrize("max_stall", ["5s", "6s", "30s", "60s", "5m", "600s", "1h", "24h"])
def test_every_knob_makes_a_good_file(files: Files, max_stall: str) -> None:
    found = files.load(f"version: 1\nmax_stall: {max_stall}")
    assert found.timeouts == Timeouts.derive(found.max_stall_s)
    limits = Limits.from_max_stall(found.max_stall_s)
    assert found.limits() == limits


def test_a_file_that_every_user_may_write(files: Files) -> None:
    path = files.write("version: 1")
    path.chmod(0o646)
    with pytest.raises(UsageError, match="chmod o-w"):
        load_settings(path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [("250ms", 0.25), ("1.5s", 1.5), ("2 m", 120.0), ("1h", 3600.0), ("0s", 0.0), ("0.1ms", 0.0001)],
)
def test_durations(text: str, expected_s: float) -> None:
    assert seconds(text) == expected_s


@pytest.mark.parametrize(
    "text",
    ["", "5", "s", "5 sec", "5S", "-5s", "+5s", "1e3s", "5s ", "1h30m", "٥s", "5s\n", 5, 5.0, True, [1]],
)
def test_what_is_no_duration(text: object) -> None:
    assert seconds(text) is None


@given(strategies.integers(0, 86_400_000))
def test_a_duration_is_read_as_it_is_shown(value_ms: int) -> None:
    assert seconds(duration(value_ms / 1000)) == pytest.approx(value_ms / 1000, abs=1e-9)


@settings(max_examples=300)
@given(strategies.binary(max_size=80) | strategies.text(max_size=80).map(str.encode))
def test_no_file_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.mktemp("noise") / "ckptless.yaml"
    for text in (
        noise,
        b"version: 1\n" + noise,
        b"version: 1\ndaemon: " + noise,
        b"version: 1\nmax_stall: " + noise,
    ):
        path.write_bytes(text)
        sentence = str(path)
        try:
            load_settings(path)
        except UsageError as error:
            sentence = str(error)
        assert str(path) in sentence
        assert "\n" not in sentence


# ---------------------------------------------------------------------------------------- budgets


def test_budgets(files: Files) -> None:
    assert files.load("version: 1").limits() == Limits.from_max_stall(300.0)
    found = files.load("version: 1\nbudgets: {raise_tries: 0, flap_tries: 2, flap_window: 10m}\n")
    for limits in (found.limits(start_tries=9), found.limits(60.0, start_tries=9)):
        assert (limits.raise_tries, limits.process_tries, limits.start_tries) == (0, 3, 9)
        assert (limits.flap_tries, limits.flap_window_s) == (2, 600.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("flap_tries: 0", "line 3: budgets.flap_tries is 0: it must be a number from 1 to 100"),
        ("process_tries: -1", "line 3: budgets.process_tries is -1: it must be a number from 0 to 100"),
        ("flap_window: 60", "line 3: budgets.flap_window is 60: it must be a duration with its unit"),
        ("flap_window: 2d", "line 3: budgets.flap_window is '2d': it must be a duration with its unit"),
        ("start_tries: 1", "line 3: there is no key budgets.start_tries"),
    ],
)
def test_what_is_wrong_with_budgets(files: Files, text: str, sentence: str) -> None:
    assert files.refused(f"version: 1\nbudgets:\n  {text}\n").startswith(sentence)


# ---------------------------------------------------------------------------------------- domains


def test_failure_domains(files: Files) -> None:
    assert files.load("version: 1").domains is None
    assert files.load("version: 1\ndomains:\n").domains is None
    found = files.load("version: 1\ndomains:\n  rack.1: n[1-2],gpu7\n  '2': n3\n")
    assert found.domains == {"rack.1": ("n1", "n2", "gpu7"), "2": ("n3",)}
    assert "\ndomains: {rack.1: 'gpu7,n[1-2]', '2': n3}  # file\n" in as_yaml(found)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", "line 2: domains is 'x': it must be names with hostlists"),
        ("[1]", "line 2: domains is a list: it must be names with hostlists"),
        ("\n  a: 7", "line 3: domains.a must be a hostlist, such as node[01-16]"),
        ("\n  a:\n    b: c", "line 3: domains.a must be a hostlist"),
        ("\n  a: ''", "line 3: domains.a has no nodes: name them"),
        ("\n  a: n[1-", "line 3: domains.a: brackets do not match"),
        ("\n  a: n[1-9999999]", "line 3: domains.a: the hostlist 'n[1-9999999]' stands for more names"),
        ("\n  1: n1", "line 3: domains.1: the name 1 must be text: put it in quotes"),
        ("\n  a b: n1", "line 3: domains.a b: 'a b' is no name of a domain"),
        ("\n  a: n1\n  b: n[1-2]", "line 4: domains.b has n1, which is in a already"),
        ("\n  a: n1\n  a: n2", "line 4: domains.a stands here again, first in line 3"),
    ],
)
def test_what_is_wrong_with_failure_domains(files: Files, text: str, sentence: str) -> None:
    assert files.refused(f"version: 1\ndomains: {text}\n").startswith(sentence)


# ------------------------------------------------------------------------------------------- show


def test_show_is_a_good_file_itself(files: Files) -> None:
    before = files.load(
        "version: 1\nmax_stall: 50m\ntimeouts: {leave: 1234ms}\ndaemon: {state_dir: '/a b #c', bind: ib0}"
        "\ndomains: {a: 'n[1-3]', b: n4}"
    )
    after = files.load(as_yaml(before))
    assert dataclasses.replace(after, given=before.given, file=before.file) == before


def test_show_says_where_it_is_from(files: Files) -> None:
    found = files.load("version: 1\ntimeouts:\n  dark: 2s\n  beat: null\nslurm: {poll: 30s, bin_dir: null}\n")
    rows = {one.key: one for one in shown(found)}
    assert list(rows) == list(KEYS)
    assert (rows["slurm.poll"].value, rows["slurm.poll"].unit, rows["slurm.poll"].source) == (
        30.0,
        "s",
        "file",
    )
    assert rows["slurm.bin_dir"].source == "file"
    assert rows["timeouts.dark"].source == "file"
    assert rows["timeouts.pong"].source == "derived"
    assert rows["timeouts.beat"].source == "derived"
    assert rows["daemon.port"].source == "default"
    assert rows["daemon.port"].unit is None
    text = as_yaml(found)
    assert text.startswith(f"# {found.file}\nversion: 1  # file\n")
    assert "\n  dark: 2s  # file\n" in text
    assert "\n  beat: 250ms  # derived from max_stall\n" in text
    assert "\n  bind: null  # default\n" in text
    lists, words = ("partitions: []", "qos: []"), ("give_way: false", "leave_drained: false")
    elastic = ("allow: true", *lists, "draw_in: true", *words)
    assert "".join(f"\n  {line}  # default" for line in elastic) in text
    assert (rows["keep.memory"].value, rows["keep.memory"].unit) == (4 << 30, "B")
    assert "\n  memory: 4GiB  # default\n" in text


def test_a_list_of_partitions(files: Files) -> None:
    found = files.load("version: 1\nelastic: {partitions: [gpu, '#x', '0x1', a:b]}\n")
    assert found.elastic.partitions == ("gpu", "#x", "0x1", "a:b")
    assert files.load(as_yaml(found)).elastic == found.elastic
    (row,) = (one for one in shown(found) if one.key == "elastic.partitions")
    assert (row.value, row.text) == (("gpu", "#x", "0x1", "a:b"), "[gpu, '#x', '0x1', 'a:b']")


@pytest.mark.parametrize(
    ("key", "written", "says"),
    [
        ("act", "reboot", "it must be note, drain, move or evict"),
        ("most_per_hour", "-1", "it must be a number from 0 to 1000"),
        ("undrain_after", "5s", "such as 1h, or left out"),
        ("mounts", "[home]", "it must be a list of absolute paths, each once, such as [/home, /scratch]"),
        ("disks", "/local", "it must be a list of absolute paths, each once, such as [/local, /scratch]"),
        *(
            ("commands", text, "names with commands by their absolute paths, as in `nhc: /usr/sbin/nhc -a`")
            for text in ("nhc", "{nhc: nhc}", "{nhc: ''}", "{NHC: /bin/nhc}", "{a: [/b]}", '{a: "/b \'"}')
        ),
        *(
            ("actions", text, "codes with note, drain, move or evict, as in `xid-13: drain`")
            for text in ("{xid-13: reboot}", "[xid-13]", "{13: drain}", "{xid 13: drain}")
        ),
    ],
)
def test_no_rule_for_health(files: Files, key: str, written: str, says: str) -> None:
    with pytest.raises(UsageError, match=rf"line 3: health\.{key} is .*{re.escape(says)}"):
        files.load(f"version: 1\nhealth:\n  {key}: {written}\n")


@pytest.mark.parametrize(
    ("key", "written", "says"),
    [
        ("allow", "1", "1: it must be true or false"),
        ("allow", "null", "null: it must be true or false"),
        ("allow", "[true]", "a list: it must be true or false"),
        ("draw_in", "1", "1: it must be true or false"),
        ("qos", "low", "it must be a list of QOS, each once, such as [normal, low]"),
        *(
            ("partitions", text, "it must be a list of partitions, each once, such as [gpu, debug]")
            for text in ("gpu", "null", "[1]", "[a, a]", "[a b]", "['a,b']", "[[a]]", "['']", "{a: b}")
        ),
    ],
)
def test_no_rule_for_elastic_jobs(files: Files, key: str, written: str, says: str) -> None:
    with pytest.raises(UsageError, match=rf"line 3: elastic\.{key} is .*{re.escape(says)}$"):
        files.load(f"version: 1\nelastic:\n  {key}: {written}\n")


@pytest.mark.parametrize(
    ("written", "nbytes"), [("0", 0), ("1B", 1), ("1536KiB", 1536 << 10), ("2 TiB", 2 << 40)]
)
def test_a_size(files: Files, written: str, nbytes: int) -> None:
    found = files.load(f"version: 1\nkeep:\n  memory: {written}\n")
    assert found.keep.memory_nbytes == nbytes
    assert files.load(as_yaml(found)).keep == found.keep


@pytest.mark.parametrize("written", ["4", "4GB", "-1GiB", "1.5GiB", "false", "null", "4096TiB"])
def test_no_size(files: Files, written: str) -> None:
    with pytest.raises(UsageError, match=r"line 3: keep\.memory is .*: it must be a size with its unit"):
        files.load(f"version: 1\nkeep:\n  memory: {written}\n")


# ---------------------------------------------------------------------------------------- reload


def test_what_a_reload_cannot_take_over(files: Files) -> None:
    old = files.load("version: 1")
    assert needs_restart(old, old) == ()
    new = files.load(
        "version: 1\nmax_stall: 60s\ndaemon: {port: 7000, log_level: debug}\nslurm: {poll: 9s, bin_dir: /o}"
    )
    assert needs_restart(old, new) == ("daemon.port", "slurm.bin_dir")


# --------------------------------------------------------------------------- etc and the manual


def shipped_keys(text: str) -> dict[str, str]:
    """Key to value of every line of the shipped file, those commented out too."""
    found: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        head = re.fullmatch(r"([a-z_]+):", line)
        value = re.fullmatch(r"( *)(?:# )?([a-z_]+): (\S+)", line)
        if head:
            section = head.group(1)
        elif value:
            indent, key, word = value.groups()
            found[f"{section}.{key}" if indent else key] = word
    return found


def test_the_shipped_file_is_good_and_shows_the_defaults(files: Files) -> None:
    text = (ROOT / "etc" / "ckptless.yaml").read_text()
    assert files.load(text).given == {"version"}
    expected = {one.key: one.text for one in shown(files.load("version: 1"))}
    assert shipped_keys(text) == expected
    # And with every comment sign taken away it is the same again.
    assert files.load(re.sub(r"(?m)^( *)# ([a-z_]+: \S+)$", r"\1\2", text)).given == set(KEYS)


def test_the_manual_page_has_every_key_and_default(files: Files) -> None:
    text = (ROOT / "docs" / "man" / "ckptless.yaml.5").read_text()
    items = re.findall(r"(?m)^\.It Ic ([a-z_.]+)$", text)
    assert items == list(KEYS)
    defaults = {one.key: one.text for one in shown(files.load("version: 1"))}
    for key, page in zip(items, re.split(r"(?m)^\.It Ic .*$", text)[1:], strict=True):
        if key != "version":
            assert f"Default: {defaults[key]}" in " ".join(page.split()), key
    assert str(DEFAULT_FILE) in text
