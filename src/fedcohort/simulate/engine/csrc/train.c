/* Local training of clients, each by one thread, written for the vector units of the machine that compiles it.
 *
 * A network is a chain of convolutions (each with optional max-pooling and ReLU) and dense layers (ReLU in between).
 * Two layouts keep the vectors full:
 *   - images: (feature, LANES samples), so that a vector is one pixel of LANES samples and any kernel size, number of
 *     channels or window is as good as another;
 *   - dense layers: (sample, unit), with the weights as (input, unit), units filled up to a multiple of LANES.
 * Everything a thread needs besides its arguments lies in one scratch block that the caller keeps between calls.
 */
#include <pthread.h>

#include "convolution.h"
#include "dense.h"

/* The rest of a batch that fills no more than half of the lanes goes through vectors half as long, where there are any:
 * of fifty samples, the last two. Their results are the same, bit by bit. */
#if HALF
#undef LANES
#define LANES HALF
#include "lanes.h"
#include "convolution.h"
#endif
static __typeof__(block_forward) *const rest_forward = block_forward;
static __typeof__(block_backward) *const rest_backward = block_backward;
#undef LANES
#define LANES FULL

#define MAX_THREADS 512

/* Logits of `count` samples, at data + position * features. */
static void forward(Net *net, const float *data, const index_t *positions, index_t count) {
    if (!net->convolutions) {
        for (index_t i = 0; i < count; ++i) net->input[i] = data + positions[i] * net->features;
        dense_forward(net, count);
        return;
    }
    for (index_t first = 0; first < count; first += FULL)
        if (count - first > HALF) block_forward(net, data, positions, first, count, first / FULL);
        else rest_forward(net, data, positions, first, count, net->blocks);
    point(net->rows, net->stride, count, net->input);
    dense_forward(net, count);
}

/* target = keep target + sign * gradient, given the derivative by the logits. */
static void backward(Net *net, index_t count, float keep, float sign, float *target, Ahead *ahead) {
    dense_backward(net, count, keep, sign, target, ahead);
    if (!net->convolutions) return;
    const index_t images = net->dense[0].weight; /* the convolutions come first in the packed vector */
    memset(net->gradient, 0, images * sizeof(float));
    for (int i = 1; i < net->convolutions; ++i) turn(net, &net->convolution[i]);
    for (index_t first = 0; first < count; first += FULL)
        if (count - first > HALF) block_backward(net, first, count, first / FULL);
        else rest_backward(net, first, count, net->blocks);
    for (index_t i = 0; i < images / LANES; ++i) {
        vec *place = (vec *)target + i;
        *place = keep * *place + sign * ((const vec *)net->gradient)[i];
    }
}

/* Turn the logits of a sample into exponentials below the greatest, in `delta`; return their sum and the greatest. */
static float exponentials(const Dense *top, float *logits, float *delta, float *greatest) {
    for (index_t k = top->outputs; k < top->padded; ++k) logits[k] = -INFINITY;
    *greatest = logits[0];
    for (index_t k = 1; k < top->outputs; ++k) *greatest = logits[k] > *greatest ? logits[k] : *greatest;
    vec mass = all(0);
    for (index_t j = 0; j < top->padded / LANES; ++j) {
        const vec e = exponential(((const vec *)logits)[j] - *greatest);
        ((vec *)delta)[j] = e;
        mass += e;
    }
    for (index_t k = top->outputs; k < top->padded; ++k) delta[k] = 0; /* it was 1e-38: no matter in the sum */
    return sum(mass);
}

/* Turn logits into `scale` times the derivative of the loss by them; with pseudo-labels, of FLASH's robust loss. */
static void differentiate_loss(const Net *net, index_t count, const int64_t *labels, const int64_t *pseudo,
                               const index_t *order, const Settings *settings, float scale) {
    const Dense *top = &net->dense[net->layers - 1];
    for (index_t i = 0; i < count; ++i) {
        float *delta = top->delta + i * top->padded, greatest;
        const index_t y = labels[order[i]];
        const index_t r = pseudo && settings->reverse_pseudo ? pseudo[order[i]] : y; /* of the reverse cross-entropy */
        const float whole = exponentials(top, top->out + i * top->padded, delta, &greatest);
        float strength = 0, factor = scale / whole;
        if (pseudo) {
            const float alpha = (float)settings->alpha;
            strength = (float)(settings->beta * settings->log_zero) * (delta[r] / whole);
            factor = scale * (1 + alpha - strength) / whole;
        }
        for (index_t j = 0; j < top->padded / LANES; ++j) ((vec *)delta)[j] *= factor;
        delta[y] += scale * ((r == y ? strength : 0) - 1);
        if (r != y) delta[r] += scale * strength;
        if (pseudo) delta[pseudo[order[i]]] -= scale * (float)settings->alpha;
    }
}

