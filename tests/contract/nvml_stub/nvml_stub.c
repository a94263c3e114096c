/* A libnvidia-ml.so.1 that answers from a text file, for tests of the real pynvml without a card.
 *
 * $NVML_STUB_SCRIPT names the file; it is read again at each call, so a test changes the world by writing it.
 * One statement a line; values have no spaces ('_' in a name stands for one).
 *
 *   driver 550.54.15
 *   cuda 12040
 *   card <index> uuid=GPU-.. name=NVIDIA_A100 bus=00000000:3B:00.0 total=<bytes> reserved= used= util= temp=
 *               power=<mW> fan= ecc= mode= mig=<0|1> limit=<mW> throttle=<bits> corrected= minor=
 *               remapped=<rows> pending=<0|1> failed=<0|1> retired=<pages>
 *   mig <index> <number> uuid=MIG-.. name=.. total=.. used=..
 *   process <index>[.<mig number>] <compute|graphics|mps> <pid> <bytes|na>
 *   error <function|*> <index|*> <code>     the function (without "nvmlDevice"/"nvml") answers this code
 *   hang <function|*> <index|*>             it does not answer while this line is there
 *   xid <index> <code>                      an event; each line is told once, in the order of the file
 *
 * A field a card lacks answers NOT_SUPPORTED. Compile with -DNO_MEMORY_V2, -DNO_PROCESSES_V3,
 * -DNO_PROCESSES_V2, -DNO_EVENTS, -DNO_HEALTH for the libraries of older drivers.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int R;
typedef void *Device;
typedef unsigned long long u64;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
       VERSION_MISMATCH = 25 };
#define NOT_AVAILABLE ((u64)-1)
#define MIG_BASE 1000
#define LINE_MAX_BYTES 1024

static FILE *script(void) {
    const char *path = getenv("NVML_STUB_SCRIPT");
    return path ? fopen(path, "r") : NULL;
}

static int number_of(Device device) { return (int)((size_t)device % MIG_BASE) - 1; }
static int mig_of(Device device) { return (int)((size_t)device / MIG_BASE) - 1; }

static int matches(const char *word, const char *wanted) { return !strcmp(word, "*") || !strcmp(word, wanted); }

/* The scripted result of a function for a card (-1: no card): waits while a hang is scripted. */
static R verdict(const char *function, int index) {
    char line[LINE_MAX_BYTES], name[64], card[16], where[16];
    for (;;) {
        int hangs = 0;
        R result = SUCCESS;
        FILE *file = script();
        snprintf(where, sizeof where, "%d", index);
        while (file && fgets(line, sizeof line, file)) {
            int code;
            if (sscanf(line, "hang %63s %15s", name, card) == 2 && matches(name, function) && matches(card, where))
                hangs = 1;
            if (sscanf(line, "error %63s %15s %d", name, card, &code) == 3 && matches(name, function) &&
                matches(card, where))
                result = code;
        }
        if (file) fclose(file);
        if (!hangs) return result;
        usleep(10000);
    }
}

/* The value of a field of a card or MIG instance; 0 when it has none. */
static int field(Device device, const char *key, char *value, size_t size) {
    char line[LINE_MAX_BYTES], start[64], pattern[64];
    int found = 0;
    FILE *file = script();
    if (mig_of(device) < 0) snprintf(start, sizeof start, "card %d ", number_of(device));
    else snprintf(start, sizeof start, "mig %d %d ", number_of(device), mig_of(device));
    snprintf(pattern, sizeof pattern, " %s=", key);
    while (file && !found && fgets(line, sizeof line, file)) {
        char *at;
        if (strncmp(line, start, strlen(start)) || !(at = strstr(line, pattern))) continue;
        at += strlen(pattern);
        size_t length = strcspn(at, " \n");
        if (length >= size) length = size - 1;
        memcpy(value, at, length);
        value[length] = 0;
        found = 1;
    }
    if (file) fclose(file);
    return found;
}

static R text(const char *function, Device device, const char *key, char *out, unsigned size, int spaces) {
    R result = verdict(function, number_of(device));
    if (result) return result;
    if (!field(device, key, out, size)) return NOT_SUPPORTED;
    for (char *at = out; spaces && *at; at++) if (*at == '_') *at = ' ';
    return SUCCESS;
}

