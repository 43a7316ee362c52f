#!/usr/bin/env bash
# Two servers of one pair, one GPU each, behind SGLang's router: launch/replicas.sh PAIR [options of serve.sh]
# The router (pip install sglang-router) sends a request to the replica that has its prefix cached.

set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/cards.sh"

CARD+=([ROUTER_PORT]=30000 [FIRST_PORT]=30001 [FIRST_GPUS]=0 [SECOND_GPUS]=1 [POLICY]=cache_aware)
ROUTER_PORT=$(value ROUTER_PORT) FIRST_PORT=$(value FIRST_PORT) POLICY=$(value POLICY) PYTHON=$(value PYTHON)
FIRST_GPUS=$(value FIRST_GPUS) SECOND_GPUS=$(value SECOND_GPUS)

usage() {
    cat <<TEXT
Two servers of one pair, one GPU each, behind SGLang's router: launch/replicas.sh PAIR [options of serve.sh]
PAIR is one of: ${PAIRS[*]}

  --dry-run     print the three commands and stop
  --check       run the preflight with the replicas' flags and stop

Environment variables, in addition to those of serve.sh:
  SGLANG_DFLASH_ROUTER_PORT   port of the router [$ROUTER_PORT]
  SGLANG_DFLASH_FIRST_PORT    port of the first replica; the second has the next one [$FIRST_PORT]
  SGLANG_DFLASH_FIRST_GPUS    CUDA_VISIBLE_DEVICES of the first replica [$FIRST_GPUS]
  SGLANG_DFLASH_SECOND_GPUS   CUDA_VISIBLE_DEVICES of the second [$SECOND_GPUS]
  SGLANG_DFLASH_POLICY        the router's policy [$POLICY]
  SGLANG_DFLASH_PYTHON        interpreter that has SGLang and its router [$PYTHON]

Example: SGLANG_DFLASH_ROUTER_PORT=8000 launch/replicas.sh qwen3.5-27b --enable-metrics
TEXT
}

if [[ ${1-} != @(--help|-h) ]]; then card "${1-}"; fi
DRY_RUN='' arguments=()
for word; do
    case $word in
    --help | -h)
        usage
        exit
        ;;
    --check) exec "$here/serve.sh" "$@" ;;
    --dry-run) DRY_RUN=1 ;;
    *) arguments+=("$word") ;;
    esac
done

second_port=$((FIRST_PORT + 1))
router=("$PYTHON" -m sglang_router.launch_router --port "$ROUTER_PORT" --policy "$POLICY"
    --worker-urls "http://127.0.0.1:$FIRST_PORT" "http://127.0.0.1:$second_port")

# replica GPUS PORT: replace the (sub)shell with one server, so that signals reach it.
replica() {
    exec env CUDA_VISIBLE_DEVICES="$1" SGLANG_DFLASH_LISTEN_HOST=127.0.0.1 SGLANG_DFLASH_LISTEN_PORT="$2" \
        "$here/serve.sh" "${arguments[0]}" ${DRY_RUN:+--dry-run} "${arguments[@]:1}"
}

if [[ $DRY_RUN ]]; then
    echo "CUDA_VISIBLE_DEVICES=$FIRST_GPUS $(replica "$FIRST_GPUS" "$FIRST_PORT")"
    echo "CUDA_VISIBLE_DEVICES=$SECOND_GPUS $(replica "$SECOND_GPUS" "$second_port")"
    printf '%q ' "${router[@]}" | sed 's/ *$//'
    echo
    exit
fi
"$PYTHON" -c 'import sglang_router' || {
    echo "replicas.sh: SGLang's router is not installed. Fix: pip install sglang-router" >&2
    exit 1
}
# When one of the three ends, or this script gets a signal, stop all of them.
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
replica "$FIRST_GPUS" "$FIRST_PORT" &
replica "$SECOND_GPUS" "$second_port" &
"${router[@]}" &
wait -n
