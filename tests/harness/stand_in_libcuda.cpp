// Stands in for libcuda.so.1: a "module" is an emulated library (a whole ELF file in memory), so that the Python which packs
// arguments, caches, loads and launches is tested without a GPU. It has the driver's rules: a thread begins without a context,
// a module belongs to the context in which it was loaded, a launch elsewhere fails, and limits of grids and blocks are checked.
// The functions of HIP's library are the same under other names, but for contexts: a thread begins with device 0.
#include <dlfcn.h>
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>

namespace {
enum { OK = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
       ILLEGAL_ADDRESS = 700 };
struct Context { int device; };
struct Module { void* library; Context* context; };
struct Function { int (*run)(const unsigned*, const unsigned*, void**); Context* context; };
Context contexts[4] = {{0}, {1}, {2}, {3}};
thread_local Context* current;
std::atomic<int> next_error, loads, launches;
std::atomic<void*> last_stream;

size_t size_of(const char* image) {
    const auto* head = reinterpret_cast<const Elf64_Ehdr*>(image);
    return memcmp(head->e_ident, ELFMAG, SELFMAG) ? 0 : head->e_shoff + size_t(head->e_shnum) * head->e_shentsize;
}
}  // namespace

extern "C" {
void stand_in_fail_next_launch(int error) { next_error = error; }
int stand_in_loads() { return loads; }
int stand_in_launches() { return launches; }
void* stand_in_last_stream() { return last_stream; }

int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal >= 0 && ordinal < 4 ? OK : 101; }
int cuDevicePrimaryCtxRetain(Context** context, int device) { *context = &contexts[device]; return OK; }
int cuCtxGetCurrent(Context** context) { *context = current; return OK; }
int cuCtxSetCurrent(Context* context) { current = context; return OK; }

int cuModuleLoadData(Module** module, const void* image) {
    if (!current) return INVALID_CONTEXT;
    const size_t size = size_of(static_cast<const char*>(image));
    const int file = memfd_create("module", 0);                           // stays open, so that each module has another path
    if (!size || write(file, image, size) != ssize_t(size)) return INVALID_IMAGE;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return INVALID_IMAGE;
    *module = new Module{library, current};
    ++loads;
    return OK;
}
int cuModuleGetFunction(Function** function, Module* module, const char* symbol) {
    void* found = dlsym(module->library, symbol);
    if (!found) return NOT_FOUND;
    *function = new Function{reinterpret_cast<int (*)(const unsigned*, const unsigned*, void**)>(found), module->context};
    return OK;
}
int cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
                   void* stream, void** arguments, void**) {
    if (const int error = next_error.exchange(0)) return error;
    if (!current) return INVALID_CONTEXT;
    if (function->context != current) return INVALID_HANDLE;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || bx * by * bz > 1024 || !(bx * by * bz)) return INVALID_VALUE;
    const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    last_stream = stream;
    ++launches;
    return function->run(grid, block, arguments) ? 719 : OK;
}
int cuGetErrorName(int error, const char** name) {
    switch (error) {
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return OK;
        case 101: *name = "CUDA_ERROR_INVALID_DEVICE"; return OK;
        case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; return OK;
        case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return OK;
        case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; return OK;
        case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; return OK;
        case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return OK;
    }
    *name = nullptr;                                                        // as the driver does for a number it does not know
    return INVALID_VALUE;
}
int cuGetErrorString(int error, const char** text) {
    *text = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : nullptr;
    return *text ? OK : INVALID_VALUE;
}

int hipGetDevice(int* device) { *device = current ? current->device : 0; return OK; }
int hipSetDevice(int device) {
    if (device < 0 || device > 3) return 101;
    current = &contexts[device];
    return OK;
}
int hipModuleLoadData(Module** module, const void* image) {
    if (!current) current = &contexts[0];
    return cuModuleLoadData(module, image);
}
int hipModuleGetFunction(Function** function, Module* module, const char* symbol) {
    return cuModuleGetFunction(function, module, symbol);
}
int hipModuleLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void* stream, void** arguments, void** extra) {
    if (!current) current = &contexts[0];
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, extra);
}
const char* hipGetErrorName(int error) { return error == ILLEGAL_ADDRESS ? "hipErrorIllegalAddress" : nullptr; }
const char* hipGetErrorString(int error) {
    return error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : nullptr;
}
}
