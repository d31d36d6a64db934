// A libcuda.so.1 for machines without a GPU: it loads nothing and records the last launch.
//
// Kernels' parameters are copied as cuLaunchKernelEx reads them, of the sizes that stub_expect was told. Launches and
// tensor maps that a real driver would refuse are refused, with the reason in stub_complaint (CUDA driver API, "Tensor
// Map Object Management"; CUDA C++ Programming Guide, "Compute Capabilities").
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 512
static int capability, shared_limit;
static int parameters, sizes[MOST];
static unsigned char values[MOST][128];
static int launches;
static char complaint[256];

#define REFUSE(...) return snprintf(complaint, sizeof complaint, __VA_ARGS__), CUDA_ERROR_INVALID_VALUE

// ---- what the test calls

void stub_device(int sm, int shared) {
    capability = sm;
    shared_limit = shared;
}

void stub_expect(int count, const int *bytes) {
    parameters = count;
    memcpy(sizes, bytes, count * sizeof *sizes);
    memset(values, 0xee, sizeof values);
    complaint[0] = 0;
}

int stub_launches(void) { return launches; }
const unsigned char *stub_parameter(int index) { return values[index]; }
const char *stub_complaint(void) { return complaint; }

// ---- what Triton's launcher asks before it launches

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = complaint;
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) {
    *count = 1;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice *device) { return cuDeviceGet(device, 0); }
CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)0x10;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 1 << 20;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return cuCtxGetCurrent(context); }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = capability / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = capability % 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = shared_limit; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = shared_limit + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1024;
    }
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)0x20;
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)0x30;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache cache) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
    *count = 1;
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)value = pointer;  // a device pointer is itself
    return CUDA_SUCCESS;
}

// ---- tensor maps

static unsigned bytes_of(CUtensorMapDataType type) {
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 4;
    }
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    unsigned inner = box[0] * bytes_of(type);
    unsigned widest = swizzle == CU_TENSOR_MAP_SWIZZLE_32B    ? 32
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                      : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                              : 4096;
    if (rank < 1 || rank > 5) REFUSE("a tensor map of rank %u", rank);
    if ((uintptr_t)address % 16) REFUSE("a tensor map at %p, not a multiple of 16", address);
    if (inner % 16 || inner > widest) REFUSE("%u bytes in a row of the box, swizzled by %u", inner, widest);
    for (unsigned i = 0; i < rank; i++) {
        if (sizes[i] < 1 || sizes[i] > 1ull << 32) REFUSE("size %llu of axis %u", (unsigned long long)sizes[i], i);
        if (box[i] < 1 || box[i] > 256) REFUSE("%u elements of axis %u in the box", box[i], i);
        if (steps[i] < 1 || steps[i] > 8) REFUSE("a step of %u on axis %u", steps[i], i);
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40))
            REFUSE("a stride of %llu bytes", (unsigned long long)strides[i]);
    }
    memset(map, 0, sizeof *map);
    memcpy(map, &address, sizeof address);  // for the test to find
    return CUDA_SUCCESS;
}

// ---- the launch

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    launches++;
    if (config->gridDimX > 2147483647u || config->gridDimY > 65535 || config->gridDimZ > 65535)
        REFUSE("a grid of %u, %u, %u", config->gridDimX, config->gridDimY, config->gridDimZ);
    if (config->blockDimX * config->blockDimY * config->blockDimZ > 1024) REFUSE("%u threads", config->blockDimX);
    if ((int)config->sharedMemBytes > shared_limit) REFUSE("%u bytes of shared memory", config->sharedMemBytes);
    for (int i = 0; i < parameters; i++) memcpy(values[i], arguments[i], sizes[i]);
    return CUDA_SUCCESS;
}
