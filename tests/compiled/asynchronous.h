// State of shared memory where matrix products and bulk copies access it beside the loads and stores of threads.
// See asynchronous.py for the numpy version.

#include <stdlib.h>

struct further_byte {
    int32_t write_epoch, write_fence;  // last ordinary write, and how many proxy fences its warp had executed; −1: none
    int32_t read_epoch, read_fence;  // the same for ordinary reads: the most of all warps that read in this epoch
    uint32_t readers;  // warps, as bits
    int16_t writer;  // warp
    int16_t products;  // matrix products under way that read the byte
    int32_t delivery;  // bulk copy that wrote the byte, counted from 1; 0: none
    int8_t object;  // whether the byte belongs to a barrier object
};

struct delivery {
    int32_t object;  // address of the barrier object
    uint32_t waited;  // warps that have waited for it, as bits
};

struct further {
    struct further_byte *bytes;
    int32_t warps;
    int32_t fences[32], settled[32];  // proxy fences of each warp, now and before the last barrier
    int32_t fence_epoch[32], settled_epoch;  // epoch of the last fence of a warp, and of the last before this epoch
    int32_t deliveries, room;
    struct delivery *delivery;
};

static struct further *new_further(int size, int warps) {
    struct further *f = calloc(1, sizeof *f);
    f->bytes = malloc(sizeof *f->bytes * (size + 1));
    f->warps = warps;
    return f;
}

static void free_further(struct further *f) {
    if (f) free(f->bytes), free(f->delivery), free(f);
}

static void start_further(struct further *f, int size) {
    memset(f->bytes, 0, sizeof *f->bytes * size);
    for (int i = 0; i < size; i++) f->bytes[i].write_epoch = f->bytes[i].read_epoch = -1;
    for (int i = 0; i < f->warps; i++) f->fences[i] = f->settled[i] = 0, f->fence_epoch[i] = -1;
    f->settled_epoch = -1, f->deliveries = 0;
}

// All warps have met at a barrier, which ends the epoch.
static void settle_further(struct further *f, int epoch) {
    for (int i = 0; i < f->warps; i++) {
        f->settled[i] = f->fences[i];
        if (f->fence_epoch[i] == epoch) f->settled_epoch = epoch;
    }
    for (int i = 0; i < f->deliveries; i++) f->delivery[i].waited = 0xFFFFFFFFu;
}

// Whether a proxy fence lies between ordinary accesses by some warps and an access of this warp now.
static int fenced(const struct shared *memory, int warp, int epoch, uint32_t warps, int fence) {
    const struct further *f = memory->further;
    if (epoch < memory->epoch && (f->settled_epoch > epoch || f->fence_epoch[warp] == memory->epoch)) return 1;
    for (int i = 0; i < f->warps; i++)
        if ((warps >> i & 1) && (i == warp ? f->fences[i] : f->settled[i]) <= fence) return 0;
    return 1;
}

static int write_is_fenced(const struct shared *memory, int warp, const struct further_byte *b) {
    return b->write_epoch < 0 || fenced(memory, warp, b->write_epoch, 1u << b->writer, b->write_fence);
}

// Checks of any access; returns whether something has been reported.
static int further_access(const struct shared *memory, const struct site *at, int lane, uint64_t address, int reported) {
    const struct further *f = memory->further;
    const struct further_byte *b = &f->bytes[address];
    if (reported) return 1;
    if (b->object && at->proxy != OBJECT) return report(at, BARRIER_OBJECT, lane, address), 1;
    if (b->delivery && !(f->delivery[b->delivery - 1].waited >> at->warp & 1))
        return report(at, NOT_WAITED, lane, address), 1;
    if (at->proxy == ASYNCHRONOUS && !write_is_fenced(memory, at->warp, b)) return report(at, PROXY, lane, address), 1;
    return 0;
}

static int further_read(const struct shared *memory, const struct site *at, int lane, uint64_t address, int reported) {
    const struct further *f = memory->further;
    struct further_byte *b = &f->bytes[address];
    reported = further_access(memory, at, lane, address, reported);
    if (at->proxy != GENERIC) return reported;
    int fence = f->fences[at->warp];
    if (b->read_epoch != memory->epoch) b->readers = 0, b->read_fence = fence;
    b->read_epoch = memory->epoch, b->readers |= 1u << at->warp;
    b->read_fence = fence > b->read_fence ? fence : b->read_fence;
    return reported;
}

static int further_write(const struct shared *memory, const struct site *at, int lane, uint64_t address, int reported) {
    const struct further *f = memory->further;
    struct further_byte *b = &f->bytes[address];
    reported = further_access(memory, at, lane, address, reported);
    if (!reported && b->products) report(at, FACTOR_UNDER_WAY, lane, address), reported = 1;
    int read_is_fenced = b->read_epoch < 0 || fenced(memory, at->warp, b->read_epoch, b->readers, b->read_fence);
    if (!reported && at->proxy == ASYNCHRONOUS && !read_is_fenced) report(at, PROXY, lane, address), reported = 1;
    b->delivery = 0;
    if (at->proxy == ASYNCHRONOUS) b->write_epoch = b->read_epoch = -1;
    if (at->proxy == GENERIC) b->write_epoch = memory->epoch, b->writer = at->warp, b->write_fence = f->fences[at->warp];
    return reported;
}
