/* Local training of one client, written for the vector units of the machine that compiles it.
 *
 * A network is a chain of convolutions (each with optional max-pooling and ReLU) and dense layers (ReLU in between).
 * Two layouts keep the vectors full:
 *   - images: (feature, LANES samples), so that a vector is one pixel of LANES samples and any kernel size, number of
 *     channels or window is as good as another;
 *   - dense layers: (sample, unit), with the weights as (input, unit), units filled up to a multiple of LANES.
 * Everything a call needs besides its arguments lies in one scratch block that the caller keeps between calls.
 */
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
#define MAX_LAYERS 32
#define MAX_ROWS 4096 /* samples of one batch */

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

/* ---------------------------------------------------------------------------------------------------- the network */

typedef struct {
    index_t channels, height, width; /* of the input, without padding */
    index_t outputs, rows, columns, pad_y, pad_x, pool_y, pool_x, relu;
    index_t in_height, in_width;     /* of the input, with padding */
    index_t high, wide;              /* of the convolution's result */
    index_t out_height, out_width;   /* after pooling */
    index_t margin_y, margin_x;      /* zeros around the derivative, for the derivative by the input */
    index_t weight, bias;            /* in the packed vector: (channels, rows, columns, outputs), (outputs) */
    vec *x;                          /* (blocks, channels, in_height, in_width) */
    ivec *where;                     /* (blocks, outputs, out_height, out_width) the place of each maximum */
    float *turned;                   /* (outputs, rows, columns, channels) the kernel turned round */
} Convolution;

typedef struct {
    index_t inputs, outputs, padded;
    index_t weight, bias; /* in the packed vector: (inputs, padded), (padded) */
    float *out;           /* (batch, padded) pre-activations, then activations */
    float *delta;         /* (batch, padded) */
} Dense;

typedef struct {
    int convolutions, layers;
    Convolution convolution[MAX_LAYERS];
    Dense dense[MAX_LAYERS];
    index_t size;         /* of the packed vector */
    index_t features;     /* of a sample */
    index_t batch;        /* samples of the largest batch */
    index_t blocks;       /* of LANES samples */
    float *weights, *gradient, *velocity, *pull; /* packed vectors */
    float *rows;          /* (batch, stride): the input of the first dense layer */
    float *row_delta;     /* its derivative */
    index_t stride;
    vec *maps, *upper, *lower; /* results of a convolution before pooling, derivatives by its result and its input */
    float *transposed;    /* weights of a dense layer, for the derivative by its input */
} Net;

static index_t claim(index_t *used, index_t floats) {
    const index_t start = *used;
    *used += (floats + 63) / 64 * 64;
    return start;
}

