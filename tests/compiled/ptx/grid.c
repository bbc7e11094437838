// Runs a grid: its programs one after the other, and the warps of each up to barriers.

// The instructions of sm_90. Returns 0 if the warp has to try again.
static int asynchronous(struct block *k, const struct site *at, struct warp *w, const struct instruction *in, uint32_t mask) {
    struct further *f = k->shared->further;
    int whole = in->op >= OP_PRODUCT && in->op <= OP_PROXY_FENCE;
    if (whole && mask != 0xFFFFFFFFu) report(at, CONVERGENCE, -1, mask);
    switch (in->op) {
        case OP_ELECT:  // the first lane, as GPUs do; the manual leaves it open
            if (!mask) break;
            if (mask != ROW(2)[__builtin_ctz(mask)]) report(at, CONVERGENCE, -1, mask);
            for (int l = 0; l < LANES; l++)
                if (mask >> l & 1) ROW(0)[l] = __builtin_ctz(mask), ROW(1)[l] = l == __builtin_ctz(mask);
            break;
        case OP_PRODUCT: start_product(k, *at, w, in); break;
        case OP_PRODUCT_FENCE:
            note_step(k, at, 0, 0);
            for (int i = 0; i < k->units; i++) if (!w->products->under_way[i]) w->products->last[i] = NOTHING;
            break;
        case OP_PRODUCT_COMMIT:
            note_step(k, at, 0, 0);
            w->products->group++;
            break;
        case OP_PRODUCT_WAIT:
            note_step(k, at, 0, 0);
            wait_for_products(k, at, w, in->numbers[0]);
            break;
        case OP_PROXY_FENCE:
            f->fences[at->warp]++, f->fence_epoch[at->warp] = k->shared->epoch;
            break;
        case OP_OBJECT_START: start_object(k, *at, w, in, mask); break;
        case OP_OBJECT_END: end_object(k, *at, w, in, mask); break;
        case OP_OBJECT_EXPECT: expect_bytes(k, *at, w, in, mask); break;
        case OP_OBJECT_WAIT: return wait_for_object(k, *at, w, in, mask);
        case OP_COPY_BOX: copy_box(k, *at, w, in, mask); break;
    }
    return 1;
}

// Runs all warps until they end or meet at a barrier. Returns whether the block goes on.
static int run_epoch(struct block *k, struct warp *all, int warps, int reverse) {
    int stuck = 0;
    for (int i = 0; i < warps; i++) all[i].waiting = -1;
    for (int left = 1; left;) {
        int64_t before = k->budget;
        left = 0;
        for (int j = 0; j < warps; j++) {
            int i = reverse ? warps - 1 - j : j;
            if (!all[i].paths || all[i].waiting >= 0) continue;
            all[i].blocked = -1;
            run_warp(k, &all[i], i);
            if (all[i].paths && all[i].blocked >= 0) left++, stuck = i;
        }
        if (left && before == k->budget) {
            struct site at = {k->found, all[stuck].blocked, k->program, stuck};
            report(&at, NEVER_DONE, -1, 0);
            return 0;
        }
    }
    int met = -2, equal = 1, arrived = 0, last = -1;
    for (int j = 0; j < warps; j++) {
        int i = reverse ? warps - 1 - j : j;
        if (all[i].waiting < 0) continue;
        arrived++, last = i;
        equal &= met == -2 || met == all[i].waiting, met = all[i].waiting;
    }
    if (arrived && (arrived != warps || !equal)) {
        struct site at = {k->found, met, k->program, last};
        report(&at, BARRIER, -1, arrived);
        return 0;
    }
    if (k->courses) end_courses(k, warps);
    if (!arrived && k->objects) report_left(k, all, warps);
    if (k->shared->further) settle_further(k->shared->further, k->shared->epoch);
    k->shared->epoch++;
    return arrived > 0;
}

// Runs the programs of a grid. `start` is the register file of a warp at its start; its rows `thread` and `program` hold
// the thread index in the block and the program index.
void run_grid(
    const struct instruction *code, struct global *global, struct shared *shared, struct findings *found,
    int64_t *counts, int64_t budget, const uint32_t *start, int32_t units, int32_t thread, int32_t program, int32_t warps,
    int32_t grid, int32_t reverse, const struct shadow *empty, const struct registers *registers, const struct trace *trace,
    int32_t further, const int32_t *lists, const struct map *maps, int32_t map_count
) {
    struct warp *all = calloc(warps, sizeof *all);
    struct course *courses = further ? calloc(warps / 4 + 1, sizeof *courses) : NULL;
    struct objects *objects = further ? calloc(1, sizeof *objects) : NULL;
    shared->further = further ? new_further(shared->size, warps) : NULL;
    for (int i = 0; i < warps; i++) {
        all[i].file = malloc((size_t)units * 128);
        if (further) all[i].products = new_products(units);
    }
    for (int g = 0; g < grid; g++) {
        struct block k = {
            code, registers, trace, global, shared, found, counts, budget, reverse ? grid - 1 - g : g, units, map_count, lists,
            maps, courses, objects,
        };
        memcpy(shared->bytes, empty, sizeof *empty * shared->size);
        memset(shared->syncs, 0, sizeof(int32_t) * warps);
        shared->epoch = 0;
        if (further) {
            start_further(shared->further, shared->size);
            forget_copies(objects);
            for (int i = 0; i <= warps / 4; i++) courses[i].steps = 0, memset(courses[i].done, 0, sizeof courses[i].done);
        }
        for (int i = 0; i < warps; i++) {
            struct warp *w = &all[i];
            memcpy(w->file, start, (size_t)units * 128);
            for (int l = 0; l < LANES; l++) {
                w->file[32 * thread + l] = 32 * i + l;
                w->file[32 * program + l] = k.program;
            }
            w->paths = 1, w->at[0] = 0, w->mask[0] = 0xFFFFFFFFu, w->group = 0, w->copies = 0;
            if (further) start_products(w->products, units);
        }
        while (run_epoch(&k, all, warps, reverse)) {}
    }
    for (int i = 0; i < warps; i++) free(all[i].file), free(all[i].copy), free_products(all[i].products);
    for (int i = 0; courses && i <= warps / 4; i++) free(courses[i].step);
    free(all), free(courses), free_objects(objects), free_further(shared->further);
    shared->further = NULL;
}
