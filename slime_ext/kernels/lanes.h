// Lanes: as many tokens as one vector register holds. Masks are integers, all bits set where true.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#ifdef __AVX__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define WIDTH 16
#define QUARTER 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3
#define LOW_HALF 0, 1, 2, 3, 4, 5, 6, 7
#define HIGH_HALF 8, 9, 10, 11, 12, 13, 14, 15
#define HALVES(bytes) {((int64_t __attribute__((vector_size(16))))bytes)[0], ((int64_t __attribute__((vector_size(16))))bytes)[1]}
#define LOW_BYTES 0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60
#else
#define WIDTH 8
#define QUARTER 0, 0, 0, 0, 1, 1, 1, 1
#define LOW_HALF 0, 1, 2, 3
#define HIGH_HALF 4, 5, 6, 7
#define HALVES(bytes) {(int64_t)bytes}
#define LOW_BYTES 0, 4, 8, 12, 16, 20, 24, 28
#endif
constexpr int LANES = WIDTH;
constexpr float INF = __builtin_inff();
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint8_t B __attribute__((vector_size(LANES)));
struct Wide {  // float64 per token, for the few statistics that need it
    double at[LANES];
};
#define INLINE static inline __attribute__((always_inline))
#define INSIDE __attribute__((always_inline))  // of a struct

INLINE F each(float x) { return x - F{}; }
INLINE I counting() {
    I lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}

// Lanes at p, of which n are there; the others are 0. Few loads end an array: those go out of the way.
template <class V> static __attribute__((noinline)) V load_some(const void* p, int64_t n) {
    V v{};
    std::memcpy(&v, p, n * (sizeof v / LANES));
    return v;
}
template <class V> INLINE V load(const void* p, int64_t n) {
    if (__builtin_expect(n < LANES, 0)) return load_some<V>(p, n);
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V> static __attribute__((noinline)) void store_some(void* p, V v, int64_t n) {
    std::memcpy(p, &v, n * (sizeof v / LANES));
}
template <class V> INLINE void store(void* p, V v, int64_t n) {
    if (__builtin_expect(n < LANES, 0)) return store_some(p, v, n);
    std::memcpy(p, &v, sizeof v);
}
// A byte per token, not 0 where true.
#if defined(__AVX2__) && WIDTH == 8
INLINE I flags(const void* p, int64_t n) {
    const B bytes = load<B>(p, n);
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&bytes)) > 0;
}
INLINE void store_flags(void* p, I mask, int64_t n) {
    const __m256i lanes = (__m256i)mask;
    const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    const __m128i ones = _mm_abs_epi8(_mm_packs_epi16(pairs, pairs));
    B bytes;
    _mm_storel_epi64((__m128i*)&bytes, ones);
    store(p, bytes, n);
}
#else
// Each lane looks at its own byte of the word that it shares with three.
INLINE I flags(const void* p, int64_t n) {
    typedef int64_t Words __attribute__((vector_size(4 * LANES)));
    const B bytes = load<B>(p, n);
    const Words words = HALVES(bytes);
    const I mine = __builtin_shufflevector((I)words, (I)words, QUARTER);
    return (mine & (0xff << 8 * (counting() & 3))) != 0;
}
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
INLINE void store_flags(void* p, I mask, int64_t n) {
    const Bytes ones = (Bytes)(mask & 1);
    store(p, __builtin_shufflevector(ones, ones, LOW_BYTES), n);
}
#endif

