/* Convolutions with pooling and ReLU on images (feature, LANES samples); vectors.h says why this has no guard. */
#include "network.h"

#define convolution_block SIZED(convolution_block)
#define convolution_row SIZED(convolution_row)
#define add_sums SIZED(add_sums)
#define correlation_block SIZED(correlation_block)
#define correlation SIZED(correlation)
#define spread SIZED(spread)
#define convolution_forward SIZED(convolution_forward)
#define convolution_backward SIZED(convolution_backward)
#define block_forward SIZED(block_forward)
#define block_backward SIZED(block_backward)

/* out[o, p] = bias[o] + sum over c, r, s of w[c, r, s, o] x[c, r, p + s] for m outputs and v pixels of a row. */
INLINE void convolution_block(const int m, const int v, const vec *x, index_t channels, index_t plane, index_t line,
                              index_t first, index_t last, index_t left, index_t right, index_t columns,
                              const float *w, index_t outputs, index_t channel_weights, const float *bias, vec *out,
                              index_t out_plane) {
    vec total[8][4];
    UNROLL for (int i = 0; i < m; ++i) {
        const vec start = all(bias ? bias[i] : 0);
        UNROLL for (int j = 0; j < v; ++j) total[i][j] = start;
    }
    for (index_t c = 0; c < channels; ++c)
        for (index_t r = first; r < last; ++r) {
            const float *weight = w + c * channel_weights + (r * columns + left) * outputs;
            for (index_t s = left; s < right; ++s, weight += outputs) {
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

/* One row of a convolution: `wide` pixels of all outputs.
 *
 * Only rows first..last of the kernel meet the image, whose columns are all zeros but for begin..end. */
static void convolution_row(const vec *x, index_t channels, index_t plane, index_t line, index_t rows, index_t first,
                            index_t last, index_t begin, index_t end, index_t columns, const float *w,
                            const float *bias, index_t outputs, index_t wide, vec *out, index_t out_plane) {
    const index_t strips = (wide + 3) / 4;
    for (index_t q = 0; q < strips; ++q) {
        const index_t j = cut(wide, strips, q), v = cut(wide, strips, q + 1) - j;
        const index_t most = ROWS(v), parts = (outputs + most - 1) / most;
        const index_t left = begin > j + v - 1 ? begin - (j + v - 1) : 0, right = smaller(columns, end - j);
        for (index_t p = 0; p < parts; ++p) {
            const index_t i = cut(outputs, parts, p), m = cut(outputs, parts, p + 1) - i;
            BY_SHAPE(convolution_block, x + j, channels, plane, line, first, last, left, right, columns, w + i, outputs,
                     rows * columns * outputs, bias ? bias + i : NULL, out + i * out_plane + j, out_plane)
        }
    }
}

/* grad[j, i] += sum of total[j, i] for m outputs and v columns. */
static __attribute__((noinline)) void add_sums(const vec *total, index_t m, index_t v, float *grad, index_t outputs) {
    float found[32 + LANES];
    for (index_t first = 0; first < m * v; first += LANES) {
        vec square[LANES];
        for (int i = 0; i < LANES; ++i) square[i] = total[smaller(first + i, m * v - 1)];
        *(loose *)(found + first) = sums(square);
    }
    for (index_t j = 0; j < v; ++j)
        for (index_t i = 0; i < m; ++i) grad[j * outputs + i] += found[j * m + i];
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
    vec kept[32];
    UNROLL for (int i = 0; i < m; ++i)
        UNROLL for (int j = 0; j < v; ++j) kept[j * m + i] = total[i][j];
    add_sums(kept, m, v, grad, outputs);
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
            vec *line = to + (c * in_height + y + pad_y) * in_width + pad_x;
            const index_t start = (c * height + y) * width;
            index_t x = 0;
            for (; x + LANES <= width; x += LANES) {
                vec square[LANES];
                for (int i = 0; i < LANES; ++i) square[i] = *(const loose *)(rows[i] + start + x);
                turn_square(square);
                for (int i = 0; i < LANES; ++i) line[x + i] = square[i];
            }
            for (; x < width; ++x)
                for (int i = 0; i < LANES; ++i) line[x][i] = rows[i][start + x];
        }
}

/* One block of samples through one convolution, pooling and ReLU, into the next image (with its padding). */
static void convolution_forward(const Net *net, const Convolution *c, index_t block, vec *out, index_t out_height,
                                index_t out_width, index_t pad_y, index_t pad_x) {
    const vec *x = (const vec *)(c->x + block * c->channels * c->in_height * c->in_width);
    ivec *where = (ivec *)(c->where + block * c->outputs * c->out_height * c->out_width);
    vec *maps = (vec *)net->maps;
    const index_t plane = c->in_height * c->in_width;
    for (index_t y = 0; y < c->out_height; ++y) {
        for (index_t r = 0; r < c->pool_y; ++r)
            convolution_row(x + (y * c->pool_y + r) * c->in_width, c->channels, plane, c->in_width, c->rows, 0, c->rows,
                            0, c->in_width, c->columns, net->weights + c->weight, net->weights + c->bias, c->outputs,
                            c->out_width * c->pool_x, maps + r * c->wide, c->pool_y * c->wide);
        for (index_t o = 0; o < c->outputs; ++o)
            for (index_t i = 0; i < c->out_width; ++i) {
                const vec *window = maps + o * c->pool_y * c->wide + i * c->pool_x;
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
    const ivec *where = (const ivec *)(c->where + block * c->outputs * c->out_height * c->out_width);
    vec *upper = (vec *)net->upper, *lower = (vec *)net->lower, *inner = upper + c->margin_y * line + c->margin_x;
    memset(upper, 0, c->outputs * plane * sizeof(vec));
    for (index_t o = 0; o < c->outputs; ++o) {
        vec total = all(0);
        for (index_t y = 0; y < c->out_height; ++y)
            for (index_t x = 0; x < c->out_width; ++x) {
                const index_t at = (o * c->out_height + y) * c->out_width + x;
                const vec delta = lower[at];
                const ivec place = where[at];
                total += (vec)((ivec)delta & (place >= 0));
                vec *window = inner + o * plane + y * c->pool_y * line + x * c->pool_x;
                for (index_t r = 0; r < c->pool_y; ++r)
                    for (index_t s = 0; s < c->pool_x; ++s)
                        window[r * line + s] = (vec)((ivec)delta & (place == (int32_t)(r * c->pool_x + s)));
            }
        gradient[c->bias + o] += sum(total);
    }
    const vec *x = (const vec *)(c->x + block * c->channels * c->in_height * c->in_width);
    correlation(c, x, inner, plane, line, gradient + c->weight);
    if (!below) return;
    /* The derivative by the image is a convolution of the derivative with the kernel turned round. */
    for (index_t y = 0; y < c->height; ++y) {
        const index_t top = y + c->pad_y; /* of the padded derivative; rows beyond its margin are zeros */
        const index_t first = c->margin_y > top ? c->margin_y - top : 0;
        const index_t last = smaller(c->rows, c->high + c->margin_y - top);
        convolution_row(upper + top * line + c->pad_x, c->outputs, plane, line, c->rows, first, last,
                        c->margin_x - c->pad_x, c->margin_x - c->pad_x + c->wide, c->columns, c->turned, NULL,
                        c->channels, c->width, lower + y * c->width, c->height * c->width);
    }
}

/* Samples `first` and those after it, as many as there are lanes, through all convolutions into net->rows. */
static void block_forward(const Net *net, const float *data, const index_t *positions, index_t first, index_t count,
                          index_t block) {
    const Convolution *bottom = &net->convolution[0], *top = &net->convolution[net->convolutions - 1];
    const float *rows[LANES];
    for (int lane = 0; lane < LANES; ++lane) /* beyond the batch some sample of it, whose derivative is zero */
        rows[lane] = data + positions[smaller(first + lane, count - 1)] * net->features;
    spread(rows, bottom->channels, bottom->height, bottom->width, bottom->in_height, bottom->in_width, bottom->pad_y,
           bottom->pad_x, (vec *)(bottom->x + block * bottom->channels * bottom->in_height * bottom->in_width));
    for (const Convolution *c = bottom; c < top; ++c) {
        const Convolution *n = c + 1;
        convolution_forward(net, c, block, (vec *)(n->x + block * n->channels * n->in_height * n->in_width),
                            n->in_height, n->in_width, n->pad_y, n->pad_x);
    }
    convolution_forward(net, top, block, (vec *)net->lower, top->out_height, top->out_width, 0, 0);
    turn_matrix((const float *)net->lower, top->outputs * top->out_height * top->out_width,
                smaller(LANES, count - first), LANES, net->rows + first * net->stride, net->stride);
}

/* Add these samples' part to the gradient, given the derivative by net->rows. */
static void block_backward(const Net *net, index_t first, index_t count, index_t block) {
    const Convolution *bottom = &net->convolution[0], *top = &net->convolution[net->convolutions - 1];
    const index_t features = top->outputs * top->out_height * top->out_width, width = up(features);
    const float *rows[LANES];
    for (int lane = 0; lane < LANES; ++lane)
        rows[lane] = first + lane < count ? net->row_delta + (first + lane) * width : nothing;
    spread(rows, 1, 1, features, 1, features, 0, 0, (vec *)net->lower);
    for (const Convolution *c = top; c >= bottom; --c) convolution_backward(net, c, block, c > bottom, net->gradient);
}
