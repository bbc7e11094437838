// Interpreter of decoded PTX. Rules of elementwise instructions are generated from rules.py.

#include <math.h>
#include <stdlib.h>

#define LANES 32
#define OPERANDS 16

// ---- The functions of the rules, as in numbers.py.

#define choose(p, a, b) ((p) ? (a) : (b))
#define to_u16(a) ((uint16_t)(a))
#define to_s16(a) ((int16_t)(a))
#define to_u32(a) ((uint32_t)(a))
#define to_s32(a) ((int32_t)(a))
#define to_u64(a) ((uint64_t)(a))
#define to_s64(a) ((int64_t)(a))
#define to_f32(a) ((float)(a))
#define to_f64(a) ((double)(a))
#define low_byte(a) ((int16_t)(int8_t)(a))

#define LEFT(name, type, bits) static inline type name(type a, uint32_t b) { return b >= bits ? 0 : (type)(a << b); }
#define RIGHT(name, type, bits) static inline type name(type a, uint32_t b) { return b >= bits ? (a < (type)0 ? (type)-1 : 0) : (type)(a >> b); }
LEFT(shift_left_u16, uint16_t, 16)
LEFT(shift_left_u32, uint32_t, 32)
LEFT(shift_left_u64, uint64_t, 64)
RIGHT(shift_right_u16, uint16_t, 16)
RIGHT(shift_right_u32, uint32_t, 32)
RIGHT(shift_right_u64, uint64_t, 64)
RIGHT(shift_right_s16, int16_t, 16)
RIGHT(shift_right_s32, int32_t, 32)
RIGHT(shift_right_s64, int64_t, 64)

static inline uint32_t divide_u32(uint32_t a, uint32_t b) { return b ? a / b : 0xFFFFFFFFu; }
static inline uint32_t remainder_u32(uint32_t a, uint32_t b) { return b ? a % b : a; }
static inline int32_t divide_s32(int32_t a, int32_t b) { return b ? (int32_t)((int64_t)a / b) : -1; }
static inline int32_t remainder_s32(int32_t a, int32_t b) { return b ? (int32_t)((int64_t)a % b) : a; }
static inline uint32_t ones(uint32_t a) { return __builtin_popcount(a); }
static inline uint32_t field_u32(uint32_t a, uint32_t b, uint32_t c) {
    return shift_right_u32(a, b & 255) & ~shift_left_u32(0xFFFFFFFFu, c & 255);
}
static inline int32_t field_s32(int32_t a, uint32_t b, uint32_t c) {
    uint32_t place = b & 255, length = c & 255, last = place + length - 1 > 31 ? 31 : place + length - 1;
    if (!length) return 0;
    uint32_t found = field_u32((uint32_t)a, b, c);
    return (int32_t)((a >> last) & 1 ? found | shift_left_u32(0xFFFFFFFFu, length) : found);
}
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t c) {
    uint64_t both = a | (uint64_t)b << 32;
    uint32_t result = 0;
    for (int place = 0; place < 4; place++) {
        uint32_t selector = c >> (4 * place) & 15, byte = both >> (8 * (selector & 7)) & 255;
        result |= (selector & 8 ? (byte >> 7) * 255 : byte) << (8 * place);
    }
    return result;
}

