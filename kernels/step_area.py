"""Step sizes divided by an area: what a patch wrote, written by the tokens that it was split into.

At another grid than the trained one there are ``area`` tokens for each that was trained, which together
should write and forget what it did. The scans as they are do that with other parameters:

    Longhorn  eps / area = 1 / (area (1 + |k|^2 + exp(-v))), with v = dt + bias, stands before products of
              a key with a key or of a key with a query: keys and queries times area^(-1/2) do the same,
              if |k|^2 in eps stays that of the key as it was: area times what the scan sees (``key_norm``).
              With fewer tokens than were trained, eps / area could exceed 1 / |k|^2, beyond which the
              recurrence grows: there beta is divided in place of eps, which is the same without that
              factor.
    exact     forgets 1 - eps |k|^2 = 1 / (1 + u) along a key, u = beta |k|^2, so that m tokens together should
              forget (1 + u)^(-1/m) each. With ``key_norm`` sqrt(m) in place of m it is
              1 - (u / m) / (1 + u / sqrt(m)), whose m-th power is within 0.09 of 1 / (1 + u) for any u up to 100
              and m up to 9. Division by m itself would leave a third where nine tenths are to be forgotten.
    Mamba     dt / area stands beside A and beside k: A / area and k / area.

m equal tokens behind one another then do what one did: exactly in what Mamba forgets, and in all else to
first order in the step. In a diagonal state each k_j^2 is small, and no step meets the exact relation for all j.
"""

from torch import Tensor


class Steps:
    """The parameters that divide every step size by ``area``, and the way back for their gradients."""

    def __init__(
        self,
        x_proj_weight: Tensor,
        dt_weight: Tensor,
        A: Tensor | None,
        recurrence: str,
        area: float,
    ) -> None:
        """Make them.

        Args:
            x_proj_weight: Rows for step sizes, keys and queries, (2, R + 2 M, E).
            dt_weight: (2, E, R).
            A: Decay rates of Mamba, (2, E, M), else None.
            recurrence: One of ``reference.RECURRENCES``.
            area: What step sizes are divided by, positive; 1 leaves everything as it is.
        """
        self.x_proj_weight, self.A, self.area = x_proj_weight, A, area
        self.key_norm = self.key_norm_of(recurrence, area)
        if area == 1.0:
            return
        rank = dt_weight.shape[-1]
        states = (x_proj_weight.shape[1] - rank) // 2
        k, q = (1 / area, 1.0) if recurrence == "mamba" else (area**-0.5, area**-0.5)
        self.rows = x_proj_weight.new_ones(
            x_proj_weight.shape[1]
        )  # filled where it is: no copy waits
        self.rows[rank : rank + states] = k
        self.rows[rank + states :] = q
        self.x_proj_weight = x_proj_weight * self.rows[:, None]
        if recurrence == "mamba":
            self.A = A / area

    @staticmethod
    def key_norm_of(recurrence: str, area: float) -> float:
        """Return what |k|^2 is multiplied by in a step size."""
        if recurrence == "mamba":
            return 1.0
        return max(area, 1.0) ** (0.5 if recurrence == "longhorn_exact" else 1.0)

    def undo_x_proj(self, gradient: Tensor) -> Tensor:
        """Return the gradient of x_proj_weight as given, from that of the one made of it."""
        return gradient if self.area == 1.0 else gradient * self.rows[:, None]

    def undo_A(self, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of A as given, from that of the one made of it."""
        return gradient if self.area == 1.0 or gradient is None else gradient / self.area
