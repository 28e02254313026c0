/* Dense layers: (sample, unit) times (input, unit), units filled up to whole vectors. */
#ifndef FEDCOHORT_DENSE_H
#define FEDCOHORT_DENSE_H

#include "network.h"

/* Matrices that are multiplied are given by their rows, which need not lie one after the other: samples are used where
 * they are. */
static void point(const float *matrix, index_t stride, index_t count, const float **rows) {
    for (index_t i = 0; i < count; ++i) rows[i] = matrix + i * stride;
}

/* out[i, :] = start + sum over k of a[i, k] w[k, :] for m rows and v vectors of units. */
INLINE void product_block(const int m, const int v, const float *const *a, index_t inputs, const float *w,
                          index_t padded, const float *bias, float *out) {
    const float *row[8];
    UNROLL for (int i = 0; i < m; ++i) row[i] = a[i];
    vec total[8][4];
    UNROLL for (int j = 0; j < v; ++j) {
        const vec start = bias ? ((const vec *)bias)[j] : all(0);
        UNROLL for (int i = 0; i < m; ++i) total[i][j] = start;
    }
    for (index_t k = 0; k < inputs; ++k) {
        vec units[4];
        UNROLL for (int j = 0; j < v; ++j) units[j] = ((const vec *)(w + k * padded))[j];
        UNROLL for (int i = 0; i < m; ++i) {
            const float x = row[i][k];
            UNROLL for (int j = 0; j < v; ++j) total[i][j] += x * units[j];
        }
    }
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) ((vec *)(out + i * padded))[j] = total[i][j];
}

/* Samples that will be needed soon, to be fetched from memory while something else is computed. */
typedef struct {
    const float *data;
    const index_t *positions; /* of those not begun yet */
    index_t count, features;
    const float *at, *end;    /* what is left of the one begun */
} Ahead;

#define LINE 16 /* numbers of a line of the caches */

INLINE void fetch(Ahead *ahead) {
    if (ahead->at >= ahead->end) {
        if (!ahead->count) return;
        --ahead->count;
        ahead->at = ahead->data + *ahead->positions++ * ahead->features;
        ahead->end = ahead->at + ahead->features;
    }
    __builtin_prefetch(ahead->at, 0, 2);
    ahead->at += LINE;
}

/* w[k, :] = keep w[k, :] + sign * sum over i of a[i, k] delta[i, :] for m inputs and v vectors of units.
 *
 * So many lines are fetched ahead on the way, one at a time: many at once would fill the processor's list of what it
 * waits for, and then it waits. */
INLINE void step_block(const int m, const int v, const float *const *a, index_t first, index_t rows,
                       const float *delta, index_t padded, float keep, float sign, float *w, Ahead *ahead,
                       index_t lines) {
    vec total[8][4];
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) total[i][j] = all(0);
    for (index_t r = 0; r < rows; ++r) {
        if (r < lines) fetch(ahead);
        vec units[4];
        UNROLL for (int j = 0; j < v; ++j) units[j] = ((const vec *)(delta + r * padded))[j];
        const float *row = a[r] + first;
        UNROLL for (int i = 0; i < m; ++i) {
            const float x = row[i];
            UNROLL for (int j = 0; j < v; ++j) total[i][j] += x * units[j];
        }
    }
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) {
            vec *place = (vec *)(w + i * padded) + j;
            *place = keep * *place + sign * total[i][j];
        }
    for (index_t r = rows; r < lines; ++r) fetch(ahead);
}

static void product(const float *const *a, index_t rows, index_t inputs, const float *w, index_t padded,
                    const float *bias, float *out) {
    const index_t vectors = padded / LANES, strips = (vectors + 3) / 4;
    for (index_t s = 0; s < strips; ++s) {
        const index_t j = cut(vectors, strips, s), v = cut(vectors, strips, s + 1) - j;
        const index_t most = ROWS(v), parts = (rows + most - 1) / most;
        for (index_t p = 0; p < parts; ++p) {
            const index_t i = cut(rows, parts, p), m = cut(rows, parts, p + 1) - i;
            BY_SHAPE(product_block, a + i, inputs, w + j * LANES, padded,
                     bias ? bias + j * LANES : NULL, out + i * padded + j * LANES)
        }
    }
}

static void step(const float *const *a, index_t rows, index_t inputs, const float *delta, index_t padded, float keep,
                 float sign, float *w, Ahead *ahead) {
    const index_t vectors = padded / LANES, strips = (vectors + 3) / 4;
    for (index_t s = 0; s < strips; ++s) {
        const index_t j = cut(vectors, strips, s), v = cut(vectors, strips, s + 1) - j;
        const index_t most = ROWS(v), parts = (inputs + most - 1) / most;
        const index_t lines = ahead && s == 0 ? ahead->count * ((ahead->features + LINE - 1) / LINE) : 0;
        for (index_t p = 0; p < parts; ++p) {
            const index_t k = cut(inputs, parts, p), m = cut(inputs, parts, p + 1) - k;
            BY_SHAPE(step_block, a, k, rows, delta + j * LANES, padded, keep, sign,
                     w + k * padded + j * LANES, ahead, cut(lines, parts, p + 1) - cut(lines, parts, p))
        }
    }
}

/* Weights (inputs, padded) as (units, up(inputs)), for the derivative by the input. */
static void transpose(const Dense *l, const float *weights, float *out) {
    const index_t width = up(l->inputs);
    if (width > l->inputs) memset(out, 0, l->outputs * width * sizeof(float));
    turn_matrix(weights, l->inputs, l->outputs, l->padded, out, width);
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

/* Logits of the batch, given the input of the first dense layer in net->input. */
static void dense_forward(Net *net, index_t count) {
    const float *rows[MAX_ROWS];
    for (int i = 0; i < net->layers; ++i) {
        Dense *l = &net->dense[i];
        if (i) point(net->dense[i - 1].out, net->dense[i - 1].padded, count, rows);
        product(i ? rows : net->input, count, l->inputs, net->weights + l->weight, l->padded, net->weights + l->bias,
                l->out);
        if (i < net->layers - 1) rectify(l->out, count * l->padded);
    }
}

/* Move target = keep target + sign * gradient for the dense layers; leave the derivative by their input. */
static void dense_backward(Net *net, index_t count, float keep, float sign, float *target, Ahead *ahead) {
    const float *rows[MAX_ROWS];
    for (int i = net->layers - 1; i >= 0; --i) {
        Dense *l = &net->dense[i];
        if (i || net->convolutions) {
            transpose(l, net->weights + l->weight, net->transposed);
            point(l->delta, l->padded, count, rows);
            if (i) {
                const Dense *lower = &net->dense[i - 1];
                product(rows, count, l->outputs, net->transposed, lower->padded, NULL, lower->delta);
                mask(lower->delta, lower->out, count * lower->padded);
            } else
                product(rows, count, l->outputs, net->transposed, up(l->inputs), NULL, net->row_delta);
        }
        if (i) point(net->dense[i - 1].out, net->dense[i - 1].padded, count, rows);
        step(i ? rows : net->input, count, l->inputs, l->delta, l->padded, keep, sign, target + l->weight,
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
