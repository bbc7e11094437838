// Execution of decoded gfx942 instructions, wave by wave. `vectors.py` does the same with numpy.

struct operand {
    i32 kind, index, words, flags;
    u64 value;
};

struct instruction {
    i32 handler, rule, sources, line, m[12];
    struct operand result, second, source[4];
};

struct launch {
    i32 count, entry, grid, warps, reverse, preloaded, program_register, registers;
    u32 poison;
    u64 arguments;
    i32 argument_bytes, private_bytes;  // private: of each lane
    u64 limit;
};

enum { LANES = 64, QUEUE = 64 };

typedef u32 lanes[LANES];

// An access to memory that the wave has not waited for.
struct pending {
    i32 queue, scalar, index, words, write, bytes, parts;  // queue: 0 vector memory, 1 LDS, 2 scalar memory
    u64 exec;
    u32 address[2][LANES];
};

struct wave {
    lanes *v, *private;
    u32 s[128];
    i32 scc, pc, done, first[2], length[2];  // of both queues: vmcnt, lgkmcnt
    i32 waiting;  // loads under way in all
    uint8_t v_pending[512], s_pending[128];
    struct pending queue[2][QUEUE];
};

struct machine {
    const struct instruction *code;
    const struct launch *launch;
    const struct global *global;
    struct shared *shared;
    struct site at;
    struct wave *wave;
    u64 *counts, *conflicts;
    const struct trace *trace;
};

static inline u64 exec_of(const struct wave *w) { return (u64)w->s[EXEC + 1] << 32 | w->s[EXEC]; }
static inline u64 pair(const struct wave *w, int index) { return (u64)w->s[index + 1] << 32 | w->s[index]; }
static inline void set_pair(struct wave *w, int index, u64 value) { w->s[index] = value, w->s[index + 1] = value >> 32; }

// Outstanding accesses

static void check_idle(struct machine *m, const struct operand *o, int allowed) {
    struct wave *w = m->wave;
    if (!w->waiting || (o->kind != VECTOR && o->kind != SCALAR)) return;
    const uint8_t *state = o->kind == VECTOR ? w->v_pending : w->s_pending;
    for (int i = 0; i < o->words; i++)
        if (state[o->index + i] && state[o->index + i] != allowed) {
            report(&m->at, HAZARD, -1, o->index + i);
            return;
        }
}

static void finish_oldest(struct wave *w, int q, int place) {
    struct pending *p = &w->queue[q][(w->first[q] + place) % QUEUE];
    if (p->words) {
        uint8_t *state = p->scalar ? w->s_pending : w->v_pending;
        for (int i = 0; i < p->words; i++) state[p->index + i] = 0;
        p->words = 0, w->waiting--;
    }
    p->parts = 0;
}

static void wait_for(struct wave *w, int q, int allowed) {
    // LDS accesses finish in order, scalar loads in any order: these are only certain to have arrived at 0.
    if (q == 0 || allowed == 0) {
        while (w->length[q] > allowed) {
            finish_oldest(w, q, 0);
            w->first[q] = (w->first[q] + 1) % QUEUE, w->length[q]--;
        }
        return;
    }
    int later = 0;
    for (int i = w->length[q] - 1; i >= 0; i--) {
        struct pending *p = &w->queue[q][(w->first[q] + i) % QUEUE];
        if (p->queue == 1 && later++ >= allowed) finish_oldest(w, q, i);
    }
}

static struct pending *issue(struct machine *m, int kind, const struct operand *target, u64 exec) {
    struct wave *w = m->wave;
    int q = kind == 0 ? 0 : 1;
    if (w->length[q] == QUEUE) {  // the counter is full: the hardware waits
        finish_oldest(w, q, 0);
        w->first[q] = (w->first[q] + 1) % QUEUE, w->length[q]--;
    }
    struct pending *p = &w->queue[q][(w->first[q] + w->length[q]++) % QUEUE];
    p->queue = kind, p->exec = exec, p->parts = 0, p->words = 0;
    if (target && target->kind) {
        p->scalar = target->kind == SCALAR, p->index = target->index, p->words = target->words;
        uint8_t *state = p->scalar ? w->s_pending : w->v_pending;
        for (int i = 0; i < p->words; i++) state[p->index + i] = kind + 1;
        w->waiting++;
    }
    return p;
}

