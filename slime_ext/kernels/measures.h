// Sufficient statistics of the metrics, in the order of slime_ext.metrics.layout.

constexpr int HALF = 1 << (31 - SHIFT);  // places of the histogram on each side of 0

template <class T> static int reached(const float* edges, T value) {
    int bin = 0;
    for (int i = 0; i < EDGES; i++) bin += value >= edges[i];
    return bin;
}

// What tokens add up to, lane by lane, until it is moved on. A loop over tokens holds it in registers, as far as
// there are any.
struct Recent {
    int filled = 0;  // vectors since the last flush
    F sums[COLUMNS] = {};
    I masked{}, counted{}, kept{}, flagged[PARTS + 1] = {};
    F highest = each(-INF), lowest = each(INF), heaviest = each(-INF);
};

// The tokens since the last flush: the curve by probability goes over them once for every bin.
struct Block {
    F behavior[FLUSH], excess[FLUSH], weight[FLUSH], k3[FLUSH];
    I keep[FLUSH];
};

struct Measures {
    typedef Sum Curve[EDGES + 1][CURVE_COLUMNS];
    Sum columns[COLUMNS];
    Curve by_position, by_age, by_probability;
    I flagged[FLAGS + 1] = {};
    // Four, so that neighbours in one place do not wait for each other; each a line further, so that they do not
    // compete for one part of the cache.
    uint32_t histogram[4][2 * HALF + 16] = {};
    Recent recent;
    Block block;
    int position = 0, age = -1;
    float shared = 0.0f;  // the weight of all tokens of the sequence that are kept