INLINE F only(I mask, F x) { return (F)(mask & (I)x); }  // 0 elsewhere
INLINE F where(I mask, F a, F b) { return mask ? a : b; }
INLINE F where(I mask, float a, F b) { return mask ? each(a) : b; }
INLINE F where(I mask, F a, float b) {
    return __builtin_constant_p(b) && b == 0.0f ? only(mask, a) : mask ? a : each(b);
}
INLINE F where(I mask, float a, float b) { return mask ? each(a) : each(b); }
INLINE I where(I mask, int a, int b) { return mask ? a - I{} : b - I{}; }
INLINE int where(bool yes, int a, int b) { return yes ? a : b; }
INLINE F as_floats(I x) { return __builtin_convertvector(x, F); }
INLINE F as_numbers(I mask) { return only(mask, each(1.0f)); }
// a where it is NaN, as every processor's own instruction has it and no compiler dares to.
#if defined(__AVX512F__)
INLINE F minimum(F a, F b) { return (F)_mm512_min_ps((__m512)b, (__m512)a); }
INLINE F maximum(F a, F b) { return (F)_mm512_max_ps((__m512)b, (__m512)a); }
#elif defined(__AVX__) && WIDTH == 8
INLINE F minimum(F a, F b) { return (F)_mm256_min_ps((__m256)b, (__m256)a); }
INLINE F maximum(F a, F b) { return (F)_mm256_max_ps((__m256)b, (__m256)a); }
#else
INLINE F minimum(F a, F b) { return b < a ? b : a; }
INLINE F maximum(F a, F b) { return b > a ? b : a; }
#endif
#if defined(__AVX2__) && WIDTH == 8
INLINE I maximum(I a, int b) { return (I)_mm256_max_epi32((__m256i)a, _mm256_set1_epi32(b)); }
#else
INLINE I maximum(I a, int b) { return a > b ? a : b - I{}; }
#endif
INLINE F minimum(F a, float b) { return minimum(a, each(b)); }
INLINE F maximum(F a, float b) { return maximum(a, each(b)); }
INLINE float minimum(float a, float b) { return b < a ? b : a; }
INLINE float maximum(float a, float b) { return b > a ? b : a; }
INLINE double maximum(double a, double b) { return b > a ? b : a; }
INLINE F abs(F x) { return (F)((I)x & 0x7fffffff); }
INLINE float narrow(double x) { return (float)x; }

// e^x = 2^n e^r with |r| <= log(2) / 2.
struct Power {
    I raised;  // n + 254 in the last bits, BASE in the others
    F less_1;  // e^r - 1, with which nothing is lost near 0
};
constexpr int BASE = 0x4b400000;  // the bits of 1.5 * 2^23: adding that rounds to a whole number, the sum's last bits
INLINE F with_exponent(I x) { return (F)(x << 23); }  // 2^(x - 127), of x the last 8 bits
INLINE Power power(F x) {
    const float magic = 12582912.0f + 254.0f;
    const F near = minimum(maximum(x, -104.0f), 89.0f), sum = near * 1.44269504089f + magic, n = sum - magic;
    const F r = near - n * 0.693359375f + n * 2.12194440e-4f, r2 = r * r;
    // The terms in pairs: one after the other they would wait for each other.
    const F high = 1.3882506173e-3f * r2 + (4.1667200625e-2f + 8.3665475249e-3f * r);
    return {(I)sum, r + r2 * (high * r2 + (4.9999997020e-1f + 1.6666543484e-1f * r))};
}
INLINE F exp(F x) {
    const Power p = power(x);
    const I some = p.raised >> 1;  // 2^n in two factors: itself it may be too large or too small for a float
    return (p.less_1 + 1.0f) * with_exponent(some) * with_exponent(p.raised - some);
}
INLINE F expm1(F x) {
    const Power p = power(x);
    const F half = with_exponent(maximum(p.raised, BASE + 254 - 40) - 128);  // 2^(n - 1); further down it is -1
    const F found = p.less_1 * half + (half - 0.5f);
    return found + found;
}

INLINE F k2(F l) { return l * l / 2.0f; }
INLINE F k3(F l) { return expm1(l) - l; }
INLINE F tv(F num, F beh) { return abs(exp(num) - exp(beh)); }
INLINE I over(F x, float limit) { return ~(x <= limit); }  // NaN too
INLINE float parts(float x, double whole) { return (float)((double)x / whole); }
INLINE F parts(F x, double whole) {
    for (int i = 0; i < LANES; i++) x[i] = parts(x[i], whole);
    return x;
}

