/* Dense layers: (sample, unit) times (input, unit), units filled up to whole vectors. */
#ifndef FEDCOHORT_DENSE_H
#define FEDCOHORT_DENSE_H

#include "network.h"

/* out[i, :] = start + sum over k of a[i, k] w[k, :] for m rows and v vectors of units. */
INLINE void product_block(const int m, const int v, const float *a, index_t stride, index_t inputs, const float *w,
                          index_t padded, const float *bias, float *out) {
    vec total[8][4];
    UNROLL for (int j = 0; j < v; ++j) {
        const vec start = bias ? ((const vec *)bias)[j] : all(0);
        UNROLL for (int i = 0; i < m; ++i) total[i][j] = start;
    }
    for (index_t k = 0; k < inputs; ++k) {
        vec units[4];
        UNROLL for (int j = 0; j < v; ++j) units[j] = ((const vec *)(w + k * padded))[j];
        UNROLL for (int i = 0; i < m; ++i) {
            const float x = a[i * stride + k];
            UNROLL for (int j = 0; j < v; ++j) total[i][j] += x * units[j];
        }
    }
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) ((vec *)(out + i * padded))[j] = total[i][j];
}

/* w[k, :] = keep w[k, :] + sign * sum over i of a[i, k] delta[i, :] for m inputs and v vectors of units. */
INLINE void step_block(const int m, const int v, const float *a, index_t stride, index_t rows, const float *delta,
                       index_t padded, float keep, float sign, float *w) {
    vec total[8][4];
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) total[i][j] = all(0);
    for (index_t r = 0; r < rows; ++r) {
        vec units[4];
        UNROLL for (int j = 0; j < v; ++j) units[j] = ((const vec *)(delta + r * padded))[j];
        UNROLL for (int i = 0; i < m; ++i) {
            const float x = a[r * stride + i];
            UNROLL for (int j = 0; j < v; ++j) total[i][j] += x * units[j];
        }
    }
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) {
            vec *place = (vec *)(w + i * padded) + j;
            *place = keep * *place + sign * total[i][j];
        }
}

static void product(const float *a, index_t stride, index_t rows, index_t inputs, const float *w, index_t padded,
                    const float *bias, float *out) {
    const index_t vectors = padded / LANES, strips = (vectors + 3) / 4;
    for (index_t s = 0; s < strips; ++s) {
        const index_t j = cut(vectors, strips, s), v = cut(vectors, strips, s + 1) - j;
        const index_t most = ROWS(v), parts = (rows + most - 1) / most;
        for (index_t p = 0; p < parts; ++p) {
            const index_t i = cut(rows, parts, p), m = cut(rows, parts, p + 1) - i;
            BY_SHAPE(product_block, a + i * stride, stride, inputs, w + j * LANES, padded,
                     bias ? bias + j * LANES : NULL, out + i * padded + j * LANES)
        }
    }
}

/* Samples that will be needed soon, to be fetched from memory while something else is computed. */
typedef struct {
    const float *data;
    const index_t *positions;
    index_t count, features;
} Ahead;

INLINE void fetch(const Ahead *ahead, index_t first, index_t last) {
    for (index_t i = first; i < last; ++i) {
        const float *row = ahead->data + ahead->positions[i] * ahead->features;
        for (index_t f = 0; f < ahead->features; f += 16) __builtin_prefetch(row + f, 0, 2);
    }
}

static void step(const float *a, index_t stride, index_t rows, index_t inputs, const float *delta, index_t padded,
                 float keep, float sign, float *w, const Ahead *ahead) {
    const index_t vectors = padded / LANES, strips = (vectors + 3) / 4;
    for (index_t s = 0; s < strips; ++s) {
        const index_t j = cut(vectors, strips, s), v = cut(vectors, strips, s + 1) - j;
        const index_t most = ROWS(v), parts = (inputs + most - 1) / most;
        for (index_t p = 0; p < parts; ++p) {
            const index_t k = cut(inputs, parts, p), m = cut(inputs, parts, p + 1) - k;
            BY_SHAPE(step_block, a + k, stride, rows, delta + j * LANES, padded, keep, sign,
                     w + k * padded + j * LANES)
            if (ahead && s == 0) fetch(ahead, cut(ahead->count, parts, p), cut(ahead->count, parts, p + 1));
        }
    }
}

/* Weights (inputs, padded) as (units, up(inputs)), for the derivative by the input. */
static void transpose(const Dense *l, const float *weights, float *out) {
    const index_t width = up(l->inputs);
    if (width > l->inputs) memset(out, 0, l->outputs * width * sizeof(float));
    turn_matrix(weights, l->inputs, l->outputs, l->padded, out, width);
}

/* Faster than memcpy for a few kilobytes that the caches hold. */
INLINE void copy(const float *from, index_t count, float *to) {
    index_t i = 0;
    for (; i + LANES <= count; i += LANES) *(vec *)(to + i) = *(const loose *)(from + i);
    for (; i < count; ++i) to[i] = from[i];
}

static void rectify(float *x, index_t count) {
    for (index_t i = 0; i < count / LANES; ++i) ((vec *)x)[i] = rectified(((vec *)x)[i]);
}

static void mask(float *delta, const float *activation, index_t count) {
    for (index_t i = 0; i < count / LANES; ++i) {
        vec *place = (vec *)delta + i;
        *place = (vec)((ivec)*place & (((const vec *)activation)[i] > 0));
    }
}

/* Logits of the batch, given the input of the first dense layer. */
static void dense_forward(Net *net, index_t count) {
    const float *a = net->rows;
    index_t stride = net->stride;
    for (int i = 0; i < net->layers; ++i) {
        Dense *l = &net->dense[i];
        product(a, stride, count, l->inputs, net->weights + l->weight, l->padded, net->weights + l->bias, l->out);
        if (i < net->layers - 1) rectify(l->out, count * l->padded);
        a = l->out, stride = l->padded;
    }
}

/* Move target = keep target + sign * gradient for the dense layers; leave the derivative by their input. */
static void dense_backward(Net *net, index_t count, float keep, float sign, float *target, const Ahead *ahead) {
    for (int i = net->layers - 1; i >= 0; --i) {
        Dense *l = &net->dense[i];
        const float *a = i ? net->dense[i - 1].out : net->rows;
        const index_t stride = i ? net->dense[i - 1].padded : net->stride;
        if (i || net->convolutions) {
            float *below = i ? net->dense[i - 1].delta : net->row_delta;
            transpose(l, net->weights + l->weight, net->transposed);
            if (i) {
                product(l->delta, l->padded, count, l->outputs, net->transposed, stride, NULL, below);
                mask(below, a, count * stride);
            } else {
                const index_t width = up(l->inputs);
                product(l->delta, l->padded, count, l->outputs, net->transposed, width, NULL, below);
            }
        }
        step(a, stride, count, l->inputs, l->delta, l->padded, keep, sign, target + l->weight,
             i ? NULL : ahead);
        for (index_t j = 0; j < l->padded / LANES; ++j) {
            vec total = all(0);
            for (index_t r = 0; r < count; ++r) total += ((const vec *)(l->delta + r * l->padded))[j];
            vec *place = (vec *)(target + l->bias) + j;
            *place = keep * *place + sign * total;
        }
    }
}

#endif
