"""The drafter model as SGLang loads and runs it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.models.utils import WeightsMapper
from sglang.srt.runtime_context import get_spec
from torch import Tensor, nn

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.tensors import PACKED, TARGET_TO_DRAFT, LoadReport, destination
from sglang_dflash.launch.plan import current
from sglang_dflash.model.attention import BlockNormRope, ContextProjection, DrafterAttention, QKNormRope, window_left
from sglang_dflash.model.dflash2 import BlockConvolution, CandidateSelector
from sglang_dflash.model.vocabulary import TargetVocabulary
from sglang_dflash.ops import Noise


@dataclass
class DraftOutput(LogitsProcessorOutput):
    """Result of a draft forward; a CUDA graph returns the padded batch in its own memory.

    Attributes:
        drafts: int64 [bs, w - 1].
        margins: float32 [bs, w - 1], each draft's score minus the second largest; None unless blocks are copied.
        broken: int64 [bs], positions whose hidden state is not finite.
    """

    drafts: Tensor | None = None
    margins: Tensor | None = None
    broken: Tensor | None = None


@dataclass(frozen=True)
class StagedContext:
    """Context tokens that the drafter's next forward injects, in memory that its CUDA graphs read.

    Attributes:
        hidden: [N, K * H], the target's hidden states.
        positions, slots: int64 [N]; slot 0, the write-only padding slot, for rows without a token.
    """

    hidden: Tensor
    positions: Tensor
    slots: Tensor
    pool: Any

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.positions, self.slots

    def __len__(self) -> int:
        return len(self.slots)


class StoredQuantisation:
    """SGLang's quantisation of a checkpoint's layers, except ``plain`` modules, which it stores unquantised.

    AWQ and GPTQ checkpoints quantise the transformer's layers only, and do not list the others.
    """

    def __init__(self, config: Any, plain: Collection[str]) -> None:
        self._config, self._plain = config, {destination(module)[0] for module in plain}

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return UnquantizedLinearMethod() if prefix in self._plain else self._config.get_quant_method(layer, prefix)


class DrafterLayer(nn.Module):
    # a separate residual fuses with the norms
    def __init__(self, config: DrafterConfig, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DrafterAttention(config, layer_id, quant_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen2MLP(
            config.hidden_size, config.intermediate_size, "silu", quant_config=quant_config, prefix=f"{prefix}.mlp"
        )
        self.attention_conv = self.mlp_conv = None
        if config.conv_taps:
            self.attention_conv = BlockConvolution(config, quant_config, f"{prefix}.attention_conv")
            self.mlp_conv = BlockConvolution(config, quant_config, f"{prefix}.mlp_conv")

    def forward(
        self, norm_rope: BlockNormRope, hidden: Tensor, residual: Tensor | None, forward_batch: Any, width: int
    ) -> tuple[Tensor, Tensor]:
        def attend(hidden: Tensor) -> Tensor:
            return self.self_attn(norm_rope, hidden, forward_batch)

        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = attend(hidden) if self.attention_conv is None else self.attention_conv(hidden, width, attend)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden) if self.mlp_conv is None else self.mlp_conv(hidden, width, self.mlp), residual


class DFlashDraftModel(nn.Module):
    # sharded over the ranks that share one batch
    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
    # SGLang reads lists of ignored layers with these
    packed_modules_mapping = PACKED
    hf_to_sglang_mapper = WeightsMapper(orig_to_new_prefix={"model.": ""})

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.drafter_config = parsed = current.worker.plan.drafter
        quant_config = quant_config and StoredQuantisation(quant_config, parsed.plain_modules)
        rotary = get_rope(
            parsed.head_dim,
            rotary_dim=parsed.rotary_dim,
            max_position=parsed.max_position_embeddings,
            base=parsed.rope_theta,
            rope_scaling=None if parsed.rope_scaling is None else dict(parsed.rope_scaling),
        )
        base = f"{prefix}." if prefix else ""
        layers = [DrafterLayer(parsed, i, quant_config, f"{base}layers.{i}") for i in range(parsed.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(parsed.hidden_size, eps=parsed.rms_norm_eps)
        captured = len(parsed.target_layer_ids) * parsed.hidden_size
        self.fc = ReplicatedLinear(
            captured, parsed.hidden_size, bias=False, quant_config=quant_config, prefix=f"{base}fc"
        )
        self.hidden_norm = RMSNorm(parsed.hidden_size, eps=parsed.rms_norm_eps)
        attentions = [layer.self_attn for layer in layers]
        self.qk_norm_rope = QKNormRope(
            [(attention.q_norm, attention.k_norm) for attention in attentions],
            attentions[0].num_heads,
            attentions[0].num_kv_heads,
            parsed.rms_norm_eps,
            rotary,
            # the target's context, a block after its end and, with overlap, a second one
            positions=config.context_len + 2 * get_spec().speculative_num_draft_tokens,
        )
        self._context_projection = ContextProjection(attentions, self.qk_norm_rope)
        if parsed.draft_vocab_size is not None:
            self.register_buffer(TARGET_TO_DRAFT, torch.zeros(parsed.vocab_size, dtype=torch.bool))
        self.candidate_selector = None
        if parsed.selector_rank:
            self.candidate_selector = CandidateSelector(parsed, quant_config, f"{base}candidate_selector")
        self.vocabulary: TargetVocabulary | None = None
        self.staged: StagedContext | None = None
        self.noise: Noise  # of a batch, in memory that the CUDA graphs read; set before a forward
        self._returns_margins = current.worker.plan.copies
        self._complete = False

    def set_vocabulary(self, vocabulary: TargetVocabulary) -> None:
        allowed_ids = getattr(self, TARGET_TO_DRAFT, None)
        self.vocabulary = vocabulary if allowed_ids is None else vocabulary.reduced(allowed_ids)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> DraftOutput:
        """Draft one block per request: anchor and mask tokens ``input_ids`` at ``positions``, int64 [bs * w].

        First inject ``bs * w`` rows of the staged context, if it has so many.
        """
        assert self.vocabulary is not None, "set_vocabulary() before drafting"
        if self.staged is not None and len(input_ids) <= len(self.staged):
            self.inject_staged(len(input_ids))
        hidden, residual = self.vocabulary.embed(input_ids), None
        norm_rope, width = self.qk_norm_rope.block(positions), forward_batch.spec_info.draft_token_num
        for layer in self.layers:
            hidden, residual = layer(norm_rope, hidden, residual, forward_batch, width)
        hidden, _ = self.norm(hidden, residual)
        masks, anchors = hidden.unflatten(0, (-1, width))[:, 1:], input_ids.view(-1, width)[:, 0]
        noise = Noise(*(each[: len(anchors)] for each in self.noise))
        head = self.candidate_selector or TargetVocabulary.likeliest
        drafts, margins = head(self.vocabulary, anchors, masks, positions.view(-1, width)[:, 0], noise)
        return DraftOutput(
            next_token_logits=None,
            drafts=drafts,
            margins=margins if self._returns_margins else None,
            # the sum over a NaN or an infinity is not finite
            broken=(~masks.sum(-1).isfinite()).sum(-1),
        )

    @torch.no_grad()
    def context_kv(self, target_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of context tokens, each [L, T, kv_heads of this rank, head_dim].

        ``target_hidden`` [T, K * H] holds the captured layers.
        """
        context, _ = self.fc(target_hidden.to(self.norm.weight.dtype))
        return self._context_projection(self.hidden_norm(context), positions)

    @torch.no_grad()
    def write_context(self, pool: Any, target_hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write K and V of context tokens to ``slots``, int64 [T], of the K/V pool."""
        keys, values = self.context_kv(target_hidden, positions)
        where = KVWriteLoc(slots, physical=True)
        for attention, k, v in zip(self._context_projection.attentions, keys, values, strict=True):
            layer = attention.attn  # identifies the layer in the pool
            pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)

    def inject_staged(self, rows: int) -> None:
        """Write the first ``rows`` staged tokens to their slots, and clear the slots."""
        assert self.staged is not None
        slots = self.staged.slots[:rows]
        self.write_context(self.staged.pool, self.staged.hidden[:rows], self.staged.positions[:rows], slots)
        slots.zero_()

    def get_attention_sliding_window_size(self) -> int | None:
        # SGLang's attention backends call this
        return None if self.drafter_config.sliding_window is None else window_left(self.drafter_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a checkpoint; later calls (weight updates) may omit tensors. Errors as in :meth:`LoadReport.check`."""
        params: dict[str, Tensor] = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        report = LoadReport(self.drafter_config, params)
        for name, shard, tensor in report.place(weights):
            loader = getattr(params[name], "weight_loader", default_weight_loader)
            try:
                loader(params[name], tensor, *(() if shard is None else (shard,)))
            except (AssertionError, RuntimeError, ValueError) as error:  # raised by the loaders of quantised layers
                part = name if shard is None else f"{name} ({shard})"
                report.misshaped.append(
                    f"{part} is {list(tensor.shape)}, of {list(params[name].shape)} {error}".strip()
                )
        report.check(complete=not self._complete)
        self._complete = True
