// What each instruction reads and writes, per warp, as a digest and as the bits that occur. Two runs of a text compare
// them; see trace.py.

struct seen {
    uint64_t digest, bits;
};

struct trace {
    struct seen *read, *written;  // [warps][places], or null: nothing is traced
    int32_t places;
};

static inline void digest(struct seen *to, uint64_t value) {
    to->digest = (to->digest ^ value) * 0x9E3779B97F4A7C15u + 1;
    to->bits |= value;
}
