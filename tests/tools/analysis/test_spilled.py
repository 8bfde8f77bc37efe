"""Dumps whose tensors lie outside their file: files of safetensors, pools of straw, archives of straw."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
import types
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from safetensors.torch import save_file

from slime_ext.tools.analysis.document import Skipped
from slime_ext.tools.analysis.readers import spilled
from slime_ext.tools.analysis.readers.unpickle import DATACLASSES, NotPlain, PlainUnpickler
from tests.tools.analysis import dumps
from tests.tools.analysis.in_process import read
from tests.tools.analysis.synthetic import World, run
from tests.tools.analysis.test_readers import Runs, only, reason

ROLLOUT = run(World(rollouts=1, samples=5, length=20))[0]
LAYERS, ACTIVE = 3, 2


@dataclass(frozen=True)
class DiskTensorRef:
    """The fields of slime's, in their order."""

    path: str
    shape: tuple
    dtype: str
    nbytes: int
    kind: str | None = None
    validated: bool = False


def host_module(monkeypatch, name: str, **contents) -> None:
    """A module of a host, as far as pickle looks at it."""
    module = types.ModuleType(name)
    for key, value in contents.items():
        setattr(module, key, value)
        value.__module__ = name
    monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)


def routes(i: int) -> torch.Tensor:
    rows = ROLLOUT.lengths[i] + ROLLOUT.prompt_lengths[i] - 1
    return torch.randint(0, 9, (rows, LAYERS, ACTIVE), generator=torch.Generator().manual_seed(i)).int()


def kept(i: int) -> dict[str, torch.Tensor]:
    """slime's replay keys: two tokens are kept everywhere, the sampled one among them."""
    drawn = dumps.of_samples(ROLLOUT, "tokens")[i]
    return {
        "rollout_top_p_token_ids": torch.stack([drawn, drawn + 1], 1).flatten().int(),
        "rollout_top_p_token_offsets": torch.arange(len(drawn) + 1).int() * 2,
    }


def in_file(path, tensor: torch.Tensor) -> DiskTensorRef:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"tensor": tensor}, path)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return DiskTensorRef(str(path), tuple(tensor.shape), dtype, tensor.numel() * tensor.element_size())


def write(folder, spill) -> None:
    """Both dumps; ``spill`` puts the tensors of the rollout dump elsewhere. The trainer's experts are the
    sampler's, but for one layer."""
    rollout, train = dumps.write_rollout(folder, ROLLOUT), dumps.write_train(folder, ROLLOUT)
    content = torch.load(rollout)
    for i, sample in enumerate(content["samples"]):
        for key, tensor in {"rollout_routed_experts": routes(i), **kept(i)}.items():
            sample[key] = spill(f"{i}_{key}", tensor)
    torch.save(content, rollout)
    content = torch.load(train)
    for sample in content["samples"]:
        sample["routed_experts"] = routes(sample["rollout_position"]).clone()
        sample["routed_experts"][:, 0] = 99
    torch.save(content, train)


def is_read(folder) -> bool:
    """Whether experts and supports are the ones that were put elsewhere."""
    found = only([folder])
    shares = (found.routes[:, 0] / found.routes[:, 1]).tolist()
    return shares == [0, 1, 1] and bool((found.kept == 2).all()) and not found.notes