/* Read the description (see native.py) and lay everything out in the scratch block; return the floats it takes. */
static index_t lay_out(Net *net, const index_t *description, index_t batch, float *scratch) {
    const index_t *d = description;
    index_t used = 0;
    net->convolutions = (int)*d++;
    net->size = 0;
    net->batch = batch;
    net->blocks = (batch + LANES - 1) / LANES;
    index_t maps = 0, upper = 0, lower = 0, transposed = 0;
    for (int i = 0; i < net->convolutions; ++i) {
        Convolution *c = &net->convolution[i];
        c->channels = *d++, c->height = *d++, c->width = *d++, c->outputs = *d++, c->rows = *d++, c->columns = *d++;
        c->pad_y = *d++, c->pad_x = *d++, c->pool_y = *d++, c->pool_x = *d++, c->relu = *d++;
        c->in_height = c->height + 2 * c->pad_y, c->in_width = c->width + 2 * c->pad_x;
        c->high = c->in_height - c->rows + 1, c->wide = c->in_width - c->columns + 1;
        c->out_height = c->high / c->pool_y, c->out_width = c->wide / c->pool_x;
        c->margin_y = i ? c->rows - 1 : 0, c->margin_x = i ? c->columns - 1 : 0;
        c->weight = claim(&net->size, c->channels * c->rows * c->columns * c->outputs);
        c->bias = claim(&net->size, c->outputs);
        c->x = (vec *)(scratch + claim(&used, net->blocks * c->channels * c->in_height * c->in_width * LANES));
        c->where = (ivec *)(scratch + claim(&used, net->blocks * c->outputs * c->out_height * c->out_width * LANES));
        const index_t row = c->outputs * c->pool_y * c->wide;
        const index_t derivative = c->outputs * (c->high + 2 * c->margin_y) * (c->wide + 2 * c->margin_x);
        maps = row > maps ? row : maps;
        upper = derivative > upper ? derivative : upper;
        const index_t pooled = c->outputs * c->out_height * c->out_width;
        lower = pooled > lower ? pooled : lower;
        c->turned = scratch + claim(&used, i ? c->channels * c->rows * c->columns * c->outputs : 0);
    }
    net->layers = (int)*d++;
    for (int i = 0; i < net->layers; ++i) {
        Dense *l = &net->dense[i];
        l->inputs = *d++, l->outputs = *d;
        l->padded = up(l->outputs);
        l->weight = claim(&net->size, l->inputs * l->padded);
        l->bias = claim(&net->size, l->padded);
        l->out = scratch + claim(&used, batch * l->padded);
        l->delta = scratch + claim(&used, batch * l->padded);
        const index_t weights = l->padded * up(l->inputs);
        if (i || net->convolutions) transposed = weights > transposed ? weights : transposed;
    }
    net->features = net->convolutions
        ? net->convolution[0].channels * net->convolution[0].height * net->convolution[0].width
        : net->dense[0].inputs;
    /* An odd number of vectors from row to row: columns then fall into all sets of a cache. */
    net->stride = (up(net->dense[0].inputs) / LANES | 1) * LANES;
    net->rows = scratch + claim(&used, batch * net->stride);
    net->row_delta = scratch + claim(&used, net->convolutions ? batch * net->stride : 0);
    net->maps = (vec *)(scratch + claim(&used, maps * LANES));
    net->upper = (vec *)(scratch + claim(&used, upper * LANES));
    net->lower = (vec *)(scratch + claim(&used, lower * LANES));
    net->transposed = scratch + claim(&used, transposed);
    net->weights = scratch + claim(&used, net->size);
    net->gradient = scratch + claim(&used, net->size);
    net->velocity = scratch + claim(&used, net->size);
    net->pull = scratch + claim(&used, net->size);
    return used;
}

/* Between torch's flat vector and the packed one: (outputs, inputs) is stored as (inputs, padded). */
static void exchange(float *packed, index_t inputs, index_t outputs, index_t padded, float *flat, int pack) {
    for (index_t k0 = 0; k0 < inputs; k0 += 16)
        for (index_t o = 0; o < outputs; ++o)
            for (index_t k = k0; k < smaller(k0 + 16, inputs); ++k)
                if (pack) packed[k * padded + o] = flat[o * inputs + k];
                else flat[o * inputs + k] = packed[k * padded + o];
}

static void convert(const Net *net, float *packed, float *flat, int pack) {
    if (pack) memset(packed, 0, net->size * sizeof(float));
    for (int i = 0; i < net->convolutions + net->layers; ++i) {
        const int image = i < net->convolutions;
        const Convolution *c = &net->convolution[i];
        const Dense *l = &net->dense[i - net->convolutions];
        const index_t inputs = image ? c->channels * c->rows * c->columns : l->inputs;
        const index_t outputs = image ? c->outputs : l->outputs, padded = image ? outputs : l->padded;
        exchange(packed + (image ? c->weight : l->weight), inputs, outputs, padded, flat, pack);
        flat += inputs * outputs;
        float *bias = packed + (image ? c->bias : l->bias);
        if (pack) memcpy(bias, flat, outputs * sizeof(float));
        else memcpy(flat, bias, outputs * sizeof(float));
        flat += outputs;
    }
}

/* --------------------------------------------------------------------------------------------------- dense layers */

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
    memset(out, 0, l->outputs * width * sizeof(float));
    for (index_t o0 = 0; o0 < l->outputs; o0 += 16)
        for (index_t k = 0; k < l->inputs; ++k)
            for (index_t o = o0; o < smaller(o0 + 16, l->outputs); ++o) out[o * width + k] = weights[k * l->padded + o];
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

