/* The network: its layers, where everything lies in the scratch block, and the way from torch's vector and back. */
#ifndef FEDCOHORT_NETWORK_H
#define FEDCOHORT_NETWORK_H

#include "vectors.h"

#define MAX_LAYERS 32
#define MAX_ROWS 4096 /* samples of one batch */
/* A struct that native.py fills as a numpy record: all its fields are of 8 bytes, and this is the last of so many. */
#define AS_IN_NUMPY(STRUCT, LAST, FIELDS) \
    _Static_assert(sizeof(STRUCT) == 8 * (FIELDS) && offsetof(STRUCT, LAST) == 8 * (FIELDS) - 8, #STRUCT)

/* One convolution, its pooling and ReLU. */
typedef struct {
    index_t channels, height, width; /* of the input, without padding */
    index_t outputs, rows, columns, pad_y, pad_x, pool_y, pool_x, relu;
} Kernel;
AS_IN_NUMPY(Kernel, relu, 11);

typedef struct {
    const int32_t *crops; /* (ways, features) where a feature of an augmented sample comes from; NULL without */
    index_t convolutions, layers;
    Kernel kernel[MAX_LAYERS];
    index_t width[MAX_LAYERS + 1]; /* of the dense layers, from the input to the classes */
} Description;
AS_IN_NUMPY(Description, width[MAX_LAYERS], 3 + 11 * MAX_LAYERS + MAX_LAYERS + 1);

/* Of the training; alpha, beta, log_zero and whether the reverse term takes pseudo-labels are those of the robust loss. */
typedef struct {
    double prox, weight_decay, momentum, alpha, beta, log_zero, reverse_pseudo;
} Settings;
AS_IN_NUMPY(Settings, reverse_pseudo, 7);

typedef struct {
    index_t channels, height, width, outputs, rows, columns, pad_y, pad_x, pool_y, pool_x, relu; /* as in Kernel */
    index_t in_height, in_width;     /* of the input, with padding */
    index_t high, wide;              /* of the convolution's result */
    index_t out_height, out_width;   /* after pooling */
    index_t margin_y, margin_x;      /* zeros around the derivative, for the derivative by the input */
    index_t weight, bias;            /* in the packed vector: (channels, rows, columns, outputs), (outputs) */
    vec *x;                          /* (blocks + 1, channels, in_height, in_width) */
    ivec *where;                     /* (blocks + 1, outputs, out_height, out_width) the place of each maximum */
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
    index_t blocks;       /* of FULL samples; one of HALF comes after them */
    float *weights, *gradient, *velocity, *pull; /* packed vectors */
    const float *input[MAX_ROWS]; /* of the first dense layer, for each sample */
    float *rows;          /* (batch, stride): what convolutions make of the samples */
    float *row_delta;     /* its derivative */
    index_t stride;
    float *cropped;       /* (batch, features): augmented samples */
    vec *maps, *upper, *lower; /* results of a convolution before pooling, derivatives by its result and its input */
    float *transposed;    /* weights of a dense layer, for the derivative by its input */
} Net;

static const float nothing[1 << 16]; /* the derivative of a sample that is not there */

static index_t claim(index_t *used, index_t floats) {
    const index_t start = *used;
    *used += (floats + 63) / 64 * 64;
    return start;
}

/* Read the description and lay everything out in the scratch block; return the floats it takes. */
static index_t lay_out(Net *net, const Description *description, index_t batch, float *scratch) {
    index_t used = 0;
    net->convolutions = (int)description->convolutions;
    net->size = 0;
    net->blocks = (batch + LANES - 1) / LANES;
    index_t maps = 0, upper = 0, lower = 0, transposed = 0;
    for (int i = 0; i < net->convolutions; ++i) {
        Convolution *c = &net->convolution[i];
        const Kernel *k = &description->kernel[i];
        c->channels = k->channels, c->height = k->height, c->width = k->width, c->outputs = k->outputs;
        c->rows = k->rows, c->columns = k->columns, c->pad_y = k->pad_y, c->pad_x = k->pad_x;
        c->pool_y = k->pool_y, c->pool_x = k->pool_x, c->relu = k->relu;
        c->in_height = c->height + 2 * c->pad_y, c->in_width = c->width + 2 * c->pad_x;
        c->high = c->in_height - c->rows + 1, c->wide = c->in_width - c->columns + 1;
        c->out_height = c->high / c->pool_y, c->out_width = c->wide / c->pool_x;
        c->margin_y = i ? c->rows - 1 : 0, c->margin_x = i ? c->columns - 1 : 0;
        c->weight = claim(&net->size, c->channels * c->rows * c->columns * c->outputs);
        c->bias = claim(&net->size, c->outputs);
        const index_t lanes = net->blocks * FULL + HALF; /* a block of its own, for the padding lies elsewhere in it */
        c->x = (vec *)(scratch + claim(&used, lanes * c->channels * c->in_height * c->in_width));
        c->where = (ivec *)(scratch + claim(&used, lanes * c->outputs * c->out_height * c->out_width));
        const index_t row = c->outputs * c->pool_y * c->wide;
        const index_t derivative = c->outputs * (c->high + 2 * c->margin_y) * (c->wide + 2 * c->margin_x);
        maps = row > maps ? row : maps;
        upper = derivative > upper ? derivative : upper;
        const index_t pooled = c->outputs * c->out_height * c->out_width;
        lower = pooled > lower ? pooled : lower;
        c->turned = scratch + claim(&used, i ? c->channels * c->rows * c->columns * c->outputs : 0);
    }
    net->layers = (int)description->layers;
    for (int i = 0; i < net->layers; ++i) {
        Dense *l = &net->dense[i];
        l->inputs = description->width[i], l->outputs = description->width[i + 1];
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
    net->rows = scratch + claim(&used, net->convolutions ? batch * net->stride : 0);
    net->row_delta = scratch + claim(&used, net->convolutions ? batch * net->stride : 0);
    net->cropped = scratch + claim(&used, description->crops ? batch * net->features : 0);
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
static void convert(const Net *net, float *packed, float *flat, int pack) {
    if (pack) memset(packed, 0, net->size * sizeof(float));
    for (int i = 0; i < net->convolutions + net->layers; ++i) {
        const int image = i < net->convolutions;
        const Convolution *c = &net->convolution[i];
        const Dense *l = &net->dense[i - net->convolutions];
        const index_t inputs = image ? c->channels * c->rows * c->columns : l->inputs;
        const index_t outputs = image ? c->outputs : l->outputs, padded = image ? outputs : l->padded;
        float *weight = packed + (image ? c->weight : l->weight);
        if (pack) turn_matrix(flat, outputs, inputs, inputs, weight, padded);
        else turn_matrix(weight, inputs, outputs, padded, flat, inputs);
        flat += inputs * outputs;
        float *bias = packed + (image ? c->bias : l->bias);
        if (pack) memcpy(bias, flat, outputs * sizeof(float));
        else memcpy(flat, bias, outputs * sizeof(float));
        flat += outputs;
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

#endif
