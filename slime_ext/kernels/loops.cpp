// The two passes of one correction over packed tokens. What stands between @ signs is written from its steps.
// lanes.h comes before this text.

constexpr int STATISTICS = @statistics@, FLAGS = @flags@, RATIO = @ratio@, COUNT = @count@;
constexpr bool OUTCOME = @outcome@, BOUNDS = @bounds_too@, OBSERVE = @observe@, LOSS = @loss@, MEASURE = @measure@, CURVES = @curves@;
constexpr int COLUMNS = @columns@, LOG_RATIO = @log_ratio@, CURVE_COLUMNS = @curve_columns@, EDGES = @edges@;
constexpr int SHIFT = @shift@, FIRST = @first@, SIDE = @side@, BINS = @bins@;
constexpr float LARGEST = @largest@, POSITIONS[EDGES] = {@positions@}, AGES[EDGES] = {@ages@};
constexpr float LOG_PROBABILITIES[EDGES] = {@log_probabilities@};
constexpr int SAME[FLAGS + 1] = {@same@};  // flags that ask for the same steps are counted once
constexpr int FLUSH = 32;  // additions in float32 before one in float64

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

INLINE I first_lanes(int64_t n) { return n >= LANES ? I{} - 1 : counting() < (int)n; }

// The lanes from ``at``, of which those ``here`` belong to the piece and ``there`` many to the arrays.
INLINE Tokens look(const float* nums, const float* behs, const uint8_t* masks, const float* advs, int64_t at,
                   I here, int64_t there) {
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
        const auto step = [&](int64_t at, int64_t mine, int64_t there) __attribute__((always_inline)) {
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

struct Extremes {
    F ratio = each(-INF), negated = each(-INF), weight = each(-INF);
    static double of(F lanes) {
        float found = lanes[0];
        for (int i = 1; i < LANES; i++) found = found < lanes[i] ? lanes[i] : found;
        return found;
    }
};

template <class T> static int reached(const float* edges, T value) {
    int bin = 0;
    for (int i = 0; i < EDGES; i++) bin += value >= edges[i];
    return bin;
}

// Sufficient statistics of the metrics, in the order of slime_ext.metrics.layout.
struct Measures {
    typedef Sum Curve[EDGES + 1][CURVE_COLUMNS];
    Sum columns[COLUMNS];
    Curve by_position, by_age, by_probability;
    I flagged[FLAGS + 1] = {};
    int32_t histogram[4][BINS + 1] = {};
    Extremes extremes;
    int filled = 0, position = 0, age = -1;

    __attribute__((always_inline)) void add(const Tokens& t, I keep, F weight, F excess, I acted) {
        const F bounded = minimum(weight, LARGEST), capped = minimum(excess, LARGEST);
        const F row[COLUMNS] = {as_numbers(t.finite), as_numbers(keep), capped, bounded, capped - t.l, F{},
                                where(t.finite, t.beh, 0.0f), capped * capped, bounded * bounded};
        for (int c = 0; c < COLUMNS; c++)
            if (c != LOG_RATIO) columns[c].add(row[c]);
        @flag_lines@
        extremes.ratio = maximum(extremes.ratio, where(t.finite, t.l, -INF));
        extremes.negated = maximum(extremes.negated, where(t.finite, -t.l, -INF));
        extremes.weight = maximum(extremes.weight, weight);
        count(t);
        if (CURVES) by_probabilities(row);
        if (++filled == FLUSH) flush();
    }
    __attribute__((always_inline)) void count(const Tokens& t) {
        const I distance = (((I)t.l & 0x7fffffff) >> SHIFT) - FIRST;
        const I beyond = distance > SIDE ? SIDE - I{} : distance;
        const I index = t.l < 0.0f ? beyond + (SIDE + 1) : beyond;
        const I place = t.finite & (distance >= 0) ? index : BINS - I{};
        uint64_t pairs[LANES / 2];  // two places each: half as many have to leave their register
        std::memcpy(pairs, &place, sizeof pairs);
        for (int i = 0; i < LANES / 2; i++) {
            histogram[i & 1][(uint32_t)pairs[i]]++;
            histogram[2 + (i & 1)][pairs[i] >> 32]++;
        }
    }
    __attribute__((always_inline)) void by_probabilities(const F* row) {
        I above = t_all();
        for (int bin = EDGES; bin >= 0; bin--) {
            const I from = bin ? row[6] >= LOG_PROBABILITIES[bin - 1] : t_all();
            const I here = bin == EDGES ? from : from & ~above;
            for (int c = 0; c < CURVE_COLUMNS; c++) by_probability[bin][c].add((F)((I)row[c] & here));
            above = from;
        }
    }
    static I t_all() { return I{} - 1; }
    // Tokens from here on lie in these bins of position and age; an age below 0 is unknown.
    void begin_range(int at_position, int at_age) {
        position = at_position;
        age = at_age;
    }
    // Moves the tokens of a range to float64.
    void end_range() {
        for (int c = 0; c < COLUMNS; c++) {
            if (CURVES && c < CURVE_COLUMNS) {
                by_position[position][c].add_wide(columns[c].lanes);
                if (age >= 0) by_age[age][c].add_wide(columns[c].lanes);
            }
            columns[c].flush();
        }
    }
    void flush() {
        filled = 0;
        end_range();
        if (!CURVES) return;
        for (auto& bin : by_probability)
            for (Sum& sum : bin) sum.flush();
    }
    void write(double* sums, double* highest) {
        flush();
        for (const Sum& sum : columns) *sums++ = sum.total();
        for (int f = 0; f < FLAGS; f++) {
            int64_t found = 0;
            for (int i = 0; i < LANES; i++) found += flagged[SAME[f]][i];
            *sums++ = found;
        }
        sums += 1 + @per_sequence@;  // the surrogate's, and those of sequences
        for (int b = 0; b < BINS; b++)
            *sums++ = (double)histogram[0][b] + histogram[1][b] + histogram[2][b] + histogram[3][b];
        highest[0] = Extremes::of(extremes.ratio);
        highest[1] = Extremes::of(extremes.negated);
        highest[2] = Extremes::of(extremes.weight);
        if (!CURVES) return;
        for (const Curve* curve : {&by_position, &by_age, &by_probability})
            for (const auto& bin : *curve)
                for (const Sum& sum : bin) *sums++ = sum.total();
    }
};

// Sums, maxima and logarithms of sums over the sequences that have response tokens; the sum of their log-ratios
// is that of the tokens.
static void of_sequences(const double* table, const uint8_t* kept, const double* ages, int64_t sequences,
                         double* total, double* sums, double* highest, double* log_sums) {
    const double *ratio = table + RATIO * sequences, *count = table + COUNT * sequences;
    for (int64_t s = 0; s < sequences; s++) {
        if (!(count[s] > 0)) continue;
        *total += ratio[s];
        sums[0] += count[s];
        sums[1] += 1;
        sums[2] += kept[s];
        highest[0] = std::fmax(highest[0], ratio[s]);
        highest[1] = std::fmax(highest[1], -ratio[s]);
        if (!ages || std::isnan(ages[s])) continue;
        sums[3] += 1;
        sums[4] += ages[s];
        highest[2] = std::fmax(highest[2], ages[s]);
    }
    for (int power = 2; power; power--) {
        double total = 0;
        for (int64_t s = 0; s < sequences; s++)
            if (count[s] > 0) total += std::exp(power * (ratio[s] - highest[0]));
        *log_sums++ = sums[1] > 0 ? power * highest[0] + std::log(total) : -INF;
    }
}

extern "C" void correct(const void* const* p, const int64_t* n) {
    @pointers@
    const Pieces pieces{bounds, owners, starts, n[0], n[1]};
    const int64_t sequences = n[2], first = n[3];
    static thread_local Measures measures;
    if (MEASURE) measures = Measures();
    for (int64_t owner = 0; owner < sequences; owner++) {
        @ahead@
        if (groups) kept = kept && groups[owner];
        kepts[owner] = kept;
    }
    for (int64_t piece = 0; piece < pieces.count; piece++) {
        const int64_t owner = pieces.owner(piece), stop = bounds[piece + 1];
        @ahead@
        const int grouped = groups && !groups[owner] ? @group_bit@ : 0;
        const I whole = I{} - (kept && !grouped);
        const float scale = LOSS && scales ? scales[owner] : 1.0f;
        const int age = CURVES && ages && !std::isnan(ages[owner]) ? reached(AGES, ages[owner]) : -1;
        for (int64_t at = bounds[piece]; at < stop;) {
            int64_t end = stop;
            int position = 0;
            if (CURVES) {
                const int64_t within = at - bounds[piece] + pieces.start(piece);
                position = reached(POSITIONS, within);
                const int64_t left = position < EDGES ? (int64_t)POSITIONS[position] - within : stop - at;
                end = left < stop - at ? at + left : stop;
            }
            if (MEASURE && CURVES) measures.begin_range(position, age);
            const auto step = [&](int64_t at, int64_t mine, int64_t there) __attribute__((always_inline)) {
                const I here = first_lanes(mine), nowhere{};
                const Tokens t = look(numerators, behaviors, masks, advantages, at, here, there);
                UNPACK
                F w = each(1.0f);
                I keep = finite, clipped = nowhere, acted = where(finite, 0, 1) | grouped;
                @steps@
                keep &= whole;
                w = where(keep, w, 0.0f);
                if (OUTCOME) {
                    store(weights + at, w, there);
                    store(log_ratios + at, l, there);
                    store_flags(keeps + at, keep, there);
                    store_flags(finites + at, finite, there);
                    if (BOUNDS) store_flags(clippeds + at, clipped, there);
                    if (OBSERVE) store(acteds + at, acted, there);
                }
                F excess{};
                if (LOSS || MEASURE) excess = expm1(l);
                if (LOSS) {
                    const F factor = w * scale;
                    store(factors + at, factor, there);
                    store(products + at, where(keep, load<F>(losses + at, there) * factor, 0.0f), there);
                    store_flags(keeps + at, keep, there);
                    store(ratios + at, where(finite, excess + 1.0f, 0.0f), there);
                    store(bounded_ones + at, as_numbers(clipped & finite), there);
                    store(rejected_ones + at, as_numbers(mask & ~keep), there);
                }
                if (MEASURE) measures.add(t, keep, w, excess, acted);
            };
            for (; at + LANES <= end; at += LANES) step(at, LANES, LANES);
            if (at < end) step(at, end - at, pieces.tokens - at);
            at = end;
            if (MEASURE && CURVES) measures.end_range();
        }
    }
    if (!MEASURE) return;
    for (int i = 0; i < @sums_size@; i++) sums[i] = 0;
    for (int i = 0; i < @highest_size@; i++) highest[i] = -INF;
    for (int i = 0; i < @log_sums_size@; i++) log_sums[i] = -INF;
    measures.write(sums, highest);
    if (first)
        of_sequences(table, kepts, ages, sequences, sums + LOG_RATIO, sums + COLUMNS + FLAGS + 1, highest + 3, log_sums);
}