static R unsigned_value(const char *function, Device device, const char *key, unsigned *out) {
    char value[64];
    R result = verdict(function, number_of(device));
    if (result) return result;
    if (!field(device, key, value, sizeof value)) return NOT_SUPPORTED;
    *out = (unsigned)strtoul(value, NULL, 10);
    return SUCCESS;
}

static u64 bytes_of(Device device, const char *key) {
    char value[64];
    return field(device, key, value, sizeof value) ? strtoull(value, NULL, 10) : 0;
}

static R system_text(const char *function, const char *format, char *out) {
    char line[LINE_MAX_BYTES];
    R result = verdict(function, -1);
    FILE *file = script();
    out[0] = 0;
    while (file && fgets(line, sizeof line, file)) sscanf(line, format, out);
    if (file) fclose(file);
    return result;
}

R nvmlInitWithFlags(unsigned flags) { (void)flags; return verdict("Init", -1); }
R nvmlInit_v2(void) { return verdict("Init", -1); }
R nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(R code) { (void)code; return "an error that only the library knows"; }

R nvmlSystemGetDriverVersion(char *out, unsigned size) {
    (void)size;
    return system_text("SystemGetDriverVersion", "driver %79s", out);
}

R nvmlSystemGetCudaDriverVersion(int *out) {
    char value[80];
    R result = system_text("SystemGetCudaDriverVersion", "cuda %79s", value);
    *out = atoi(value);
    return result;
}
R nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

R nvmlDeviceGetCount_v2(unsigned *count) {
    char line[LINE_MAX_BYTES];
    int index;
    R result = verdict("GetCount", -1);
    FILE *file = script();
    *count = 0;
    while (file && fgets(line, sizeof line, file)) *count += sscanf(line, "card %d ", &index) == 1;
    if (file) fclose(file);
    return result;
}

R nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *device) {
    *device = (Device)(size_t)(index + 1);
    return verdict("GetHandleByIndex", (int)index);
}

R nvmlDeviceGetUUID(Device device, char *out, unsigned size) { return text("GetUUID", device, "uuid", out, size, 0); }
R nvmlDeviceGetName(Device device, char *out, unsigned size) { return text("GetName", device, "name", out, size, 1); }

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

R nvmlDeviceGetPciInfo_v3(Device device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    return text("GetPciInfo", device, "bus", pci->bus_id, sizeof pci->bus_id, 0);
}

typedef struct { u64 total, free, used; } MemoryV1;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;

