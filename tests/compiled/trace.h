// Digests of what each instruction reads and writes, per warp. Two runs of a text compare them; see trace.py.

struct trace {
    uint64_t *read, *written;  // [warps][places], or null: nothing is traced
    int32_t places;
};

static inline void digest(uint64_t *to, uint64_t value) { *to = (*to ^ value) * 0x9E3779B97F4A7C15u + 1; }
