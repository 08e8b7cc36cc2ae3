"""replication.bandwidth and replication.interface: what is good, and one sentence for every mistake."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.option_kinds import rate, rate_text
from ckptless.daemon.settings.options import ReplicationSettings
from ckptless.daemon.settings.site import as_yaml, load_settings, shown


def load(folder: Path, text: str) -> ReplicationSettings:
    path = folder / "ckptless.yaml"
    path.write_text(f"version: 1\nreplication:\n  {text}\n")
    return load_settings(path).replication


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bandwidth: 500MB/s", ReplicationSettings(bandwidth_rate=5e8)),
        ("bandwidth: 1.5 GiB/s", ReplicationSettings(bandwidth_rate=1.5 * 2**30)),
        ("bandwidth: 1000kB/s", ReplicationSettings(bandwidth_rate=1e6)),
        ("bandwidth: null", ReplicationSettings()),
        ("interface: ib0", ReplicationSettings(interface="ib0")),
        ("interface: 10.1.0.0/16", ReplicationSettings(interface="10.1.0.0/16")),
        ("interface: 'fd00::/8'", ReplicationSettings(interface="fd00::/8")),
        ("interface: [ib0]", ReplicationSettings(interface="ib0")),
        ("interface: [ib0, 10.1.0.0/16]", ReplicationSettings(interface="ib0+10.1.0.0/16")),
        ("interface: ib0+ib1", ReplicationSettings(interface="ib0+ib1")),
    ],
)
def test_what_is_good(tmp_path: Path, text: str, found: ReplicationSettings) -> None:
    assert load(tmp_path, text) == found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bandwidth: 500", "replication.bandwidth is 500: it must be a rate with its unit from 1MB/s"),
        ("bandwidth: 500MB", "replication.bandwidth is '500MB': it must be a rate with its unit"),
        ("bandwidth: 500mb/s", "replication.bandwidth is '500mb/s': it must be a rate"),
        ("bandwidth: 0MB/s", "replication.bandwidth is '0MB/s': it must be a rate"),
        ("bandwidth: 999kB/s", "replication.bandwidth is '999kB/s': it must be a rate"),
        ("bandwidth: 1001GB/s", "replication.bandwidth is '1001GB/s': it must be a rate"),
        ("interface: 10.1.0.3", "replication.interface is 10.1.0.3: it must be a network such as"),
        ("interface: 10.1.0.1/16", "replication.interface is 10.1.0.1/16: it must be a network such as"),
        ("interface: 10.1.0", "replication.interface is 10.1.0: it must be a network such as"),
        ("interface: []", "replication.interface is a list: it must be a network such as"),
        ("interface: [ib0, ib0]", "replication.interface is a list: it must be a network such as"),
        ("interface: [ib0, 7]", "replication.interface is a list: it must be a network such as"),
        ("interface: [[ib0]]", "replication.interface is a list: it must be a network such as"),
        ("interface: [a, b, c, d, e, f, g, h, i]", "replication.interface is a list: it must be"),
        ("interface: ib0+", "replication.interface is ib0+: it must be a network such as"),
        ("interface: ib0+10.1.0.3", "replication.interface is ib0+10.1.0.3: it must be a network such as"),
        ("interface: 7", "replication.interface is 7: it must be a network such as"),
        ("speed: 1MB/s", "there is no key replication.speed"),
    ],
)
def test_what_is_wrong(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'ckptless.yaml'}, line 3: {sentence}")
    assert "\n" not in said


def test_it_is_shown_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ckptless.yaml"
    path.write_text("version: 1\nreplication: {bandwidth: 2048MiB/s, interface: [ib0, ib1]}\n")
    settings = load_settings(path)
    rows = {one.key: one for one in shown(settings)}
    row = rows["replication.bandwidth"]
    assert (row.value, row.unit, row.text, row.source) == (2.0**31, "B/s", "2GiB/s", "file")
    assert rows["replication.interface"].text == "ib0+ib1"
    path.write_text(as_yaml(settings))
    assert load_settings(path).replication == settings.replication


@given(st.floats(1e6, 1e12).map(lambda value: round(value, 3)))
def test_a_rate_that_is_shown_is_read_as_the_same(value: float) -> None:
    assert rate(rate_text(value)) == value


@pytest.mark.parametrize(
    "text", ["", "MB/s", "1.MB/s", ".5MB/s", "1TB/s", "-1MB/s", "1e6B/s", "1MB/s\n", 1, None]
)
def test_what_is_no_rate(text: object) -> None:
    assert rate(text) is None
