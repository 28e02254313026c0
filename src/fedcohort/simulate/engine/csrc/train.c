/* Local training of one client, written for the vector units of the machine that compiles it.
 *
 * A network is a chain of convolutions (each with optional max-pooling and ReLU) and dense layers (ReLU in between).
 * Two layouts keep the vectors full:
 *   - images: (feature, LANES samples), so that a vector is one pixel of LANES samples and any kernel size, number of
 *     channels or window is as good as another;
 *   - dense layers: (sample, unit), with the weights as (input, unit), units filled up to a multiple of LANES.
 * Everything a call needs besides its arguments lies in one scratch block that the caller keeps between calls.
 */
#include "convolution.h"
#include "dense.h"

#define MAX_ROWS 4096 /* samples of one batch */

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
        turn_matrix((float *)net->lower, features, smaller(LANES, count - block * LANES), LANES,
                    net->rows + block * LANES * net->stride, net->stride);
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
        spread(rows, 1, 1, features, 1, features, 0, 0, net->lower);
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
