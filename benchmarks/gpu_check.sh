#!/usr/bin/env bash
# Shows that everything runs on a machine with a CUDA device. At most ten minutes after installation:
#     benchmarks/gpu_check.sh
# It runs tests/gpu, measures the demo's head (and makes a small one first where there is none), and decodes an 8B-sized
# random target. Results go to $OUT, else benchmarks/results. A step that fails does not stop the next; the exit code
# is 0 only if all passed. Without $HEADWAY_PYTHON it sets up .venv by `make setup`; with it, that interpreter is used as
# it is (a machine without a package registry, say).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-benchmarks/results}
mkdir -p "$out" artifacts/gpu
rm -rf artifacts/gpu/report

if [[ -n ${HEADWAY_PYTHON:-} ]]; then
    python=$HEADWAY_PYTHON
else
    make setup
    python=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
"$python" - <<'CHECK'
import sys, torch
if not torch.cuda.is_available():
    sys.exit("error: torch sees no CUDA device here; install its CUDA build and the driver, or use another machine")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
CHECK

failed=()
step() {  # step NAME SECONDS COMMAND...: run a command with a time limit, tell how long it took, remember a failure
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    echo "== $name"
    if timeout "$limit" "$@"; then
        echo "== $name: passed in $((SECONDS - start)) s"
    else
        echo "== $name: FAILED (exit code $?) after $((SECONDS - start)) s"
        failed+=("$name")
    fi
}

head=artifacts/demo/medusa
step "tests/gpu" 120 "$python" -m pytest -q -m gpu tests/gpu
if [[ ! -f $head/manifest.json ]]; then
    head=artifacts/gpu/medusa
    step "collect" 90 "$python" data_prep/collect.py --held_out 64 --max_tokens 60000 \
        --conversations data_prep/samples/smollm2-conversations.jsonl --out artifacts/gpu/features
    step "train" 90 "$python" train/medusa.py --config configs/recipes/demo.yaml \
        --data.features artifacts/gpu/features --out "$head" --log.wandb off
fi
step "measure the demo" 120 "$python" eval/measure.py --head "$head" --head lookup --count 16 --repeats 3 \
    --device cuda --out artifacts/gpu/report
if [[ -f artifacts/gpu/report/report.json ]]; then
    cp artifacts/gpu/report/report.json "$out/gpu-demo-report.json"
fi
step "8B-sized target" 180 "$python" benchmarks/random_target.py --out "$out"

if ((${#failed[@]})); then
    echo "gpu check: FAILED: ${failed[*]}"
    exit 1
fi
echo "gpu check: passed; results in $out"
