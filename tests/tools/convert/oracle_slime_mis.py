"""slime's mis.py, transcribed: compute_mis_weights with the optimizer step as its batch."""

from tests.tools.convert.oracle_common import band, log_ratio, masked_mean, masked_sum, safe_exp, veto

# slime's examples/train_infer_mismatch_helper/mis.yaml.
EXAMPLE = {
    "use_rs": True,
    "tis_level": "token",
    "rs_level": "token",
    "tis_mode": "truncate",
    "tis_lower_bound": 0.5,
    "tis_upper_bound": 2.0,
    "rs_lower_bound": None,
    "rs_upper_bound": None,
    "rs_veto_threshold": 1.0e-4,
    "tis_batch_normalize": True,
}


def correct(rows, *, tis_level, tis_mode, tis_upper_bound, use_rs=False, tis_batch_normalize=False, **c):
    low = c.get("tis_lower_bound") or 1 / tis_upper_bound
    done = []
    for row, mask in rows:
        raw = [safe_exp(x) for x in log_ratio(tis_level, row, mask)]
        weights, kept = bounded(raw, mask, tis_mode, low, tis_upper_bound)
        if use_rs:
            kept = rejected(row, mask, kept, low, tis_upper_bound, c)
        done.append(([w * m for w, m in zip(weights, mask, strict=True)], kept))
    weights, kept = [w for w, _ in done], [k for _, k in done]
    masks = [mask for _, mask in rows]
    return (normalized(weights, masks, tis_level) if tis_batch_normalize else weights), kept


def bounded(raw, mask, mode, low, high):
    if mode == "truncate":
        return [min(w, high) for w in raw], mask
    if mode == "clip":
        return [min(max(w, low), high) for w in raw], mask
    return raw, band(raw, mask, low, high)


def rejected(row, mask, kept, low, high, c):
    low = low if c.get("rs_lower_bound") is None else c["rs_lower_bound"]
    high = high if c.get("rs_upper_bound") is None else c["rs_upper_bound"]
    ratios = [safe_exp(x) for x in log_ratio(c["rs_level"], row, mask)]
    kept = band(ratios, kept, low, high)
    threshold = c.get("rs_veto_threshold")
    if threshold is None or any(veto(row, mask, threshold)) or not any(mask):
        return kept
    return [0] * len(kept)


def normalized(weights, masks, level):
    pairs = [(w, m) for w, m in zip(weights, masks, strict=True) if sum(m)]
    if level == "token":
        mean = sum(masked_sum(w, m) for w, m in pairs) / max(sum(sum(m) for _, m in pairs), 1)
    else:  # mis.py also counts sequences without response tokens, as weight 0: the reading here does not
        mean = sum(masked_mean(w, m) for w, m in pairs) / max(len(pairs), 1)
    return [[x / mean for x in w] for w in weights] if mean > 1e-8 else weights