static inline uint32_t bits_f32(float a) { uint32_t b; memcpy(&b, &a, 4); return b; }
static inline float f32_bits(uint32_t b) { float a; memcpy(&a, &b, 4); return a; }
static inline uint64_t bits_f64(double a) { uint64_t b; memcpy(&b, &a, 8); return b; }
static inline double f64_bits(uint64_t b) { double a; memcpy(&a, &b, 8); return a; }
static inline float canonical_f32(float a) { return f32_bits(a != a ? 0x7FFFFFFFu : bits_f32(a)); }
static inline double canonical_f64(double a) { return f64_bits(a != a ? 0x7FF8000000000000u : bits_f64(a)); }
static inline float negative_f32(float a) { return f32_bits(bits_f32(a) ^ 0x80000000u); }
static inline float absolute_f32(float a) { return f32_bits(bits_f32(a) & 0x7FFFFFFFu); }
static inline double negative_f64(double a) { return f64_bits(bits_f64(a) ^ 1ull << 63); }
static inline double absolute_f64(double a) { return f64_bits(bits_f64(a) & ~(1ull << 63)); }
static inline float largest_f32(float a, float b) {
    float larger = a == b ? (bits_f32(a) >> 31 ? b : a) : a > b ? a : b;
    return canonical_f32(a != a ? b : b != b ? a : larger);
}
static inline float least_f32(float a, float b) { return canonical_f32(negative_f32(largest_f32(negative_f32(a), negative_f32(b)))); }
static inline double largest_f64(double a, double b) {
    double larger = a == b ? (bits_f64(a) >> 63 ? b : a) : a > b ? a : b;
    return canonical_f64(a != a ? b : b != b ? a : larger);
}
static inline double least_f64(double a, double b) { return canonical_f64(negative_f64(largest_f64(negative_f64(a), negative_f64(b)))); }
static inline float flush(float a) { return bits_f32(a) & 0x7F800000u ? a : f32_bits(bits_f32(a) & 0x80000000u); }
#define fma_f32(a, b, c) fmaf(a, b, c)
#define fma_f64(a, b, c) fma(a, b, c)
static inline double fma_odd(float a, float b, float c) {
    double product = (double)a * b, wide = c, total = product + wide, part = total - product;
    double error = (product - (total - part)) + (wide - part);
    uint64_t bits = bits_f64(total);
    if (error != 0 && !(bits & 1) && isfinite(total)) bits += (error > 0) == (total > 0) ? 1 : -1;
    return f64_bits(bits);
}
static inline float bf16(uint16_t a) { return f32_bits((uint32_t)a << 16); }
static inline uint16_t bf16_of(float a) {
    uint32_t bits = bits_f32(a);
    return a != a ? 0x7FFF : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
static inline uint16_t bf16_of_odd(double a) {
    float single = (float)a;
    uint32_t bits = bits_f32(single);
    if ((double)single != a && !(bits & 1) && isfinite(single)) bits += fabs((double)single) < fabs(a) ? 1 : -1;
    return bf16_of(f32_bits(bits));
}
static inline float f16(uint16_t a) {
    uint32_t sign = (uint32_t)(a & 0x8000) << 16, exponent = a >> 10 & 31, fraction = a & 1023;
    if (exponent == 31) return fraction ? f32_bits(0x7FFFFFFFu) : f32_bits(sign | 0x7F800000u);
    if (exponent) return f32_bits(sign | (exponent + 112) << 23 | fraction << 13);
    return f32_bits(sign | bits_f32((float)fraction * 0x1p-24f));
}
static inline uint16_t f16_of(float a) {
    uint32_t bits = bits_f32(a), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFFu;
    if (a != a) return 0x7FFF;
    if (size >= 0x477FF000u) return (uint16_t)(sign | 0x7C00);  // rounds to 2^16 or more
    if (size < 0x38800000u)  // subnormal: adding 2^-1 rounds to multiples of 2^-24
        return (uint16_t)(sign | (bits_f32(f32_bits(size) + 0.5f) - bits_f32(0.5f)));
    return (uint16_t)(sign | ((size + 0xFFF + (size >> 13 & 1)) >> 13) - (112 << 10));
}
static inline uint32_t tf32_of(float a) { return isfinite(a) ? (bits_f32(a) + 0x1000) & 0xFFFFE000u : bits_f32(a); }
static inline float power_of_two(float a) {
    if (a != a) return a;
    double x = a < -300.0f ? -300.0f : a > 300.0f ? 300.0f : a, whole = rint(x), rest = x - whole;
    double total = POWERS[13];
    for (int i = 12; i >= 0; i--) total = total * rest + POWERS[i];
    return (float)(total * f64_bits((uint64_t)((int64_t)whole + 1023) << 52));
}
static inline double reciprocal_of_high_half(double a) {
    uint64_t high = 0xFFFFFFFF00000000u;
    return f64_bits(bits_f64(canonical_f64(1.0 / f64_bits(bits_f64(a) & high))) & high);
}

// ---- Programs. Registers are rows of 32 lanes; 64-bit rows take two units of 128 bytes.

struct instruction {
    int32_t op, place, predicate, negated, used;  // predicate −1: none; used: number of rows without that of the address
    int32_t rows[OPERANDS];  // register rows
    int32_t numbers[4];  // sizes, targets, modes
    int64_t offset;
};

struct copy {
    int32_t group, lane, address, size, place;
    uint8_t bytes[16];
};

struct warp {
    uint32_t *file;
    uint32_t mask[LANES];  // of paths that have diverged, by increasing place
    int32_t at[LANES];
    int32_t paths;
    int32_t group;  // of asynchronous copies that is open
    int32_t copies, room;
    struct copy *copy;
    int32_t waiting;  // place of the barrier, −1: none
    int32_t blocked;  // place of a wait for a barrier object, −1: none
    struct products *products;  // NULL: no matrix product of a warpgroup
};

// Registers of an instruction as 2 · row + whether it is 64-bit, ended by −1.
struct registers {
    int32_t read[140], written[140];  // MOST in registers.py
};

struct block {
    const struct instruction *code;
    const struct registers *registers;
    const struct trace *trace;
    struct global *global;
    struct shared *shared;
    struct findings *found;
    int64_t *counts;
    int64_t budget;
    int32_t program;
    int32_t units, map_count;  // of a register file; maps of tensors
    const int32_t *lists;  // registers of matrix products of a warpgroup
    const struct map *maps;
    struct course *courses;  // of each warpgroup
    struct objects *objects;
};

// products.c and bulk.c
static void use_registers(const struct site *, struct warp *, const struct instruction *);
static int asynchronous(struct block *, const struct site *, struct warp *, const struct instruction *, uint32_t);

#define ROW(i) (w->file + 32 * (int64_t)in->rows[i])
#define READ_pred(r, l) (r)[l]
#define READ_u16(r, l) ((uint16_t)(r)[l])
#define READ_s16(r, l) ((int16_t)(r)[l])
#define READ_u32(r, l) (r)[l]
#define READ_s32(r, l) ((int32_t)(r)[l])
#define READ_f32(r, l) ((float *)(r))[l]
#define READ_u64(r, l) ((uint64_t *)(r))[l]
#define READ_s64(r, l) ((int64_t *)(r))[l]
#define READ_f64(r, l) ((double *)(r))[l]
#define WRITE(type, store) \
    if (mask == 0xFFFFFFFFu) for (int l = 0; l < LANES; l++) ((type *)d)[l] = (store)t[l]; \
    else for (int l = 0; l < LANES; l++) if (mask >> l & 1) ((type *)d)[l] = (store)t[l];

static void elementwise(const struct instruction *in, struct warp *w, uint32_t mask) {
    uint32_t *d = ROW(0);
    const uint32_t *ra = ROW(1), *rb = ROW(2), *rc = ROW(3);
    switch (in->op) {
        // GENERATED
    }
}

static void load(struct block *k, const struct site *at, struct warp *w, const struct instruction *in, uint32_t mask, int is_shared) {
    int count = in->numbers[0], width = in->numbers[1];  // elements, bytes; then whether signed, and 64-bit registers
    const uint32_t *address = ROW(OPERANDS - 1);
    uint8_t bytes[32];
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        int done;
        if (is_shared) done = shared_load(k->shared, at, l, (uint64_t)(uint32_t)(address[l] + in->offset), bytes, count * width);
        else done = global_load(k->global, at, l, ((const uint64_t *)address)[l] + in->offset, bytes, count * width);
        if (!done) continue;  // the register keeps what it held
        for (int i = 0; i < count; i++) {
            uint64_t value = 0;
            memcpy(&value, bytes + i * width, width);
            if (in->numbers[3]) ((uint64_t *)ROW(i))[l] = in->numbers[2] && width == 4 ? (uint64_t)(int64_t)(int32_t)value : value;
            else ROW(i)[l] = (uint32_t)value;
        }
    }
}

