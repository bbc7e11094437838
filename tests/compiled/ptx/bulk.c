// Bulk copies of boxes (TMA), and the barrier objects in shared memory that tell their end (mbarrier).
// A copy is delivered as late as possible: when a warp waits for the phase of its barrier object.

struct map {
    uint64_t address, strides[5];
    int64_t shape[5];
    int32_t box[5], rank, element, swizzle;
};

struct object {
    int32_t address, expected, pending, phase;
    int64_t bytes;  // announced and not delivered
};

struct bulk {
    int32_t place, warp, object, size, chunks;
    uint32_t *chunk;  // addresses in shared memory
    uint8_t *bytes;
};

struct objects {
    int32_t count, room, copies, copy_room;
    struct object *object;
    struct bulk *copy;
};

static struct object *object_at(struct block *k, uint32_t address) {
    for (int i = 0; i < k->objects->count; i++)
        if (k->objects->object[i].address == (int32_t)address) return &k->objects->object[i];
    return NULL;
}

static void turn_phase(struct object *o) {
    if (!o->pending && !o->bytes) o->phase ^= 1, o->pending = o->expected;
}

static int copies_of(struct block *k, const struct object *o) {
    int found = 0;
    for (int i = 0; i < k->objects->copies; i++) found += k->objects->copy[i].object == o->address;
    return found;
}

// Marks the bytes of an object as one that starts or ends.
static void claim_object(struct block *k, const struct site *at, int lane, uint32_t address, int starts) {
    shared_claim(k->shared, at, lane, address, 8, NULL);
    for (int i = 0; i < 8; i++) k->shared->further->bytes[address + i].object = starts;
}

static void start_object(struct block *k, struct site at, struct warp *w, const struct instruction *in, uint32_t mask) {
    struct objects *all = k->objects;
    at.proxy = OBJECT;
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        uint32_t address = ROW(OPERANDS - 1)[l] + (uint32_t)in->offset, count = ROW(0)[l];
        if (!shared_inside(k->shared, &at, l, address, 8)) continue;
        if (object_at(k, address) || !count) { report(&at, BARRIER_OBJECT, l, address); continue; }
        claim_object(k, &at, l, address, 1);
        if (all->count == all->room) all->object = realloc(all->object, sizeof *all->object * (all->room = 2 * all->room + 16));
        struct object one = {address, count, count, 0, 0};
        all->object[all->count++] = one;
    }
}

static void end_object(struct block *k, struct site at, struct warp *w, const struct instruction *in, uint32_t mask) {
    at.proxy = OBJECT;
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        uint32_t address = ROW(OPERANDS - 1)[l] + (uint32_t)in->offset;
        struct object *o = object_at(k, address);
        if (!o || o->bytes || o->pending != o->expected || copies_of(k, o)) report(&at, BARRIER_OBJECT, l, address);
        if (!o) continue;
        claim_object(k, &at, l, address, 0);
        *o = k->objects->object[--k->objects->count];
    }
}

// The object that a lane uses. It must have been started, and other warps may use it behind a barrier.
static struct object *used_object(struct block *k, const struct site *at, int lane, uint32_t address) {
    struct object *o = object_at(k, address);
    uint8_t bytes[8];
    if (!o) report(at, BARRIER_OBJECT, lane, address);
    else shared_load(k->shared, at, lane, address, bytes, 8);
    return o;
}

static void expect_bytes(struct block *k, struct site at, struct warp *w, const struct instruction *in, uint32_t mask) {
    at.proxy = OBJECT;
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        struct object *o = used_object(k, &at, l, ROW(OPERANDS - 1)[l] + (uint32_t)in->offset);
        if (!o) continue;
        if (!o->pending) { report(&at, BARRIER_OBJECT, l, o->address); continue; }
        o->pending--, o->bytes += ROW(0)[l];
        turn_phase(o);
    }
}

// Delivers all copies that signal an object.
static void deliver(struct block *k, struct object *o) {
    struct objects *all = k->objects;
    struct further *f = k->shared->further;
    int left = 0, first = f->deliveries;
    for (int i = 0; i < all->copies; i++) {
        struct bulk *one = &all->copy[i];
        if (one->object != o->address) { all->copy[left++] = *one; continue; }
        if (f->deliveries == first) {
            if (f->deliveries == f->room) f->delivery = realloc(f->delivery, sizeof *f->delivery * (f->room = 2 * f->room + 64));
            struct delivery made = {o->address, 0};
            f->delivery[f->deliveries++] = made;
        }
        for (int j = 0; j < 16 * one->chunks; j++) {
            struct shadow *b = &k->shared->bytes[one->chunk[j / 16] + j % 16];
            b->value = one->bytes[j], b->pending = 0, b->write_epoch = -1;
            f->bytes[one->chunk[j / 16] + j % 16].delivery = f->deliveries;
        }
        o->bytes -= one->size;
        free(one->chunk), free(one->bytes);
    }
    all->copies = left;
    if (f->deliveries > first) turn_phase(o);
}

