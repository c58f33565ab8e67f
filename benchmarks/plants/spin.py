"""Another program that keeps a core busy for the share `PLANTED_SPIN` of the time."""

import os
import time

if __name__ == "__main__":
    share, parent = float(os.environ["PLANTED_SPIN"]), os.getppid()
    while os.getppid() == parent:  # not longer than the benchmark, which may be killed
        end_s = time.perf_counter() + share / 10
        while time.perf_counter() < end_s:
            pass
        time.sleep((1 - share) / 10)