/* Lay the network out and load a flat vector into it. */
static void load(Net *net, const Description *description, index_t width, float *scratch, const float *vector) {
    lay_out(net, description, width, scratch);
    for (int i = 0; i < net->convolutions; ++i) { /* the padding of an image is zero and is never written again */
        const Convolution *c = &net->convolution[i];
        if (c->pad_y || c->pad_x)
            memset(c->x, 0, (net->blocks * FULL + HALF) * c->channels * c->in_height * c->in_width * sizeof(float));
    }
    convert(net, net->weights, (float *)vector, 1);
}

/* ------------------------------------------------------------------------------------------------------ units of work */

/* What all units of a call share. */
typedef struct {
    const Description *description;
    const float *data; /* all samples, one row each */
    const Settings *settings;
    index_t width;     /* samples of one pass where nothing is trained */
} Shared;

/* The local training of one client. */
typedef struct {
    const int64_t *sample, *label, *pseudo; /* of the client's training samples; pseudo may be NULL */
    const int64_t *indices, *counts;        /* (steps, width), (steps) the batches */
    const int64_t *crops;                   /* (steps, width) how each sample is augmented, or NULL */
    const double *rates;                    /* (steps) */
    index_t steps, width;
    const float *start;                     /* flat vector */
    float *out;                             /* flat vector */
    const float *correction;                /* flat vector or NULL */
} Training;
AS_IN_NUMPY(Training, correction, 12);

/* Copy samples as they are augmented, one after the other; the table holds the features where a zero is meant. */
static void crop(Net *net, const Shared *shared, const index_t *positions, const int64_t *which, index_t count) {
    for (index_t i = 0; i < count; ++i) {
        const int32_t *table = shared->description->crops + which[i] * net->features;
        const float *from = shared->data + positions[i] * net->features;
        float *to = net->cropped + i * net->features;
        for (index_t f = 0; f < net->features; ++f) to[f] = table[f] < net->features ? from[table[f]] : 0;
    }
}

