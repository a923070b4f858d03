#!/usr/bin/env bash
# Measures this project on the GPU of this machine: ten minutes at most for each command.
# Usage: benchmarks/on_gpu.sh [--tiny]
#
#   1. our training step and the PyTorch twin's (benchmarks/train_step.py), float32
#   2. base and big in bfloat16, 16k + 16k tokens: time, share of the peak, memory against
#      `estimate`, and the same with each option for memory
#   3. the built-in task in bfloat16
#   4. the parity suite
#
# --tiny tries the same commands on any machine, at sizes whose figures mean nothing. OUT is the
# folder of the logs; PYTHON the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-on_gpu}
python=${PYTHON:-python}
mkdir -p "$out"
failed=0

run() { # run a command with a limit, its output in the log $1
    local name=$1
    shift
    echo "== $name: $*"
    timeout "${LIMIT:-600}" "$@" >"$out/$name.log" 2>&1
    local status=$?
    tail -n 12 "$out/$name.log"
    if ((status)); then echo "== $name FAILED: exit code $status" && failed=1; fi
}

measure() { # the step of a model, by the options of estimate
    local name=$1
    shift
    run "$name" "$python" benchmarks/measured_step.py --topology "$topology" "${model[@]}" "$@"
}

vaswani=(--model.preset vaswani2017_base --model.precision bfloat16)
if [[ ${1:-} == --tiny ]]; then
    topology=cpu:1
    small=(--model.d-model 32 --model.num-heads 2 --model.d-ff 64 --model.encoder-layers 2
        --model.decoder-layers 2 --data.vocab-size 100 --length 16 --data.tokens-per-batch 64)
    base=("${vaswani[@]}" "${small[@]}") sizes=base
    step=(--size tiny --rounds 1 --steps 1)
    task=(--steps 2 --eval-every 2 --eval-pairs 4 "${small[@]:0:10}" --data.tokens-per-batch 2048)
    tests=(parity_tests/unit/test_estimate.py -n0 -k roofline)
else
    topology=${TOPOLOGY:-h200:1}
    tokens=(--data.vocab-size 32000 --length 64 --data.tokens-per-batch 16384)
    base=("${vaswani[@]}" "${tokens[@]}")
    big=("${base[@]}" --model.d-model 1024 --model.num-heads 16 --model.d-ff 4096)
    sizes="base big"
    step=(--size both --batch 256 --length 64)
    task=()
    tests=(parity_tests --ignore parity_tests/unit)
fi

run twin "$python" benchmarks/train_step.py "${step[@]}"
for size in $sizes; do
    declare -n model=$size
    measure "$size"
    measure "$size-chunks" --loss-chunks 8
    measure "$size-remat" --model.remat full
    measure "$size-scan" --model.scan-layers
done
run task "$python" train.py --run "$out/phrases" --model.precision bfloat16 "${task[@]}"
run parity "$python" -m pytest -q "${tests[@]}"
exit $failed
