// Matrix products of a warpgroup (wgmma). Each warp computes its quarter of the rows; both factors are read as a whole.

#define MOST_CHUNKS (2 * (64 + 256))

// What a warp did last with a register, behind the last wgmma.fence.
enum { NOTHING, USED, FACTOR, ACCUMULATOR };  // ACCUMULATOR + a number for the shape of the product

struct product {
    int32_t group, place, chunks;
    int32_t chunk[MOST_CHUNKS];  // addresses of 16 bytes in shared memory
};

// The products of a warp that are under way, and the state of its registers.
struct products {
    int32_t group;  // that is open
    int32_t count, room;
    struct product *product;
    int32_t *under_way;  // by register: 1 + group of a product
    uint8_t *last;
};

// The instructions for a warpgroup since the last barrier; its warps must execute the same ones.
struct step {
    int32_t place;
    uint64_t a, b;
};

struct course {
    int32_t steps, room;
    struct step *step;
    int32_t done[4];
};

static struct products *new_products(int units) {
    struct products *p = calloc(1, sizeof *p);
    p->under_way = malloc(sizeof(int32_t) * units), p->last = malloc(units);
    return p;
}

static void start_products(struct products *p, int units) {
    memset(p->under_way, 0, sizeof(int32_t) * units), memset(p->last, USED, units);
    p->group = p->count = 0;
}

static void free_products(struct products *p) {
    if (p) free(p->product), free(p->under_way), free(p->last), free(p);
}

// An ordinary instruction accesses its registers. A move only gives a value another name: LLVM puts some behind
// wgmma.fence, and ptxas removes them or puts them in front of it.
static void use_registers(const struct site *at, struct warp *w, const struct instruction *in) {
    struct products *p = w->products;
    int reported = 0, moves = in->op < OP_BRANCH && in->numbers[0];
    for (int i = 0; i <= in->used; i++) {
        int row = in->rows[i < in->used ? i : OPERANDS - 1];
        if (p->under_way[row] && !reported) report(at, PRODUCT_UNDER_WAY, -1, row), reported = 1;
        if (!moves) p->last[row] = USED;
    }
    if (moves) p->last[in->rows[0]] = p->last[in->rows[1]];
}

// One more instruction of a warpgroup.
static void note_step(struct block *k, const struct site *at, uint64_t a, uint64_t b) {
    struct course *t = &k->courses[at->warp / 4];
    int32_t *done = &t->done[at->warp % 4];
    if (*done == t->steps) {
        if (t->steps == t->room) t->step = realloc(t->step, sizeof *t->step * (t->room = 2 * t->room + 64));
        struct step one = {at->place, a, b};
        t->step[t->steps++] = one;
    }
    const struct step *other = &t->step[(*done)++];
    if (other->place != at->place || other->a != a || other->b != b) report(at, WARPGROUP, -1, other->place);
}

// All warps have met or ended: they must have executed equally many instructions of their warpgroup.
static void end_courses(struct block *k, int warps) {
    for (int g = 0; g < warps / 4; g++) {
        struct course *t = &k->courses[g];
        for (int i = 0; i < 4; i++) {
            struct site at = {k->found, 0, k->program, 4 * g + i};
            if (t->done[i] < t->steps) at.place = t->step[t->done[i]].place, report(&at, WARPGROUP, -1, 0);
            t->done[i] = 0;
        }
        t->steps = 0;
    }
}

