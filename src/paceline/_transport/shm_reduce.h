/* Element-wise reductions over n >= 2 sources, in the order of the sources, into any number of targets.
 *
 * The order is fixed so that every rank, on every run, gets the same bits. The half-width floats are
 * accumulated in float32 and rounded once. A target may be one of the sources: an element is read from
 * every source before it is written, which is what `ivdep` tells the compiler.
 */
#ifndef PACELINE_SHM_REDUCE_H
#define PACELINE_SHM_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The numbers are part of the interface with shm.py. */
enum { T_U8, T_I8, T_I16, T_I32, T_I64, T_F16, T_BF16, T_F32, T_F64, T_BOOL, T_U16, T_U32, T_U64, T_COUNT };
enum { R_SUM, R_AVG, R_PRODUCT, R_MIN, R_MAX, R_BAND, R_BOR, R_BXOR, R_COUNT };

typedef void (*Reduce)(void *const *dst, int targets, const void *const *src, int n, size_t count);

/* ThreadSanitizer is not there yet when the loader chooses between clones, and would crash. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define WIDE __attribute__((target_clones("avx2", "default"))) /* "arch=haswell" would mean that one processor */
#else
#define WIDE
#endif

/* ---- half-width floats ---- */

static inline float bf16_to_f32(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t f32_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    uint32_t quiet = (bits >> 16) | 0x40;                            /* a NaN must stay one */
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#if defined(__aarch64__)
typedef __fp16 half_t;
static inline float f16_to_f32(half_t h) { return (float)h; }
static inline half_t f32_to_f16(float f) { return (half_t)f; }
#else
/* Branch-free, so that it vectorises without an instruction for it. */
typedef uint16_t half_t;
static inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits;
    uint32_t normal = (rest << 13) + 0x38000000;
    uint32_t special = (rest << 13) | 0x7f800000;
    float tiny = (float)(int32_t)rest * 0x1p-24f, f;
    uint32_t subnormal;
    memcpy(&subnormal, &tiny, 4);
    bits = rest >= 0x7c00 ? special : rest < 0x0400 ? subnormal : normal;
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}
static inline uint16_t f32_to_f16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    uint32_t odd = (rest >> 13) & 1;
    uint32_t normal = (rest - 0x38000000 + 0xfff + odd) >> 13;
    float magnitude, shifted;
    memcpy(&magnitude, &rest, 4);
    shifted = magnitude + 0.5f; /* the add rounds to units of 2^-24, a subnormal's step */
    uint32_t small;
    memcpy(&small, &shifted, 4);
    small -= 0x3f000000;
    uint32_t out = rest < 0x38800000 ? small : normal;
    out = rest >= 0x477ff000 ? 0x7c00 : out;             /* rounds to infinity from 65520 on */
    out = rest > 0x7f800000 ? (0x7e00 | (rest >> 13 & 0x1ff)) : out; /* a NaN must stay one */
    return (uint16_t)(out | sign);
}
#endif

/* ---- one loop for each type and operation ---- */

#define AS_IS(x) (x)
#define SUM(a, b) ((a) + (b))
#define PRODUCT(a, b) ((a) * (b))
#define MIN(a, b) (((a) < (b) || (a) != (a)) ? (a) : (b)) /* NaN wins, whichever side it is on */
#define MAX(a, b) (((a) > (b) || (a) != (a)) ? (a) : (b))
#define BAND(a, b) ((a) & (b))
#define BOR(a, b) ((a) | (b))
#define BXOR(a, b) ((a) ^ (b))
#define KEEP(x, n) (x)
#define MEAN(x, n) ((x) / (n))

/* One cache line of every source is in flight at a time: with longer runs the lines of many sources
 * push each other out of the L1 cache, since their addresses often differ by a power of two. */
#define LINE(T) (64 / sizeof(T))

#define PASS(T, A, LOAD, STORE, OP, FINISH, m)                                                     \
    do {                                                                                           \
        A acc[LINE(T)];                                                                            \
        const T *a = (const T *)src[0] + at, *b = (const T *)src[1] + at;                          \
        _Pragma("GCC ivdep") for (size_t i = 0; i < (m); i++) {                                    \
            A x = (A)LOAD(a[i]), y = (A)LOAD(b[i]);                                                \
            acc[i] = (A)OP(x, y);                                                                  \
        }                                                                                          \
        for (int s = 2; s < n; s++) {                                                              \
            const T *c = (const T *)src[s] + at;                                                   \
            _Pragma("GCC ivdep") for (size_t i = 0; i < (m); i++) {                                \
                A x = acc[i], y = (A)LOAD(c[i]);                                                   \
                acc[i] = (A)OP(x, y);                                                              \
            }                                                                                      \
        }                                                                                          \
        T sum[LINE(T)];                                                                            \
        _Pragma("GCC ivdep") for (size_t i = 0; i < (m); i++)                                      \
            sum[i] = (T)STORE((A)FINISH(acc[i], parts));                                           \
        for (int d = 0; d < targets; d++) memcpy((T *)dst[d] + at, sum, (m) * sizeof(T));          \
    } while (0)

