"""Exact mode launches its kernels with plain decoding's specialisation, at any batch, width, padding and rank.

Triton compiles by the divisibility of addresses and integers by 16, by integers that are 1 and by constants. Another
compilation may order a sum differently: a row that begins 8 bytes off changes the state's bits. Launches are recorded
by key, on tensors without storage, and nothing is compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.attention import triton_gdn_fused_proj as projections
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.fla import layernorm_gated
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor
from triton.runtime.jit import JITFunction

from sglang_dflash.features.exact import rows as exact
from sglang_dflash.features.exact import stepped
from sglang_dflash.states.reference import Records
from tests.ops.launches import Launch, compiled_for, tensor
from tests.support.configs import serve
from tests.support.gdn_replay import NAMES, served_block

pytestmark = pytest.mark.sglang

BF16, FP32, INT32, K, SLOTS, LAYERS = torch.bfloat16, torch.float32, torch.int32, 128, 64, 2
# Key and value heads of a rank: 4B, 35B-A3B and Coder-Next; the 27Bs, where a rank of 8 has rows of 8 mod 16 bytes.
HEADS = [(16 // tp, heads // tp) for heads, ranks in ((32, (1, 16)), (48, (1, 2, 4, 8, 16))) for tp in ranks]
RANKS = [(*heads, dtype) for heads, dtype in zip(HEADS, itertools.cycle((torch.float32, torch.bfloat16)), strict=False)]
BATCHES, WIDTHS = (1, 3, 48), (2, 5, 16)
Key = tuple[Any, ...]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Launches with the compilation that each would have: ``hash``, and ``runtime`` without constants."""

    def specialised(
        self: Any, key: str, signature: dict[str, str], device: Any, constants: Any, options: Any, attrs: Any, _: bool
    ) -> Any:
        names = list(signature)
        divisible = {names[index] for (index, *_), found in attrs.items() if found}
        types = tuple((name, kind, name in divisible) for name, kind in signature.items() if kind != "constexpr")
        return SimpleNamespace(hash=(self.fn.__name__, key), runtime=(self.fn.__name__, *types))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", specialised)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        with compiled_for(90) as launches:
            yield launches


def keys(launches: list[Launch], *, constants: bool = True) -> set[Key]:
    return {launch.compiled.hash if constants else launch.compiled.runtime for launch in launches}


def gates(HV: int) -> tuple[Tensor, Tensor]:
    return tensor(HV, dtype=FP32), tensor(HV, dtype=BF16)


def decode(bs: int, H: int, HV: int, state: torch.dtype) -> Tensor:
    """As SGLang's backend: the convolution's outputs, one layer of the pool, one slot per request."""
    dim = 2 * H * K + HV * K
    slots, windows = tensor(bs, dtype=INT32), tensor(SLOTS, dim, 3, dtype=BF16)
    mixed, _, b, a = projections.fused_qkvzba_causal_conv1d_update_contiguous(
        tensor(bs, dim + HV * K, dtype=BF16), tensor(bs, 2 * HV, dtype=BF16), windows, tensor(dim, 4, dtype=BF16), None,
        slots, qkv_dim=dim, v_dim=HV * K, num_v_heads=HV, head_v_dim=K, activation="silu",
    )  # fmt: skip
    out = mixed.new_empty(bs, 1, HV, K)
    pool = tensor(LAYERS, SLOTS, HV, K, K, dtype=state)[1]
    stepped.fused_recurrent_gated_delta_rule_packed_decode(mixed, a, b, *gates(HV), K**-0.5, pool, out, slots, True)
    return out.transpose(0, 1)


def verify(bs: int, width: int, H: int, HV: int, state: torch.dtype, skipped: int) -> Tensor:
    """With rows of a longer projection that begin ``skipped`` numbers off, as no kernel may receive them."""
    sizes = [H * K, H * K, HV * K, HV, HV]
    rows = tensor(bs * width, sum(sizes) + skipped, dtype=BF16)[:, skipped:]
    q, k, v, a, b = rows.split(sizes, -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, K))
    pool, slots = tensor(LAYERS, SLOTS, HV, K, K, dtype=state)[1], tensor(bs, dtype=INT32, skipped=skipped)
    cache = SimpleNamespace(intermediate_ssm=None if skipped else tensor(bs, width, HV, K, K, dtype=state))
    vars(cache).update((f"replayssm_{name}", part[0]) for name, part in zip(NAMES, records_of(H, HV), strict=True))
    inputs = (q, k, v, a, b, *gates(HV), pool, slots)
    return stepped.step_verify(inputs, cache, *served_block(width, tensor(bs), tensor(bs)))


def records_of(H: int, HV: int) -> Records:
    rings = ((HV, 32, K, BF16), (H, 32, K, BF16), (HV, 32, FP32), (HV, 32, K, BF16), (H, 32, K, BF16))
    return Records(*(tensor(LAYERS, 49, *shape, dtype=dtype) for *shape, dtype in rings))  # type: ignore[misc]


