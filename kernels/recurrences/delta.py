"""The gated delta rule (Yang et al. 2025, equation 10): a state that each position decays, corrects and reads.

Letters: B batch, H heads, N positions, D width of q and k, Dv width of v, n chunks of L positions, Z = B * H.

A chunk is computed by products (Yang et al. 2024, section 3). Let S be the state before it, c_ij the decay from
position j to i, a_i that from S to i, and b_j that from j to the chunk's end. They are 0 if a text begins between.
Position i adds the outer product of k_i and

    u_i = β_i (v_i - a_i Sᵀ k_i - Σ_j<i c_ij (k_i · k_j) u_j),

a triangular system. Then out_i = a_i Sᵀ q_i + Σ_j≤i c_ij (q_i · k_j) u_j, and the state after it is a_L S + Σ_j b_j k_j
u_jᵀ. Only states between chunks are sequential. They are stored for the backward pass, which computes the rest again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longstride.kernels.backends import accumulator_dtype, empty_like_rows, triton
from longstride.kernels.errors import ConfigError

BACKENDS = ("auto", "torch", "triton")
CHUNK = 64  # positions
AT_ONCE = 32  # chunks of all heads, so that the intermediate results stay in the processor's cache


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None = None,
    begins: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute S_t = e^g_t (I - β_t k_t k_tᵀ) S_t-1 + β_t k_t v_tᵀ and out_t = S_tᵀ q_t, with memory linear in N.

    Without ``beta`` it is S_t = e^g_t S_t-1 + k_t v_tᵀ (Dao & Gu 2024, Mamba-2), and without ``log_decay`` the plain
    delta rule (Yang et al. 2024). The result is bounded if each k has length 1.

    Args:
        q, k: (B, H, N, D) in fp16, bf16, fp32 or fp64. Computed in fp32 (fp64 for fp64). The caller scales q.
        v: (B, H, N, Dv); Dv may differ from D.
        log_decay: g (B, H, N), finite and at most 0; None: no decay.
        beta: (B, H, N) in [0, 1], how far a position replaces what the state has at k; None: it adds to that.
        initial: the state before the first position, (B, H, D, Dv); None: 0.
        begins: (B, N) bool, True where a text begins: the state before it is 0; None: nowhere.
        backend: auto, torch or triton; auto takes triton on GPUs.

    Returns:
        out (B, H, N, Dv) in q's dtype, and the state after the last position (B, H, D, Dv) in fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes do not match.
        ConfigError: the backend is unknown.
    """
    _check_shapes(q, k, v, log_decay, beta, initial, begins)
    if backend not in BACKENDS:
        raise ConfigError.at("backend", backend, f"must be one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "triton" if q.is_cuda and triton.why_not(q, k, v) is None else "torch"
    elif backend == "triton" and (reason := triton.why_not(q, k, v)):
        raise ConfigError.at("backend", backend, f"cannot run: {reason}")
    inputs = (q, k, v, log_decay, beta, initial)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    out, final, _ = _delta_rule(*inputs, begins, keep, backend)
    return out, final


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, initial: Tensor | None, begins: Any
) -> None:
    batch, heads, positions, width = q.shape
    expected = {
        "k": (k, q.shape),
        "v": (v, (batch, heads, positions, v.shape[-1])),
        "log_decay": (log_decay, (batch, heads, positions)),
        "beta": (beta, (batch, heads, positions)),
        "initial": (initial, (batch, heads, width, v.shape[-1])),
        "begins": (begins, (batch, positions)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} must be {tuple(shape)}, as q is {tuple(q.shape)}")
    if not positions:
        raise ValueError("q has no positions: give at least one")


# Opaque operations for torch.compile and plans, as the number of chunks is that of a long loop.
@torch.library.custom_op("longstride::delta_rule", mutates_args=())
def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    begins: Tensor | None,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the final state, and with ``keep`` the states before all chunks, (n, Z, D, Dv)."""
    with torch.autocast(q.device.type, enabled=False):
        return _passes(backend)[0](q, k, v, log_decay, beta, initial, begins, keep)


@_delta_rule.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Any, beta: Any, initial: Any, begins: Any, keep: bool, _: str
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, positions, width = q.shape
    out = empty_like_rows(v, q.dtype)
    final = q.new_empty(batch, heads, width, v.shape[3], dtype=accumulator_dtype(q.dtype))
    count = -(-positions // min(CHUNK, positions)) if keep else 0
    return out, final, final.new_empty(count, batch * heads, width, v.shape[3])


@torch.library.custom_op("longstride::delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    begins: Tensor | None,
    final: Tensor,
    states: Tensor,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay, beta and initial, whether they are needed or not."""
    with torch.autocast(q.device.type, enabled=False):
        return _passes(backend)[1](grad_out, grad_final, q, k, v, log_decay, beta, begins, final, states)


@_delta_rule_backward.register_fake
def _(
    grad_out: Tensor, grad_final: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Any, beta: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    log_decay, beta = (q.new_empty(q.shape[:3]) if x is None else torch.empty_like(x) for x in (log_decay, beta))
    return empty_like_rows(q), empty_like_rows(k), empty_like_rows(v), log_decay, beta, torch.empty_like(grad_final)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, log_decay, beta, initial, begins, _, backend = inputs
    ctx.save_for_backward(q, k, v, log_decay, beta, begins, output[1], output[2])
    ctx.backend, ctx.initial_dtype = backend, None if initial is None else initial.dtype


def _differentiate(ctx: Any, grad_out: Tensor, grad_final: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, beta, begins, final, states = ctx.saved_tensors
    grads = _delta_rule_backward(grad_out, grad_final, q, k, v, log_decay, beta, begins, final, states, ctx.backend)
    dq, dk, dv, dg, dbeta, dinitial = grads
    return (
        dq,
        dk,
        dv,
        None if log_decay is None else dg,
        None if beta is None else dbeta,
        None if ctx.initial_dtype is None else dinitial.to(ctx.initial_dtype),
        None,
        None,
        None,
    )


_delta_rule.register_autograd(_differentiate, setup_context=_save)


class Chunks(NamedTuple):
    """The inputs of some chunks, and what follows from them alone; padded positions are 0."""

    q: Tensor  # (n, Z, L, D)
    k: Tensor
    v: Tensor  # (n, Z, L, Dv)
    beta: Tensor | None  # (n, Z, L, 1)
    decay: Tensor  # c (n, Z, L, L); 0 for j > i
    enter: Tensor  # a (n, Z, L, 1)
    leave: Tensor  # b (n, Z, L, 1)
    whole: Tensor  # a of the last position (n, Z, 1, 1)
    products: Tensor  # k_i · k_j (n, Z, L, L)
    reads: Tensor  # c_ij (q_i · k_j)
    inverse: Tensor  # of the triangular system, (n, Z, L, L); empty without β


def _split(x: Tensor, first: int, count: int, size: int) -> Tensor:
    """Return ``count`` chunks (n, Z, L, ·) of positions from ``first`` on of x (B, H, N, ·), padded by 0."""
    rows = x[:, :, first : first + count * size]
    if rows.shape[2] < count * size:
        rows = F.pad(rows, (0, 0, 0, count * size - rows.shape[2]))
    rows = rows.unflatten(2, (count, size)).movedim(2, 0)
    return rows.to(accumulator_dtype(x.dtype)).flatten(1, 2).contiguous()


def _join(into: Tensor, first: int, chunks: Tensor) -> None:
    """Write chunks (n, Z, L, ·) to the positions from ``first`` on of (B, H, N, ·)."""
    rows = chunks.unflatten(1, into.shape[:2]).movedim(0, 2).flatten(2, 3)
    into[:, :, first : first + rows.shape[2]] = rows[:, :, : into.shape[2] - first]


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    begins: Tensor | None,
    first: int,
    count: int,
    size: int,
) -> Chunks:
    """Compute ``count`` chunks of ``size`` positions from ``first`` on, as far as they do not depend on states."""
    heads = q.shape[1]
    wide = accumulator_dtype(q.dtype)
    q, k, v = (_split(x, first, count, size) for x in (q, k, v))
    if log_decay is None:
        total = q.new_zeros(count, q.shape[1], size, dtype=torch.float64)
    else:  # summed in fp64, as differences of large sums matter
        total = _split(log_decay[..., None].double(), first, count, size).squeeze(3).cumsum(2)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    exponents = torch.sub(total[..., :, None], total[..., None, :]).to(wide)
    enter, leave = total.to(wide), (total[..., -1:] - total).to(wide)
    if begins is None:
        exponents.masked_fill_(later, -torch.inf)
    else:
        text = _split(begins[:, None, :, None].expand(-1, heads, -1, -1).double(), first, count, size)
        text = text.squeeze(3).cumsum(2)
        exponents.masked_fill_(later | (text[..., :, None] != text[..., None, :]), -torch.inf)
        enter.masked_fill_(text > 0, -torch.inf)
        leave.masked_fill_(text != text[..., -1:], -torch.inf)
    decay, enter, leave = exponents.exp_(), enter.exp_()[..., None], leave.exp_()[..., None]
    products = k @ k.mT
    reads = (q @ k.mT).mul_(decay)
    inverse = products[:0]
    if beta is not None:
        beta = _split(beta[..., None].to(wide), first, count, size)
        identity = torch.eye(size, dtype=wide, device=q.device)
        system = (products * decay).mul_(beta)  # its diagonal counts as 1, and what is above it as 0
        inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    return Chunks(q, k, v, beta, decay, enter, leave, enter[..., -1:, :], products, reads, inverse)


def _slabs(q: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return the positions of a chunk, and the first chunk and number of chunks of each slab."""
    size = min(CHUNK, q.shape[2])
    chunks, at_once = -(-q.shape[2] // size), max(1, AT_ONCE * torch.get_num_threads() // (q.shape[0] * q.shape[1]))
    return size, [(first, min(at_once, chunks - first)) for first in range(0, chunks, at_once)]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial: Tensor | None,
    begins: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what ``_delta_rule`` returns."""
    (batch, heads, _, width), wide = q.shape, accumulator_dtype(q.dtype)
    shape = batch, heads, width, v.shape[3]
    state = q.new_zeros(shape, dtype=wide) if initial is None else initial.to(wide, copy=True)
    state, out = state.flatten(0, 1), empty_like_rows(v, q.dtype)
    size, slabs = _slabs(q)
    kept = state.new_empty(sum(count for _, count in slabs) if keep else 0, *state.shape)
    for first, count in slabs:
        x = _chunks(q, k, v, log_decay, beta, begins, first * size, count, size)
        states = kept[first : first + count] if keep else state.new_empty(count, *state.shape)
        entering, leaving = x.k * x.enter, (x.k * x.leave).mT
        if x.beta is None:
            written = x.v
        else:
            written, entering, values = torch.empty_like(x.v), entering.mul_(x.beta), x.v * x.beta
        for i in range(count):
            states[i] = state
            if x.beta is not None:
                corrected = torch.baddbmm(values[i], entering[i], state, alpha=-1)
                torch.bmm(x.inverse[i], corrected, out=written[i])
            state = torch.baddbmm(state * x.whole[i], leaving[i], written[i])
        rows = (x.q @ states).mul_(x.enter).flatten(0, 1)
        rows = rows.baddbmm_(x.reads.flatten(0, 1), written.flatten(0, 1))
        _join(out, first * size, rows.view_as(x.v))
    return out, state.view(shape).clone(), kept


def _backward(
    grad_out: Tensor,
    grad_final: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    begins: Tensor | None,
    final: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, log_decay, beta and initial."""
    dq, dk, dv = empty_like_rows(q), empty_like_rows(k), empty_like_rows(v)
    dg, dbeta = (q.new_empty(q.shape[:3]) if x is None else torch.empty_like(x) for x in (log_decay, beta))
    grad_state, end = grad_final.flatten(0, 1).to(final.dtype, copy=True), final.flatten(0, 1)[None]
    size, slabs = _slabs(q)
    for first, count in reversed(slabs):
        x = _chunks(q, k, v, log_decay, beta, begins, first * size, count, size)
        grad_rows = _split(grad_out, first * size, count, size)
        before = states[first : first + count]
        after = torch.cat([before[1:], end])
        end = before[:1]
        entering, leaving = x.k * x.enter, x.k * x.leave
        grad_written = x.reads.mT @ grad_rows
        grad_before = (x.q * x.enter).mT @ grad_rows
        written, grad_after = x.v, torch.empty_like(before)
        if x.beta is not None:
            corrected = x.v - entering @ before
            written = x.inverse @ (corrected * x.beta)
            grad_corrected = torch.empty_like(written)  # times β
            entering_beta = (entering * x.beta).mT
        for i in reversed(range(count)):
            grad_after[i] = grad_state
            grad_written[i].baddbmm_(leaving[i], grad_state)
            grad_state = torch.add(grad_before[i], grad_state * x.whole[i])
            if x.beta is not None:
                torch.bmm(x.inverse[i].mT, grad_written[i], out=grad_corrected[i])
                grad_state.baddbmm_(entering_beta[i], grad_corrected[i], alpha=-1)
        grad_reads = (grad_rows @ written.mT).mul_(x.decay)
        grad_q = (grad_rows @ before.mT).mul_(x.enter)
        grad_q += grad_reads @ x.k
        grad_k = (written @ grad_after.mT).mul_(x.leave)
        grad_k += grad_reads.mT @ x.q
        grad_v = grad_written
        if x.beta is not None:
            grad_v = grad_corrected * x.beta
            grad_k -= (grad_v @ before.mT).mul_(x.enter)
            pairs = (grad_corrected @ written.mT).mul_(x.decay).tril_(-1)
            grad_beta = (grad_corrected * corrected).sum(3) - (pairs * x.products).sum(3)
            pairs *= x.beta
            grad_k -= (pairs + pairs.mT) @ x.k
        if log_decay is not None:
            # A factor e^g stands beside each product of a later q, k or v and an earlier k or v.
            grad_total = (x.q * grad_q).sum(3) - (x.k * grad_k).sum(3)
            if x.beta is not None:
                grad_total += 2 * (x.beta.squeeze(3) * grad_beta - (x.v * grad_v).sum(3))
            grad_total[..., -1] += (grad_after * after).sum((2, 3))
            _join(dg[..., None], first * size, grad_total.flip(2).cumsum(2).flip(2)[..., None])
        for into, grad in ((dq, grad_q), (dk, grad_k), (dv, grad_v)):
            _join(into, first * size, grad)
        if x.beta is not None:
            _join(dbeta[..., None], first * size, grad_beta[..., None])
    return dq, dk, dv, dg, dbeta, grad_state.view(final.shape).clone()


def _passes(backend: str) -> tuple[Any, Any]:
    """Return the forward and the backward pass of a backend."""
    if backend == "torch":
        return _forward, _backward
    from longstride.kernels.backends.triton.delta import delta_backward, delta_forward

    return delta_forward, delta_backward
