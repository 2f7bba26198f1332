// Copies the pages of blocks between device memory and rows of mapped, page-locked host memory.
//
// One unit of work is one slice of one page: all threads of a thread block copy it together. No header is needed, so
// any NVRTC compiles this; nothing waits for another thread, so it also runs as plain C++, thread after thread.

typedef long long int64;

// Where the pages of one layer lie, all in bytes. The page of block b starts at base + b * block_stride; in the host's
// row it follows row_offset bytes after the start of the block's place.
struct Member {
    int64 base;
    int64 block_stride;
    int64 page_bytes;
    int64 row_offset;
};

struct alignas(16) Bytes16 {
    unsigned long long low;
    unsigned long long high;
};

// Words per thread that are read before the first of them is written: reads from the host take long, so that several
// must be under way.
static const int UNROLL = 4;

// `to` and `from` lie equally far from a multiple of the word's size. Bytes before the first whole word and after the
// last one go singly.
template <typename Word>
__device__ void copy_words(char* to, const char* from, int64 bytes) {
    const int64 size = sizeof(Word);
    int64 head = (size - reinterpret_cast<int64>(to) % size) % size;
    if (head > bytes) head = bytes;
    const int64 words = (bytes - head) / size;
    const int64 tail = head + words * size;
    const int64 threads = blockDim.x;

    Word* to_words = reinterpret_cast<Word*>(to + head);
    const Word* from_words = reinterpret_cast<const Word*>(from + head);
    int64 at = threadIdx.x;
    for (; at + (UNROLL - 1) * threads < words; at += UNROLL * threads) {
        Word read[UNROLL];
        for (int i = 0; i < UNROLL; i++) read[i] = from_words[at + i * threads];
        for (int i = 0; i < UNROLL; i++) to_words[at + i * threads] = read[i];
    }
    for (; at < words; at += threads) to_words[at] = from_words[at];

    for (int64 i = threadIdx.x; i < head; i += threads) to[i] = from[i];
    for (int64 i = tail + threadIdx.x; i < bytes; i += threads) to[i] = from[i];
}

// Takes the widest word for which both sides are aligned at the same places.
__device__ void copy_bytes(char* to, const char* from, int64 bytes) {
    const int64 apart = reinterpret_cast<int64>(to) ^ reinterpret_cast<int64>(from);
    if (apart % 16 == 0) {
        copy_words<Bytes16>(to, from, bytes);
    } else if (apart % 8 == 0) {
        copy_words<unsigned long long>(to, from, bytes);
    } else if (apart % 4 == 0) {
        copy_words<unsigned int>(to, from, bytes);
    } else if (apart % 2 == 0) {
        copy_words<unsigned short>(to, from, bytes);
    } else {
        copy_words<unsigned char>(to, from, bytes);
    }
}

// slices: slices of the longest page; shorter pages have fewer, and the rest of their units are empty.
// slice_bytes: a multiple of 16, so that every slice is aligned as its page is.
template <bool TO_HOST>
__device__ void copy_pages(const Member* members, int64 num_members, const int64* blocks, const int64* host_offsets,
                           int64 num_blocks, char* host, int64 slices, int64 slice_bytes) {
    const int64 units = num_blocks * num_members * slices;
    for (int64 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const int64 page = unit / slices;
        const int64 start = unit % slices * slice_bytes;
        const int64 block = page / num_members;
        const Member member = members[page % num_members];
        int64 bytes = member.page_bytes - start;
        if (bytes <= 0) continue;
        if (bytes > slice_bytes) bytes = slice_bytes;

        char* on_device = reinterpret_cast<char*>(member.base + blocks[block] * member.block_stride + start);
        char* on_host = host + host_offsets[block] + member.row_offset + start;
        if (TO_HOST) {
            copy_bytes(on_host, on_device, bytes);
        } else {
            copy_bytes(on_device, on_host, bytes);
        }
    }
}

extern "C" __global__ void store_pages(const Member* members, int64 num_members, const int64* blocks,
                                       const int64* host_offsets, int64 num_blocks, char* host, int64 slices,
                                       int64 slice_bytes) {
    copy_pages<true>(members, num_members, blocks, host_offsets, num_blocks, host, slices, slice_bytes);
}

extern "C" __global__ void load_pages(const Member* members, int64 num_members, const int64* blocks,
                                      const int64* host_offsets, int64 num_blocks, char* host, int64 slices,
                                      int64 slice_bytes) {
    copy_pages<false>(members, num_members, blocks, host_offsets, num_blocks, host, slices, slice_bytes);
}
