/* The batches of a client, drawn as numpy draws them: the shuffles of numpy.random.Generator(PCG64(SeedSequence(...))).
 *
 * Seeding and generator are numpy's published algorithms (SeedSequence, PCG XSL RR 128/64); the shuffle is Fisher and
 * Yates's with masked integers. A library that draws anything else than the numpy at hand is not used.
 */
#include <stdint.h>

typedef unsigned __int128 wide;

typedef struct {
    wide state, increment;
    uint32_t kept; /* the other half of the last 64 bits */
    int has_kept;
} Generator;

static uint32_t hash(uint32_t value, uint32_t *constant, uint32_t factor) {
    value ^= *constant;
    *constant *= factor;
    value *= *constant;
    return value ^ value >> 16;
}

static uint32_t mix(uint32_t x, uint32_t y) {
    const uint32_t result = 0xca01f9ddu * x - 0x4973f715u * y;
    return result ^ result >> 16;
}

static int words(uint64_t value, uint32_t *out) {
    out[0] = (uint32_t)value;
    out[1] = (uint32_t)(value >> 32);
    return out[1] ? 2 : 1;
}

static Generator seeded(uint64_t seed, const uint64_t *key, int count) {
    uint32_t entropy[32] = {0}, pool[4], constant = 0x43b0d7e5u;
    words(seed, entropy);
    int length = 4; /* a seed in front of a key is filled up to the size of the pool */
    for (int i = 0; i < count; ++i) length += words(key[i], entropy + length);
    for (int i = 0; i < 4; ++i) pool[i] = hash(entropy[i], &constant, 0x931e8875u);
    for (int from = 0; from < length; ++from)
        for (int to = 0; to < 4; ++to)
            if (from >= 4 || from != to)
                pool[to] = mix(pool[to], hash(from < 4 ? pool[from] : entropy[from], &constant, 0x931e8875u));
    uint64_t numbers[4];
    constant = 0x8b51f9ddu;
    for (int i = 0; i < 4; ++i) {
        const uint32_t low = hash(pool[2 * i % 4], &constant, 0x58f38dedu);
        numbers[i] = (uint64_t)hash(pool[(2 * i + 1) % 4], &constant, 0x58f38dedu) << 32 | low;
    }
    const wide factor = (wide)0x2360ed051fc65da4u << 64 | 0x4385df649fccf645u;
    Generator g = {0};
    g.increment = ((wide)numbers[2] << 64 | numbers[3]) << 1 | 1;
    g.state = g.increment + ((wide)numbers[0] << 64 | numbers[1]);
    g.state = g.state * factor + g.increment;
    return g;
}

static uint32_t next(Generator *g) {
    if (g->has_kept) {
        g->has_kept = 0;
        return g->kept;
    }
    g->state = g->state * ((wide)0x2360ed051fc65da4u << 64 | 0x4385df649fccf645u) + g->increment;
    const uint64_t folded = (uint64_t)(g->state >> 64) ^ (uint64_t)g->state;
    const unsigned turn = (unsigned)(g->state >> 122);
    const uint64_t both = folded >> turn | folded << (-turn & 63);
    g->kept = (uint32_t)(both >> 32);
    g->has_kept = 1;
    return (uint32_t)both;
}

/* An integer in 0..most: of as many bits as `most` has, the first that is not larger. */
static uint32_t bounded(Generator *g, uint32_t most) {
    const uint32_t bits = UINT32_MAX >> __builtin_clz(most);
    uint32_t value;
    do value = next(g) & bits;
    while (value > most);
    return value;
}

/* A client's local training in one round; every field is a 64-bit integer. */
typedef struct {
    uint64_t seed, round, client;
    int64_t n, steps;            /* samples of the client; batches to draw */
    int64_t base;                /* added to every position */
    int64_t start, stride, row;  /* in out: where the first batch goes, the way to the next one, numbers to write */
} Job;

/* Write the batches of all jobs, as batch_plan defines them, to out.
 *
 * stream: what names this use of random numbers; order: room for as many integers as the largest client has samples.
 */
void fedcohort_plans(const Job *jobs, int64_t count, int64_t batch_size, uint64_t stream, int64_t *out,
                     int64_t *order) {
    for (const Job *job = jobs; job < jobs + count; ++job) {
        const uint64_t key[] = {stream, job->round, job->client};
        Generator g = seeded(job->seed, key, 3);
        const int64_t n = job->n, width = batch_size < n ? batch_size : n;
        int64_t next_position = n; /* in order: beyond the end, so that the first batch begins an epoch */
        for (int64_t step = 0; step < job->steps; ++step) {
            int64_t *batch = out + job->start + step * job->stride;
            if (next_position >= n) {
                next_position = 0;
                for (int64_t i = 0; i < n; ++i) order[i] = job->base + i;
                for (int64_t i = n - 1; i > 0; --i) {
                    const uint32_t j = bounded(&g, (uint32_t)i);
                    const int64_t other = order[j];
                    order[j] = order[i], order[i] = other;
                }
            }
            for (int64_t i = 0; i < width; ++i, ++next_position) /* an epoch's first samples fill up its last batch */
                batch[i] = order[next_position < n ? next_position : next_position - n];
            for (int64_t i = width; i < job->row; ++i) batch[i] = job->base;
        }
    }
}
