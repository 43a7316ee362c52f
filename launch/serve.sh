#!/usr/bin/env bash
# Serve a published pair as its card does, or a pair that ships with the package: launch/serve.sh PAIR [options]

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cards.sh"

usage() {
    cat <<TEXT
launch/serve.sh PAIR [options]; PAIR is one of: ${PAIRS[*]}

Options:
  --help           print this text; after a pair's name also its values
  --dry-run        print the command and stop
  --check          run the preflight (sglang-dflash check) with these flags and stop
  --gpu NAME       the values for this GPU instead of the local one; the preflight checks it too
  --long-context   limit how far back full-attention drafter layers read (SGLANG_DFLASH_DRAFT_WINDOW)
  --multi-gpu      split the models across two GPUs (SGLANG_DFLASH_TP)
  anything else    goes to the server

A start prints the verdict of the preflight first.
Example: SGLANG_DFLASH_BLOCK_SIZE=8 launch/serve.sh qwen3.5-27b --enable-metrics
TEXT
}

if [[ ${1-} == @(--help|-h) ]]; then
    usage
    exit
fi
card "${1-}"
ACTION=serve EXTRA=() GPU=''
shift
while (($#)); do
    case $1 in
    --help | -h) ACTION=help ;;
    --dry-run) ACTION=print ;;
    --check) ACTION=check ;;
    --long-context) CARD[DRAFT_WINDOW]=4096 ;;
    --multi-gpu) CARD[TP]=2 ;;
    --gpu)
        GPU=${2-}
        shift
        ;;
    --)
        EXTRA+=("${@:2}")
        break
        ;;
    *) EXTRA+=("$1") ;;
    esac
    shift
done

PYTHON=$(value PYTHON)
if [[ $PAIR_NAME == demo ]]; then
    CARD[TARGET]=$("$PYTHON" -m sglang_dflash.check.cli pairs path "$(value PAIR)")
    CARD[DRAFTER]=$("$PYTHON" -m sglang_dflash.check.cli pairs path "$(value PAIR)" --drafter good)
fi
# On another GPU than the card's, SGLang chooses the fraction of memory.
if [[ $ACTION != help && ${CARD[MEM_FRACTION]-} && ! ${SGLANG_DFLASH_MEM_FRACTION+set} ]]; then
    gpu=$("$PYTHON" -c 'from sglang_dflash.check import machine as m; import sys
print((m.gpu_named(sys.argv[1]) if sys.argv[1] else m.find_gpu() or m.CPU).name)' "$GPU")
    if [[ ${gpu^^} == *"RTX 5090"* && $PAIR_NAME == qwen3.8-27b ]]; then
        CARD+=([MEM_FRACTION]=0.91 [CHUNKED_PREFILL]=1024 [STATE_DTYPE]=bfloat16 [MAX_RUNNING]=5)
    elif [[ ${gpu^^} != *"$CARD_GPU"* ]]; then
        CARD[MEM_FRACTION]=''
    fi
fi

COMMAND=(--speculative-algorithm DFLASH) ENVIRONMENT=() KNOBS=()
# A variable sets a server flag, or a variable in the server's environment; an empty one sets nothing.
while read -r variable flag meaning; do
    name=${variable#SGLANG_DFLASH_}
    KNOBS+=("$(printf '  %-38s %-32s %s' "$variable" "${CARD[$name]:-(none)}" "$meaning")")
    case $(value "$name"):$flag in
    :*) ;;
    *:--*) COMMAND+=("$flag" "$(value "$name")") ;;
    *=) ENVIRONMENT+=("$flag$(value "$name")") ;;
    esac
