"""Names of SGLang's server arguments that the hosts' releases expect and SGLang 0.5.23 has changed.

- `ServerArgs` is a msgspec.Struct there; slime 624b824 (sglang_engine.py:633) and miles ask
  `dataclasses.fields` for its fields, as older ones are dataclasses.
- The parser gives `dp_size`, `pp_size` and `ep_size` alone; miles 2b5b7fc (sglang_utils/arguments.py:130)
  reads `sglang_data_parallel_size` and its like, with --colocate (utils/arguments.py:2114) also flags of CUDA
  graphs that have gone.
"""

from __future__ import annotations

from argparse import ArgumentParser
from types import ModuleType

LONG_NAMES = {"dp": "data_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel"}
GONE = {"sglang_enforce_piecewise_cuda_graph": False, "sglang_disable_piecewise_cuda_graph": True}


def give_fields(module: ModuleType) -> None:
    """Lets `dataclasses.fields` answer for SGLang's ServerArgs."""
    import dataclasses

    named = getattr(module, "record_fields", None)
    if named is None:
        return
    fields = dataclasses.fields

    def fields_of(record: object) -> tuple:
        is_server_args = record is module.ServerArgs or isinstance(record, module.ServerArgs)
        return tuple(named(record)) if is_server_args else fields(record)

    dataclasses.fields = fields_of


def give_older_names(module: ModuleType) -> None:
    """Sets the long names of SGLang's parallel sizes, and the flags that have gone."""
    validate, add = module.validate_args, module.add_sglang_arguments

    def add_sglang_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser = add(parser)
        parser.set_defaults(**{name: GONE[name] for name in GONE if parser.get_default(name) is None})
        return parser

    def validate_args(args: object) -> None:
        for short, long in LONG_NAMES.items():
            if not hasattr(args, f"sglang_{long}_size"):
                setattr(args, f"sglang_{long}_size", getattr(args, f"sglang_{short}_size"))
        validate(args)

    module.validate_args, module.add_sglang_arguments = validate_args, add_sglang_arguments
