/* Floats as whole numbers, which add up in any order (paceline/_reducer/sums.py says why and how).
 *
 * torch can do the same in five steps over memory; a loop that does them at once takes a fifth of the
 * time. Both round to nearest, ties to even, so it does not matter which of them did it.
 */
#ifndef PACELINE_SHM_SUMS_H
#define PACELINE_SHM_SUMS_H

#include <math.h>
#include <stdint.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "shm_reduce.h"

/* The bits of the largest size among n floats; those of an infinity or NaN are larger than all others. */
static WIDE uint32_t largest_bits(const uint32_t *x, uint64_t n) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t size = x[i] & 0x7fffffff;
        most = size > most ? size : most;
    }
    return most;
}

#if defined(__aarch64__)
/* The compiler would do one element at a time. */
#define WHOLE_QUICKLY(OF)                                                                         \
    for (; i + 4 <= n; i += 4) {                                                                  \
        float32x4_t four = vld1q_f32(x + i);                                                      \
        float64x2_t low = vmulq_n_f64(vcvt_f64_f32(vget_low_f32(four)), scale);                   \
        float64x2_t high = vmulq_n_f64(vcvt_high_f64_f32(four), scale);                           \
        vst1q_s64(sum + i, OF(vld1q_s64(sum + i), vcvtnq_s64_f64(low)));                          \
        vst1q_s64(sum + i + 2, OF(vld1q_s64(sum + i + 2), vcvtnq_s64_f64(high)));                 \
    }
static inline int64_t to_whole(double x) { return llrint(x); }
static inline double of_whole(int64_t x) { return (double)x; }
#else
#define WHOLE_QUICKLY(OF)
/* AVX2 has no instruction for either, and llrint is not vectorised. So a number is put together from two halves, in
 * the lowest bits of doubles so large that these bits count ones: both are exact but for the one rounding wanted. */
typedef union {
    double value;
    uint64_t bits;
} Double;

#define ONES 0x1.8p52 /* a double that large and not much larger or smaller counts ones */
#define ONES_BITS 0x4338000000000000u

static inline int64_t to_whole(double x) {
    Double high = {.value = x * 0x1p-32 + ONES};
    Double low = {.value = x - (high.value - ONES) * 0x1p32 + ONES};
    return (int64_t)((high.bits << 32) + low.bits - ONES_BITS); /* those of the high half are shifted out */
}

static inline double of_whole(int64_t x) {
    Double high = {.bits = (uint64_t)x >> 32 ^ 0x4530000080000000u}; /* 2^84 + 2^63 + the high half times 2^32 */
    Double low = {.bits = ((uint64_t)x & 0xffffffffu) | 0x4330000000000000u}; /* 2^52 + the low half */
    return high.value - (0x1p84 + 0x1p63 + 0x1p52) + low.value;
}
#endif
#define NEW(before, now) (now)

static WIDE void put_whole(int64_t *restrict sum, const float *restrict x, uint64_t n, double scale) {
    uint64_t i = 0;
    WHOLE_QUICKLY(NEW)
    for (; i < n; i++) sum[i] = to_whole((double)x[i] * scale);
}

static WIDE void add_whole(int64_t *restrict sum, const float *restrict x, uint64_t n, double scale) {
    uint64_t i = 0;
    WHOLE_QUICKLY(vaddq_s64)
    for (; i < n; i++) sum[i] += to_whole((double)x[i] * scale);
}

/* A grid of whole numbers: a term of level L has elements below 2**(width * L), of which 1 is worth
 * 2**(width * L - bits). */
typedef struct {
    int32_t bits, width, lowest, pad;
} Grid;

enum { ANY_LEVEL = INT32_MAX, NO_LEVEL = INT32_MIN, OTHER_LEVEL = INT32_MIN + 1 };

/* That of a term whose largest element has this size; OTHER_LEVEL if it is not finite. */
static int32_t level_of(const Grid *grid, double size) {
    if (!(size < INFINITY)) return OTHER_LEVEL;
    if (size == 0) return NO_LEVEL;
    int exponent;
    frexp(size, &exponent);
    int32_t level = exponent > 0 ? (exponent + grid->width - 1) / grid->width : -(-exponent / grid->width);
    return level > grid->lowest ? level : grid->lowest;
}

static double size_of(uint32_t bits, double weight) {
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    return (double)largest * fabs(weight);
}

/* Elements that are looked at and added while they are in the nearest cache. */
#define GUESS_BLOCK 4096
#define GUESS_FROM 65536

/* Add a large term as one of level `guess`, looking at its elements on the way; all is taken back, which is exact,
 * when the term turns out to be of another one. Returns its level, or OTHER_LEVEL if it is not the guess. */
static int32_t add_guessing(
    int64_t *sum, const float *x, uint64_t n, const Grid *grid, double weight, int32_t guess, int fresh
) {
    double scale = ldexp(weight, grid->bits - grid->width * guess);
    uint32_t most = 0;
    uint64_t done = 0;
    int32_t level = NO_LEVEL;
    while (done < n) {
        uint64_t count = n - done < GUESS_BLOCK ? n - done : GUESS_BLOCK;
        uint32_t block = largest_bits((const uint32_t *)x + done, count);
        most = block > most ? block : most;
        level = level_of(grid, size_of(most, weight));
        if (level == OTHER_LEVEL || level > guess) break;
        (fresh ? put_whole : add_whole)(sum + done, x + done, count, scale);
        done += count;
    }
    if (level == guess) return level;
    if (!fresh) add_whole(sum, x, done, -scale);
    return level == NO_LEVEL ? NO_LEVEL : OTHER_LEVEL;
}

/* Add weight times a term to sums that take terms of level `takes`, or ANY_LEVEL. Returns its level; NO_LEVEL if it
 * is all zeros, and OTHER_LEVEL if the sums do not take it: nothing is added then. */
static int32_t add_term(
    int64_t *sum, const float *x, uint64_t n, const Grid *grid, double weight, int32_t takes, int fresh
) {
    if (takes != ANY_LEVEL && takes != NO_LEVEL && n >= GUESS_FROM)
        return add_guessing(sum, x, n, grid, weight, takes, fresh);
    int32_t level = level_of(grid, size_of(largest_bits((const uint32_t *)x, n), weight));
    if (level == NO_LEVEL) return NO_LEVEL;
    if (level == OTHER_LEVEL || (takes != ANY_LEVEL && takes != level)) return OTHER_LEVEL;
    (fresh ? put_whole : add_whole)(sum, x, n, ldexp(weight, grid->bits - grid->width * level));
    return level;
}

#define MEANS(OF)                                                                                 \
    for (uint64_t i = 0; i < n; i += 256) {                                                       \
        uint64_t count = n - i < 256 ? n - i : 256;                                               \
        for (uint64_t k = 0; k < count; k++) block[k] = (float)(of_whole(sum[i + k]) * unit OF);  \
        memcpy((char *)sum + 4 * i, block, 4 * count);                                            \
    }

/* Sums times unit, divided by weight, as floats in the first half of the same memory. To divide takes longer than all
 * the rest; by a power of two it is exact, and so is to multiply. */
static WIDE void mean_of_whole(int64_t *sum, uint64_t n, double unit, double weight) {
    float block[256];
    int exponent;
    if (frexp(weight, &exponent) == 0.5) {
        unit /= weight;
        MEANS()
    } else {
        MEANS(/ weight)
    }
}

#endif
