#!/usr/bin/env bash
# Two servers of one pair, one GPU each, behind SGLang's router: launch/replicas.sh qwen3.5-4b.sh
# The router (pip install sglang-router) sends a request to the replica that has its prefix cached.

set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/common.sh"

options "$@"
SCRIPT=${EXTRA[0]-}
knob ROUTER_PORT 30000 'port of the router'
knob FIRST_PORT 30001 'port of the first replica; the second has the next one'
knob FIRST_GPUS 0 'CUDA_VISIBLE_DEVICES of the first replica'
knob SECOND_GPUS 1 'CUDA_VISIBLE_DEVICES of the second'
knob POLICY cache_aware "the router's policy"
knob PYTHON python 'interpreter that has SGLang and its router'

if [[ $HELP ]]; then
    usage
    exit
fi
if [[ ! -x $here/$SCRIPT || ! $SCRIPT ]]; then
    echo "replicas.sh: '$SCRIPT' is not a launch script; name one: $(cd "$here" && echo qwen*.sh demo.sh)" >&2
    exit 2
fi

second_port=$((FIRST_PORT + 1))
arguments=("${EXTRA[@]:1}")
router=("$PYTHON" -m sglang_router.launch_router --port "$ROUTER_PORT" --policy "$POLICY"
    --worker-urls "http://127.0.0.1:$FIRST_PORT" "http://127.0.0.1:$second_port")

# replica GPUS PORT: one server, by the pair's own script, in place of the (sub)shell, so that a signal reaches it.
replica() {
    exec env CUDA_VISIBLE_DEVICES="$1" LISTEN_HOST=127.0.0.1 LISTEN_PORT="$2" PYTHON="$PYTHON" \
        "$here/$SCRIPT" ${DRY_RUN:+--dry-run} "${arguments[@]}"
}

if [[ $DRY_RUN ]]; then
    echo "CUDA_VISIBLE_DEVICES=$FIRST_GPUS $(replica "$FIRST_GPUS" "$FIRST_PORT")"
    echo "CUDA_VISIBLE_DEVICES=$SECOND_GPUS $(replica "$SECOND_GPUS" "$second_port")"
    printf '%q ' "${router[@]}" | sed 's/ *$//'
    echo
    exit
fi
"$PYTHON" -c 'import sglang_router' || {
    echo 'replicas.sh: sglang_router is not installed; pip install sglang-router' >&2
    exit 1
}
# Whichever of the three ends, or a signal to this script, ends all of them.
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
replica "$FIRST_GPUS" "$FIRST_PORT" &
replica "$SECOND_GPUS" "$second_port" &
"${router[@]}" &
wait -n