// An LDS access that is not waited for may happen after the barrier.
static void carry_over(struct machine *m, struct wave *w) {
    u32 bin[4];
    for (int i = 0; i < w->length[1]; i++) {
        struct pending *p = &w->queue[1][(w->first[1] + i) % QUEUE];
        for (int part = 0; part < p->parts; part++)
            for (int l = 0; l < LANES; l++) {
                if (!(p->exec >> l & 1)) continue;
                u64 address = p->address[part][l];
                m->shared->syncs[m->at.warp]++;
                if (address + p->bytes > (u64)m->shared->size || address % p->bytes) continue;
                if (p->write) shared_claim(m->shared, &m->at, l, address, p->bytes, 0);
                else shared_load(m->shared, &m->at, l, address, bin, p->bytes);
            }
    }
}

// Operands

static inline u32 part_of(u32 x, int part, int extend) {
    switch (part) {
    case WORD_0: return extend ? (u32)(i32)(int16_t)x : x & 0xffff;
    case WORD_1: return extend ? (u32)((i32)x >> 16) : x >> 16;
    case BYTE_0: return extend ? (u32)(i32)(int8_t)x : x & 255;
    case BYTE_1: return extend ? (u32)(i32)(int8_t)(x >> 8) : x >> 8 & 255;
    case BYTE_2: return extend ? (u32)(i32)(int8_t)(x >> 16) : x >> 16 & 255;
    case BYTE_3: return extend ? (u32)((i32)x >> 24) : x >> 24;
    default: return x;
    }
}

static u64 scalar_value(const struct wave *w, const struct operand *o) {
    switch (o->kind) {
    case SCALAR: return o->words == 2 ? pair(w, o->index) : w->s[o->index];
    case CONDITION: return w->scc;
    default: return o->value;
    }
}

// Returns 64 values of 4 or 8 bytes: the register itself where nothing has to be changed.
static const void *fetch(const struct wave *w, const struct operand *o, u64 *room) {
    int sign = o->flags / SIGN % 64, part = o->flags / SELECT % 8, changed = o->flags & (NEGATE | ABSOLUTE | EXTEND);
    if (o->words == 2) {
        if (o->kind == VECTOR) {
            const u32 *low = w->v[o->index], *high = w->v[o->index + 1];
            for (int l = 0; l < LANES; l++) room[l] = (u64)high[l] << 32 | low[l];
        } else {
            u64 value = scalar_value(w, o);
            for (int l = 0; l < LANES; l++) room[l] = value;
        }
        if (o->flags & ABSOLUTE) for (int l = 0; l < LANES; l++) room[l] &= ~(1ull << 63);
        if (o->flags & NEGATE) for (int l = 0; l < LANES; l++) room[l] ^= 1ull << 63;
        return room;
    }
    u32 *small = (u32 *)room;
    if (o->kind == VECTOR) {
        if (!changed && !part) return w->v[o->index];
        for (int l = 0; l < LANES; l++) small[l] = part_of(w->v[o->index][l], part, o->flags & EXTEND);
    } else {
        u32 value = part_of(scalar_value(w, o), part, o->flags & EXTEND);
        for (int l = 0; l < LANES; l++) small[l] = value;
    }
    if (o->flags & HALF) for (int l = 0; l < LANES; l++) small[l] = bits32(half_of(small[l]));
    if (o->flags & ABSOLUTE) for (int l = 0; l < LANES; l++) small[l] &= ~(1u << sign);
    if (o->flags & NEGATE) for (int l = 0; l < LANES; l++) small[l] ^= 1u << sign;
    return room;
}

