"""Launch scripts in the manners that people write them."""

from __future__ import annotations

ARRAYS = r"""
set -e
pkill -9 python
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
LR=${LR:-1e-6}
ARGS=(
   --lr $LR  # --lr 3
   #--eps-clip 0.3
   --name "two words"
   --save ${HERE}/out/$LR.pt
)
ARGS+=(--experts $((4 * 2)))
TIS=(--use-tis --tis-clip 2)
python3 train.py --num-layers 2 \
   ${ARGS[@]} \
   "${TIS[@]}"
"""
STRINGS = r"""
TIS="--use-tis --tis-clip 5"
EXTRA='--note $HOME --kind "a b"'
MODEL=/data/models/qwen3-4b.v1
ray job submit --address=x --runtime-env-json="{\"env_vars\": {\"A\": \"$MODEL\"}}" -- \
   python3 train.py $TIS $EXTRA --hf ${MODEL##*/} --stem "${MODEL%.*}" --low ${MODEL/qwen3/QWEN} \
   --up ${MODEL^^} --n ${#MODEL} --part ${MODEL:1:4}
"""
BRANCHES = r"""
N=4
ARGS=()
if [ $N -gt 8 ]; then ARGS+=(--large); elif [ "$N" -eq 4 ]; then ARGS+=(--four); else ARGS+=(--small); fi
[ -z "$DEBUG" ] && ARGS+=(--no-debug)
[[ $N == [0-3] ]] || ARGS+=(--beyond)
if ! false; then ARGS+=(--negated); fi
if (( N > 3 && N < 5 )); then ARGS+=(--between); fi
case "$N" in 1|2) ARGS+=(--few);; 4*) ARGS+=(--case-four);; *) ARGS+=(--other);; esac
test "$N" = 4 && { ARGS+=(--tested); }
train.py "${ARGS[@]}"
"""
FUNCTIONS = r"""
never() { python3 train.py --wrong; }
common=(--a 1)
launch() {
   local size=$1; shift
   local -a more=(--size "$size")
   [ "$size" = small ] && return 0
   python3 train.py "${common[@]}" "${more[@]}" "$@"
}
launch small --x
launch large --y "z z"
"""
LOOPS = r"""
ARGS=(); total=0
for i in 1 2 {3..4}; do ARGS+=("--n$i"); total=$((total + i)); done
for ((j = 0; j < 3; j++)); do [ $j -eq 1 ] && continue; ARGS+=(--j $j); done
k=5; while [ $k -gt 0 ]; do k=$((k - 1)); if [ $k = 2 ]; then break; fi; done
until [ $k -ge 4 ]; do ((k++)); done
python3 train_async.py --total $total "${ARGS[@]}" --k $k
"""
SLICES = r"""
A=(--a 1 --b 2 --c 3)
A[7]=seven
unset 'A[1]'
B=("${A[@]:2:2}")
C=("${A[@]/b/x}")
declare -A M=([lr]=3)
A[2]+=more
python3 train.py "${A[@]}" -- ${B[@]} -- "${C[@]}" ${#A[@]} ${!B[@]} ${M[lr]} ${A[-1]} ${A}
"""
HEREDOCS = r"""
cat <<EOF > /dev/null
python3 train.py --in-a-document
EOF
NAME=x
JSON=$(cat <<EOF_JSON
{"name": "$NAME", "n": $((1 + 1))}
EOF_JSON
)
read -r first rest <<< "one two three"
python3 train.py --json "$JSON" --first $first --rest "$rest"
"""
GIVEN = r"""
MODE=$1
LR=1
while [[ $# -gt 0 ]]; do
   case $1 in
      --lr) LR=$2; shift 2;;
      --flag) FLAG=1; shift;;
      *) REST+=("$1"); shift;;
   esac
done
set -- "${REST[@]}" last
python3 train.py --mode "$MODE" --lr $LR ${FLAG:+--flag on} "$@" $# "${@:2}"
"""
TEXTS = r"""
CMD="python3 train.py"
ARGS="--a 'b c' --d \$e"
eval "X=5; Y=\"\$X\""
bash -c "$CMD --lr $X \$0" zero
eval $CMD $ARGS --y $Y
"""
QUOTES = r"""
X='a  b'; Y="it's"; Z=$'tab\there'
python3 train.py $X "$X" '$X' "$Y" "$Z" a\ b "\$X" \"q\" x"$X"y ''"" "" \
   --k=$X --k="$X" {p,q}r ~/home "${U:-d e}" ${U:-d e}
"""
ENDS = r"""
check() { if [ "$1" = stop ]; then exit 0; fi; }
check go
nohup env A=1 B=2 torchrun --nproc 2 train.py --first 2>&1 | tee log
( cd /; X=inner; python3 train.py --sub $X )
X=${X:-outer}
exec python3 train.py --last $X
python3 train.py --after
"""
SUBSTITUTIONS = r"""
N=$(echo 3); M=$(printf '%s-%d' a 7); S="$(seq 1 3)"; W=$(for i in a b; do echo "$i"; done)
P=$(basename /a/b/c.sh .sh); D=$(dirname /a/b/c.sh); L=$(IFS=,; echo "${LIST[*]}")
HAS=$([ "$N" -gt 2 ] && echo yes || echo no)
python3 train.py --n $N --m $M --s $S --w "$W" --p $P --d $D --l "$L" --has $HAS `echo back`
"""
DEFAULTS = r"""
: "${CFG:=sub/c.yaml}"
A=${NONE-dash}; B=${CFG:+alt}; C=${CFG+alt}; E=; F=${E:-empty}; G=${E-unset}
export H=1 I="$A-$B"
readonly J=$((H + 1)); K=$((J ** 3 % 5)); ((K += 2)); let L=K*2
declare -i Q=3+4
python3 train.py $A $B $C $F "$G" $H $I $J $K $L $Q ${CFG%/*} ${CFG#*/} ${CFG//c/C} ${NONE:-${CFG:-x}}
"""
REFERENCES = r"""
CORR=(--use-tis); NAME=CORR; V=LR; LR=3
go() { local -n args=$1; python3 train.py "${args[@]}" --lr ${!V}; }
ref="CORR[@]"
go CORR
python3 train.py "${!ref}" ${NONE[@]} "${NONE[@]}" --end
"""
CASES = r"""
MODEL=Qwen3-4B-Instruct
case $MODEL in
   *-Base) KIND=base;;
   Qwen3-*B-[Ii]nstruct) KIND=instruct;;
esac
if [[ $MODEL =~ ^Qwen([0-9]+) ]]; then FAMILY=qwen; fi
if [[ -n $KIND && ( $KIND == base || $KIND != other ) ]]; then OK=1; fi
[ "$KIND" = instruct -a -n "$OK" ] && python3 train.py --kind $KIND --family $FAMILY || python3 train.py --no
"""
ERREXIT = r"""
set -euo pipefail
A=1
false || A=2
if false; then A=3; fi
[ "$A" = 9 ] && A=4
python3 train.py --a $A
false
python3 train.py --after-failure
"""
OTHER_LANGUAGES = r"""
python3 - <<EOF
for i in range(3):
    print(i)
EOF
python3 -c "
for name, text in dict(a=1).items():
    print('in case (a) in b')
"
srun bash -c "
for t in \$(seq 1 2); do true; done
case \$(hostname) in a) true;; esac
python3 train.py --inner 2
"
for kind in "a;b" c; do LAST=$kind; done
python3 train.py --last $LAST
"""
LISTS = r"""
UNKNOWN="$(somewhere)"
A=(--config "$UNKNOWN" --last)
B=("${A[@]}" --b)
python3 train.py ${A[@]} "${B[@]}" "$UNKNOWN" --end
"""
SCRIPTS = {
    name.lower(): text.strip("\n") + "\n"
    for name, text in list(globals().items())
    if name.isupper() and isinstance(text, str)
}
GIVEN_WORDS = ["first", "--lr", "5", "--flag", "a b", "z"]