/* --------------------------------------------------------------------------------------------------- convolutions */

/* out[o, p] = bias[o] + sum over c, r, s of w[c, r, s, o] x[c, r, p + s] for m outputs and v pixels of a row. */
INLINE void convolution_block(const int m, const int v, const vec *x, index_t channels, index_t plane, index_t line,
                              index_t first, index_t last, index_t columns, const float *w, index_t outputs,
                              index_t channel_weights, const float *bias, vec *out, index_t out_plane) {
    vec total[8][4];
    UNROLL for (int i = 0; i < m; ++i) {
        const vec start = all(bias ? bias[i] : 0);
        UNROLL for (int j = 0; j < v; ++j) total[i][j] = start;
    }
    for (index_t c = 0; c < channels; ++c) {
        const float *weight = w + c * channel_weights + first * columns * outputs;
        for (index_t r = first; r < last; ++r)
            for (index_t s = 0; s < columns; ++s, weight += outputs) {
                const vec *from = x + c * plane + r * line + s;
                vec pixel[4];
                UNROLL for (int j = 0; j < v; ++j) pixel[j] = from[j];
                UNROLL for (int i = 0; i < m; ++i)
                    UNROLL for (int j = 0; j < v; ++j) total[i][j] += weight[i] * pixel[j];
            }
    }
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) out[i * out_plane + j] = total[i][j];
}

/* One row of a convolution: `wide` pixels of all outputs; only rows first..last of the kernel meet the image. */
static void convolution_row(const vec *x, index_t channels, index_t plane, index_t line, index_t rows, index_t first,
                            index_t last, index_t columns, const float *w, const float *bias, index_t outputs,
                            index_t wide, vec *out, index_t out_plane) {
    const index_t strips = (wide + 3) / 4;
    for (index_t q = 0; q < strips; ++q) {
        const index_t j = cut(wide, strips, q), v = cut(wide, strips, q + 1) - j;
        const index_t most = ROWS(v), parts = (outputs + most - 1) / most;
        for (index_t p = 0; p < parts; ++p) {
            const index_t i = cut(outputs, parts, p), m = cut(outputs, parts, p + 1) - i;
            BY_SHAPE(convolution_block, x + j, channels, plane, line, first, last, columns, w + i, outputs,
                     rows * columns * outputs, bias ? bias + i : NULL, out + i * out_plane + j, out_plane)
        }
    }
}

/* grad[s, o] += sum over y, x and samples of delta[o, y, x] image[y, x + s] for m outputs and v columns of a kernel. */
INLINE void correlation_block(const int m, const int v, const vec *image, index_t line, const vec *delta,
                              index_t delta_plane, index_t delta_line, index_t high, index_t wide, float *grad,
                              index_t outputs) {
    vec total[8][4];
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) total[i][j] = all(0);
    for (index_t y = 0; y < high; ++y)
        for (index_t x = 0; x < wide; ++x) {
            const vec *from = image + y * line + x, *by = delta + y * delta_line + x;
            vec pixel[4];
            UNROLL for (int j = 0; j < v; ++j) pixel[j] = from[j];
            UNROLL for (int i = 0; i < m; ++i) {
                const vec d = by[i * delta_plane];
                UNROLL for (int j = 0; j < v; ++j) total[i][j] += d * pixel[j];
            }
        }
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) grad[j * outputs + i] += sum(total[i][j]);
}

static void correlation(const Convolution *c, const vec *image, const vec *delta, index_t delta_plane,
                        index_t delta_line, float *grad) {
    const index_t strips = (c->columns + 3) / 4;
    for (index_t k = 0; k < c->channels; ++k)
        for (index_t r = 0; r < c->rows; ++r)
            for (index_t q = 0; q < strips; ++q) {
                const index_t s = cut(c->columns, strips, q), v = cut(c->columns, strips, q + 1) - s;
                const index_t most = ROWS(v), parts = (c->outputs + most - 1) / most;
                const vec *from = image + (k * c->in_height + r) * c->in_width + s;
                for (index_t p = 0; p < parts; ++p) {
                    const index_t i = cut(c->outputs, parts, p), m = cut(c->outputs, parts, p + 1) - i;
                    BY_SHAPE(correlation_block, from, c->in_width, delta + i * delta_plane, delta_plane, delta_line,
                             c->high, c->wide, grad + ((k * c->rows + r) * c->columns + s) * c->outputs + i,
                             c->outputs)
                }
            }
}

