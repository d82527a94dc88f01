"""What programs set before they load torch, which takes seconds. They import this module first.

Waiting threads sleep. OpenMP reads the policy when torch is loaded, and by default its threads spin when they wait: on
a core that another process uses, the others wait for that thread, and training takes several times as long
(docs/speed.md). A setting of the user wins: OMP_WAIT_POLICY is kept, and OpenMP prefers GOMP_SPINCOUNT.

Ctrl-C ends the program at once, without a traceback; ``run_script`` handles it from then on.
"""

import os
import signal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
