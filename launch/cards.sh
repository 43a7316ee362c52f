# shellcheck shell=bash disable=SC2034 # serve.sh and replicas.sh read what is set here
# The pairs of serve.sh with their cards' values, by variable without its prefix. What has no value is left to SGLang.

PAIRS=(qwen3.5-4b qwen3.5-27b qwen3.6-27b qwen3.6-35b-a3b qwen3-coder-next qwen3.8-27b demo)
declare -A CARD=([TP]=1 [PYTHON]=python)
CARD_GPU=B200 # the cards' figures are of this GPU, and so is their fraction of memory
ABOUT='' BLOCK_SIZE_FLAG=--speculative-num-draft-tokens

# card NAME: set CARD, ABOUT and BLOCK_SIZE_FLAG for a pair, named in any case or by its target's hub id; exit with 2
# and a sentence if there is no such pair.
card() {
    local name=${1##*/}
    PAIR_NAME=${name,,}
    case $PAIR_NAME in
    qwen3.5-4b)
        ABOUT='Qwen3.5-4B with the drafter by Z-Lab and Modal, as its card runs it on one B200.
On Hopper set SGLANG_DFLASH_ATTENTION_BACKEND=fa3 and SGLANG_DFLASH_DRAFT_ATTENTION_BACKEND=fa3.
For a single user set SGLANG_DFLASH_BLOCK_SIZE=16.'
        BLOCK_SIZE_FLAG=--speculative-dflash-block-size
        CARD+=([TARGET]=Qwen/Qwen3.5-4B [DRAFTER]=z-lab/Qwen3.5-4B-DFlash [BLOCK_SIZE]=8
            [ATTENTION_BACKEND]=trtllm_mha [DRAFT_ATTENTION_BACKEND]=fa4 [LINEAR_PREFILL_BACKEND]=flashinfer
            [LINEAR_DECODE_BACKEND]=flashinfer [MEM_FRACTION]=0.8 [MAMBA_STRATEGY]=extra_buffer [GRAPH_MAX_BS]=32
            [PREFILL_GRAPH]=breakable [ALLREDUCE_FUSION]=auto [OVERLAP_PLAN_STREAM]=1 [MAX_RUNNING]=32
            [LISTEN_HOST]=0.0.0.0 [LISTEN_PORT]=30000)
        ;;
    qwen3.5-27b) one_gpu_card Qwen3.5-27B ;;
    qwen3.6-27b) one_gpu_card Qwen3.6-27B ;;
    qwen3.6-35b-a3b) one_gpu_card Qwen3.6-35B-A3B ;;
    qwen3-coder-next) one_gpu_card Qwen3-Coder-Next ;;
    qwen3.8-27b)
        ABOUT="Qwen3.8-27B in NVFP4 with incoai's DFlash2, as SGLang's cookbook runs it on one DGX Spark and, with an RTX 5090, with the
flags that \`sglang-dflash check\` proposes for it. Hopper has no FP4 units: SGLANG_DFLASH_TARGET=Qwen/Qwen3.8-27B-FP8 is the faster target there."
        CARD_GPU=GB10
        CARD+=([TARGET]=RadixArk/Qwen3.8-27B-NVFP4 [DRAFTER]=incoai/Qwen3.8-27B-DFlash2 [BLOCK_SIZE]=8
            [ATTENTION_BACKEND]=flashinfer [KV_CACHE_DTYPE]=fp8_e4m3 [CHUNKED_PREFILL]=2048 [MEM_FRACTION]=0.8
            [MAMBA_STRATEGY]=extra_buffer [REASONING_PARSER]=qwen3 [TOOL_CALL_PARSER]=qwen3_coder)
        ;;
    demo)
        ABOUT='A pair that ships with the package (SGLANG_DFLASH_PAIR=tiny-hybrid or another), with or without a GPU. A request:
curl http://127.0.0.1:30000/v1/chat/completions -H "Content-Type: application/json" \
  -d '\''{"model": "m", "messages": [{"role": "user", "content": "Dan has 30 cards. Dan loses 6 of them. Dan loses 18 of them. How many cards does Dan have now?"}]}'\'
        CARD+=([PAIR]=tiny-hybrid [BLOCK_SIZE]=16 [DTYPE]=float32 [LISTEN_HOST]=127.0.0.1 [LISTEN_PORT]=30000)
        ;;
    *)
        if [[ $1 ]]; then echo "${0##*/}: there is no pair $1" >&2; else echo "${0##*/}: name a pair" >&2; fi
        echo "Fix: use one of ${PAIRS[*]}, or --help" >&2
        exit 2
        ;;
    esac
}

# value NAME: the value of SGLANG_DFLASH_NAME, the card's where it is not set.
value() {
    local variable=SGLANG_DFLASH_$1
    echo "${!variable-${CARD[$1]-}}"
}

# one_gpu_card MODEL: the four cards that differ only in the model.
one_gpu_card() {
    ABOUT="$1 with z-lab's drafter, as its card runs it on one GPU. Above a concurrency of 16 set SGLANG_DFLASH_BLOCK_SIZE=8.
The card's attention backend is for Hopper; on Blackwell set SGLANG_DFLASH_ATTENTION_BACKEND=trtllm_mha."
    CARD+=([TARGET]=Qwen/$1 [DRAFTER]=z-lab/$1-DFlash [BLOCK_SIZE]=16 [ATTENTION_BACKEND]=fa3 [MEM_FRACTION]=0.75
        [MAMBA_STRATEGY]=extra_buffer)
}
