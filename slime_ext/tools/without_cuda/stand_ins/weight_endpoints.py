"""The endpoints of SGLang by which weights are pushed, as the hosts call them and SGLang 0.5.23 has them.

miles 2b5b7fc (backends/sglang_utils/sglang_engine.py) calls post_process_weights, which its fork of SGLang
has; it names NCCL in init_weights_update_group; 0.5.23 takes update_weights_from_distributed and, with
--colocate, update_weights_from_tensor between begin_weight_update and end_weight_update alone. miles 31f1ca9
opens and closes that session itself.
"""

from __future__ import annotations

from types import ModuleType

IN_A_SESSION = ("update_weights_from_distributed", "update_weights_from_tensor")


def translate_requests(module: ModuleType) -> None:
    """Sends SGLang 0.5.23 the requests that it knows in place of the host's."""
    send = module.SGLangEngine._make_request
    opens_itself = hasattr(module.SGLangEngine, "begin_weight_update")

    def _make_request(self: object, endpoint: str, payload: dict | None = None) -> object:
        if endpoint == "post_process_weights":  # repacks int4 and fp4 weights; here there are none
            return None
        if endpoint == "init_weights_update_group":
            payload = {**payload, "backend": "gloo"}
        if opens_itself or endpoint not in IN_A_SESSION:
            return send(self, endpoint, payload)
        send(self, "begin_weight_update")
        try:
            return send(self, endpoint, payload)
        finally:
            send(self, "end_weight_update")

    module.SGLangEngine._make_request = _make_request
