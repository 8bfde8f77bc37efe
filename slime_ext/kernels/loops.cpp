// The two passes of one correction over packed tokens. What stands between @ signs is written from its steps, here and
// in measures.h.

#include "lanes.h"

constexpr int FLAGS = @flags@, PARTS = @parts@, RATIO = @ratio@, COUNT = @count@, EDGES = @edges@;
constexpr bool OUTCOME = @outcome@, BOUNDS = @bounds_too@, OBSERVE = @observe@, LOSS = @loss@, MEASURE = @measure@, CURVES = @curves@;
constexpr bool SHARED = @shared@;  // whether all tokens of a sequence that are kept have its weight
enum { @columns@, COLUMNS };
constexpr int CURVE_COLUMNS = @curve_columns@, SHIFT = @shift@, FIRST = @first@, SIDE = @side@;
constexpr float LARGEST_FACTOR = @largest_factor@, LARGEST = @largest@, POSITIONS[EDGES] = {@positions@}, AGES[EDGES] = {@ages@};
constexpr float LOG_PROBABILITIES[EDGES] = {@log_probabilities@};
constexpr int SAME[FLAGS + 1] = {@same@};  // flags that ask for the same steps are counted once
constexpr bool are_whole_vectors(const float* edges) {
    for (int i = 0; i < EDGES; i++)
        if ((int)edges[i] % LANES) return false;
    return true;
}
static_assert(are_whole_vectors(POSITIONS), "a vector that begins with a response would lie in two bins of position");
constexpr int FLUSH = 32;  // additions in float32 before one in float64
constexpr int AHEAD = 512;  // tokens from what is looked at to what is asked for from memory

// What this rank holds of its sequences, in packed order.
struct Pieces {
    const int64_t *bounds, *owners, *starts;  // [P + 1], [P] or none, [P] or none
    int64_t count, tokens;
    int64_t owner(int64_t piece) const { return owners ? owners[piece] : piece; }
    int64_t start(int64_t piece) const { return starts ? starts[piece] : 0; }
};

struct Tokens {
    F num, beh, adv, l;
    I mask, finite;
};

template <class T> INLINE void ask_for(const T* at) { __builtin_prefetch(at + AHEAD); }
INLINE I first_lanes(int64_t n) { return n >= LANES ? I{} - 1 : counting() < (int)n; }

// The lanes from ``at``, of which those ``here`` belong to the piece and ``there`` many to the arrays.
INLINE Tokens look(const float* nums, const float* behs, const uint8_t* masks, const float* advs, int64_t at,
                   I here, int64_t there) {
    ask_for(nums + at);
    ask_for(behs + at);
    ask_for(masks + at);
    Tokens t;
    t.num = load<F>(nums + at, there);
    t.beh = load<F>(behs + at, there);
    t.mask = flags(masks + at, there) & here;
    t.finite = t.mask & (abs(t.beh) < INF);
    t.l = where(t.finite, t.num - t.beh, 0.0f);
    t.adv = F{};
    if (@reads_advantages@) t.adv = where(t.mask, load<F>(advs + at, there), 0.0f);
    return t;
}

#define UNPACK const F num = t.num, beh = t.beh, adv = t.adv, l = t.l; const I mask = t.mask, finite = t.finite; \
    (void)num; (void)beh; (void)adv; (void)l; (void)mask; (void)finite;

extern "C" void statistics(const void* const* p, const int64_t* n) {
    @pointers@
    const Pieces pieces{bounds, owners, starts, n[0], n[1]};
    const int64_t sequences = n[2];
    for (int64_t piece = 0; piece < pieces.count; piece++) {
        @declared@
        const int64_t stop = bounds[piece + 1];
        // Most calls are for all lanes: inlined with constants, they compare nothing and take no branch.
        const auto step = [&](int64_t at, int64_t mine, int64_t there) INSIDE {
            const Tokens t = look(numerators, behaviors, masks, advantages, at, first_lanes(mine), there);
            UNPACK
            @sums@
        };
        int64_t at = bounds[piece];
        for (; at + LANES <= stop; at += LANES) step(at, LANES, LANES);
        if (at < stop) step(at, stop - at, pieces.tokens - at);
        const int64_t owner = pieces.owner(piece);
        @tabled@
    }
}

#include "measures.h"