static void train(const Shared *shared, float *scratch, void *unit) {
    const Training *job = unit;
    Net net;
    load(&net, shared->description, job->width, scratch, job->start);
    const Settings *settings = shared->settings;
    const float prox = (float)settings->prox, momentum = (float)settings->momentum;
    const float shrink = (float)(settings->prox + settings->weight_decay);
    const int pulled = prox != 0 || job->correction;
    if (job->correction) convert(&net, net.pull, (float *)job->correction, 1);
    else if (pulled) memset(net.pull, 0, net.size * sizeof(float));
    if (pulled) /* the part of the gradient that stays the same: prox * start - correction */
        for (index_t i = 0; i < net.size; ++i) net.pull[i] = prox * net.weights[i] - net.pull[i];
    if (momentum) memset(net.velocity, 0, net.size * sizeof(float));
    index_t positions[MAX_ROWS], order[MAX_ROWS];
    for (index_t i = 0; i < job->width; ++i) order[i] = i;
    for (index_t i = 0; i < job->counts[0]; ++i) positions[i] = job->sample[job->indices[i]];
    for (index_t t = 0; t < job->steps; ++t) {
        const int64_t *batch = job->indices + t * job->width;
        const index_t count = job->counts[t];
        const float rate = (float)job->rates[t];
        if (job->crops) {
            crop(&net, shared, positions, job->crops + t * job->width, count);
            forward(&net, net.cropped, order, count);
        } else
            forward(&net, shared->data, positions, count);
        const float scale = (float)((momentum ? 1 : job->rates[t]) / (double)count);
        differentiate_loss(&net, count, job->label, job->pseudo, batch, settings, scale);
        Ahead next = {shared->data, positions, t + 1 < job->steps ? job->counts[t + 1] : 0, net.features, NULL, NULL};
        for (index_t i = 0; i < next.count; ++i) positions[i] = job->sample[batch[job->width + i]];
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
    convert(&net, net.weights, job->out, 0);
}

/* What a model says about some samples. Whatever is NULL is not wanted. */
typedef struct {
    const float *vector;
    const int64_t *positions;
    index_t count;
    const int64_t *label;  /* needed for by_label */
    const int64_t *pseudo; /* for by_pseudo; NULL: the classes the model itself predicts */
    float *logits;         /* (count, classes) */
    double *by_label, *by_pseudo; /* (count) cross-entropies */
    int64_t *predicted;    /* (count) classes */
} Scoring;
AS_IN_NUMPY(Scoring, predicted, 9);

static void score(const Shared *shared, float *scratch, void *unit) {
    const Scoring *job = unit;
    Net net;
    load(&net, shared->description, shared->width, scratch, job->vector);
    const Dense *top = &net.dense[net.layers - 1];
    for (index_t start = 0; start < job->count; start += shared->width) {
        const index_t rows = smaller(shared->width, job->count - start);
        forward(&net, shared->data, job->positions + start, rows);
        for (index_t r = 0; r < rows; ++r) {
            const index_t i = start + r;
            float *logits = top->out + r * top->padded, greatest;
            if (job->logits) memcpy(job->logits + i * top->outputs, logits, top->outputs * sizeof(float));
            index_t best = 0;
            for (index_t k = 1; k < top->outputs; ++k) best = logits[k] > logits[best] ? k : best;
            if (job->predicted) job->predicted[i] = best;
            if (!job->by_label && !job->by_pseudo) continue;
            const float whole = exponentials(top, logits, top->delta + r * top->padded, &greatest);
            const double normaliser = greatest + log((double)whole);
            if (job->by_label) job->by_label[i] = normaliser - logits[job->label[i]];
            if (job->by_pseudo) job->by_pseudo[i] = normaliser - logits[job->pseudo ? job->pseudo[i] : best];
        }
    }
}

/* Gradient of the mean cross-entropy of some samples. */
typedef struct {
    const float *vector;
    const int64_t *positions, *label;
    index_t count;
    float *out;
} Gradient;
AS_IN_NUMPY(Gradient, out, 5);

static void differentiate(const Shared *shared, float *scratch, void *unit) {
    const Gradient *job = unit;
    Net net;
    load(&net, shared->description, shared->width, scratch, job->vector);
    memset(net.velocity, 0, net.size * sizeof(float));
    index_t order[MAX_ROWS];
    for (index_t i = 0; i < shared->width; ++i) order[i] = i;
    for (index_t start = 0; start < job->count; start += shared->width) {
        const index_t rows = smaller(shared->width, job->count - start);
        forward(&net, shared->data, job->positions + start, rows);
        differentiate_loss(&net, rows, job->label + start, NULL, order, shared->settings, 1 / (float)job->count);
        backward(&net, rows, 1, 1, net.velocity, NULL);
    }
    convert(&net, net.velocity, job->out, 0);
}

/* ------------------------------------------------------------------------------------------------- what is exported */

static const struct {
    void (*act)(const Shared *, float *, void *);
    size_t size;
} kinds[] = {{train, sizeof(Training)}, {score, sizeof(Scoring)}, {differentiate, sizeof(Gradient)}};

typedef struct {
    const Shared *shared;
    int kind;
    char *units;
    index_t count, *next;
    float *scratch;
} Part;

static void *take_part(void *argument) {
    const Part *part = argument;
    index_t unit;
    while ((unit = __atomic_fetch_add(part->next, 1, __ATOMIC_RELAXED)) < part->count)
        kinds[part->kind].act(part->shared, part->scratch, part->units + unit * kinds[part->kind].size);
    return NULL;
}

/* Bytes of scratch a thread needs for batches of up to `batch` samples. */
index_t fedcohort_scratch(const Description *description, index_t batch) {
    Net net;
    return lay_out(&net, description, batch, NULL) * (index_t)sizeof(float);
}

/* Do `count` units of a kind (0 training, 1 scoring, 2 gradients) with up to `threads` threads, this one included.
 *
 * A unit's result depends on nothing but the unit, so it does not matter which thread takes it. `room`: bytes of
 * scratch for each thread.
 */
void fedcohort_run(const Description *description, const float *data, const Settings *settings, index_t width, index_t kind,
                   void *units, index_t count, char *scratch, index_t room, index_t threads) {
    const Shared shared = {description, data, settings, width};
    index_t next = 0;
    Part parts[MAX_THREADS];
    pthread_t started[MAX_THREADS];
    threads = smaller(smaller(threads, count), MAX_THREADS);
    for (index_t i = 0; i < threads; ++i)
        parts[i] = (Part){&shared, (int)kind, units, count, &next, (float *)(scratch + i * room)};
    index_t others = 0;
    while (others + 1 < threads && !pthread_create(&started[others], NULL, take_part, &parts[others + 1])) ++others;
    if (count) take_part(&parts[0]);
    while (others) pthread_join(started[--others], NULL);
}