done <<TABLE
SGLANG_DFLASH_TARGET                  --model-path                        target: hub id or folder
SGLANG_DFLASH_DRAFTER                 --speculative-draft-model-path      drafter: hub id or folder
SGLANG_DFLASH_BLOCK_SIZE              $BLOCK_SIZE_FLAG                    tokens of a draft block
SGLANG_DFLASH_ATTENTION_BACKEND       --attention-backend                 the target's attention
SGLANG_DFLASH_DRAFT_ATTENTION_BACKEND --speculative-draft-attention-backend  the drafter's attention, if different
SGLANG_DFLASH_LINEAR_PREFILL_BACKEND  --linear-attn-prefill-backend       the recurrent layers' prefill
SGLANG_DFLASH_LINEAR_DECODE_BACKEND   --linear-attn-decode-backend        the recurrent layers' decode
SGLANG_DFLASH_DTYPE                   --dtype                             dtype; a CPU is fastest in float32
SGLANG_DFLASH_MEM_FRACTION            --mem-fraction-static               fraction of memory for weights, K/V and states; SGLang's choice on a GPU other than $CARD_GPU
SGLANG_DFLASH_KV_CACHE_DTYPE          --kv-cache-dtype                    dtype of K/V
SGLANG_DFLASH_CHUNKED_PREFILL         --chunked-prefill-size              tokens of a prefill's chunk
SGLANG_DFLASH_MAMBA_STRATEGY          --mamba-radix-cache-strategy        snapshots of recurrent states for the prefix cache
SGLANG_DFLASH_STATE_DTYPE             --mamba-ssm-dtype                   dtype of recurrent states
SGLANG_DFLASH_GRAPH_MAX_BS            --cuda-graph-max-bs-decode          largest batch with a CUDA graph
SGLANG_DFLASH_PREFILL_GRAPH           --cuda-graph-backend-prefill        CUDA graphs of prefill
SGLANG_DFLASH_ALLREDUCE_FUSION        --flashinfer-allreduce-fusion-backend  all-reduce fused with the norm after it
SGLANG_DFLASH_OVERLAP_PLAN_STREAM     SGLANG_ENABLE_OVERLAP_PLAN_STREAM=  prepare the next step on its own stream
SGLANG_DFLASH_TP                      --tp-size                           GPUs per replica
SGLANG_DFLASH_DP                      --dp-size                           replicas behind one address
SGLANG_DFLASH_CONTEXT_LENGTH          --context-length                    longest sequence in tokens
SGLANG_DFLASH_DRAFT_WINDOW            --speculative-draft-window-size     context tokens that full-attention drafter layers read
SGLANG_DFLASH_MAX_RUNNING             --max-running-requests              requests at once
SGLANG_DFLASH_REASONING_PARSER        --reasoning-parser                  parser of thoughts
SGLANG_DFLASH_TOOL_CALL_PARSER        --tool-call-parser                  parser of calls
SGLANG_DFLASH_LISTEN_HOST             --host                              address to listen on
SGLANG_DFLASH_LISTEN_PORT             --port                              port to listen on
TABLE

server=("$PYTHON" -m sglang.launch_server "${COMMAND[@]}" "${EXTRA[@]}")
check=("$PYTHON" -m sglang_dflash.check.cli check "$(value TARGET)" "$(value DRAFTER)" ${GPU:+--gpu "$GPU"} "${COMMAND[@]}" "${EXTRA[@]}")
case $ACTION in
help)
    printf '%s\n\n' "$ABOUT"
    usage
    printf '\n  %-38s %-32s %s\n' 'Environment variable' Default Meaning
    printf '%s\n' "${KNOBS[@]}" "$(printf '  %-38s %-32s %s' SGLANG_DFLASH_PYTHON python 'interpreter that has SGLang')"
    ;;
print)
    printf '%q ' "${ENVIRONMENT[@]}" "${server[@]}" | sed 's/ *$//'
    echo
    ;;
check) exec env "${ENVIRONMENT[@]}" "${check[@]}" ;;
serve)
    # The server applies the same rules itself, so a failing check does not stop it.
    env "${ENVIRONMENT[@]}" "${check[@]}" >&2 || true
    exec env "${ENVIRONMENT[@]}" "${server[@]}"
    ;;
esac