// This thread's, found once: inlined, every token would ask where they are.
static __attribute__((noinline)) Measures& fresh_measures() {
    static thread_local Measures measures;
    if (MEASURE) new (&measures) Measures;
    return measures;
}

extern "C" void correct(const void* const* p, const int64_t* n) {
    @pointers@
    const Pieces pieces{bounds, owners, starts, n[0], n[1]};
    const int64_t sequences = n[2], first = n[3];
    Measures& measures = fresh_measures();
    for (int64_t owner = 0; owners && owner < sequences; owner++) {  // those that others hold, too
        @ahead@
        kepts[owner] = kept;
    }
    for (int64_t piece = 0; piece < pieces.count; piece++) {
        const int64_t owner = pieces.owner(piece), stop = bounds[piece + 1];
        @ahead@
        kepts[owner] = kept;
        const I whole = I{} - kept;
        const float scale = LOSS && scales ? scales[owner] : 1.0f;
        const int age = CURVES && ages && !std::isnan(ages[owner]) ? reached(AGES, ages[owner]) : -1;
        const int64_t shift = pieces.start(piece) - bounds[piece];  // from here to the place in the response
        if (MEASURE) measures.begin_sequence(kept ? all_w : 0.0f, age);
        for (int64_t at = bounds[piece]; at < stop;) {
            int64_t end = stop;
            if (MEASURE && CURVES && pieces.start(piece) % LANES) {  // or a vector lies in one bin anyway
                const int position = reached(POSITIONS, at + shift);
                const int64_t left = position < EDGES ? (int64_t)POSITIONS[position] - (at + shift) : stop - at;
                end = left < stop - at ? at + left : stop;
            }
            const auto step = [&](Recent& now, int64_t at, int64_t mine, int64_t there) INSIDE {
                const I here = first_lanes(mine), nowhere{};
                const Tokens t = look(numerators, behaviors, masks, advantages, at, here, there);
                UNPACK
                F w = each(all_w);
                I keep = finite, clipped = I{} - all_clipped, acted = where(finite, 0, 1) | all_acted;
                @steps@
                keep &= whole;
                w = where(keep, w, 0.0f);
                if (OUTCOME) {
                    store(weights + at, w, there);
                    store_flags(keeps + at, keep, there);
                    if (finites) store_flags(finites + at, finite, there);
                    if (BOUNDS) store(log_ratios + at, l, there);
                    if (BOUNDS) store_flags(clippeds + at, clipped, there);
                    if (OBSERVE) store(acteds + at, acted, there);
                }
                F excess{};
                if (LOSS || MEASURE) excess = expm1(l);
                if (LOSS) {
                    const F factor = minimum(w * scale, LARGEST_FACTOR);  // infinity times 0 is NaN
                    store(factors + at, factor, there);
                    store(products + at, where(keep, load<F>(losses + at, there) * factor, 0.0f), there);
                    store_flags(keeps + at, keep, there);
                    store(ratios + at, where(finite, excess + 1.0f, 0.0f), there);
                    store(bounded_ones + at, as_numbers(clipped & finite), there);
                    store(rejected_ones + at, as_numbers(mask & ~keep), there);
                }
                const I acting[PARTS + 1] = {@acting@};
                if (MEASURE) measures.add(now, t, keep, w, excess, acting);
            };
            while (at < end) {
                Recent now = measures.recent;
                const int64_t begin = at, until = at + LANES * (FLUSH - now.filled);
                for (; at + LANES <= end && at < until; at += LANES) step(now, at, LANES, LANES);
                if (at < end && at < until) {
                    step(now, at, end - at, pieces.tokens - at);
                    at = end;
                }
                if (MEASURE) measures.take(now, begin + shift);
            }
        }
        if (MEASURE && stop > bounds[piece]) measures.end_sequence(all_acted, ages);
    }
    if (!MEASURE) return;
    for (int i = 0; i < @sums_size@; i++) sums[i] = 0;
    for (int i = 0; i < @highest_size@; i++) highest[i] = -INF;
    for (int i = 0; i < @log_sums_size@; i++) log_sums[i] = -INF;
    measures.write(sums, highest);
    if (first)
        of_sequences(table, kepts, ages, sequences, sums + LOG_RATIO, sums + COLUMNS + FLAGS + 1, highest + 3, log_sums);
}