static void store(struct block *k, const struct site *at, struct warp *w, const struct instruction *in, uint32_t mask, int is_shared) {
    int count = in->numbers[0], width = in->numbers[1];
    const uint32_t *address = ROW(OPERANDS - 1);
    uint8_t bytes[32];
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        for (int i = 0; i < count; i++) memcpy(bytes + i * width, in->numbers[3] ? (void *)&((uint64_t *)ROW(i))[l] : (void *)&ROW(i)[l], width);
        if (is_shared) shared_store(k->shared, at, l, (uint64_t)(uint32_t)(address[l] + in->offset), bytes, count * width);
        else global_store(k->global, at, l, ((const uint64_t *)address)[l] + in->offset, bytes, count * width);
    }
}

static void load_matrices(struct block *k, const struct site *at, struct warp *w, const struct instruction *in) {
    int count = in->numbers[0], transposed = in->numbers[1];
    const uint32_t *address = ROW(OPERANDS - 1);
    for (int i = 0; i < count; i++) {
        uint16_t m[8][8];
        uint32_t got[LANES];
        memset(m, 0xFF, sizeof m);
        for (int r = 0; r < 8; r++)
            shared_load(k->shared, at, 8 * i + r, (uint64_t)(uint32_t)(address[8 * i + r] + in->offset), m[r], 16);
        for (int l = 0; l < LANES; l++) {
            int g = l >> 2, t = 2 * (l & 3);
            got[l] = transposed ? m[t][g] | (uint32_t)m[t + 1][g] << 16 : m[g][t] | (uint32_t)m[g][t + 1] << 16;
        }
        memcpy(ROW(i), got, sizeof got);
    }
}

