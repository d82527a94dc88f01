"""The diagonal Longhorn recurrence, token by token, in Triton; ``diagonal.py`` scans with it.

Per channel and state j, with eps = 1 / (1 + n |k|^2 + exp(-(dt + bias))), n = kappa_scale:

    forward    s_j <- s_j + eps k_j (x - k_j s_j),   y = sum_j q_j s_j + D x
    backward   G_j <- G_j + dy q_j, then with s_j the state before the token and h_j = x - k_j s_j
               dx = eps sum_j k_j G_j + D dy,   deps = sum_j k_j G_j h_j
               dk_j = sum over channels of 2 eps G_j h_j - eps x G_j - 2 n k_j eps^2 deps
               dq_j = sum over channels of dy s_j, s_j after the token
               ddt = deps eps^2 exp(-(dt + bias)),   G_j <- G_j - eps k_j (k_j G_j)
"""

import triton
import triton.language as tl


@triton.jit
def advance(state, x, eps, k, M: tl.constexpr):
    """Return the tuple of M states after a token."""
    after = ()
    for j in tl.static_range(M):
        after += (state[j] + eps * k[j] * (x - k[j] * state[j]),)
    return after


@triton.jit
def apply_decay(weights, eps, k, M: tl.constexpr):
    """Return weights times the decay of the states at a token."""
    after = ()
    for j in tl.static_range(M):
        after += (weights[j] - eps * k[j] * (k[j] * weights[j]),)
    return after


@triton.jit
def advance_backward(grad, state, x, eps, k, q, dy, kappa_scale, SCALE: tl.constexpr, M: tl.constexpr):
    """Backpropagate through one token.

    Args:
        grad: Gradient of the state after the token, without the contribution of this token's y.
        state: State before the token.
        x: Value of the token.
        eps: Step size of the token.
        k: Key of the token.
        q: Query of the token.
        dy: Gradient of y.
        kappa_scale: Factor of |k|^2 in eps.
        SCALE: Factor of the terms of dk and dq.
        M: State size.

    Returns:
        Gradient of the state before the token, sum_j k_j G_j, deps, and the terms of dk and dq per
        channel.
    """
    before, dk, dq, scaled = (), (), (), ()
    recalled, deps = tl.zeros_like(x), tl.zeros_like(x)
    scaled_eps, scaled_dy = SCALE * eps, SCALE * dy
    for j in tl.static_range(M):
        g = grad[j] + dy * q[j]
        error, write, kg = x - k[j] * state[j], eps * k[j], k[j] * g
        dq += (scaled_dy * (state[j] + write * error),)
        before += (g - write * kg,)
        recalled += kg
        deps += kg * error
        # dk_j without its term in deps, which only the last state completes
        scaled += ((scaled_eps * g) * (2.0 * error - x),)
    slope = 2.0 * kappa_scale * eps * scaled_eps * deps
    for j in tl.static_range(M):
        dk += (scaled[j] - slope * k[j],)
    return before, recalled, deps, dk, dq