static void write_lanes(struct wave *w, const struct operand *o, const void *values, u64 exec) {
    if (o->words == 2) {
        const u64 *wide = values;
        for (int l = 0; l < LANES; l++)
            if (exec >> l & 1) w->v[o->index][l] = wide[l], w->v[o->index + 1][l] = wide[l] >> 32;
    } else if (exec == ~0ull) {
        memcpy(w->v[o->index], values, 4 * LANES);
    } else {
        const u32 *small = values;
        for (int l = 0; l < LANES; l++)
            if (exec >> l & 1) w->v[o->index][l] = small[l];
    }
}

// The rules: `apply` computes 64 lanes and the flag of each, `apply_scalar` one value and scc.
// GENERATED

static int source_lane(int kind, int argument, int lane) {
    int row = lane & ~15, place = lane & 15;
    switch (kind) {
    case QUAD: return (lane & ~3) | (argument >> 2 * (lane & 3) & 3);
    case SHIFT_LEFT: return place + argument < 16 ? lane + argument : -1;
    case SHIFT_RIGHT: return place >= argument ? lane - argument : -1;
    case ROTATE: return row | ((place - argument) & 15);
    case BROADCAST: return argument == 15 ? row - 1 : lane >= 32 ? 31 : -1;
    case MIRROR: return row | (15 - place);
    default: return (lane & ~7) | (7 - (lane & 7));
    }
}

static void run_vector(struct machine *m, const struct instruction *i) {
    struct wave *w = m->wave;
    u64 rooms[3][LANES], result[LANES], exec = exec_of(w), flags = 0;
    const void *sources[3] = {0, 0, 0};
    for (int k = 0; k < i->sources; k++) sources[k] = fetch(w, &i->source[k], rooms[k]);
    if (i->m[0]) {
        const u32 *from = sources[0];
        u32 moved[LANES];
        u64 active = exec;
        for (int l = 0; l < LANES; l++) {
            int other = source_lane(i->m[1], i->m[2], l);
            int valid = other >= 0 && (active >> other & 1);
            moved[l] = valid ? from[other] : 0;
            if ((!valid && !i->m[5]) || !(i->m[3] >> l / 16 & 1) || !(i->m[4] >> (l / 4 & 3) & 1)) exec &= ~(1ull << l);
        }
        memcpy(rooms[0], moved, sizeof moved);
        sources[0] = rooms[0];
    }
    u64 mask = i->source[3].kind ? pair(w, i->source[3].index) : 0;
    apply(i->rule, sources[0], sources[1], sources[2], mask, result, &flags);
    if (i->handler == H_COMPARE) {
        set_pair(w, i->result.index, flags & exec);
        return;
    }
    u32 *small = (u32 *)result;
    if (i->m[8])
        for (int l = 0; l < LANES; l++) {
            f32 x = float_of(small[l]);
            small[l] = x > 0 ? x > 1 ? 0x3f800000u : small[l] : 0;
        }
    if (i->m[6]) {
        static const u32 masks[] = {0xffffffffu, 0xffff, 0xffff0000u, 0xff, 0xff00, 0xff0000, 0xff000000u};
        static const int shifts[] = {0, 0, 16, 0, 8, 16, 24};
        for (int l = 0; l < LANES; l++)
            small[l] = (small[l] << shifts[i->m[6]] & masks[i->m[6]])
                | (i->m[7] ? w->v[i->result.index][l] & ~masks[i->m[6]] : 0);
    }
    write_lanes(w, &i->result, result, exec);
    if (i->second.kind) set_pair(w, i->second.index, flags & exec);
}

