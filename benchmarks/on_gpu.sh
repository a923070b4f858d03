#!/usr/bin/env bash
# Measures this project on the GPU of this machine: ten minutes at most for each command.
# Usage: benchmarks/on_gpu.sh [--tiny]
#
#   1. our training step and the PyTorch twin's in turns (benchmarks/train_step.py): base and big in
#      bfloat16 against autocast, SDPA, torch.compile and fused AdamW, 16k + 16k tokens; in float32
#   2. base and big in bfloat16, 16k + 16k tokens: time, share of the peak, memory against
#      `estimate`; the same with each option for memory, and with each backend of attention
#   3. the sizes of NLLB-3.3B with random weights: 20 steps, and the same with a stop half way
#   4. the built-in task in bfloat16
#   5. greedy decoding and beam search (5) against transformers and CTranslate2
#   6. the parity suite
#
# --tiny tries the same commands on any machine, at sizes whose figures mean nothing; torch.compile
# is then off, since it takes minutes on a CPU. OUT is the folder of the logs; PYTHON the
# interpreter. It needs pip install '.[cuda,bench,dev]'.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OUT=${OUT:-on_gpu}
python=${PYTHON:-python}
mkdir -p "$OUT"
failed=()

run() { # run a command with a limit, its output in the log $1
    local name=$1
    shift
    echo "== $name: $*"
    timeout "${LIMIT:-600}" "$@" >"$OUT/$name.log" 2>&1
    local status=$?
    tail -n 12 "$OUT/$name.log"
    if ((status)); then echo "== $name FAILED: exit code $status" && failed+=("$name"); fi
}

measure() { # the step of a model, by the options of estimate
    local name=$1
    shift
    run "$name" "$python" benchmarks/measured_step.py --topology "$topology" "${model[@]}" "$@"
}

vaswani=(--model.preset vaswani2017_base --model.precision bfloat16)
undropped=(--model.attention-dropout 0)
if [[ ${1:-} == --tiny ]]; then
    topology=cpu:1
    export TORCH_COMPILE_DISABLE=1
    small=(--model.d-model 32 --model.num-heads 2 --model.d-ff 64 --model.encoder-layers 2
        --model.decoder-layers 2 --data.vocab-size 100 --length 16 --data.tokens-per-batch 64)
    base=("${vaswani[@]}" "${small[@]}") sizes=base backends=sdpa
    steps=(tiny) batch=(--batch 4 --length 8 --rounds 1 --steps 1) float32=tiny
    nllb=("${base[@]}" --model.remat full --model.scan-layers --loss-chunks 8)
    task=(--steps 2 --eval-every 2 --eval-pairs 4 "${small[@]:0:10}" --data.tokens-per-batch 2048)
    decode=(--device cpu --size tiny --random --batch 2 --rounds 1)
    tests=(parity_tests/unit/extras/test_estimate.py -n0 -k roofline)
else
    topology=${TOPOLOGY:-h200:1}
    tokens=(--data.vocab-size 32000 --length 64 --data.tokens-per-batch 16384)
    base=("${vaswani[@]}" "${tokens[@]}")
    big=("${base[@]}" --model.d-model 1024 --model.num-heads 16 --model.d-ff 4096)
    sizes="base big" backends="xla sdpa cudnn"
    steps=(vaswani_base vaswani_big) batch=(--batch 256 --length 64) float32=vaswani_base
    "$python" benchmarks/estimate_table.py --configs "$OUT/models" # config.json, without weights
    nllb=(--init "$OUT/models/nllb-3.3B" --length 128 --data.tokens-per-batch 8192
        --model.precision bfloat16 --model.remat full --model.scan-layers --loss-chunks 8)
    task=()
    decode=(--device cuda --size both --steps 300)
    tests=(parity_tests --ignore parity_tests/unit)
fi

for size in "${steps[@]}"; do
    run "twin-$size" "$python" benchmarks/train_step.py --size "$size" "${batch[@]}" \
        --precision bfloat16
done
run twin-float32 "$python" benchmarks/train_step.py --size "$float32" "${batch[@]}"
for size in $sizes; do
    declare -n model=$size
    measure "$size"
    measure "$size-chunks" --loss-chunks 8
    for remat in minimal full; do
        measure "$size-$remat" --model.remat "$remat"
        measure "$size-$remat-scan" --model.remat "$remat" --model.scan-layers
    done
    measure "$size-scan" --model.scan-layers
    for backend in $backends; do
        measure "$size-$backend" "${undropped[@]}" --model.attention-backend "$backend"
    done
done
run resume "$python" -m campaigns.interruptions.stop_and_resume --topology "$topology" "${nllb[@]}"
run task "$python" train.py --run "$OUT/phrases" --model.precision bfloat16 "${task[@]}"
run decode "$python" benchmarks/decode.py --beam 5 "${decode[@]}"
run parity "$python" -m pytest -q "${tests[@]}"
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