    INSIDE void add(Recent& now, const Tokens& t, I keep, F weight, F excess, const I* acting) {
        const F capped = minimum(excess, LARGEST), bounded = minimum(weight, LARGEST), k3 = capped - t.l;
        now.masked -= t.mask;
        now.counted -= t.finite;
        now.kept -= keep;
        for (int i = 0; i < PARTS; i++) now.flagged[i] -= t.mask & acting[i];
        now.sums[EXCESS] += capped;
        now.sums[EXCESS_SQUARED] += capped * capped;
        now.sums[K3] += k3;
        now.sums[LOG_BEHAVIOR] += where(t.finite, t.beh, 0.0f);
        const F ratio = where(t.finite, t.l, NAN);  // which is neither higher nor lower
        now.highest = maximum(now.highest, ratio);
        now.lowest = minimum(now.lowest, ratio);
        if (!SHARED) {
            now.sums[WEIGHT] += bounded;
            now.sums[WEIGHT_SQUARED] += bounded * bounded;
            now.heaviest = maximum(now.heaviest, weight);
        }
        count(t.l);
        if (CURVES) {
            block.behavior[now.filled] = where(t.finite, t.beh, NAN);  // which lies in no bin
            block.excess[now.filled] = capped;
            if (!SHARED) block.weight[now.filled] = bounded;
            block.k3[now.filled] = k3;
            block.keep[now.filled] = keep;
        }
        now.filled++;
    }
    // By the first bits of the log-ratio, its sign among them. Where it is 0, or there is none, that is no bin.
    INSIDE void count(F l) {
        const Unsigned places = (Unsigned)l >> SHIFT;
        uint32_t at[LANES];
        std::memcpy(at, &places, sizeof at);
        for (int i = 0; i < LANES; i++) histogram[i & 3][at[i]]++;
    }
    // Tokens from here on lie in these bins of position and age; an age below 0 is unknown.
    void begin_range(int at_position, int at_age) {
        position = at_position;
        age = at_age;
    }
    // Adds lanes in float64; every token has a bin of position, so that with curves those bins hold it all.
    void move(int column, F lanes, double times = 1.0) {
        if (!CURVES || column >= CURVE_COLUMNS) return columns[column].add_wide(lanes, times);
        by_position[position][column].add_wide(lanes, times);
        if (age >= 0) by_age[age][column].add_wide(lanes, times);
    }
    // All tokens of the curve by probability since the last flush have one weight then.
    void end_sequence() {
        if (SHARED && CURVES) flush();
    }
    void move_sums() {
        for (int c = EXCESS; c < COLUMNS; c++) {
            move(c, recent.sums[c]);
            recent.sums[c] = F{};
        }
    }
    INSIDE void take(const Recent& now) {
        recent = now;
        if (recent.filled == FLUSH) flush();
    }
    void flush() {
        move_sums();
        if (CURVES) add_by_probability();
        recent.filled = 0;
    }
    void add_by_probability() {
        F lowest = each(INF), highest = each(-INF);
        for (int i = 0; i < recent.filled; i++) {
            lowest = minimum(lowest, block.behavior[i]);
            highest = maximum(highest, block.behavior[i]);
        }
        const int first = reached(LOG_PROBABILITIES, -largest(-lowest));
        const int last = reached(LOG_PROBABILITIES, largest(highest));
        for (int bin = first; bin <= last; bin++) add_bin(bin);
    }
    void add_bin(int bin) {
        const float low = bin ? LOG_PROBABILITIES[bin - 1] : -INF, high = bin < EDGES ? LOG_PROBABILITIES[bin] : INF;
        I counted{}, kept{};
        F excess{}, weight{}, k3{};
        for (int i = 0; i < recent.filled; i++) {
            const I here = (block.behavior[i] >= low) & (block.behavior[i] < high);
            counted -= here;
            kept -= here & block.keep[i];
            excess += only(here, block.excess[i]);
            if (!SHARED) weight += only(here, block.weight[i]);
            k3 += only(here, block.k3[i]);
        }
        const F found[CURVE_COLUMNS] = {as_floats(counted), as_floats(kept), excess, weight, k3};
        for (int c = 0; c < CURVE_COLUMNS; c++)
            if (!SHARED || c != WEIGHT) by_probability[bin][c].add_wide(found[c]);
        if (SHARED) by_probability[bin][WEIGHT].add_wide(found[KEPT], shared);
    }
    // After the last token of a sequence or of its bin of position: what all of them share is added once.
    void end_range(float weight, int all_acted) {
        const F kept = as_floats(recent.kept);
        move(COUNTED, as_floats(recent.counted));
        move(KEPT, kept);
        if (SHARED) {
            const float shared = any(recent.kept) ? weight : 0.0f;
            const double bounded = minimum(shared, LARGEST);
            move(WEIGHT, kept, bounded);
            move(WEIGHT_SQUARED, kept, bounded * bounded);
            recent.heaviest = maximum(recent.heaviest, shared);
        }
        @flag_lines@
        recent.masked = recent.counted = recent.kept = I{};
        for (I& lanes : recent.flagged) lanes = I{};
        if (CURVES) move_sums();
    }
    void write(double* sums, double* highest) {
        flush();
        for (int c = 0; c < COLUMNS; c++) {
            if (CURVES && c < CURVE_COLUMNS)
                for (const auto& bin : by_position) columns[c].add_wide(bin[c]);
            *sums++ = columns[c].total();
        }
        for (int f = 0; f < FLAGS; f++) *sums++ = Count{flagged[SAME[f]]}.total();
        sums += 1 + @per_sequence@;  // the surrogate's, and those of sequences
        for (int side : {0, HALF}) {
            for (int b = FIRST; b < FIRST + SIDE; b++) *sums++ = found(side + b);
            *sums = 0;
            for (int b = FIRST + SIDE; b < HALF; b++) *sums += found(side + b);
            sums++;
        }
        *highest++ = largest(recent.highest);
        *highest++ = largest(-recent.lowest);
        *highest++ = largest(recent.heaviest);
        if (!CURVES) return;
        for (const Curve* curve : {&by_position, &by_age, &by_probability})
            for (const auto& bin : *curve)
                for (const Sum& sum : bin) *sums++ = sum.total();
    }
    int64_t found(int place) const {
        return (int64_t)histogram[0][place] + histogram[1][place] + histogram[2][place] + histogram[3][place];
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
    double squares = 0, ratios = 0;  // over the largest, so that they stay finite
    for (int64_t s = 0; s < sequences; s++) {
        if (!(count[s] > 0)) continue;
        const double relative = std::exp(ratio[s] - highest[0]);
        squares += relative * relative;
        ratios += relative;
    }
    log_sums[0] = sums[1] > 0 ? 2 * highest[0] + std::log(squares) : -INF;
    log_sums[1] = sums[1] > 0 ? highest[0] + std::log(ratios) : -INF;
}
