"""miles' transfer of weights by mooncake, which it imports whatever the flags say.

miles 2b5b7fc: backends/megatron_utils/update_weight/update_weight_from_distributed/p2p.py, imported by the
package's __init__; it needs mooncake and miles' fork of SGLang, neither of which is on PyPI.
"""

from __future__ import annotations

import sys
import types

PACKAGE = "miles.backends.megatron_utils.update_weight"


def replace_transfer() -> None:
    """A module in place of p2p.py, without the class that needs mooncake."""
    name = f"{PACKAGE}.update_weight_from_distributed.p2p"
    sys.modules[name] = module = types.ModuleType(name)
    module.UpdateWeightP2P = None