INLINE Wide squares(F x) {
    Wide found;
    for (int i = 0; i < LANES; i++) found.at[i] = (double)x[i] * (double)x[i];
    return found;
}
INLINE Wide where(I mask, Wide a, float b) {
    for (int i = 0; i < LANES; i++) a.at[i] = mask[i] ? a.at[i] : b;
    return a;
}
INLINE I operator<=(const Wide& a, double b) {
    I found;
    for (int i = 0; i < LANES; i++) found[i] = -(a.at[i] <= b);
    return found;
}
INLINE I operator>=(const Wide& a, double b) {
    I found;
    for (int i = 0; i < LANES; i++) found[i] = -(a.at[i] >= b);
    return found;
}
INLINE I over(const Wide& x, double limit) { return ~(x <= limit); }
// A probability as far from 0 and 1 as KPop has it.
INLINE double inner(double log_prob) { return std::fmin(std::fmax(std::exp(log_prob), EDGE), 1.0 - EDGE); }
INLINE double bernoulli_kl(double a, double b) {
    return a * std::log(a / b) + (1.0 - a) * std::log((1.0 - a) / (1.0 - b));
}
static Wide binary_kl(F numerator, F behavior) {
    Wide found;
    for (int i = 0; i < LANES; i++) found.at[i] = bernoulli_kl(inner(behavior[i]), inner(numerator[i]));
    return found;
}
static Wide binary_kl_max(F numerator, F behavior) {
    Wide one = binary_kl(numerator, behavior), other = binary_kl(behavior, numerator);
    for (int i = 0; i < LANES; i++) one.at[i] = std::fmax(one.at[i], other.at[i]);
    return one;
}

typedef double H __attribute__((vector_size(4 * LANES)));  // half the lanes in float64
#if defined(__AVX__) && WIDTH == 8
INLINE H low_half(F x) { return (H)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x)); }
INLINE H high_half(F x) { return (H)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1)); }
#else
INLINE H low_half(F x) { return __builtin_convertvector(__builtin_shufflevector(x, x, LOW_HALF), H); }
INLINE H high_half(F x) { return __builtin_convertvector(__builtin_shufflevector(x, x, HIGH_HALF), H); }
#endif

// A sum in float64.
struct Sum {
    H low{}, high{};
    INSIDE void add_wide(F x, double times = 1.0) {
        low += times * low_half(x);
        high += times * high_half(x);
    }
    INSIDE void add_wide(const Wide& x) {
        for (int i = 0; i < LANES / 2; i++) low[i] += x.at[i], high[i] += x.at[i + LANES / 2];
    }
    INSIDE void add_wide(const Sum& other) {
        low += other.low;
        high += other.high;
    }
    INSIDE double total() const {
        double found = 0;
        for (int i = 0; i < LANES / 2; i++) found += low[i] + high[i];
        return found;
    }
};
INLINE bool any(I flags) {
    int found = 0;
    for (int i = 0; i < LANES; i++) found |= flags[i];
    return found;
}
static float largest(F lanes) {
    float found = lanes[0];
    for (int i = 1; i < LANES; i++) found = maximum(found, lanes[i]);
    return found;
}

// How many flags were set.
struct Count {
    I lanes{};
    INSIDE void add(I flags) { lanes -= flags; }
    INSIDE double total() const {
        int64_t found = 0;
        for (int i = 0; i < LANES; i++) found += lanes[i];
        return found;
    }
};
// The same, infinite where one of them was not sound.
struct Sound {
    Count count, unsound;
    INSIDE void add(I flags, I sound) {
        count.add(flags);
        unsound.add(flags & ~sound);
    }
    INSIDE double total() const { return unsound.total() ? INF : count.total(); }
};