// The addresses of the 16-byte parts of a factor, or 0 and a finding. In order of rows, then of columns; of a transposed
// factor in order of columns, then of rows.
static int chunks_of(const struct site *at, uint64_t descriptor, int rows, int transposed, int32_t *chunk) {
    int32_t start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
    int32_t stride = (descriptor >> 32 & 0x3FFF) << 4, mode = descriptor >> 62;
    int32_t width = mode ? 256 >> mode : 16;  // bytes of a row of the pattern
    if (descriptor & 0x3FFFC000C000C000u) return report(at, DESCRIPTOR, -1, descriptor), 0;
    int count = 0;
    for (int i = 0; i < (transposed ? 16 : rows); i++)
        for (int j = 0; j < (transposed ? rows / 8 : 2); j++) {
            int32_t offset = i % 8 * width;
            if (!mode) offset += transposed ? j * stride + i / 8 * leading : j * leading + i / 8 * stride;
            else if (!transposed) offset += 16 * j + i / 8 * stride;
            else offset += j % (width / 16) * 16 + j / (width / 16) * leading + i / 8 * stride;
            int32_t address = start + offset;
            chunk[count++] = address ^ ((address >> 7 & (width / 16 - 1)) << 4);
        }
    return count;
}

static double factor_of(const uint8_t *bytes, int kind) {
    uint32_t word;
    uint16_t half;
    if (kind == 2) return memcpy(&word, bytes, 4), (double)f32_bits(word & 0xFFFFE000u);
    memcpy(&half, bytes, 2);
    return kind ? f16(half) : bf16(half);
}

// Reads a factor [rows, depth] from shared memory. Only the first finding is reported. A trace has its bytes as read.
static void read_factor(
    struct block *k, struct site at, const int32_t *chunk, int rows, int transposed, int kind, double *to, int pitch, int depth_first,
    struct seen *seen
) {
    struct findings quiet = {0};
    int32_t before = at.found->count;
    int across = transposed ? rows / 8 : 2, size = kind == 2 ? 4 : 2, each = 16 / size;
    for (int i = 0; i < (transposed ? 16 : rows); i++)
        for (int j = 0; j < across; j++) {
            uint8_t bytes[16];
            memset(bytes, 0xFF, sizeof bytes);
            if (at.found->count != before) at.found = &quiet;
            shared_load(k->shared, &at, -1, (uint64_t)(uint32_t)chunk[i * across + j], bytes, 16);
            for (int h = 0; seen && h < 4; h++) {
                uint32_t word;
                memcpy(&word, bytes + 4 * h, 4), digest(seen, word);
            }
            for (int e = 0; e < each; e++) {
                int row = transposed ? each * j + e : i, column = transposed ? i : each * j + e;
                to[depth_first ? column * pitch + row : row * pitch + column] = factor_of(bytes + size * e, kind);
            }
        }
}

