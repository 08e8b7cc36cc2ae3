"""`metrics` of ckptless.yaml: who may read the metrics is said, or nobody but this node may."""

import ipaddress
from pathlib import Path

import pytest

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.option_kinds import endpoint, networks
from ckptless.daemon.settings.options import KEYS, MetricsSettings
from ckptless.daemon.settings.site import Settings, as_yaml, load_settings, needs_restart


def load(folder: Path, *lines: str) -> Settings:
    path = folder / "ckptless.yaml"
    path.write_text("\n".join(["version: 1", "metrics:", *(f"  {line}" for line in lines)]) + "\n")
    return load_settings(path)


def test_what_the_file_says(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        "listen: 0.0.0.0:9821",
        "allow: [10.1.0.0/16, 'fe80::/64', 10.2.0.7]",
        "textfile: /var/lib/a b/c.prom",
        "jobs: true",
    )
    assert found.metrics == MetricsSettings(
        listen="0.0.0.0:9821",
        allow=("10.1.0.0/16", "fe80::/64", "10.2.0.7"),
        textfile="/var/lib/a b/c.prom",
        jobs=True,
    )
    again = tmp_path / "again.yaml"
    again.write_text(as_yaml(found))
    assert load_settings(again).metrics == found.metrics


@pytest.mark.parametrize("listen", ["127.0.0.1:9821", "127.8.8.8:1024", "'[::1]:65535'"])
def test_this_node_alone_needs_no_list(tmp_path: Path, listen: str) -> None:
    assert load(tmp_path, f"listen: {listen}").metrics.listen == listen.strip("'")


@pytest.mark.parametrize("listen", ["10.1.0.7:9821", "0.0.0.0:9821", "'[::]:9821'", "'[fd00::1]:9821'"])
def test_others_need_to_be_named(tmp_path: Path, listen: str) -> None:
    said = (
        f"metrics.listen is {listen.strip(chr(39))}, which others reach: say who may read, in metrics.allow"
    )
    with pytest.raises(UsageError, match=r"line 3: ") as caught:
        load(tmp_path, f"listen: {listen}", "textfile: /c.prom")
    assert said in str(caught.value)
    load(tmp_path, f"listen: {listen}", "allow: [10.1.0.0/16]")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("listen: 9821", "such as 127.0.0.1:9821"),
        ("listen: localhost:9821", "such as 127.0.0.1:9821"),
        ("listen: 127.0.0.1", "a numeric address and a port"),
        ("listen: 127.0.0.1:80", "from 1024 to 65535"),
        ("listen: 127.0.0.1:65536", "from 1024 to 65535"),
        ("listen: 127.0.0.256:9821", "a numeric address and a port"),
        ("listen: '::1:9821'", "[::1]:9821"),
        ("listen: '[127.0.0.1:9821'", "[::1]:9821"),
        ("allow: 10.1.0.0/16", "a list of networks"),
        ("allow: [10.1.0.7/16]", "a list of networks"),
        ("allow: [login01]", "a list of networks"),
        ("allow: [10.1.0.0/16, 10.1.0.0/16]", "each once"),
        ("allow: [7]", "a list of networks"),
        ("textfile: c.prom", "the absolute path of a file"),
        ("textfile: /var/lib/c.txt", "ends in .prom"),
        ("textfile: /var/lib/", "ends in .prom"),
        ("textfile: /var/lib/.prom", "ends in .prom"),
        ("jobs: some", "true"),
    ],
)
def test_no_rule_for_metrics(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UsageError, match=r"line 3: metrics\.") as caught:
        load(tmp_path, line)
    assert says in str(caught.value)


def test_a_daemon_reads_all_of_it_once(tmp_path: Path) -> None:
    old = load(tmp_path, "jobs: false")
    new = load(tmp_path, "listen: 127.0.0.1:9821", "allow: [10.1.0.7]", "textfile: /c.prom", "jobs: true")
    assert needs_restart(old, new) == tuple(key for key in KEYS if key.startswith("metrics."))


def test_parts_of_an_address() -> None:
    assert endpoint("[fd00::1]:9821") == (ipaddress.ip_address("fd00::1"), 9821)
    assert endpoint("10.0.0.1:09821") == (ipaddress.ip_address("10.0.0.1"), 9821)
    assert endpoint("10.0.0.1:9821\n") is None
    assert networks([]) == ()
