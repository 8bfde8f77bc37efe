"""The file of --custom-config-path is judged as it is on disk; a script that may change it is named."""

from __future__ import annotations

import pytest

from slime_ext.tools.commands.check_answer import check
from slime_ext.tools.launch.read import read_script
from slime_ext.tools.launch.sources import named_sources
from tests.tools.commands.in_process import run

pytestmark = pytest.mark.usefixtures("in_process")
OURS = "--use-tis --custom-megatron-init-path slime_ext.host.init "
OURS += "--custom-tis-function-path slime_ext.tis.correct"
TRAIN = f"python3 train.py {OURS} --custom-config-path cfg.yaml"
ON_DISK = "slime_ext: {steps: [reweight, {truncate: {high: 2}}]}\n"
# Ways in which bash users change a file; each comes before TRAIN unless it names it (⏎ ends a line). The last
# only reads the file, and a name anywhere but in the launch is enough.
WAYS = r"""
echo 'use_tis: true' >> cfg.yaml
cat > cfg.yaml <<EOF ⏎ slime_ext: {preset: geo_rs} ⏎ EOF
printf 'a: 1\n' > cfg.yaml
: > cfg.yaml
> cfg.yaml
tee cfg.yaml <<EOF ⏎ a: 1 ⏎ EOF
echo a: 1 | tee -a cfg.yaml
echo a: 1 | sudo tee cfg.yaml > /dev/null
sed -i 's/2/1/' cfg.yaml
sed -i.bak -e 's/2/1/' ./cfg.yaml
sed 's/2/1/' other.yaml > cfg.yaml
sed 's/2/1/' cfg.yaml > new.yaml && mv new.yaml cfg.yaml
perl -pi -e 's/2/1/' cfg.yaml
yq -i '.a = 1' cfg.yaml
yq '.a = 1' other.yaml > cfg.yaml
awk '{print}' other.yaml > cfg.yaml
awk '{print > "cfg.yaml"}' other.yaml
envsubst < template.yaml > cfg.yaml
python -c "open('cfg.yaml', 'a').write('a: 1')"
python3 -c "import yaml; yaml.safe_dump({}, open('c' + 'fg.yaml', 'w'))"
python3 - <<EOF ⏎ open("cfg.yaml", "w").write("a: 1") ⏎ EOF
python3 <<'EOF' ⏎ import glob ⏎ open(glob.glob("c*")[0], "w") ⏎ EOF
python3 make_config.py
python3 tune.py --out cfg.yaml
python3 -m my_package.configure
./configure_run
bash edit_config.sh
source edit_config.sh
cp other.yaml cfg.yaml
mv other.yaml cfg.yaml
ln -sf other.yaml cfg.yaml
install -m 644 other.yaml cfg.yaml
rsync -a configs/ .
cp configs/* .
rm cfg.yaml
truncate -s 0 cfg.yaml
dd if=other.yaml of=cfg.yaml
cd sub ⏎ sed -i 's/2/1/' ../cfg.yaml ⏎ cd ..
(cd . && sed -i 's/2/1/' *.yaml)
for f in *.yaml; do sed -i 's/2/1/' "$f"; done
find . -name '*.yaml' -exec sed -i 's/2/1/' {} +
echo cfg.yaml | xargs sed -i 's/2/1/'
CFG=cfg.yaml ⏎ sed -i 's/2/1/' "$CFG"
CFG=cfg.yaml ⏎ cat other.yaml > "$CFG"
D=$(pwd) ⏎ echo 'a: 1' >> $D/cfg.yaml
edit() { sed -i 's/2/1/' "$1"; } ⏎ edit cfg.yaml
write() { echo 'a: 1' >> "$1"; } ⏎ write cfg.yaml
ln -s cfg.yaml alias.yaml ⏎ sed -i 's/2/1/' alias.yaml
sed -i 's/2/1/' link.yaml
echo 'a: 1' >> link.yaml
bash -c "sed -i 's/2/1/' cfg.yaml"
bash -c 'echo "a: 1" >> cfg.yaml'
ssh localhost "sed -i s/2/1/ cfg.yaml"
eval "sed -i 's/2/1/' cfg.yaml"
if [ -f cfg.yaml ]; then sed -i 's/2/1/' cfg.yaml; fi
nvidia-smi && sed -i 's/2/1/' cfg.yaml
while read -r l; do echo "$l" >> cfg.yaml; done < other.yaml
{ echo 'a: 1'; echo 'b: 2'; } > cfg.yaml
git checkout other -- cfg.yaml
git pull
patch -p1 < fix.patch
make config
exec 3>> cfg.yaml ⏎ echo 'a: 1' >&3
jq . x.json | tee "$(ls cfg*)"
echo a: 1 > "$(find . -name 'cfg*')"
sed -i 's/2/1/' $(ls *.yaml | head -1)
vim -c 'normal x' -c wq cfg.yaml
curl -o cfg.yaml http://x/y
wget -O cfg.yaml http://x/y
mv cfg.yaml old.yaml
rm -f cfg.yaml ⏎ srun bash -c 'TRAIN'
srun bash -c 'sed -i s/2/1/ cfg.yaml'
cat cfg.yaml
"""
HONEST = r"""
TRAIN
set -ex ⏎ pkill -9 sglang ⏎ sleep 3 ⏎ ray stop --force ⏎ TRAIN
CFG=cfg.yaml ⏎ ARGS=(OURS) ⏎ python3 train.py ${ARGS[@]} --custom-config-path "$CFG"
ARGS=(OURS --custom-config-path cfg.yaml) ⏎ python3 train.py "${ARGS[@]}"
export MODEL=/root/models/qwen ⏎ mkdir -p logs checkpoints ⏎ TRAIN 2>&1 | tee logs/train.log
[ -f cfg.yaml ] || exit 1 ⏎ TRAIN
echo "configuration: cfg.yaml" ⏎ TRAIN
ray start --head --num-gpus 8 --disable-usage-stats ⏎ ray job submit --address=http://127.0.0.1:8265 -- TRAIN
python3 /root/slime/tools/convert_hf_to_torch_dist.py --save /root/x ⏎ TRAIN
cat > eval.yaml <<EOF ⏎ a: 1 ⏎ EOF ⏎ TRAIN
sed -i 's/a/b/' /root/other/settings.json ⏎ TRAIN
N=$(nvidia-smi -L | wc -l) ⏎ if [ "$N" -gt 4 ]; then T=2; else T=1; fi ⏎ TRAIN --tensor-model-parallel-size $T
pip install -e . ⏎ TRAIN
git rev-parse HEAD > commit.txt ⏎ TRAIN
rm -rf /tmp/ray/* ⏎ cp -r /root/data /tmp/data ⏎ TRAIN
launch() { TRAIN "$@"; } ⏎ launch --lr 1e-6
TRAIN ⏎ sed -i 's/2/1/' cfg.yaml
# sed -i 's/2/1/' cfg.yaml ⏎ TRAIN
hf download Qwen/Qwen3-4B --local-dir /root/Qwen3-4B ⏎ wandb login ⏎ TRAIN
curl -fsS http://127.0.0.1:8265/api/version || true ⏎ for i in 1 2 3; do sleep 1; done ⏎ TRAIN
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)" ⏎ cd "$SCRIPT_DIR" ⏎ TRAIN
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cfg.yaml", "other.yaml"):
        (tmp_path / name).write_text(ON_DISK)
    (tmp_path / "link.yaml").symlink_to("cfg.yaml")
    (tmp_path / "edit_config.sh").write_text("sed -i 's/2/1/' cfg.yaml\n")
    for name in ("sub", "configs"):
        (tmp_path / name).mkdir()

    def write(line):
        text = line if "TRAIN" in line else f"{line} ⏎ TRAIN"
        text = text.replace("OURS", OURS).replace("TRAIN", TRAIN).replace(" ⏎ ", "\n")
        (tmp_path / "run.sh").write_text(text)
        return "run.sh"

    return write


@pytest.mark.parametrize("line", WAYS.strip("\n").split("\n"))
def test_a_script_that_may_change_the_file_is_not_ok(script, line):
    answer = check(named_sources(script(line)))
    said = " ".join(map(str, answer.unasked))
    assert answer.status == "incomplete" and "may change cfg.yaml before the launch" in said
    assert "truncate(high 2)" in answer.rows["steps"]  # as it is on disk


@pytest.mark.parametrize("line", HONEST.strip("\n").split("\n"))
def test_a_script_that_names_the_file_only_in_the_launch_is_ok(script, line):
    answer = check(named_sources(script(line)))
    assert (answer.status, answer.unasked) == ("ok", ())


PLACES = {
    "set -e ⏎ sed -i s/2/1/ cfg.yaml": "run.sh:2",
    "N=1 ⏎ echo a: $N >> cfg.yaml": "run.sh:2",
    "source edit_config.sh": "edit_config.sh:1",
    "python3 prepare.py ⏎ true": "run.sh:1",
}


@pytest.mark.parametrize("line", PLACES)
def test_the_line_that_may_change_the_file_is_named(script, line, capsys):
    status, out, err = run(capsys, "check", script(line))
    assert (status, err) == (0, "") and f"{PLACES[line]} may change cfg.yaml before the launch" in out
    assert "not checked" in out and not out.endswith("ok\n")


def test_a_file_that_only_the_script_writes_leaves_the_correction_unknown(script, tmp_path):
    (tmp_path / "link.yaml").unlink()
    (tmp_path / "cfg.yaml").unlink()
    answer = check(named_sources(script("echo 'slime_ext: {preset: geo_rs}' > cfg.yaml")))
    assert answer.status == "incomplete" and "known only where the script runs" in answer.line
    assert read_script("run.sh").edits == ("run.sh:1",)


INIT = "--custom-megatron-init-path slime_ext.host.init"
WRITES = "cat > FILE <<EOF ⏎ use_tis: true ⏎ slime_ext: {preset: geo_rs} ⏎ EOF ⏎ "
UNKNOWN_FILES = {  # a launch whose flags name a file that nobody can read here -> how it uses slime_ext
    f"{WRITES}python3 train.py --custom-config-path FILE": "not known whether",
    f"{WRITES}python3 train.py --custom-config-path FILE --use-tis": "not known whether",
    f"{WRITES}python3 train.py --custom-config-path FILE {INIT}": "its correction is known only where",
    '[ "$(hostname)" = a ] && C="--custom-config-path cfg.yaml" ⏎ python3 train.py $C': "not known whether",
}


@pytest.mark.parametrize("file", ["new.yaml", "other.yaml"])
@pytest.mark.parametrize("line", UNKNOWN_FILES)
def test_a_launch_with_an_unknown_file_is_not_said_to_lack_slime_ext(script, tmp_path, line, file):
    (tmp_path / "other.yaml").write_text("a: 1\n")  # nothing of slime_ext, before the script writes it
    answer = check(named_sources(script(f"{line} # TRAIN".replace("FILE", file))))
    is_judged = INIT in line and file == "other.yaml"  # as it is on disk
    assert answer.status == "incomplete" and not answer.offers
    assert ("no correction" if is_judged else UNKNOWN_FILES[line]) in answer.line


def test_a_file_that_is_named_beside_the_script_is_judged(script, tmp_path):
    (tmp_path / "saved.yaml").write_text(ON_DISK.replace("2", "5"))
    answer = check(named_sources("saved.yaml", script("sed -i s/2/1/ cfg.yaml")))
    assert answer.status == "ok" and "truncate(high 5)" in answer.rows["steps"]