/* Samples as vectors over the samples: to[feature][lane], inside the padding of the image. */
static void spread(const float *const *rows, index_t channels, index_t height, index_t width, index_t in_height,
                   index_t in_width, index_t pad_y, index_t pad_x, vec *to) {
    for (index_t c = 0; c < channels; ++c)
        for (index_t y = 0; y < height; ++y) {
            float *line = (float *)(to + (c * in_height + y + pad_y) * in_width + pad_x);
            const index_t start = (c * height + y) * width;
            for (index_t x = 0; x < width; ++x)
                for (int lane = 0; lane < LANES; ++lane) line[x * LANES + lane] = rows[lane][start + x];
        }
}

/* One block of samples through one convolution, pooling and ReLU, into the next image (with its padding). */
static void convolution_forward(const Net *net, const Convolution *c, index_t block, vec *out, index_t out_height,
                                index_t out_width, index_t pad_y, index_t pad_x) {
    const vec *x = c->x + block * c->channels * c->in_height * c->in_width;
    ivec *where = c->where + block * c->outputs * c->out_height * c->out_width;
    const index_t plane = c->in_height * c->in_width;
    for (index_t y = 0; y < c->out_height; ++y) {
        for (index_t r = 0; r < c->pool_y; ++r)
            convolution_row(x + (y * c->pool_y + r) * c->in_width, c->channels, plane, c->in_width, c->rows, 0, c->rows,
                            c->columns, net->weights + c->weight, net->weights + c->bias, c->outputs,
                            c->out_width * c->pool_x, net->maps + r * c->wide, c->pool_y * c->wide);
        for (index_t o = 0; o < c->outputs; ++o)
            for (index_t i = 0; i < c->out_width; ++i) {
                const vec *window = net->maps + o * c->pool_y * c->wide + i * c->pool_x;
                vec best = window[0];
                ivec place = {0};
                for (index_t r = 0; r < c->pool_y; ++r)
                    for (index_t s = 0; s < c->pool_x; ++s) {
                        const vec value = window[r * c->wide + s];
                        const ivec greater = value > best;
                        best = pick(greater, value, best);
                        place = (greater & (int32_t)(r * c->pool_x + s)) | (~greater & place);
                    }
                if (c->relu) {
                    place |= ~(best > 0); /* a place no pixel has: the derivative goes nowhere */
                    best = rectified(best);
                }
                where[(o * c->out_height + y) * c->out_width + i] = place;
                out[(o * out_height + y + pad_y) * out_width + i + pad_x] = best;
            }
    }
}

/* Add one block's part of the gradient; write the derivative by the image (without padding) into net->lower. */
static void convolution_backward(const Net *net, const Convolution *c, index_t block, int below, float *gradient) {
    const index_t line = c->wide + 2 * c->margin_x, plane = (c->high + 2 * c->margin_y) * line;
    const ivec *where = c->where + block * c->outputs * c->out_height * c->out_width;
    vec *inner = net->upper + c->margin_y * line + c->margin_x;
    memset(net->upper, 0, c->outputs * plane * sizeof(vec));
    for (index_t o = 0; o < c->outputs; ++o) {
        vec total = all(0);
        for (index_t y = 0; y < c->out_height; ++y)
            for (index_t x = 0; x < c->out_width; ++x) {
                const index_t at = (o * c->out_height + y) * c->out_width + x;
                const vec delta = net->lower[at];
                const ivec place = where[at];
                total += (vec)((ivec)delta & (place >= 0));
                vec *window = inner + o * plane + y * c->pool_y * line + x * c->pool_x;
                for (index_t r = 0; r < c->pool_y; ++r)
                    for (index_t s = 0; s < c->pool_x; ++s)
                        window[r * line + s] = (vec)((ivec)delta & (place == (int32_t)(r * c->pool_x + s)));
            }
        gradient[c->bias + o] += sum(total);
    }
    const vec *x = c->x + block * c->channels * c->in_height * c->in_width;
    correlation(c, x, inner, plane, line, gradient + c->weight);
    if (!below) return;
    /* The derivative by the image is a convolution of the derivative with the kernel turned round. */
    for (index_t y = 0; y < c->height; ++y) {
        const index_t top = y + c->pad_y; /* of the padded derivative; rows beyond its margin are zeros */
        const index_t first = c->margin_y > top ? c->margin_y - top : 0;
        const index_t last = smaller(c->rows, c->high + c->margin_y - top);
        convolution_row(net->upper + top * line + c->pad_x, c->outputs, plane, line, c->rows, first, last, c->columns,
                        c->turned, NULL, c->channels, c->width, net->lower + y * c->width, c->height * c->width);
    }
}

