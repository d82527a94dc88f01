"""Let waiting threads sleep. Programs import this module first, because OpenMP reads the policy when torch is loaded.

OpenMP's threads spin for a while when they wait. On a core that another process uses, the others wait for that thread,
and training takes several times as long (docs/speed.md). A setting of the user wins: OMP_WAIT_POLICY is kept, and
OpenMP prefers GOMP_SPINCOUNT.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