// Products are exact in fp64; their sum with the accumulator is rounded once to fp32.
static void start_product(struct block *k, struct site at, struct warp *w, const struct instruction *in) {
    struct products *p = w->products;
    int kind = in->numbers[0], columns = in->numbers[1], flags = in->numbers[2], depth = kind == 2 ? 8 : 16;
    int results = columns / 2, shape = ACCUMULATOR + columns / 8 + (kind == 2 ? 64 : 0), under = 0, behind = 0;
    const int32_t *rows = k->lists + in->numbers[3];
    uint64_t a_at = flags & 1 ? 0 : ((uint64_t *)ROW(1))[0], b_at = ((uint64_t *)ROW(2))[0];
    for (int l = 1; l < LANES; l++)
        if (((uint64_t *)ROW(2))[l] != b_at || (!(flags & 1) && ((uint64_t *)ROW(1))[l] != a_at) || (ROW(0)[l] ^ ROW(0)[0]) & 1)
            { report(&at, CONVERGENCE, l, b_at); break; }
    note_step(k, &at, a_at, b_at);
    for (int i = 0; i < results + (flags & 1 ? 4 : 0); i++) {
        int row = rows[i], own = i < results ? shape : FACTOR;
        under |= p->under_way[row] && p->last[row] != own;
        behind |= !p->under_way[row] && p->last[row] != NOTHING && p->last[row] != own;
        p->under_way[row] = 1 + p->group, p->last[row] = own;
    }
    if (under) report(&at, PRODUCT_UNDER_WAY, -1, 0);
    else if (behind) report(&at, REGISTER_FENCE, -1, 0);
    if (p->count == p->room) p->product = realloc(p->product, sizeof *p->product * (p->room = 2 * p->room + 16));
    struct product *one = &p->product[p->count++];
    one->group = p->group, one->place = in->place, one->chunks = 0;
    at.proxy = ASYNCHRONOUS;
    double a[64][16] = {{0}}, b[16][256] = {{0}}, sums[16][256] = {{0}};
    int quarter = 16 * (at.warp % 4);
    struct seen *seen = k->trace->read ? k->trace->read + ((int64_t)at.warp * k->trace->places + (in - k->code)) : NULL;
    if (flags & 1) {
        for (int l = 0; l < LANES; l++)
            for (int i = 0; i < 4; i++)
                for (int h = 0; h < (kind == 2 ? 1 : 2); h++) {
                    uint32_t value = (w->file + 32 * (int64_t)rows[results + i])[l] >> 16 * h;
                    int column = kind == 2 ? (l & 3) + 4 * (i >> 1) : 2 * (l & 3) + h + 8 * (i >> 1);
                    a[quarter + (l >> 2) + 8 * (i & 1)][column] = factor_of((uint8_t *)&value, kind);
                }
    } else {
        int found = chunks_of(&at, a_at, 64, !!(flags & 2), one->chunk);
        if (found) read_factor(k, at, one->chunk, 64, !!(flags & 2), kind, &a[0][0], 16, 0, seen);
        one->chunks = found;
    }
    int found = chunks_of(&at, b_at, columns, !!(flags & 4), one->chunk + one->chunks);
    if (found) read_factor(k, at, one->chunk + one->chunks, columns, !!(flags & 4), kind, &b[0][0], 256, 1, seen);
    one->chunks += found;
    for (int i = 0; i < one->chunks; i++)
        for (int j = 0; j < 16 && one->chunk[i] + j < k->shared->size; j++)
            k->shared->further->bytes[one->chunk[i] + j].products++;
    double sign = (flags & 8 ? -1.0 : 1.0) * (flags & 16 ? -1.0 : 1.0);
    for (int m = 0; m < 16; m++)
        for (int i = 0; i < depth; i++) {
            double factor = sign * a[quarter + m][i];
            for (int n = 0; n < columns; n++) sums[m][n] += factor * b[i][n];
        }
    int added = ROW(0)[0] & 1;
    for (int i = 0; i < results; i++) {
        float *d = (float *)(w->file + 32 * (int64_t)rows[i]);
        for (int l = 0; l < LANES; l++) {
            double sum = sums[(l >> 2) + 8 * (i >> 1 & 1)][8 * (i >> 2) + 2 * (l & 3) + (i & 1)];
            d[l] = canonical_f32((float)(added ? sum + d[l] : sum));
        }
    }
}

// Completes all groups of a warp except the last `kept`. The factors have been read up to now.
static void wait_for_products(struct block *k, const struct site *at, struct warp *w, int kept) {
    struct products *p = w->products;
    int left = 0;
    for (int i = 0; i < p->count; i++) {
        struct product *one = &p->product[i];
        if (one->group >= p->group - kept) { p->product[left++] = *one; continue; }
        for (int c = 0; c < one->chunks; c++)
            for (int j = 0; j < 16 && one->chunk[c] + j < k->shared->size; j++) {
                struct shadow *b = &k->shared->bytes[one->chunk[c] + j];
                k->shared->further->bytes[one->chunk[c] + j].products--;
                if (b->read_epoch != k->shared->epoch) b->readers = 0, b->reader = -1;
                b->read_epoch = k->shared->epoch, b->readers |= 1u << at->warp;
                b->read_sync = -1;  // all lanes of the warp have waited
            }
    }
    p->count = left;
    for (int i = 0; i < k->units; i++)
        if (p->under_way[i] && p->under_way[i] - 1 < p->group - kept) p->under_way[i] = 0;
}