static void run_packed(struct machine *m, const struct instruction *i) {
    struct wave *w = m->wave;
    int wide = i->m[0] == 32, moves = i->m[1];
    u32 rooms[3][LANES];
    u64 result[2][LANES], flags;
    for (int half = 0; half < 2; half++) {
        const void *sources[3] = {0, 0, 0};
        for (int k = 0; k < i->sources; k++) {
            const struct operand *o = &i->source[k];
            int from = moves ? k : half;
            int high = moves ? (o->flags & HIGH) != 0 : (o->flags & (half ? HIGH_FOR_HIGH : HIGH)) != 0;
            u32 sign = o->flags & (half ? NEGATE_HIGH : NEGATE_LOW) ? wide ? 0x80000000u : 0x8000u : 0;
            int shift = !wide && high ? 16 : 0, part = wide && high;
            u32 value = o->kind == SCALAR ? w->s[o->index + part] : (u32)o->value;
            for (int l = 0; l < LANES; l++)
                rooms[k][l] = ((o->kind == VECTOR ? w->v[o->index + part][l] : value) >> shift) ^ sign;
            sources[k] = rooms[k];
            if (moves && from == half) sources[0] = rooms[k];
        }
        apply(i->rule, sources[0], sources[1], sources[2], 0, result[half], &flags);
    }
    u32 *low = (u32 *)result[0], *high = (u32 *)result[1];
    u64 exec = exec_of(w);
    for (int l = 0; l < LANES; l++) {
        if (!(exec >> l & 1)) continue;
        if (wide) w->v[i->result.index][l] = low[l], w->v[i->result.index + 1][l] = high[l];
        else w->v[i->result.index][l] = (low[l] & 0xffff) | high[l] << 16;
    }
}

static void run_scalar(struct machine *m, const struct instruction *i) {
    struct wave *w = m->wave;
    u64 a = i->sources > 0 ? scalar_value(w, &i->source[0]) : 0, b = i->sources > 1 ? scalar_value(w, &i->source[1]) : 0;
    u64 d = apply_scalar(i->rule, a, b, &w->scc);
    if (i->handler == H_SAVE_EXEC) {
        set_pair(w, i->result.index, b);
        set_pair(w, EXEC, d);
    } else if (i->result.kind) {
        w->s[i->result.index] = d;
        if (i->result.words == 2) w->s[i->result.index + 1] = d >> 32;
    }
}

static int taken(const struct wave *w, int condition) {
    switch (condition) {
    case SCC0: return !w->scc;
    case SCC1: return w->scc;
    case VCCZ: return pair(w, VCC) == 0;
    case VCCNZ: return pair(w, VCC) != 0;
    case EXECZ: return exec_of(w) == 0;
    case EXECNZ: return exec_of(w) != 0;
    default: return 1;
    }
}

// Memory

static void run_scalar_load(struct machine *m, const struct instruction *i) {
    struct wave *w = m->wave;
    u64 address = (pair(w, i->source[0].index) + scalar_value(w, &i->source[1])) & ~3ull;
    for (int k = 0; k < i->m[0]; k++, address += 4) {
        u64 place = address - m->launch->arguments;
        if (place + 4 <= (u64)m->launch->argument_bytes) memcpy(&w->s[i->result.index + k], (const void *)address, 4);
        else global_load(m->global, &m->at, 0, address, &w->s[i->result.index + k], 4);
    }
    issue(m, 2, &i->result, 0);
}

// Memory of a lane, for spilled registers.
static void run_private(struct machine *m, const struct instruction *i, int stores) {
    struct wave *w = m->wave;
    u64 exec = exec_of(w);
    for (int k = 0; k < i->m[0] / 4; k++) {
        i64 place = i->m[2] + 4 * k + (i->source[1].kind ? (i64)w->s[i->source[1].index] : 0);
        if (place < 0 || place % 4 || place + 4 > m->launch->private_bytes) {
            report(&m->at, OUTSIDE, -1, place);
            continue;
        }
        u32 *inside = w->private[place / 4], *outside = w->v[(stores ? i->source[3].index : i->result.index) + k];
        for (int l = 0; l < LANES; l++)
            if (exec >> l & 1) *(stores ? &inside[l] : &outside[l]) = stores ? outside[l] : inside[l];
    }
    issue(m, 0, stores ? 0 : &i->result, exec);
}

