// The copy kernels as a library for the CPU. KERNEL_FILE is the path of their source.
#include "kernel_shim.hpp"

#include KERNEL_FILE

static long misaligned = 0;

// The compiler calls this before every access that its type's alignment does not allow: a CPU forgives them, a GPU
// does not.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { misaligned++; }

extern "C" long misaligned_accesses() { return misaligned; }

// An access that x86 forgives wherever it goes.
extern "C" unsigned long long read_word8(const char* from) {
    return *reinterpret_cast<const unsigned long long*>(from);
}

extern "C" void run_store(unsigned int blocks, unsigned int threads, const Member* members, int64 num_members,
                          const int64* block_ids, const int64* host_offsets, int64 num_blocks, char* host,
                          int64 slices, int64 slice_bytes) {
    launch(blocks, threads, store_pages, members, num_members, block_ids, host_offsets, num_blocks, host, slices,
           slice_bytes);
}

extern "C" void run_load(unsigned int blocks, unsigned int threads, const Member* members, int64 num_members,
                         const int64* block_ids, const int64* host_offsets, int64 num_blocks, char* host,
                         int64 slices, int64 slice_bytes) {
    launch(blocks, threads, load_pages, members, num_members, block_ids, host_offsets, num_blocks, host, slices,
           slice_bytes);
}