@pytest.mark.parametrize("module", ["slime.utils.tensor_store", "slime.data.tensor", "vime.data.tensor"])
def test_tensors_in_files_are_read_where_they_lie_and_beside_a_dump_that_was_moved(
    tmp_path, monkeypatch, module
):
    host_module(monkeypatch, module, DiskTensorRef=DiskTensorRef)
    own = tmp_path / "run/rollout_data/0_r3_spill/4f"
    write(tmp_path / "run", lambda name, tensor: in_file(own / f"{name}.safetensors", tensor))
    assert is_read(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert is_read(tmp_path / "moved")


def test_tensors_that_are_not_there_cost_a_note_and_no_more(tmp_path, monkeypatch):
    host_module(monkeypatch, "slime.data.tensor", DiskTensorRef=DiskTensorRef)
    dumps.write_run(tmp_path / "plain", [ROLLOUT])
    write(tmp_path / "run", lambda name, tensor: in_file(tmp_path / f"store/{name}.safetensors", tensor))
    save_file({"tensor": torch.zeros(7)}, tmp_path / "store/0_rollout_routed_experts.safetensors")
    save_file({"tensor": torch.zeros(7)}, tmp_path / "store/1_rollout_top_p_token_ids.safetensors")
    (tmp_path / "store/2_rollout_routed_experts.safetensors").unlink()
    (tmp_path / "store/3_rollout_routed_experts.safetensors").write_bytes(b"not safetensors")
    found = only([tmp_path / "run"])
    assert found.notes == (
        "2 samples without rollout_routed_experts, rollout_top_p_token_ids: its file holds another tensor "
        "(first: sample 0)",
        "1 sample without rollout_routed_experts: its file is missing (first: sample 2)",
        "1 sample without rollout_routed_experts: its file cannot be read (first: sample 3)",
    )
    assert torch.equal(found.proximal, ROLLOUT.proximal) and list(found.prompts) == list(ROLLOUT.prompts)
    assert (
        found.routes[1].tolist() == [ROLLOUT.lengths[1] + ROLLOUT.lengths[4]] * 2 and found.kept.isnan().any()
    )
    shutil.rmtree(tmp_path / "store")
    found = only([tmp_path / "run"])
    assert found.routes is None and found.kept is None and len(found.notes) == 1


def test_a_field_that_describes_no_file_is_left_out(tmp_path, monkeypatch):
    host_module(monkeypatch, "slime.data.tensor", DiskTensorRef=DiskTensorRef)
    sound = in_file(tmp_path / "0.safetensors", torch.zeros(3))
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    for odd in ({"path": 7}, {"path": "a\0b"}, {"path": str(folder)}, {"shape": 3}, {"dtype": ["float32"]}):
        write(tmp_path / "run", lambda name, tensor, odd=odd: replace(sound, **odd))
        assert "15 samples" not in str(only([tmp_path / "run"]).notes)
        assert only([tmp_path / "run"]).notes[0].startswith("5 samples without rollout_routed_experts, ")


@pytest.mark.parametrize("name", DATACLASSES)
def test_a_malicious_pickle_of_each_dataclass_runs_nothing(tmp_path, monkeypatch, name):
    """Fields that run code, arguments of a constructor, methods, and changes to the class itself."""
    module, _, class_name = name.rpartition(".")
    host_module(monkeypatch, module, **{class_name: type(class_name, (), {})})
    proof, path = tmp_path / "ran", tmp_path / "0.pt"
    host_class = getattr(sys.modules[module], class_name)
    sample = host_class()
    sample.path = Runs(proof)
    torch.save({"rollout_id": 0, "samples": [{"rollout_routed_experts": sample}]}, path)
    assert "system, which is no plain data: not loaded" in reason([path])
    assert not proof.exists()

    named = f"c{module}\n{class_name}\n".encode()
    for pickled in (
        named + b"(S'touch'\ntR.",  # calls it with an argument
        named + b"(S'touch'\nt\x81.",  # __new__ with one
        named + b"(dS'fields'\nNsb.",  # sets an attribute of the class
        named + b"(N(dS'fields'\nNstb.",  # in the form for slots
        f"c{module}\n{class_name}.fields\n.".encode(),
        f"c{module}\n{class_name}.__setstate__\n.".encode(),
        f"c{module}\n{class_name}.__init__.__globals__\n.".encode(),
    ):
        with pytest.raises((pickle.UnpicklingError, TypeError, NotPlain)):
            PlainUnpickler(io.BytesIO(pickled)).load()
    assert callable(DATACLASSES[name].fields)


def test_fields_within_fields_without_end_are_left_out(tmp_path, monkeypatch):
    host_module(monkeypatch, "slime.data.tensor", DiskTensorRef=DiskTensorRef)

    def endless(name, tensor):
        found = replace(in_file(tmp_path / "0.safetensors", tensor))
        object.__setattr__(found, "kind", found)
        return found

    write(tmp_path / "run", endless)
    assert only([tmp_path / "run"]).notes[0].startswith("5 samples without rollout_routed_experts, ")


CODECS = ("bytes.v1", "json.v1", "slime.v1", "tensor.v1")


class Pool:
    """A pool of straw, written in slime's format (slime/data/codec.py at 5dcf67c)."""

    def __init__(self, folder, run_id="debug-rollout"):
        store = pytest.importorskip("straw.store", reason="pip install straw-queue")
        self.straw = pytest.importorskip("straw")
        self.store = store.SharedFilesystemStore(folder, run_id, codecs=CODECS)
        self.records = 0

    def tensor(self, tensor: torch.Tensor, kind: str):
        from straw.tensor import publish_tensors

        self.records += 1
        return publish_tensors(self.store, {kind: tensor}, submission_id=f"t{self.records}")[0]

    def record(self, tree, dependencies=()):
        self.records += 1
        payload = json.dumps({"version": 1, "tree": tree}).encode()
        record = self.straw.Record(f"r{self.records}", payload, "slime.v1", {}, tokens=0)
        (found,) = self.store.publish_many(
            [self.straw.Publication((record,), tuple(dependencies))], submission_id=f"p{self.records}"
        )
        return found


def node(value, tensors):
    """The tagged JSON of a value; tensors are numbered as they come."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        place = {"dependency": len(tensors) - 1, "ordinal": 0}
        return [
            "tensor",
            place,
            list(value.shape),
            str(value.dtype).removeprefix("torch."),
            True,
            None,
            False,
        ]
    if isinstance(value, dict):
        return ["dict", [[key, node(v, tensors)] for key, v in value.items()]]
    if isinstance(value, (list, tuple)):
        return ["list", [node(v, tensors) for v in value]]
    return ["float", repr(value)] if isinstance(value, float) and value != value else value


def write_archive(folder, is_raw=False, kind="slime"):
    """The archive of the rollout in two chunks, or (``is_raw``) as links to groups whose rewards changed."""
    write(folder, lambda name, tensor: tensor)
    path = folder / "rollout_data/0.pt"
    samples = torch.load(path)["samples"]
    path.unlink()
    pool = Pool(folder / "rollout_data/straw-data")
    links, entries = [], []
    for chunk, part in enumerate((samples[:3], samples[3:])):
        tensors: list[torch.Tensor] = []
        nodes = [["sample", node(sample | {"status": "completed"}, tensors)] for sample in part]
        blobs = [pool.tensor(tensor, "x").blob_set for tensor in tensors]
        links.append(pool.record(["list", [["list", nodes]] if is_raw else nodes], blobs))
        entries += [{"chunk": chunk, "offset": i} for i in range(len(part))]
    if is_raw:
        entries = [{"offset": i} for i in range(len(samples))]
        changes = [{"reward": 5.0, "metadata": {"engine": "b"}}] * 3
        about = [{"path": [0], "sample_metadata": changes}, {"path": [0]}]
        groups = [
            ["rollout-ref", "RolloutGroupRef", i, node(of_group, [])] for i, of_group in enumerate(about)
        ]
        raw = pool.record(["list", groups], links)
        contents, dependencies = {"raw": ["rollout-ref", "DiskPayloadRef", 0, node({}, [])]}, [raw]
    else:
        chunks = [["rollout-ref", "DiskPayloadRef", i, node({}, [])] for i in range(2)]
        contents, dependencies = {"chunks": ["list", chunks]}, links
    fields = [*contents.items(), ("entries", node(entries, []))]
    manifest = pool.record(["dict", [list(field) for field in fields]], dependencies)
    pool.store.close()
    index = {"format": f"{kind}.straw-debug", "version": 1, "rollout_id": 0, "evaluation": False}
    index |= {"root": str(pool.store.backend.root), "manifest": asdict(manifest), "storage_owner": "x"}
    archive = folder / "rollout_data/0.straw.json"
    archive.write_text(json.dumps(index))
    return archive


@pytest.mark.parametrize("kind", ["slime", "vime"])
def test_an_archive_is_read_as_the_dump_that_it_stands_for(tmp_path, kind):
    archive = write_archive(tmp_path / "run", kind=kind)
    before = sorted((p, p.stat().st_mtime_ns) for p in archive.parent.rglob("*"))
    assert is_read(tmp_path / "run")
    assert before == sorted((p, p.stat().st_mtime_ns) for p in archive.parent.rglob("*"))
    found = only([tmp_path / "run"])
    assert list(found.responses) == list(ROLLOUT.responses)
    assert set(found.statuses) == {"completed"} and torch.equal(found.behavior, ROLLOUT.behavior)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert is_read(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved/rollout_data/straw-data")
    said_now = left_out([tmp_path / "moved"])
    assert "expected the pool of straw, got no such folder: copy it to straw-data" in said_now


def test_an_archive_of_links_to_groups_is_read_with_what_was_changed_since(tmp_path):
    write_archive(tmp_path, is_raw=True)
    found = only([tmp_path])
    assert list(found.responses) == list(ROLLOUT.responses)
    assert found.rewards.tolist() == [5.0] * 3 + ROLLOUT.rewards[3:].tolist()
    assert found.engines == ("b", "b", "b", "", "")


def left_out(paths) -> str:
    (found,) = (found for found in read(paths) if isinstance(found, Skipped))
    return found.reason


def test_an_archive_without_the_package_says_what_to_install(tmp_path, monkeypatch):
    archive = tmp_path / "0.straw.json"
    archive.write_text("{}")
    monkeypatch.setitem(sys.modules, "straw.store", None)
    assert reason([archive]).endswith(
        "expected straw-queue to read an archive of straw, got none: pip install straw-queue, or export the "
        "dump with RolloutArchive.export_pt"
    )


def test_no_archive_is_one_line_and_names_no_class(tmp_path):
    archive = write_archive(tmp_path / "run")
    index = json.loads(archive.read_text())
    for content, said in (
        ("{", "is cut off or no archive of straw"),
        ("[" * 100_000, "is cut off or no archive of straw"),
        (json.dumps(index | {"format": "x"}), "expected version 1 of an archive"),
        (json.dumps(index | {"manifest": {}}), "is cut off or no archive of straw"),
    ):
        archive.write_text(content)
        said_now = left_out([tmp_path / "run"])
        assert said in said_now and "\n" not in said_now
    pool = Pool(tmp_path / "run/rollout_data/straw-data")
    for tree in (["os.system", "touch"], ["sample", 3], ["float", "1e9"], ["tensor", {}, [], "", True]):
        manifest = pool.record(tree)
        archive.write_text(json.dumps(index | {"manifest": asdict(manifest)}))
        said_now = left_out([tmp_path / "run"])
        assert "is cut off or no archive of straw" in said_now


def test_tensors_in_a_pool_are_read_and_without_the_package_named(tmp_path, monkeypatch):
    pool = Pool(tmp_path / "straw", "my-run")
    write(tmp_path / "run", lambda name, tensor: pool.tensor(tensor, name))
    assert is_read(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "straw.tensor", None)
    (note,) = only([tmp_path / "run"]).notes
    assert note == (
        "5 samples without rollout_routed_experts, rollout_top_p_token_ids, rollout_top_p_token_offsets: "
        "its reader straw-queue is not installed: pip install straw-queue (first: sample 0)"
    )
    monkeypatch.undo()
    pool.store.close()
    shutil.rmtree(tmp_path / "straw")
    (note,) = only([tmp_path / "run"]).notes
    assert "its pool of straw is missing" in note


def packs(folder):
    return sorted((p for p in folder.rglob("*.pack")), key=lambda p: p.stat().st_size)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.fixture
def failed_reads(monkeypatch):
    """One entry for each read of straw that fails, for which straw waits four seconds."""
    failed, plainly = [], spilled._without_stderr

    @contextmanager
    def counted():
        with plainly():
            try:
                yield
            except Exception as error:
                failed.append(error)
                raise

    monkeypatch.setattr(spilled, "_without_stderr", counted)
    return failed


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_pool_is_waited_for_once_and_is_one_note(tmp_path, capfd, failed_reads, damage):
    """straw would wait for each tensor of a damaged file: 60 seconds for these 15."""
    pool = Pool(tmp_path / "straw", "my-run")
    write(tmp_path / "run", lambda name, tensor: pool.tensor(tensor, name))
    pool.store.close()
    damage(packs(tmp_path / "straw")[-1])
    found = only([tmp_path / "run"])
    assert len(failed_reads) <= 1
    (note,) = found.notes
    assert note.endswith(("its file cannot be read (first: sample 0)", "(first: sample 2)"))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("place", ["rollout_data/straw-data", "rollout_data/straw", "straw"])
def test_a_pool_beside_a_dump_that_was_moved_is_read(tmp_path, place):
    pool = Pool(tmp_path / "straw", "my-run")
    write(tmp_path / "run", lambda name, tensor: pool.tensor(tensor, name))
    pool.store.close()
    (tmp_path / "straw").rename(tmp_path / "run" / place)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert is_read(tmp_path / "moved")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_pool_of_an_archive_is_one_line(tmp_path, capfd, failed_reads, damage):
    archive = write_archive(tmp_path / "run")
    for number in range(1, 4):
        content = json.loads(archive.read_text()) | {"rollout_id": number}
        archive.with_name(f"{number}.straw.json").write_text(json.dumps(content))
    damage(packs(tmp_path / "run")[-1])
    reasons = {found.reason for found in read([tmp_path / "run"]) if isinstance(found, Skipped)}
    assert len(failed_reads) <= 1
    assert any("got a damaged file in it: copy the pool again" in said for said in reasons)
    assert capfd.readouterr().err == ""
