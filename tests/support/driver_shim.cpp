// The driver's batched copy on the CPU, with the type that CUDA's headers give it: only with our arguments and our
// structures laid out as theirs are does it copy.
#include <cstring>

#include <cudaTypedefs.h>

static size_t calls = 0;

static CUresult CUDAAPI copy_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                                   CUmemcpyAttributes_v1* attributes, size_t* first, size_t num_attributes,
                                   size_t* failed, CUstream stream) {
    calls++;
    if (attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || attributes->flags != CU_MEMCPY_FLAG_DEFAULT ||
        attributes->srcLocHint.id != 0 || attributes->dstLocHint.id != 0 || first[0] != 0 || num_attributes != 1 ||
        failed == nullptr || count == 0 || stream == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<void*>(from[i]), sizes[i]);
    }
    return CUDA_SUCCESS;
}

extern "C" PFN_cuMemcpyBatchAsync_v12080 batch_function() { return copy_batch; }

extern "C" size_t batch_calls() { return calls; }

extern "C" size_t attributes_size() { return sizeof(CUmemcpyAttributes_v1); }
