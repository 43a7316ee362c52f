#!/usr/bin/env bash
# The smallest pair that ships with the package, on whatever this machine has, a CPU included.
# Ask it something: curl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \
#   -d '{"model": "m", "messages": [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]}'

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
knob PAIR tiny-hybrid 'a pair that sglang-dflash ships'
knob BLOCK_SIZE 16 'tokens of a draft block'
knob DTYPE float32 'dtype; a CPU is fastest in float32'
CARD_HOST=127.0.0.1 CARD_PORT=30000
common_knobs

TARGET=$("$PYTHON" -m sglang_dflash.cli pairs path "$PAIR")
DRAFTER=$("$PYTHON" -m sglang_dflash.cli pairs path "$PAIR" --drafter good)
flag --model-path "$TARGET"
flag --speculative-algorithm DFLASH
flag --speculative-draft-model-path "$DRAFTER"
flag --speculative-num-draft-tokens "$BLOCK_SIZE"
flag --dtype "$DTYPE"
common_flags

launch