static void run_memory(struct machine *m, const struct instruction *i, int stores) {
    struct wave *w = m->wave;
    u64 exec = exec_of(w), base = 0, records = ~0ull, extra = 0;
    int bytes = i->m[0], unit = bytes < 4 ? bytes : 4, shift = i->m[4] ? 16 : 0;
    const struct operand *address = &i->source[0], *resource = &i->source[1];
    if (i->m[3]) {
        base = (u64)(w->s[resource->index + 1] & 0xffff) << 32 | w->s[resource->index];
        records = w->s[resource->index + 2];
        extra = (u32)scalar_value(w, &i->source[2]);
        // Strides, swizzles and thread ids are not modelled.
        if (w->s[resource->index + 1] >> 16 || w->s[resource->index + 3] & 0x00880000u) report(&m->at, OUTSIDE, -1, base);
    } else if (resource->kind) {
        base = pair(w, resource->index);
    }
    for (int l = 0; l < LANES; l++) {
        if (!(exec >> l & 1)) continue;
        u64 offset = 0;
        if (address->kind) offset = address->words == 2 ? (u64)w->v[address->index + 1][l] << 32 | w->v[address->index][l]
                                                       : w->v[address->index][l];
        offset += (i64)i->m[2];
        for (int k = 0; k < bytes; k += unit) {
            int outside = i->m[3] && offset + k + unit > records;
            u64 at = base + extra + offset + k;
            if (stores) {
                u32 value = w->v[i->source[3].index + k / 4][l] >> shift;
                if (!outside) global_store(m->global, &m->at, l, at, &value, unit);
            } else {
                u32 value = 0;
                if (!outside) global_load(m->global, &m->at, l, at, &value, unit);
                if (i->m[1]) value = unit == 1 ? (u32)(i32)(int8_t)value : (u32)(i32)(int16_t)value;
                w->v[i->result.index + k / 4][l] = value;
            }
        }
    }
    issue(m, 0, stores ? 0 : &i->result, exec);
}

// Cycles beyond the first of each group of lanes: LDS serves 32 banks of 4 bytes at a time.
static int bank_conflicts(const u32 *address, u64 exec, int bytes) {
    int group = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8, extra = 0, words = bytes < 4 ? 1 : bytes / 4;
    for (int first = 0; first < LANES; first += group) {
        u32 seen[32][32];
        int used[32] = {0}, worst = 1;
        for (int l = first; l < first + group; l++)
            for (int k = 0; k < words && exec >> l & 1; k++) {
                u32 word = address[l] / 4 + k, bank = word % 32;
                int known = 0;
                for (int n = 0; n < used[bank]; n++) known |= seen[bank][n] == word;
                if (!known && used[bank] < 32) seen[bank][used[bank]++] = word;
                if (used[bank] > worst) worst = used[bank];
            }
        extra += worst - 1;
    }
    return extra;
}

static void run_local(struct machine *m, const struct instruction *i, int writes) {
    struct wave *w = m->wave;
    u64 exec = exec_of(w);
    int bytes = i->m[0], words = bytes < 4 ? 1 : bytes / 4;
    m->shared->syncs[m->at.warp]++;  // the lanes of an instruction are simultaneous, those of two are not
    u32 address[2][LANES];
    for (int part = 0; part < i->m[1]; part++) {
        for (int l = 0; l < LANES; l++) address[part][l] = w->v[i->source[0].index][l] + i->m[2 + part];
        m->conflicts[w->pc] += bank_conflicts(address[part], exec, bytes);
    }
    for (int part = 0; part < i->m[1]; part++)
        for (int l = 0; l < LANES; l++) {
            if (!(exec >> l & 1)) continue;
            u32 value[4] = {0};
            if (writes) {
                for (int k = 0; k < words; k++) value[k] = w->v[i->source[1 + part].index + k][l];
                if (i->m[5]) value[0] >>= 16;
                shared_store(m->shared, &m->at, l, address[part][l], value, bytes);
                continue;
            }
            shared_load(m->shared, &m->at, l, address[part][l], value, bytes);
            if (i->m[4]) value[0] = bytes == 1 ? (u32)(i32)(int8_t)value[0] : (u32)(i32)(int16_t)value[0];
            for (int k = 0; k < words; k++) w->v[i->result.index + part * words + k][l] = value[k];
        }
    struct pending *p = issue(m, 1, writes ? 0 : &i->result, exec);
    p->write = writes, p->bytes = bytes, p->parts = i->m[1];
    memcpy(p->address, address, sizeof address);
}

