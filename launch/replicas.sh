#!/usr/bin/env bash
# Two servers of one pair, one GPU each, behind SGLang's router: launch/replicas.sh PAIR [options of serve.sh]
# The router (pip install sglang-router) sends a request to the replica that has its prefix cached.

set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
source "$here/cards.sh"

ROUTER_PORT=${ROUTER_PORT-30000} FIRST_PORT=${FIRST_PORT-30001} FIRST_GPUS=${FIRST_GPUS-0} SECOND_GPUS=${SECOND_GPUS-1}
POLICY=${POLICY-cache_aware} PYTHON=${PYTHON-python}

usage() {
    cat <<TEXT
Two servers of one pair, one GPU each, behind SGLang's router: launch/replicas.sh PAIR [options of serve.sh]
PAIR is one of: ${PAIRS[*]}

  --dry-run     print the three commands and stop
  --check       run the preflight with the replicas' flags and stop

Environment variables, besides those of serve.sh:
  ROUTER_PORT   port of the router [$ROUTER_PORT]
  FIRST_PORT    port of the first replica; the second has the next one [$FIRST_PORT]
  FIRST_GPUS    CUDA_VISIBLE_DEVICES of the first replica [$FIRST_GPUS]
  SECOND_GPUS   CUDA_VISIBLE_DEVICES of the second [$SECOND_GPUS]
  POLICY        the router's policy [$POLICY]
  PYTHON        interpreter that has SGLang and its router [$PYTHON]
TEXT
}

if [[ ${1-} != @(--help|-h) ]] && ! card "${1-}"; then
    usage >&2
    exit 2
fi
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
    exec env CUDA_VISIBLE_DEVICES="$1" LISTEN_HOST=127.0.0.1 LISTEN_PORT="$2" PYTHON="$PYTHON" \
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
    echo 'replicas.sh: sglang_router is not installed; pip install sglang-router' >&2
    exit 1
}
# When one of the three ends, or this script gets a signal, stop all of them.
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
replica "$FIRST_GPUS" "$FIRST_PORT" &
replica "$SECOND_GPUS" "$second_port" &
"${router[@]}" &
wait -n
