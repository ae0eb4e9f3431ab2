/* A small libnvidia-ml.so.1 for the tests: two GPUs, driven by files in the folder NVML_STUB_CONTROL:
 *   count     the number of GPUs, if other than 2
 *   lost.<i>  GPU i has fallen off the bus
 *   xid.<i>   one Xid 79 event waits on GPU i; the file is removed when it is delivered
 * Compiled with -DOLD_DRIVER it lacks some functions; with -DCONSUMER it has no ECC.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, TIMEOUT = 10, LOST = 15 };
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
NUMBER(nvmlDeviceGetPowerUsage, unsigned, 123450)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 8)
int nvmlDeviceGetClockInfo(device d, int kind, unsigned *out) { ALIVE(d); *out = kind == 1 ? 1410 : 2600; return SUCCESS; }
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *out) { ALIVE(d); *out = 61; return SUCCESS; }
struct rates { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(device d, struct rates *out) { ALIVE(d); out->gpu = 97; out->memory = 40; return SUCCESS; }
#ifdef OLD_DRIVER
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, 0x24)
#else
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, 0x1ff)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 4)
#endif
int nvmlDeviceGetTotalEccErrors(device d, int kind, int counter, u64 *out) {
    ALIVE(d); SERVER_ONLY;
    *out = kind == 0 ? 4 : 1;
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