/* Weights (channels, rows, columns, outputs) as (outputs, rows turned, columns turned, channels). */
static void turn(const Net *net, const Convolution *c) {
    for (index_t k = 0; k < c->channels; ++k)
        for (index_t r = 0; r < c->rows; ++r)
            for (index_t s = 0; s < c->columns; ++s) {
                const float *from = net->weights + c->weight + ((k * c->rows + r) * c->columns + s) * c->outputs;
                for (index_t o = 0; o < c->outputs; ++o)
                    c->turned[((o * c->rows + c->rows - 1 - r) * c->columns + c->columns - 1 - s) * c->channels + k]
                        = from[o];
            }
}

/* ----------------------------------------------------------------------------------------------- the whole network */

/* Logits of `count` samples, at data + position * features. */
static void forward(Net *net, const float *data, const index_t *positions, index_t count) {
    if (!net->convolutions) {
        for (index_t i = 0; i < count; ++i)
            copy(data + positions[i] * net->features, net->features, net->rows + i * net->stride);
        dense_forward(net, count);
        return;
    }
    const Convolution *first = &net->convolution[0], *last = &net->convolution[net->convolutions - 1];
    const index_t features = last->outputs * last->out_height * last->out_width;
    for (index_t block = 0; block * LANES < count; ++block) {
        const float *rows[LANES];
        for (int lane = 0; lane < LANES; ++lane) /* beyond the batch some sample of it, whose derivative is zero */
            rows[lane] = data + positions[smaller(block * LANES + lane, count - 1)] * net->features;
        spread(rows, first->channels, first->height, first->width, first->in_height, first->in_width, first->pad_y,
               first->pad_x, first->x + block * first->channels * first->in_height * first->in_width);
        for (const Convolution *c = first; c <= last; ++c) {
            if (c < last) {
                const Convolution *n = c + 1;
                convolution_forward(net, c, block, n->x + block * n->channels * n->in_height * n->in_width,
                                    n->in_height, n->in_width, n->pad_y, n->pad_x);
            } else
                convolution_forward(net, c, block, net->lower, c->out_height, c->out_width, 0, 0);
        }
        for (int lane = 0; lane < LANES && block * LANES + lane < count; ++lane) {
            float *row = net->rows + (block * LANES + lane) * net->stride;
            for (index_t f = 0; f < features; ++f) row[f] = ((float *)net->lower)[f * LANES + lane];
        }
    }
    dense_forward(net, count);
}

