/* What a decode step computes in float32, for few rows at a time. `engines/torch/kernels.py` has it compiled for the
 * machine that it runs on, and says what each argument is.
 *
 * A product of few rows is bound by memory: each weight is read once and used `rows` times. So the weights lie in the
 * order in which they are used, sums stay in registers, and what comes next is asked for before it is needed.
 *
 * No fast-math: NaN must stay NaN, by which the engine finds rows that failed. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 8 /* 24 sums and 3 weights in 32 registers */
#else
#define ROWS 4 /* 12 sums and 3 weights in 16 registers */
#endif
enum { VECTORS = 3, PANEL = LANES * VECTORS, LINE = 64 / sizeof(float), AHEAD = 2048, BLOCK = 128, FETCHED = 4096 };

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef float in_memory __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

size_t panel(void) { return PANEL; }

/* One tile: `rows` rows, a constant where this is inlined, by the columns of one panel. */
static inline __attribute__((always_inline)) void tile(
    const size_t rows, const float *x, size_t inputs, const float *weights, const float *bias, const float *residual,
    float *out, size_t outputs, size_t columns)
{
    vector sums[ROWS][VECTORS];
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < VECTORS; v++)
            sums[r][v] = (vector){0};
    for (size_t i = 0; i < inputs; i++, weights += PANEL) {
        vector weight[VECTORS];
        for (size_t v = 0; v < VECTORS; v++)
            weight[v] = *(const in_memory *)(weights + v * LANES);
        for (size_t c = 0; c < PANEL; c += LINE)
            __builtin_prefetch(weights + AHEAD + c);
        for (size_t r = 0; r < rows; r++)
            for (size_t v = 0; v < VECTORS; v++)
                sums[r][v] += weight[v] * x[r * inputs + i];
    }
    for (size_t r = 0; r < rows; r++) {
        float line[PANEL];
        memcpy(line, sums[r], sizeof line);
        for (size_t c = 0; c < columns; c++)
            out[r * outputs + c] = line[c] + (bias ? bias[c] : 0) + (residual ? residual[r * outputs + c] : 0);
    }
}

/* out [rows, outputs] = x [rows, inputs] times weights, + bias [outputs] and + residual [rows, outputs] if given.
 * weights [panels][inputs][PANEL]: column c of panel p belongs to output p * PANEL + c. */
void product(
    const float *x, size_t rows, size_t inputs, const float *weights, const float *bias, const float *residual,
    float *out, size_t outputs, int threads)
{
    const size_t panels = (outputs + PANEL - 1) / PANEL, blocks = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (size_t p = 0; p < panels; p++) {
        const size_t first = p * PANEL, columns = outputs - first < PANEL ? outputs - first : PANEL;
        for (size_t b = 0; b < blocks; b++) {
            const size_t row = rows * b / blocks, n = rows * (b + 1) / blocks - row;
#define TILE(n)                                                                                                        \
    tile(                                                                                                              \
        n, x + row * inputs, inputs, weights + first * inputs, bias ? bias + first : NULL,                             \
        residual ? residual + row * outputs + first : NULL, out + row * outputs + first, outputs, columns)
            switch (n) {
            case 1: TILE(1); break;
            case 2: TILE(2); break;
            case 3: TILE(3); break;
            case 4: TILE(4); break;
#if ROWS == 8
            case 5: TILE(5); break;
            case 6: TILE(6); break;
            case 7: TILE(7); break;
            case 8: TILE(8); break;
#endif
            }
#undef TILE
        }
    }
}

