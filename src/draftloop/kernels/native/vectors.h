// Vectors of this machine, and what is computed on them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

// The widest vectors of this machine, and the tile of a matrix product whose sums fit its registers:
// ROWS * TOKENS sums, ROWS weights and one input.
#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 4, TOKENS = 6 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 2, TOKENS = 6 };
#else
enum { LANES = 4, ROWS = 4, TOKENS = 4 };
#endif

// How far ahead weights are asked for. The processor's own prefetching stops at pages of 4 KB, and does not keep
// up once several tokens give the loop more to do.
enum { AHEAD = 4096 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_at __attribute__((vector_size(4 * LANES), aligned(4), may_alias));  // anywhere in memory
typedef float vec4 __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t halves_at __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec v) { *(vec_at *)p = v; }
INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// a * b + sum, fused on every path where it is on any: what compilers fuse by themselves differs from loop to loop, and
// a token's bits with it.
INLINE vec multiply_add(vec a, vec b, vec sum) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return a * b + sum;
#endif
}

// Sum of all lanes, by halves.
INLINE float sum_of(vec v) {
#if defined(__AVX512F__)
    typedef float half __attribute__((vector_size(32)));
    union { vec whole; half part[2]; } a = {v};
    union { half whole; vec4 part[2]; } b = {a.part[0] + a.part[1]};
    vec4 c = b.part[0] + b.part[1];
#elif defined(__AVX__)
    union { vec whole; vec4 part[2]; } b = {v};
    vec4 c = b.part[0] + b.part[1];
#else
    vec4 c = v;
#endif
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float dot(const float *a, const float *b, int64_t size) {
    vec sum = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += load(a + i) * load(b + i);
    float total = sum_of(sum);
    for (; i < size; i++) total += a[i] * b[i];
    return total;
}

// e^x to 2 units in the last place; 0 where the result would be subnormal, infinite from 88.7 on. Free of branches, so
// that loops over it become vector code.
INLINE float exp_of(float x) {
    float clamped = x < -87.3f ? -87.3f : x > 88.7f ? 88.7f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    float shifted = clamped * 1.44269504f + shift;
    float n = shifted - shift;
    float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { float f; int32_t i; } bits = {shifted}, scale;
    // 2^n in two factors: n may be 128, beyond the largest exponent
    int32_t exponent = bits.i - 0x4B400000, half = exponent >> 1;
    scale.i = (half + 127) << 23;
    p *= scale.f;
    scale.i = (exponent - half + 127) << 23;
    p *= scale.f;
    return x < -87.3f ? 0.0f : x > 88.7f ? INFINITY : p;
}
