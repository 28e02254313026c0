/* Vectors of as many numbers as the processor computes with at once, and what is done with them. */
#ifndef FEDCOHORT_VECTORS_H
#define FEDCOHORT_VECTORS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* FULL: numbers of a vector. HALF: of one half as long, for the rest of a batch; 0 where there are none. */
#if defined(__AVX512F__)
#define FULL 16
#define REGISTERS 24 /* accumulators of one inner loop */
#elif defined(__AVX__)
#define FULL 8
#define REGISTERS 12
#else
#define FULL 4
#define REGISTERS 12
#endif
#ifndef HALF
#if defined(__AVX512VL__)
#define HALF 8
#elif FULL == 8
#define HALF 4
#else
#define HALF 0
#endif
#endif

typedef int64_t index_t;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE index_t smaller(index_t a, index_t b) { return a < b ? a : b; }

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

/* What follows is written once for vectors of LANES numbers and compiled for each length, under names that end in it:
 * lanes.h and convolution.h are included for FULL and again for HALF. */
#define JOINED(NAME, NUMBER) NAME##NUMBER
#define JOIN(NAME, NUMBER) JOINED(NAME, NUMBER)
#define SIZED(NAME) JOIN(NAME, LANES)
#define vec SIZED(vec)
#define loose SIZED(loose)
#define ivec SIZED(ivec)
#define all SIZED(all)
#define pick SIZED(pick)
#define rectified SIZED(rectified)
#define sum SIZED(sum)
#define sums SIZED(sums)
#define turn_square SIZED(turn_square)
#define turn_matrix SIZED(turn_matrix)
#define LANES FULL
#include "lanes.h"

INLINE index_t up(index_t n) { return (n + LANES - 1) / LANES * LANES; }

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

#endif
