#!/usr/bin/env bash
# Serve a published pair: with its card's flags on the card's GPU, elsewhere with SGLang's defaults and the flags that
# `sglang-dflash check` proposes. Flags of the server come last and replace the script's.

set -euo pipefail
PAIRS='qwen3.5-4b qwen3.5-27b qwen3.6-27b qwen3.6-35b-a3b qwen3-coder-next qwen3.8-27b'

usage() {
    cat <<TEXT
launch/serve.sh PAIR [--dry-run] [--gpu NAME] [flags of the server]

PAIR is one of: $PAIRS
  --dry-run    print the verdict and the command, and stop
  --gpu NAME   the same for this GPU: rtx5090, h100, h200, b200 and others of \`sglang-dflash check --help\`

A pair or flag that \`sglang-dflash check\` refuses does not start.
Example: launch/serve.sh qwen3.5-27b --speculative-num-draft-tokens 8 --port 8000
TEXT
}

fail() {
    printf 'serve.sh: %s\nFix: %s\n' "$1" "$2" >&2
    exit 2
}

case ${1-} in
'') fail 'no pair is named' "name one of $PAIRS" ;;
--help | -h)
    usage
    exit
    ;;
esac
pair=${1##*/} gpu='' dry_run='' extra=()
pair=${pair,,}
shift
while (($#)); do
    case $1 in
    --dry-run) dry_run=1 ;;
    --gpu)
        gpu=${2-} dry_run=1
        [[ $gpu ]] || fail '--gpu has no value' 'name a GPU, such as --gpu h200'
        shift
        ;;
    *) extra+=("$1") ;;
    esac
    shift
done

on=${gpu:-$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 || true)} flags=()
case $pair in
qwen3.5-4b)
    target=Qwen/Qwen3.5-4B flags=(--speculative-num-draft-tokens 8 --max-running-requests 32)
    if [[ ${on,,} == *b200 ]]; then
        flags+=(--attention-backend trtllm_mha --speculative-draft-attention-backend fa4
            --linear-attn-prefill-backend flashinfer --linear-attn-decode-backend flashinfer
            --cuda-graph-max-bs-decode 32 --cuda-graph-backend-prefill breakable --mem-fraction-static 0.8)
    fi
    ;;
qwen3.5-27b) target=Qwen/Qwen3.5-27B ;;
qwen3.6-27b) target=Qwen/Qwen3.6-27B ;;
qwen3.6-35b-a3b) target=Qwen/Qwen3.6-35B-A3B ;;
qwen3-coder-next) target=Qwen/Qwen3-Coder-Next ;;
qwen3.8-27b) # by SGLang's cookbook; Hopper has no FP4 units: --model-path Qwen/Qwen3.8-27B-FP8 is faster there
    target=RadixArk/Qwen3.8-27B-NVFP4
    if [[ ${on,,} == *gb10 || ${on,,} == *spark ]]; then
        flags=(--attention-backend flashinfer --kv-cache-dtype fp8_e4m3 --chunked-prefill-size 2048 --mem-fraction-static 0.8)
    fi
    ;;
*) fail "there is no pair $pair" "name one of $PAIRS" ;;
esac
if [[ ${on,,} == *b200 && ! ${flags[*]} ]]; then flags=(--mem-fraction-static 0.75); fi

report=$(python -m sglang_dflash.check.cli check "$target" auto ${gpu:+--gpu "$gpu"} "${flags[@]}" "${extra[@]}") || true
printf '%s\n' "$report" >&2
command=$(sed -n 's/^Start: //p' <<<"$report")
[[ $command ]] || exit 2
if [[ $dry_run ]]; then
    printf '%s\n' "$command"
else
    eval "exec $command"
fi