// Returns whether the warp goes on.
static int wait_for_object(struct block *k, struct site at, struct warp *w, const struct instruction *in, uint32_t mask) {
    struct further *f = k->shared->further;
    if (!mask) return 1;
    int lane = __builtin_ctz(mask);
    uint32_t address = ROW(OPERANDS - 1)[lane] + (uint32_t)in->offset, parity = ROW(1)[lane];
    at.proxy = OBJECT;
    for (int l = 0; l < LANES; l++)
        if ((mask >> l & 1) && (ROW(OPERANDS - 1)[l] + (uint32_t)in->offset != address || ROW(1)[l] != parity))
            { report(&at, CONVERGENCE, l, address); break; }
    struct object *o = object_at(k, address);
    if (o && parity == (uint32_t)o->phase) deliver(k, o);
    if (o && parity == (uint32_t)o->phase) return 0;
    if (used_object(k, &at, lane, address))
        for (int i = 0; i < f->deliveries; i++)
            if (f->delivery[i].object == o->address) f->delivery[i].waited |= 1u << at.warp;
    for (int l = 0; l < LANES; l++) if (mask >> l & 1) ROW(0)[l] = 1;
    return 1;
}

// 16 bytes of a box as read from global memory. What lies outside of the tensor is 0.
static void read_chunk(struct block *k, const struct site *at, int lane, const struct map *m, const int32_t *start, int64_t place, uint8_t *to) {
    uint64_t address = m->address;
    int64_t rest = place / m->element, first = 0;
    memset(to, 0, 16);
    for (int i = 0; i < m->rank; i++) {
        int64_t at_axis = start[i] + rest % m->box[i];
        rest /= m->box[i];
        if (i == 0) first = at_axis;
        else if (at_axis < 0 || at_axis >= m->shape[i]) return;
        address += at_axis * m->strides[i];
    }
    int count = 16 / m->element;
    if (first >= 0 && first + count <= m->shape[0] && address % 16 == 0) {
        global_load(k->global, at, lane, address, to, 16);
        return;
    }
    for (int e = 0; e < count; e++)
        if (first + e >= 0 && first + e < m->shape[0])
            global_load(k->global, at, lane, address + e * m->element, to + e * m->element, m->element);
}

static void copy_box(struct block *k, struct site at, struct warp *w, const struct instruction *in, uint32_t mask) {
    struct objects *all = k->objects;
    for (int l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        uint64_t map = ((uint64_t *)ROW(0))[l] - MAPS;
        uint32_t to = ROW(OPERANDS - 1)[l] + (uint32_t)in->offset, signal = ROW(1)[l];
        int32_t start[5];
        const struct map *m = &k->maps[map / MAP_SIZE];
        if (map % MAP_SIZE || map / MAP_SIZE >= (uint64_t)k->map_count || m->rank != in->numbers[0]) {
            report(&at, DESCRIPTOR, l, map + MAPS);
            continue;
        }
        at.proxy = OBJECT;
        struct object *o = used_object(k, &at, l, signal);
        at.proxy = ASYNCHRONOUS;
        if (!o) continue;
        int size = m->element;
        for (int i = 0; i < m->rank; i++) size *= m->box[i], start[i] = (int32_t)ROW(2 + i)[l];
        if (to % 128) { report(&at, MISALIGNED, l, to); continue; }
        if (to + (uint64_t)size > (uint64_t)k->shared->size) { report(&at, SHARED_OUTSIDE, l, to); continue; }
        struct findings quiet = {0};
        struct site claimed = at;
        int32_t before = at.found->count;
        struct bulk one = {in->place, at.warp, signal, size, size / 16, malloc(size / 4), malloc(size)};
        for (int i = 0; i < one.chunks; i++) {
            uint32_t plain = to + 16 * i;
            one.chunk[i] = m->swizzle ? plain ^ ((plain >> 7 & (m->swizzle / 16 - 1)) << 4) : plain;
            if (at.found->count != before) claimed.found = &quiet;  // one finding is enough
            read_chunk(k, &claimed, l, m, start, 16 * (int64_t)i, one.bytes + 16 * i);
            shared_claim(k->shared, &claimed, l, one.chunk[i], 16, NULL);
            for (int j = 0; j < 16; j++) k->shared->bytes[one.chunk[i] + j].pending = 1 + at.warp;
        }
        if (all->copies == all->copy_room) all->copy = realloc(all->copy, sizeof *all->copy * (all->copy_room = 2 * all->copy_room + 16));
        all->copy[all->copies++] = one;
    }
}

static void forget_copies(struct objects *all) {
    for (int i = 0; i < all->copies; i++) free(all->copy[i].chunk), free(all->copy[i].bytes);
    all->copies = all->count = 0;
}

static void free_objects(struct objects *all) {
    if (!all) return;
    forget_copies(all);
    free(all->object), free(all->copy), free(all);
}

// The end of a block: nothing may be under way.
static void report_left(struct block *k, const struct warp *all, int warps) {
    for (int i = 0; i < k->objects->copies; i++) {
        struct site at = {k->found, k->objects->copy[i].place, k->program, k->objects->copy[i].warp};
        report(&at, LEFT_UNDER_WAY, -1, k->objects->copy[i].object);
    }
    for (int i = 0; i < warps; i++)
        for (int j = 0; j < all[i].products->count; j++) {
            struct site at = {k->found, all[i].products->product[j].place, k->program, i};
            report(&at, LEFT_UNDER_WAY, -1, 0);
        }
}
