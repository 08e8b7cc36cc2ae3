/*
 * A libnvidia-ml.so.1 without GPUs. Its world is the text file that FAKE_NVML names, read anew at each call:
 * lines of a key and a number. The last line of a key counts; of "xid" and "process" all lines do.
 *
 *   init 9              what nvmlInitWithFlags returns
 *   count 2             GPUs
 *   0.lost 1            every call of GPU 0 says that it is lost
 *   0.gone 1            its PCI bus id is unknown
 *   0.error.ecc 3       what its query "ecc" returns (other names: see the calls of `state`)
 *   0.xid 79            the n-th such line is the n-th event, delivered once
 *   0.process 4711      a process on it
 *   0.ecc 5, 0.ecc.ever 7, 0.sram.exceeded 1, 0.remap.pending 1, 0.remap.failed 1, 0.link.3 0, 0.link.3.error.1 7, 0.throttle 0x8,
 *   0.temperature 91, 0.threshold 90, 0.utilisation 0, 0.pcie.width 8, 0.pcie.generation 3
 *
 * A GPU has four links, all up. With OLD_DRIVER, it lacks what came with later drivers. What is freed is
 * written to FAKE_NVML's name with ".log" behind it.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK, INVALID_ARGUMENT = 2, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25 };
enum { GPUS = 8, LINKS = 4, XID_EVENT = 8 };

struct gpu {
	unsigned index, told;
};
struct events {
	struct gpu *gpu;
};
struct event {
	struct gpu *gpu;
	unsigned long long type, data;
	unsigned gpu_instance, compute_instance;
};
struct pci {
	char legacy[16];
	unsigned domain, bus, device, id, subsystem;
	char bus_id[32];
};
struct process {
	unsigned pid;
	unsigned long long memory;
	unsigned gpu_instance, compute_instance;
};

static struct gpu gpus[GPUS] = { { 0, 0 }, { 1, 0 }, { 2, 0 }, { 3, 0 }, { 4, 0 }, { 5, 0 }, { 6, 0 }, { 7, 0 } };

/* How many lines have the key. *value is that of line `which`, or of the last one; without any, as it was. */
static unsigned find(const char *key, unsigned which, long *value)
{
	FILE *world = fopen(getenv("FAKE_NVML"), "r");
	char line[256], name[128], text[64];
	unsigned count = 0;

	if (!world)
		abort();
	while (fgets(line, sizeof(line), world))
		if (sscanf(line, "%127s %63s", name, text) == 2 && !strcmp(name, key) && count++ <= which)
			*value = strtol(text, NULL, 0);
	fclose(world);
	return count;
}

static unsigned lines(const struct gpu *gpu, const char *key, unsigned which, long *value)
{
	char full[128];

	snprintf(full, sizeof(full), "%u.%s", gpu->index, key);
	return find(full, which, value);
}

static long get(const struct gpu *gpu, const char *key, long otherwise)
{
	lines(gpu, key, UINT_MAX, &otherwise);
	return otherwise;
}

static int state(const struct gpu *gpu, const char *query)
{
	char key[64];

	if (get(gpu, "lost", 0))
		return GPU_IS_LOST;
	snprintf(key, sizeof(key), "error.%s", query);
	return (int)get(gpu, key, OK);
}

static int answer(const struct gpu *gpu, const char *query, const char *key, long otherwise, unsigned *value)
{
	*value = (unsigned)get(gpu, key, otherwise);
	return state(gpu, query);
}

static void note(const char *what)
{
	char path[PATH_MAX];
	FILE *log;

	snprintf(path, sizeof(path), "%s.log", getenv("FAKE_NVML"));
	log = fopen(path, "a");
	if (!log)
		abort();
	fprintf(log, "%s\n", what);
	fclose(log);
}

int nvmlInitWithFlags(unsigned flags)
{
	long code = OK;

	find("init", UINT_MAX, &code);
	return flags ? INVALID_ARGUMENT : (int)code;
}

int nvmlShutdown(void)
{
	note("shut down");
	return OK;
}

const char *nvmlErrorString(int code)
{
	(void)code;
	return "an error of the fake";
}

int nvmlDeviceGetCount_v2(unsigned *count)
{
	long value = 0;

	find("count", UINT_MAX, &value);
	*count = (unsigned)value;
	return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu)
{
	unsigned count;

	nvmlDeviceGetCount_v2(&count);
	if (index >= count || index >= GPUS)
		return INVALID_ARGUMENT;
	*gpu = &gpus[index];
	return state(*gpu, "handle");
}

static void bus_id(const struct gpu *gpu, char text[32])
{
	snprintf(text, 32, "00000000:%02X:00.0", 0x4e + gpu->index);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *id, struct gpu **gpu)
{
	char text[32];
	int code;

	for (unsigned index = 0; index < GPUS; index++) {
		bus_id(&gpus[index], text);
		if (strcmp(text, id))
			continue;
		code = nvmlDeviceGetHandleByIndex_v2(index, gpu);
		return code == INVALID_ARGUMENT || get(&gpus[index], "gone", 0) ? NOT_FOUND : code;
	}
	return INVALID_ARGUMENT;
}

int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *pci)
{
	memset(pci, 0, sizeof(*pci));
	bus_id(gpu, pci->bus_id);
	return state(gpu, "pci");
}

