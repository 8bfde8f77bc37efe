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
    int position[FLUSH];
};

// Tokens of one bin of position that come in with those of others, lane by lane, until they are moved on.
struct Place {
    int filled = 0;
    I counted{}, kept{};
    F excess{}, weight{}, k3{};
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
    Place places[EDGES + 1];
    int age = -1;
    bool mixed = false;  // whether the tokens since the last flush lie in several bins of position
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
    // Tokens from here on have this weight where they are kept, and lie in this bin of age; below 0 it is unknown.
    void begin_sequence(float weight, int at_age) {
        shared = weight;
        age = at_age;
    }
    // The new vectors follow each other from this token of the response on.
    INSIDE void take(const Recent& now, int64_t within) {
        if (CURVES) place(recent.filled, now.filled, within);
        recent = now;
        if (recent.filled == FLUSH) flush();
    }
    void place(int from, int to, int64_t within) {
        const int first = reached(POSITIONS, within), last = reached(POSITIONS, within + (to - from - 1) * LANES);
        mixed |= first != last || (from && block.position[from - 1] != first);
        for (int i = from; i < to; i++)
            block.position[i] = first == last ? first : reached(POSITIONS, within + (i - from) * LANES);
    }
    // After the last token of a sequence: what all of them share is added once. With curves a flush does that, which
    // sees tokens of one weight and age so.
    void end_sequence(int all_acted, bool aged) {
        @flag_lines@
        recent.masked = I{};
        for (I& lanes : recent.flagged) lanes = I{};
        if (!CURVES) move_shared();
        if (CURVES && (SHARED || aged)) flush();
    }
    void flush() {
        if (CURVES && recent.filled) add_curves();
        for (int c = CURVES ? CURVE_COLUMNS : EXCESS; c < COLUMNS; c++) columns[c].add_wide(recent.sums[c]);
        for (F& lanes : recent.sums) lanes = F{};
        recent.filled = 0;
        mixed = false;
    }
    void move_shared() {
        const F kept = as_floats(recent.kept);
        const float heaviest = any(recent.kept) ? shared : 0.0f;
        const double bounded = minimum(heaviest, LARGEST);
        if (!CURVES) {
            columns[COUNTED].add_wide(as_floats(recent.counted));
            columns[KEPT].add_wide(kept);
            if (SHARED) columns[WEIGHT].add_wide(kept, bounded);
        }
        if (SHARED) {
            columns[WEIGHT_SQUARED].add_wide(kept, bounded * bounded);
            recent.heaviest = maximum(recent.heaviest, heaviest);
        }
        recent.counted = recent.kept = I{};
    }
    // Every token has a bin of position: with curves those bins hold the columns that curves have.
    void add_curves() {
        const F found[CURVE_COLUMNS] = {as_floats(recent.counted), as_floats(recent.kept), recent.sums[EXCESS],
                                        recent.sums[WEIGHT], recent.sums[K3]};
        if (age >= 0) add_found(by_age[age], found);
        if (mixed) add_by_position();
        else add_found(by_position[block.position[0]], found);
        add_by_probability();
        move_shared();
    }
    void add_found(Sum* bin, const F* found) {
        for (int c = 0; c < CURVE_COLUMNS; c++)
            if (!SHARED || c != WEIGHT) bin[c].add_wide(found[c]);
        if (SHARED) bin[WEIGHT].add_wide(found[KEPT], minimum(shared, LARGEST));
    }
    void add_by_position() {
        const F weight = each(minimum(shared, LARGEST));
        for (int i = 0; i < recent.filled; i++) {
            Place& place = places[block.position[i]];
            place.counted -= block.behavior[i] == block.behavior[i];
            place.kept -= block.keep[i];
            place.excess += block.excess[i];
            place.weight += SHARED ? only(block.keep[i], weight) : block.weight[i];
            place.k3 += block.k3[i];
            if (++place.filled == FLUSH) move_place(block.position[i]);
        }
    }
    void move_place(int at) {
        const Place& place = places[at];
        const F found[CURVE_COLUMNS] = {as_floats(place.counted), as_floats(place.kept), place.excess, place.weight, place.k3};
        for (int c = 0; c < CURVE_COLUMNS; c++) by_position[at][c].add_wide(found[c]);
        places[at] = Place{};
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
        add_found(by_probability[bin], found);
    }
    void write(double* sums, double* highest) {
        flush();
        for (int at = 0; at <= EDGES; at++) move_place(at);
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