static void store_matrices(struct block *k, const struct site *at, struct warp *w, const struct instruction *in) {
    int count = in->numbers[0], transposed = in->numbers[1];
    const uint32_t *address = ROW(OPERANDS - 1);
    for (int i = 0; i < count; i++) {
        uint16_t m[8][8];
        for (int l = 0; l < LANES; l++) {
            int g = l >> 2, t = 2 * (l & 3);
            for (int h = 0; h < 2; h++) {
                uint16_t value = ROW(i)[l] >> 16 * h;
                if (transposed) m[t + h][g] = value;
                else m[g][t + h] = value;
            }
        }
        for (int r = 0; r < 8; r++)
            shared_store(k->shared, at, 8 * i + r, (uint64_t)(uint32_t)(address[8 * i + r] + in->offset), m[r], 16);
    }
}

// Products are exact in fp64; their sum with the accumulator is rounded once to fp32.
static void multiply(struct warp *w, const struct instruction *in) {
    int tf32 = in->numbers[0] == 2, depth = tf32 ? 8 : 16;
    double a[16][16], b[16][8];
    float c[4][LANES];
    for (int l = 0; l < LANES; l++) {
        int g = l >> 2, t = l & 3;
        if (tf32) {
            for (int i = 0; i < 4; i++) a[g + 8 * (i & 1)][t + 4 * (i >> 1)] = f32_bits(ROW(4 + i)[l] & 0xFFFFE000u);
            for (int i = 0; i < 2; i++) b[t + 4 * i][g] = f32_bits(ROW(8 + i)[l] & 0xFFFFE000u);
            continue;
        }
        for (int i = 0; i < 4; i++)
            for (int h = 0; h < 2; h++) {
                uint16_t x = ROW(4 + i)[l] >> 16 * h;
                a[g + 8 * (i & 1)][2 * t + h + 8 * (i >> 1)] = in->numbers[0] ? f16(x) : bf16(x);
            }
        for (int i = 0; i < 2; i++)
            for (int h = 0; h < 2; h++) {
                uint16_t x = ROW(8 + i)[l] >> 16 * h;
                b[2 * t + h + 8 * i][g] = in->numbers[0] ? f16(x) : bf16(x);
            }
    }
    for (int m = 0; m < 16; m++) {
        double sums[8] = {0};
        for (int i = 0; i < depth; i++)
            for (int n = 0; n < 8; n++) sums[n] += a[m][i] * b[i][n];
        for (int n = 0; n < 8; n++) {
            int l = 4 * (m & 7) + (n >> 1), i = 2 * (m >> 3) + (n & 1);
            c[i][l] = canonical_f32((float)(sums[n] + ((float *)ROW(10 + i))[l]));
        }
    }
    for (int i = 0; i < 4; i++) memcpy(ROW(i), c[i], sizeof c[i]);
}

static void shuffle(const struct site *at, struct warp *w, const struct instruction *in, uint32_t mask) {
    const uint32_t *a = ROW(1), *b = ROW(2), *c = ROW(3), *members = ROW(4);
    uint32_t got[LANES];
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        int by = b[l] & 31, segment = c[l] >> 8 & 31, last = (l & segment) | (c[l] & 31 & ~segment), from, inside;
        switch (in->numbers[0]) {
            case 0: from = l - by, inside = from >= last; break;  // up
            case 1: from = l + by, inside = from <= last; break;  // down
            case 2: from = l ^ by, inside = from <= last; break;  // bfly
            default: from = (l & segment) | (by & ~segment), inside = from <= last;  // idx
        }
        if (!inside) from = l;
        if (!(mask >> from & 1) || mask != members[l]) report(at, CONVERGENCE, l, from);
        got[l] = a[from];
    }
    for (int l = 0; l < LANES; l++) if (mask >> l & 1) ROW(0)[l] = got[l];
}