int nvmlEventSetCreate(struct events **events)
{
	*events = calloc(1, sizeof(**events));
	return *events ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceRegisterEvents(struct gpu *gpu, unsigned long long types, struct events *events)
{
	int code = types == XID_EVENT ? state(gpu, "register") : INVALID_ARGUMENT;

	if (code == OK)
		events->gpu = gpu;
	return code;
}

int nvmlEventSetWait_v2(struct events *events, struct event *event, unsigned timeout_ms)
{
	struct gpu *gpu = events->gpu;
	int code = gpu && timeout_ms == 0 ? (int)get(gpu, "error.wait", OK) : INVALID_ARGUMENT;
	long number = 0;

	if (code != OK)
		return code;
	if (lines(gpu, "xid", gpu->told, &number) <= gpu->told)
		return get(gpu, "lost", 0) ? GPU_IS_LOST : TIMEOUT;
	gpu->told++;
	memset(event, 0, sizeof(*event));
	event->gpu = gpu;
	event->type = XID_EVENT;
	event->data = (unsigned long long)number;
	return OK;
}

int nvmlEventSetFree(struct events *events)
{
	int code = events->gpu ? (int)get(events->gpu, "error.free", OK) : OK;

	note(events->gpu ? "events" : "no events");
	free(events);
	return code;
}

int nvmlDeviceGetTotalEccErrors(struct gpu *gpu, unsigned type, unsigned counter, unsigned long long *count)
{
	*count = (unsigned long long)get(gpu, counter ? "ecc.ever" : "ecc", 0);
	return type == 1 && counter < 2 ? state(gpu, counter ? "ecc.ever" : "ecc") : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *up)
{
	char key[32];

	snprintf(key, sizeof(key), "link.%u", link);
	*up = (unsigned)get(gpu, key, 1);
	return link < LINKS ? state(gpu, "links") : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkErrorCounter(struct gpu *gpu, unsigned link, unsigned counter, unsigned long long *count)
{
	char key[32], query[32];

	snprintf(key, sizeof(key), "link.%u.error.%u", link, counter);
	snprintf(query, sizeof(query), "counter.%u", counter);
	*count = (unsigned long long)get(gpu, key, 0);
	return link < LINKS && counter < 3 ? state(gpu, query) : INVALID_ARGUMENT;
}

int nvmlDeviceGetTemperatureThreshold(struct gpu *gpu, unsigned type, unsigned *value)
{
	return type == 1 ? answer(gpu, "threshold", "threshold", 90, value) : INVALID_ARGUMENT;
}

int nvmlDeviceGetUtilizationRates(struct gpu *gpu, unsigned value[2])
{
	return answer(gpu, "utilisation", "utilisation", 50, value);
}

int nvmlDeviceGetCurrPcieLinkWidth(struct gpu *gpu, unsigned *value)
{
	return answer(gpu, "pcie.width", "pcie.width", 16, value);
}

int nvmlDeviceGetMaxPcieLinkWidth(struct gpu *gpu, unsigned *value)
{
	*value = 16;
	return state(gpu, "pcie.width");
}

int nvmlDeviceGetCurrPcieLinkGeneration(struct gpu *gpu, unsigned *value)
{
	return answer(gpu, "pcie.generation", "pcie.generation", 5, value);
}

int nvmlDeviceGetMaxPcieLinkGeneration(struct gpu *gpu, unsigned *value)
{
	*value = 5;
	return state(gpu, "pcie.generation");
}

static int reasons(struct gpu *gpu, unsigned long long *value)
{
	*value = (unsigned long long)get(gpu, "throttle", 0);
	return state(gpu, "throttle");
}

static int processes(struct gpu *gpu, unsigned *count, struct process *found)
{
	long pid = 0;
	unsigned room = *count;

	*count = lines(gpu, "process", 0, &pid);
	if (room < *count)
		return INSUFFICIENT_SIZE;
	for (unsigned index = 0; index < *count; index++) {
		memset(&found[index], 0, sizeof(*found));
		lines(gpu, "process", index, &pid);
		found[index].pid = (unsigned)pid;
	}
	return state(gpu, "process");
}

#ifdef OLD_DRIVER

int nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *gpu, unsigned long long *value)
{
	return reasons(gpu, value);
}

int nvmlDeviceGetTemperature(struct gpu *gpu, unsigned sensor, unsigned *value)
{
	return sensor == 0 ? answer(gpu, "temperature", "temperature", 40, value) : INVALID_ARGUMENT;
}

int nvmlDeviceGetComputeRunningProcesses_v2(struct gpu *gpu, unsigned *count, struct process *found)
{
	return processes(gpu, count, found);
}

#else

struct temperature {
	unsigned version, sensor;
	int value;
};

int nvmlDeviceGetCurrentClocksEventReasons(struct gpu *gpu, unsigned long long *value)
{
	return reasons(gpu, value);
}

int nvmlDeviceGetTemperatureV(struct gpu *gpu, struct temperature *now)
{
	now->value = (int)get(gpu, "temperature", 40);
	return now->sensor == 0 ? state(gpu, "temperature") : INVALID_ARGUMENT;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct gpu *gpu, unsigned *count, struct process *found)
{
	return processes(gpu, count, found);
}

struct sram {
	unsigned version;
	unsigned long long ever_parity, ever_sec_ded, rest[9];
	unsigned exceeded;
};

int nvmlDeviceGetSramEccErrorStatus(struct gpu *gpu, struct sram *status)
{
	if (status->version != (sizeof(*status) | 1 << 24))
		return VERSION_MISMATCH;
	status->ever_parity = 2;
	status->ever_sec_ded = 3;
	status->exceeded = (unsigned)get(gpu, "sram.exceeded", 0);
	return state(gpu, "sram");
}

int nvmlDeviceGetRemappedRows(struct gpu *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
			      unsigned *failed)
{
	*corrected = 2;
	*uncorrected = 3;
	*pending = (unsigned)get(gpu, "remap.pending", 0);
	return answer(gpu, "remap", "remap.failed", 0, failed);
}

#endif
