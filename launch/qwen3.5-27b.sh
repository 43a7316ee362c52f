#!/usr/bin/env bash
# Qwen3.5-27B with z-lab's drafter, as its card runs it on one GPU.
# The card's attention backend is for Hopper; on Blackwell set ATTENTION_BACKEND=trtllm_mha.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
knob TARGET Qwen/Qwen3.5-27B 'target: hub id or folder'
knob DRAFTER z-lab/Qwen3.5-27B-DFlash 'drafter: hub id or folder'
knob BLOCK_SIZE 16 'tokens of a draft block; 8 above a concurrency of 16'
knob ATTENTION_BACKEND fa3 "the target's attention"
knob DRAFT_ATTENTION_BACKEND '' "the drafter's attention, where it differs"
knob MEM_FRACTION 0.75 'part of the memory for weights, K/V and states'
knob MAMBA_STRATEGY extra_buffer 'snapshots of recurrent states for the prefix cache'
common_knobs

flag --model-path "$TARGET"
flag --speculative-algorithm DFLASH
flag --speculative-draft-model-path "$DRAFTER"
flag --speculative-num-draft-tokens "$BLOCK_SIZE"
flag --attention-backend "$ATTENTION_BACKEND"
flag --speculative-draft-attention-backend "$DRAFT_ATTENTION_BACKEND"
flag --mem-fraction-static "$MEM_FRACTION"
flag --mamba-radix-cache-strategy "$MAMBA_STRATEGY"
COMMAND+=(--trust-remote-code)
common_flags

launch