static void copy_async(struct block *k, const struct site *at, struct warp *w, const struct instruction *in, uint32_t mask) {
    int size = in->numbers[0], sized = in->numbers[1];
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        struct copy one = {w->group, l, (int32_t)(ROW(0)[l] + in->offset), size, in->place, {0}};
        int given = sized ? (int)ROW(2)[l] : size;
        if (!shared_inside(k->shared, at, l, (uint32_t)one.address, size)) continue;
        uint64_t from = ((uint64_t *)ROW(1))[l] + ((int64_t)in->numbers[2]);
        if (given < 0 || given > size) { report(at, OUTSIDE, l, from); continue; }
        if (from % size) report(at, MISALIGNED, l, from);
        if (given == size) { if (!global_load(k->global, at, l, from, one.bytes, size)) continue; }
        else for (int i = 0; i < given; i++) global_load(k->global, at, l, from + i, one.bytes + i, 1);
        shared_claim(k->shared, at, l, (uint32_t)one.address, size, 0);
        for (int i = 0; i < size; i++) k->shared->bytes[one.address + i].pending = 1 + at->warp;
        if (w->copies == w->room) w->copy = realloc(w->copy, sizeof(struct copy) * (w->room = 2 * w->room + 64));
        w->copy[w->copies++] = one;
    }
}

// Completes all groups of a warp except the last `kept`.
static void wait_for_copies(struct block *k, const struct site *at, struct warp *w, int kept) {
    int left = 0;
    for (int i = 0; i < w->copies; i++) {
        struct copy *one = &w->copy[i];
        if (one->group >= w->group - kept) { w->copy[left++] = *one; continue; }
        for (int j = 0; j < one->size; j++) {
            struct shadow *b = &k->shared->bytes[one->address + j];
            b->value = one->bytes[j], b->pending = 0;
            b->write_epoch = k->shared->epoch, b->writer = 64 * at->warp + one->lane;
            b->write_sync = k->shared->syncs[at->warp];
            if (k->shared->further) further_write(k->shared, at, one->lane, one->address + j, 1);
        }
    }
    w->copies = left;
}

static void note(struct seen *to, const struct warp *w, const int32_t *registers, uint32_t mask) {
    for (; *registers >= 0; registers++) {
        const uint32_t *row = w->file + 32 * (int64_t)(*registers >> 1);
        for (int l = 0; l < LANES; l++)
            if (mask >> l & 1) digest(to, *registers & 1 ? ((const uint64_t *)row)[l] : row[l]);
    }
}

static void take_path(struct warp *w, int place, uint32_t mask) {
    if (!mask) return;
    int i = 0;
    while (i < w->paths && w->at[i] < place) i++;
    if (i < w->paths && w->at[i] == place) { w->mask[i] |= mask; return; }
    for (int j = w->paths++; j > i; j--) w->at[j] = w->at[j - 1], w->mask[j] = w->mask[j - 1];
    w->at[i] = place, w->mask[i] = mask;
}