/* target = keep target + sign * gradient, given the derivative by the logits. */
static void backward(Net *net, index_t count, float keep, float sign, float *target, const Ahead *ahead) {
    dense_backward(net, count, keep, sign, target, ahead);
    if (!net->convolutions) return;
    const Convolution *first = &net->convolution[0], *last = &net->convolution[net->convolutions - 1];
    const index_t features = last->outputs * last->out_height * last->out_width, width = up(features);
    const index_t images = net->dense[0].weight; /* the convolutions come first in the packed vector */
    static const float nothing[1 << 16];
    memset(net->gradient, 0, images * sizeof(float));
    for (const Convolution *c = first + 1; c <= last; ++c) turn(net, c);
    for (index_t block = 0; block * LANES < count; ++block) {
        const float *rows[LANES];
        for (int lane = 0; lane < LANES; ++lane)
            rows[lane] = block * LANES + lane < count ? net->row_delta + (block * LANES + lane) * width : nothing;
        spread(rows, features, 1, 1, 1, 1, 0, 0, net->lower);
        for (const Convolution *c = last; c >= first; --c)
            convolution_backward(net, c, block, c > first, net->gradient);
    }
    for (index_t i = 0; i < images / LANES; ++i) {
        vec *place = (vec *)target + i;
        *place = keep * *place + sign * ((const vec *)net->gradient)[i];
    }
}

typedef struct {
    double alpha, beta, log_zero;
} Robust;

/* Turn logits into `scale` times the derivative of the loss by them; return the sum of the losses if `wanted`. */
static double loss(const Net *net, index_t count, const int64_t *labels, const int64_t *pseudo, const index_t *order,
                   const Robust *robust, float scale, int wanted) {
    const Dense *top = &net->dense[net->layers - 1];
    const index_t vectors = top->padded / LANES, classes = top->outputs;
    double total = 0;
    for (index_t i = 0; i < count; ++i) {
        float *logits = top->out + i * top->padded, *delta = top->delta + i * top->padded;
        const index_t y = labels[order[i]];
        for (index_t k = classes; k < top->padded; ++k) logits[k] = -INFINITY;
        float greatest = logits[0];
        for (index_t k = 1; k < classes; ++k) greatest = logits[k] > greatest ? logits[k] : greatest;
        vec mass = all(0);
        for (index_t j = 0; j < vectors; ++j) {
            const vec e = exponential(((const vec *)logits)[j] - greatest);
            ((vec *)delta)[j] = e;
            mass += e;
        }
        for (index_t k = classes; k < top->padded; ++k) delta[k] = 0; /* it was 1e-38: no matter in the sum */
        const float whole = sum(mass);
        const float q = delta[y] / whole;
        float strength = 0;
        if (pseudo) strength = (float)(robust->beta * robust->log_zero) * q;
        const float factor = scale * (pseudo ? 1 + (float)robust->alpha - strength : 1) / whole;
        for (index_t j = 0; j < vectors; ++j) ((vec *)delta)[j] *= factor;
        delta[y] += scale * (strength - 1);
        if (pseudo) delta[pseudo[order[i]]] -= scale * (float)robust->alpha;
        if (wanted) {
            const double normaliser = greatest + log((double)whole), by_label = normaliser - logits[y];
            total += by_label;
            if (pseudo)
                total += robust->alpha * (normaliser - logits[pseudo[order[i]]])
                    - robust->beta * robust->log_zero * (1 - exp(-by_label));
        }
    }
    return total;
}

/* Lay the network out and load a flat vector into it. */
static void load(Net *net, const index_t *description, index_t width, float *scratch, const float *vector) {
    lay_out(net, description, width, scratch);
    for (int i = 0; i < net->convolutions; ++i) { /* the padding of an image is zero and is never written again */
        const Convolution *c = &net->convolution[i];
        if (c->pad_y || c->pad_x)
            memset(c->x, 0, net->blocks * c->channels * c->in_height * c->in_width * sizeof(vec));
    }
    convert(net, net->weights, (float *)vector, 1);
}

/* ------------------------------------------------------------------------------------------------- what is exported */

/* Bytes of scratch for batches of up to `batch` samples. */
index_t fedcohort_scratch(const index_t *description, index_t batch) {
    Net net;
    return lay_out(&net, description, batch, NULL) * (index_t)sizeof(float);
}

/* Train one client from `start` into `out` (flat vectors); return the mean loss of its first batch.
 *
 * sample, label, pseudo: of the client's training samples; pseudo may be NULL.
 * indices (steps, width), counts (steps), rates (steps): the batches. correction: flat vector or NULL.
 * settings: prox, weight decay, momentum, and the robust loss's alpha, beta and log 0.
 */
