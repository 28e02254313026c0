/* Vectors of as many numbers as the processor computes with at once, and what is done with them. */
#ifndef FEDCOHORT_VECTORS_H
#define FEDCOHORT_VECTORS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 24 /* accumulators of one inner loop */
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 12
#else
#define LANES 4
#define REGISTERS 12
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4))); /* anywhere in memory */
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef int64_t index_t;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE index_t up(index_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE index_t smaller(index_t a, index_t b) { return a < b ? a : b; }
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

/* exp(x) for x <= 0, relative error below 2e-7; NaN stays NaN. */
INLINE vec exponential(vec x) {
    const vec least = all(-87.0f);
    x = pick(x < least, least, x);
    const vec scaled = x * 1.44269504088896341f - 0.5f; /* x <= 0: cutting off towards zero rounds to nearest */
    const ivec power = __builtin_convertvector(scaled, ivec);
    const vec whole = __builtin_convertvector(power, vec);
    const vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((power + 127) << 23);
}

/* A square of LANES by LANES numbers, rows to columns: at distance 1, 2, 4, ... two rows exchange half their numbers. */
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

/* ROWS(V) by V vectors fit the registers. */
#define ROWS(V) (REGISTERS / (V) < 8 ? REGISTERS / (V) : 8)
/* Call BLOCK(m, v, ...) for every m in 1..8 and v in 1..4 that fits the registers. */
#define BY_ROWS(V, BLOCK, ...)                                                                                         \
    switch (m) {                                                                                                       \
        case 1: BLOCK(1, V, __VA_ARGS__); break;                                                                       \
        case 2: BLOCK(2, V, __VA_ARGS__); break;                                                                       \
        case 3: BLOCK(3, V, __VA_ARGS__); break;                                                                       \
        case 4: if (ROWS(V) >= 4) BLOCK(4, V, __VA_ARGS__); break;                                                     \
        case 5: if (ROWS(V) >= 5) BLOCK(5, V, __VA_ARGS__); break;                                                     \
        case 6: if (ROWS(V) >= 6) BLOCK(6, V, __VA_ARGS__); break;                                                     \
        case 7: if (ROWS(V) >= 7) BLOCK(7, V, __VA_ARGS__); break;                                                     \
        case 8: if (ROWS(V) >= 8) BLOCK(8, V, __VA_ARGS__); break;                                                     \
    }
#define BY_SHAPE(BLOCK, ...)                                                                                           \
    switch (v) {                                                                                                       \
        case 1: BY_ROWS(1, BLOCK, __VA_ARGS__) break;                                                                  \
        case 2: BY_ROWS(2, BLOCK, __VA_ARGS__) break;                                                                  \
        case 3: BY_ROWS(3, BLOCK, __VA_ARGS__) break;                                                                  \
        case 4: BY_ROWS(4, BLOCK, __VA_ARGS__) break;                                                                  \
    }

/* The i-th of the parts 0..count into which n is cut as evenly as possible begins here. */
INLINE index_t cut(index_t n, index_t count, index_t i) { return n * i / count; }

#endif