// Runs a warp until a barrier or its end. The path at the earliest place goes first, so that paths meet again.
static void run_warp(struct block *k, struct warp *w, int number) {
    while (w->paths) {
        int pc = w->at[0];
        uint32_t path = w->mask[0], mask = path;
        int next = w->paths > 1 ? w->at[1] : INT32_MAX;
        for (;;) {
            const struct instruction *in = &k->code[pc];
            struct site at = {k->found, in->place, k->program, number};
            if (--k->budget < 0) { report(&at, UNFINISHED, -1, 0); w->paths = 0; return; }
            k->counts[pc]++;
            mask = path;
            if (in->predicate >= 0) {
                const uint32_t *p = w->file + 32 * (int64_t)in->predicate;
                for (int l = 0; l < LANES; l++) if ((p[l] & 1) == (uint32_t)in->negated) mask &= ~(1u << l);
            }
            int64_t noted = k->trace->read ? (int64_t)number * k->trace->places + pc : -1;
            struct seen before = {0};
            if (noted >= 0) before = k->trace->read[noted], note(k->trace->read + noted, w, k->registers[pc].read, path);
            pc++;
            if (w->products && mask) use_registers(&at, w, in);
            switch (in->op) {
                case OP_BRANCH:
                    if (noted >= 0) digest(k->trace->written + noted, mask);
                    if (mask == path) pc = in->numbers[0];
                    else if (mask) {
                        for (int j = 1; j < w->paths; j++) w->at[j - 1] = w->at[j], w->mask[j - 1] = w->mask[j];
                        w->paths--;
                        take_path(w, in->numbers[0], mask), take_path(w, pc, path & ~mask);
                        goto again;
                    }
                    break;
                case OP_RETURN:
                    path &= ~mask;
                    if (!path) {
                        for (int j = 1; j < w->paths; j++) w->at[j - 1] = w->at[j], w->mask[j - 1] = w->mask[j];
                        w->paths--;
                        goto again;
                    }
                    break;
                case OP_BARRIER:
                    if (mask != 0xFFFFFFFFu) report(&at, BARRIER, -1, mask);
                    w->at[0] = pc, w->mask[0] = path, w->waiting = in->place;
                    return;
                case OP_WARP_BARRIER:
                    if (mask != ROW(0)[0]) report(&at, CONVERGENCE, -1, mask);
                    k->shared->syncs[number]++;
                    break;
                case OP_LOAD_GLOBAL: load(k, &at, w, in, mask, 0); break;
                case OP_LOAD_SHARED: load(k, &at, w, in, mask, 1); break;
                case OP_STORE_GLOBAL: store(k, &at, w, in, mask, 0); break;
                case OP_STORE_SHARED: store(k, &at, w, in, mask, 1); break;
                case OP_LOAD_MATRICES:
                    if (mask != 0xFFFFFFFFu) report(&at, CONVERGENCE, -1, mask);
                    load_matrices(k, &at, w, in);
                    break;
                case OP_STORE_MATRICES:
                    if (mask != 0xFFFFFFFFu) report(&at, CONVERGENCE, -1, mask);
                    store_matrices(k, &at, w, in);
                    break;
                case OP_MULTIPLY:
                    if (mask != 0xFFFFFFFFu) report(&at, CONVERGENCE, -1, mask);
                    multiply(w, in);
                    break;
                case OP_SHUFFLE: shuffle(&at, w, in, mask); break;
                case OP_REDUCE: {
                    int32_t *from = (int32_t *)ROW(1), found = in->numbers[0] == 0 ? 0 : in->numbers[0] == 1 ? INT32_MIN : INT32_MAX;
                    if (mask != ROW(2)[0]) report(&at, CONVERGENCE, -1, mask);
                    for (int l = 0; l < LANES; l++) {
                        if (!(mask >> l & 1)) continue;
                        if (in->numbers[0] == 0) found += from[l];
                        else if (in->numbers[0] == 1 ? from[l] > found : from[l] < found) found = from[l];
                    }
                    for (int l = 0; l < LANES; l++) if (mask >> l & 1) ROW(0)[l] = (uint32_t)found;
                    break;
                }
                case OP_COPY: copy_async(k, &at, w, in, mask); break;
                case OP_COMMIT:
                    if (mask != path) report(&at, CONVERGENCE, -1, mask);
                    w->group++;
                    break;
                case OP_WAIT:
                    if (mask != path) report(&at, CONVERGENCE, -1, mask);
                    wait_for_copies(k, &at, w, in->numbers[0]);
                    break;
                default:
                    if (in->op < OP_ELECT) { elementwise(in, w, mask); break; }
                    if (asynchronous(k, &at, w, in, mask)) break;
                    k->budget++, k->counts[pc - 1]--;  // tried again when other warps have run
                    if (noted >= 0) k->trace->read[noted] = before;
                    w->at[0] = pc - 1, w->mask[0] = path, w->blocked = in->place;
                    return;
            }
            if (noted >= 0) note(k->trace->written + noted, w, k->registers[in - k->code].written, mask);
            // Another path has been reached, or overtaken by a jump forwards.
            if (pc >= next) {
                for (int j = 1; j < w->paths; j++) w->at[j - 1] = w->at[j], w->mask[j - 1] = w->mask[j];
                w->paths--;
                take_path(w, pc, path);
                goto again;
            }
        }
    again:;
    }
}