#define PAIR(T, A, LOAD, STORE, OP, FINISH)                                                        \
    (T) STORE((A)FINISH((A)OP((A)LOAD(a[at]), (A)LOAD(b[at])), parts))

#define LOOP(name, T, A, LOAD, STORE, OP, FINISH)                                                  \
    WIDE static void name(void *const *dst, int targets, const void *const *src, int n, size_t count) { \
        const A parts = (A)n;                                                                      \
        size_t at = 0;                                                                             \
        (void)parts;                                                                               \
        if (n == 2 && targets <= 2) { /* few enough streams for one plain loop */                  \
            const T *a = src[0], *b = src[1];                                                      \
            T *c = dst[0], *d = dst[targets - 1];                                                  \
            if (targets == 1)                                                                      \
                _Pragma("GCC ivdep") for (; at < count; at++) c[at] = PAIR(T, A, LOAD, STORE, OP, FINISH); \
            else                                                                                   \
                _Pragma("GCC ivdep") for (; at < count; at++) c[at] = d[at] = PAIR(T, A, LOAD, STORE, OP, FINISH); \
            return;                                                                                \
        }                                                                                          \
        for (; at + LINE(T) <= count; at += LINE(T)) PASS(T, A, LOAD, STORE, OP, FINISH, LINE(T)); \
        if (at < count) PASS(T, A, LOAD, STORE, OP, FINISH, count - at);                           \
    }

/* M: what a mean is summed in, wide enough for the sum over MAX_RANKS ranks. */
#define ARITHMETIC(t, T, A, M, LOAD, STORE)                                                        \
    LOOP(t##_sum, T, A, LOAD, STORE, SUM, KEEP)                                                    \
    LOOP(t##_avg, T, M, LOAD, STORE, SUM, MEAN)                                                    \
    LOOP(t##_product, T, A, LOAD, STORE, PRODUCT, KEEP)                                            \
    LOOP(t##_min, T, A, LOAD, STORE, MIN, KEEP)                                                    \
    LOOP(t##_max, T, A, LOAD, STORE, MAX, KEEP)
#define BITWISE(t, T)                                                                              \
    LOOP(t##_band, T, T, AS_IS, AS_IS, BAND, KEEP)                                                 \
    LOOP(t##_bor, T, T, AS_IS, AS_IS, BOR, KEEP)                                                   \
    LOOP(t##_bxor, T, T, AS_IS, AS_IS, BXOR, KEEP)
#define INTEGER(t, T, M)                                                                           \
    ARITHMETIC(t, T, T, M, AS_IS, AS_IS)                                                           \
    BITWISE(t, T)

/* Signed sums wrap, as torch's do; unsigned arithmetic makes that defined (see -fwrapv in setup.py).
 * A mean always fits its type, so its sum must not wrap on the way; it is cut off towards zero. */
typedef __int128 wide_t;
typedef unsigned __int128 uwide_t;
INTEGER(u8, uint8_t, uint32_t)
INTEGER(i8, int8_t, int32_t)
INTEGER(i16, int16_t, int32_t)
INTEGER(i32, int32_t, int64_t)
INTEGER(i64, int64_t, wide_t)
INTEGER(u16, uint16_t, uint32_t)
INTEGER(u32, uint32_t, uint64_t)
INTEGER(u64, uint64_t, uwide_t)
ARITHMETIC(f32, float, float, float, AS_IS, AS_IS)
ARITHMETIC(f64, double, double, double, AS_IS, AS_IS)
ARITHMETIC(f16, half_t, float, float, f16_to_f32, f32_to_f16)
ARITHMETIC(bf16, uint16_t, float, float, bf16_to_f32, f32_to_bf16)

#define ROW_FLOAT(t) {t##_sum, t##_avg, t##_product, t##_min, t##_max, NULL, NULL, NULL}
#define ROW_INT(t) {t##_sum, t##_avg, t##_product, t##_min, t##_max, t##_band, t##_bor, t##_bxor}

/* For truth values a sum is "any" and a product is "all"; a mean has no meaning. */
static const Reduce REDUCERS[T_COUNT][R_COUNT] = {
    [T_U8] = ROW_INT(u8),      [T_I8] = ROW_INT(i8),     [T_I16] = ROW_INT(i16),
    [T_I32] = ROW_INT(i32),    [T_I64] = ROW_INT(i64),   [T_U16] = ROW_INT(u16),
    [T_U32] = ROW_INT(u32),    [T_U64] = ROW_INT(u64),   [T_F16] = ROW_FLOAT(f16),
    [T_BF16] = ROW_FLOAT(bf16), [T_F32] = ROW_FLOAT(f32), [T_F64] = ROW_FLOAT(f64),
    [T_BOOL] = {u8_bor, NULL, u8_band, u8_band, u8_bor, u8_band, u8_bor, u8_bxor},
};

#endif
