"""Each stand-in, and what fails without it: an interpreter with all of them, and others without some."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_ext_cpu import stand_ins
from slime_ext_cpu.stand_ins import hosts, torch_cuda
from tests import host_server
from tests.ranks import GROUP, server

HOSTS = Path(os.environ.get("HOSTS", "absent"))

# stand-in: what needs it, what is said without it
NEEDS = {
    "replace": (
        "import torch, megatron.core\nassert torch.zeros(2, device='cuda').device.type == 'cpu'",
        "CUDA",
    ),
    "register_cpu": (
        f"import sys; sys.path.insert(0, '{HOSTS}/slime-624b824')\n"
        "from slime.utils.accelerator import get_accelerator\nassert get_accelerator().device_count() == 1",
        "cpu",
    ),
    "share_by_name": (
        "import torch, sglang.srt.utils.patch_torch as p, sglang.srt.utils.common as c\n"
        "p.monkey_patch_torch_reductions()\n"
        "c.MultiprocessingSerializer.serialize(torch.ones(2), output_str=True)",
        "tuple index",
    ),
    "use_gloo": (
        "import tempfile, miles.utils.distributed_utils as d\n"
        "file = tempfile.mktemp()\n"
        "d.init_process_group('nccl', init_method=f'file://{file}', world_size=1, rank=0, group_name='w')",
        "pg_options|NCCL",
    ),
    "replace_loader": (
        "import miles.backends.megatron_utils.checkpoint as c\n"
        "from slime_ext_cpu.stand_ins import hf_weights\n"
        "assert c._load_checkpoint_hf.__module__ == hf_weights.__name__, 'megatron.bridge'",
        "megatron.bridge",
    ),
    "mark_files": (
        "import os; os.environ['SLIME_EXT_ENGINE'] = 'ours'\n"
        "from sglang.srt.managers.load_snapshot import shm_path_for\n"
        "assert 'ours' in shm_path_for('x'), 'without a mark'",
        "without a mark",
    ),
    "bind_stores": (
        "import socket, torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, 1, True, wait_for_workers=False)\n"
        "assert d.TCPStore('127.0.0.1', s.port, 1, False).check([]) is True\n"
        "assert socket.socket().connect_ex(('127.0.0.2', s.port)), 'listens everywhere'",
        "listens everywhere",
    ),
    "allocate_plainly": (
        "import torch\nfrom sglang.srt.mem_cache.pool_host import common\n"
        "make, memory = common.ALLOC_MEMORY_FUNCS['cpu'], common.HostTensorAllocator()\n"
        "make((2,), dtype=torch.int32, device='cpu', pin_memory=True, allocator=memory)",
        "CUDA|cudaHostRegister",
    ),
    "give_fields": (
        "import dataclasses\nfrom sglang.srt.server_args import ServerArgs\n"
        "assert 'dp_size' in {f.name for f in dataclasses.fields(ServerArgs)}",
        "dataclass",
    ),
    "declare_operators": ("import torchvision", "torchvision"),
    "add_absent": (
        "import sgl_kernel\nfrom sglang.srt.entrypoints.openai import encoding_dsv4\n"
        "import miles.backends.megatron_utils.update_weight.update_weight_from_distributed.p2p",
        "sgl_kernel",
    ),
}
# What fails without any of them. The others need some of these to be imported at all.
WITHOUT_ANY = ("bind_stores", "replace", "add_absent", "declare_operators")
EARLY = {"multiply_in_float32", "fill_before_loading", *WITHOUT_ANY}
# Runs as a worker of a host does: in a fork of a server that installed all of them before its imports.
WORKER = """
import json, sys
for name, code in json.loads(sys.argv[1]).items():
    assert {"megatron.training", "sglang.launch_server"} <= set(sys.modules), "imports itself"
    try:
        exec(code, {})
        said = None
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps({name: said}), flush=True)
"""


def failing(needs, is_without_any, said):
    """Writes what fails in a process that has imported torch and Megatron as they are.

    Unless without any stand-in, it has those of EARLY whose modules are not among these, and their CUDA.
    """
    if is_without_any:
        stand_ins.find_torchvision()
    else:
        os.environ |= {"SLIME_ACCELERATOR": "cpu", "SGLANG_USE_CPU_ENGINE": "1"}
        torch_cuda.replace()
        stand_ins.PLACES = [place for place in stand_ins.PLACES if place[2].__name__ in EARLY]
        stand_ins.install()
    errors = {}
    for name, code in needs.items():
        try:
            exec(code, {})
        except BaseException as error:
            errors[name] = f"{type(error).__name__}: {error}"
    said.write_text(json.dumps(errors))


@pytest.mark.slow
@pytest.mark.host
@pytest.mark.xdist_group(GROUP)
def test_something_fails_without_each(tmp_path):
    needs = {name: code for name, (code, _) in NEEDS.items() if name != "register_cpu" or HOSTS.exists()}
    processes = []
    for is_without_any in (True, False):
        some = {name: code for name, code in needs.items() if (name in WITHOUT_ANY) == is_without_any}
        args = (some, is_without_any, tmp_path / f"said {is_without_any}")
        processes.append(server().Process(target=failing, args=args))
        processes[-1].start()
    done = host_server.worker(WORKER, json.dumps(needs), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert {name: said for line in lines for name, said in line.items()} == dict.fromkeys(needs)
    errors = {}
    for process, is_without_any in zip(processes, (True, False), strict=True):
        process.join()
        errors |= json.loads((tmp_path / f"said {is_without_any}").read_text())
    for name in needs:
        error = errors.get(name, "nothing fails")
        assert any(word in error for word in NEEDS[name][1].split("|")), (name, error)


def test_every_stand_in_has_its_test():
    elsewhere = {
        "fill_before_loading",
        "translate_requests",
        "start_at_own_port",
        "draw_own_ports",
        "add_collectives",
    }
    elsewhere |= {"round_pushed", "attend_batched", "give_older_names"}  # the last: every run of miles
    elsewhere |= {"multiply_in_float32"}
    assert {call.__name__ for *_, call in stand_ins.PLACES} | {"add_absent"} == elsewhere | set(NEEDS)


def test_adam_has_a_state_before_its_first_step_and_keeps_the_one_it_has():
    class Sharded:
        """Megatron's optimizer, as far as the count of steps goes (distrib_optimizer.py:664)."""

        def __init__(self, optimizer):
            self.optimizer = optimizer

        def sharded_state_dict(self):
            (steps,) = {s["step"].item() for s in self.optimizer.state_dict()["state"].values()}
            return steps

    parameter = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.AdamW([parameter])
    with pytest.raises(ValueError, match="unpack"):
        Sharded(adam).sharded_state_dict()
    torch_cuda.fill_before_loading(SimpleNamespace(DistributedOptimizer=Sharded, HAVE_APEX_OR_TE=False))
    assert Sharded(adam).sharded_state_dict() == 0
    parameter.grad = torch.ones(3)
    adam.step()
    assert Sharded(adam).sharded_state_dict() == 1


