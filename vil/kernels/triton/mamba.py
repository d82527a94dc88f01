"""Mamba's selective recurrence, token by token, in Triton; ``diagonal.py`` scans with it.

Per channel and state j, with delta = softplus(dt + bias) and a_j = exp(delta A_j):

    forward    s_j <- a_j s_j + delta x k_j,   y = sum_j q_j s_j + D x
    backward   G_j <- G_j + dy q_j, then with s_j the state before the token and r = sum_j k_j G_j
               f_j = a_j G_j s_j,   dA_j += delta f_j,   ddelta = sum_j A_j f_j + x r
               dx = delta r + D dy,   ddt = ddelta sigmoid(dt + bias)
               dk_j = sum over channels of delta x G_j
               dq_j = sum over channels of dy s_j, s_j after the token
               G_j <- a_j G_j

Rates are A / ln 2, so that an exponential is one instruction. One exponential per token, channel
and state bounds the speed.
"""

import triton
import triton.language as tl


@triton.jit
def softplus(v):
    """Return log(1 + exp(v)), with a relative error of 1e-7 even for small results.

    log(1 + u) = 2 artanh(u / (2 + u)) by its series: a GPU's logarithm instruction has an absolute
    error, which would be visible in small steps.
    """
    u = tl.exp(-tl.abs(v))
    t = u / (2.0 + u)
    s = t * t
    series = 1.0 / 13.0
    series = series * s + 1.0 / 11.0
    series = series * s + 1.0 / 9.0
    series = series * s + 1.0 / 7.0
    series = series * s + 1.0 / 5.0
    series = series * s + 1.0 / 3.0
    return tl.maximum(v, 0.0) + 2.0 * t * (series * s + 1.0)


@triton.jit
def sigmoid(v):
    """Return 1 / (1 + exp(-v)), the derivative of ``softplus``."""
    u = tl.exp(-tl.abs(v))
    return tl.where(v < 0.0, u, 1.0) / (1.0 + u)


@triton.jit
def _decay(exponent, FAST: tl.constexpr):
    """Return 2^exponent; with FAST, subnormal results are zero."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(exponent)


@triton.jit
def advance(state, x, delta, k, rates, M: tl.constexpr, FAST: tl.constexpr):
    """Return the tuple of M states after a token."""
    after, write = (), delta * x
    for j in tl.static_range(M):
        after += (tl.fma(_decay(delta * rates[j], FAST), state[j], write * k[j]),)
    return after


@triton.jit
def apply_decay(weights, delta, rates, M: tl.constexpr, FAST: tl.constexpr):
    """Return weights times the decay of the states at a token."""
    after = ()
    for j in tl.static_range(M):
        after += (_decay(delta * rates[j], FAST) * weights[j],)
    return after


@triton.jit
def advance_backward(
    grad, drates, state, x, delta, k, q, dy, rates,
    SCALE: tl.constexpr, M: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Backpropagate through one token.

    Args:
        grad: Gradient of the state after the token, without the contribution of this token's y.
        drates: Gradient of A so far.
        state: State before the token.
        x: Value of the token.
        delta: Step size of the token.
        k: Key of the token.
        q: Query of the token.
        dy: Gradient of y.
        rates: A / ln 2.
        SCALE: Factor of the terms of dk and dq.
        M: State size.
        FAST: Whether to use PTX.

    Returns:
        Gradients of the state before the token and of A, sum_j k_j G_j, ddelta, and the terms of dk
        and dq per channel.
    """
    before, after, dk, dq = (), (), (), ()
    recalled, slope = tl.zeros_like(x), tl.zeros_like(x)
    write = delta * x
    scaled_write, scaled_dy = SCALE * write, SCALE * dy
    for j in tl.static_range(M):
        g = grad[j] + dy * q[j]
        decay = _decay(delta * rates[j], FAST)
        dq += (scaled_dy * (decay * state[j] + write * k[j]),)
        dk += (scaled_write * g,)
        recalled += k[j] * g
        decayed = decay * g
        flow = decayed * state[j]
        slope += rates[j] * flow
        before += (decayed,)
        after += (drates[j] + delta * flow,)
    return before, after, recalled, 0.6931471805599453 * slope + x * recalled, dk, dq