double fedcohort_train(const index_t *description, float *scratch, const float *data, const int64_t *sample,
                       const int64_t *label, const int64_t *pseudo, const int64_t *indices, const int64_t *counts,
                       const double *rates, index_t steps, index_t width, const float *start, float *out,
                       const float *correction, const double *settings) {
    Net net;
    load(&net, description, width, scratch, start);
    const float prox = (float)settings[0], shrink = (float)(settings[0] + settings[1]), momentum = (float)settings[2];
    const Robust robust = {settings[3], settings[4], settings[5]};
    const int pulled = prox != 0 || correction;
    if (correction) convert(&net, net.pull, (float *)correction, 1);
    else if (pulled) memset(net.pull, 0, net.size * sizeof(float));
    if (pulled) /* the part of the gradient that stays the same: prox * start - correction */
        for (index_t i = 0; i < net.size; ++i) net.pull[i] = prox * net.weights[i] - net.pull[i];
    if (momentum) memset(net.velocity, 0, net.size * sizeof(float));
    double first_loss = NAN;
    index_t positions[MAX_ROWS];
    for (index_t i = 0; i < counts[0]; ++i) positions[i] = sample[indices[i]];
    for (index_t t = 0; t < steps; ++t) {
        const int64_t *batch = indices + t * width;
        const index_t count = counts[t];
        const float rate = (float)rates[t];
        forward(&net, data, positions, count);
        const float scale = (float)((momentum ? 1 : rates[t]) / (double)count);
        const double mean = loss(&net, count, label, pseudo, batch, &robust, scale, t == 0) / (double)count;
        if (t == 0) first_loss = mean;
        const Ahead next = {data, positions, t + 1 < steps ? counts[t + 1] : 0, net.features};
        for (index_t i = 0; i < next.count; ++i) positions[i] = sample[batch[width + i]];
        if (!momentum) { /* the learning rate is in the derivative already */
            backward(&net, count, 1 - rate * shrink, -1, net.weights, &next);
            if (pulled)
                for (index_t i = 0; i < net.size; ++i) net.weights[i] += rate * net.pull[i];
        } else {
            backward(&net, count, momentum, 1, net.velocity, &next);
            for (index_t i = 0; i < net.size; ++i) {
                float speed = net.velocity[i] + shrink * net.weights[i];
                if (pulled) speed -= net.pull[i];
                net.velocity[i] = speed;
                net.weights[i] -= rate * speed;
            }
        }
    }
    convert(&net, net.weights, out, 0);
    return first_loss;
}

/* Transposed logits (classes, count) of `count` rows of data, `width` at a time. */
void fedcohort_scores(const index_t *description, float *scratch, const float *vector, const float *data,
                      index_t count, index_t width, float *out) {
    Net net;
    load(&net, description, width, scratch, vector);
    const Dense *top = &net.dense[net.layers - 1];
    index_t positions[MAX_ROWS];
    for (index_t start = 0; start < count; start += width) {
        const index_t rows = smaller(width, count - start);
        for (index_t i = 0; i < rows; ++i) positions[i] = start + i;
        forward(&net, data, positions, rows);
        for (index_t k = 0; k < top->outputs; ++k)
            for (index_t i = 0; i < rows; ++i) out[k * count + start + i] = top->out[i * top->padded + k];
    }
}

/* Gradient (flat) of the mean cross-entropy of `count` rows of data. */
void fedcohort_gradient(const index_t *description, float *scratch, const float *vector, const float *data,
                        const int64_t *label, index_t count, index_t width, float *out) {
    Net net;
    load(&net, description, width, scratch, vector);
    memset(net.velocity, 0, net.size * sizeof(float));
    index_t positions[MAX_ROWS];
    for (index_t start = 0; start < count; start += width) {
        const index_t rows = smaller(width, count - start);
        for (index_t i = 0; i < rows; ++i) positions[i] = start + i;
        forward(&net, data, positions, rows);
        loss(&net, rows, label, NULL, positions, NULL, 1 / (float)count, 0);
        backward(&net, rows, 1, 1, net.velocity, NULL);
    }
    convert(&net, net.velocity, out, 0);
}