R nvmlDeviceGetMemoryInfo(Device device, MemoryV1 *memory) {
    char value[64];
    R result = verdict("GetMemoryInfo", number_of(device));
    if (result) return result;
    if (!field(device, "total", value, sizeof value)) return NOT_SUPPORTED;
    memory->total = bytes_of(device, "total");
    memory->used = bytes_of(device, "used") + bytes_of(device, "reserved");
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

#ifndef NO_MEMORY_V2
R nvmlDeviceGetMemoryInfo_v2(Device device, MemoryV2 *memory) {
    MemoryV1 older;
    if (memory->version != 0x02000028) return VERSION_MISMATCH;
    R result = verdict("GetMemoryInfo_v2", number_of(device));
    if (!result) result = nvmlDeviceGetMemoryInfo(device, &older);
    if (result) return result;
    memory->total = older.total;
    memory->reserved = bytes_of(device, "reserved");
    memory->used = bytes_of(device, "used");
    memory->free = older.free;
    return SUCCESS;
}
#endif

typedef struct { unsigned pid; u64 used; } ProcessV1;
typedef struct { unsigned pid; u64 used; unsigned instance, compute; } ProcessV2;

static R processes(const char *function, const char *kind, Device device, unsigned *count, void *out, int newer) {
    char line[LINE_MAX_BYTES], where[32], card[32], found[16], amount[32];
    unsigned n = 0, room = out ? *count : 0;
    R result = verdict(function, number_of(device));
    if (result) return result;
    if (mig_of(device) < 0) snprintf(where, sizeof where, "%d", number_of(device));
    else snprintf(where, sizeof where, "%d.%d", number_of(device), mig_of(device));
    FILE *file = script();
    while (file && fgets(line, sizeof line, file)) {
        unsigned pid;
        if (sscanf(line, "process %31s %15s %u %31s", card, found, &pid, amount) != 4) continue;
        if (strcmp(card, where) || strcmp(found, kind)) continue;
        u64 used = strcmp(amount, "na") ? strtoull(amount, NULL, 10) : NOT_AVAILABLE;
        if (n < room && newer) ((ProcessV2 *)out)[n] = (ProcessV2){pid, used, 0xFFFFFFFF, 0xFFFFFFFF};
        if (n < room && !newer) ((ProcessV1 *)out)[n] = (ProcessV1){pid, used};
        n++;
    }
    if (file) fclose(file);
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(name, kind)                                                                       \
    R nvmlDeviceGet##name##RunningProcesses(Device device, unsigned *count, ProcessV1 *out) {       \
        return processes("Get" #name "RunningProcesses", kind, device, count, out, 0);              \
    }
#define PROCESSES_NEWER(name, kind, version)                                                        \
    R nvmlDeviceGet##name##RunningProcesses_##version(Device device, unsigned *count, ProcessV2 *out) { \
        return processes("Get" #name "RunningProcesses", kind, device, count, out, 1);              \
    }

PROCESSES(Compute, "compute")
PROCESSES(Graphics, "graphics")
PROCESSES(MPSCompute, "mps")
#ifndef NO_PROCESSES_V2
PROCESSES_NEWER(Compute, "compute", v2)
PROCESSES_NEWER(Graphics, "graphics", v2)
PROCESSES_NEWER(MPSCompute, "mps", v2)
#endif
#ifndef NO_PROCESSES_V3
PROCESSES_NEWER(Compute, "compute", v3)
PROCESSES_NEWER(Graphics, "graphics", v3)
PROCESSES_NEWER(MPSCompute, "mps", v3)
#endif

typedef struct { unsigned gpu, memory; } Utilisation;

R nvmlDeviceGetUtilizationRates(Device device, Utilisation *out) {
    out->memory = 0;
    return unsigned_value("GetUtilizationRates", device, "util", &out->gpu);
}
R nvmlDeviceGetTemperature(Device device, int sensor, unsigned *out) {
    return sensor ? INVALID_ARGUMENT : unsigned_value("GetTemperature", device, "temp", out);
}
R nvmlDeviceGetPowerUsage(Device device, unsigned *out) {
    return unsigned_value("GetPowerUsage", device, "power", out);
}
R nvmlDeviceGetFanSpeed(Device device, unsigned *out) { return unsigned_value("GetFanSpeed", device, "fan", out); }
R nvmlDeviceGetComputeMode(Device device, unsigned *out) {
    char path[1024];
    const char *script_path = getenv("NVML_STUB_SCRIPT");
    R result = unsigned_value("GetComputeMode", device, "mode", out);
    snprintf(path, sizeof path, "%s.mode-%d", script_path ? script_path : "", number_of(device));
    FILE *file = fopen(path, "r"); /* what was set counts more than the script */
    if (file) {
        if (!result && fscanf(file, "%u", out) != 1) *out = 0;
        fclose(file);
    }
    return result;
}
R nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, u64 *out) {
    unsigned value;
    (void)counter;
    R result = unsigned_value("GetTotalEccErrors", device, type ? "ecc" : "corrected", &value);
    *out = result ? 0 : value;
    return result;
}

R nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    R result = unsigned_value("GetMigMode", device, "mig", current);
    *pending = result ? 0 : *current;
    return result;
}
R nvmlDeviceGetMaxMigDeviceCount(Device device, unsigned *count) {
    *count = 7;
    return verdict("GetMaxMigDeviceCount", number_of(device));
}
R nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned number, Device *out) {
    char value[96];
    R result = verdict("GetMigDeviceHandleByIndex", number_of(device));
    *out = (Device)((size_t)(number + 1) * MIG_BASE + (size_t)number_of(device) + 1);
    if (result) return result;
    return field(*out, "uuid", value, sizeof value) ? SUCCESS : NOT_FOUND;
}

