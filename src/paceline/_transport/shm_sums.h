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
#else
#define WHOLE_QUICKLY(OF)
#endif
#define NEW(before, now) (now)

static WIDE void put_whole(int64_t *restrict sum, const float *restrict x, uint64_t n, double scale) {
    uint64_t i = 0;
    WHOLE_QUICKLY(NEW)
    for (; i < n; i++) sum[i] = llrint((double)x[i] * scale);
}

static WIDE void add_whole(int64_t *restrict sum, const float *restrict x, uint64_t n, double scale) {
    uint64_t i = 0;
    WHOLE_QUICKLY(vaddq_s64)
    for (; i < n; i++) sum[i] += llrint((double)x[i] * scale);
}

/* Sums times unit, divided by weight, as floats; `mean` may begin where `sum` does, and then ends before it. */
static WIDE void mean_of_whole(float *mean, const int64_t *sum, uint64_t n, double unit, double weight) {
    float block[256];
    for (uint64_t i = 0; i < n; i += 256) {
        uint64_t count = n - i < 256 ? n - i : 256;
        for (uint64_t k = 0; k < count; k++) block[k] = (float)((double)sum[i + k] * unit / weight);
        memcpy((char *)mean + 4 * i, block, 4 * count);
    }
}

#endif
