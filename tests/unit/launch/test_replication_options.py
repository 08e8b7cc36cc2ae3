"""How fast, and over which network, copies go: the options come before sbatch, and sbatch before the site."""

from collections.abc import Mapping

import pytest

from ckptless.daemon.launch.options import replication_of
from ckptless.daemon.protocol.errors import UsageError
from ckptless.daemon.settings.options import ReplicationSettings, run_options

SITE = ReplicationSettings(bandwidth_rate=5e8, interface="ib0")
SBATCH = {"CKPTLESS_BANDWIDTH": "1GB/s", "CKPTLESS_INTERFACE": "10.1.0.0/16"}
OPTIONS = {"replication_bandwidth_rate": "2GiB/s", "replication_interface": "eth1"}


@pytest.mark.parametrize(
    ("options", "env", "site", "found"),
    [
        ({}, {}, ReplicationSettings(), ReplicationSettings()),
        ({}, {}, SITE, ReplicationSettings(bandwidth_rate=5e8, interface="ib0")),
        ({}, SBATCH, SITE, ReplicationSettings(bandwidth_rate=1e9, interface="10.1.0.0/16")),
        (OPTIONS, SBATCH, SITE, ReplicationSettings(bandwidth_rate=2.0**31, interface="eth1")),
        ({"replication_bandwidth_rate": "none"}, SBATCH, SITE, ReplicationSettings(interface="10.1.0.0/16")),
        ({}, {"CKPTLESS_BANDWIDTH": "none"}, SITE, ReplicationSettings(interface="ib0")),
    ],
)
def test_whose_word_counts(
    options: Mapping[str, object],
    env: Mapping[str, str],
    site: ReplicationSettings,
    found: ReplicationSettings,
) -> None:
    assert replication_of(run_options(options, env), site) == found


@pytest.mark.parametrize(
    ("options", "env", "says"),
    [
        (
            {"replication_bandwidth_rate": "fast"},
            {},
            "--replication-bandwidth is 'fast': it must be a rate with its unit from 1MB/s to 1000GB/s, such "
            "as 500MB/s, or none",
        ),
        (
            {"replication_bandwidth_rate": "1kB/s"},
            {},
            "--replication-bandwidth is '1kB/s': it must be a rate",
        ),
        ({"replication_bandwidth_rate": ""}, {}, "--replication-bandwidth is '': it must be a rate"),
        ({}, {"CKPTLESS_BANDWIDTH": "7"}, "CKPTLESS_BANDWIDTH is '7': it must be a rate"),
        (
            {"replication_interface": "10.1.0.7"},
            {},
            "--replication-interface is '10.1.0.7': it must be a network such as 10.1.0.0/16, an interface "
            "such as ib0 or up to 8 of them such as ib0+ib1",
        ),
        (
            {},
            {"CKPTLESS_INTERFACE": "10.1.0.7/16"},
            "CKPTLESS_INTERFACE is '10.1.0.7/16': it must be",
        ),
    ],
)
def test_a_mistake_is_one_sentence(options: Mapping[str, object], env: Mapping[str, str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_options(options, env)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