static void run_lanes(struct machine *m, const struct instruction *i) {
    struct wave *w = m->wave;
    u64 exec = exec_of(w);
    u32 found[LANES];
    const u32 *from = w->v[i->source[i->handler == H_PERMUTE].index];
    for (int l = 0; l < LANES; l++) {
        int other = i->handler == H_PERMUTE ? (int)((w->v[i->source[0].index][l] + i->m[0]) / 4 % 64) : l ^ i->m[0];
        found[l] = exec >> other & 1 ? from[other] : 0;
    }
    write_lanes(w, &i->result, found, exec);
    issue(m, 1, &i->result, exec);
}

// Matrix products

static f32 element(const struct wave *w, int index, int lane, int place, int kind) {
    if (kind == F32) return float_of(w->v[index + place][lane]);
    if (kind == XF32) {  // rounded to 11 bits
        u32 x = w->v[index + place][lane];
        return float_of((x & 0x7f800000u) == 0x7f800000u ? x : (x + 0xfffu + (x >> 13 & 1)) & ~0x1fffu);
    }
    u32 x = w->v[index + place / 2][lane] >> 16 * (place & 1) & 0xffff;
    return kind == F16 ? half_of(x) : bf16_of(x);
}

// The hardware's order and rounding of the sum are unspecified: here it is exact to fp64 and rounded once.
static void run_matrix(struct machine *m, const struct instruction *i) {
    struct wave *w = m->wave;
    int n = i->m[0], depth = i->m[2], per_lane = depth * n / 64, results = n * n / 64;
    f64 a[16][32], b[16][32];
    for (int l = 0; l < LANES; l++)
        for (int j = 0; j < per_lane; j++) {
            int k = l / n * per_lane + j;
            a[k][l % n] = element(w, i->source[0].index, l, j, i->m[3]);
            b[k][l % n] = element(w, i->source[1].index, l, j, i->m[3]);
        }
    f64 sum[32][32];
    for (int r = 0; r < results; r++)
        for (int l = 0; l < LANES; l++) {
            int row = n == 32 ? 8 * (r / 4) + 4 * (l / 32) + r % 4 : 4 * (l / 16) + r;
            sum[row][l % n] = float_of(i->source[2].kind == VECTOR ? w->v[i->source[2].index + r][l] : (u32)i->source[2].value);
        }
    for (int row = 0; row < n; row++)
        for (int k = 0; k < depth; k++)
            for (int column = 0; column < n; column++) sum[row][column] += a[k][row] * b[k][column];
    for (int r = 0; r < results; r++)
        for (int l = 0; l < LANES; l++) {
            int row = n == 32 ? 8 * (r / 4) + 4 * (l / 32) + r % 4 : 4 * (l / 16) + r;
            w->v[i->result.index + r][l] = result32((f32)sum[row][l % n]);
        }
}

// Execution

static void note(struct seen *to, const struct wave *w, const struct operand *o, int words, u64 mask) {
    for (int k = 0; k < words && o->kind == VECTOR; k++)
        for (int l = 0; l < LANES; l++)
            if (mask >> l & 1) digest(to, w->v[o->index + k][l]);
    for (int k = 0; k < words && o->kind == SCALAR; k++) digest(to, w->s[o->index + k]);
    if (o->kind == CONDITION) digest(to, w->scc);
}

