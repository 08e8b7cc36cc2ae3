"""Writes metrics as text, by prometheus_client: in Prometheus' own format, or as OpenMetrics."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ckptless.daemon.ckptlessd.metrics.catalog import METRICS, OF_PROCESS, Metric
from ckptless.daemon.ckptlessd.metrics.readings import Values
from ckptless.daemon.ckptlessd.metrics.tally import Histogram

OPEN_METRICS = "application/openmetrics-text"
CONTENT_TYPES = {
    True: f"{OPEN_METRICS}; version=1.0.0; charset=utf-8",
    False: CONTENT_TYPE_PLAIN_0_0_4,
}
UNITS = ("seconds", "bytes", "ratio")
# No name here needs to be escaped, and to look for that took half of the time.
_AS_THEY_ARE = openmetrics.ALLOWUTF8
_process = ProcessCollector(OF_PROCESS.removesuffix("_process"), registry=None)


def families(values: Mapping[str, Values]) -> list[Family]:
    """Return these values, and those of this process, as they are now: nothing of it changes any more."""
    told = [_family(metric, values[metric.name]) for metric in METRICS if metric.name in values]
    return [*told, *_process.collect()]


def encode(told: Sequence[Family], *, open_metrics: bool) -> bytes:
    """Return them as text; the type of its content is in CONTENT_TYPES. It takes milliseconds."""
    if open_metrics:
        text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            _Told(told), escaping=_AS_THEY_ARE, version="1.0.0"
        )
        return text
    return generate_latest(_Told(told), escaping=_AS_THEY_ARE)


class _Told(Collector):
    """A collector of families that are collected already."""

    def __init__(self, told: Iterable[Family]) -> None:
        self._told = told

    def collect(self) -> Iterable[Family]:
        return self._told


def _family(metric: Metric, values: Values) -> Family:
    unit = next((unit for unit in UNITS if metric.name.endswith(f"_{unit}")), "")
    family = Family(metric.name, metric.help, metric.kind, unit)
    for key, value in values.items():
        labels = dict(zip(metric.labels, key, strict=True))
        if isinstance(value, Histogram):
            buckets = value.buckets
            for bound, count in buckets:
                family.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
            family.add_sample(f"{metric.name}_count", labels, buckets[-1][1])
            family.add_sample(f"{metric.name}_sum", labels, value.total)
        else:
            family.add_sample(metric.series, labels, float(value))
    return family
