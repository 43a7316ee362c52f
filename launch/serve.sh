#!/usr/bin/env bash
# Serve a published pair as its card does, or a pair that ships with the package: launch/serve.sh PAIR [options]

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cards.sh"

usage() {
    cat <<TEXT
launch/serve.sh PAIR [options]; PAIR is one of: ${PAIRS[*]}

Options:
  --help           this text; after a pair's name also its values
  --dry-run        print the command and stop
  --check          run the preflight (sglang-dflash check) with these flags and stop
  --long-context   limit how far back full-attention drafter layers read (DRAFT_WINDOW)
  --multi-gpu      split the models across GPUs (TP)
  anything else    goes to the server
TEXT
}

if [[ ${1-} == @(--help|-h) ]]; then
    usage
    exit
fi
if ! card "${1-}"; then
    usage >&2
    exit 2
fi
PAIR_NAME=$1 ACTION=serve EXTRA=()
shift
while (($#)); do
    case $1 in
    --help | -h) ACTION=help ;;
    --dry-run) ACTION=print ;;
    --check) ACTION=check ;;
    --long-context) CARD[DRAFT_WINDOW]=4096 ;;
    --multi-gpu) CARD[TP]=2 ;;
    --)
        EXTRA+=("${@:2}")
        break
        ;;
    *) EXTRA+=("$1") ;;
    esac
    shift
done

PYTHON=${PYTHON-python}
if [[ $PAIR_NAME == demo ]]; then
    PAIR=${PAIR-${CARD[PAIR]}}
    CARD[TARGET]=$("$PYTHON" -m sglang_dflash.cli pairs path "$PAIR")
    CARD[DRAFTER]=$("$PYTHON" -m sglang_dflash.cli pairs path "$PAIR" --drafter good)
fi

COMMAND=(--speculative-algorithm DFLASH) ENVIRONMENT=() KNOBS=()
if [[ $PAIR_NAME != demo ]]; then COMMAND+=(--trust-remote-code); fi
# A knob is an environment variable whose default is the card's value. It sets a server flag or a variable in the
# server's environment; an empty one sets nothing.
while read -r knob flag meaning; do
    value=${!knob-${CARD[$knob]-}}
    KNOBS+=("$(printf '  %-26s %-32s %s' "$knob" "${CARD[$knob]:-(none)}" "$meaning")")
    printf -v "$knob" '%s' "$value"
    if [[ ! $value ]]; then continue; fi
    case $flag in
    --*) COMMAND+=("$flag" "$value") ;;
    *=) ENVIRONMENT+=("$flag$value") ;;
    esac
done <<TABLE
TARGET                  --model-path                        target: hub id or folder
DRAFTER                 --speculative-draft-model-path      drafter: hub id or folder
BLOCK_SIZE              $BLOCK_SIZE_FLAG                    tokens of a draft block
ATTENTION_BACKEND       --attention-backend                 the target's attention
DRAFT_ATTENTION_BACKEND --speculative-draft-attention-backend  the drafter's attention, if different
LINEAR_PREFILL_BACKEND  --linear-attn-prefill-backend       the recurrent layers' prefill
LINEAR_DECODE_BACKEND   --linear-attn-decode-backend        the recurrent layers' decode
DTYPE                   --dtype                             dtype; a CPU is fastest in float32
MEM_FRACTION            --mem-fraction-static               fraction of memory for weights, K/V and states
MAMBA_STRATEGY          --mamba-radix-cache-strategy        snapshots of recurrent states for the prefix cache
GRAPH_MAX_BS            --cuda-graph-max-bs-decode          largest batch with a CUDA graph
PREFILL_GRAPH           --cuda-graph-backend-prefill        CUDA graphs of prefill
ALLREDUCE_FUSION        --flashinfer-allreduce-fusion-backend  all-reduce fused with the norm after it
OVERLAP_PLAN_STREAM     SGLANG_ENABLE_OVERLAP_PLAN_STREAM=  prepare the next step on its own stream
TP                      --tp-size                           GPUs per replica
DP                      --dp-size                           replicas behind one address
CONTEXT_LENGTH          --context-length                    longest sequence in tokens
DRAFT_WINDOW            --speculative-draft-window-size     context tokens that full-attention drafter layers read
MAX_RUNNING             --max-running-requests              requests at once
LISTEN_HOST             --host                              address to listen on
LISTEN_PORT             --port                              port to listen on
TABLE

server=("$PYTHON" -m sglang.launch_server "${COMMAND[@]}" "${EXTRA[@]}")
case $ACTION in
help)
    printf '%s\n\n' "$ABOUT"
    usage
    printf '\nEnvironment variable         Default                          Meaning\n'
    printf '%s\n' "${KNOBS[@]}" "$(printf '  %-26s %-32s %s' PYTHON python 'interpreter that has SGLang')"
    ;;
print)
    printf '%q ' "${ENVIRONMENT[@]}" "${server[@]}" | sed 's/ *$//'
    echo
    ;;
check) "$PYTHON" -m sglang_dflash.cli check "$TARGET" "$DRAFTER" "${COMMAND[@]}" "${EXTRA[@]}" ;;
serve) exec env "${ENVIRONMENT[@]}" "${server[@]}" ;;
esac
