"""The node's GPUs, by NVIDIA's management library (NVML) through nvidia-ml-py, which is an optional extra.

What a GPU or its driver does not support is left out for that GPU, without a word. NVML stays initialised
between the looks, as the events of a GPU come only to who was registered for them when they happened.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ckptless.daemon.ckptlessd.health.probe import Finding

# A GPU that fails may report Xids without end; what is left comes with the next look.
MOST_XIDS = 64

# By nvml.h: nvmlClocksEventReasonHwSlowdown, ...HwThermalSlowdown, ...HwPowerBrakeSlowdown.
_THROTTLED = {0x08: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "hardware power brake"}
# By nvml.h: NVML_NVLINK_ERROR_DL_REPLAY, ..._RECOVERY, ..._CRC_FLIT.
_LINK_ERRORS = {0: "replay errors", 1: "recovery errors", 2: "CRC errors of flits"}
_PCIE = (
    ("width", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth"),
    ("generation", "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration"),
)


@dataclass(eq=False)
class _Gpu:
    """What is known of one GPU. `links` are those that were up when it was first seen."""

    index: int
    bus_id: str = ""
    handle: Any = None
    events: Any = None
    links: tuple[int, ...] = ()
    met: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        # NVML's domain has eight digits, and that of the kernel log and of lspci four.
        bus_id = self.bus_id.removeprefix("0000")
        return f"GPU {self.index} ({bus_id})" if bus_id else f"GPU {self.index}"

    def finding(self, code: str, evidence: str, link: int | None = None) -> Finding:
        where = self.name if link is None else f"{self.name}, link {link}"
        return Finding(code=code, where=where, evidence=evidence)

    def grown(self, key: str, words: str, count: int | None) -> str:
        """Count in words, where it is more than in the last look that had one; else ""."""
        if count is None:
            return ""
        before = self.counts.get(key, count)
        self.counts[key] = count
        return f"{count} {words}, {before} in the last look" if count > before else ""


class NvmlProbe:
    """Looks at the GPUs of the node. `jobs_here` tells whether any job is on the node."""

    interval_s = 30.0
    deadline_s = 30.0

    def __init__(self, jobs_here: Callable[[], bool]) -> None:
        self._jobs_here = jobs_here
        self._jobs = True
        self._nvml: Any = None
        self._gpus: list[_Gpu] = []

    def missing(self) -> str:
        """Return what is not there: nvidia-ml-py, the driver's library, or every GPU. Initialises NVML."""
        try:
            nvml: Any = import_module("pynvml")
        except ImportError:
            return "nvidia-ml-py is not installed: pip install 'ckptless[gpu]'"
        try:
            nvml.nvmlInit()
            self._nvml = nvml
            lacking = "" if nvml.nvmlDeviceGetCount() else "NVML: there is no GPU"
        except nvml.NVMLError as error:
            lacking = f"NVML: {error}"
        if lacking:
            self.close()
        return lacking

    def look(self) -> Sequence[Finding]:
        """Return what is not well with the GPUs. Raises pynvml.NVMLError where NVML itself fails."""
        self._jobs = self._jobs_here()
        count = self._nvml.nvmlDeviceGetCount()
        if not self._gpus:
            self._gpus = [_Gpu(index) for index in range(count)]
        found: list[Finding] = []
        if count < len(self._gpus):
            evidence = f"NVML counts {count}, and {len(self._gpus)} in the first look"
            found.append(Finding(code="gpu-fewer", evidence=evidence))
        return found + [one for gpu in self._gpus for one in self._look_at(gpu)]

    def close(self) -> None:
        """Free the event sets, and shut NVML down."""
        if self._nvml is None:
            return
        nvml, self._nvml = self._nvml, None
        for gpu in self._gpus:
            if gpu.events is not None:
                with suppress(nvml.NVMLError):  # that of a lost GPU; the others, and NVML, still go
                    nvml.nvmlEventSetFree(gpu.events)
        nvml.nvmlShutdown()

    def _look_at(self, gpu: _Gpu) -> Iterator[Finding]:
        """Yield what one GPU has; where a call fails, that is a finding, and the others are looked at."""
        nvml = self._nvml
        queries: tuple[Callable[[_Gpu], Iterable[Finding]], ...] = (
            self._xids,  # before all others: a GPU that is lost has often said why
            self._handle,
            self._meet,
            self._ecc,
            self._sram,
            self._remapped,
            self._links_down,
            self._link_errors,
            self._throttled,
            self._hot,
            self._pcie,
            self._left_over,
        )
        for query in queries:
            lost = [nvml.NVML_ERROR_GPU_IS_LOST]
            if query == self._handle:  # by its PCI bus id, or by its index where that was never read
                lost += [nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT]
            try:
                yield from query(gpu)
            except nvml.NVMLError as error:
                reset = error.value == nvml.NVML_ERROR_RESET_REQUIRED
                code = "gpu-lost" if error.value in lost else "gpu-reset" if reset else "gpu-error"
                yield gpu.finding(code, f"NVML: {error}")
                return

    def _handle(self, gpu: _Gpu) -> Iterable[Finding]:
        if gpu.bus_id:
            gpu.handle = self._nvml.nvmlDeviceGetHandleByPciBusId(gpu.bus_id)
        else:
            gpu.handle = self._nvml.nvmlDeviceGetHandleByIndex(gpu.index)
        return ()

    def _meet(self, gpu: _Gpu) -> Iterable[Finding]:
        """Find out, once, what the later looks are compared with."""
        if not gpu.met:
            gpu.bus_id = self._nvml.nvmlDeviceGetPciInfo(gpu.handle).busId
            every = range(self._nvml.NVML_NVLINK_MAX_LINKS)
            gpu.links = tuple(link for link in every if self._is_up(gpu, link))
            gpu.events = self._listen(gpu)
            gpu.met = True
        return ()

    def _is_up(self, gpu: _Gpu, link: int) -> bool:
        try:
            return bool(self._ask(gpu, "nvmlDeviceGetNvLinkState", link))
        except self._nvml.NVMLError as error:
            # NVML_NVLINK_MAX_LINKS is that of any GPU: most have fewer, and say so with this.
            if error.value != self._nvml.NVML_ERROR_INVALID_ARGUMENT:
                raise
            return False

    def _listen(self, gpu: _Gpu) -> Any:
        """Return an event set of this GPU alone, so that none is silent when another is lost; or None."""
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:
            nvml.nvmlEventSetFree(events)
            if not self._unsupported(error):
                raise
            return None
        return events

    def _xids(self, gpu: _Gpu) -> Iterator[Finding]:
        for _ in range(MOST_XIDS if gpu.events is not None else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(gpu.events, 0)
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_TIMEOUT or self._unsupported(error):
                    return
                raise
            number = event.eventData
            yield gpu.finding(f"xid-{number}", f"NVML reports Xid {number}")

    def _ecc(self, gpu: _Gpu) -> Iterator[Finding]:
        """Look at errors since the driver was loaded, which MIG does not tell, and at those of its life."""
        nvml = self._nvml
        name, kind = "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        recent = self._ask(gpu, name, kind, nvml.NVML_VOLATILE_ECC)
        ever = self._ask(gpu, name, kind, nvml.NVML_AGGREGATE_ECC)
        more = gpu.grown("ecc", "uncorrected ECC errors", recent)
        more_ever = gpu.grown("ecc ever", "uncorrected ECC errors in its life", ever)
        if evidence := more or more_ever:  # the same errors, where both have grown
            yield gpu.finding("gpu-ecc-uncorrected", evidence)
        if ever:
            yield gpu.finding("gpu-ecc-aggregate", f"{ever} uncorrected ECC errors in its life")

    def _sram(self, gpu: _Gpu) -> Iterator[Finding]:
        """Look at the flag that NVIDIA makes of the counts of its caches; of its DRAM, see `_remapped`."""
        made = getattr(self._nvml, "c_nvmlEccSramErrorStatus_v1_t", None)
        if made is None:
            return
        status = made()
        try:
            known = self._ask(gpu, "nvmlDeviceGetSramEccErrorStatus", byref(status)) is not None
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_NO_PERMISSION:  # it is root's alone
                raise
            known = False
        if not known:
            return
        if status.bThresholdExceeded:
            ever = status.aggregateUncParity + status.aggregateUncSecDed
            yield gpu.finding(
                "gpu-sram-failed", f"NVIDIA's threshold is exceeded: {ever} uncorrected errors in its life"
            )

    def _remapped(self, gpu: _Gpu) -> Iterator[Finding]:
        rows = self._ask(gpu, "nvmlDeviceGetRemappedRows")
        if rows is None:
            return
        corrected, uncorrected, pending, failed = rows
        evidence = f"rows remapped for corrected errors: {corrected}, for uncorrected ones: {uncorrected}"
        if pending:
            yield gpu.finding("gpu-remap-pending", f"pending; {evidence}")
        if failed:
            yield gpu.finding("gpu-remap-failed", f"failed; {evidence}")

    def _links_down(self, gpu: _Gpu) -> Iterator[Finding]:
        for link in gpu.links:
            if self._ask(gpu, "nvmlDeviceGetNvLinkState", link) == 0:
                yield gpu.finding("gpu-nvlink-down", "state 0, and 1 in the first look", link)

    def _link_errors(self, gpu: _Gpu) -> Iterator[Finding]:
        for link in gpu.links:
            grown = []
            for counter, words in _LINK_ERRORS.items():
                count = self._ask(gpu, "nvmlDeviceGetNvLinkErrorCounter", link, counter)
                grown.append(gpu.grown(f"link {link} {counter}", words, count))
            if evidence := "; ".join(filter(None, grown)):
                yield gpu.finding("gpu-nvlink-errors", evidence, link)

    def _throttled(self, gpu: _Gpu) -> Iterator[Finding]:
        names = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        reasons = self._ask_first(gpu, names) or 0
        if words := [text for bit, text in _THROTTLED.items() if reasons & bit]:
            yield gpu.finding("gpu-throttled", f"{', '.join(words)} (reasons {reasons:#x})")

    def _hot(self, gpu: _Gpu) -> Iterator[Finding]:
        nvml = self._nvml
        limit = self._ask(gpu, "nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        names = "nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"
        now = self._ask_first(gpu, names, nvml.NVML_TEMPERATURE_GPU)
        if limit and now is not None and now >= limit:
            yield gpu.finding("gpu-hot", f"{now} degrees Celsius, and it slows down from {limit}")

    def _pcie(self, gpu: _Gpu) -> Iterator[Finding]:
        used = self._ask(gpu, "nvmlDeviceGetUtilizationRates")
        if used is None or used.gpu == 0:  # an idle link saves power
            return
        slow = []
        for words, current, best in _PCIE:
            now, most = self._ask(gpu, current), self._ask(gpu, best)
            if now is not None and most is not None and now < most:
                slow.append(f"{words} {now} of {most}")
        if slow:
            yield gpu.finding("gpu-pcie-slow", f"PCIe {', '.join(slow)}, at {used.gpu} % utilisation")

    def _left_over(self, gpu: _Gpu) -> Iterator[Finding]:
        if self._jobs:
            return
        # Without a version in its name, the function does not tell an old driver from a fault.
        names = "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"
        if pids := [str(process.pid) for process in self._ask_first(gpu, names) or ()]:
            yield gpu.finding("gpu-left-over", f"pid {', '.join(pids)}")

    def _ask(self, gpu: _Gpu, name: str, *arguments: Any) -> Any:
        """Return what NVML says; None where GPU, driver or nvidia-ml-py do not know the question."""
        function = getattr(self._nvml, name, None)
        if function is None:
            return None
        try:
            return function(gpu.handle, *arguments)
        except self._nvml.NVMLError as error:
            if not self._unsupported(error):
                raise
            return None

    def _ask_first(self, gpu: _Gpu, names: Sequence[str], *arguments: int) -> Any:
        """Return the first answer that there is: functions of NVML get successors."""
        answers = (self._ask(gpu, name, *arguments) for name in names)
        return next((answer for answer in answers if answer is not None), None)

    def _unsupported(self, error: Any) -> bool:
        nvml = self._nvml
        known = nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_DEPRECATED
        return error.value in known
