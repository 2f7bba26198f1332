// What the CUDA kernels need to be compiled as C++ and run on the CPU, thread after thread.
#pragma once

#define __device__ static
#define __global__

struct Dim {
    unsigned int x;
};

static Dim blockIdx, threadIdx, gridDim, blockDim;

// Calls the kernel once for every thread of every thread block.
template <typename Kernel, typename... Arguments>
void launch(unsigned int blocks, unsigned int threads, Kernel kernel, Arguments... arguments) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(arguments...);
    }
}
