"""How torch's threads wait for each other on a CPU; to be imported before torch.

By default a thread that waits spins for milliseconds. Where something else runs too, it spins in place of the
thread it waits for: two trainings side by side on two cores then take a hundred times as long as with threads
that soon go to sleep, and one alone is no slower for it.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # of GNU's OpenMP, which torch is built with on Linux