static inline float dot(const float *a, const float *b, size_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* e^x within 2 units of the last place, for x from -87 to 88, and that of the nearer end outside. NaN stays NaN.
 * e^x = 2^n e^r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits. */
static inline float exponential(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float series = 1.9875691500e-4f; /* Cephes, expf.c: (e^r - 1 - r) / r^2 */
    series = series * r + 1.3981999507e-3f;
    series = series * r + 8.3334519073e-3f;
    series = series * r + 4.1665795894e-2f;
    series = series * r + 1.6666665459e-1f;
    series = series * r + 5.0000001201e-1f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    return (series * r * r + r + 1.0f) * power;
}

/* out [rows, size] = x / sqrt(mean(x^2) + eps) * weight [size] */
void rms_norm(const float *x, size_t rows, size_t size, const float *weight, float eps, float *out)
{
    for (size_t r = 0; r < rows; r++, x += size, out += size) {
        const float scale = 1.0f / sqrtf(dot(x, x, size) / (float)size + eps);
#pragma omp simd
        for (size_t i = 0; i < size; i++)
            out[i] = x[i] * scale * weight[i];
    }
}

/* out [rows, size] = silu(gate) * up; gate and up [rows, size] side by side in x [rows, 2 * size] */
void silu_gate(const float *x, size_t rows, size_t size, float *out)
{
    for (size_t r = 0; r < rows; r++, x += 2 * size, out += size)
#pragma omp simd
        for (size_t i = 0; i < size; i++)
            out[i] = x[i] / (1.0f + exponential(-x[i])) * x[size + i];
}

/* Rotary embedding of one head, normed before where `weight` is given. sin has the first half negated. */
static void rotate(
    const float *x, size_t size, const float *cos, const float *sin, const float *weight, float eps, float *out)
{
    float normed[size];
    if (weight) {
        rms_norm(x, 1, size, weight, eps, normed);
        x = normed;
    }
    const size_t half = size / 2;
    for (size_t i = 0; i < half; i++)
        out[i] = x[i] * cos[i] + x[i + half] * sin[i];
    for (size_t i = half; i < size; i++)
        out[i] = x[i] * cos[i] + x[i - half] * sin[i];
}

/* Attention of one query head: out [size] = softmax(scaling * keys query) values, keys and values [cells, size]. In
 * blocks, with the highest score so far: what was summed before is scaled when a higher one comes. */
static void attend_head(
    const float *query, const float *keys, const float *values, size_t cells, size_t size, float scaling, float *out)
{
    float highest = -INFINITY, total = 0, weights[BLOCK];
    memset(out, 0, size * sizeof *out);
    for (size_t start = 0; start < cells; start += BLOCK) {
        const size_t n = cells - start < BLOCK ? cells - start : BLOCK;
        const float before = highest;
        for (size_t c = 0; c < n; c++) {
            weights[c] = scaling * dot(query, keys + (start + c) * size, size);
            highest = weights[c] > highest ? weights[c] : highest;
        }
        const float kept = exponential(before - highest);
        float added = 0;
#pragma omp simd reduction(+ : added)
        for (size_t c = 0; c < n; c++) {
            weights[c] = exponential(weights[c] - highest);
            added += weights[c];
        }
        total = total * kept + added;
        for (size_t i = 0; i < size; i++)
            out[i] *= kept;
        size_t c = 0;
        for (; c + 4 <= n; c += 4) {
            const float *v = values + (start + c) * size;
#pragma omp simd
            for (size_t i = 0; i < size; i++)
                out[i] += (weights[c] * v[i] + weights[c + 1] * v[size + i])
                    + (weights[c + 2] * v[2 * size + i] + weights[c + 3] * v[3 * size + i]);
        }
        for (; c < n; c++)
#pragma omp simd
            for (size_t i = 0; i < size; i++)
                out[i] += weights[c] * values[(start + c) * size + i];
    }
    for (size_t i = 0; i < size; i++)
        out[i] /= total;
}

/* Ask for numbers that are read soon, as many as the nearest cache has room for. */
static void fetch(const float *x, size_t n)
{
    for (size_t i = 0; i < n && i < FETCHED; i += LINE)
        __builtin_prefetch(x + i);
}

/* Rotates queries and keys, writes keys and values to their cells, and attends: out [rows, heads * size].
 * qkv [rows, (heads + 2 * groups) * size]; row r is at positions[r] of slot r. cos and sin [positions, size].
 * norms [heads + groups, size], or NULL. keys and values [slots, groups, cells, size]. */
void attend(
    const float *qkv, size_t rows, size_t heads, size_t groups, size_t size, const int64_t *positions,
    const float *cos, const float *sin, const float *norms, float eps, float scaling, float *keys, float *values,
    size_t cells, float *out, int threads)
{
    const size_t shared = heads / groups;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1) schedule(static)
    for (size_t r = 0; r < rows; r++)
        for (size_t g = 0; g < groups; g++) {
            const float *line = qkv + r * (heads + 2 * groups) * size;
            const size_t position = (size_t)positions[r], first = (r * groups + g) * cells * size;
            const size_t used = position * size, next = first + cells * size;
            fetch(values + first, used);
            if (r + 1 < rows || g + 1 < groups)
                fetch(keys + next, used);
            const float *c = cos + position * size, *s = sin + position * size;
            const size_t key = heads + g, value = heads + groups + g;
            rotate(
                line + key * size, size, c, s, norms ? norms + key * size : NULL, eps, keys + first + position * size);
            memcpy(values + first + position * size, line + value * size, size * sizeof(float));
            for (size_t h = g * shared; h < (g + 1) * shared; h++) {
                float query[size];
                rotate(line + h * size, size, c, s, norms ? norms + h * size : NULL, eps, query);
                attend_head(
                    query, keys + first, values + first, position + 1, size, scaling, out + (r * heads + h) * size);
            }
        }
}
