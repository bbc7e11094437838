// Global and shared memory of both executors, with shadow state for every byte. See memory.py for the numpy version.

#include <stdint.h>
#include <string.h>

enum { READABLE = 1, WRITABLE = 2, WRITTEN = 4 };

struct finding {
    int32_t kind, place, program, warp, lane;
    uint64_t address;
};

struct findings {
    int32_t count, room;  // all findings, and the number of rows kept
    struct finding *rows;
};

// Byte ranges around tensors. Bytes between the elements of a tensor with gaps have no flags.
struct global {
    int32_t ranges;
    const uint64_t *start, *end;
    uint8_t **flags;
    int32_t **writers;  // program of the last write
};

// State of one byte of shared memory. An access is old when a barrier has passed since its epoch.
struct shadow {
    int32_t write_epoch, read_epoch;
    uint32_t readers;  // warps, as bits
    int16_t writer, reader;  // thread of the last access as 64 · warp + lane; reader −1: several lanes
    int32_t write_sync, read_sync;  // number of warp barriers that the warp had passed
    int32_t write_place;  // instruction of the last write, −1: none
    int16_t pending;  // 1 + warp of an asynchronous copy under way
    uint8_t value;
};

struct shared {
    int32_t size, epoch;
    struct shadow *bytes;
    int32_t *syncs;  // of each warp
    int64_t *loaded;  // bytes that were loaded, by the place of the instruction that wrote them; or null
    struct further *further;  // where matrix products and bulk copies access it too (asynchronous.h), or NULL
};

// Who accesses shared memory: a thread with its loads and stores, the asynchronous proxy, or mbarrier instructions.
enum { GENERIC, ASYNCHRONOUS, OBJECT };

// The instruction that accesses memory.
struct site {
    struct findings *found;
    int32_t place, program, warp;
    int32_t proxy;
};

static void report(const struct site *at, int kind, int lane, uint64_t address) {
    struct findings *found = at->found;
    if (found->count < found->room) {
        struct finding one = {kind, at->place, at->program, at->warp, lane, address};
        found->rows[found->count] = one;
    }
    found->count++;
}

static int further_read(const struct shared *memory, const struct site *at, int lane, uint64_t address, int reported);
static int further_write(const struct shared *memory, const struct site *at, int lane, uint64_t address, int reported);

static int range_of(const struct global *memory, uint64_t address, int size) {
    for (int i = 0; i < memory->ranges; i++)
        if (address >= memory->start[i] && address + size <= memory->end[i]) return i;
    return -1;
}

// Returns whether the access was done.
static int global_load(const struct global *memory, const struct site *at, int lane, uint64_t address, void *to, int size) {
    if (address % size) return report(at, MISALIGNED, lane, address), 0;
    int range = range_of(memory, address, size);
    if (range < 0) return report(at, OUTSIDE, lane, address), 0;
    uint64_t first = address - memory->start[range];
    for (int i = 0; i < size; i++) {
        uint8_t flags = memory->flags[range][first + i];
        if (!(flags & READABLE)) return report(at, OUTSIDE, lane, address + i), 0;
        if ((flags & WRITTEN) && memory->writers[range][first + i] != at->program)
            return report(at, READ_OF_OTHER_PROGRAM, lane, address + i), 0;
    }
    memcpy(to, (const void *)address, size);
    return 1;
}

static void global_store(const struct global *memory, const struct site *at, int lane, uint64_t address, const void *from, int size) {
    if (address % size) { report(at, MISALIGNED, lane, address); return; }
    int range = range_of(memory, address, size);
    if (range < 0) { report(at, OUTSIDE, lane, address); return; }
    uint64_t first = address - memory->start[range];
    for (int i = 0; i < size; i++) {
        uint8_t *flags = &memory->flags[range][first + i];
        int32_t *writer = &memory->writers[range][first + i];
        uint8_t *to = (uint8_t *)(address + i), value = ((const uint8_t *)from)[i];
        if (!(*flags & WRITABLE)) {
            report(at, *flags & READABLE ? INPUT_WRITTEN : OUTSIDE, lane, address + i);
            return;
        }
        if (*flags & WRITTEN && *writer != at->program) { report(at, WRITTEN_TWICE, lane, address + i); return; }
        if (*flags & WRITTEN && *to != value) report(at, UNEQUAL_BITS, lane, address + i);
        *flags |= WRITTEN;
        *writer = at->program;
        *to = value;
    }
}

