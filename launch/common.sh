# shellcheck shell=bash
# Sourced by the launch scripts: their options, their knobs, and the command that comes out.

DRY_RUN='' CHECK='' HELP='' LONG_CONTEXT='' MULTI_GPU=''
EXTRA=() COMMAND=() ENVIRONMENT=() KNOBS=()

# options "$@": read the scripts' own options; whatever else is given goes to the server.
options() {
    while (($#)); do
        case $1 in
        --help | -h) HELP=1 ;;
        --dry-run) DRY_RUN=1 ;;
        --check) CHECK=1 ;;
        --long-context) LONG_CONTEXT=1 ;;
        --multi-gpu) MULTI_GPU=1 ;;
        --)
            shift
            EXTRA+=("$@")
            return
            ;;
        *) EXTRA+=("$1") ;;
        esac
        shift
    done
}

# knob NAME DEFAULT MEANING: an environment variable with the card's value as its default.
knob() {
    KNOBS+=("$(printf '  %-26s %-32s %s' "$1" "${2:-(none)}" "$3")")
    printf -v "$1" '%s' "${!1-$2}"
}

# The knobs that every pair has; a script sets its card's values first.
common_knobs() {
    knob TP "$([[ $MULTI_GPU ]] && echo 2 || echo 1)" 'GPUs that share each model'
    knob DP '' 'replicas behind one address'
    knob CONTEXT_LENGTH '' 'longest sequence, tokens'
    knob DRAFT_WINDOW "$([[ $LONG_CONTEXT ]] && echo 4096 || true)" 'context tokens that full drafter layers read'
    knob MAX_RUNNING "${CARD_MAX_RUNNING-}" 'requests at once'
    knob LISTEN_HOST "${CARD_HOST-}" 'address to listen on'
    knob LISTEN_PORT "${CARD_PORT-}" 'port to listen on'
    knob PYTHON python 'interpreter that has SGLang'
}

# flag NAME VALUE: add a server flag, unless its value is empty.
flag() {
    if [[ $2 ]]; then COMMAND+=("$1" "$2"); fi
}

# variable NAME VALUE: export for the server, unless empty.
variable() {
    if [[ $2 ]]; then ENVIRONMENT+=("$1=$2"); fi
}

common_flags() {
    flag --tp-size "$TP"
    flag --dp-size "$DP"
    flag --context-length "$CONTEXT_LENGTH"
    flag --speculative-draft-window-size "$DRAFT_WINDOW"
    flag --max-running-requests "$MAX_RUNNING"
    flag --host "$LISTEN_HOST"
    flag --port "$LISTEN_PORT"
}

usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    cat <<'TEXT'

Options:
  --dry-run        print the command and stop
  --check          run the preflight (sglang-dflash check) with these flags and stop
  --long-context   bound what full-attention drafter layers read (DRAFT_WINDOW)
  --multi-gpu      share the models between GPUs (TP)
  anything else    is passed to the server

Environment variable       Default                          Meaning
TEXT
    printf '%s\n' "${KNOBS[@]}"
}

# launch: what the options asked for: help, the command's text, the preflight, or the server.
launch() {
    local server=("$PYTHON" -m sglang.launch_server "${COMMAND[@]}" "${EXTRA[@]}")
    if [[ $HELP ]]; then
        usage
    elif [[ $DRY_RUN ]]; then
        printf '%q ' "${ENVIRONMENT[@]}" "${server[@]}" | sed 's/ *$//'
        echo
    elif [[ $CHECK ]]; then
        "$PYTHON" -m sglang_dflash.cli check "$TARGET" "$DRAFTER" "${COMMAND[@]}" "${EXTRA[@]}"
    else
        exec env "${ENVIRONMENT[@]}" "${server[@]}"
    fi
}