static void note_read(struct machine *m, const struct instruction *i) {
    if (!m->trace->read) return;
    struct seen *to = m->trace->read + (u64)m->at.warp * m->trace->places + m->at.place;
    for (int k = 0; k < 4; k++) note(to, m->wave, &i->source[k], i->source[k].words, ~0ull);
}

// What an instruction has written in the lanes of `exec`. A store has no result: its operands count.
static void note_written(struct machine *m, const struct instruction *i, u64 exec) {
    if (!m->trace->read) return;
    const struct wave *w = m->wave;
    struct seen *to = m->trace->written + (u64)m->at.warp * m->trace->places + m->at.place;
    int words = i->handler == H_MATRIX ? i->m[0] * i->m[0] / 64 : i->result.words;
    note(to, w, &i->result, words, i->handler == H_MATRIX ? ~0ull : exec);
    note(to, w, &i->second, i->second.words, exec);
    if (i->handler == H_STORE || i->handler == H_LOCAL_WRITE)
        for (int k = 0; k < 4; k++) note(to, w, &i->source[k], i->source[k].words, exec);
    if (i->handler == H_SCALAR || i->handler == H_SAVE_EXEC) digest(to, w->scc);
    if (i->handler == H_SAVE_EXEC) digest(to, exec_of(w));
}

enum { RUNNING, AT_BARRIER, ENDED, STUCK };

static int run_wave(struct machine *m, u64 *budget) {
    struct wave *w = m->wave;
    for (;;) {
        if (w->pc >= m->launch->count || !*budget) {
            m->at.place = w->pc < m->launch->count ? w->pc : m->launch->count - 1;
            report(&m->at, UNFINISHED, -1, 0);
            return STUCK;
        }
        --*budget;
        const struct instruction *i = &m->code[w->pc];
        m->at.place = w->pc;
        m->counts[w->pc]++;
        if (w->waiting) {
            for (int k = 0; k < 4; k++) check_idle(m, &i->source[k], 0);
            int kind = i->handler == H_LOAD ? 1 : i->handler == H_LOCAL_READ || i->handler == H_PERMUTE || i->handler == H_SWIZZLE ? 2 : 0;
            check_idle(m, &i->result, kind);
            check_idle(m, &i->second, 0);
        }
        u64 exec = exec_of(w);
        note_read(m, i);
        switch (i->handler) {
        case H_VECTOR: case H_COMPARE: run_vector(m, i); break;
        case H_PACKED: run_packed(m, i); break;
        case H_SCALAR: case H_SAVE_EXEC: run_scalar(m, i); break;
        case H_READ_LANE: {
            u64 exec = exec_of(w);
            int lane = i->m[0] ? exec ? __builtin_ctzll(exec) : 0 : (int)(scalar_value(w, &i->source[1]) & 63);
            w->s[i->result.index] = w->v[i->source[0].index][lane];
            break;
        }
        case H_WRITE_LANE:
            w->v[i->result.index][scalar_value(w, &i->source[1]) & 63] = scalar_value(w, &i->source[0]);
            break;
        case H_BRANCH:
            if (m->trace->read) digest(m->trace->written + (u64)m->at.warp * m->trace->places + w->pc, taken(w, i->m[0]));
            if (taken(w, i->m[0])) { w->pc = i->m[1]; continue; }
            break;
        case H_WAIT: wait_for(w, 0, i->m[0]), wait_for(w, 1, i->m[1]); break;
        case H_IDLE: break;
        case H_BARRIER: w->pc++; return AT_BARRIER;
        case H_END: return ENDED;
        case H_SCALAR_LOAD: run_scalar_load(m, i); break;
        case H_LOAD: case H_STORE:
            if (i->m[3] == 3) run_private(m, i, i->handler == H_STORE);
            else run_memory(m, i, i->handler == H_STORE);
            break;
        case H_LOCAL_READ: run_local(m, i, 0); break;
        case H_LOCAL_WRITE: run_local(m, i, 1); break;
        case H_PERMUTE: case H_SWIZZLE: run_lanes(m, i); break;
        case H_MATRIX: run_matrix(m, i); break;
        }
        note_written(m, i, exec);
        w->pc++;
    }
}

