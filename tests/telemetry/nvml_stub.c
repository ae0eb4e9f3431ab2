/* A small libnvidia-ml.so.1 for the tests: two GPUs, driven by files in the folder NVML_STUB_CONTROL:
 *   count     the number of GPUs, if other than 2
 *   lost.<i>  GPU i has fallen off the bus
 *   xid.<i>   one Xid 79 event waits on GPU i; the file is removed when it is delivered
 * Compiled with -DOLD_DRIVER it lacks what came with later drivers; with -DCONSUMER it has no ECC, NVLink or MIG.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, LOST = 15 };
typedef unsigned long long u64;
typedef struct { int index; } *device;
static struct { int index; } devices[2] = {{0}, {1}};

static const char *control(const char *name, int index) {
    static char path[4096];
    const char *folder = getenv("NVML_STUB_CONTROL");
    if (index < 0) snprintf(path, sizeof path, "%s/%s", folder ? folder : "/nonexistent", name);
    else snprintf(path, sizeof path, "%s/%s.%d", folder ? folder : "/nonexistent", name, index);
    return path;
}
#define ALIVE(d) if (access(control("lost", (d)->index), F_OK) == 0) return LOST
#ifdef CONSUMER
#define SERVER_ONLY return NOT_SUPPORTED
#else
#define SERVER_ONLY
#endif
#define NUMBER(function, type, value) int function(device d, type *out) { ALIVE(d); *out = (value); return SUCCESS; }

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return "stub error"; }
int nvmlDeviceGetCount_v2(unsigned *out) {
    FILE *file = fopen(control("count", -1), "r");
    *out = 2;
    if (file) { if (fscanf(file, "%u", out) != 1) *out = 0; fclose(file); }
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *out) { *out = (device)&devices[i]; return SUCCESS; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "550.54.15"); return SUCCESS; }
int nvmlSystemGetNVMLVersion(char *out, unsigned n) { snprintf(out, n, "12.550.54.15"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *out) { *out = 12040; return SUCCESS; }
int nvmlDeviceGetUUID(device d, char *out, unsigned n) { ALIVE(d); snprintf(out, n, "GPU-%d", d->index); return SUCCESS; }
int nvmlDeviceGetName(device d, char *out, unsigned n) { ALIVE(d); snprintf(out, n, "Stub H100"); return SUCCESS; }
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(device d, struct pci *out) {
    ALIVE(d);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, 32, "00000000:%02X:00.0", d->index + 1);
    return SUCCESS;
}
struct memory { u64 total, free, used; };
int nvmlDeviceGetMemoryInfo(device d, struct memory *out) {
    ALIVE(d);
    out->total = 80000000000ULL; out->used = 1000000000ULL * (d->index + 1); out->free = out->total - out->used;
    return SUCCESS;
}
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, 500000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, 700000)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, 123450)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 4)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 8)
int nvmlDeviceGetMaxClockInfo(device d, int kind, unsigned *out) { ALIVE(d); *out = kind == 1 ? 1980 : 2619; return SUCCESS; }
int nvmlDeviceGetClockInfo(device d, int kind, unsigned *out) { ALIVE(d); *out = kind == 1 ? 1410 : 2600; return SUCCESS; }
int nvmlDeviceGetCudaComputeCapability(device d, int *major, int *minor) { ALIVE(d); *major = 9; *minor = 0; return SUCCESS; }
int nvmlDeviceGetEccMode(device d, int *now, int *next) { ALIVE(d); SERVER_ONLY; *now = 1; *next = 1; return SUCCESS; }
int nvmlDeviceGetTemperatureThreshold(device d, int kind, unsigned *out) { ALIVE(d); *out = kind == 1 ? 87 : 92; return SUCCESS; }
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *out) { ALIVE(d); *out = 61; return SUCCESS; }
struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(device d, struct rates *out) { ALIVE(d); out->gpu = 97; out->memory = 40; return SUCCESS; }
#ifdef OLD_DRIVER
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, 0x24)
#else
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, 0x1ff)
int nvmlDeviceGetMarginTemperature(device d, unsigned *out) { ALIVE(d); out[1] = 26; return SUCCESS; }
int nvmlDeviceGetMigMode(device d, unsigned *now, unsigned *next) { ALIVE(d); SERVER_ONLY; *now = *next = 0; return SUCCESS; }
int nvmlDeviceGetRemappedRows(device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ALIVE(d); SERVER_ONLY;
    *corrected = 2; *uncorrected = 1; *pending = 1; *failed = 0;
    return SUCCESS;
}
struct process { unsigned pid; u64 memory; unsigned gi, ci; };
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *count, struct process *out) {
    ALIVE(d);
    if (*count < 2 || !out) { *count = 2; return INSUFFICIENT_SIZE; }
    *count = 2;
    out[0] = (struct process){getpid(), 5000000 + d->index, 0, 0};
    out[1] = (struct process){1, 0xFFFFFFFFFFFFFFFFULL, 0, 0};
    return SUCCESS;
}
#endif
struct violation { u64 reference, violated; };
int nvmlDeviceGetViolationStatus(device d, int policy, struct violation *out) {
    ALIVE(d);
    out->violated = policy == 0 ? 7000 : 9000;
    return SUCCESS;
}
int nvmlDeviceGetPcieThroughput(device d, int kind, unsigned *out) { ALIVE(d); *out = kind == 0 ? 1000 : 2000; return SUCCESS; }
int nvmlDeviceGetTotalEccErrors(device d, int kind, int counter, u64 *out) {
    ALIVE(d); SERVER_ONLY;
    *out = kind == 0 ? 4 : 1;
    return SUCCESS;
}
int nvmlDeviceGetRetiredPagesPendingStatus(device d, int *out) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *out) {
    ALIVE(d); SERVER_ONLY;
    if (link >= 6) return INVALID_ARGUMENT;
    *out = link != 5;
    return SUCCESS;
}
struct field { unsigned id, scope; long long timestamp, latency; int type, result; union { unsigned ui; u64 ull; } value; };
int nvmlDeviceGetFieldValues(device d, int count, struct field *out) {
    ALIVE(d); SERVER_ONLY;
    for (int i = 0; i < count; i++) {
        out[i].result = i == 1 ? NOT_SUPPORTED : SUCCESS;
        out[i].type = 3; /* unsigned long long */
        out[i].value.ull = out[i].id;
    }
    return SUCCESS;
}
struct event { device d; u64 type, data; unsigned gi, ci; };
static int event_sets[16];
int nvmlEventSetCreate(int **out) { static int next; *out = &event_sets[next++ % 16]; return SUCCESS; }
int nvmlDeviceRegisterEvents(device d, u64 types, int *set) { ALIVE(d); *set = d->index; return SUCCESS; }
int nvmlEventSetWait_v2(int *set, struct event *out, unsigned timeout_ms) {
    if (access(control("lost", *set), F_OK) == 0) return LOST;
    if (unlink(control("xid", *set)) != 0) return TIMEOUT;
    out->type = 8; out->data = 79;
    return SUCCESS;
}
int nvmlEventSetFree(int *set) { return SUCCESS; }
