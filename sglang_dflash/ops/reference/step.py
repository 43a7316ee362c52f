"""Definitions around the two forwards: the block, its acceptance, copies, and a draft window's table."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Block(NamedTuple):
    """The block that the drafter fills and the target verifies.

    Attributes:
        tokens: int64 [bs, w], the anchor (last step's bonus token), then mask tokens.
        positions: int64 [bs * w], absolute positions ``seq_len + j``.
        slots: int64 [bs * w], KV slots of those positions.
        state_slots: [bs], slots of the requests' recurrent states, or None.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    state_slots: Tensor | None


class Accepted(NamedTuple):
    """The commit of one verified block.

    Attributes:
        out_tokens: int64 [bs, w]; the first ``accept_lens[b]`` entries of row b are the new tokens.
        counts: int32 [1, bs], accepted drafts plus the bonus token, 1..w. With an interval int32 [2, bs]: row 1 counts
            the new tokens up to its last multiple that the committed length reaches, or is 0.
        ends: int32, ``counts`` minus 1.
        bonus: int64 [bs], the last new token: the next block's anchor.
        new_seq_lens: int64 [bs], committed length after the step; the bonus token has no KV yet.
    """

    out_tokens: Tensor
    counts: Tensor
    ends: Tensor
    bonus: Tensor
    new_seq_lens: Tensor

    @property
    def accept_lens(self) -> Tensor:
        return self.counts[0]


def prepare_block(
    bonus: Tensor, seq_lens: Tensor, req_pool_indices: Tensor, req_to_token: Tensor, *, width: int, mask_token_id: int,
    state_table: Tensor | None = None,
) -> Block:  # fmt: skip
    """Lay out the next block of every request.

    Positions past the table get slot 0, SGLang's write-only padding slot.

    Args:
        bonus: int64 [bs], anchors.
        seq_lens: int [bs], committed lengths: the anchors' positions.
        req_pool_indices: int [bs], rows of ``req_to_token``.
        req_to_token: int32 [rows, columns], KV slots.
        state_table: [rows], slot of each request's recurrent state.
    """
    offsets = torch.arange(width, device=bonus.device)
    tokens = torch.where(offsets == 0, bonus[:, None], mask_token_id)
    positions = seq_lens.long()[:, None] + offsets
    columns = req_to_token.shape[1]
    rows = req_pool_indices.long()
    slots = req_to_token[rows[:, None], positions.clamp(max=columns - 1)].long()
    slots = torch.where(positions < columns, slots, 0)
    return Block(tokens, positions.flatten(), slots.flatten(), None if state_table is None else state_table[rows])


def take_drafts(
    tokens: Tensor, drafts: Tensor, broken: Tensor, total: Tensor, margins: Tensor | None = None
) -> Tensor | None:
    """Copy the drafts into the block, out of memory that a later CUDA graph overwrites.

    Past the drafter's block its last draft is repeated. The margin is -inf there and where the drafter drafts the mask
    token, so that any copy replaces such a draft.

    Args:
        tokens: int64 [bs, w], the anchor and mask tokens, which are overwritten.
        drafts: int64 [bs, d - 1] with d <= w.
        broken: int64 [bs], non-finite positions; their sum is added to ``total``, [].
        margins: float32 [bs, d - 1], each draft's lead over the second best token.

    Returns:
        The block's margins, float32 [bs, w - 1]; None without ``margins``.
    """
    beyond = tokens.shape[1] - 1 - drafts.shape[1]
    if margins is not None:
        margins = margins.masked_fill(drafts == tokens[:, 1:2], -torch.inf)
    tokens[:, 1:] = torch.cat((drafts, drafts[:, -1:].expand(-1, beyond)), dim=1) if beyond else drafts
    total += broken.sum()
    return None if margins is None else F.pad(margins, (0, beyond), value=-torch.inf)


def accept_block(draft_tokens: Tensor, target_tokens: Tensor, seq_lens: Tensor, *, interval: int = 0) -> Accepted:
    """Commit the longest prefix of the drafts that the target chose itself, plus the target's next token.

    Draft j+1 is accepted while it equals ``target_tokens[j]``. The target's token at the first difference, or after the
    last draft, is the bonus. So every new token *is* the target's token, and ``out_tokens`` is ``target_tokens``.

    This is exact for sampled requests too. Let N_j be the noise of position j, independent of the other positions', and
    f(c, N_j) the target's draw after context c, with its adjusted distribution p(. | c). Position j is used only if the
    drafts before it are the tokens emitted, so each emitted token is f(tokens before, N_j), however the drafts are
    made. By induction the tokens before are functions of earlier noise alone, so N_j is independent of them, and the
    token has distribution p given them: plain decoding's. Draws and drafts after the first difference influence
    nothing. The text is the same for every block width, drafter and batch, and in plain decoding.

    A draft x that is made without N_j is kept with probability p(x), the maximum for a drafter that proposes one fixed
    token (Leviathan et al. 2023, section 2.3, with a point-mass proposal: min(1, p(x) / 1)). A draft that is drawn with
    N_j (:func:`~sglang_dflash.ops.reference.model.choose_candidate`) agrees more often where p is spread: both draws
    are the argmax of a score plus the same Gumbel noise per token.

    Args:
        draft_tokens: int64 [bs, w], the verified block; column 0 is the anchor.
        target_tokens: int64 [bs, w], the target's token after each block position: its argmax, or a draw.
        seq_lens: int [bs], committed lengths before the step.
        interval: tokens between boundaries; 0 without.
    """
    agree = (draft_tokens[:, 1:] == target_tokens[:, :-1]).int()
    accepted_drafts = agree.cumprod(dim=1).sum(dim=1)
    bonus = target_tokens.gather(1, accepted_drafts[:, None]).squeeze(1)
    new_seq_lens = seq_lens.long() + accepted_drafts + 1
    counts = (accepted_drafts + 1)[None]
    if interval:
        counts = torch.cat((counts, (new_seq_lens // interval * interval - seq_lens).clamp(min=0)[None]))
    counts = counts.int()
    return Accepted(target_tokens, counts, counts - 1, bonus, new_seq_lens)


def stage_block(
    hidden: Tensor, positions: Tensor, slots: Tensor, accept_lens: Tensor, staged_hidden: Tensor,
    staged_positions: Tensor, staged_slots: Tensor,
) -> None:  # fmt: skip
    """Copy a verified block to the memory from which the drafter's next forward injects it.

    Rejected positions get slot 0, SGLang's write-only padding slot.

    Args:
        hidden: [bs * w, K * H], the target's hidden states.
        positions, slots: int64 [bs * w].
        accept_lens: int [bs], accepted positions, anchor included.
        staged_hidden, staged_positions, staged_slots: [N, K * H] and int64 [N]; the first bs * w rows are written.
    """
    tokens = len(positions)
    blocks = slots.view(len(accept_lens), -1)
    accepted = torch.arange(blocks.shape[1], device=slots.device) < accept_lens[:, None]
    staged_hidden[:tokens] = hidden
    staged_positions[:tokens] = positions
    staged_slots[:tokens] = torch.where(accepted, blocks, 0).flatten()


def match_copies(
    history: Tensor, found: Tensor, rows: Tensor, seq_lens: Tensor, tokens: Tensor, last: Tensor, *, longest: int,
    bound: int,
) -> None:  # fmt: skip
    """Append tokens to the histories, and find the longest earlier occurrence of every request's newest tokens.

    Ties go to the newest. Matches are encoded as one integer, so a maximum over tiles finds the best, and later steps
    overwrite earlier ones.

    Args:
        history: int32 [R, C], the token at each position; negative where none can be copied. The last column receives
            positions past the table and is never read.
        found: int64 [R, 2]; column 0, below ``last * 2**36``, receives ``last * 2**36 + length * 2**31 + end``: the
            length of the match, 0 for none, and the position of its last token.
        rows: int [bs], distinct rows of both.
        seq_lens: int [bs], position of the newest token so far.
        tokens: int64 [bs, w], the tokens after it.
        last: int [bs], position of the newest accepted token; at most ``bound``.
        longest: length up to which matches count, at most 31.
    """
    rows, last = rows.long(), last.long()[:, None]
    positions = seq_lens.long()[:, None] + torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    history[rows[:, None], positions.clamp_(max=history.shape[1] - 1)] = tokens.int()
    columns = min(bound, history.shape[1] - 1) + 1
    known = torch.nn.functional.pad(history[rows, :columns], (longest - 1, 0), value=-1)
    newest = known.gather(1, last + torch.arange(longest, device=last.device))
    differs = (known.unfold(1, longest, 1) != newest[:, None]) | (newest < 0)[:, None]
    # the difference nearest to the end bounds the match
    nearness = torch.arange(1, longest + 1, dtype=torch.int8, device=last.device)
    lengths = longest - (differs * nearness).amax(2).long()
    ends = torch.arange(columns, device=last.device)
    keys = torch.where((ends < last) & (lengths > 0), (lengths << 31) + ends, 0)
    found[rows, 0] = (last[:, 0] << 36) + keys.amax(1)


def take_copies(
    tokens: Tensor, margins: Tensor, history: Tensor, found: Tensor, rows: Tensor, last: Tensor, *, least: int,
    margin: float,
) -> None:  # fmt: skip
    """Replace drafts with copies where the drafter is unsure of the first draft that differs from its copy.

    A copy is the text after the match; past the newest token it repeats itself.

    Args:
        tokens: int64 [bs, w], the block, replaced in place.
        margins: float32 [bs, w - 1], each draft's logit lead; negative or NaN where nothing was drafted.
        history, found: as left by :func:`match_copies`. Column 1 of ``found`` receives the block position of the first
            copied token, 0 if no copy is taken.
        rows, last: as in :func:`match_copies`.
        least: length of the shortest match that is copied.
        margin: logit lead from which on a draft is kept.
    """
    rows, drafts = rows.long(), tokens[:, 1:]
    key = found[rows, 0][:, None]
    length, end = (key >> 31) & 31, key & 0x7FFFFFFF
    ahead = torch.arange(drafts.shape[1], device=tokens.device) % (last.long()[:, None] - end).clamp_(min=1)
    copies = history[rows[:, None], (end + 1 + ahead).clamp_(max=history.shape[1] - 1)].long()
    copies = torch.where((copies >= 0) & (length >= least), copies, drafts)
    differs = copies != drafts
    first = differs.int().argmax(1, keepdim=True)
    taken = differs.gather(1, first) & ~(margins.gather(1, first) >= margin)
    found[rows, 1] = torch.where(taken, first + 1, 0).squeeze(1)
    drafts.copy_(torch.where(taken, copies, drafts))


def view_rings(
    table: Tensor, oldest: Tensor, rows: Tensor, seq_lens: Tensor, positions: Tensor, *, first: int, size: int,
    window: int, page: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the slots of every request's ring from its oldest visible token on, and look up the block's slots.

    Position ``p`` of row ``r`` has the slot ``first + (r - 1) * size + p % size``.

    Args:
        table: int32 [R, C] with C >= ``size``; the first ``size`` columns of ``rows`` are written.
        oldest: int64 [R], oldest position in each ring.
        rows: int64 [bs], distinct, from 1; bs > 0.
        seq_lens: int [bs], committed lengths.
        positions: int64 [bs * w].
        window: tokens before the block that it sees; their first position is rounded down to a multiple of ``page``.

    Returns:
        lengths, int64 [bs], committed tokens from the oldest visible one on; slots, int64 [bs * w].
    """
    reach = seq_lens.long() - window
    start = torch.maximum(oldest[rows], reach - reach % page)
    ring = (first + (rows - 1) * size)[:, None]
    table[rows, :size] = (ring + (start[:, None] + torch.arange(size, device=rows.device)) % size).int()
    return seq_lens - start, (ring + positions.view(len(rows), -1) % size).flatten()