def commit(bs: int, width: int, H: int, HV: int, state: torch.dtype, tracked: bool) -> None:
    slots, counts = tensor(bs, dtype=INT32), tensor(bs, dtype=INT32)
    targets = [(slots, counts), (tensor(bs), counts)] if tracked else [(slots, counts)]
    pool = tensor(LAYERS, SLOTS, HV, K, K, dtype=state)
    stepped.step_commit(pool, records_of(H, HV), [gates(HV)] * LAYERS, tensor(bs), slots, targets, width)


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    eligible = "can_use_fused_qkvzba_causal_conv1d_update_contiguous"
    monkeypatch.setattr(projections, eligible, lambda *_, **__: (True, ""))


def of_decoding(H: int, HV: int, state: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[Key, Key]:
    """Plain decoding's one specialisation, with and without constants."""
    with recorded(monkeypatch) as launches:
        for bs in BATCHES:
            decode(bs, H, HV, state)
    rules = [launch for launch in launches if "packed_decode" in launch.kernel]
    [whole], [runtime] = keys(rules), keys(rules, constants=False)
    return whole, runtime


@pytest.mark.parametrize(("H", "HV", "state"), RANKS)
def test_a_verify_launches_plain_decodings_kernel(
    H: int, HV: int, state: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = of_decoding(H, HV, state, monkeypatch)
    with recorded(monkeypatch) as launches:
        for bs, width, skipped in itertools.product(BATCHES, WIDTHS, (0, 1)):
            verify(bs, width, H, HV, state, skipped)
    assert keys(launches) == {expected}


@pytest.mark.parametrize("scratch", [1, stepped.SCRATCH_BYTES], ids=["by layer", "at once"])
@pytest.mark.parametrize(("H", "HV", "state"), RANKS)
def test_a_commit_specialises_on_the_same_alignment(
    H: int, HV: int, state: torch.dtype, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepped, "SCRATCH_BYTES", scratch)
    _, expected = of_decoding(H, HV, state, monkeypatch)
    with recorded(monkeypatch) as launches:
        for bs, width, tracked in itertools.product(BATCHES, WIDTHS, (False, True)):
            commit(bs, width, H, HV, state, tracked)
    assert keys(launches, constants=False) == {expected}


def in_place(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The fault of views: rows of a position begin where those of the one before end, and keep their gaps."""
    return x.to(dtype)


def off_by_8_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(len(x), x[0].numel() + 16, dtype=dtype)[:, 4:-12].unflatten(1, x.shape[1:]).copy_(x)


@pytest.mark.parametrize("planted", [in_place, off_by_8_bytes])
@pytest.mark.parametrize("step", [verify, commit])
def test_a_misaligned_row_ends_the_step_because_it_would_launch_another_kernel(
    step: Callable[..., Any], planted: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepped, "by_position", planted)
    monkeypatch.setattr(stepped, "SCRATCH_BYTES", 1)
    with recorded(monkeypatch), pytest.raises(AssertionError):
        step(3, 5, 2, 6, FP32, False)
    _, expected = of_decoding(2, 6, FP32, monkeypatch)
    with recorded(monkeypatch) as launches, monkeypatch.context() as unchecked:
        unchecked.setattr(stepped, "ALIGNMENT", 1)
        unchecked.setattr(stepped, "by_position", off_by_8_bytes)
        step(3, 5, 2, 6, FP32, False)
    assert keys(launches, constants=False) - {expected}


# Heads and KV heads of a rank, head size: 4B, 27B and 35B-A3B (grouped), one KV head per head, dense pairs.
ATTENTION = [(16, 4, 256), (24, 4, 256), (16, 2, 256), (6, 1, 256), (4, 4, 128), (32, 8, 128)]
TOKENS, CONTEXT = max(BATCHES) * max(WIDTHS), 4096


def backend_of(heads: int, kv_heads: int, dim: int) -> Any:
    """SGLang's Triton backend of a deterministic server, after ``exact.widen``."""
    backend: Any = TritonAttnBackend.__new__(TritonAttnBackend)
    pool = {name: lambda _: tensor(SLOTS, kv_heads, dim, dtype=BF16) for name in ("get_key_buffer", "get_value_buffer")}
    vars(backend).update(
        is_draft_runner=False, dllm_attention=None, dcp_size=1, sliding_window_size=None, swa_v_head_dim=None,
        use_sliding_window_kv_pool=False, device="cuda", enable_deterministic=True, split_tile_size=256, num_head=heads,
        num_kv_head=kv_heads, v_head_dim=dim, max_context_len=CONTEXT, max_kv_splits=CONTEXT // 256, use_mla=False,
        use_pdl=True, page_size=1, lean_total_programs=132, lean_block_m=16, decode_attention_fwd=decode_attention_fwd,
        kv_index_translator=SimpleNamespace(pack_read_stream=lambda *_, **__: None), skip_prefill=True,
        token_to_kv_pool=SimpleNamespace(**pool), kv_indptr=tensor(TOKENS + 1, dtype=INT32), num_draft_tokens=None,
        target_verify_num_tokens_per_req=None, topk=1, static_kv_splits=False, device_core_count=132,
        window_kv_indptr=None,
    )  # fmt: skip
    return backend


def attention(
    backend: Any, bs: int, width: int, heads: int, kv_heads: int, dim: int, graphs: bool, gap: int, skipped: int = 0
) -> None:
    """One layer of a decode (width 1) or of an exact verify, whose queries may be part of a wider projection."""
    verifies, rows = width > 1, bs * width
    mode = ForwardMode.TARGET_VERIFY if verifies else ForwardMode.DECODE
    spec = SimpleNamespace(draft_token_num=width) if verifies else None
    batch = SimpleNamespace(
        batch_size=bs, forward_mode=mode, spec_info=spec, seq_lens=tensor(bs), req_pool_indices=tensor(bs),
        seq_lens_sum=None, kv_loc_plan=None,
    )  # fmt: skip
    if graphs:
        backend.forward_metadata = backend._build_cuda_graph_forward_metadata(rows, ForwardMode.DECODE, None)
    else:
        backend._target_verify_num_tokens_per_req = lambda _: width
        exact.prepare(TritonAttnBackend.init_forward_metadata, backend, batch)
    layer = SimpleNamespace(
        tp_q_head_num=heads, tp_k_head_num=kv_heads, qk_head_dim=dim, v_head_dim=dim, logit_cap=0.0, k_scale=None,
        logit_capping_method="tanh", sliding_window_size=None, layer_id=1, scaling=dim**-0.5, xai_temperature_len=-1,
    )  # fmt: skip
    q = tensor(rows, heads * dim + gap + skipped, dtype=BF16)[:, skipped : skipped + heads * dim]
    if verifies:
        exact.attend(TritonAttnBackend.forward_extend, backend, q, None, None, layer, batch, save_kv_cache=False)
    else:
        backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), ATTENTION)
def test_rows_of_a_block_launch_plain_decodings_attention(
    heads: int, kv_heads: int, dim: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, exact=True, block=max(WIDTHS))
    of_width: dict[int, set[Key]] = {}
    with recorded(monkeypatch) as launches:
        backend = backend_of(heads, kv_heads, dim)
        if graphs:
            monkeypatch.setattr("sglang.srt.layers.attention.triton_backend.maybe_create_verify_mask", lambda **_: None)
            backend.init_cuda_graph_state(max(BATCHES), TOKENS)
        for width in (1, *WIDTHS):
            for bs, gap in itertools.product(BATCHES, (0, 2 * kv_heads * dim)):
                attention(backend, bs, width, heads, kv_heads, dim, graphs, gap)
            of_width[width] = keys(launches)
            launches.clear()
        with pytest.raises(AssertionError, match="another compilation"):  # planted
            attention(backend, 1, 2, heads, kv_heads, dim, graphs, 4, skipped=4)
        attention(backend, 1, 1, heads, kv_heads, dim, graphs, 4, skipped=4)
        assert not keys(launches) <= of_width[1]
    assert len(of_width[1]) == 2, "both stages, each with one specialisation"
    assert set(map(frozenset, of_width.values())) == {frozenset(of_width[1])}


def normalise(x: Tensor, z: Tensor) -> None:
    layernorm_gated._layer_norm_fwd(
        x.reshape(-1, K), tensor(K, dtype=BF16), None, 1e-6, z=z.reshape(-1, K), is_rms_norm=True
    )


@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_the_gated_norm_of_a_block_differs_in_the_number_of_rows_alone(
    H: int, HV: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic mode fixes the rows of a program; their number only bounds them."""
    monkeypatch.setattr(layernorm_gated, "is_batch_invariant_mode_enabled", lambda: True)
    monkeypatch.setattr(layernorm_gated, "is_arch_support_pdl", lambda: True)

    def norms(launches: list[Launch]) -> set[Key]:
        found = {launch.compiled.runtime for launch in launches if "layer_norm" in launch.kernel}
        launches.clear()
        return {tuple(each for each in key if each[0] != "M") for key in found}

    with recorded(monkeypatch) as launches:
        monkeypatch.setattr(layernorm_gated, "device_context", lambda _: compiled_nothing())
        for bs in BATCHES:
            normalise(decode(bs, H, HV, FP32), tensor(bs, HV, K, dtype=BF16))
        [expected] = norms(launches)
        for bs, width in itertools.product(BATCHES, WIDTHS):
            normalise(verify(bs, width, H, HV, FP32, 1), tensor(bs * width, HV, K, dtype=BF16))
        assert norms(launches) == {expected}
        normalise(tensor(2 * HV * K + 4, dtype=BF16)[4:].view(2, HV, K), tensor(2, HV, K, dtype=BF16))  # planted
        assert norms(launches) != {expected}


@contextmanager
def compiled_nothing() -> Iterator[None]:
    yield