static int shared_inside(const struct shared *memory, const struct site *at, int lane, uint64_t address, int size) {
    if (address % size) return report(at, MISALIGNED, lane, address), 0;
    if (address + size > (uint64_t)memory->size) return report(at, SHARED_OUTSIDE, lane, address), 0;
    return 1;
}

static int shared_load(const struct shared *memory, const struct site *at, int lane, uint64_t address, void *to, int size) {
    if (!shared_inside(memory, at, lane, address, size)) return 0;
    int sync = memory->syncs[at->warp], thread = 64 * at->warp + lane, reported = 0;
    for (int i = 0; i < size; i++) {
        struct shadow *b = &memory->bytes[address + i];
        if (!reported) {
            if (b->pending) report(at, COPY_UNDER_WAY, lane, address + i), reported = 1;
            else if (b->write_epoch == memory->epoch && b->writer != thread) {
                if (b->writer / 64 != at->warp) report(at, RACE, lane, address + i), reported = 1;
                else if (b->write_sync == sync) report(at, RACE_IN_WARP, lane, address + i), reported = 1;
            }
        }
        if (memory->further) reported = further_read(memory, at, lane, address + i, reported);
        uint32_t warp = 1u << at->warp;
        if (b->read_epoch != memory->epoch) b->readers = 0;
        b->reader = b->readers == 0 || (b->readers == warp && b->reader == thread) ? thread : -1;
        b->read_epoch = memory->epoch, b->readers |= warp, b->read_sync = sync;
        if (memory->loaded && b->write_place >= 0) memory->loaded[b->write_place]++;
        ((uint8_t *)to)[i] = b->value;
    }
    return 1;
}

// Marks a write without its value. `same`: the bytes keep their bits, which several warps may write.
static void shared_claim(const struct shared *memory, const struct site *at, int lane, uint64_t address, int size, const uint8_t *from) {
    int sync = memory->syncs[at->warp], thread = 64 * at->warp + lane, reported = 0;
    for (int i = 0; i < size; i++) {
        struct shadow *b = &memory->bytes[address + i];
        int same = from && b->value == from[i];
        if (!reported) {
            if (b->pending) report(at, COPY_UNDER_WAY, lane, address + i), reported = 1;
            else if (b->write_epoch == memory->epoch && b->writer != thread && !same) {
                if (b->writer / 64 != at->warp) report(at, RACE, lane, address + i), reported = 1;
                else if (b->write_sync == sync)
                    report(at, b->write_place == at->place ? UNEQUAL_BITS : RACE_IN_WARP, lane, address + i), reported = 1;
            }
        }
        if (!reported && b->read_epoch == memory->epoch && !same) {
            if (b->readers & ~(1u << at->warp)) report(at, RACE, lane, address + i), reported = 1;
            else if (b->readers && b->reader != thread && b->read_sync == sync)
                report(at, RACE_IN_WARP, lane, address + i), reported = 1;
        }
        if (memory->further) reported = further_write(memory, at, lane, address + i, reported);
        b->write_epoch = memory->epoch, b->writer = thread, b->write_sync = sync, b->write_place = at->place;
    }
}

static void shared_store(const struct shared *memory, const struct site *at, int lane, uint64_t address, const void *from, int size) {
    if (!shared_inside(memory, at, lane, address, size)) return;
    shared_claim(memory, at, lane, address, size, from);
    for (int i = 0; i < size; i++) memory->bytes[address + i].value = ((const uint8_t *)from)[i];
}
