/* Vectors of LANES numbers; vectors.h says why this has no guard. */
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4))); /* anywhere in memory */
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));

INLINE vec all(float value) { return value - (vec){0}; }
INLINE vec pick(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
INLINE vec rectified(vec x) { return (vec)((ivec)x & ~(x < 0)); } /* NaN stays NaN */

static __attribute__((noinline)) float sum(vec v) {
    float half[LANES];
    memcpy(half, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; ++lane) half[lane] += half[lane + width];
    return half[0];
}

/* Two vectors exchange half their numbers, those at distance D: the macros are used where LANES is what it is there. */
#undef EACH
#if LANES == 16
#define EACH(F, D) F(0, D), F(1, D), F(2, D), F(3, D), F(4, D), F(5, D), F(6, D), F(7, D), F(8, D), F(9, D), F(10, D), \
                   F(11, D), F(12, D), F(13, D), F(14, D), F(15, D)
#elif LANES == 8
#define EACH(F, D) F(0, D), F(1, D), F(2, D), F(3, D), F(4, D), F(5, D), F(6, D), F(7, D)
#else
#define EACH(F, D) F(0, D), F(1, D), F(2, D), F(3, D)
#endif
#define LOW(LANE, D) ((LANE) & (D) ? LANES + (LANE) - (D) : (LANE))
#define HIGH(LANE, D) ((LANE) & (D) ? LANES + (LANE) : (LANE) + (D))
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(A, B, F, D) __builtin_shufflevector(A, B, EACH(F, D))
#else
#define SHUFFLE(A, B, F, D) __builtin_shuffle(A, B, (ivec){EACH(F, D)})
#endif

/* A square of LANES by LANES numbers, rows to columns: at distance 1, 2, 4, ... two rows exchange half their numbers. */
#define EXCHANGE(D)                                                                                                    \
    UNROLL for (int i = 0; i < LANES; ++i) if (!(i & (D))) {                                                           \
        const vec a = square[i], b = square[i + (D)];                                                                  \
        square[i] = SHUFFLE(a, b, LOW, D);                                                                             \
        square[i + (D)] = SHUFFLE(a, b, HIGH, D);                                                                      \
    }
INLINE void turn_square(vec square[LANES]) {
    EXCHANGE(1)
    EXCHANGE(2)
#if LANES > 4
    EXCHANGE(4)
#endif
#if LANES > 8
    EXCHANGE(8)
#endif
}

/* The sums of LANES vectors as one vector, each added up in the order of `sum`. */
#define FOLD(D)                                                                                                        \
    UNROLL for (int i = 0; i < (D); ++i) {                                                                             \
        const vec a = square[i], b = square[i + (D)];                                                                  \
        square[i] = SHUFFLE(a, b, LOW, D) + SHUFFLE(a, b, HIGH, D);                                                    \
    }
INLINE vec sums(vec square[LANES]) {
#if LANES > 8
    FOLD(8)
#endif
#if LANES > 4
    FOLD(4)
#endif
    FOLD(2)
    FOLD(1)
    return square[0];
}

/* to[c, r] = from[r, c]. */
static void turn_matrix(const float *from, index_t rows, index_t columns, index_t stride, float *to,
                        index_t to_stride) {
    for (index_t r0 = 0; r0 < rows; r0 += LANES)
        for (index_t c0 = 0; c0 < columns; c0 += LANES) {
            if (r0 + LANES <= rows && c0 + LANES <= columns) {
                vec square[LANES];
                for (int i = 0; i < LANES; ++i) square[i] = *(const loose *)(from + (r0 + i) * stride + c0);
                turn_square(square);
                for (int i = 0; i < LANES; ++i) *(loose *)(to + (c0 + i) * to_stride + r0) = square[i];
            } else
                for (index_t r = r0; r < smaller(r0 + LANES, rows); ++r)
                    for (index_t c = c0; c < smaller(c0 + LANES, columns); ++c)
                        to[c * to_stride + r] = from[r * stride + c];
        }
}

