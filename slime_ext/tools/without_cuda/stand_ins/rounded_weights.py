"""A quantised sampler: SLIME_EXT_ROUND=int4 (fp8, fp8_block, int8) rounds the weights at each push.

Every push of slime and miles converts weights by ``megatron_to_hf.convert_to_hf``. The trainer keeps its own;
an evaluation is sampled with the rounded ones, as the rollouts are. Without the variable nothing is wrapped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from slime_ext.errors import check_known

VARIABLE = "SLIME_EXT_ROUND"


def check(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if SLIME_EXT_ROUND names no format."""
    if rounding := environment.get(VARIABLE):
        from slime_ext.tools.without_cuda.rounding import ROUNDINGS

        check_known(VARIABLE, "format", rounding, ROUNDINGS)


def round_pushed(module: ModuleType) -> None:
    """Rounds what the host's ``convert_to_hf`` returns."""
    rounding = os.environ.get(VARIABLE)
    if not rounding:
        return
    from slime_ext.tools.without_cuda.rounding import round_weights

    convert = module.convert_to_hf

    @functools.wraps(convert)
    def convert_to_hf(*args: Any, **kwargs: Any) -> Any:
        return round_weights(convert(*args, **kwargs), rounding)

    module.convert_to_hf = convert_to_hf