static void start_wave(const struct launch *l, struct wave *w, int program, int index) {
    lanes *v = w->v, *private = w->private;
    for (int r = 0; r < 512; r++)
        if (r < l->registers || r >= 256)
            for (int k = 0; k < LANES; k++) v[r][k] = l->poison;
    for (int r = 0; r < l->private_bytes / 4; r++)
        for (int k = 0; k < LANES; k++) private[r][k] = l->poison;
    memset(w, 0, sizeof *w);
    w->v = v, w->private = private;
    for (int r = 0; r < 128; r++) w->s[r] = l->poison;
    for (int k = 0; k < LANES; k++) v[0][k] = index * LANES + k;
    set_pair(w, 0, l->arguments);
    for (int k = 0; k < l->preloaded; k++) memcpy(&w->s[2 + k], (const char *)l->arguments + 4 * k, 4);
    w->s[l->program_register] = program;
    set_pair(w, EXEC, ~0ull);
    w->pc = l->entry;
}

static void start_shared(struct shared *memory, int warps, u32 poison) {
    memset(memory->bytes, 0, memory->size * sizeof *memory->bytes);
    for (int i = 0; i < memory->size; i++) {
        memory->bytes[i].write_epoch = memory->bytes[i].read_epoch = memory->bytes[i].write_place = -1;
        memory->bytes[i].value = poison >> 8 * (i & 3);
    }
    memset(memory->syncs, 0, warps * sizeof *memory->syncs);
    memory->epoch = 0;
}

// Waves run one at a time until each has reached the barrier.
static void run_block(struct machine *m, struct wave *waves, int program) {
    const struct launch *l = m->launch;
    u64 budget = l->limit;
    m->at.program = program;
    start_shared(m->shared, l->warps, l->poison);
    for (int k = 0; k < l->warps; k++) start_wave(l, &waves[k], program, k);
    for (;;) {
        int barrier = -1, ended = 0;
        for (int n = 0; n < l->warps; n++) {
            int k = l->reverse ? l->warps - 1 - n : n;
            m->wave = &waves[k], m->at.warp = k;
            int state = run_wave(m, &budget);
            if (state == STUCK) return;
            if (state == ENDED) {
                ended++;
            } else {
                if (barrier >= 0 && barrier != waves[k].pc) report(&m->at, BARRIER, -1, 0);
                barrier = waves[k].pc;
            }
        }
        if (ended == l->warps) return;
        if (ended) {
            report(&m->at, BARRIER, -1, 0);
            return;
        }
        m->shared->epoch++;
        for (int k = 0; k < l->warps; k++) {
            m->wave = &waves[k], m->at.warp = k, m->at.place = waves[k].pc - 1;
            carry_over(m, &waves[k]);
        }
    }
}

void run(const struct instruction *code, const struct launch *launch, const struct global *global, struct shared *shared,
         struct findings *found, struct wave *waves, lanes *registers, lanes *private, u64 *counts, u64 *conflicts,
         const struct trace *trace) {
    struct machine m = {code, launch, global, shared, {found, 0, 0, 0}, 0, counts, conflicts, trace};
    for (int k = 0; k < launch->warps; k++) {
        waves[k].v = registers + k * 512;
        waves[k].private = private + k * launch->private_bytes / 4;
    }
    for (int n = 0; n < launch->grid; n++) run_block(&m, waves, launch->reverse ? launch->grid - 1 - n : n);
}

int wave_size(void) { return sizeof(struct wave); }