class Engine:
    """The host's engine class, as far as requests go."""

    def __init__(self):
        self.sent = []

    def _make_request(self, endpoint, payload=None):
        self.sent.append((endpoint, payload))
        if endpoint == "update_weights_from_distributed" and payload == "bad":
            raise RuntimeError("refused")


RECORD = Engine._make_request  # before a test has wrapped it


def test_requests_of_a_weight_push_are_those_of_sglang_0_5_23():
    hosts.translate_requests(SimpleNamespace(SGLangEngine=Engine))
    engine = Engine()
    engine._make_request("init_weights_update_group", {"backend": "nccl", "rank": 1})
    engine._make_request("post_process_weights", {})
    engine._make_request("update_weights_from_distributed", "good")
    with pytest.raises(RuntimeError):
        engine._make_request("update_weights_from_distributed", "bad")
    begin, end = ("begin_weight_update", None), ("end_weight_update", None)
    assert engine.sent == [
        ("init_weights_update_group", {"backend": "gloo", "rank": 1}),
        *(begin, ("update_weights_from_distributed", "good"), end),
        *(begin, ("update_weights_from_distributed", "bad"), end),
    ]


def test_a_host_that_opens_the_session_of_a_weight_push_itself_is_left_to_it():
    """miles 31f1ca9; a second session is refused, and its trainer waited for ever."""

    class OpensItself:
        begin_weight_update, __init__, _make_request = None, Engine.__init__, RECORD

    hosts.translate_requests(SimpleNamespace(SGLangEngine=OpensItself))
    engine = OpensItself()
    engine._make_request("update_weights_from_distributed", "good")
    assert engine.sent == [("update_weights_from_distributed", "good")]


def test_a_run_looks_for_free_ports_from_its_own_number_on(monkeypatch):
    monkeypatch.setenv(hosts.FIRST_PORT, "20300")
    misc = SimpleNamespace(get_free_port=lambda start_port=15000, consecutive=1: (start_port, consecutive))
    hosts.start_at_own_port(misc)
    assert misc.get_free_port() == (20300, 1)
    assert misc.get_free_port(start_port=15000, consecutive=3) == (20300, 3)
    assert misc.get_free_port(start_port=20307) == (20307, 1)
    http_utils = SimpleNamespace(find_available_port=lambda base_port: base_port)
    hosts.draw_own_ports(http_utils)
    assert http_utils.find_available_port(3000) == 3300


def test_a_reloadable_group_passes_the_names_of_torch_on():
    class Group:
        def __init__(self, group):
            self.group = group

        def all_to_all_single(self):
            return "the host's own"

    hosts.add_collectives(SimpleNamespace(ReloadableProcessGroup=Group))
    inner = SimpleNamespace(**{name: lambda *args, name=name: (name, args) for name in hosts.COLLECTIVES})
    assert Group(inner).all_to_all_single() == "the host's own"
    assert Group(inner).all_gather_single(1, 2) == ("all_gather_single", (1, 2))
    assert set(hosts.COLLECTIVES) <= set(dir(torch.distributed.ProcessGroup))
