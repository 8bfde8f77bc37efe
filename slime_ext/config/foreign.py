"""Lists the keys that belong to other systems.

It imports nothing, so that ``slime-ext convert --help`` needs no torch.
"""

from __future__ import annotations

SYSTEMS = (  # the systems whose blocks slime-ext convert reads
    *("verl", "skyrl", "fireworks", "slime_mis", "trl", "areal", "openrlhf", "ms_swift", "rlinf"),
)
MIS = (  # keys that slime's examples/train_infer_mismatch_helper/mis.py reads beside use_tis
    *("use_rs", "tis_level", "rs_level", "tis_mode", "tis_lower_bound", "tis_upper_bound"),
    *("rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "tis_batch_normalize"),
)
# Keys that only another system has -> that system.
FOREIGN = {system: system for system in SYSTEMS} | dict.fromkeys(MIS, "slime_mis")
