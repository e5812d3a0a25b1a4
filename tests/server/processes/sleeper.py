"""A program that sleeps: `python -m tests.server.processes.sleeper SECONDS`."""

import sys
import time

if __name__ == "__main__":
    time.sleep(float(sys.argv[1]))