R nvmlDeviceSetComputeMode(Device device, unsigned mode) {
    /* Kept beside the script, as a real card keeps it: the test writes the script. */
    char path[1024];
    R result = verdict("SetComputeMode", number_of(device));
    const char *script_path = getenv("NVML_STUB_SCRIPT");
    if (result || !script_path) return result;
    snprintf(path, sizeof path, "%s.mode-%d", script_path, number_of(device));
    FILE *file = fopen(path, "w");
    if (!file) return NOT_SUPPORTED;
    fprintf(file, "%u", mode);
    fclose(file);
    return SUCCESS;
}

#ifndef NO_HEALTH
R nvmlDeviceGetEnforcedPowerLimit(Device device, unsigned *out) {
    return unsigned_value("GetEnforcedPowerLimit", device, "limit", out);
}
R nvmlDeviceGetMinorNumber(Device device, unsigned *out) {
    return unsigned_value("GetMinorNumber", device, "minor", out);
}
R nvmlDeviceGetCurrentClocksThrottleReasons(Device device, u64 *out) {
    unsigned value;
    R result = unsigned_value("GetCurrentClocksThrottleReasons", device, "throttle", &value);
    *out = result ? 0 : value;
    return result;
}
R nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    R result = unsigned_value("GetRemappedRows", device, "remapped", corrected);
    *uncorrected = 0;
    if (unsigned_value("GetRemappedRows", device, "pending", pending)) *pending = 0;
    if (unsigned_value("GetRemappedRows", device, "failed", failed)) *failed = 0;
    return result;
}
R nvmlDeviceGetRetiredPages(Device device, int cause, unsigned *count, u64 *out) {
    unsigned pages, room = out ? *count : 0;
    R result = unsigned_value("GetRetiredPages", device, "retired", &pages);
    if (result) return result;
    if (cause == 0) pages = 0; /* all of them by double bit errors */
    *count = pages;
    for (unsigned n = 0; n < pages && n < room; n++) out[n] = n;
    return pages > room ? INSUFFICIENT_SIZE : SUCCESS;
}
R nvmlDeviceGetRetiredPagesPendingStatus(Device device, unsigned *out) {
    return unsigned_value("GetRetiredPagesPendingStatus", device, "pending", out);
}
#endif

#ifndef NO_EVENTS
typedef struct { Device device; u64 type, data; unsigned instance, compute; } Event;
static char registered[256];
static int told; /* lines `xid` of the script that were told already */

R nvmlEventSetCreate(void **set) { told = 0; memset(registered, 0, sizeof registered); *set = &told; return verdict("EventSetCreate", -1); }
R nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
R nvmlDeviceGetSupportedEventTypes(Device device, u64 *types) {
    *types = 0xF;
    return verdict("GetSupportedEventTypes", number_of(device));
}
R nvmlDeviceRegisterEvents(Device device, u64 types, void *set) {
    R result = verdict("RegisterEvents", number_of(device));
    (void)set;
    if (!result && (types & 8)) registered[number_of(device)] = 1;
    return result;
}
R nvmlEventSetWait_v2(void *set, Event *event, unsigned milliseconds) {
    char line[LINE_MAX_BYTES];
    int index, code, n = 0;
    R result = verdict("EventSetWait", -1);
    FILE *file = script();
    (void)set;
    (void)milliseconds;
    if (result) { if (file) fclose(file); return result; }
    result = TIMEOUT;
    while (file && result == TIMEOUT && fgets(line, sizeof line, file)) {
        if (sscanf(line, "xid %d %d", &index, &code) != 2 || n++ < told) continue;
        told++;
        if (index < 0 || index >= (int)sizeof registered || !registered[index]) continue;
        *event = (Event){(Device)(size_t)(index + 1), 8, (u64)code, 0xFFFFFFFF, 0xFFFFFFFF};
        result = SUCCESS;
    }
    if (file) fclose(file);
    return result;
}
#endif
