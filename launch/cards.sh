# shellcheck shell=bash disable=SC2034 # serve.sh and replicas.sh read what is set here
# The pairs of serve.sh with their cards' values. A knob without a value is left to SGLang.

PAIRS=(qwen3.5-4b qwen3.5-27b qwen3.6-27b qwen3.6-35b-a3b qwen3-coder-next demo)
declare -A CARD=([TP]=1)
ABOUT='' BLOCK_SIZE_FLAG=--speculative-num-draft-tokens

# card NAME: set CARD, ABOUT and BLOCK_SIZE_FLAG for a pair; fail if there is no such pair.
card() {
    case $1 in
    qwen3.5-4b)
        ABOUT='Qwen3.5-4B with the drafter by Z-Lab and Modal, as its card runs it on one B200.
On Hopper set ATTENTION_BACKEND=fa3 and DRAFT_ATTENTION_BACKEND=fa3. For a single user set BLOCK_SIZE=16.'
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
    demo)
        ABOUT='A pair that ships with the package (PAIR=tiny-hybrid or another), on any machine, with or without a GPU. Ask it something:
curl http://127.0.0.1:30000/v1/chat/completions -H "Content-Type: application/json" \
  -d '\''{"model": "m", "messages": [{"role": "user", "content": "Dan has 30 cards. Dan loses 6 of them. Dan loses 18 of them. How many cards does Dan have now?"}]}'\'
        CARD+=([PAIR]=tiny-hybrid [BLOCK_SIZE]=16 [DTYPE]=float32 [LISTEN_HOST]=127.0.0.1 [LISTEN_PORT]=30000)
        ;;
    *) return 1 ;;
    esac
}

# one_gpu_card MODEL: the four cards that differ only in the model.
one_gpu_card() {
    ABOUT="$1 with z-lab's drafter, as its card runs it on one GPU. Above a concurrency of 16 set BLOCK_SIZE=8.
The card's attention backend is for Hopper; on Blackwell set ATTENTION_BACKEND=trtllm_mha."
    CARD+=([TARGET]=Qwen/$1 [DRAFTER]=z-lab/$1-DFlash [BLOCK_SIZE]=16 [ATTENTION_BACKEND]=fa3 [MEM_FRACTION]=0.75
        [MAMBA_STRATEGY]=extra_buffer)
}
