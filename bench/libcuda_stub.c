// A libcuda.so.1 for machines without a GPU: Triton's launchers run on it, and it loads and starts nothing.
//
// It is an H100 (sm_90), counts launches, and refuses launches and tensor maps that a real driver would refuse; the
// reason is the text of the error (CUDA driver API, "Tensor Map Object Management"; CUDA C++ Programming Guide, "Compute
// Capabilities"). PyTorch is told that there is no device.
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define SHARED 232448  // bytes that a block can have
#define ACCEPT(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define GIVE(name, place, value, ...) CUresult name(__VA_ARGS__) { return *(place) = (value), CUDA_SUCCESS; }
#define REFUSE(...) return snprintf(complaint, sizeof complaint, __VA_ARGS__), CUDA_ERROR_INVALID_VALUE
static char complaint[256];
static int launches;

int stub_launches(void) { return launches; }

CUresult cuInit(unsigned flags) { return CUDA_ERROR_NO_DEVICE; }
GIVE(cuGetErrorString, text, complaint, CUresult error, const char **text)
GIVE(cuDriverGetVersion, version, 13000, int *version)
GIVE(cuDeviceGet, device, 0, CUdevice *device, int ordinal)
GIVE(cuCtxGetDevice, device, 0, CUdevice *device)
GIVE(cuCtxGetCurrent, context, (CUcontext)0x10, CUcontext *context)
GIVE(cuDevicePrimaryCtxRetain, context, (CUcontext)0x10, CUcontext *context, CUdevice device)
GIVE(cuCtxGetLimit, value, 1 << 20, size_t *value, CUlimit limit)
ACCEPT(cuCtxSetLimit, CUlimit limit, size_t value)
ACCEPT(cuCtxSetCurrent, CUcontext context)
GIVE(cuModuleLoadData, module, (CUmodule)0x20, CUmodule *module, const void *image)
ACCEPT(cuModuleUnload, CUmodule module)
GIVE(cuModuleGetFunction, function, (CUfunction)0x30, CUfunction *function, CUmodule module, const char *name)
ACCEPT(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
ACCEPT(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache cache)
GIVE(cuFuncGetAttribute, value, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, int *value,
     CUfunction_attribute attribute, CUfunction function)
GIVE(cuOccupancyMaxActiveClusters, count, 1, int *count, CUfunction function, const CUlaunchConfig *config)
GIVE(cuStreamIsCapturing, status, CU_STREAM_CAPTURE_STATUS_NONE, CUstream stream, CUstreamCaptureStatus *status)
GIVE(cuPointerGetAttribute, (CUdeviceptr *)value, pointer, void *value, CUpointer_attribute attribute,
     CUdeviceptr pointer)

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = SHARED; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = SHARED + 1024; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    default: *value = 1024;
    }
    return CUDA_SUCCESS;
}

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
    unsigned inner = box[0] * bytes_of(type), widest = swizzle ? 16 << swizzle : 4096;  // of the box, in bytes
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
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
    launches++;
    if (config->gridDimX > 2147483647u || config->gridDimY > 65535 || config->gridDimZ > 65535)
        REFUSE("a grid of %u, %u, %u", config->gridDimX, config->gridDimY, config->gridDimZ);
    if (config->blockDimX * config->blockDimY * config->blockDimZ > 1024) REFUSE("%u threads", config->blockDimX);
    if (config->sharedMemBytes > SHARED) REFUSE("%u bytes of shared memory", config->sharedMemBytes);
    return CUDA_SUCCESS;
}
