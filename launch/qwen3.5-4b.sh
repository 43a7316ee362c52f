#!/usr/bin/env bash
# Qwen3.5-4B with the drafter of Z-Lab and Modal, as its card runs it on one B200.
# On Hopper set ATTENTION_BACKEND=fa3 and DRAFT_ATTENTION_BACKEND=fa3.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

options "$@"
knob TARGET Qwen/Qwen3.5-4B 'target: hub id or folder'
knob DRAFTER z-lab/Qwen3.5-4B-DFlash 'drafter: hub id or folder'
knob BLOCK_SIZE 8 'tokens of a draft block; 16 for a single user'
knob ATTENTION_BACKEND trtllm_mha "the target's attention"
knob DRAFT_ATTENTION_BACKEND fa4 "the drafter's attention"
knob LINEAR_PREFILL_BACKEND flashinfer "the recurrent layers' prefill"
knob LINEAR_DECODE_BACKEND flashinfer "the recurrent layers' decode"
knob MEM_FRACTION 0.8 'part of the memory for weights, K/V and states'
knob MAMBA_STRATEGY extra_buffer 'snapshots of recurrent states for the prefix cache'
knob GRAPH_MAX_BS 32 'largest batch with a CUDA graph'
knob PREFILL_GRAPH breakable 'CUDA graphs of prefill'
knob OVERLAP_PLAN_STREAM 1 'prepare the next step on a stream of its own'
CARD_MAX_RUNNING=32 CARD_HOST=0.0.0.0 CARD_PORT=30000
common_knobs

variable SGLANG_ENABLE_OVERLAP_PLAN_STREAM "$OVERLAP_PLAN_STREAM"
flag --model-path "$TARGET"
COMMAND+=(--trust-remote-code)
flag --speculative-algorithm DFLASH
flag --speculative-draft-model-path "$DRAFTER"
flag --speculative-dflash-block-size "$BLOCK_SIZE"
flag --speculative-draft-attention-backend "$DRAFT_ATTENTION_BACKEND"
flag --attention-backend "$ATTENTION_BACKEND"
flag --linear-attn-prefill-backend "$LINEAR_PREFILL_BACKEND"
flag --linear-attn-decode-backend "$LINEAR_DECODE_BACKEND"
flag --mamba-radix-cache-strategy "$MAMBA_STRATEGY"
flag --cuda-graph-max-bs-decode "$GRAPH_MAX_BS"
flag --cuda-graph-backend-prefill "$PREFILL_GRAPH"
flag --flashinfer-allreduce-fusion-backend auto
flag --mem-fraction-static "$MEM_FRACTION"
common_flags

launch
